"""Publishes proof devices: one for each GPU whose node has fresh evidence, in ResourceSlices of gpuwarden's driver.

Each device ends with the evidence of its node, so Kubernetes evicts its pod even if no process of gpuwarden runs. An
end that comes nearer is written at once; one that moves away is written when half of the time is over.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Final, Protocol

import structlog
from attrs import define, evolve, field, frozen

from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.fleet import Fleet
from webhook.core.injection import Injection, injection_in_force, takes_native
from webhook.core.proof_devices import (
    ProofDevice,
    ProofMode,
    end_of_device,
    hash_attribute,
    is_earlier,
    is_write_due,
    next_change,
    published,
)
from webhook.core.raw import Raw
from webhook.dra.claims import AllocatedClaims
from webhook.dra.written_slices import WrittenSlices
from webhook.kube.api_objects import ObjectClient, is_not_found
from webhook.kube.resource_slices import CHALLENGE_AFTER, ProofSlice, slices_of, stamp
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Nodes written in one pass, besides those whose evidence is lost.
BATCH_SIZE: Final = 200
# Nodes compared before other tasks get to run.
NODES_AT_A_TIME: Final = 200
CONCURRENCY: Final = 8
# Failures after which a pass stops: the API server may be down.
MAX_FAILURES: Final = 3
# How often it is checked whether a source of evidence that was just added has reported on a node.
AWAITED_EVERY: Final = timedelta(seconds=5)
# When a slice that the API server rejects is tried again.
AGAIN_AFTER: Final = timedelta(minutes=1)
# A higher generation was not written by us, and leaves no room for the next ones.
MAX_GENERATION: Final = 2**62
PUBLISHED, ENDED = "published", "ended"


@frozen
class SliceWrites:
    """What has to be done for one node, in this order."""

    node: str
    deleted: tuple[ProofSlice, ...]
    written: tuple[Raw, ...]
    # Whether a device ends earlier than it is written.
    is_urgent: bool


class NodeChallenges(Protocol):
    """What nodes have to answer for claims with a fresh challenge."""

    def asked_after(self, node: str) -> datetime | None:
        """The node has to answer a challenge that is newer than this."""

    def is_silent(self, node: str) -> bool:
        """Whether the node has not answered in time."""

    def take_changes(self) -> set[str]:
        """The nodes for which this may have changed since the last call."""


@define(eq=False, repr=False)
class ProofSlices:
    """The elected leader writes in `step`. `is_current` is about the watches behind the fleet, `are_claims_current`
    about the one of claims: while it is interrupted, each device counts as used."""

    _objects: ObjectClient
    _fleet: Fleet
    _claims: AllocatedClaims
    _clock: Clock
    _is_current: Callable[[], bool]
    _are_claims_current: Callable[[], bool]
    _gpu_driver: str
    _count_write: Callable[[str], None] = lambda _: None
    # Whether each of these sources of evidence may still report on the node for the first time.
    _awaits: Callable[[str, Collection[str]], bool] = lambda _node, _sources: False
    # How far the clocks of Kubernetes may be behind.
    _skew: timedelta = timedelta()
    # Claims with a fresh challenge, if they are served.
    _challenges: NodeChallenges | None = None
    view: WrittenSlices = field(factory=WrittenSlices)
    _changed: set[str] = field(init=False)
    # Nodes to compare because something has changed, and nodes with writes that are not urgent.
    _todo: dict[str, None] = field(factory=dict, init=False)
    _waiting: dict[str, None] = field(factory=dict, init=False)
    # When nodes have to be compared again, and the first of these moments.
    _due: dict[str, datetime] = field(factory=dict, init=False)
    _first_due: datetime | None = field(default=None, init=False)
    _failures: int = field(default=0, init=False)
    # Whether evidence was lost since the pass began.
    _has_loss: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._changed = self._fleet.collect_changes()

    def begin(self) -> None:
        """This process was elected: compare all nodes."""
        self._todo.update(dict.fromkeys((*self._fleet.indexed_nodes, *self.view.nodes())))

    async def step(self) -> None:
        """One pass over what has changed. What fails is left for the next one."""
        if not self._is_current():
            return
        now, self._has_loss = self._clock(), False
        self._fleet.advance(now)
        self._collect(now)
        batch = await self._needed(now)
        self._failures, limit = 0, asyncio.Semaphore(CONCURRENCY)
        done = await asyncio.gather(*(self._attempt(one, limit, now) for one in batch), return_exceptions=True)
        left = done.count(False)
        if left:
            log.warning("proof devices left for the next pass", nodes=left)
        for one in done:  # a bug with one node must not stop the others
            if isinstance(one, BaseException):
                raise one

    def counts(self) -> dict[str, int]:
        """The written devices by state."""
        now, found = self._clock(), {PUBLISHED: 0, ENDED: 0}
        for node in self.view.nodes():
            for one in self.view.devices(node).values():
                found[ENDED if one.has_ended(now) else PUBLISHED] += 1
        return found

    def is_outlasting(self, node: str) -> bool:
        """Whether a device is written that has to end earlier, because the node has lost its evidence."""
        now = self._clock()
        evidence = self._fleet.fresh_evidence(node) or self._undecided_evidence(node, now)
        written = (one for one in self.view.devices(node).values() if not one.has_ended(now))
        return any(evidence is None or ends_before(evidence, one) for one in written)

    def hurry(self) -> None:
        """Evidence is lost: writes of this pass that are not urgent and have not begun wait for the next one."""
        self._has_loss = True

    # What has to be written.

    def _collect(self, now: datetime) -> None:
        """Enters the nodes that have to be compared."""
        asked = self._challenges.take_changes() if self._challenges is not None else ()
        changed = (*self._changed, *self.view.take_changed_nodes(), *self._claims.take_changes(), *asked)
        self._todo.update(dict.fromkeys(changed))
        self._changed.clear()
        if self._first_due is not None and self._first_due <= now:
            late = [node for node, moment in self._due.items() if moment <= now]
            for node in late:
                del self._due[node]
            self._todo.update(dict.fromkeys(late))
            self._first_due = min(self._due.values(), default=None)

    async def _needed(self, now: datetime) -> list[SliceWrites]:
        """All urgent writes, then others until the pass is full. Their nodes are compared again in the next pass:
        somebody may delete the slice before we see it."""
        found = []
        for number, node in enumerate(list(self._todo)):
            del self._todo[node]
            self._waiting.pop(node, None)
            writes = self._compared(node, now)
            if writes is not None and writes.is_urgent:
                found.append(writes)
                self._todo[node] = None
            elif writes is not None:
                self._waiting[node] = None
            if number % NODES_AT_A_TIME == NODES_AT_A_TIME - 1:
                await asyncio.sleep(0)
        for node in list(self._waiting)[: max(0, BATCH_SIZE - len(found))]:
            del self._waiting[node]
            writes = self._compared(node, now)
            if writes is not None:
                found.append(writes)
                self._todo[node] = None
        return found

    def _compared(self, node: str, now: datetime) -> SliceWrites | None:
        slices, written = self.view.of(node), self.view.devices(node)
        used = {*self._claims.proofs_in_use(node), *(() if self._are_claims_current() else written)}
        wanted = published(self._proven(node, written, used, now), written.values(), used, now, self._skew)
        wanted = self._closed(node, wanted)
        question = self._question(node)
        is_sound = self._is_sound(node, slices, written) and is_asked(slices, question)
        if is_sound and not is_write_due(wanted, written, now):
            moment = next_change(wanted, written, used, now)
            if used and self._undecided_evidence(node, now) is not None:
                moment = min(moment or now + AWAITED_EVERY, now + AWAITED_EVERY)
            self._compare_at(node, moment)
            return None
        generation = max((one.generation for one in slices), default=0)
        is_worn = generation >= MAX_GENERATION
        if not is_sound or [one.name for one in wanted] != sorted(written):
            generation = 1 if is_worn else generation + 1
        raws = slices_of(node, wanted, generation, self._gpu_driver, self._mode(node))
        for raw in raws[:1]:
            raw["metadata"] |= question
        names = {raw["metadata"]["name"] for raw in raws}
        return SliceWrites(
            node,
            deleted=tuple(one for one in slices if is_worn or one.name not in names),
            written=tuple(raws),
            is_urgent=any(ends_earlier(one, written) for one in wanted),
        )

    def _is_sound(self, node: str, slices: Collection[ProofSlice], written: Mapping[str, ProofDevice]) -> bool:
        """Whether the slices are as we write them for these devices."""
        generation = max((one.generation for one in slices), default=0)
        devices = [written[name] for name in sorted(written)]
        raws = slices_of(node, devices, generation, self._gpu_driver, self._mode(node))
        ours = {raw["metadata"]["name"]: raw for raw in raws}
        return len(ours) == len(slices) and all(one.name in ours and one.has_spec_of(ours[one.name]) for one in slices)

    def _proven(
        self, node: str, written: Mapping[str, ProofDevice], used: set[str], now: datetime
    ) -> Iterator[ProofDevice]:
        """The proven devices of the node. One in use stays proven when its GPU is no longer offered: only the evidence
        decides whether its pod may go on."""
        evidence = self._fleet.fresh_evidence(node)
        known = [written[name] for name in used if name in written]
        if evidence is None:
            undecided = self._undecided_evidence(node, now)
            if undecided is not None:
                yield from (nearer(one, written[one.name]) for one in still_proven(known, undecided))
            return
        claimed = self._claims.proofs_in_use(node)
        # While claims are not watched, one that counts as used may be free: a reservation ends it.
        yield from still_proven((one for one in known if one.name in claimed or not self._is_held(node, one)), evidence)
        # These replace the same devices above.
        for device in self._fleet.indexed_nodes[node].node.devices:
            one = ProofDevice.of(device.uuid, evidence.hash, evidence.until)
            owner = self._fleet.set_aside_for(device.uuid)
            if self._mode(node) is ProofMode.NATIVE and owner is not None:
                one = evolve(one, kept_for=owner.digest)
            may_wait = not one.kept_for and self._can_be_challenged(node, evidence)
            for each in (one, one.with_challenge) if may_wait else (one,):
                if self._is_offered(node, device) or each.name in claimed:
                    yield each

    def _can_be_challenged(self, node: str, evidence: Evidence) -> bool:
        has_answered = evidence.challenged is not None and evidence.until is not None
        return self._challenges is not None and has_answered and self._mode(node) is ProofMode.NATIVE

    def _closed(self, node: str, devices: tuple[ProofDevice, ...]) -> tuple[ProofDevice, ...]:
        """A node for reservations gets no more claims that the scheduler chooses for, also when those of now have
        ended. A node that does not answer gets no more claims with a fresh challenge."""
        indexed = self._fleet.indexed_nodes.get(node)
        if indexed is not None and self._mode(node) is ProofMode.NATIVE and not self._takes_native(indexed.node):
            return tuple(evolve(one, is_closed=True) for one in devices)
        if self._challenges is None or not self._challenges.is_silent(node):
            return devices
        return tuple(evolve(one, is_closed=one.is_closed or one.is_challenged) for one in devices)

    def _question(self, node: str) -> Raw:
        """Metadata of the node's first slice that asks `attest` to answer a new challenge."""
        after = self._challenges.asked_after(node) if self._challenges is not None else None
        return {} if after is None else {"annotations": {CHALLENGE_AFTER: stamp(after)}}

    def _is_held(self, node: str, one: ProofDevice) -> bool:
        """By a reservation whose pod gets its GPUs in another way than by claims."""
        return self._mode(node) is ProofMode.NATIVE and bool(self._fleet.holders(DeviceUuid(one.uuid)))

    def _undecided_evidence(self, node: str, now: datetime) -> Evidence | None:
        """The evidence of a node that lacks only the first report of sources that were just added: running pods
        have not lost it, and no other pod gets it (decision 15)."""
        indexed = self._fleet.indexed_nodes.get(node)
        evidence = indexed.evidence if indexed is not None else None
        if evidence is None or not evidence.missing_sources or not self._awaits(node, evidence.missing_sources):
            return None
        rest = evolve(evidence, missing_sources=frozenset())
        return rest if state_of(rest, now) is EvidenceState.FRESH else None

    def _is_offered(self, node: str, device: Device) -> bool:
        """Healthy, on this node only, and not held by a reservation. On a node whose GPUs come from the claims of
        reservations, those are offered too: such a claim names the UUIDs of its reservation."""
        injection = self._injection(node)
        if injection is Injection.DRA:
            return self._fleet.may_be_proven(device.uuid)
        # A claim would take a GPU that the device plugin can give away, or that is for reservations.
        if not self._takes_native(self._fleet.indexed_nodes[node].node):
            return False
        if self._awaits_kubelet(node):
            return False  # pods with the injection `plugin` may get any GPU until the kubelet has chosen
        if device.is_mig:
            return False  # claims that the scheduler chooses for ask for whole GPUs, and would try its proof in vain
        return self._fleet.may_be_proven(device.uuid) and not self._fleet.holders(device.uuid)

    def _awaits_kubelet(self, node: str) -> bool:
        return self._fleet.node_class(self._fleet.indexed_nodes[node].node_group.node_class).awaits_kubelet

    def _mode(self, node: str) -> ProofMode:
        return ProofMode.DRA if self._injection(node) is Injection.DRA else ProofMode.NATIVE

    def _injection(self, node: str) -> Injection | None:
        indexed = self._fleet.indexed_nodes.get(node)
        return None if indexed is None else injection_in_force(indexed.node, self._fleet.injection)

    def _takes_native(self, node: Node) -> bool:
        return takes_native(node, self._fleet.injection)

    def _compare_at(self, node: str, moment: datetime | None) -> None:
        if moment is None:
            self._due.pop(node, None)
            return
        self._due[node] = moment
        self._first_due = moment if self._first_due is None else min(moment, self._first_due)

    # Writing.

    async def _attempt(self, writes: SliceWrites, limit: asyncio.Semaphore, now: datetime) -> bool:
        """Whether nothing is left for the next pass."""
        async with limit:
            if self._failures >= MAX_FAILURES:
                return False
            if self._has_loss and not writes.is_urgent:
                return True  # its node is compared again in the next pass
            try:
                await self._write(writes)
            except RefusedError as exc:
                log.warning("proof devices rejected by the API server", node=writes.node, problem=str(exc))
                self._count_write("refused")
                self._todo.pop(writes.node, None)
                self._compare_at(writes.node, now + AGAIN_AFTER)
            except (StaleError, StoreUnavailableError) as exc:
                log.debug("proof devices left for the next pass", node=writes.node, exc_info=exc)
                self._count_write("failed")
                self._failures = self._failures + 1 if isinstance(exc, StoreUnavailableError) else 0
                return False
            self._failures = 0
            return True

    async def _write(self, writes: SliceWrites) -> None:
        for one in writes.deleted:
            await self._delete(one)
        for raw in writes.written:
            await self._write_slice(raw)
        log.info("proof devices written", node=writes.node, slices=len(writes.written))

    async def _delete(self, one: ProofSlice) -> None:
        try:
            await self._objects.delete({"metadata": one.metadata})
        except StaleError:
            await self._read_again(one.name)
            raise
        self.view.forget(one.name)
        self._count_write("deleted")

    async def _write_slice(self, raw: Raw) -> None:
        known = self.view.get(raw["metadata"]["name"])
        if known is not None and known.has_content_of(raw):
            return
        try:
            if known is None:
                self.view.changed(await self._objects.create(raw))
            else:
                self.view.changed(await self._objects.replace(known.replaced_by(raw)))
        except StaleError:
            await self._read_again(raw["metadata"]["name"])
            raise
        except StoreUnavailableError as exc:
            if known is None or not is_not_found(exc):
                raise
            self.view.forget(known.name)  # somebody has deleted it, and the watch has not told yet
            raise StaleError(known.name) from exc
        self._count_write("written")

    async def _read_again(self, name: str) -> None:
        found = await self._objects.get(name)
        if found is None:
            self.view.forget(name)
        else:
            self.view.changed(found)


def still_proven(used: Iterable[ProofDevice], evidence: Evidence) -> Iterator[ProofDevice]:
    """The devices that prove the same as this evidence, with its end."""
    attribute, end = hash_attribute(evidence.hash), end_of_device(evidence.until)
    for one in used:
        if one.proves(attribute):
            yield evolve(one, end=end)


def is_asked(slices: Collection[ProofSlice], question: Raw) -> bool:
    """Whether the node has been asked this. Without a slice it cannot be."""
    asked = question.get("annotations", {}).items()
    return not slices or any(one.annotations.items() >= asked for one in slices)


def nearer(one: ProofDevice, other: ProofDevice) -> ProofDevice:
    """The one that ends first."""
    return other if is_earlier(other.end, one.end) else one


def ends_before(evidence: Evidence, one: ProofDevice) -> bool:
    """Whether the evidence ends before this device, or is no proof of it."""
    return is_earlier(end_of_device(evidence.until), one.end) or one.hash != hash_attribute(evidence.hash)


def ends_earlier(one: ProofDevice, written: Mapping[str, ProofDevice]) -> bool:
    before = written.get(one.name)
    return before is not None and is_earlier(one.end, before.end)
