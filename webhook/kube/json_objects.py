"""Objects of the API server, read from its JSON, whatever somebody has had it store in them."""

import re
from typing import Any, Final

import msgspec

from webhook.core.raw import Raw

# What may be nested deeper than a reader without end can follow: of the kinds that we read, nothing else takes what it
# is given. An object's own, and nothing of ours. In a text the quotes of `"managedFields":` would be escaped.
MANAGED: Final = re.compile(rb'"managedFields":\[')
TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]')


def object_in(text: bytes) -> Raw:
    """Raises msgspec.DecodeError where it is none."""
    found: Raw = decoded(text, dict[str, Any])
    return found


def decoded(text: bytes, kind: Any) -> Any:
    """As msgspec decodes it, but neither nesting nor bytes that are not UTF-8 end a process: raises
    msgspec.DecodeError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        pass
    except UnicodeDecodeError as exc:
        raise msgspec.DecodeError(str(exc)) from exc
    try:
        return msgspec.json.decode(without_managed_fields(text), type=kind)
    except RecursionError as exc:
        raise msgspec.DecodeError("nested too deep") from exc
    except UnicodeDecodeError as exc:
        raise msgspec.DecodeError(str(exc)) from exc


def without_managed_fields(text: bytes) -> bytes:
    """The same text with nothing in these lists."""
    kept, done = [], 0
    while (found := MANAGED.search(text, done)) is not None:
        kept.append(text[done : found.end()])
        done = end_of_list(text, found.end())
    return b"".join((*kept, text[done:]))


def end_of_list(text: bytes, start: int) -> int:
    """Where the bracket is that closes the one before `start`."""
    depth = 1
    for token in TOKEN.finditer(text, start):
        depth += (token[0] in b"[{") - (token[0] in b"]}")
        if not depth:
            return token.start()
    raise msgspec.DecodeError("it ends in the middle")
