"""Decodes JSON objects of the API server. Their content may come from any user."""

import re
from typing import Any, Final

import msgspec

from webhook.core.raw import Raw

# The only field that users can nest so deeply that decoding fails: other fields of the kinds we read have a schema.
# In a string, the quotes of `"managedFields":` would be escaped, so this matches only the field.
MANAGED: Final = re.compile(rb'"managedFields":\[')
TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]')


def object_in(text: bytes) -> Raw:
    """Raises msgspec.DecodeError if the text is not a JSON object."""
    found: Raw = decoded(text, dict[str, Any])
    return found


def decoded(text: bytes, kind: Any) -> Any:
    """Decodes like msgspec, but deep nesting and invalid UTF-8 raise msgspec.DecodeError, not RecursionError or
    UnicodeDecodeError."""
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
    """The text with all `managedFields` lists emptied."""
    kept, done = [], 0
    while (found := MANAGED.search(text, done)) is not None:
        kept.append(text[done : found.end()])
        done = end_of_list(text, found.end())
    return b"".join((*kept, text[done:]))


def end_of_list(text: bytes, start: int) -> int:
    """The index of the bracket that closes the list starting before `start`."""
    depth = 1
    for token in TOKEN.finditer(text, start):
        depth += (token[0] in b"[{") - (token[0] in b"]}")
        if not depth:
            return token.start()
    raise msgspec.DecodeError("truncated")


class StatusWire(msgspec.Struct, frozen=True):
    message: str = ""


def status_message(body: bytes, longest: int = 800) -> str:
    """The message of a Status with which the API server answers a request; empty if there is none."""
    try:
        status: StatusWire = decoded(body, StatusWire)
    except msgspec.DecodeError:
        return ""
    return status.message[:longest]
