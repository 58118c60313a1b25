"""Objects that are not parsed yet."""

from typing import Any

from webhook.core.keys import MANAGED_BY, OURS

# A JSON object as the API server or a manifest has it.
Raw = dict[str, Any]


def is_ours(raw: Raw) -> bool:
    """Whether gpuwarden created the object, not a user by hand."""
    return (raw["metadata"].get("labels") or {}).get(MANAGED_BY) == OURS
