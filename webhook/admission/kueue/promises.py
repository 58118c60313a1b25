"""What Workloads were told that they can have, until their pods have reserved it.

The answer to a check reserves nothing. Without this record, two Workloads would be told Ready for the same GPUs while
the pods of the first one are being created.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime

from attrs import define, field

from webhook.admission.kueue.workloads import PROMISED_FOR
from webhook.core.gang import GangPart
from webhook.core.reservation import Reservation, ReservationId


@define(eq=False)
class Promise:
    """The pods of one Workload that may have no reservation yet."""

    namespace: str
    gang: tuple[GangPart, ...]
    at: datetime
    # Whether another process gave the answer, so that earlier reservations are not known.
    is_restored: bool = False
    _met: Counter[str] = field(factory=Counter, init=False)

    def open(self) -> Iterator[GangPart]:
        """The pods without a reservation."""
        met = Counter(self._met)
        for part in self.gang:
            digest = part.claim.digest
            used = min(met[digest], part.pods)
            met[digest] -= used
            if used < part.pods and part.claim.count:
                yield GangPart(part.claim, part.pods - used)

    def meet(self, made: Reservation) -> bool:
        """Whether the reservation is for one of the pods. It then counts."""
        if made.namespace != self.namespace or (self.is_restored and made.since < self.at):
            return False
        if all(part.claim.digest != made.claim_digest for part in self.open()):
            return False
        self._met[made.claim_digest] += 1
        return True


@define(eq=False, repr=False)
class Promises:
    """By uid of the Workload. A reservation counts for one promise in its namespace that has a pod with the same claim:
    it does not name the Workload."""

    _by_uid: dict[str, Promise] = field(factory=dict, init=False)
    _seen: set[ReservationId] = field(factory=set, init=False)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def put(self, uid: str, promise: Promise) -> None:
        self._by_uid[uid] = promise

    def retain(self, uids: Collection[str], now: datetime) -> None:
        """Drops the promises of other Workloads, and those that are too old."""
        kept = self._by_uid.items()
        self._by_uid = {uid: one for uid, one in kept if uid in uids and one.at + PROMISED_FOR > now}

    def see(self, reservations: Iterable[Reservation]) -> None:
        """Counts new reservations. Those that were made before a promise do not count for it."""
        seen = set()
        for made in reservations:
            seen.add(made.id)
            if made.id not in self._seen:
                any(promise.meet(made) for promise in self._by_uid.values())
        self._seen = seen

    def open(self) -> list[GangPart]:
        """All pods that were promised GPUs and have no reservation yet."""
        return [part for promise in self._by_uid.values() for part in promise.open()]
