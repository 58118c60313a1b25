"""Pauses between failed attempts."""

from datetime import UTC, datetime, timedelta

import pytest

from webhook.runtime.backoff import Backoff, Retries

SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 1), (2, 2), (3, 4), (4, 5), (5, 5), (10_000, 5)])
def test_pause_doubles_with_each_failure_up_to_the_longest(failures: int, seconds: int) -> None:
    assert Backoff(SECOND, 5 * SECOND).pause(failures) == seconds * SECOND


def test_jitter_keeps_the_pause_within_its_range() -> None:
    found = [Backoff(SECOND, 5 * SECOND, jitter=(0.5, 1.5)).seconds(2) for _ in range(1000)]
    assert 1.0 <= min(found) < 1.2
    assert 2.8 < max(found) <= 3.0


def test_without_jitter_the_pause_is_exact() -> None:
    assert Backoff(SECOND, 5 * SECOND).seconds(2) == 2.0


def test_failed_attempts_are_repeated_after_growing_pauses_by_key() -> None:
    begin, retries = datetime(2026, 3, 2, tzinfo=UTC), Retries(Backoff(SECOND, 5 * SECOND))
    assert retries.is_due("a", begin)
    retries.pause_until("a", begin + SECOND)
    assert retries.is_due("a", begin), "nothing has failed"
    retries.postpone("a", begin)
    retries.postpone("a", begin)
    assert [retries.is_due("a", begin + pause * SECOND) for pause in (0, 1.9, 2)] == [False, False, True]
    assert retries.is_due("b", begin)
    retries.pause_until("a", begin + SECOND)
    assert [retries.is_due("a", begin + pause * SECOND) for pause in (0.9, 1)] == [False, True]
    retries.postpone("b", begin)
    retries.retain({"b"})
    assert (retries.is_due("a", begin), retries.is_due("b", begin)) == (True, False)
    retries.forget("b")
    assert retries.is_due("b", begin)
