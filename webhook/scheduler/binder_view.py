"""What the binder knows: nodes and the room on them, pods that use it, pods that wait for our scheduler.

It hears all pods and nodes from watches. A pod that is about to be bound counts on its node from that moment on, until
the watch says where it is.
"""

from collections.abc import Callable, Collection, Mapping, Set
from datetime import datetime
from typing import Any

import msgspec
import structlog
from attrs import define, frozen

from webhook.core.device import Node
from webhook.core.errors import InvalidPodError
from webhook.core.neighbours import Company, Neighbours
from webhook.core.node_fit import Needs, Room, in_thousandths
from webhook.core.nodes_asked import Labels, NodesAsked
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.kube.node import node_of
from webhook.runtime.clock import LONG_AGO
from webhook.scheduler.binder_volumes import Wanted
from webhook.scheduler.binder_wire import AllocatableWire, NodeRoomWire, PodWire, beyond_us

log = structlog.get_logger(__name__)


@frozen
class Standing:
    """Where a pod that uses something is."""

    node: str
    needs: Needs
    company: Company
    is_seen: bool = True
    """Whether the API server has said so; otherwise it is on its way."""


@frozen
class Promise:
    """Volumes are being made for a pod on that node, and its room there is kept."""

    node: str
    claims: frozenset[str]
    since: datetime


@define(eq=False)
class Waiter:
    """A pod that waits for a node from us."""

    identity: PodIdentity
    pod: Pod
    version: str
    needs: Needs
    asked: NodesAsked
    priority: int
    created: datetime
    company: Company
    # What it asks for that we cannot keep.
    beyond_us: str = ""
    wanted: tuple[Wanted, ...] = ()
    # Which volume keeps it to the nodes that it is looked for on.
    kept_by: str = ""
    promise: Promise | None = None
    # Whether pods elsewhere kept it from the node of its GPUs when it was last looked at.
    is_ruled_out: bool = False
    is_on_its_way: bool = False
    seen: int = -1
    """The count of the world's changes when it was last looked at."""
    retry_at: datetime | None = None
    # After a refusal by somebody else: how often, what was known then, and from when on it is tried again, with news
    # and without.
    tries: int = 0
    heard: int = 0
    soonest: datetime | None = None
    not_before: datetime | None = None
    told: str = ""
    told_at: datetime | None = None
    # What its condition says, and when it was last tried to write one.
    shown: str = ""
    shown_at: datetime | None = None
    wish: Any = None
    """What the binder has made of it."""


class World:
    """Nodes, what is on them, and who waits. `changes` counts what may let a pod be bound that could not be before."""

    def __init__(self, scheduler_names: Collection[str], notify: Callable[[], None] = lambda: None) -> None:
        self.rooms: dict[str, Room] = {}
        self.waiters: dict[str, Waiter] = {}
        self.changes = 0
        self.reshaped = 0
        """Counts changes of nodes themselves and of what is proven of them."""
        self.freed = 0
        """Counts ends of pods that used something."""
        self.hostnames: dict[str, set[str]] = {}
        self.neighbours = Neighbours()
        self._scheduler_names = frozenset(scheduler_names)
        self.notify = notify
        self._standing: dict[str, Standing] = {}
        self._on: dict[str, dict[str, Needs]] = {}
        self._touched: dict[str, int] = {}
        self._elsewhere = 0  # nodes that are gone, or not there yet, share one count

    def touched(self, node: str) -> int:
        """The count of changes when something about that node changed last."""
        return self._touched.get(node, self._elsewhere)

    def touch(self, node: str, *, is_reshaped: bool = True) -> None:
        """Something that matters to pods for that node has changed."""
        self.changes += 1
        self.reshaped += is_reshaped
        if node in self.rooms:
            self._touched[node] = self.changes
        else:
            self._elsewhere = self.changes
        self.notify()

    @property
    def remembered(self) -> Set[str]:
        """The nodes whose last change is known by itself."""
        return self._touched.keys()

    # Nodes.

    def know_node(self, raw: Raw) -> None:
        try:
            node = node_of(raw)
            status = msgspec.convert(raw, NodeRoomWire).status or AllocatableWire()
            allocatable = in_thousandths(status.allocatable or {})
        except (msgspec.ValidationError, InvalidPodError) as exc:
            log.warning("Node left as it was known", exc_info=exc)
            return
        known = self.rooms.get(node.name)
        if known is not None and known.node == node and known.allocatable == allocatable:
            return
        if known is None:
            self.rooms[node.name] = room = Room(node, allocatable)
            for needs in self._on.get(node.name, {}).values():
                room.take(needs)
        else:
            self._forget_hostname(known.node)
            known.node, known.allocatable = node, allocatable
        self.hostnames.setdefault(hostname_of(node), set()).add(node.name)
        self.neighbours.know_node(node.name, node.labels)
        self.touch(node.name)

    def forget_node(self, name: str) -> None:
        room = self.rooms.pop(name, None)
        if room is not None:
            self._forget_hostname(room.node)
            self.neighbours.forget_node(name)
            self._touched.pop(name, None)
            self.touch(name)

    def _forget_hostname(self, node: Node) -> None:
        names = self.hostnames.get(hostname_of(node), set())
        names.discard(node.name)
        if not names:
            self.hostnames.pop(hostname_of(node), None)

    def know_namespace(self, name: str, labels: Labels | None) -> None:
        """None: there is none of that name any more."""
        if self.neighbours.know_namespace(name, labels):
            self.changes += 1
            self.reshaped += 1
            self.notify()

    # Pods.

    @property
    def uids(self) -> set[str]:
        return {*self._standing, *self.waiters}

    def know_pod(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        try:
            wire = msgspec.convert(raw, PodWire)
            needs = Needs.of(wire.spec)
            company = Company.of(wire.metadata.namespace or "", wire.metadata.labels, wire.spec.affinity)
        except (msgspec.ValidationError, InvalidPodError) as exc:
            log.warning("pod left as it was known", uid=uid, problem=str(exc))
            return
        if wire.has_ended:
            self.forget_pod(uid)
        elif wire.spec.node_name:
            self.waiters.pop(uid, None)
            self._stand(uid, Standing(wire.spec.node_name, needs, company))
        elif self._waits(wire):
            self._know_waiter(uid, wire, needs, company, raw)
        elif self.waiters.pop(uid, None) is not None:
            self._leave(uid)

    def forget_pod(self, uid: str) -> None:
        self.waiters.pop(uid, None)
        self._leave(uid)

    def _waits(self, wire: PodWire) -> bool:
        spec = wire.spec
        return (
            (spec.scheduler_name or "") in self._scheduler_names
            and not spec.scheduling_gates
            and wire.metadata.deletion_timestamp is None
        )

    def _know_waiter(self, uid: str, wire: PodWire, needs: Needs, company: Company, raw: Raw) -> None:
        try:
            pod = Pod.parse(raw)
        except InvalidPodError as exc:
            log.warning("pod left as it was known", uid=uid, problem=str(exc))
            return
        known = self.waiters.get(uid)
        if known is not None and (known.pod, known.needs, known.company) == (pod, needs, company):
            known.version = wire.metadata.resource_version
            return
        meta = wire.metadata
        waiter = Waiter(
            PodIdentity(meta.namespace or "", meta.name or "", uid),
            pod,
            meta.resource_version,
            needs,
            NodesAsked.of(pod),
            wire.spec.priority or 0,
            meta.creation_timestamp or LONG_AGO,
            company,
            beyond_us(wire.spec),
            tuple(one for volume in wire.spec.volumes or () for one in volume.wanted(meta.name or "")),
        )
        if known is not None:
            waiter.is_on_its_way, waiter.told, waiter.told_at = known.is_on_its_way, known.told, known.told_at
            waiter.tries, waiter.shown, waiter.shown_at = known.tries, known.shown, known.shown_at
            waiter.promise = known.promise
        self.waiters[uid] = waiter
        self.notify()

    # What stands where.

    def expect(self, waiter: Waiter, node: str) -> None:
        """The pod is being bound: what it needs is taken from now on."""
        waiter.is_on_its_way = True
        self._stand(waiter.identity.uid, Standing(node, waiter.needs, waiter.company, is_seen=False))

    def keep(self, waiter: Waiter, promise: Promise) -> None:
        """It is not bound yet, and what it needs stays taken."""
        for one in (waiter, self.waiters.get(waiter.identity.uid)):
            if one is not None:
                one.is_on_its_way, one.promise = False, promise

    def give_up(self, waiter: Waiter) -> None:
        """It was not bound after all."""
        uid = waiter.identity.uid
        standing = self._standing.get(uid)
        if standing is not None and not standing.is_seen:
            self._leave(uid, is_heard=False)
        for one in (waiter, self.waiters.get(uid)):
            if one is not None:
                one.is_on_its_way, one.promise = False, None

    def _stand(self, uid: str, standing: Standing) -> None:
        known = self._standing.get(uid)
        self._standing[uid] = standing
        if known is not None and (known.node, known.needs) == (standing.node, standing.needs):
            if known.company != standing.company:
                self._relabel(uid, known, standing)
            return
        if known is not None:
            self._take_away(uid, known)
        self._join(uid, standing)
        self._on.setdefault(standing.node, {})[uid] = standing.needs
        room = self.rooms.get(standing.node)
        if room is not None:
            room.take(standing.needs)

    def _join(self, uid: str, standing: Standing) -> None:
        if self.neighbours.join(uid, standing.node, standing.company):
            self.changes += 1
            self.notify()

    def _relabel(self, uid: str, known: Standing, standing: Standing) -> None:
        self.neighbours.leave(uid, known.node)
        self._join(uid, standing)
        if known.is_seen:  # what the API server adds to a pod as it is bound, its zone for one, frees nobody
            self.freed += 1
            self.touch(known.node, is_reshaped=False)

    def _leave(self, uid: str, *, is_heard: bool = True) -> None:
        known = self._standing.pop(uid, None)
        if known is not None:
            self._take_away(uid, known, is_heard=is_heard)

    def _take_away(self, uid: str, known: Standing, *, is_heard: bool = True) -> None:
        del self._on[known.node][uid]
        if not self._on[known.node]:
            del self._on[known.node]
        self.neighbours.leave(uid, known.node)
        room = self.rooms.get(known.node)
        if room is not None:
            room.give_back(known.needs)
        self.freed += 1
        if is_heard:
            self.touch(known.node, is_reshaped=False)
        else:  # our own doing: who waits for room there hears of it, who was refused there does not
            self.changes += 1
            self.notify()


def hostname_of(node: Node) -> str:
    return node.labels.get("kubernetes.io/hostname", "")


class PodsOfWorld:
    """Hears of pods."""

    def __init__(self, world: World) -> None:
        self._world = world

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for uid in self._world.uids - {str(raw["metadata"].get("uid")) for raw in objects.values()}:
            self._world.forget_pod(uid)
        for raw in objects.values():
            self._world.know_pod(raw)

    def changed(self, raw: Raw) -> None:
        self._world.know_pod(raw)

    def deleted(self, raw: Raw) -> None:
        self._world.forget_pod(str(raw["metadata"].get("uid")))


class NodesOfWorld:
    """Hears of nodes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for name in self._world.rooms.keys() - {raw["metadata"]["name"] for raw in objects.values()}:
            self._world.forget_node(name)
        for raw in objects.values():
            self._world.know_node(raw)

    def changed(self, raw: Raw) -> None:
        self._world.know_node(raw)

    def deleted(self, raw: Raw) -> None:
        self._world.forget_node(raw["metadata"]["name"])


class NamespacesOfWorld:
    """Hears of namespaces, by whose labels affinity between pods may go."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: set[str] = set()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for name in self._names - {raw["metadata"]["name"] for raw in objects.values()}:
            self._forget(name)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        self._names.add(raw["metadata"]["name"])
        self._world.know_namespace(raw["metadata"]["name"], raw["metadata"].get("labels") or {})

    def deleted(self, raw: Raw) -> None:
        self._forget(raw["metadata"]["name"])

    def _forget(self, name: str) -> None:
        self._names.discard(name)
        self._world.know_namespace(name, None)


class Touches:
    """Hears of other objects that are named after nodes."""

    def __init__(self, world: World, *, is_reshaped: bool) -> None:
        self._world = world
        self._is_reshaped = is_reshaped

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        self._world.touch(raw["metadata"]["name"], is_reshaped=self._is_reshaped)

    def deleted(self, raw: Raw) -> None:
        self.changed(raw)
