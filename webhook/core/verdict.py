"""The verdict of a review: admit, or deny with a reason, a message and a hint."""

from typing import Any

from attrs import field, frozen

from webhook.core.reasons import Reason

# The API server truncates many warnings to 256 characters each, and drops warnings with control characters.
WARNING_LENGTH = 250


def plain(text: str, length: int = WARNING_LENGTH) -> str:
    """The text in the form of a header value: printable, one line, of bounded length."""
    if len(text) <= length and text.isprintable():
        return text
    cleaned = "".join(c if c.isprintable() else " " for c in text[: length + 1])
    return cleaned if len(cleaned) <= length else cleaned[: length - 1] + "…"


@frozen
class Admit:
    """Admit the object, with `patch` applied."""

    patch: list[dict[str, Any]] = field(factory=list)
    warnings: tuple[str, ...] = ()
    audit: dict[str, str] = field(factory=dict)
    reason: Reason = Reason.ADMITTED


@frozen
class Deny:
    """Deny the object: the message says what was asked and what was found, the hint what to change."""

    reason: Reason
    message: str
    hint: str = ""
    causes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


Verdict = Admit | Deny


@frozen
class DryRunResult:
    """The verdict on the creation of a pod, and the pod as it would be stored."""

    verdict: Verdict
    pod: dict[str, Any]
    patch: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
