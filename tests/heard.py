"""Events that nobody posts: a test looks at what was told."""

from webhook.core.reasons import Reason
from webhook.kube.events import Subject


class Heard:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Reason]] = []
        self.messages: list[str] = []

    def record(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None:
        self.told.append((subject.name, reason))
        self.messages.append(message)
