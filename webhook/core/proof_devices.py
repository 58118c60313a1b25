"""Proof devices: the devices that gpuwarden publishes for proven GPUs.

A ResourceClaim asks for a GPU together with the proof device of the same UUID, so Kubernetes allocates proven GPUs
only. Each proof device ends with the evidence of its node. See docs/decisions/0032.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from attrs import evolve, frozen

DRIVER: Final = "attested.gpuwarden.io"
# An attribute is a string of at most 64 bytes, so `sha256:` and 64 digits do not fit.
HASH_ATTRIBUTE: Final = re.compile(r"[a-z0-9]{1,64}")
# A DNS label of at most 63 characters has room for a UUID of 40, a dash, these digits of the hash, and a mark.
DEVICE_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,43}[a-z0-9])?")
HASH_DIGITS: Final = 12
# How long a device stays published after its end. A scheduler that has not seen the end yet may still allocate the
# device; its pod is evicted only as long as the device and its taint exist.
KEPT_AFTER_END: Final = timedelta(seconds=30)
# Evidence with a later end is published with this one: readers take a year after 2999 for a mistake.
LATEST_END: Final = datetime(2999, 1, 1, tzinfo=UTC)
# In the names of devices and templates for claims with a fresh challenge.
AT_BIND: Final = "-bind"
# Begins the mode of devices whose GPUs are kept for a StatefulSet.
MAPPED: Final = "mapped-"


class ProofMode(StrEnum):
    """Which claims take the proof devices of a node: those of reservations, or those that the scheduler chooses for."""

    DRA = "dra"
    NATIVE = "native"
    # Those that the scheduler chooses for, with a fresh challenge before the pod is bound.
    CHALLENGED = "challenged"


@frozen
class ProofDevice:
    """The proof of one GPU, for one hash. Without an end it is proven until it is withdrawn."""

    name: str
    uuid: str
    hash: str
    end: datetime | None = None
    # No pod is scheduled to it. An ended device would attract pods whose allocation the API server refuses.
    is_closed: bool = False
    # For claims with a fresh challenge: a pod is bound after the node has answered one (decision 37).
    is_challenged: bool = False
    # The digest of the StatefulSet whose placement map keeps its GPU; empty if none does.
    kept_for: str = ""

    @classmethod
    def of(cls, uuid: str, hash: str, end: datetime | None) -> "ProofDevice":
        """The proof device of a GPU, for the hash as the evidence states it."""
        attribute = hash_attribute(hash)
        return cls(device_name(uuid, attribute), uuid, attribute, end_of_device(end))

    @classmethod
    def lost(cls, name: str, end: datetime) -> "ProofDevice":
        """An ended device of which only the name is known. No claim selects it."""
        return cls(name, "", "", whole(end))

    @property
    def with_challenge(self) -> "ProofDevice":
        """The second device of the same GPU, for claims with a fresh challenge."""
        return evolve(self, name=device_name(self.uuid, self.hash, is_challenged=True), is_challenged=True)

    def proves(self, attribute: str) -> bool:
        """Whether it is a proof for the attribute of a hash."""
        name = device_name(self.uuid, attribute, is_challenged=self.is_challenged)
        return self.hash == attribute and self.name == name

    def is_for_other_hash(self, written: "ProofDevice") -> bool:
        """Whether the written device of the same name is for another hash, as far as it tells one."""
        return bool(written.hash) and self.hash != written.hash

    def ended(self, now: datetime, skew: timedelta) -> "ProofDevice":
        """The device with an end that has passed by every clock, unless it has ended by itself."""
        return self if self.has_ended(now) else evolve(self, end=whole(now - skew))

    def closed_by(self, now: datetime) -> "ProofDevice":
        """The device, closed if it has ended, else open."""
        return evolve(self, is_closed=self.has_ended(now))

    def has_ended(self, now: datetime) -> bool:
        return self.end is not None and self.end <= now


def mapped_mode(kept_for: str) -> str:
    """The mode of devices whose GPUs are kept for a StatefulSet. Only claims of its pods take them, by the UUID."""
    return f"{MAPPED}{kept_for}"


def hash_attribute(hash: str) -> str:
    """The hash as an attribute and as a part of object names: its digits, without `sha256:`. A hash of another form,
    or a longer one, is represented by its SHA-256."""
    digits = hash.removeprefix("sha256:")
    return digits if HASH_ATTRIBUTE.fullmatch(digits) else hashlib.sha256(hash.encode()).hexdigest()


def device_name(uuid: str, attribute: str, *, is_challenged: bool = False) -> str:
    """A DNS label for a GPU and a hash. A GPU that is proven for another hash is another device: a claim that asks for
    one hash never gets the other, however late a scheduler sees the change."""
    label = uuid.lower()
    if not DEVICE_LABEL.fullmatch(label):
        label = f"gpu-{hashlib.sha256(uuid.encode()).hexdigest()[:36]}"
    return f"{label}{AT_BIND if is_challenged else ''}-{attribute[:HASH_DIGITS]}"


def digits_of_device(name: str) -> str:
    """The digits of the hash in the name of a device."""
    return name.rpartition("-")[2]


def digits_of_hash(hash: str) -> str:
    """The digits of the hash, as evidence states it, in the names of its devices."""
    return hash_attribute(hash)[:HASH_DIGITS]


def gpu_of_device(name: str, uuids: Iterable[str]) -> str:
    """The UUID of the GPU that the proof device of this name is for: one of these, or the one that NVIDIA's driver
    would have given it."""
    label = name.rpartition("-")[0].removesuffix(AT_BIND)
    known = (uuid for uuid in uuids if device_name(uuid, "") == f"{label}-")
    return next(known, label[:3].upper() + label[3:])


def whole(moment: datetime) -> datetime:
    """Rounded down to the second, as the API server stores it: too early is safe."""
    return moment.replace(microsecond=0)


def end_of_device(end: datetime | None) -> datetime | None:
    """The end of evidence as the end of a device."""
    return None if end is None else whole(min(end, LATEST_END))


def is_earlier(end: datetime | None, other: datetime | None) -> bool:
    """Whether the first end is before the second. None is no end."""
    return end is not None and (other is None or end < other)


def published(
    proven: Iterable[ProofDevice],
    written: Iterable[ProofDevice],
    used: Collection[str],
    now: datetime,
    skew: timedelta = timedelta(),
) -> tuple[ProofDevice, ...]:
    """The devices to publish for a node, given those that are written and the names of those in use.

    A device that is no longer proven ends at once, also by a clock of Kubernetes that is late by `skew`. It is removed
    later, and not while a pod uses it: without the device, the pod would not be evicted. For the same reason a device
    in use that somebody else has removed is published again. All that have ended are closed.

    A name has only some digits of the hash. A device of the same name for another hash is published after the written
    one was removed.
    """
    before = {one.name: one for one in written}
    wanted = {one.name: one for one in proven if one.name not in before or not one.is_for_other_hash(before[one.name])}
    for one in before.values():
        if one.name not in wanted:
            ended = one.ended(now, skew)
            if one.name in used or now < removal_of(ended, now):
                wanted[one.name] = ended
    for name in used:
        if name not in wanted:
            wanted[name] = ProofDevice.lost(name, now - skew)
    return tuple(wanted[name].closed_by(now) for name in sorted(wanted))


def removal_of(ended: ProofDevice, now: datetime) -> datetime:
    """When an ended device is removed if no pod uses it."""
    return (ended.end or now) + KEPT_AFTER_END


def is_write_due(wanted: Iterable[ProofDevice], written: Mapping[str, ProofDevice], now: datetime) -> bool:
    """Whether the slice has to be written: the devices differ, one is to be closed or opened, maps want other GPUs, an
    end is nearer than written, or at most half of the time that is left is written."""
    devices = {one.name: one for one in wanted}
    return devices.keys() != written.keys() or any(
        (one.is_closed, one.kept_for) != (written[name].is_closed, written[name].kept_for)
        or is_end_due(one, written[name], now)
        for name, one in devices.items()
    )


def is_end_due(wanted: ProofDevice, written: ProofDevice, now: datetime) -> bool:
    if wanted.end == written.end:
        return False
    if wanted.end is None or written.end is None or wanted.end < written.end:
        return True
    return (written.end - now) * 2 < wanted.end - now


def next_change(
    wanted: Iterable[ProofDevice], written: Mapping[str, ProofDevice], used: Collection[str], now: datetime
) -> datetime | None:
    """When these devices have to be written even if nothing else changes; None if never. No write is due now."""
    return min((moment for one in wanted for moment in changes_of(one, written, used, now)), default=None)


def changes_of(
    one: ProofDevice, written: Mapping[str, ProofDevice], used: Collection[str], now: datetime
) -> Iterator[datetime]:
    if one.end is None:
        return
    if one.has_ended(now):
        if one.name not in used:
            yield removal_of(one, now)
        return
    yield one.end
    before = written[one.name].end if one.name in written else None
    if before is not None and before < one.end:
        # At this moment half of the time that is left is written.
        yield now + max((before - now) * 2 - (one.end - now), timedelta()) + timedelta(seconds=1)
