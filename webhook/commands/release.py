"""`gpuwarden release`: ends the reservation of a pod that is gone, with the caller's rights.

The caller confirms that the pod's containers do not run any more. A policy allows writes to a GPUNode's status only to
users with the right to `manage reservations.gpuwarden.io`.
"""

import asyncio
import sys
from collections.abc import Sequence

from webhook.assembly.parts import times_of
from webhook.core.errors import GpuwardenError, LedgerError
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, Reservation
from webhook.kube.api_gpu_nodes import ApiGpuNodes
from webhook.kube.client import ApiClient, ApiException, connect
from webhook.kube.events import CLUSTER_NAMESPACE, EVENTS_PATH, REQUEST_TIMEOUT, QueuedEvent, Subject, event_of
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError
from webhook.kube.paths import GPU_NODES_PATH
from webhook.kube.requests import REQUEST_ERRORS, request_json
from webhook.kube.watch import WATCH_ERRORS, pages
from webhook.ledger.api_pods import ApiPods
from webhook.ledger.cluster import ClusterLedger
from webhook.ledger.orphans import gpus_of
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings


class NotReleasedError(GpuwardenError):
    """Nothing was released; the message says why."""


def run(settings: Settings, context: str | None, wanted: Sequence[str]) -> int:
    """Raises NotReleasedError."""
    for one in asyncio.run(released(settings, context, wanted)):
        sys.stdout.write(f"released: {text_of(one)}\n")
    return 0


async def released(settings: Settings, context: str | None, wanted: Sequence[str]) -> list[Reservation]:
    async with await connect(settings, context=context) as api:
        ledger = ClusterLedger(Fleet(), ApiGpuNodes(api), ApiPods(api), utc_now, times_of(settings))
        held = await held_in(api, ledger)
        chosen = [orphan_of(one, held) for one in wanted]
        for one in chosen:
            await release(api, ledger, one)
        return chosen


async def held_in(api: ApiClient, ledger: ClusterLedger) -> list[Reservation]:
    """The reservations in all GPUNodes. The ledger learns them too."""
    held: list[Reservation] = []
    try:
        async for page, _ in pages(api, GPU_NODES_PATH):
            for raw in page:
                try:
                    held += GpuNode.parse(raw).reservations.values()
                except UnreadableGpuNodeError:
                    continue
                ledger.learn(raw)
    except WATCH_ERRORS as exc:
        answer = f"answered {exc.status}" if isinstance(exc, ApiException) else "did not answer"
        raise NotReleasedError(f"GPUNodes cannot be listed: the API server {answer}") from exc
    return held


def orphan_of(wanted: str, held: Sequence[Reservation]) -> Reservation:
    """The orphaned reservation that has this id, this GPU, or this NAMESPACE/POD."""
    found = [one for one in held if wanted in (one.id, *one.uuids, f"{one.namespace}/{one.pod_name}")]
    orphans = [one for one in found if one.orphan is not None and one.phase is Phase.FINALIZED]
    if not found:
        raise NotReleasedError(f"there is no reservation for {wanted}")
    if not orphans:
        raise NotReleasedError(f"the pod of {text_of(found[0])} is not gone: delete the pod")
    if len(orphans) > 1:
        raise NotReleasedError(f"{wanted} matches several reservations: {', '.join(sorted(one.id for one in orphans))}")
    return orphans[0]


async def release(api: ApiClient, ledger: ClusterLedger, one: Reservation) -> None:
    try:
        is_released = await ledger.release_orphan(one)
    except LedgerError as exc:
        raise NotReleasedError(
            f"{text_of(one)}: the API server did not take the change; may you manage reservations.gpuwarden.io?"
        ) from exc
    if not is_released:
        raise NotReleasedError(f"{text_of(one)}: the reservation has changed, try again")
    text = f"{gpus_of(one)} of pod {one.namespace}/{one.pod_name} is free: an operator has released it"
    happening = QueuedEvent(Subject.of_node(one.node), Reason.ORPHAN_ENDED, text, is_warning=False, at=utc_now())
    try:
        status, _ = await request_json(
            api, "POST", EVENTS_PATH, {"namespace": CLUSTER_NAMESPACE}, event_of(happening), seconds=REQUEST_TIMEOUT
        )
    except REQUEST_ERRORS:
        status = 0
    if not 200 <= status < 300:
        sys.stderr.write("gpuwarden release: no Event could be written\n")


def text_of(one: Reservation) -> str:
    return f"reservation {one.id} of {one.namespace}/{one.pod_name} with {gpus_of(one)} on {one.node}"
