"""Recently expired reservations, so that a message can say why a reservation is gone."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from attrs import frozen

from webhook.core.reservation import Reservation

RETENTION = timedelta(minutes=10)
# Bounds the memory if reservations expire by the thousand.
MAX_LAPSES = 10_000


@frozen
class Lapse:
    """A reservation that ended without a pod."""

    reservation: Reservation
    at: datetime
    why: str


class Lapses:
    """The most recent lapses, oldest first."""

    def __init__(self) -> None:
        self._all: deque[Lapse] = deque(maxlen=MAX_LAPSES)

    def add(self, reservation: Reservation, at: datetime, why: str) -> None:
        self._all.append(Lapse(reservation, at, why))

    def since(self, now: datetime) -> Sequence[Lapse]:
        while self._all and self._all[0].at + RETENTION <= now:
            self._all.popleft()
        return tuple(self._all)
