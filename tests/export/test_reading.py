"""Records from nvidia-smi's output and from the annotation."""

from datetime import UTC, datetime, timedelta

import pytest
from attrs import evolve

from tests.export.smi import Card, document, gb200_tray
from webhook.export.reading import (
    NothingToReadError,
    ReadingSource,
    annotation,
    batch_of,
    machine_of,
    node_gpus,
    read_before,
    readings_of,
)
from webhook.inventory.nvidia_smi import parse

NOW = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)
SOURCE = ReadingSource("prod", "node-a", "i-1", "gpu-operator/p", "boot")


@pytest.mark.defect("gpuid-4")
@pytest.mark.parametrize(
    ("provider_id", "machine"),
    [
        ("aws:///az/i-1", "i-1"),
        ("kind://docker/k/w", "w"),
        ("i-1", "i-1"),
        ("aws:///az/i-1/", "i-1"),
        ("", "na"),
        (None, "na"),
        ("///", "na"),
    ],
)
def test_machine_is_the_last_part_of_the_provider_id(provider_id: str | None, machine: str) -> None:
    assert machine_of(provider_id) == machine


def test_annotation_gives_equal_records() -> None:
    found = node_gpus(parse(document(gb200_tray())), "u", "boot", NOW)
    again = read_before(annotation(found), "u", "boot", now=NOW)
    assert again == found
    assert batch_of(readings_of(again, SOURCE)) == batch_of(readings_of(found, SOURCE))
    assert len(annotation(found)) < 2000


@pytest.mark.parametrize("text", [None, "", "{}", "x" * 300_000], ids=["none", "empty", "no-reading", "too-long"])
def test_invalid_annotation_is_not_a_reading(text: str | None) -> None:
    with pytest.raises(NothingToReadError):
        read_before(text, "u", "boot", now=NOW)


@pytest.mark.parametrize(("pod", "boot"), [("u", "other"), ("other", "boot"), ("u", None)])
def test_annotation_of_another_pod_or_boot_is_ignored(pod: str, boot: str | None) -> None:
    text = annotation(node_gpus(parse(document(gb200_tray())), "u", "boot", NOW))
    with pytest.raises(NothingToReadError, match="another pod or boot"):
        read_before(text, pod, boot, now=NOW)


@pytest.mark.parametrize(
    "time",
    [
        pytest.param("0001-01-01T00:00:00+14:00", id="before-all-time"),
        pytest.param("9999-12-31T23:59:59-14:00", id="after-all-time"),
        pytest.param("9999-12-31T23:59:59Z", id="at-the-end-of-time"),
        pytest.param("2026-01-01T00:06:00Z", id="tomorrow"),
        pytest.param("2019-12-31T00:00:00Z", id="before-there-was-such-a-thing"),
    ],
)
def test_annotation_with_an_implausible_time_is_ignored(time: str) -> None:
    text = f'{{"time":"{time}","gpus":[],"pod":"u","boot":"boot"}}'
    with pytest.raises(NothingToReadError):
        read_before(text, "u", "boot", now=NOW)


def test_annotation_older_than_its_node_is_ignored() -> None:
    text = annotation(node_gpus(parse(document(gb200_tray())), "u", "boot", NOW))
    later = NOW + timedelta(hours=1)
    assert read_before(text, "u", "boot", now=later, created=NOW + timedelta(minutes=1)).time == NOW
    with pytest.raises(NothingToReadError, match="implausible time"):
        read_before(text, "u", "boot", now=later, created=NOW + timedelta(minutes=10))


def test_a_reading_has_its_time_in_utc_wherever_it_was_written() -> None:
    text = '{"time":"2026-01-01T05:30:00.123456+05:30","gpus":[],"pod":"u"}'
    found = read_before(text, "u", None, now=NOW)
    assert (found.time, found.time.tzinfo) == (NOW, UTC)


def test_readings_of_another_time_have_another_batch_id() -> None:
    found = node_gpus(parse(document(gb200_tray())), "u", "boot", NOW)
    later = readings_of(node_gpus(parse(document(gb200_tray())), "u", "boot", NOW.replace(year=2027)), SOURCE)
    assert batch_of(readings_of(found, SOURCE)).id != batch_of(later).id


def test_invalid_and_repeated_uuids_are_left_out() -> None:
    cards = [Card(0, serial="1", uuid="GPU-1"), Card(1, serial="2", uuid="GPU-1"), Card(2, serial="3", uuid="a b")]
    found = node_gpus(parse(document([*cards, evolve(cards[0], uuid="GPU-2")])), "u", "boot", NOW)
    assert [one.uuid for one in found.gpus] == [None, None, None, "GPU-2"]
    assert read_before(annotation(found), "u", "boot", now=NOW) == found
