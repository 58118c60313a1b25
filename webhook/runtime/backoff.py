"""Pauses between failed attempts."""

import random
from datetime import datetime, timedelta

from attrs import define, frozen


@frozen
class Backoff:
    """A pause that doubles with each consecutive failure, up to `longest`."""

    first: timedelta
    longest: timedelta
    # Each pause is multiplied by a random number in this range, so that processes do not retry at the same time.
    jitter: tuple[float, float] = (1.0, 1.0)

    def pause(self, failures: int) -> timedelta:
        """The pause after this many consecutive failures (at least 1), without jitter."""
        return min(self.first * float(2 ** min(failures - 1, 30)), self.longest)

    def seconds(self, failures: int) -> float:
        """The pause in seconds, with jitter."""
        return self.jittered(self.pause(failures))

    def jittered(self, pause: timedelta) -> float:
        """`pause` in seconds, with jitter."""
        return pause.total_seconds() * random.uniform(*self.jitter)  # noqa: S311 - not a secret


@define
class Retry:
    """When a failed attempt is repeated."""

    not_before: datetime
    failures: int = 0

    def postpone(self, now: datetime, backoff: Backoff) -> None:
        self.failures += 1
        self.not_before = now + backoff.pause(self.failures)
