"""Bindings that behave like the API server's, and lose answers on request."""

from tests.web.replica import Shared
from webhook.core.reservation import PodIdentity
from webhook.scheduler.extender import BindingLostError, BindingRefusedError


class FakeBindings:
    """Binds pods of `shared`, once each."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.asked: list[tuple[PodIdentity, str]] = []
        self.loses: str | None = None
        """`question` or `answer`: the message that gets lost."""
        self.refuses: str | None = None

    async def bind(self, pod: PodIdentity, node: str) -> None:
        self.asked.append((pod, node))
        if self.loses == "question":
            raise BindingLostError("the API server cannot be reached")
        if self.refuses is not None:
            raise BindingRefusedError(self.refuses)
        raw = self._shared.pods[pod.namespace, pod.name]
        if raw["metadata"]["uid"] != pod.uid:
            raise BindingRefusedError("Precondition failed: UID in precondition")
        if raw["spec"].get("nodeName"):
            raise BindingRefusedError(f"pod {pod.name} is already assigned to node {raw['spec']['nodeName']}")
        raw["spec"]["nodeName"] = node
        if self.loses == "answer":
            raise BindingLostError("the API server cannot be reached")
