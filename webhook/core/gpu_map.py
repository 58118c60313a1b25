"""The placement map: which ordinal of a StatefulSet gets which GPUs of which node, one line each."""

import re
from collections.abc import Container, Mapping
from functools import lru_cache
from types import MappingProxyType

from attrs import frozen

from webhook.core.errors import InvalidPodError
from webhook.core.names import is_label_name

MAX_LINES = 10_000
MAX_MISTAKES = 50
# All pods of a set have the same map, and each is reviewed several times.
MAPS_KEPT = 8

ORDINAL = re.compile(r"[0-9]{1,64}")
GPU_TOKEN = re.compile(r"[0-9]{1,20}|(GPU|MIG)-[A-Za-z0-9._/-]{1,128}")


@frozen(order=True)
class SetId:
    """Which StatefulSet. A pod may write any uid into its owner references; the namespace is its own."""

    uid: str
    namespace: str


@frozen(order=True)
class MapOwner:
    """A StatefulSet whose map names a GPU. Of several, the oldest keeps it."""

    created: str
    set: SetId


# By node as maps have it: GPUs as they call them, and who keeps each.
Mapped = Mapping[str, Mapping[str, MapOwner]]


@frozen
class MapEntry:
    """One ordinal's place: a logical or real node name, and GPUs by index, serial or UUID."""

    node: str
    gpus: tuple[str, ...]


class MapLineError(Exception):
    """One line of the map that cannot be read; `code` is the class of the mistake."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@lru_cache(MAPS_KEPT)
def parse_map(text: str) -> Mapping[int, MapEntry]:
    """The whole map, or `InvalidPodError` that names every bad line."""
    entries: dict[int, MapEntry] = {}
    mistakes: list[str] = []
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > MAX_LINES:
        raise InvalidPodError(f"the map has {len(lines)} lines, {MAX_LINES} are read")
    for number, line in enumerate(lines, start=1):
        try:
            entries |= parse_line(line.removesuffix("\r").strip(" \t"), entries)
        except MapLineError as mistake:
            mistakes.append(f"line {number}: {mistake.code}: {mistake}")
    if mistakes:
        rest = len(mistakes) - MAX_MISTAKES
        more = (f"and {rest} more lines",) if rest > 0 else ()
        raise InvalidPodError(*mistakes[:MAX_MISTAKES], *more)
    if not entries:
        raise InvalidPodError("empty-map: the map names no ordinal")
    return MappingProxyType(entries)


def parse_line(line: str, earlier: Container[int]) -> dict[int, MapEntry]:
    """The line's entry, of which blank lines and comments have none."""
    if not line or line.startswith("#"):
        return {}
    left, equals, right = line.partition("=")
    if not equals:
        raise MapLineError("syntax", "no '=' after the ordinal")
    ordinal = left.strip(" \t")
    if not ORDINAL.fullmatch(ordinal) or int(ordinal) > 2**31 - 1:
        raise MapLineError("ordinal", f"{ordinal[:40]!r} is not an ordinal")
    node, colon, gpus = right.partition(":")
    if not colon:
        raise MapLineError("syntax", "no ':' after the node")
    node = node.strip(" \t")
    if not is_label_name(node):
        raise MapLineError("node", f"{node[:70]!r} is not a node name")
    if int(ordinal) in earlier:
        raise MapLineError("duplicate-ordinal", f"ordinal {int(ordinal)} stands on an earlier line too")
    return {int(ordinal): MapEntry(node, parse_gpus(gpus))}


def parse_gpus(text: str) -> tuple[str, ...]:
    """The GPU list behind the colon."""
    gpus = tuple(part.strip(" \t") for part in text.split(","))
    for gpu in gpus:
        if not GPU_TOKEN.fullmatch(gpu):
            raise MapLineError("gpu-list", f"{gpu[:40]!r} is neither an index, a serial number nor a UUID")
    if len(set(gpus)) < len(gpus):
        raise MapLineError("gpu-list", "a GPU stands twice")
    return gpus
