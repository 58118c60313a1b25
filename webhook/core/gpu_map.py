"""The placement map: the node and GPUs for each ordinal of a StatefulSet, one line each."""

import hashlib
import re
from collections.abc import Container, Mapping
from functools import lru_cache
from types import MappingProxyType

from attrs import frozen

from webhook.core.errors import InvalidPodError
from webhook.core.names import is_label_name

MAX_LINES = 10_000
MAX_MISTAKES = 50
# All pods of a StatefulSet have the same map, and each pod is reviewed several times.
CACHED_MAPS = 8

ORDINAL = re.compile(r"[0-9]{1,64}")
GPU_TOKEN = re.compile(r"[0-9]{1,20}|(GPU|MIG)-[A-Za-z0-9._/-]{1,128}")


@frozen(order=True)
class SetId:
    """Identifies a StatefulSet. A pod can name any uid in its owner references, so its namespace is part of it."""

    uid: str
    namespace: str

    @property
    def digest(self) -> str:
        """Identifies it where a name has few characters."""
        return hashlib.sha256(f"{self.namespace}/{self.uid}".encode()).hexdigest()[:32]


@frozen(order=True)
class MapOwner:
    """A StatefulSet whose map names a GPU. If several do, the GPU is set aside for the oldest."""

    created: str
    set: SetId


# The owner of each GPU, by the names of node and GPU in the maps.
Mapped = Mapping[str, Mapping[str, MapOwner]]


@frozen
class MapEntry:
    """The line of one ordinal: a logical or real node name, and GPUs by index, serial number or UUID."""

    node: str
    gpus: tuple[str, ...]


class MapLineError(Exception):
    """One invalid line of the map; `code` is the class of the mistake."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@lru_cache(CACHED_MAPS)
def parse_map(text: str) -> Mapping[int, MapEntry]:
    """The whole map. Raises `InvalidPodError` with every invalid line."""
    entries: dict[int, MapEntry] = {}
    mistakes: list[str] = []
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > MAX_LINES:
        raise InvalidPodError(f"the map has {len(lines)} lines; the maximum is {MAX_LINES}")
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
        raise InvalidPodError("empty-map: the map has no entry")
    return MappingProxyType(entries)


def parse_line(line: str, earlier: Container[int]) -> dict[int, MapEntry]:
    """The entry of a line. Blank lines and comments have none."""
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
        raise MapLineError("duplicate-ordinal", f"ordinal {int(ordinal)} is on an earlier line too")
    return {int(ordinal): MapEntry(node, parse_gpus(gpus))}


def parse_gpus(text: str) -> tuple[str, ...]:
    """The GPU list after the colon."""
    gpus = tuple(part.strip(" \t") for part in text.split(","))
    for gpu in gpus:
        if not GPU_TOKEN.fullmatch(gpu):
            raise MapLineError("gpu-list", f"{gpu[:40]!r} is neither an index, a serial number nor a UUID")
    if len(set(gpus)) < len(gpus):
        raise MapLineError("gpu-list", "a GPU is listed twice")
    return gpus
