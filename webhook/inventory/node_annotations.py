"""What a Node says of its GPUs in an annotation: base64 of a JSON object, UUID to a list of labels; read only."""

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from webhook.core.device import Device, DeviceUuid
from webhook.core.errors import GpuwardenError

# What the API server takes in a GPUNode (manifests/gpunodes.yaml).
MAX_DEVICES = 4096
MAX_LABELS = 64
MAX_LABEL = 320
UUID = re.compile(r"[!-+\--~]{1,128}")
# Somebody has to read them.
MAX_MISTAKES = 10
MAX_SHOWN = 60

Pairs = list[tuple[str, Any]]


class UnreadableDevicesError(GpuwardenError):
    """The annotation cannot be read; every mistake is named."""

    def __init__(self, *mistakes: str) -> None:
        more = len(mistakes) - MAX_MISTAKES
        rest = (f"and {more} more",) if more > 0 else ()
        self.mistakes = mistakes[:MAX_MISTAKES] + rest
        super().__init__("; ".join(self.mistakes))


class Members(Pairs):
    """A JSON object as it stands there: a name may stand there twice."""


def devices_in(text: str) -> tuple[Device, ...]:
    """The devices that the annotation names, all or none."""
    members = object_in(text)
    mistakes = list(mistakes_in(members))
    if mistakes:
        raise UnreadableDevicesError(*mistakes)
    return tuple(Device(DeviceUuid(uuid), labels=frozenset(labels)) for uuid, labels in members)


def object_in(text: str) -> Members:
    try:
        content = base64.b64decode("".join(text.split()), validate=True)  # `base64` folds its lines
    except (binascii.Error, ValueError) as exc:
        raise UnreadableDevicesError("it is not base64") from exc
    try:
        members = json.loads(content, object_pairs_hook=Members)
    except (ValueError, RecursionError) as exc:
        raise UnreadableDevicesError("what is in the base64 is not JSON") from exc
    if not isinstance(members, Members):
        raise UnreadableDevicesError("the JSON is no object, GPU UUID to a list of labels")
    return members


def mistakes_in(members: Members) -> Iterator[str]:
    if len(members) > MAX_DEVICES:
        yield f"{len(members)} devices are more than {MAX_DEVICES}"
        return
    for uuid, times in Counter(uuid for uuid, _ in members).items():
        if times > 1:
            yield f"{shown(uuid)} stands there twice"
    for uuid, labels in members:
        if not UUID.fullmatch(uuid):
            yield f"{shown(uuid)} is no UUID: up to 128 visible ASCII characters without a comma"
        yield from mistakes_in_labels(uuid, labels)


def mistakes_in_labels(uuid: str, labels: object) -> Iterator[str]:
    if isinstance(labels, Members) or not isinstance(labels, list):
        yield f"{shown(uuid)}: its labels are no list"
        return
    if len(labels) > MAX_LABELS:
        yield f"{shown(uuid)}: {len(labels)} labels are more than {MAX_LABELS}"
        return
    for label in labels:
        if not isinstance(label, str):
            yield f"{shown(uuid)}: {shown(label)} is no text"
        elif not (0 < len(label) <= MAX_LABEL and label.isprintable()):
            yield f"{shown(uuid)}: label {shown(label)} is empty, longer than {MAX_LABEL} or not printable"


def shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
