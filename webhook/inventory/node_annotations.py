"""Devices in a Node annotation: base64 of a JSON object from GPU UUID to a list of labels. Never written here."""

import base64
import binascii
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from attrs import frozen

from webhook.core.device import Device, DeviceUuid, is_uuid
from webhook.core.errors import GpuwardenError

# Limits of the GPUNode CRD (manifests/gpunodes.yaml).
MAX_DEVICES = 4096
MAX_LABELS = 64
MAX_LABEL = 320
# People have to read them.
MAX_MISTAKES = 10
MAX_SHOWN = 60

Pairs = list[tuple[str, Any]]


class UnreadableDevicesError(GpuwardenError):
    """The annotation cannot be parsed. The message names the mistakes."""

    def __init__(self, *mistakes: str) -> None:
        more = len(mistakes) - MAX_MISTAKES
        rest = (f"and {more} more",) if more > 0 else ()
        self.mistakes = mistakes[:MAX_MISTAKES] + rest
        super().__init__("; ".join(self.mistakes))


@frozen
class AnnotatedDevices:
    """The devices in an annotation, and the names that are not GPU UUIDs and are ignored."""

    devices: tuple[Device, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def ignored_message(self) -> str:
        """A message about what is ignored; empty if nothing is."""
        named = ", ".join(shown(one) for one in self.ignored[:MAX_MISTAKES])
        more = len(self.ignored) - MAX_MISTAKES
        return f"{named}{f' and {more} more' if more > 0 else ''}: not a GPU UUID" if named else ""


class JsonMembers(Pairs):
    """The members of a JSON object in order, including duplicate names."""


def devices_in(text: str) -> AnnotatedDevices:
    """The devices in the annotation. Raises UnreadableDevicesError."""
    members = object_in(text)
    mistakes = list(mistakes_in(members))
    if mistakes:
        raise UnreadableDevicesError(*mistakes)
    devices = tuple(Device(DeviceUuid(uuid), labels=frozenset(labels)) for uuid, labels in members if is_uuid(uuid))
    return AnnotatedDevices(devices, tuple(uuid for uuid, _ in members if not is_uuid(uuid)))


def object_in(text: str) -> JsonMembers:
    try:
        content = base64.b64decode("".join(text.split()), validate=True)  # the `base64` command wraps lines
    except (binascii.Error, ValueError) as exc:
        raise UnreadableDevicesError("it is not base64") from exc
    try:
        members = json.loads(content, object_pairs_hook=JsonMembers)
    except (ValueError, RecursionError) as exc:
        raise UnreadableDevicesError("the decoded content is not JSON") from exc
    if not isinstance(members, JsonMembers):
        raise UnreadableDevicesError("the JSON is not an object from GPU UUID to a list of labels")
    return members


def mistakes_in(members: JsonMembers) -> Iterator[str]:
    if len(members) > MAX_DEVICES:
        yield f"{len(members)} devices are more than {MAX_DEVICES}"
        return
    for uuid, times in Counter(uuid for uuid, _ in members).items():
        if times > 1:
            yield f"{shown(uuid)} is listed twice"
    for uuid, labels in members:
        yield from mistakes_in_labels(uuid, labels)


def mistakes_in_labels(uuid: str, labels: object) -> Iterator[str]:
    if isinstance(labels, JsonMembers) or not isinstance(labels, list):
        yield f"{shown(uuid)}: its labels are not a list"
        return
    if len(labels) > MAX_LABELS:
        yield f"{shown(uuid)}: {len(labels)} labels are more than {MAX_LABELS}"
        return
    for label in labels:
        if not isinstance(label, str):
            yield f"{shown(uuid)}: {shown(label)} is not a string"
        elif not (0 < len(label) <= MAX_LABEL and label.isprintable()):
            yield f"{shown(uuid)}: label {shown(label)} is empty, longer than {MAX_LABEL} or not printable"


def shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
