"""A recorder of Kubernetes Events that posts nothing."""

from webhook.core.reasons import Reason
from webhook.kube.events import Subject


class RecordedEvents:
    """Stores all Events, so that a test can check them."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, Reason]] = []
        self.messages: list[str] = []

    def record(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None:
        self.recorded.append((subject.name, reason))
        self.messages.append(message)
