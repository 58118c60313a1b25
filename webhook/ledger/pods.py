"""Which pods exist. In a cluster the API server knows; embedded, the reviews that were seen are all there is."""

from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity, Reservation


class PodsUnavailableError(GpuwardenError):
    """Nobody who knows could be asked."""


class PodFacts(Protocol):
    """Can be asked whether there is such a pod."""

    async def contradicts(self, pod: PodIdentity, held: Reservation) -> str | None:
        """What speaks against there being such a pod with that reservation, in words; None if nothing does."""

    async def uid_of(self, namespace: str, name: str) -> str:
        """Empty if there is no such pod."""


class PodSource(PodFacts, Protocol):
    """Where this process learns which pods exist."""

    believes_reviews: bool
    """Whether a review is all we shall ever hear: a validated CREATE is a pod, a DELETE review ends it."""

    async def find(self, namespace: str, name: str) -> Pod | None:
        """The pod as it is at this moment; None if there is none, or where reviews are all there is to know."""

    def created(self, pod: PodIdentity) -> None:
        """A review, or a /finalize, has shown the pod."""

    def ended(self, pod: PodIdentity) -> None:
        """A review has shown its end."""


class ReviewedPods:
    """The embedded source: what reviews have shown."""

    believes_reviews = True

    def __init__(self) -> None:
        self._uids: dict[tuple[str, str], str] = {}

    def created(self, pod: PodIdentity) -> None:
        if pod.name:
            self._uids[pod.namespace, pod.name] = pod.uid

    def ended(self, pod: PodIdentity) -> None:
        if self._uids.get((pod.namespace, pod.name)) == pod.uid:
            del self._uids[pod.namespace, pod.name]

    async def contradicts(self, pod: PodIdentity, held: Reservation) -> str | None:
        """What a pod carries was seen by the ledger: its uid is bound in the review that shows it."""
        known = self._uids.get((pod.namespace, pod.name), pod.uid)
        return None if known == pod.uid else f"pod {pod.namespace}/{pod.name} has another uid"

    async def uid_of(self, namespace: str, name: str) -> str:
        return self._uids.get((namespace, name), "")

    async def find(self, namespace: str, name: str) -> Pod | None:
        return None
