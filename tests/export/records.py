"""Realistic readings and uses for tests of stores."""

from datetime import UTC, datetime, timedelta
from typing import Any

from webhook.export.records import Batch, Reading, Use

NOW = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)


def reading(number: int = 0, **changes: Any) -> Reading:
    """The GPU with this number on one node."""
    known: dict[str, Any] = {
        "cluster": "prod",
        "node": "gpu-a",
        "machine": "i-0aaaabbbbccccdddd",
        "source": "gpu-operator/nvidia-device-plugin-daemonset-abcde",
        "chassis": "1820000000042",
        "gpu": f"17600000000{11 + number}",
        "time": NOW,
        "uuid": f"GPU-{number}",
        "index": number,
        "minor": number,
        "pci_bus_id": f"00000000:{number:02X}:00.0",
        "model": "NVIDIA H100 80GB HBM3",
        "memory": "81559 MiB",
        "driver": "570.86.15",
        "boot_id": "6f0c1b2e",
    }
    return Reading(**known | changes)


def use(number: int = 0, **changes: Any) -> Use:
    known: dict[str, Any] = {
        "cluster": "prod",
        "node": "gpu-a",
        "reservation": f"reservation-{number}",
        "gpu_uuid": f"GPU-{number}",
        "since": NOW,
        "namespace": "train",
        "pod": f"job-{number}",
        "pod_uid": f"uid-{number}",
        "owner": "Job/train",
        "evidence_hash": "sha256:abc",
    }
    return Use(**known | changes)


def batch(name: str = "batch-0", gpus: int = 2, uses: tuple[Use, ...] = (), **changes: Any) -> Batch:
    return Batch(name, tuple(reading(number, **changes) for number in range(gpus)), uses)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)
