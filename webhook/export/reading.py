"""Converts nvidia-smi's output to records and to the node annotation. Pure.

The annotation holds everything that the records are made of. The next leader, or this process after a restart,
makes identical records from it, so nothing is stored twice.
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
# Allowed clock skew of another replica or the API server.
SKEW: Final = timedelta(minutes=5)
# No annotation is older than this.
EARLIEST: Final = datetime(2020, 1, 1, tzinfo=UTC)


class NothingToReadError(GpuwardenError):
    """There is no annotation of this pod and boot."""


@frozen
class ReadingSource:
    """The origin of a reading."""

    cluster: str
    node: str
    machine: str
    source: str  # namespace/pod
    boot_id: str | None = None


def machine_of(provider_id: str | None) -> str:
    """The last part of the provider id: `i-1` for `aws:///zone/i-1`."""
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
            for one, uuid in zip(smi.gpus, unique_uuids(smi.gpus), strict=True)
        ],
    )


def unique_uuids(gpus: Sequence[Gpu]) -> list[str | None]:
    """The UUIDs, with None for invalid and for repeated ones."""
    uuids = [one.uuid if one.uuid is not None and is_uuid(one.uuid) else None for one in gpus]
    times = Counter(uuids)
    return [uuid if times[uuid] == 1 else None for uuid in uuids]


def annotation(found: NodeGpus) -> str:
    return msgspec.json.encode(found).decode()


def readings_of(found: NodeGpus, source: ReadingSource) -> tuple[Reading, ...]:
    """One reading per device, also for devices that share a serial. A device with neither serial nor UUID is left out:
    its record would identify nothing."""
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


def unidentified(found: NodeGpus) -> Sequence[str]:
    """Names for the devices that have no record."""
    return [one.pci or f"number {one.index}" for one in found.gpus if one.serial is None and one.uuid is None]


def batch_of(readings: tuple[Reading, ...]) -> Batch:
    """Equal readings give an equal batch id."""
    content = msgspec.json.encode(readings)
    return Batch(id=hashlib.sha256(content).hexdigest(), readings=readings)


def read_before(
    text: str | None, pod_uid: str, boot_id: str | None, *, now: datetime, created: datetime | None = None
) -> NodeGpus:
    """The annotation's content, if this pod made it in this boot. Raises NothingToReadError.

    Others may write Nodes, so its time has to lie between the Node's creation and now.
    """
    if text is None or len(text) > MAX_ANNOTATION:
        raise NothingToReadError("no annotation")
    try:
        found = gpus_in(text)
    except GpuwardenError as exc:
        raise NothingToReadError(str(exc)) from exc
    if (found.pod, found.boot) != (pod_uid, boot_id):
        raise NothingToReadError("a reading of another pod or boot")
    earliest = max(created or EARLIEST, EARLIEST) - SKEW
    if not earliest <= found.time <= now + SKEW:
        raise NothingToReadError(f"implausible time: {found.time.isoformat()}")
    return found
