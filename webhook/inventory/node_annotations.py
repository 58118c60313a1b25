"""What a Node says of its GPUs in an annotation: base64 of a JSON object, UUID to a list of labels; read only."""

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from webhook.core.device import Device, DeviceUuid, is_uuid
from webhook.core.errors import GpuwardenError

# What the API server takes in a GPUNode (manifests/gpunodes.yaml).
MAX_DEVICES = 4096
MAX_LABELS = 64
MAX_LABEL = 320
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


@frozen
class AnnotatedDevices:
    """What an annotation names: devices, and what is no UUID of a GPU and left out."""

    devices: tuple[Device, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def complaint(self) -> str:
        """What is left out, for people; empty if nothing is."""
        named = ", ".join(shown(one) for one in self.left_out[:MAX_MISTAKES])
        more = len(self.left_out) - MAX_MISTAKES
        return f"{named}{f' and {more} more' if more > 0 else ''}: no UUID of a GPU" if named else ""


class JsonMembers(Pairs):
    """A JSON object as it stands there: a name may stand there twice."""


def devices_in(text: str) -> AnnotatedDevices:
    """The devices that the annotation names. Raises UnreadableDevicesError where it has another form."""
    members = object_in(text)
    mistakes = list(mistakes_in(members))
    if mistakes:
        raise UnreadableDevicesError(*mistakes)
    devices = tuple(Device(DeviceUuid(uuid), labels=frozenset(labels)) for uuid, labels in members if is_uuid(uuid))
    return AnnotatedDevices(devices, tuple(uuid for uuid, _ in members if not is_uuid(uuid)))


def object_in(text: str) -> JsonMembers:
    try:
        content = base64.b64decode("".join(text.split()), validate=True)  # `base64` folds its lines
    except (binascii.Error, ValueError) as exc:
        raise UnreadableDevicesError("it is not base64") from exc
    try:
        members = json.loads(content, object_pairs_hook=JsonMembers)
    except (ValueError, RecursionError) as exc:
        raise UnreadableDevicesError("what is in the base64 is not JSON") from exc
    if not isinstance(members, JsonMembers):
        raise UnreadableDevicesError("the JSON is no object, GPU UUID to a list of labels")
    return members


def mistakes_in(members: JsonMembers) -> Iterator[str]:
    if len(members) > MAX_DEVICES:
        yield f"{len(members)} devices are more than {MAX_DEVICES}"
        return
    for uuid, times in Counter(uuid for uuid, _ in members).items():
        if times > 1:
            yield f"{shown(uuid)} stands there twice"
    for uuid, labels in members:
        yield from mistakes_in_labels(uuid, labels)


def mistakes_in_labels(uuid: str, labels: object) -> Iterator[str]:
    if isinstance(labels, JsonMembers) or not isinstance(labels, list):
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
