"""Handles the end of a pod in embedded mode, where reviews are the only source."""

import structlog

from webhook.admission.review_objects import NOT_ASKED
from webhook.core import keys
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity, ReservationId
from webhook.core.review import Review
from webhook.core.verdict import Verdict
from webhook.ledger import Ledger
from webhook.ledger.pods import PodSource
from webhook.scoring.hints import HintService

log = structlog.get_logger(__name__)


class PodEnding:
    """Releases the reservations of a deleted pod in embedded mode."""

    def __init__(self, ledger: Ledger, pods: PodSource, hinting: HintService | None) -> None:
        self._ledger = ledger
        self._pods = pods
        self._hinting = hinting

    async def release_gpus(self, review: Review) -> Verdict:
        """Releases the pod's GPUs in embedded mode. In a cluster only the pod watch ends pods."""
        if review.is_dry_run or review.subresource or not self._pods.trusts_reviews:
            return NOT_ASKED
        old = Pod.parse(review.raw_old or {})
        if self._hinting is not None:
            self._hinting.jobs.deleted(review.raw_old or {})
        name = old.meta.name or review.name
        uid = old.meta.uid or await self._pods.uid_of(review.namespace, name)
        pod = PodIdentity(review.namespace, name, uid)
        carried = ReservationId(old.annotations.get(keys.RESERVATION_ID.name) or "")
        for reservation_id in await self._release_all(pod, carried):
            self._pods.ended(pod)
            log.info("pod ended", reservation=reservation_id, namespace=pod.namespace, name=pod.name)
        return NOT_ASKED

    async def _release_all(self, pod: PodIdentity, carried: ReservationId) -> list[ReservationId]:
        """Releases all reservations of the pod's uid. If there are none, releases the one named in its annotation: the
        uid may never have been recorded."""
        freed = []
        while (held := self._ledger.of_pod(pod.uid) if pod.uid else None) is not None:
            if not await self._ledger.release(held.id, pod, node=held.node):
                break
            freed.append(held.id)
        if not freed and carried and await self._ledger.release(carried, pod):
            freed.append(carried)
        return freed
