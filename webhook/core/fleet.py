"""The fleet: an index of nodes, devices, evidence and held slots for decisions.

Nodes that no claim distinguishes are in one group: same evidence, same values of the labels that pods select by, same
free devices. A decision iterates over groups, so its cost depends on the variety of the fleet, not on its size. Callers
report each change to the fleet. No review scans it.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping, Sequence
from datetime import datetime
from itertools import chain, islice
from typing import TypeVar

from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.evidence import Evidence, EvidenceState, next_change, state_of
from webhook.core.fleet_index import (
    ClassNodes,
    DeviceKind,
    DeviceStock,
    EvidenceGroup,
    IndexedNode,
    NodeClass,
    NodeGroup,
    NodeNames,
    Numbered,
    Shape,
    decrement,
    spare_devices,
)
from webhook.core.gpu_map import MapOwner, Mapped, SetId
from webhook.core.injection import Injection, injection_in_force
from webhook.core.keys import GPU_TYPE_LABELS, HOSTNAME_LABEL, LOGICAL_NODE_LABEL
from webhook.core.nodes_asked import Labels, NodesAsked
from webhook.core.reservation import Reservation, ReservationId

# A label with more values identifies nodes rather than kinds of nodes: it gets a directory instead of node classes.
MAX_CLASS_VALUES = 32
# These labels identify nodes, however few values they have.
ALWAYS_DIRECTORIES = (LOGICAL_NODE_LABEL, HOSTNAME_LABEL)
# With more classes, the label with the most values gets a directory too, so that groups stay few.
MAX_CLASSES = 256
# With more classes, shapes and kinds, those without nodes are deleted.
MAX_NUMBERED = 10_000
# Bounds for the memory of unusual claims. A full cache is cleared.
MAX_CACHED_REQUIREMENTS = 4096
MAX_CACHED_SPARES = 512
# Replicas begin with different nodes among this many equal ones.
SPREAD = 16

Item = TypeVar("Item")


class Fleet:
    """All input of a decision except the claim. Callers keep it current."""

    def __init__(self, offset: int = 0, injection: Injection | None = Injection.NVIDIA) -> None:
        """Fleets with different offsets prefer different nodes among equal ones, so that replicas rarely choose the
        same. `injection` is the one of nodes without the label."""
        self._offset = offset
        self.injection = injection
        self.indexed_nodes: dict[str, IndexedNode] = {}
        self.states: Counter[EvidenceState] = Counter()
        self.changes = 0
        """Counts the changes that can change a decision."""
        self._kinds: Numbered[DeviceKind] = Numbered()
        self._shapes: Numbered[Shape] = Numbered()
        self._classes: Numbered[NodeClass] = Numbered()
        self._groups: dict[EvidenceGroup, dict[int, ClassNodes]] = {}  # rows by class
        self._sizes = Counter[int]()  # nodes by their number of devices
        self._node_of: dict[DeviceUuid, str] = {}  # the node of each device
        # All nodes of a UUID that is on several nodes, or several times on one.
        self._disputed: dict[DeviceUuid, list[str]] = {}
        self._unhealthy: Counter[DeviceUuid] = Counter()
        self._mismatched: Counter[DeviceUuid] = Counter()
        self._claimed: Counter[DeviceUuid] = Counter()  # a ResourceClaim has them, and no reservation
        self._held: dict[DeviceUuid, dict[int, ReservationId]] = {}
        self._held_exclusively: set[DeviceUuid] = set()  # by a pod that did not ask to share
        # Held devices that a device plugin considers free: its kubelet has not given them to a pod that it knows.
        self._uncounted: set[DeviceUuid] = set()
        self._awaited: set[DeviceUuid] = set()  # held until the kubelet has chosen
        self._mapped: Mapped = {}
        self._set_aside: dict[DeviceUuid, MapOwner] = {}
        self._changes: list[tuple[datetime, str]] = []  # a heap: when the evidence of a node changes by time alone
        self._class_keys: tuple[str, ...] = ()  # the labels that distinguish classes
        self._class_nodes: Counter[int] = Counter()
        self._class_labels: dict[int, Labels] = {}
        self._label_uses: Counter[str] = Counter()
        self._gpu_types = {key: Counter[str]() for key in GPU_TYPE_LABELS}
        self._directories: dict[str, dict[str, NodeNames]] = {}
        self._kinds_serving: dict[tuple[frozenset[str], bool], frozenset[int]] = {}
        self._kinds_known = 0  # the number of kinds at the start of that cache
        self._spares: dict[tuple[frozenset[int], int], list[int]] = {}
        self._collected: list[set[str]] = []
        for key in ALWAYS_DIRECTORIES:
            self._add_directory(key)

    def rotated(self, equals: Collection[Item]) -> Iterator[Item]:
        """The same items, the first `SPREAD` rotated by the offset of this fleet."""
        first = list(islice(equals, SPREAD))
        own = self._offset % len(first) if first else 0
        return chain(first[own:], first[:own], islice(equals, SPREAD, None))

    def collect_changes(self) -> set[str]:
        """A set to which each node is added when its devices, their holders or its evidence may have changed. The
        caller removes what it has handled."""
        changed = set(self.indexed_nodes)
        self._collected.append(changed)
        return changed

    def _mark_changed(self, name: str) -> None:
        for changed in self._collected:
            changed.add(name)

    # Nodes and devices.

    def put(self, node: Node, now: datetime) -> None:
        """Add or change a node."""
        known = self.indexed_nodes.get(node.name)
        if known is not None:
            if known.node == node:
                return
            self._clear_set_aside(known.node)
            self._remove_from_index(known.node)
        evidence = known.evidence if known else None
        self.changes += 1
        self._add_to_index(node)
        self._mark_set_aside(node)
        kinds = tuple(map(self.kind_of, node.devices))
        if known is None:
            state = state_of(evidence, now)
            self.states[state] += 1
            indexed = IndexedNode(node, evidence, state, (), NodeGroup(-1, -1), kinds)
            self.indexed_nodes[node.name] = indexed
        else:
            known.node, known.kinds = node, kinds
            indexed = known
        self._regroup(indexed)
        if known is None:
            self._mark_labelled(node.name)

    def remove(self, name: str) -> None:
        """Remove a node. Reservations of its devices stay."""
        indexed = self.indexed_nodes.pop(name, None)
        if indexed is None:
            return
        self.changes += 1
        self._mark_changed(name)
        self._clear_set_aside(indexed.node)
        self._leave_groups(indexed)
        self.states[indexed.state] -= 1
        self._remove_from_index(indexed.node)
        self._mark_labelled(name)

    def _add_to_index(self, node: Node) -> None:
        self._sizes[len(node.devices)] += 1
        self._label_uses.update(node.labels.keys())
        for key, types in self._gpu_types.items():
            if key in node.labels:
                types[node.labels[key]] += 1
        for key, directory in self._directories.items():
            if key in node.labels:
                directory[node.labels[key]][node.name] = None
        for device in node.devices:
            if not device.is_healthy:
                self._unhealthy[device.uuid] += 1
            if device.mismatch:
                (self._claimed if device.is_claimed else self._mismatched)[device.uuid] += 1
            home = self._node_of.get(device.uuid)
            if home is None:
                self._node_of[device.uuid] = node.name
            else:
                self._disputed.setdefault(device.uuid, [home]).append(node.name)
                self._regroup_named(home)

    def _remove_from_index(self, node: Node) -> None:
        decrement(self._sizes, len(node.devices))
        for key in node.labels:
            decrement(self._label_uses, key)
            if key in self._gpu_types:
                decrement(self._gpu_types[key], node.labels[key])
        for key, directory in self._directories.items():
            value = node.labels.get(key, "")
            names = directory.get(value)
            if names is not None:
                names.pop(node.name, None)
                if not names:
                    del directory[value]
        for device in node.devices:
            if not device.is_healthy:
                decrement(self._unhealthy, device.uuid)
            if device.mismatch:
                decrement(self._claimed if device.is_claimed else self._mismatched, device.uuid)
            self._remove_device(device.uuid, node.name)

    def _remove_device(self, uuid: DeviceUuid, name: str) -> None:
        claimants = self._disputed.get(uuid)
        if claimants is None:
            self._node_of.pop(uuid, None)
            return
        claimants.remove(name)
        home = self._node_of[uuid] = claimants[0]
        if len(claimants) == 1:
            del self._disputed[uuid]
            if home != name:  # the removal of the other node has cleared what maps set aside on this one
                self._update_set_aside(self.indexed_nodes[home])

    # Evidence.

    def set_evidence(self, name: str, evidence: Evidence | None, now: datetime) -> None:
        indexed = self.indexed_nodes.get(name)
        if indexed is None or indexed.evidence == evidence:
            return
        indexed.evidence = evidence
        self._update_state(indexed, now)

    def advance(self, now: datetime) -> None:
        """Update the states of evidence that begins or ends by `now`."""
        numbered = len(self._classes) + len(self._shapes) + len(self._kinds)
        if numbered > MAX_NUMBERED + 12 * len(self.indexed_nodes):
            self._rebuild()
        while self._changes and self._changes[0][0] <= now:
            _, name = heapq.heappop(self._changes)
            indexed = self.indexed_nodes.get(name)
            if indexed is not None:
                self._update_state(indexed, now)

    def fresh_evidence(self, name: str) -> Evidence | None:
        """The evidence of a proven node; None for any other."""
        indexed = self.indexed_nodes.get(name)
        return indexed.evidence if indexed is not None and indexed.state is EvidenceState.FRESH else None

    def _update_state(self, indexed: IndexedNode, now: datetime) -> None:
        self.changes += 1
        self.states[indexed.state] -= 1
        indexed.state = state_of(indexed.evidence, now)
        self.states[indexed.state] += 1
        moment = next_change(indexed.evidence, now)
        if moment is not None:
            heapq.heappush(self._changes, (moment, indexed.node.name))
        self._regroup(indexed)

    # Placement maps.

    def set_aside(self, mapped: Mapped, changed: Collection[str]) -> None:
        """Set these GPUs aside for maps, by the names in the maps; `changed` are the nodes whose GPUs differ from the
        last call."""
        self._mapped = mapped
        self.changes += 1
        for name in {one for node in changed for one in self.nodes_for_map_name(node)}:
            self._update_set_aside(self.indexed_nodes[name])

    def _mark_set_aside(self, node: Node) -> None:
        """Maps name the node by its own name, or by its label if no node has that name."""
        self._clear_set_aside(node)
        label = node.labels.get(LOGICAL_NODE_LABEL, "")
        names = {node.name, "" if label in self.indexed_nodes else label}
        mapped = [self._mapped[name] for name in names if name in self._mapped]
        for device in node.devices if mapped else ():
            owners = [by_name[name] for by_name in mapped for name in device.names if name in by_name]
            if owners:
                self._set_aside[device.uuid] = min(owners)

    def _mark_labelled(self, name: str) -> None:
        """Update the nodes with this name as their label. The label counts only while no node has the name."""
        for labelled in self.names_with(LOGICAL_NODE_LABEL, [name]) if name in self._mapped else ():
            self._update_set_aside(self.indexed_nodes[labelled])

    def _update_set_aside(self, indexed: IndexedNode) -> None:
        self._mark_set_aside(indexed.node)
        self._regroup(indexed)

    def _clear_set_aside(self, node: Node) -> None:
        for device in node.devices:
            self._set_aside.pop(device.uuid, None)

    # Reservations.

    def hold(self, reservation: Reservation) -> None:
        self.changes += 1
        for slot in reservation.slots:
            self._held.setdefault(slot.uuid, {})[slot.k] = reservation.id
            if not reservation.is_shared:
                self._held_exclusively.add(slot.uuid)
            is_uncounted = reservation.delivery is None or reservation.orphan is not None
            (self._uncounted.add if is_uncounted else self._uncounted.discard)(slot.uuid)
            (self._awaited.add if reservation.is_awaited else self._awaited.discard)(slot.uuid)
        self._regroup_nodes_of(reservation.uuids)

    def free(self, reservation: Reservation) -> None:
        self.changes += 1
        for slot in reservation.slots:
            holders = self._held.get(slot.uuid, {})
            if holders.get(slot.k) == reservation.id:
                del holders[slot.k]
                self._held_exclusively.discard(slot.uuid)
            if not holders:
                self._held.pop(slot.uuid, None)
                self._uncounted.discard(slot.uuid)
                self._awaited.discard(slot.uuid)
        self._regroup_nodes_of(reservation.uuids)

    def holders(self, uuid: DeviceUuid) -> Mapping[int, ReservationId]:
        return self._held.get(uuid, {})

    # The index.

    def _regroup_nodes_of(self, uuids: Iterable[DeviceUuid]) -> None:
        for name in {name for uuid in uuids for name in self.nodes_with_device(uuid)}:
            self._regroup_named(name)

    def _regroup_named(self, name: str) -> None:
        indexed = self.indexed_nodes.get(name)
        if indexed is not None:
            self._regroup(indexed)

    def _regroup(self, indexed: IndexedNode) -> None:
        """Move the node to its current groups. The last evidence group is the narrowest."""
        self._mark_changed(indexed.node.name)
        groups: tuple[EvidenceGroup, ...] = ((indexed.state, None),)
        if indexed.state is EvidenceState.FRESH and indexed.evidence is not None:
            groups += ((indexed.state, indexed.evidence.hash),)
        node_group = NodeGroup(self._class_of(indexed.node), self._shape_of(indexed))
        if (groups, node_group) == (indexed.evidence_groups, indexed.node_group):
            return
        self._leave_groups(indexed)
        self._join_groups(indexed, groups, node_group)

    def _join_groups(self, indexed: IndexedNode, groups: tuple[EvidenceGroup, ...], node_group: NodeGroup) -> None:
        indexed.evidence_groups, indexed.node_group = groups, node_group
        self._class_nodes[node_group.node_class] += 1
        for group in groups:
            rows = self._groups.setdefault(group, {})
            row = rows.get(node_group.node_class)
            if row is None:
                row = rows[node_group.node_class] = ClassNodes()
            row.add(node_group.shape, indexed.node.name)
            indexed.row = row

    def _leave_groups(self, indexed: IndexedNode) -> None:
        if indexed.evidence_groups:
            decrement(self._class_nodes, indexed.node_group.node_class)
        node_class, shape = indexed.node_group
        for group in indexed.evidence_groups:
            rows = self._groups[group]
            rows[node_class].remove(shape, indexed.node.name)
            if not rows[node_class].count:
                del rows[node_class]
            if not rows:
                del self._groups[group]

    def _class_of(self, node: Node) -> int:
        labels = tuple((key, node.labels[key]) for key in self._class_keys if key in node.labels)
        injection = injection_in_force(node, self.injection)
        has_plugin = injection is Injection.PLUGIN
        return self._classes.number(
            NodeClass(
                node.is_ready,
                node.is_cordoned,
                node.taints,
                labels,
                node.is_refused_for_plugin,
                injection,
                lacks_plugin=has_plugin and node.plugin_gpus == 0,
                has_uncounted_gpus=has_plugin and any(map(self._is_uncounted, node.devices)),
                awaits_kubelet=not has_plugin and any(one.uuid in self._awaited for one in node.devices),
            )
        )

    def _is_uncounted(self, device: Device) -> bool:
        return device.is_claimed or device.uuid in self._uncounted

    def _shape_of(self, indexed: IndexedNode) -> int:
        free: dict[int, int] = {}
        total: dict[int, int] = {}
        room = self._plugin_room(indexed.node)
        for device, kind in zip(indexed.node.devices, indexed.kinds, strict=True):
            is_free = room > 0 and self.is_offered(device)
            total[kind] = total.get(kind, 0) + 1
            free[kind] = free.get(kind, 0) + is_free
            room -= is_free
        return self._shapes.number(tuple(DeviceStock(kind, free[kind], total[kind]) for kind in sorted(total)))

    def _plugin_room(self, node: Node) -> int:
        """How many devices more the device plugin can give to pods, where it does; else the number of devices."""
        if node.plugin_gpus is None:
            return len(node.devices)
        return node.plugin_gpus - sum(len(self._held.get(one.uuid, ())) + bool(one.mismatch) for one in node.devices)

    def kind_of(self, device: Device) -> int:
        return self._kinds.number(DeviceKind(device.labels, device.is_shared))

    def is_available(self, device: Device) -> bool:
        """Usable, on one node only, and with a free slot."""
        return (
            device.is_usable
            and device.uuid not in self._disputed
            and device.uuid not in self._held_exclusively
            and len(self._held.get(device.uuid, ())) < device.shares
        )

    def is_offered(self, device: Device) -> bool:
        """Available to a claim without a placement map: no map has set it aside."""
        return device.uuid not in self._set_aside and self.is_available(device)

    def is_set_aside_for_other(self, uuid: DeviceUuid, stateful_set: SetId | None) -> bool:
        """Whether the GPU is set aside for the map of another StatefulSet."""
        owner = self.set_aside_for(uuid)
        return owner is not None and owner != stateful_set

    def set_aside_for(self, uuid: DeviceUuid) -> SetId | None:
        """The StatefulSet whose map has set the GPU aside."""
        owner = self._set_aside.get(uuid)
        return None if owner is None else owner.set

    @property
    def set_aside_devices(self) -> KeysView[DeviceUuid]:
        return self._set_aside.keys()

    def may_be_offered(self, device: Device) -> bool:
        """Whether it is offered once no reservation holds it."""
        return device.uuid not in self._set_aside and not self.is_quarantined(device.uuid)

    def is_quarantined(self, uuid: DeviceUuid) -> bool:
        """Unhealthy, mismatched, in use by a claim, vanished, or on two nodes with the same UUID."""
        return uuid in self._claimed or not self.may_be_proven(uuid)

    def may_be_proven(self, uuid: DeviceUuid) -> bool:
        """Whether it may have a proof device. One that a ResourceClaim has keeps it: the claim may need it, and the
        next claim gets both together."""
        is_excluded = uuid in self._unhealthy or uuid in self._mismatched or uuid in self._disputed
        return uuid in self._node_of and not is_excluded

    @property
    def device_count(self) -> int:
        return len(self._node_of)

    @property
    def held_devices(self) -> KeysView[DeviceUuid]:
        """The devices with a held slot, whether the inventory has them or not."""
        return self._held.keys()

    @property
    def quarantined_devices(self) -> set[DeviceUuid]:
        """The devices in the inventory that no claim can get."""
        return self._unhealthy.keys() | self._disputed.keys() | self._mismatched.keys() | self._claimed.keys()

    @property
    def mismatched_devices(self) -> KeysView[DeviceUuid]:
        """The quarantined devices that the kubelet and the ledger disagree about."""
        return self._mismatched.keys()

    @property
    def claimed_devices(self) -> set[DeviceUuid]:
        """The devices that a ResourceClaim has and no reservation, and that have no other trouble."""
        return {uuid for uuid in self._claimed if self.may_be_proven(uuid)}

    @property
    def most_devices(self) -> int:
        """The largest number of devices on one node, of any kind."""
        return max(self._sizes, default=0)

    def claimants(self, uuid: DeviceUuid) -> tuple[str, ...]:
        """The nodes that list the device, if there are several."""
        return tuple(dict.fromkeys(self._disputed.get(uuid, ())))

    def nodes_with_device(self, uuid: DeviceUuid) -> Sequence[str]:
        """The nodes that list the device, each as often as it does."""
        home = self._node_of.get(uuid)
        return () if home is None else self._disputed.get(uuid) or (home,)

    def size_of(self, shape: int) -> int:
        """The number of devices of a node with that shape."""
        return sum(stock.total for stock in self._shapes[shape])

    def node_of_device(self, uuid: DeviceUuid) -> str | None:
        return self._node_of.get(uuid)

    # For decisions.

    @property
    def proven_hashes(self) -> dict[str, int]:
        """The hashes of fresh evidence, and the number of nodes for each."""
        return {
            digest: sum(row.count for row in rows.values())
            for (_, digest), rows in self._groups.items()
            if digest is not None
        }

    @property
    def device_labels(self) -> set[str]:
        """All labels of devices."""
        rows = (row for (_, digest), by_class in self._groups.items() if digest is None for row in by_class.values())
        stocks = (stock for row in rows for shape in row.shapes for stock in self._shapes[shape])
        return {label for stock in stocks for label in self._kinds[stock.kind].labels}

    def rows(self, group: EvidenceGroup) -> Mapping[int, ClassNodes]:
        """The nodes of a group, by class."""
        return self._groups.get(group, {})

    def node_class(self, number: int) -> NodeClass:
        return self._classes[number]

    def class_labels(self, number: int) -> Labels:
        labels = self._class_labels.get(number)
        if labels is None:
            labels = self._class_labels[number] = dict(self._classes[number].labels)
        return labels

    def spare_by_shape(self, kinds: frozenset[int], count: int) -> list[int]:
        """By shape: the number of devices of these kinds that would stay free, or `FEWER_MATCHING` or `FEWER_FREE`."""
        answers = self._spares.get((kinds, count))
        if answers is None:
            if len(self._spares) >= MAX_CACHED_SPARES:
                self._spares.clear()
            answers = self._spares[kinds, count] = []
        for number in range(len(answers), len(self._shapes)):
            answers.append(spare_devices(self._shapes[number], kinds, count))
        return answers

    def kinds_serving(self, requirements: frozenset[str], *, is_shared: bool) -> frozenset[int]:
        """The kinds of device with all the required labels."""
        key = (requirements, is_shared)
        answer = self._kinds_serving.get(key)
        if answer is None or len(self._kinds) != self._kinds_known:
            if len(self._kinds) != self._kinds_known or len(self._kinds_serving) >= MAX_CACHED_REQUIREMENTS:
                self._kinds_serving.clear()
                self._kinds_known = len(self._kinds)
            answer = frozenset(
                number
                for number, kind in enumerate(self._kinds)
                if requirements <= kind.labels and kind.is_shared == is_shared
            )
            self._kinds_serving[key] = answer
        return answer

    def index_labels(self, asked: NodesAsked) -> frozenset[str]:
        """Add the labels by which a claim selects to the index, once for each label.

        Returns those with a directory instead: their values identify nodes.
        """
        unknown = [k for k in asked.keys if k not in self._class_keys and k not in self._directories]
        new_keys = [key for key in unknown if self._label_uses[key] and not self._add_directory(key)]
        if new_keys:
            self._class_keys += tuple(new_keys)
            self._reclassify()
        while len(self._class_nodes) > MAX_CLASSES and self._class_keys:
            self._replace_by_directory()
        return frozenset(k for k in asked.keys if k in self._directories)

    def _add_directory(self, key: str) -> bool:
        """Add a directory for a label with many values; False if it has few."""
        directory = self._directory_of(key)
        if len(directory) <= MAX_CLASS_VALUES and key not in ALWAYS_DIRECTORIES:
            return False
        self._directories[key] = directory
        return True

    def _directory_of(self, key: str) -> dict[str, NodeNames]:
        directory: dict[str, NodeNames] = defaultdict(dict)
        for name, indexed in self.indexed_nodes.items():
            if key in indexed.labels:
                directory[indexed.labels[key]][name] = None
        return directory

    def _replace_by_directory(self) -> None:
        """Replace the class label with the most values by a directory."""
        directories = {key: self._directory_of(key) for key in self._class_keys}
        largest = max(directories, key=lambda key: len(directories[key]))
        self._directories[largest] = directories[largest]
        self._class_keys = tuple(key for key in self._class_keys if key != largest)
        self._reclassify()

    def _reclassify(self) -> None:
        """Compute the class of every node again, after a change of the class labels. Shapes stay."""
        self._groups, self._class_nodes = {}, Counter()
        self._classes, self._class_labels = Numbered(), {}
        for indexed in self.indexed_nodes.values():
            self._join_groups(
                indexed, indexed.evidence_groups, NodeGroup(self._class_of(indexed.node), indexed.node_group.shape)
            )

    def _rebuild(self) -> None:
        """Build the index again, without the classes and shapes that no node has any more."""
        self._groups, self._class_nodes = {}, Counter()
        self._classes, self._shapes, self._kinds = Numbered(), Numbered(), Numbered()
        self._class_labels = {}
        self._kinds_serving, self._kinds_known, self._spares = {}, 0, {}
        for indexed in self.indexed_nodes.values():
            indexed.evidence_groups, indexed.kinds = (), tuple(map(self.kind_of, indexed.node.devices))
            self._regroup(indexed)

    @property
    def gpu_types(self) -> Mapping[str, Mapping[str, int]]:
        """By label: the GPU models of the nodes, and the number of nodes for each."""
        return self._gpu_types

    def nodes_for_map_name(self, name: str) -> list[str]:
        """The nodes for a name in a placement map: the node of that name, else the nodes with it as their label."""
        return [name] if name in self.indexed_nodes else self.names_with(LOGICAL_NODE_LABEL, [name])

    def disputed_names(self) -> Iterator[tuple[str, list[str]]]:
        """Logical names that do not identify one node: several nodes have the label, or another node has the name."""
        for name, labelled in self._directories[LOGICAL_NODE_LABEL].items():
            claimants = {*labelled, name} if name in self.indexed_nodes else labelled.keys()
            if len(claimants) > 1:
                yield name, sorted(claimants)

    def names_with(self, key: str, values: Iterable[str]) -> list[str]:
        """The nodes whose label has one of the values. The label has a directory."""
        directory = self._directories[key]
        return [name for value in sorted(values) for name in directory.get(value, ())]
