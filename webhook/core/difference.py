"""The JSON patch from one document to another, in time linear in the parts that the two do not share as objects.

`jsonpatch` searches for moves and minimal edits of lists. For a pod with hostile lists that takes minutes.
`docs/decisions/0005-own-json-patch.md`.
"""

from collections.abc import Iterator
from typing import Any

from jsonpointer import escape

Change = dict[str, Any]


def difference(old: Any, new: Any, path: str = "") -> Iterator[Change]:
    """The changes in the order to apply them. Lists are compared item by item, extended, or replaced."""
    if old is new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        yield from object_difference(old, new, path)
    elif isinstance(old, list) and isinstance(new, list) and starts_alike(old, new):
        for index, member in enumerate(new):
            if index < len(old):
                yield from difference(old[index], member, f"{path}/{index}")
            else:
                yield {"op": "add", "path": f"{path}/-", "value": member}
    elif old != new or type(old) is not type(new):
        yield {"op": "replace", "path": path, "value": new}


def object_difference(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[Change]:
    for key in old:
        if key not in new:
            yield {"op": "remove", "path": f"{path}/{escape(key)}"}
    for key, member in new.items():
        if key not in old:
            yield {"op": "add", "path": f"{path}/{escape(key)}", "value": member}
        elif old[key] is not member:
            yield from difference(old[key], member, f"{path}/{escape(key)}")


def starts_alike(old: list[Any], new: list[Any]) -> bool:
    """Whether to compare item by item: the lists have equal length, or the new one only appends."""
    return len(old) == len(new) or (len(old) < len(new) and new[: len(old)] == old)
