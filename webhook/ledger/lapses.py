"""What expired a short while ago, so that whoever looks for it is told what became of it."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from attrs import frozen

from webhook.core.reservation import Reservation

REMEMBERED = timedelta(minutes=10)
# A bound for whoever has reservations expire by the thousand.
MOST = 10_000


@frozen
class Lapse:
    """A reservation that has ended without a pod."""

    reservation: Reservation
    at: datetime
    why: str


class Lapses:
    """The last ones, oldest first."""

    def __init__(self) -> None:
        self._all: deque[Lapse] = deque(maxlen=MOST)

    def add(self, reservation: Reservation, at: datetime, why: str) -> None:
        self._all.append(Lapse(reservation, at, why))

    def since(self, now: datetime) -> Sequence[Lapse]:
        while self._all and self._all[0].at + REMEMBERED <= now:
            self._all.popleft()
        return tuple(self._all)
