"""Reservations in GPUNode objects. The object's resourceVersion is the lock; the CRD's validation rules are the second.

Each node has one writer. Moves that arrive during a write share the next write, so many reservations on one node need
few writes. After a lost, late or stale response the ledger reads the object again and applies the moves to its current
state: a move that was already applied is recognized as such.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import define, evolve, field

from webhook.core.device import DeviceUuid
from webhook.core.errors import (
    DeadlinePassedError,
    GpuwardenError,
    LedgerError,
    LedgerUnavailableError,
    PlacementRefusedError,
    SlotsTakenError,
)
from webhook.core.fleet import Fleet
from webhook.core.injection import Injection, known_injection
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
from webhook.ledger import Ledger
from webhook.ledger.at_binding import binding_ends_after, is_made_at_binding
from webhook.ledger.moves import (
    Adopt,
    Assignment,
    BindPod,
    ClearOrphanMark,
    Expire,
    Held,
    HoldSlots,
    MarkOrphaned,
    MarkUnused,
    Move,
    NoteGiven,
    RecordDelivery,
    Refresh,
    Release,
    Times,
    WriteAgainError,
    assignment_of,
    may_be_displaced,
)
from webhook.ledger.reservation_index import ReservationIndex
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.ledger.store import GpuNodeStore
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# For moves that no review waits for.
DEFAULT_TIMEOUT = timedelta(seconds=10)
# Between two attempts on one object: long enough for other replicas' writes, shorter than any deadline. The maximum is
# for a store that does not respond or limits the request rate.
BACKOFF = Backoff(timedelta(seconds=0.02), timedelta(seconds=0.5), jitter=(0.5, 1.5))
# Delays after a pod was named at which the ledger checks whether it exists, while reviews wait for free devices, and
# the maximum number of concurrent checks.
EARLY_CHECKS = (timedelta(seconds=0.5), timedelta(seconds=2), timedelta(seconds=6))
MAX_EARLY_CHECKS = 32


class PodReaderUnavailableError(GpuwardenError):
    """Whether the pod exists cannot be determined at this moment."""


class PodReader(Protocol):
    """Reads pods with quorum reads, never from a cache, so its answers are authoritative."""

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        """The pod as it is now; None if it is gone. Raises PodReaderUnavailableError."""

    async def reserved_pods(self) -> Sequence[ReservedPod]:
        """All pods that carry a reservation. Raises PodReaderUnavailableError."""


@define(eq=False)
class PendingWrite:
    """A move that a caller waits for."""

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
    """One node: the last known object, and the writes that wait for it."""

    name: str
    raw: Raw | None = None
    node: GpuNode | None = None
    # Sequence number of the last read; 0 if there is no object.
    seen: int = 0
    waiting: list[PendingWrite] = field(factory=list)
    # Why the store refused a single move after its last successful write.
    refusal: str = ""
    worker: asyncio.Task[None] | None = None


@define(eq=False)
class PodCensus:
    """All pods with a reservation, from a list request that started at this sequence number."""

    begun: int
    found: asyncio.Future[Sequence[ReservedPod]]


@define(eq=False, repr=False)
class ClusterLedger(Ledger):
    """A ledger in the cluster. Any number of replicas may share a store."""

    _fleet: Fleet
    _store: GpuNodeStore
    _pod_reader: PodReader
    _clock: Clock
    _times: Times
    _backoff: Backoff = BACKOFF
    # Their pod does not exist; kept until they are deleted.
    _unclaimed: set[Assignment] = field(factory=set, init=False)
    _checks_made: dict[Assignment, int] = field(factory=dict, init=False)  # early checks per pending reservation
    _writers: dict[str, NodeWriter] = field(factory=dict, init=False)
    _count: int = field(default=0, init=False)
    _census: PodCensus | None = field(default=None, init=False)
    _index: ReservationIndex = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._index = ReservationIndex(self._fleet)

    # Input from the watch.

    def learn(self, raw: Raw) -> None:
        """A GPUNode as some client saw it; ignored if a newer version is known. The reservations of an object that
        cannot be parsed stay known, as if the object had been deleted."""
        try:
            node = GpuNode.parse(raw)
        except UnreadableGpuNodeError as exc:
            log.warning("GPUNode cannot be read", problem=str(exc))
            self.forget(object_name(raw))  # it cannot be written either
            return
        writer = self._writer(node.name)
        if writer.node is not None and writer.node.version >= node.version:
            return
        self._count += 1
        writer.raw, writer.node, writer.seen = raw, node, self._count
        self._index.replace(node.name, node.reservations)

    def forget(self, name: str) -> None:
        """The object is deleted. Its reservations stay known, so their devices are not offered in the meantime."""
        writer = self._writers.get(name)
        if writer is not None:
            writer.raw, writer.node, writer.seen = None, None, 0
            if writer.worker is None or writer.worker.done():
                del self._writers[name]

    def _writer(self, name: str) -> NodeWriter:
        return self._writers.setdefault(name, NodeWriter(name))

    # The ledger's operations.

    async def reserve(
        self, ask: ReservationRequest, placements: Sequence[Placement], *, answer_by: datetime
    ) -> Reservation:
        if self._clock() >= answer_by:
            raise DeadlinePassedError(ask.id)
        for known in self._index.find_all(ask.id):
            if not may_be_displaced(known, self._clock(), self._times, self._unclaimed):
                placements = [Placement(known.node, known.slots)]
                break
            await self.expire(known)  # the repeated request makes a new one
        refused = 0
        for placement in placements:
            with self._index.held_tentatively(ask, placement):
                try:
                    taken = await self._make(placement.node, HoldSlots(ask, placement, self._unclaimed), answer_by)
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

    async def extend_grace(self, one: Reservation, pod: PodIdentity, grace: timedelta) -> Reservation:
        """The pod exists and its grace period may be longer than the stored one. Only the reconciler calls this."""
        return await self._bind(BindPod(one.id, pod, PodProof.CONFIRMED, grace, is_longest=True), one.node)

    async def release_orphan(self, one: Reservation) -> bool:
        """The pod must have ended by now. An orphan that has changed since it was read stays."""
        return await self._make(one.node, Release(one.id, pod_of(one), one.since, one.orphan)) is not None

    async def mark_orphaned(
        self, reservation_id: ReservationId, pod: PodIdentity, orphan: Orphan, *, node: str, since: datetime
    ) -> Reservation | None:
        """The pod is gone and may still run: its devices stay reserved. None if they are no longer the pod's."""
        return await self._make(node, MarkOrphaned(reservation_id, pod, since, orphan))

    def orphans_on(self, node: str) -> Collection[Reservation]:
        """The orphans on a node, as far as this process knows."""
        held = self._index.on(node).values()
        return [one for one in held if one.orphan is not None and one.phase is Phase.FINALIZED]

    async def clear_orphan_mark(self, one: Reservation) -> bool:
        """The orphan's pod exists and is alive. An orphan that has changed since it was read stays one."""
        if one.orphan is None:
            return False
        return await self._make(one.node, ClearOrphanMark(one.id, one.uid or "", one.since, one.orphan)) is not None

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        """The node was asked at that time and reports that nothing of the orphan's pod is left. False if it was asked
        too early: possibly before the pod was gone, given the clock skew."""
        move = MarkUnused(one.id, one.uid or "", one.since, asked_at)
        return await self._make(one.node, move) is not None

    async def note_given(self, one: Reservation, given: tuple[DeviceUuid, ...]) -> bool:
        """The node of the pod reports which GPUs the pod has. False if the reservation is not the pod's any more."""
        return await self._make(one.node, NoteGiven(one.id, one.uid or "", one.since, given)) is not None

    def given_up(self, now: datetime) -> Collection[Reservation]:
        """All pending reservations that `collect` has expired and that are not deleted from the store yet."""
        return [
            one
            for one in self._index.all()
            if one.phase is Phase.PENDING and may_be_displaced(one, now, self._times, self._unclaimed)
        ]

    async def expire(self, one: Reservation) -> bool:
        """Delete an expired reservation. Only the reconciler calls this."""
        return await self._make(one.node, Expire(one.id, self._unclaimed)) is not None

    async def adopt(self, reserved_pod: ReservedPod) -> Reservation | None:
        """Reserve again what an existing pod carries, if its devices are free. Only the reconciler calls this.

        Raises SlotsTakenError, ReservationConflictError or ReservationExpiredError.
        """
        if reserved_pod.node is None:
            raise SlotsTakenError(reserved_pod.reservation_id)
        indexed = self._fleet.indexed_nodes.get(reserved_pod.node)
        devices = () if indexed is None else tuple(one.uuid for one in indexed.node.devices)
        return await self._make(reserved_pod.node, self._adoption(reserved_pod, reserved_pod.node, devices))

    def _adoption(self, reserved_pod: ReservedPod, node: str, devices: tuple[DeviceUuid, ...]) -> Adopt:
        given = tuple(uuid for uuid in reserved_pod.given if not self._is_elsewhere(uuid, node))
        return Adopt(evolve(reserved_pod, given=given), node, devices)

    async def record_delivery(self, one: Reservation, given: tuple[DeviceUuid, ...]) -> Reservation | None:
        """The kubelet has given these devices to the pod. Raises SlotsTakenError if another pod or another node has one
        of them. Only the reconciler calls this."""
        if any(self._is_elsewhere(uuid, one.node) for uuid in given):
            raise SlotsTakenError(one.id)
        return await self._make(one.node, RecordDelivery(one.id, one.uid or "", one.since, given))

    def _is_elsewhere(self, uuid: DeviceUuid, node: str) -> bool:
        """Whether the inventory lists the device on other nodes only: a node must not take devices of another one."""
        nodes = self._fleet.nodes_with_device(uuid)
        return bool(nodes) and node not in nodes

    def are_usable(self, uuids: Collection[DeviceUuid]) -> bool:
        """Whether the inventory lists all of these devices, healthy and without other trouble."""
        return not any(map(self._fleet.is_quarantined, uuids))

    def unsettled(self) -> Collection[str]:
        """Nodes whose object has to be rebuilt, needs its finalizer, or has to lose it."""
        return [
            name for name, writer in self._writers.items() if writer.node is not None and not is_settled(writer.node)
        ]

    async def settle(self, name: str) -> None:
        """One step towards a settled object. Only the reconciler calls this."""
        await self._make(name, Refresh())
        writer = self._writers.get(name)
        if (
            writer is not None
            and writer.raw is not None
            and writer.node is not None
            and not has_correct_finalizer(writer.node)
        ):
            self.learn(
                await self._store.put(with_finalizer(writer.raw, has_finalizer=not writer.node.is_being_deleted))
            )

    async def collect(
        self, now: datetime, *, was_never_created: Callable[[Reservation], bool] = lambda _: False
    ) -> Collection[Reservation]:
        """Offer the devices of reservations past their deadline; a new reservation then deletes them in the store.

        `was_never_created` returns whether it is certain that a pod that does not exist now was never stored. Only a
        caller that watches pods can know that.
        """
        past = deque(self._index.past_deadline(now - self._times.clock_skew))
        given_up = []
        try:
            while past:
                if past[0].phase is Phase.PENDING and await self._is_given_up(past[0], now, was_never_created):
                    given_up.append(past[0])
                past.popleft()
        finally:
            for one in past:  # cancelled or failed, possibly because of the first one
                self._index.check_again(one, now + DEFAULT_TIMEOUT if one is past[0] else one.deadline or now)
        return given_up

    async def confirm_early(self, now: datetime) -> None:
        pending = self._index.pending_with_pod()
        self._checks_made = {promise: self._checks_made.get(promise, 0) for promise in map(assignment_of, pending)}
        due = [one for one in pending if self._is_due(one, now)][:MAX_EARLY_CHECKS]
        for one in due:
            self._checks_made[assignment_of(one)] += 1
        await asyncio.gather(*(self._confirm_what_exists(one) for one in due))

    def _is_due(self, one: Reservation, now: datetime) -> bool:
        asked = self._checks_made[assignment_of(one)]
        if asked == len(EARLY_CHECKS) or one.deadline is None:
            return False
        return one.deadline - self._times.pending_deadline + EARLY_CHECKS[asked] <= now

    async def _confirm_what_exists(self, one: Reservation) -> None:
        """A missing pod proves nothing here: it may still be created before the deadline."""
        pod = pod_of(one)
        try:
            if not self.release_reason(one, await self._pod_reader.read_pod(pod)):
                await self.bind_to_pod(PodProof.CONFIRMED, one.id, pod, node=one.node)
        except (PodReaderUnavailableError, LedgerError) as exc:
            log.info("pod of a reservation cannot be checked yet", reservation=one.id, error=type(exc).__name__)

    async def _is_given_up(
        self, one: Reservation, now: datetime, was_never_created: Callable[[Reservation], bool]
    ) -> bool:
        """A reservation that was given to a pod expires only with proof that the pod neither uses nor used it."""
        if one.uid is not None:
            pod = pod_of(one)
            try:
                seen = await self._pod_reader.read_pod(pod)
                if not self.release_reason(one, seen):
                    await self.bind_to_pod(PodProof.CONFIRMED, one.id, pod, node=one.node)
                    return False
                if seen is None and not was_never_created(one):
                    self._index.count_as_orphaned(one, now + DEFAULT_TIMEOUT)
                    return False
            except (PodReaderUnavailableError, LedgerError) as exc:
                log.warning("expired reservation kept, its pod cannot be checked", reservation=one.id, exc_info=exc)
                self._index.count_as_orphaned(one, now + DEFAULT_TIMEOUT)
                return False
            self._unclaimed = {promise for promise in self._unclaimed if self._is_current(promise)} | {
                assignment_of(one)
            }
        self._index.offer_devices(one)
        return True

    def _is_current(self, promise: Assignment) -> bool:
        node, reservation_id, _ = promise
        known = self._index.on(node).get(reservation_id)
        return known is not None and assignment_of(known) == promise

    def release_reason(self, held: Reservation, seen: PodSnapshot | None) -> str:
        """Why the pod cannot use the reservation any more; empty as long as it may.

        That the pod exists is not enough, because any client that may send reviews can name a pod. The pod must carry
        the reservation, be gated until the reservation is written into it, or have started with the reserved devices
        visible and lost the annotations since.
        """
        if seen is None:
            return "gone"
        if seen.has_ended:
            return "ended"
        if seen.is_gated or (seen.reserved_pod is not None and seen.reserved_pod.carries(held)):
            return ""
        if not seen.is_on_node and self._may_be_bound(held):
            return ""
        if seen.may_use_gpus_of(held) and not self._has_other_reservation(seen.reserved_pod):
            return ""
        return "its pod does not carry the reservation"

    def _may_be_bound(self, held: Reservation) -> bool:
        """Whether the API server may still carry out the Binding for which the reservation was made."""
        return is_made_at_binding(held) and self._clock() < held.since + binding_ends_after(self._times.clock_skew)

    def _has_other_reservation(self, one: ReservedPod | None) -> bool:
        own = None if one is None else self.carried(one)
        return one is not None and own is not None and own.phase is Phase.FINALIZED and own.uid == one.pod.uid

    def carried(self, one: ReservedPod) -> Reservation | None:
        """The reservation that the pod carries, as far as this process knows. It may belong to another pod."""
        held = self._index.find(one.reservation_id, one.node)
        return held if held is not None and held.node == one.node else None

    async def finish_writes(self) -> None:
        """Wait until no write is in progress. Writes that no caller waits for are not started."""
        working = [writer.worker for writer in self._writers.values() if writer.worker is not None]
        if working:
            await asyncio.wait(working)

    # How a move is written to the store.

    async def _make(self, node: str, move: Move, answer_by: datetime | None = None) -> Reservation | None:
        writer = self._writer(node)
        done: asyncio.Future[Reservation | None] = asyncio.get_running_loop().create_future()
        writer.waiting.append(PendingWrite(move, answer_by or self._clock() + DEFAULT_TIMEOUT, done))
        if writer.worker is None or writer.worker.done():
            writer.worker = asyncio.create_task(self._write_pending(writer))
        return await done

    async def _write_pending(self, writer: NodeWriter) -> None:
        while writer.waiting:
            writes, writer.waiting = writer.waiting, []
            try:
                await self._apply_writes(writer, writes)
            except StoreUnavailableError as exc:
                log.warning("API server unavailable", node=writer.name, exc_info=exc)
            except Exception:  # a bug with one move must not stop the moves behind it
                log.exception("moves failed", node=writer.name, moves=[type(write.move).__name__ for write in writes])
            finally:  # no caller may wait forever
                for write in writes:
                    write.fail(LedgerUnavailableError("the API server cannot be reached"))
        if writer.node is None and self._writers.get(writer.name) is writer:
            del self._writers[writer.name]  # requests may name nodes that do not exist

    async def _apply_writes(self, writer: NodeWriter, writes: list[PendingWrite]) -> None:
        """Complete all writes: each is applied, fails or times out."""
        is_current, failures = writer.node is None, 1
        if writer.node is None:
            await self._read(writer.name)
        while writes := self._drop_late(writes):
            if writer.raw is None or writer.node is None:
                self._apply_without_object(writer.name, writes)
                return
            seen = writer.seen
            reserved_pods = () if writer.node.is_rebuilt else await self._reserved_pods(seen)
            if writer.seen != seen:
                continue  # the object was replaced, and new pods may exist
            try:
                if not writer.node.is_rebuilt:
                    await self._rebuild(writer.node, writer.raw, reserved_pods)
                    is_current = True
                    continue
                held: Held = dict(writer.node.reservations)
                applied, to_retry, stale = self._apply(writer.node, held, writes, is_current=is_current)
                if held != writer.node.stored or (not writer.node.has_correct_counts and includes_refresh(writes)):
                    self.learn(await self._store.put_status(with_held(writer.raw, held.values(), writer.node.devices)))
                    is_current, writer.refusal = True, ""
            except RefusedError as exc:
                await self._apply_one_by_one(writer, writes, str(exc))
                return
            except (StaleError, StoreUnavailableError) as exc:
                failures = failures + 1 if isinstance(exc, StoreUnavailableError) else 1
                await asyncio.sleep(self._backoff.seconds(failures))
                await self._read_until_late(writer, writes)
                is_current = True
                continue
            for write in applied:
                write.succeed()
            if stale:
                await self._read(writer.name)
                is_current = True
            writes = to_retry + stale

    def _apply_without_object(self, name: str, writes: list[PendingWrite]) -> None:
        """Without an object nothing can be reserved. Known reservations are only dropped from memory as they end."""
        for write in writes:
            if isinstance(write.move, Release | Expire | MarkOrphaned):
                write.result = self._index.make(name, write.move, self._clock(), self._times)
                write.succeed()
            else:
                write.fail(SlotsTakenError(f"there is no GPUNode {name}"))

    def _apply(
        self, node: GpuNode, held: Held, writes: list[PendingWrite], *, is_current: bool
    ) -> tuple[list[PendingWrite], list[PendingWrite], list[PendingWrite]]:
        """Apply the moves to `held`. Returns those applied, those that need another write, and those that failed on
        data that may be stale: absence in a cache is no reason to refuse a move."""
        applied: list[PendingWrite] = []
        to_retry: list[PendingWrite] = []
        stale: list[PendingWrite] = []
        now = self._clock()
        for write in writes:
            try:
                check_offered(node, write.move, held)
                write.result = write.move.apply(node.stored, held, now, self._times)
                applied.append(write)
            except WriteAgainError:
                to_retry.append(write)
            except SlotsTakenError as exc:
                write.fail(exc)
            except LedgerError as exc:
                if is_current:
                    write.fail(exc)
                else:
                    stale.append(write)
        return applied, to_retry, stale

    async def _rebuild(self, node: GpuNode, raw: Raw, reserved_pods: Sequence[ReservedPod]) -> None:
        """Restore the reservations of a new object from the pods that carry them: first those on the node, then the
        older ones."""
        held: Held = {}
        there = [one for one in reserved_pods if one.node == node.name and not one.has_ended]
        devices = tuple(one.uuid for one in node.devices)
        # Reservations for which any device will do come last.
        order = sorted(there, key=lambda one: (bool(one.delivery), not one.is_on_node, one.created, one.pod.uid))
        for one in order:
            try:
                self._adoption(one, node.name, devices).apply({}, held, self._clock(), self._times)
            except LedgerError:
                log.warning("reservation not rebuilt: another pod has its devices", reservation=one.reservation_id)
        self.learn(await self._store.put_status(with_held(raw, held.values(), node.devices)))
        log.info("GPUNode rebuilt from pods", node=node.name, reservations=len(held))

    async def _reserved_pods(self, seen: int) -> Sequence[ReservedPod]:
        """The result of a list request that started after `seen`. Concurrent callers share one request."""
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

    async def _apply_one_by_one(self, writer: NodeWriter, writes: list[PendingWrite], why: str) -> None:
        """The store refused a write of several moves: write them separately, so that one bad move fails alone."""
        await self._read(writer.name)
        if len(writes) > 1:
            for write in writes:
                await self._apply_writes(writer, [write])
            return
        if writer.refusal != why:  # logged once: every new claim tries it again
            writer.refusal = why
            move = type(writes[0].move).__name__
            log.error("write refused by the API server", node=writer.name, move=move, problem=why)
        writes[0].fail(PlacementRefusedError("the API server refused the write"))

    def _drop_late(self, writes: list[PendingWrite]) -> list[PendingWrite]:
        now = self._clock()
        for write in writes:
            if now >= write.answer_by:
                write.fail(DeadlinePassedError("no write before the deadline"))
        return [write for write in writes if not write.done.done()]

    async def _read_until_late(self, writer: NodeWriter, writes: list[PendingWrite]) -> None:
        """Read the object until a read succeeds or all writes are late."""
        failures = 2
        while self._drop_late(writes):
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


def includes_refresh(writes: Sequence[PendingWrite]) -> bool:
    """Whether a settling pass waits for this write: then the object's own state is corrected as well."""
    return any(isinstance(write.move, Refresh) for write in writes)


def check_offered(node: GpuNode, move: Move, held: Held) -> None:
    """Raises SlotsTakenError for a new reservation that the GPUNode does not take any more. The decision may have seen
    an older state: a device may be marked or gone, and kube-scheduler or the kubelet may give the GPUs away by now."""
    if not isinstance(move, HoldSlots) or move.ask.id in held:
        return
    if not {slot.uuid for slot in move.placement.slots} <= {one.uuid for one in node.devices if one.is_usable}:
        raise SlotsTakenError(f"GPUNode {node.name} does not offer all of these devices")
    if node.injection is None:
        return
    injection = known_injection(node.injection)
    if injection is None or (injection is Injection.PLUGIN) != (move.ask.delivery is not None):
        raise SlotsTakenError(f"{node.name} has the injection {node.injection}")


def is_settled(node: GpuNode) -> bool:
    """Whether the object lists its reservations and their count, and has a finalizer exactly as long as it needs
    one."""
    return node.is_rebuilt and node.has_correct_counts and has_correct_finalizer(node)


def has_correct_finalizer(node: GpuNode) -> bool:
    return not (node.has_finalizer and not node.reservations) if node.is_being_deleted else node.has_finalizer
