"""The reservations of all nodes that this process knows, readable without waiting. Updates the fleet on every
change."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TypeVar

from attrs import evolve

from webhook.core.device import DeviceUuid
from webhook.core.fleet import Fleet
from webhook.core.queue_order import OWN_IDS
from webhook.core.reservation import Phase, Placement, Reservation, ReservationId, ReservationRequest
from webhook.ledger.moves import Move, Times, WriteAgainError
from webhook.ledger.pending import PendingGpus
from webhook.runtime.clock import LONG_AGO

Held = Mapping[ReservationId, Reservation]
Key = tuple[str, ReservationId]  # with the node: a stale replica may have used an id on two nodes
# Obsolete entries beyond this number are pruned.
MIN_DEADLINE_ENTRIES = 100
# A request to the API server lasts at most a minute, so the validating review of a pod follows the mutating one sooner.
MAX_REVIEW_DELAY = timedelta(seconds=75)

Named = TypeVar("Named", bound=str)


def key_of(one: Reservation) -> Key:
    return one.node, one.id


def rank(one: Reservation) -> tuple[bool, datetime, str]:
    """Sort order if no node is given: reservations with a pod first, then the older ones."""
    return one.phase is not Phase.FINALIZED, one.since, one.node


class ReservationIndex:
    """Reservations by node and id, by pod and by device."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._all: dict[Key, Reservation] = {}
        self._by_id: dict[ReservationId, list[Key]] = {}
        self._by_uid: dict[str, list[Key]] = {}
        self._nodes: dict[str, Held] = {}
        self._deadlines: list[tuple[datetime, Key]] = []  # a heap; entries may be out of date
        self.pending, self.unnamed, self.orphaned = PendingGpus(), PendingGpus(), PendingGpus()
        self._lapsed: dict[ReservationId, Reservation] = {}  # in the order in which they expired

    def on(self, node: str) -> Held:
        return self._nodes.get(node, {})

    def replace(self, node: str, held: Held) -> None:
        """Replace all reservations of a node."""
        before = self.on(node)
        for gone in before.keys() - held.keys():
            self._drop(before[gone])
        for one in held.values():
            known = before.get(one.id)
            if known == one:
                continue
            if known is not None and (known.uid, known.slots) != (one.uid, one.slots):
                self._drop(known)  # replaced by another one, unobserved
            self._put(one)
        if held:
            self._nodes[node] = held
        else:
            self._nodes.pop(node, None)

    def make(self, node: str, move: Move, now: datetime, times: Times) -> Reservation | None:
        """Apply a move without a store, repeating it for as many writes as the store would need."""
        stored = self.on(node)
        while True:
            held = dict(stored)
            try:
                result = move.apply(stored, held, now, times)
            except WriteAgainError:
                stored = held
                continue
            self.replace(node, held)
            return result

    def _put(self, one: Reservation) -> None:
        key = key_of(one)
        self._lapsed.pop(one.id, None)
        if key not in self._all:
            self._by_id.setdefault(one.id, []).append(key)
            if one.uid is not None:
                self._by_uid.setdefault(one.uid, []).append(key)
        self._all[key] = one
        if one.deadline is not None:
            self._add_deadline(key, one.deadline)
        self._count(one, is_waiting=one.phase is Phase.PENDING)
        if one.orphan is not None:
            self.orphaned.put(key, one.namespace, len(one.slots))
        else:  # a replica of an older version wrote it without that mark
            self.orphaned.drop(key)
        self._fleet.hold(one)

    def _add_deadline(self, key: Key, at: datetime) -> None:
        """Schedule a deadline check. Prunes obsolete entries even if no caller ever asks for overdue reservations."""
        heapq.heappush(self._deadlines, (at, key))
        if len(self._deadlines) > MIN_DEADLINE_ENTRIES + 2 * len(self._all):
            self._deadlines = [(one.deadline, key) for key, one in self._all.items() if one.deadline is not None]
            heapq.heapify(self._deadlines)

    def _drop(self, one: Reservation) -> None:
        key = key_of(one)
        del self._all[key]
        remove_key(self._by_id, one.id, key)
        if one.uid is not None:
            remove_key(self._by_uid, one.uid, key)
        self._count(one, is_waiting=False)
        self.orphaned.drop(key)
        self._fleet.free(one)
        if one.uid is None:
            self._remember(one)

    def _remember(self, lapsed: Reservation) -> None:
        self._lapsed.pop(lapsed.id, None)
        self._lapsed[lapsed.id] = lapsed
        while (first := next(iter(self._lapsed.values()))).since + MAX_REVIEW_DELAY < lapsed.since:
            del self._lapsed[first.id]

    def lapsed(self, reservation_id: ReservationId, now: datetime) -> Reservation | None:
        """A reservation that expired before a pod was named for it, as long as the pod's review may still arrive."""
        one = self._lapsed.get(reservation_id)
        return None if one is None or one.since + MAX_REVIEW_DELAY < now else evolve(one, phase=Phase.PENDING)

    def offer_devices(self, one: Reservation) -> None:
        """Let decisions use its devices, although it still exists."""
        self._count(one, is_waiting=False)
        self.orphaned.drop(key_of(one))
        self._fleet.free(one)

    @contextmanager
    def held_tentatively(self, ask: ReservationRequest, placement: Placement) -> Iterator[None]:
        """Marks the slots as taken while the write is in flight. Afterwards the fleet shows the actual holders again:
        the slots may have been offered and turned out not to be free."""
        tentative = Reservation(
            ask.id,
            ask.namespace,
            ask.claim_digest,
            placement.node,
            placement.slots,
            LONG_AGO,
            None,
            is_shared=ask.is_shared,
            delivery=ask.delivery,
        )
        self._fleet.hold(tentative)
        try:
            yield
        finally:
            known = self._all.get(key_of(tentative))
            if known is None or set(known.slots) != set(tentative.slots):
                self._fleet.free(tentative)
                self._restore_holders(placement)

    def _restore_holders(self, placement: Placement) -> None:
        """Stop offering the slots until their reservations are checked again."""
        uuids = {slot.uuid for slot in placement.slots}
        for one in self.on(placement.node).values():
            if uuids.intersection(one.uuids):
                self._count(one, is_waiting=one.phase is Phase.PENDING)
                self._fleet.hold(one)
                if one.deadline is not None:
                    self.check_again(one, one.deadline)

    def _count(self, one: Reservation, *, is_waiting: bool) -> None:
        """Reservations of the queue do not count: they are for pods that exist, and no review has made them."""
        if is_waiting and not one.id.startswith(OWN_IDS):
            self.pending.put(key_of(one), one.namespace, len(one.slots))
            if one.uid is None:
                self.unnamed.put(key_of(one), one.namespace, len(one.slots))
        else:
            self.pending.drop(key_of(one))
            self.unnamed.drop(key_of(one))

    def pending_with_pod(self) -> Sequence[Reservation]:
        """The pending reservations that a pod was named for."""
        found = (self._all[node, ReservationId(one)] for node, one in self.pending)
        return [one for one in found if one.uid is not None]

    def check_again(self, one: Reservation, at: datetime) -> None:
        """Schedule another check of a reservation that is past its deadline and still exists."""
        self._add_deadline(key_of(one), at)

    def count_as_orphaned(self, one: Reservation, until: datetime) -> None:
        """The reservation is past its deadline and its pod may have run: count it with the orphans."""
        key = key_of(one)
        known = self._all.get(key)
        if known is not None and known.phase is Phase.PENDING:  # it may have been confirmed in the meantime
            self.orphaned.put(key, known.namespace, len(known.slots))
        self.check_again(one, until)

    def past_deadline(self, now: datetime) -> Iterator[Reservation]:
        """The reservations past their deadline, each once."""
        past: dict[Key, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            past[heapq.heappop(self._deadlines)[1]] = None
        for key in past:
            one = self._all.get(key)
            if one is not None and one.is_past_deadline(now):
                yield one

    def find(self, reservation_id: ReservationId, node: str | None = None) -> Reservation | None:
        """The reservation on that node if there is one, else the first by rank."""
        known = None if node is None else self._all.get((node, reservation_id))
        return known or next(iter(self.find_all(reservation_id)), None)

    def find_exact(self, reservation_id: ReservationId, node: str | None) -> Reservation | None:
        """The reservation on that node only, if a node is given: a pod may have another one under this id elsewhere."""
        return self.find(reservation_id) if node is None else self._all.get((node, reservation_id))

    def find_all(self, reservation_id: ReservationId) -> Sequence[Reservation]:
        return self._ranked(self._by_id.get(reservation_id, ()))

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        holders = self._fleet.holders(uuid)
        found = [one for _, holder in sorted(holders.items()) for one in self.find_all(holder) if uuid in one.uuids]
        return list(dict.fromkeys(found))

    def of_pod(self, uid: str) -> Reservation | None:
        return next(iter(self._ranked(self._by_uid.get(uid, ()))), None)

    def all_of_pod(self, uid: str) -> Sequence[Reservation]:
        return self._ranked(self._by_uid.get(uid, ()))

    def _ranked(self, keys: Collection[Key]) -> Sequence[Reservation]:
        found = [self._all[key] for key in keys]
        return sorted(found, key=rank) if len(found) > 1 else found

    def all(self) -> Collection[Reservation]:
        return self._all.values()


def remove_key(keys: dict[Named, list[Key]], name: Named, key: Key) -> None:
    keys[name].remove(key)
    if not keys[name]:
        del keys[name]
