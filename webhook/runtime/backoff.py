"""Pauses between attempts that fail."""

import random
from datetime import datetime, timedelta

from attrs import define, frozen


@frozen
class Backoff:
    """Pauses that double with each failure in a row, up to the longest."""

    first: timedelta
    longest: timedelta
    # Each pause is multiplied by a random number of this range, so that many processes do not retry in step.
    jitter: tuple[float, float] = (1.0, 1.0)

    def pause(self, failures: int) -> timedelta:
        """The pause after so many failures in a row, one at least, without jitter."""
        return min(self.first * float(2 ** min(failures - 1, 30)), self.longest)

    def seconds(self, failures: int) -> float:
        """The same in seconds, with jitter."""
        return self.jittered(self.pause(failures))

    def jittered(self, pause: timedelta) -> float:
        """Any pause in seconds, with jitter."""
        return pause.total_seconds() * random.uniform(*self.jitter)  # noqa: S311 - not a secret


@define
class Retry:
    """When an attempt that failed is made again."""

    not_before: datetime
    failures: int = 0

    def postpone(self, now: datetime, backoff: Backoff) -> None:
        self.failures += 1
        self.not_before = now + backoff.pause(self.failures)
