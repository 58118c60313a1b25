"""The exported records, readings and uses, and their JSON forms."""

from datetime import UTC, datetime
from typing import Any, Final

from attrs import asdict, frozen

# In the order of the columns: the members of a reading that gpuid does not have, and all members of a use.
OWN_COLUMNS: Final = ("uuid", "index", "minor", "pci_bus_id", "model", "memory", "driver", "boot_id")
USE_COLUMNS: Final = (
    *("cluster", "node", "reservation", "gpu_uuid", "serial", "chassis", "namespace", "pod", "pod_uid", "owner"),
    *("evidence_hash", "since", "until"),
)
# For an unknown chassis or GPU serial.
UNKNOWN: Final = "unknown"


@frozen
class Reading:
    """One GPU as nvidia-smi reported it. All GPUs of one reading share its `time`, so a repeat is equal."""

    cluster: str
    node: str
    machine: str
    source: str
    chassis: str
    gpu: str  # its serial, or `unknown`
    time: datetime
    uuid: str | None = None
    index: int | None = None
    minor: int | None = None
    pci_bus_id: str | None = None
    model: str | None = None
    memory: str | None = None
    driver: str | None = None
    boot_id: str | None = None


@frozen
class Use:
    """One GPU in one reservation, identified by (cluster, reservation, gpu_uuid). A record with `until` ends the
    use."""

    cluster: str
    node: str
    reservation: str
    gpu_uuid: str
    since: datetime
    until: datetime | None = None
    serial: str | None = None
    chassis: str | None = None
    namespace: str | None = None
    pod: str | None = None
    pod_uid: str | None = None
    owner: str | None = None  # "StatefulSet/train"
    evidence_hash: str | None = None


@frozen
class Batch:
    """Records that are stored together. Equal batches have equal ids."""

    id: str
    readings: tuple[Reading, ...] = ()
    uses: tuple[Use, ...] = ()

    @property
    def size(self) -> int:
        return len(self.readings) + len(self.uses)


def raw_reading(reading: Reading) -> dict[str, Any]:
    """gpuid's members in its order, then ours."""
    return asdict(reading, recurse=False) | {"time": raw_time(reading.time)}


def raw_use(use: Use) -> dict[str, Any]:
    raw = {name: getattr(use, name) for name in USE_COLUMNS}
    until = None if use.until is None else raw_time(use.until)
    return raw | {"chassis": use.chassis or UNKNOWN, "since": raw_time(use.since), "until": until}


def raw_time(time: datetime) -> str:
    """RFC 3339 in UTC, with microseconds."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def raw_seconds(time: datetime) -> str:
    """RFC 3339 in UTC, in seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
