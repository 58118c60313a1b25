"""A verdict is a value: admit, or deny with a reason that a person can act on."""

from typing import Any

from attrs import field, frozen

from webhook.core.reasons import Reason

# The API server cuts many warnings to 256 characters each, and drops those with control characters.
WARNING_LENGTH = 250


def plain(text: str, length: int = WARNING_LENGTH) -> str:
    """`text` as it survives a header line: printable, on one line, of bounded length."""
    if len(text) <= length and text.isprintable():
        return text
    cleaned = "".join(c if c.isprintable() else " " for c in text[: length + 1])
    return cleaned if len(cleaned) <= length else cleaned[: length - 1] + "…"


@frozen
class Admit:
    """Let it through, changed by `patch`."""

    patch: list[dict[str, Any]] = field(factory=list)
    warnings: tuple[str, ...] = ()
    audit: dict[str, str] = field(factory=dict)
    reason: Reason = Reason.ADMITTED


@frozen
class Deny:
    """Refuse: what was asked and found, and what to change."""

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
    """How the creation of a pod would end, and the pod as it would be stored."""

    verdict: Verdict
    pod: dict[str, Any]
    patch: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
