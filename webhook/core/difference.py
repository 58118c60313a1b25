"""The JSON patch that makes one document of another, in time linear in what was not shared between them.

`jsonpatch` looks for moves and the least edits of lists; over the lists of a pod made to hurt, that takes minutes.
`docs/decisions/0005-own-json-patch.md`.
"""

from collections.abc import Iterator
from typing import Any

from jsonpointer import escape

Change = dict[str, Any]


def difference(old: Any, new: Any, path: str = "") -> Iterator[Change]:
    """Changes in the order in which they apply. Lists are compared place by place, grown, or replaced."""
    if old is new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        yield from of_objects(old, new, path)
    elif isinstance(old, list) and isinstance(new, list) and starts_alike(old, new):
        for place, member in enumerate(new):
            if place < len(old):
                yield from difference(old[place], member, f"{path}/{place}")
            else:
                yield {"op": "add", "path": f"{path}/-", "value": member}
    elif old != new or type(old) is not type(new):
        yield {"op": "replace", "path": path, "value": new}


def of_objects(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[Change]:
    for key in old:
        if key not in new:
            yield {"op": "remove", "path": f"{path}/{escape(key)}"}
    for key, member in new.items():
        if key not in old:
            yield {"op": "add", "path": f"{path}/{escape(key)}", "value": member}
        elif old[key] is not member:
            yield from difference(old[key], member, f"{path}/{escape(key)}")


def starts_alike(old: list[Any], new: list[Any]) -> bool:
    """Place by place is worth while: as many members, or the old ones and more behind them."""
    return len(old) == len(new) or (len(old) < len(new) and new[: len(old)] == old)
