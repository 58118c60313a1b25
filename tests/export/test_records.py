"""The public JSON forms."""

from datetime import datetime, timedelta, timezone

from tests.export.records import NOW, later, reading, use
from webhook.export.records import raw_reading, raw_seconds, raw_time, raw_use


def test_reading_has_members_of_gpuid_first_then_ours() -> None:
    raw = raw_reading(reading())
    assert list(raw.items()) == [
        ("cluster", "prod"),
        ("node", "gpu-a"),
        ("machine", "i-0aaaabbbbccccdddd"),
        ("source", "gpu-operator/nvidia-device-plugin-daemonset-abcde"),
        ("chassis", "1820000000042"),
        ("gpu", "1760000000011"),
        ("time", "2026-01-01T00:00:00.123456Z"),
        ("uuid", "GPU-0"),
        ("index", 0),
        ("minor", 0),
        ("pci_bus_id", "00000000:00:00.0"),
        ("model", "NVIDIA H100 80GB HBM3"),
        ("memory", "81559 MiB"),
        ("driver", "570.86.15"),
        ("boot_id", "6f0c1b2e"),
    ]


def test_open_use_has_no_end() -> None:
    assert raw_use(use())["until"] is None
    assert raw_use(use(until=later(60)))["until"] == "2026-01-01T00:01:00.123456Z"


def test_times_are_in_utc_wherever_they_come_from() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=5, minutes=30)))
    assert raw_time(there) == "2026-01-01T00:00:00.123456Z"
    assert raw_seconds(there) == "2026-01-01T00:00:00Z"
    assert raw_time(datetime.fromisoformat("2026-01-01T00:00:00+00:00")) == "2026-01-01T00:00:00Z"
