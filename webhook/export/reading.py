"""From what nvidia-smi says to what is exported, and to what a Node says of it. Pure.

The annotation holds everything that the records of a reading are made of. Whoever leads next, or the same process after
a restart, makes the very same records of it, and nothing is stored twice.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from attrs import frozen

from webhook.core.device import is_uuid
from webhook.core.errors import GpuwardenError
from webhook.export.records import UNKNOWN, Batch, Reading
from webhook.inventory.node_gpus import MAX_ANNOTATION, GpuWire, NodeGpus, gpus_in
from webhook.inventory.nvidia_smi import Gpu, SmiReport

NO_MACHINE: Final = "na"
# What another replica's clock, or the API server's, may be ahead of ours.
SKEW: Final = timedelta(minutes=5)
# Nothing like this was read before, on whatever node.
EARLIEST: Final = datetime(2020, 1, 1, tzinfo=UTC)


class NothingToReadError(GpuwardenError):
    """The annotation is not there, or not of this pod."""


@frozen
class ReadingSource:
    """Where a reading comes from."""

    cluster: str
    node: str
    machine: str
    source: str  # namespace/pod
    boot_id: str | None = None


def machine_of(provider_id: str | None) -> str:
    """What the provider calls it: the last part, as in `aws:///zone/i-1`."""
    return (provider_id or "").rstrip("/").rpartition("/")[2] or NO_MACHINE


def node_gpus(smi: SmiReport, pod_uid: str, boot_id: str | None, time: datetime) -> NodeGpus:
    return NodeGpus(
        time=time,
        pod=pod_uid,
        boot=boot_id,
        driver=smi.driver,
        gpus=[
            GpuWire(
                index=one.index,
                uuid=uuid,
                serial=one.serial,
                minor=one.minor,
                pci=one.pci,
                model=one.model,
                memory=one.memory,
                chassis=one.chassis,
                mig=one.is_mig,
            )
            for one, uuid in zip(smi.gpus, names(smi.gpus), strict=True)
        ],
    )


def names(gpus: Sequence[Gpu]) -> list[str | None]:
    """The UUIDs, without those that name nothing, or two."""
    uuids = [one.uuid if one.uuid is not None and is_uuid(one.uuid) else None for one in gpus]
    times = Counter(uuids)
    return [uuid if times[uuid] == 1 else None for uuid in uuids]


def annotation(found: NodeGpus) -> str:
    return msgspec.json.encode(found).decode()


def readings_of(found: NodeGpus, source: ReadingSource) -> tuple[Reading, ...]:
    """One a device, also of those that share a serial. What has neither serial nor UUID is left out: a record of it
    would be of no device in particular."""
    return tuple(
        Reading(
            cluster=source.cluster,
            node=source.node,
            machine=source.machine,
            source=source.source,
            chassis=one.chassis or UNKNOWN,
            gpu=one.serial or UNKNOWN,
            time=found.time,
            uuid=one.uuid,
            index=one.index,
            minor=one.minor,
            pci_bus_id=one.pci,
            model=one.model,
            memory=one.memory,
            driver=found.driver,
            boot_id=source.boot_id,
        )
        for one in found.gpus
        if one.serial is not None or one.uuid is not None
    )


def nameless(found: NodeGpus) -> Sequence[str]:
    """How the devices are called that no record can be made of."""
    return [one.pci or f"number {one.index}" for one in found.gpus if one.serial is None and one.uuid is None]


def batch_of(readings: tuple[Reading, ...]) -> Batch:
    """The same readings make the same batch."""
    content = msgspec.json.encode(readings)
    return Batch(id=hashlib.sha256(content).hexdigest(), readings=readings)


def read_before(
    text: str | None, pod_uid: str, boot_id: str | None, *, now: datetime, created: datetime | None = None
) -> NodeGpus:
    """What the annotation says, if it was read from this pod since this boot. Raises NothingToReadError.

    Whoever may write Nodes may have written it, so its time has to be between the Node's creation and now.
    """
    if text is None or len(text) > MAX_ANNOTATION:
        raise NothingToReadError("no reading")
    try:
        found = gpus_in(text)
    except GpuwardenError as exc:
        raise NothingToReadError(str(exc)) from exc
    if (found.pod, found.boot) != (pod_uid, boot_id):
        raise NothingToReadError("a reading of another pod or boot")
    earliest = max(created or EARLIEST, EARLIEST) - SKEW
    if not earliest <= found.time <= now + SKEW:
        raise NothingToReadError(f"a time that cannot be: {found.time.isoformat()}")
    return found
