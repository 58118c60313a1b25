"""Reservations in GPUNode objects: the store's version is the lock, its own rules are the second one.

Each node has a desk. Moves that arrive while one write is under way share the next one, so many reservations on one
node cost few writes. After an answer that was lost, late or stale the object is read again and the moves are made on
what is really there: a move that was made already is found made.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import define, field

from webhook.core.device import DeviceUuid
from webhook.core.errors import (
    DeadlinePassedError,
    GpuwardenError,
    LedgerError,
    LedgerUnavailableError,
    PlacementRefusedError,
    SlotsTakenError,
    UnknownReservationError,
)
from webhook.core.fleet import Fleet
from webhook.core.raw import Raw
from webhook.core.reservation import (
    Orphan,
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError, object_name, with_finalizer, with_held
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.ledger.moves import (
    Abandon,
    Adopt,
    BindPod,
    Expire,
    Held,
    HoldSlots,
    MarkUnused,
    Move,
    Promise,
    Refresh,
    Release,
    Times,
    Unmark,
    WriteAgainError,
    may_give_way,
    promise_of,
)
from webhook.ledger.pending import PendingGpus
from webhook.ledger.reservation_index import ReservationIndex
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.ledger.store import GpuNodeStore
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# For moves that no review waits for.
PATIENCE = timedelta(seconds=10)
# Between two tries on one object: long enough for the others' writes, shorter than anybody's patience.
# The longest pause is for a store that does not answer or is overloaded.
BACKOFF = Backoff(timedelta(seconds=0.02), timedelta(seconds=0.5), jitter=(0.5, 1.5))
# How long after a pod was named it is asked whether it exists, while reviews wait for room; and of how many at once.
EARLY = (timedelta(seconds=0.5), timedelta(seconds=2), timedelta(seconds=6))
ASKED_AT_ONCE = 32


class PodReaderUnavailableError(GpuwardenError):
    """Nobody can say at this moment whether a pod exists."""


class PodReader(Protocol):
    """Knows for certain which pods exist and which do not: by a quorum read, never by a cache."""

    async def look(self, pod: PodIdentity) -> PodSnapshot | None:
        """The pod as it is now; None if it is gone. Raises WitnessAwayError."""

    async def reserved_pods(self) -> Sequence[ReservedPod]:
        """All pods that carry a reservation. Raises WitnessAwayError."""


@define(eq=False)
class PendingWrite:
    """A move that somebody waits for."""

    move: Move
    answer_by: datetime
    done: asyncio.Future[Reservation | None]
    result: Reservation | None = None

    def fail(self, error: LedgerError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def succeed(self) -> None:
        if not self.done.done():
            self.done.set_result(self.result)


@define(eq=False)
class NodeWriter:
    """One node: the object as last seen, and who wants to change it."""

    name: str
    raw: Raw | None = None
    node: GpuNode | None = None
    # When it was last read, on the ledger's own count; 0 while there is none.
    seen: int = 0
    waiting: list[PendingWrite] = field(factory=list)
    # What the store has had against a single move since its last write.
    refusal: str = ""
    worker: asyncio.Task[None] | None = None


@define(eq=False)
class PodCensus:
    """All carriers, as a read found them that was begun at this count."""

    begun: int
    found: asyncio.Future[Sequence[ReservedPod]]


class ClusterLedger:
    """Any number of these may share a store."""

    def __init__(
        self,
        fleet: Fleet,
        store: GpuNodeStore,
        pod_reader: PodReader,
        clock: Clock,
        times: Times,
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._backoff = backoff
        self._index = ReservationIndex(fleet)
        self._store = store
        self._pod_reader = pod_reader
        self._in_vain: set[Promise] = set()  # no pod will come for these, until they are cleared away
        self._asked: dict[Promise, int] = {}  # how often, while they are pending
        self._clock = clock
        self._times = times
        self._writers: dict[str, NodeWriter] = {}
        self._count = 0
        self._census: PodCensus | None = None

    # What the watch tells.

    def learn(self, raw: Raw) -> None:
        """A GPUNode as somebody saw it; older than what is known, it is nothing new. What was held on one that cannot
        be read is remembered, as on one that has gone."""
        try:
            node = GpuNode.parse(raw)
        except UnreadableGpuNodeError as exc:
            log.warning("GPUNode cannot be read", problem=str(exc))
            self.forget(object_name(raw))  # nothing can be written there
            return
        writer = self._writer(node.name)
        if writer.node is not None and writer.node.version >= node.version:
            return
        self._count += 1
        writer.raw, writer.node, writer.seen = raw, node, self._count
        self._index.replace(node.name, node.reservations)

    def forget(self, name: str) -> None:
        """The object has gone. What was held is remembered: its devices are offered to nobody meanwhile."""
        writer = self._writers.get(name)
        if writer is not None:
            writer.raw, writer.node, writer.seen = None, None, 0
            if writer.worker is None or writer.worker.done():
                del self._writers[name]

    def _writer(self, name: str) -> NodeWriter:
        return self._writers.setdefault(name, NodeWriter(name))

    @property
    def writer_count(self) -> int:
        """Of nodes that are there, and of those that somebody asks for at this moment."""
        return len(self._writers)

    @property
    def reminders(self) -> int:
        """Of deadlines, those that are over included."""
        return self._index.reminders

    # What the ledger does.

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        if self._clock() >= answer_by:
            raise DeadlinePassedError(ask.id)
        for known in self._index.several(ask.id):
            if not may_give_way(known, self._clock(), self._times, self._in_vain):
                placements = [Placement(known.node, known.slots)]
                break
            await self.expire(known)  # asked for again, it is a new one
        refused = 0
        for placement in placements:
            with self._index.wished(ask, placement):
                try:
                    taken = await self._moved(placement.node, HoldSlots(ask, placement, self._in_vain), answer_by)
                except SlotsTakenError as exc:
                    refused += isinstance(exc, PlacementRefusedError)
                    continue
            if taken is not None:
                return taken
        is_refused = refused and refused == len(placements)
        raise PlacementRefusedError(ask.id) if is_refused else SlotsTakenError(ask.id)

    async def find(
        self, reservation_id: ReservationId, *, node: str | None = None, is_fresh: bool = False
    ) -> Reservation | None:
        known = self._index.find(reservation_id, node)
        if node is not None and (known is None or known.node != node or is_fresh):
            await self._read(node)
            known = self._index.find(reservation_id, node)
        return known

    async def bind_to_pod(
        self,
        proof: PodProof,
        reservation_id: ReservationId,
        pod: PodIdentity,
        *,
        node: str | None = None,
        grace: timedelta | None = None,
    ) -> Reservation:
        return await self._bind(BindPod(reservation_id, pod, proof, grace), node)

    async def lengthen(self, one: Reservation, pod: PodIdentity, grace: timedelta) -> Reservation:
        """The pod exists, and may be given a longer grace period than is waited for; the reconciler's part."""
        return await self._bind(BindPod(one.id, pod, PodProof.CONFIRMED, grace, is_longest=True), one.node)

    async def _bind(self, move: BindPod, node: str | None) -> Reservation:
        known = self._index.find(move.reservation_id, node)
        bound = None if known is None else await self._moved(known.node, move)
        if bound is None:
            raise UnknownReservationError(move.reservation_id)
        return bound

    async def release(
        self, reservation_id: ReservationId, pod: PodIdentity, *, node: str | None = None, since: datetime | None = None
    ) -> bool:
        known = self._index.exactly(reservation_id, node)
        if known is None:
            return False
        return await self._moved(known.node, Release(known.id, pod, since or known.since)) is not None

    async def release_orphan(self, one: Reservation) -> bool:
        """Its pod must have ended by now. An orphan that has changed since it was read stays."""
        return await self._moved(one.node, Release(one.id, pod_of(one), one.since, one.orphan)) is not None

    async def abandon(
        self, reservation_id: ReservationId, pod: PodIdentity, orphan: Orphan, *, node: str, since: datetime
    ) -> Reservation | None:
        """The pod is gone and may still run: its devices stay held. None if they are not its any more."""
        return await self._moved(node, Abandon(reservation_id, pod, since, orphan))

    def orphans_on(self, node: str) -> Collection[Reservation]:
        """As far as they are known here."""
        held = self._index.on(node).values()
        return [one for one in held if one.orphan is not None and one.phase is Phase.FINALIZED]

    async def unmark(self, one: Reservation) -> bool:
        """The orphan's pod exists and is alive. An orphan that has changed since it was read stays one."""
        if one.orphan is None:
            return False
        return await self._moved(one.node, Unmark(one.id, one.uid or "", one.since, one.orphan)) is not None

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        """The orphan's node, asked at that time, says that nothing of the pod is left. False if it was asked too early:
        before the pod went, as far as clocks can tell."""
        move = MarkUnused(one.id, one.uid or "", one.since, asked_at)
        return await self._moved(one.node, move) is not None

    def given_up(self, now: datetime) -> Collection[Reservation]:
        """What nobody came for and `collect` has given up: all of it, however often it could not be cleared away."""
        return [
            one
            for one in self._index.all()
            if one.phase is Phase.PENDING and may_give_way(one, now, self._times, self._in_vain)
        ]

    async def expire(self, one: Reservation) -> bool:
        """Clear away what was given up; the reconciler's part."""
        return await self._moved(one.node, Expire(one.id, self._in_vain)) is not None

    async def adopt(self, reserved_pod: ReservedPod) -> Reservation | None:
        """Hold again what an existing pod carries and nobody else has; the reconciler's part.

        Raises SlotsTakenError, ReservationConflictError or ReservationExpiredError.
        """
        if reserved_pod.node is None:
            raise SlotsTakenError(reserved_pod.reservation_id)
        return await self._moved(reserved_pod.node, Adopt(reserved_pod, reserved_pod.node))

    def unsettled(self) -> Collection[str]:
        """Nodes whose object has to be rebuilt, kept from being deleted, or let go."""
        return [
            name for name, writer in self._writers.items() if writer.node is not None and not is_settled(writer.node)
        ]

    async def settle(self, name: str) -> None:
        """One step towards it; the reconciler's part."""
        await self._moved(name, Refresh())
        writer = self._writers.get(name)
        if (
            writer is not None
            and writer.raw is not None
            and writer.node is not None
            and not has_expected_finalizer(writer.node)
        ):
            self.learn(
                await self._store.put(with_finalizer(writer.raw, has_finalizer=not writer.node.is_being_deleted))
            )

    async def collect(
        self, now: datetime, *, never_came: Callable[[Reservation], bool] = lambda _: False
    ) -> Collection[Reservation]:
        """Offer what is past its deadline; whoever takes it clears it away in the store. `never_came`: whether it is
        certain that no pod was stored for it, where there is none at this moment. Only who watches pods can say that.
        """
        past = deque(self._index.past_deadline(now - self._times.clock_skew))
        given_up = []
        try:
            while past:
                if past[0].phase is Phase.PENDING and await self._is_given_up(past[0], now, never_came):
                    given_up.append(past[0])
                past.popleft()
        finally:
            for one in past:  # whoever waited for this is gone; the first one may be the reason
                self._index.look_again(one, now + PATIENCE if one is past[0] else one.deadline or now)
        return given_up

    async def confirm_early(self, now: datetime) -> None:
        pending = self._index.pending_with_pod()
        self._asked = {promise: self._asked.get(promise, 0) for promise in map(promise_of, pending)}
        due = [one for one in pending if self._is_due(one, now)][:ASKED_AT_ONCE]
        for one in due:
            self._asked[promise_of(one)] += 1
        await asyncio.gather(*(self._confirm_what_exists(one) for one in due))

    def _is_due(self, one: Reservation, now: datetime) -> bool:
        asked = self._asked[promise_of(one)]
        if asked == len(EARLY) or one.deadline is None:
            return False
        return one.deadline - self._times.pending_deadline + EARLY[asked] <= now

    async def _confirm_what_exists(self, one: Reservation) -> None:
        """That there is no pod yet says nothing: it may be on its way until the deadline."""
        pod = pod_of(one)
        try:
            if not self.why_not_its(one, await self._pod_reader.look(pod)):
                await self.bind_to_pod(PodProof.CONFIRMED, one.id, pod, node=one.node)
        except (PodReaderUnavailableError, LedgerError) as exc:
            log.info("not confirmed before its deadline", reservation=one.id, error=type(exc).__name__)

    async def _is_given_up(self, one: Reservation, now: datetime, never_came: Callable[[Reservation], bool]) -> bool:
        """A reservation that was promised to a pod ends only with proof that no such pod will use it, nor has."""
        if one.uid is not None:
            pod = pod_of(one)
            try:
                seen = await self._pod_reader.look(pod)
                if not self.why_not_its(one, seen):
                    await self.bind_to_pod(PodProof.CONFIRMED, one.id, pod, node=one.node)
                    return False
                if seen is None and not never_came(one):
                    self._index.keep(one, now + PATIENCE)
                    return False
            except (PodReaderUnavailableError, LedgerError) as exc:
                log.warning("expired reservation left as it is", reservation=one.id, exc_info=exc)
                self._index.keep(one, now + PATIENCE)
                return False
            self._in_vain = {promise for promise in self._in_vain if self._stands(promise)} | {promise_of(one)}
        self._index.offer(one)
        return True

    def _stands(self, promise: Promise) -> bool:
        node, reservation_id, _ = promise
        known = self._index.on(node).get(reservation_id)
        return known is not None and promise_of(known) == promise

    def why_not_its(self, held: Reservation, seen: PodSnapshot | None) -> str:
        """Empty as long as the pod may use what is held. That there is such a pod says nothing: anybody who may post
        reviews can name one. It carries the reservation, waits behind our gate for it to be written there, or was
        shown its devices as it started and has lost what it carried."""
        if seen is None:
            return "gone"
        if seen.has_ended:
            return "ended"
        if seen.is_gated or (seen.reserved_pod is not None and seen.reserved_pod.carries(held)):
            return ""
        if seen.may_see(held) and not self._has_another(seen.reserved_pod):
            return ""
        return "its pod does not carry it"

    def _has_another(self, one: ReservedPod | None) -> bool:
        own = None if one is None else self.carried(one)
        return one is not None and own is not None and own.phase is Phase.FINALIZED and own.uid == one.pod.uid

    def lapsed(self, reservation_id: ReservationId) -> Reservation | None:
        return self._index.lapsed(reservation_id, self._clock())

    @property
    def pending(self) -> PendingGpus:
        return self._index.pending

    @property
    def unnamed(self) -> PendingGpus:
        return self._index.unnamed

    @property
    def orphaned(self) -> PendingGpus:
        return self._index.orphaned

    def of_device(self, uuid: DeviceUuid) -> Sequence[Reservation]:
        return self._index.of_device(uuid)

    def of_pod(self, uid: str) -> Reservation | None:
        return self._index.of_pod(uid)

    def carried(self, one: ReservedPod) -> Reservation | None:
        """The reservation that the pod says it carries, as far as it is known here, whosever it is."""
        held = self._index.find(one.reservation_id, one.node)
        return held if held is not None and held.node == one.node else None

    def reservations(self) -> Collection[Reservation]:
        return self._index.all()

    async def rest(self) -> None:
        """Until no write is under way. What nobody waits for any more is not begun."""
        working = [writer.worker for writer in self._writers.values() if writer.worker is not None]
        if working:
            await asyncio.wait(working)

    # How a move gets into the store.

    async def _moved(self, node: str, move: Move, answer_by: datetime | None = None) -> Reservation | None:
        writer = self._writer(node)
        done: asyncio.Future[Reservation | None] = asyncio.get_running_loop().create_future()
        writer.waiting.append(PendingWrite(move, answer_by or self._clock() + PATIENCE, done))
        if writer.worker is None or writer.worker.done():
            writer.worker = asyncio.create_task(self._work(writer))
        return await done

    async def _work(self, writer: NodeWriter) -> None:
        while writer.waiting:
            turns, writer.waiting = writer.waiting, []
            try:
                await self._serve(writer, turns)
            except StoreUnavailableError as exc:
                log.warning("store away", node=writer.name, exc_info=exc)
            except Exception:  # a bug with one move: those that have queued behind it are served
                log.exception("moves failed", node=writer.name, moves=[type(turn.move).__name__ for turn in turns])
            finally:  # whatever went wrong, nobody is left waiting
                for turn in turns:
                    turn.fail(LedgerUnavailableError("the store cannot be reached"))
        if writer.node is None and self._writers.get(writer.name) is writer:
            del self._writers[writer.name]  # anybody can name a node that does not exist

    async def _serve(self, writer: NodeWriter, turns: list[PendingWrite]) -> None:
        """All turns to their end: made, failed, or out of time."""
        is_current, failures = writer.node is None, 1
        if writer.node is None:
            await self._read(writer.name)
        while turns := self._in_time(turns):
            if writer.raw is None or writer.node is None:
                self._without_object(writer.name, turns)
                return
            seen = writer.seen
            reserved_pods = () if writer.node.is_rebuilt else await self._reserved_pods(seen)
            if writer.seen != seen:
                continue  # it is another object by now, and who has something of it may have come since
            try:
                if not writer.node.is_rebuilt:
                    await self._rebuild(writer.node, writer.raw, reserved_pods)
                    is_current = True
                    continue
                held: Held = dict(writer.node.reservations)
                made, again, doubtful = self._apply(writer.node, held, turns, is_current=is_current)
                if held != writer.node.stored or (not writer.node.has_correct_counts and is_looked_at(turns)):
                    self.learn(await self._store.put_status(with_held(writer.raw, held.values(), writer.node.devices)))
                    is_current, writer.refusal = True, ""
            except RefusedError as exc:
                await self._one_by_one(writer, turns, str(exc))
                return
            except (StaleError, StoreUnavailableError) as exc:
                failures = failures + 1 if isinstance(exc, StoreUnavailableError) else 1
                await asyncio.sleep(self._backoff.seconds(failures))
                await self._read_in_time(writer, turns)
                is_current = True
                continue
            for turn in made:
                turn.succeed()
            if doubtful:
                await self._read(writer.name)
                is_current = True
            turns = again + doubtful

    def _without_object(self, name: str, turns: list[PendingWrite]) -> None:
        """Nothing is to be had there. What was held is only remembered, and forgotten as it ends."""
        for turn in turns:
            if isinstance(turn.move, Release | Expire | Abandon):
                turn.result = self._index.make(name, turn.move, self._clock(), self._times)
                turn.succeed()
            else:
                turn.fail(SlotsTakenError(f"there is no GPUNode {name}"))

    def _apply(
        self, node: GpuNode, held: Held, turns: list[PendingWrite], *, is_current: bool
    ) -> tuple[list[PendingWrite], list[PendingWrite], list[PendingWrite]]:
        """Make the moves on `held`: those made, those that need another write, and those that failed on what may be
        out of date: absence in a cache is no reason to refuse."""
        made: list[PendingWrite] = []
        again: list[PendingWrite] = []
        doubtful: list[PendingWrite] = []
        now = self._clock()
        for turn in turns:
            if node.is_being_deleted and isinstance(turn.move, HoldSlots) and turn.move.ask.id not in held:
                turn.fail(SlotsTakenError(f"GPUNode {node.name} is being deleted"))
                continue
            try:
                turn.result = turn.move.apply(node.stored, held, now, self._times)
                made.append(turn)
            except WriteAgainError:
                again.append(turn)
            except SlotsTakenError as exc:
                turn.fail(exc)
            except LedgerError as exc:
                if is_current:
                    turn.fail(exc)
                else:
                    doubtful.append(turn)
        return made, again, doubtful

    async def _rebuild(self, node: GpuNode, raw: Raw, reserved_pods: Sequence[ReservedPod]) -> None:
        """A new object says nothing of the pods that are there already: they say it. Those that are on the node come
        first, then the older ones."""
        held: Held = {}
        there = [one for one in reserved_pods if one.node == node.name and not one.has_ended]
        for one in sorted(there, key=lambda one: (not one.is_on_node, one.created, one.pod.uid)):
            try:
                Adopt(one, node.name).apply({}, held, self._clock(), self._times)
            except LedgerError:
                log.warning("not rebuilt: somebody else has its devices", reservation=one.reservation_id)
        self.learn(await self._store.put_status(with_held(raw, held.values(), node.devices)))
        log.info("GPUNode rebuilt from pods", node=node.name, reservations=len(held))

    async def _reserved_pods(self, seen: int) -> Sequence[ReservedPod]:
        """As a read finds them that was begun later than `seen`; whoever needs one at the same time shares it."""
        if self._census is None or self._census.begun < seen:
            self._count += 1
            self._census = PodCensus(self._count, asyncio.ensure_future(self._pod_reader.reserved_pods()))
        census = self._census
        try:
            return await asyncio.shield(census.found)
        except Exception as exc:
            if self._census is census:
                self._census = None
            if isinstance(exc, PodReaderUnavailableError):
                raise StoreUnavailableError("pods cannot be listed") from exc
            raise

    async def _one_by_one(self, writer: NodeWriter, turns: list[PendingWrite], why: str) -> None:
        """The store refused the write of several moves: one bad one must not fail its neighbours."""
        await self._read(writer.name)
        if len(turns) > 1:
            for turn in turns:
                await self._serve(writer, [turn])
            return
        if writer.refusal != why:  # it is tried again with every claim
            writer.refusal = why
            log.error("the store refused a move", node=writer.name, move=type(turns[0].move).__name__, problem=why)
        turns[0].fail(PlacementRefusedError("the store refused it"))

    def _in_time(self, turns: list[PendingWrite]) -> list[PendingWrite]:
        now = self._clock()
        for turn in turns:
            if now >= turn.answer_by:
                turn.fail(DeadlinePassedError("nobody waits any more"))
        return [turn for turn in turns if not turn.done.done()]

    async def _read_in_time(self, writer: NodeWriter, turns: list[PendingWrite]) -> None:
        """Read until it works or nobody waits any more."""
        failures = 2
        while self._in_time(turns):
            try:
                await self._read(writer.name)
            except StoreUnavailableError:
                failures += 1
                await asyncio.sleep(self._backoff.seconds(failures))
            else:
                return

    async def _read(self, name: str) -> None:
        raw = await self._store.get(name)
        if raw is None:
            self.forget(name)
        else:
            self.learn(raw)


def pod_of(held: Reservation) -> PodIdentity:
    return PodIdentity(held.namespace, held.pod_name or "", held.uid or "")


def is_looked_at(turns: Sequence[PendingWrite]) -> bool:
    """Whether somebody sees to it that the object is as it should be, whatever is done."""
    return any(isinstance(turn.move, Refresh) for turn in turns)


def is_settled(node: GpuNode) -> bool:
    """Whether it says what is held and how much that is, and goes neither too early nor never."""
    return node.is_rebuilt and node.has_correct_counts and has_expected_finalizer(node)


def has_expected_finalizer(node: GpuNode) -> bool:
    return not (node.has_finalizer and not node.reservations) if node.is_being_deleted else node.has_finalizer
