"""Which pods exist. In a cluster the API server knows; in embedded mode the only source is the reviews."""

from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity, Reservation


class PodsUnavailableError(GpuwardenError):
    """The source of pods cannot be asked at this moment."""


class PodFacts(Protocol):
    """Answers whether a pod exists."""

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        """Why there is no such pod with that reservation, in words; None if there is."""

    async def uid_of(self, namespace: str, name: str) -> str:
        """Empty if there is no such pod."""


class PodSource(PodFacts, Protocol):
    """The source from which this process learns which pods exist."""

    trusts_reviews: bool
    """Whether reviews are the only source: a validated CREATE is a pod, a DELETE review ends it."""

    async def find(self, namespace: str, name: str) -> Pod | None:
        """The pod as it is now; None if there is none, or if reviews are the only source."""

    async def read(self, namespace: str, name: str) -> Raw | None:
        """The same with all its members."""

    def created(self, pod: PodIdentity) -> None:
        """A review or a /finalize request has shown that the pod exists."""

    def ended(self, pod: PodIdentity) -> None:
        """A review has shown that the pod has ended."""


class ReviewedPods:
    """The source in embedded mode: pods that reviews have shown."""

    trusts_reviews = True

    def __init__(self) -> None:
        self._uids: dict[tuple[str, str], str] = {}

    def created(self, pod: PodIdentity) -> None:
        if pod.name:
            self._uids[pod.namespace, pod.name] = pod.uid

    def ended(self, pod: PodIdentity) -> None:
        if self._uids.get((pod.namespace, pod.name)) == pod.uid:
            del self._uids[pod.namespace, pod.name]

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        """Compares only the uid: the ledger has seen the annotations, because the review that shows them records the
        uid."""
        known = self._uids.get((pod.namespace, pod.name), pod.uid)
        return None if known == pod.uid else f"pod {pod.namespace}/{pod.name} has another uid"

    async def uid_of(self, namespace: str, name: str) -> str:
        return self._uids.get((namespace, name), "")

    async def find(self, namespace: str, name: str) -> Pod | None:
        return None

    async def read(self, namespace: str, name: str) -> Raw | None:
        return None
