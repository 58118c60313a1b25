"""What is done in the API server to nodes and pods whose evidence has ended: a taint, an eviction."""

from collections.abc import Awaitable
from typing import Any

import msgspec
import structlog
from kubernetes.aio import client

from webhook.calls import LOST
from webhook.cluster import REQUEST_TIMEOUT
from webhook.continuous import MeasureError
from webhook.core import keys
from webhook.core.reservation import PodIdentity
from webhook.scheduler.api_pods import MERGE_PATCH, said_in

log = structlog.get_logger(__name__)

Raw = dict[str, Any]

GONE, CONFLICT = 404, 409


class ApiMeasures:
    """By the API server, and so within what its disruption budgets allow."""

    def __init__(self, api: client.ApiClient) -> None:
        self._core = client.CoreV1Api(api)

    async def taint(self, node: str, *, wanted: bool) -> None:
        """Taints are one list, so it is written under the version that was read."""
        ours = {"key": keys.EVIDENCE_LOST_TAINT, "effect": "NoSchedule"}
        found = await self._read(node)
        was = [] if found is None else found["spec"].get("taints") or []
        others = [one for one in was if (one["key"], one["effect"]) != (ours["key"], ours["effect"])]
        if found is None or (len(others) < len(was)) == wanted:
            return
        version = found["metadata"]["resourceVersion"]
        taints = [*others, *([ours] if wanted else [])]
        patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}
        await self._answered(
            self._core.patch_node_without_preload_content(
                node, patch, _content_type=MERGE_PATCH, _request_timeout=REQUEST_TIMEOUT
            )
        )
        log.info("taint put on" if wanted else "taint taken off", node=node, taint=keys.EVIDENCE_LOST_TAINT)

    async def _read(self, node: str) -> Raw | None:
        body = await self._answered(
            self._core.read_node_without_preload_content(node, _request_timeout=REQUEST_TIMEOUT), GONE
        )
        return None if body is None else msgspec.json.decode(body, type=Raw)

    async def _answered(self, request: Awaitable[Any], *fine: int) -> bytes | None:
        """What the API server says; None where it refuses in a way that is no mistake."""
        try:
            async with await request as response:
                status, body = response.status, await response.read()
        except LOST as exc:
            raise MeasureError("the API server cannot be reached") from exc
        if status in fine:
            return None
        if status >= 400:
            raise MeasureError(said_in(status, body))
        return bytes(body)

    async def evict(self, pod: PodIdentity) -> None:
        """Under the pod's uid: whoever has come by its name since is left alone."""
        body = client.V1Eviction(
            metadata=client.V1ObjectMeta(name=pod.name, namespace=pod.namespace),
            delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid=pod.uid)),
        )
        await self._answered(
            self._core.create_namespaced_pod_eviction_without_preload_content(
                pod.name, pod.namespace, body, _request_timeout=REQUEST_TIMEOUT
            ),
            GONE,
            CONFLICT,
        )
