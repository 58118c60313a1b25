"""Reads and writes ResourceSlices of gpuwarden's driver. A node is one pool."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from webhook.core.errors import GpuwardenError
from webhook.core.keys import MANAGED_BY, OURS
from webhook.core.names import MAX_SUBDOMAIN
from webhook.core.proof_claims import EVIDENCE_ENDED, EVIDENCE_ENDS
from webhook.core.proof_devices import DRIVER, LATEST_END, MAPPED, ProofDevice, ProofMode, digits_of_device, mapped_mode
from webhook.core.raw import Raw
from webhook.runtime.clock import LONG_AGO, is_plausible

API_VERSION = "resource.k8s.io/v1"
# The API server's limit for slices whose devices have taints.
MAX_DEVICES = 64
HASH, INDEX, COUNT, MODE = "hash", "index", "count", "mode"
# The conditions that `reconcile` writes into the status of a claim, and for which the scheduler waits.
CHALLENGED, CHALLENGE_FAILED = "gpuwarden.io/challenged", "gpuwarden.io/challenge-failed"
# The annotation of a node's first slice that asks `attest` for the answer to a new challenge.
CHALLENGE_AFTER = "gpuwarden.io/challenge-after"

Timestamp = Annotated[datetime, msgspec.Meta(tz=True)]


class UnreadableSliceError(GpuwardenError):
    """gpuwarden did not write the slice."""


class AttributeWire(msgspec.Struct, frozen=True):
    string: str = ""


class ProofTaintWire(msgspec.Struct, frozen=True, rename="camel"):
    key: str
    time_added: Timestamp | None = None


class ProofDeviceWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    attributes: dict[str, AttributeWire] = {}
    taints: list[ProofTaintWire] = []
    binding_conditions: list[str] = []


class PoolWire(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    generation: int = 0
    resource_slice_count: int = 1


class SpecWire(msgspec.Struct, frozen=True):
    driver: str
    pool: PoolWire
    devices: list[ProofDeviceWire] = []


class SliceWire(msgspec.Struct, frozen=True):
    spec: SpecWire


class ProofSlice(msgspec.Struct, frozen=True):
    """One slice as it is written. Of the object only what a write needs is kept: a cluster has thousands."""

    node: str
    generation: int
    devices: tuple[ProofDevice, ...]
    metadata: Raw
    digest: bytes
    # Of the hashes in the names of the devices.
    digits: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return str(self.metadata["name"])

    @property
    def annotations(self) -> Raw:
        return self.metadata.get("annotations") or {}

    def has_spec_of(self, raw: Raw) -> bool:
        return self.digest == digest_of(raw["spec"])

    def has_content_of(self, raw: Raw) -> bool:
        """The spec and the annotations of another."""
        return self.has_spec_of(raw) and self.annotations.items() >= (raw["metadata"].get("annotations") or {}).items()

    def replaced_by(self, raw: Raw) -> Raw:
        """The object with the spec and the annotations of another."""
        annotations = {**self.annotations, **(raw["metadata"].get("annotations") or {})}
        return {**raw, "metadata": {**self.metadata, **({"annotations": annotations} if annotations else {})}}


def digest_of(spec: Raw) -> bytes:
    return hashlib.sha256(msgspec.json.encode(spec, order="sorted")).digest()


def any_slice(raw: Raw) -> ProofSlice:
    """A slice of gpuwarden's driver, whoever has written it. One that cannot be parsed has no devices."""
    metadata, digest = raw["metadata"], digest_of(raw["spec"])
    try:
        spec = parsed(raw).spec
        devices = tuple(map(proof_device, spec.devices))
    except UnreadableSliceError:
        return ProofSlice(str(raw["spec"]["pool"]["name"]), 0, (), metadata, digest)
    digits = frozenset(digits_of_device(one.name) for one in devices)
    return ProofSlice(spec.pool.name, spec.pool.generation, devices, metadata, digest, digits)


def proof_devices_of(raw: Raw) -> tuple[ProofDevice, ...]:
    """The devices of a slice. Raises UnreadableSliceError."""
    return tuple(map(proof_device, parsed(raw).spec.devices))


def slice_count(raw: Raw) -> int:
    """The number of slices of the node. Raises UnreadableSliceError."""
    return parsed(raw).spec.pool.resource_slice_count


def close_ended(raw: Raw, now: datetime) -> list[str]:
    """Closes the devices that have ended, in place, and returns their names. Nothing else of the slice is changed, not
    even the form of a time. Raises UnreadableSliceError."""
    found = []
    for number, device in enumerate(proof_devices_of(raw)):
        if device.has_ended(now) and not device.is_closed:
            taints = raw["spec"]["devices"][number]["taints"]
            end = next(one.get("timeAdded") for one in taints if one["key"] == EVIDENCE_ENDS)
            taints.append(closing_taint(end))
            found.append(device.name)
    return found


def parsed(raw: Raw) -> SliceWire:
    try:
        wire = msgspec.convert(raw, SliceWire)
    except msgspec.ValidationError as exc:
        raise UnreadableSliceError(str(exc)) from exc
    if wire.spec.driver != DRIVER:
        raise UnreadableSliceError(f"a slice of the driver {wire.spec.driver}")
    return wire


def proof_device(wire: ProofDeviceWire) -> ProofDevice:
    uuid = next((one.string for name, one in wire.attributes.items() if name.endswith("/uuid")), "")
    hash = wire.attributes.get(HASH, AttributeWire()).string
    is_closed = any(one.key == EVIDENCE_ENDED for one in wire.taints)
    mode = wire.attributes.get(MODE, AttributeWire()).string
    kept_for = mode.removeprefix(MAPPED) if mode.startswith(MAPPED) else ""
    return ProofDevice(wire.name, uuid, hash, end_of(wire), is_closed, CHALLENGED in wire.binding_conditions, kept_for)


def end_of(wire: ProofDeviceWire) -> datetime | None:
    ends = [one.time_added for one in wire.taints if one.key == EVIDENCE_ENDS]
    if not ends:
        return None
    return min(one if one is not None and is_plausible(one) else LONG_AGO for one in ends)


def slices_of(
    node: str,
    devices: Sequence[ProofDevice],
    generation: int,
    gpu_driver: str,
    mode: ProofMode = ProofMode.NATIVE,
) -> list[Raw]:
    """The slices of a node, in order. Without devices there are none."""
    parts = [devices[first : first + MAX_DEVICES] for first in range(0, len(devices), MAX_DEVICES)]
    modes = {one.name: mode_of(one, mode) for one in devices}
    places = {name: place for group in set(modes.values()) for name, place in places_of(modes, group)}
    return [
        {
            "apiVersion": API_VERSION,
            "kind": "ResourceSlice",
            "metadata": {"name": slice_name(node, number), "labels": {MANAGED_BY: OURS}},
            "spec": {
                "driver": DRIVER,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": len(parts)},
                "nodeSelector": on_node(node),
                "devices": [raw_device(one, *places[one.name], gpu_driver, modes[one.name]) for one in part],
            },
        }
        for number, part in enumerate(parts)
    ]


def mode_of(one: ProofDevice, mode: ProofMode) -> str:
    """The mode of a device on a node of this mode."""
    if one.is_challenged:
        return ProofMode.CHALLENGED
    return mapped_mode(one.kept_for) if one.kept_for and mode is ProofMode.NATIVE else mode


def places_of(modes: Mapping[str, str], mode: str) -> list[tuple[str, tuple[int, int]]]:
    """The place of each device of the mode, and their number."""
    names = [name for name, own in modes.items() if own == mode]
    return [(name, (place, len(names))) for place, name in enumerate(names)]


def on_node(node: str) -> Raw:
    """Selects the node. A kubelet deletes slices that name it in `nodeName` when it starts."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"nodeSelectorTerms": [{"matchFields": [field]}]}


def raw_device(one: ProofDevice, place: int, count: int, gpu_driver: str, mode: str) -> Raw:
    attributes: Raw = {
        f"{gpu_driver}/uuid": {"string": one.uuid},
        HASH: {"string": one.hash},
        INDEX: {"int": place},
        COUNT: {"int": count},
        MODE: {"string": str(mode)},
    }
    raw: Raw = {"name": one.name, "attributes": attributes}
    if one.is_challenged:
        raw |= {"bindingConditions": [CHALLENGED], "bindingFailureConditions": [CHALLENGE_FAILED]}
    taints = []
    if one.end is not None:
        taints.append({"key": EVIDENCE_ENDS, "effect": "NoExecute", "timeAdded": stamp(one.end)})
    if one.is_closed:
        taints.append(closing_taint(stamp(one.end or LATEST_END)))
    return raw | ({"taints": taints} if taints else {})


def closing_taint(end: str | None) -> Raw:
    """The API server would set a time that is missing."""
    return {"key": EVIDENCE_ENDED, "effect": "NoSchedule", "timeAdded": end}


def slice_name(node: str, number: int) -> str:
    """The name of a slice of the node. Long names of nodes are cut and made unique by a digest."""
    name = f"gpuwarden-{node}-{number}"
    if len(name) <= MAX_SUBDOMAIN:
        return name
    digest = hashlib.sha256(node.encode()).hexdigest()[:16]
    return f"gpuwarden-{node[:200].rstrip('-.')}-{digest}-{number}"


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
