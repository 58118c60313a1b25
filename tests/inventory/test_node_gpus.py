"""The GPU reading in a Node's annotation: any client that may write Nodes may have written it."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from webhook.inventory.node_annotations import UnreadableDevicesError
from webhook.inventory.node_gpus import devices_read, gpus_in


def text(*gpus: dict[str, Any], **members: Any) -> str:
    return json.dumps({"time": "2026-01-01T00:00:00Z", "gpus": list(gpus), **members})


def test_written_reading_is_parsed_unchanged() -> None:
    found = gpus_in(text({"index": 0, "uuid": "GPU-0", "model": "NVIDIA H100 80GB"}, driver="580.10.01"))
    assert (found.time, found.driver) == (datetime(2026, 1, 1, tzinfo=UTC), "580.10.01")
    assert [(one.uuid, one.model) for one in found.gpus] == [("GPU-0", "NVIDIA H100 80GB")]


@pytest.mark.parametrize("name", ["serial", "pci", "model", "memory", "chassis"])
@pytest.mark.parametrize("said", ["\x1b]0;owned\x07", "1\n2", "\u202e1"], ids=["escape", "line", "direction"])
def test_text_with_control_characters_is_unreadable(name: str, said: str) -> None:
    with pytest.raises(UnreadableDevicesError, match="is not printable") as caught:
        gpus_in(text({"index": 0, name: said}))
    assert str(caught.value).isprintable()


def test_driver_with_control_characters_is_unreadable() -> None:
    with pytest.raises(UnreadableDevicesError, match="is not printable"):
        gpus_in(text(driver="\x1b[2J"))


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_time_that_cannot_be_converted_to_utc_is_unreadable(time: str) -> None:
    with pytest.raises(UnreadableDevicesError, match="cannot be converted to UTC"):
        gpus_in(text(time=time))


def test_duplicate_uuid_is_unreadable() -> None:
    with pytest.raises(UnreadableDevicesError, match="'GPU-0' is listed twice"):
        gpus_in(text(*({"index": index, "uuid": uuid} for index, uuid in enumerate(["GPU-0", "GPU-1", "GPU-0"]))))


@pytest.mark.parametrize("uuid", ["all", "0", "a b", "GPU-0,1"])
def test_invalid_gpu_uuid_is_ignored(uuid: str) -> None:
    found = devices_read(gpus_in(text({"index": 0, "uuid": "GPU-0"}, {"index": 1, "uuid": uuid})))
    assert [one.uuid for one in found.devices] == ["GPU-0"]
    assert found.ignored == (uuid,)


def test_several_devices_without_a_uuid_are_accepted() -> None:
    assert len(gpus_in(text({"index": 0}, {"index": 1})).gpus) == 2
