"""Pauses between failed attempts."""

import random
from collections.abc import Collection
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


class Retries:
    """When failed attempts are repeated, by the key of what is attempted."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._by_key: dict[str, Retry] = {}

    def is_due(self, key: str, now: datetime) -> bool:
        """Whether no attempt has failed, or the pause is over."""
        retry = self._by_key.get(key)
        return retry is None or retry.not_before <= now

    def postpone(self, key: str, now: datetime) -> None:
        """Puts the next attempt off, longer each time."""
        self._by_key.setdefault(key, Retry(now)).postpone(now, self._backoff)

    def pause_until(self, key: str, end: datetime) -> None:
        """Changes the end of the pause, if there is one."""
        if key in self._by_key:
            self._by_key[key].not_before = end

    def retain(self, keys: Collection[str]) -> None:
        """Forgets all other keys."""
        self._by_key = {key: one for key, one in self._by_key.items() if key in keys}

    def forget(self, key: str) -> None:
        self._by_key.pop(key, None)
