"""The number of free devices by state: how many a pod could get now, and why it could not get the others.

The fleet counts nodes by groups, so only devices that are held, quarantined or set aside are visited one by one.
"""

from collections import Counter
from collections.abc import Iterator

from webhook.core.device_state import DeviceState, free_device_state, or_set_aside
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode

# The number of free devices by their state and the evidence of their node.
DeviceCounts = Counter[tuple[DeviceState, EvidenceState]]


def count_devices(fleet: Fleet, *, needs_evidence: bool) -> DeviceCounts:
    """`fleet` has been advanced to now."""
    found: DeviceCounts = Counter()
    for evidence in EvidenceState:
        for number, row in fleet.rows((evidence, None)).items():
            of_class = fleet.node_class(number)
            state = free_device_state(
                is_ready=of_class.is_ready,
                is_cordoned=of_class.is_cordoned,
                evidence=evidence,
                needs_evidence=needs_evidence,
            )
            found[state, evidence] += sum(fleet.size_of(shape) * len(names) for shape, names in row.shapes.items())
    for indexed in nodes_of_unavailable(fleet):
        found[state_on(indexed, needs_evidence=needs_evidence), indexed.state] -= 1
    for indexed in nodes_of_set_aside(fleet):
        state = state_on(indexed, needs_evidence=needs_evidence)
        found[state, indexed.state] -= 1
        found[or_set_aside(state, is_set_aside=True), indexed.state] += 1
    return found


def nodes_of_unavailable(fleet: Fleet) -> Iterator[IndexedNode]:
    """The node of each held or quarantined device: once for every time that a node lists the device."""
    for uuid in fleet.held_devices | fleet.quarantined_devices:
        yield from (fleet.indexed_nodes[name] for name in fleet.nodes_with_device(uuid) if name in fleet.indexed_nodes)


def nodes_of_set_aside(fleet: Fleet) -> Iterator[IndexedNode]:
    """The node of each free device that is set aside for a map."""
    for uuid in fleet.set_aside_devices - fleet.held_devices - fleet.quarantined_devices:
        yield from (fleet.indexed_nodes[name] for name in fleet.nodes_with_device(uuid))


def free_state_on_node(fleet: Fleet, indexed: IndexedNode, *, needs_evidence: bool) -> DeviceState:
    """One state for the free devices of the node; `kept` only if all of them are set aside."""
    state = state_on(indexed, needs_evidence=needs_evidence)
    set_aside, held = fleet.set_aside_devices, fleet.held_devices
    free = [device.uuid in set_aside for device in indexed.node.devices if device.uuid not in held] if set_aside else []
    return or_set_aside(state, is_set_aside=bool(free) and all(free))


def state_on(indexed: IndexedNode, *, needs_evidence: bool) -> DeviceState:
    """The state of a free device on the node that is not set aside."""
    return free_device_state(
        is_ready=indexed.node.is_ready,
        is_cordoned=indexed.node.is_cordoned,
        evidence=indexed.state,
        needs_evidence=needs_evidence,
    )
