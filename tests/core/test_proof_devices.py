"""Proof devices: their names and hashes, when they end, and when they are written."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from attrs import evolve

from webhook.core.proof_devices import (
    KEPT_AFTER_END,
    LATEST_END,
    ProofDevice,
    device_name,
    hash_attribute,
    is_write_due,
    next_change,
    published,
)

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
UUID = "GPU-11111111-0000-4000-8000-000000000001"
OTHER = "GPU-11111111-0000-4000-8000-000000000002"
SECOND, MINUTE = timedelta(seconds=1), timedelta(minutes=1)


def proof(uuid: str = UUID, hash: str = "sha256:aa11", end: datetime | None = NOW + 40 * MINUTE) -> ProofDevice:
    return ProofDevice.of(uuid, hash, end)


def closed(hash: str = "sha256:aa11", end: datetime = NOW) -> ProofDevice:
    return evolve(proof(hash=hash, end=end), is_closed=True)


def by_name(*devices: ProofDevice) -> dict[str, ProofDevice]:
    return {one.name: one for one in devices}


@pytest.mark.parametrize(
    ("hash", "attribute"),
    [
        ("sha256:" + "ab" * 32, "ab" * 32),
        ("aa11", "aa11"),
        ("sha256:aa11", "aa11"),
        ("sha512:aa11", "e21c39560bbd136a4a5ceab044cdab2fd3a1464327b9aa64d0d69b578d7f77fe"),
        ("AA11", "d74350e290b4c92b79d1c51f2f1f37c77b2483388cd180aa0cd38b8d8cedaa18"),
        ("ab" * 33, "fcae0435ecabaebf770d9506763a6e3cd0aaab640ff0305312d91fd6979a2c99"),
    ],
)
def test_hash_becomes_its_digits_or_its_sha256(hash: str, attribute: str) -> None:
    assert hash_attribute(hash) == attribute


@pytest.mark.parametrize("uuid", [UUID, "MIG-" + UUID[4:], "GPU-" + "a" * 123, "GPU-a/b/c", "GPU-a-"])
def test_device_name_is_a_dns_label_for_each_uuid_and_hash(uuid: str) -> None:
    names = {device_name(uuid, "aa11"), device_name(uuid, "ab" * 32), device_name(OTHER, "aa11")}
    assert len(names) == 3
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names)


def test_proven_devices_are_published_with_the_end_of_the_evidence_in_whole_seconds() -> None:
    end = NOW + timedelta(minutes=40, milliseconds=700)
    assert published([proof(end=end)], [], (), NOW) == (proof(end=NOW + 40 * MINUTE),)


def test_device_without_proof_ends_now_and_is_removed_later() -> None:
    now = NOW + 10 * SECOND
    (ended,) = published([], [proof()], (), now)
    assert ended == closed(end=now)
    until = now + KEPT_AFTER_END
    assert published([], [ended], (), until - SECOND) == (ended,)
    assert published([], [ended], (), until) == ()


def test_device_that_is_no_longer_proven_ends_for_late_clocks_too() -> None:
    skew = 5 * SECOND
    (ended,) = published([], [proof()], (), NOW, skew)
    assert ended == proof(end=NOW - skew).closed_by(NOW)
    assert published([], [ended], (), NOW + SECOND, skew) == (ended,)


def test_device_in_use_is_never_removed() -> None:
    ended = closed(end=NOW - 60 * MINUTE)
    assert published([], [ended], {ended.name}, NOW) == (ended,)


def test_end_in_the_past_is_not_moved() -> None:
    ended = closed(end=NOW - SECOND)
    assert published([], [ended], (), NOW) == (ended,)


def test_device_is_closed_at_its_end_and_opened_by_fresh_evidence() -> None:
    (before,), (after,) = (published([proof(end=NOW)], [], (), now) for now in (NOW - SECOND, NOW))
    assert (before.is_closed, after.is_closed) == (False, True)
    (opened,) = published([proof()], [closed()], (), NOW)
    assert opened == proof()


def test_device_is_written_when_it_is_closed_or_opened() -> None:
    assert is_write_due([closed()], by_name(proof(end=NOW)), NOW)
    assert is_write_due([proof()], by_name(evolve(proof(), is_closed=True)), NOW)
    assert not is_write_due([closed()], by_name(closed()), NOW)


def test_device_without_an_end_ends_when_its_proof_is_withdrawn() -> None:
    assert published([], [proof(end=None)], (), NOW) == (closed(),)


def test_another_hash_ends_the_old_device_and_publishes_a_new_one() -> None:
    old, new = proof(hash="aa11"), proof(hash="bb22")
    assert set(published([new], [old], {old.name}, NOW)) == {new, closed(hash="aa11")}


def test_renewed_evidence_moves_the_end() -> None:
    old, new = proof(end=NOW + MINUTE), proof(end=NOW + 40 * MINUTE)
    assert published([new], [old], {old.name}, NOW) == (new,)


@pytest.mark.parametrize(
    ("wanted", "written", "is_due"),
    [
        (NOW + 40 * MINUTE, NOW + 40 * MINUTE, False),
        (NOW + 40 * MINUTE, NOW + 41 * MINUTE, True),
        (NOW, NOW + MINUTE, True),
        (NOW + 40 * MINUTE, NOW + 20 * MINUTE, False),
        (NOW + 40 * MINUTE, NOW + 20 * MINUTE - SECOND, True),
        (NOW + 40 * MINUTE, NOW - MINUTE, True),
        (None, NOW + MINUTE, True),
        (NOW + MINUTE, None, True),
        (None, None, False),
    ],
)
def test_end_is_written_when_it_is_nearer_or_half_over(
    wanted: datetime | None, written: datetime | None, *, is_due: bool
) -> None:
    assert is_write_due([proof(end=wanted)], by_name(proof(end=written)), NOW) is is_due


def test_added_and_removed_devices_are_written() -> None:
    assert is_write_due([proof(), proof(OTHER)], by_name(proof()), NOW)
    assert is_write_due([], by_name(proof()), NOW)
    assert not is_write_due([proof()], by_name(proof()), NOW)


def test_device_in_use_that_somebody_removed_is_published_as_ended() -> None:
    """Its taint evicts the pod."""
    lost = evolve(ProofDevice.lost("gpu-1-aa11", NOW), is_closed=True)
    assert published([], [], {"gpu-1-aa11"}, NOW) == (lost,)
    assert lost.hash == ""
    assert published([proof()], [], {proof().name}, NOW) == (proof(),)


def test_end_that_no_clock_shows_is_published_as_a_far_one() -> None:
    end = datetime(9999, 12, 31, 23, 59, 59, 7, tzinfo=UTC)
    assert proof(end=end).end == LATEST_END
    assert next_change([proof(end=end)], by_name(proof()), (), NOW) is not None


@pytest.mark.parametrize(
    ("wanted", "written"),
    [(NOW + 40 * MINUTE, NOW + 30 * MINUTE), (NOW + 40 * MINUTE, NOW + 20 * MINUTE)],
    ids=["later", "soon"],
)
def test_next_write_is_due_exactly_when_half_of_the_time_is_over(wanted: datetime, written: datetime) -> None:
    devices, before = [proof(end=wanted)], by_name(proof(end=written))
    moment = next_change(devices, before, (), NOW)
    assert moment is not None
    assert is_write_due(devices, before, moment)
    assert not is_write_due(devices, before, moment - 2 * SECOND)


def test_next_write_removes_an_ended_device_that_no_pod_uses() -> None:
    ended = proof(end=NOW - SECOND)
    assert next_change([ended], by_name(ended), (), NOW) == NOW - SECOND + KEPT_AFTER_END
    assert next_change([ended], by_name(ended), {ended.name}, NOW) is None
    assert next_change([proof()], by_name(proof()), (), NOW) == NOW + 40 * MINUTE
    assert next_change([proof(end=None)], by_name(proof(end=None)), (), NOW) is None
