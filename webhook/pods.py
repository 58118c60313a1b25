"""Which pods exist. In a cluster the API server knows; embedded, the reviews that were seen are all there is."""

from typing import Protocol

from webhook.core.errors import GpuwardenError
from webhook.core.reservation import PodIdentity


class PodsUnavailableError(GpuwardenError):
    """Nobody who knows could be asked."""


class PodFacts(Protocol):
    """Can be asked whether there is such a pod."""

    async def contradicts(self, pod: PodIdentity) -> str | None:
        """What speaks against there being such a pod, in words; None if nothing does."""


class ReviewedPods:
    """The embedded source: a validated CREATE or a /finalize is a pod, a DELETE review ends it."""

    def __init__(self) -> None:
        self._uids: dict[tuple[str, str], str] = {}

    def created(self, pod: PodIdentity) -> None:
        if pod.name:
            self._uids[pod.namespace, pod.name] = pod.uid

    def uid_of(self, namespace: str, name: str) -> str:
        """Empty if no such pod was seen."""
        return self._uids.get((namespace, name), "")

    def ended(self, pod: PodIdentity) -> None:
        if self._uids.get((pod.namespace, pod.name)) == pod.uid:
            del self._uids[pod.namespace, pod.name]

    async def contradicts(self, pod: PodIdentity) -> str | None:
        known = self._uids.get((pod.namespace, pod.name), pod.uid)
        return None if known == pod.uid else f"pod {pod.namespace}/{pod.name} has another uid"
