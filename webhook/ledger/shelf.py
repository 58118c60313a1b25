"""What is known here of the reservations of all nodes, for those who ask without waiting; and who tells the fleet."""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from webhook.core.device import DeviceUuid
from webhook.core.fleet import Fleet
from webhook.core.reservation import Ask, Phase, Placement, Reservation, ReservationId

Held = Mapping[ReservationId, Reservation]
NEVER = datetime.fromtimestamp(0, UTC)


class Shelf:
    """Reservations by id, pod and device. The fleet hears of every change."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._by_id: dict[ReservationId, Reservation] = {}
        self._by_uid: dict[str, ReservationId] = {}
        self._nodes: dict[str, Held] = {}
        self._deadlines: list[tuple[datetime, ReservationId]] = []  # a heap; entries may be out of date
        self._waiting: dict[str, set[ReservationId]] = {}  # by namespace

    def on(self, node: str) -> Held:
        return self._nodes.get(node, {})

    def replace(self, node: str, held: Held) -> None:
        """What is held on a node is now this."""
        before = self.on(node)
        for gone in before.keys() - held.keys():
            self._drop(before[gone])
        for one in held.values():
            if before.get(one.id) != one:
                self._put(one)
        if held:
            self._nodes[node] = held
        else:
            self._nodes.pop(node, None)

    def _put(self, one: Reservation) -> None:
        self._by_id[one.id] = one
        if one.uid is not None:
            self._by_uid[one.uid] = one.id
        if one.deadline is not None:
            heapq.heappush(self._deadlines, (one.deadline, one.id))
        self._count(one, is_waiting=one.phase is Phase.PENDING)
        self._fleet.hold(one)

    def _drop(self, one: Reservation) -> None:
        if self._by_id.get(one.id) == one:
            del self._by_id[one.id]
            self._count(one, is_waiting=False)
        if one.uid is not None and self._by_uid.get(one.uid) == one.id:
            del self._by_uid[one.uid]
        self._fleet.free(one)

    def offer(self, one: Reservation) -> None:
        """Let decisions have its devices, though it still stands."""
        self._count(one, is_waiting=False)
        self._fleet.free(one)

    @contextmanager
    def wished(self, ask: Ask, placement: Placement) -> Iterator[None]:
        """Meanwhile no other decision here wants the same. After it the fleet sees what is really held: that may be
        what was offered and turned out not to be free."""
        wish = Reservation(
            ask.id,
            ask.namespace,
            ask.claim_digest,
            placement.node,
            placement.slots,
            NEVER,
            None,
            is_shared=ask.is_shared,
        )
        self._fleet.hold(wish)
        try:
            yield
        finally:
            known = self._by_id.get(wish.id)
            if known is None or set(known.slots) != set(wish.slots):
                self._fleet.free(wish)
                self._show_again(placement)

    def _show_again(self, placement: Placement) -> None:
        uuids = {slot.uuid for slot in placement.slots}
        for one in self.on(placement.node).values():
            if uuids.intersection(one.uuids):
                self._count(one, is_waiting=one.phase is Phase.PENDING)
                self._fleet.hold(one)

    def _count(self, one: Reservation, *, is_waiting: bool) -> None:
        ids = self._waiting.setdefault(one.namespace, set())
        if is_waiting:
            ids.add(one.id)
        else:
            ids.discard(one.id)
        if not ids:
            del self._waiting[one.namespace]

    def waiting_in(self, namespace: str) -> int:
        return len(self._waiting.get(namespace, ()))

    def look_again(self, one: Reservation, at: datetime) -> None:
        """Its deadline has passed, and nothing could be decided."""
        heapq.heappush(self._deadlines, (at, one.id))

    def past_deadline(self, now: datetime) -> Iterator[Reservation]:
        """Each reservation once, as its deadline passes."""
        past: dict[ReservationId, None] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            past[heapq.heappop(self._deadlines)[1]] = None
        for reservation_id in past:
            one = self._by_id.get(reservation_id)
            if one is not None and one.is_past_deadline(now):
                yield one

    def find(self, reservation_id: ReservationId) -> Reservation | None:
        return self._by_id.get(reservation_id)

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        holders = self._fleet.holders(uuid)
        return [self._by_id[holder] for _, holder in sorted(holders.items()) if holder in self._by_id]

    def of_pod(self, uid: str) -> Reservation | None:
        reservation_id = self._by_uid.get(uid)
        return None if reservation_id is None else self._by_id.get(reservation_id)

    def all(self) -> Collection[Reservation]:
        return self._by_id.values()
