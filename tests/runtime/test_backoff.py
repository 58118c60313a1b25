"""Pauses between failed attempts."""

from datetime import timedelta

import pytest

from webhook.runtime.backoff import Backoff

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
