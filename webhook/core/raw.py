"""The type of objects that are not parsed yet."""

from typing import Any

# A JSON object as the API server or a manifest has it.
Raw = dict[str, Any]
