"""How many devices a pod could be given now, and what keeps the others from being given, in numbers.

The fleet knows its nodes by cells, so only what is held, quarantined or kept by a map is looked at one by one.
"""

from collections import Counter
from collections.abc import Iterator

from webhook.core.device_state import DeviceState, free_device_state, or_set_aside
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.fleet_index import IndexedNode

# Of devices that nobody holds: their state, and the evidence of their node.
Offer = Counter[tuple[DeviceState, EvidenceState]]


def count_devices(fleet: Fleet, *, needs_evidence: bool) -> Offer:
    """`fleet` has been advanced to now."""
    found: Offer = Counter()
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
    """The node of each device that is held or quarantined: once for every place where it stands."""
    for uuid in fleet.held_devices | fleet.quarantined_devices:
        yield from (fleet.indexed_nodes[name] for name in fleet.nodes_with_device(uuid) if name in fleet.indexed_nodes)


def nodes_of_set_aside(fleet: Fleet) -> Iterator[IndexedNode]:
    """The node of each device that a map keeps and nobody holds."""
    for uuid in fleet.set_aside_devices - fleet.held_devices - fleet.quarantined_devices:
        yield from (fleet.indexed_nodes[name] for name in fleet.nodes_with_device(uuid))


def free_state_on_node(fleet: Fleet, indexed: IndexedNode, *, needs_evidence: bool) -> DeviceState:
    """Of all devices on that node that nobody holds: kept only if each of them is."""
    state = state_on(indexed, needs_evidence=needs_evidence)
    kept, held = fleet.set_aside_devices, fleet.held_devices
    free = [device.uuid in kept for device in indexed.node.devices if device.uuid not in held] if kept else []
    return or_set_aside(state, is_set_aside=bool(free) and all(free))


def state_on(indexed: IndexedNode, *, needs_evidence: bool) -> DeviceState:
    """Of a device on that node that nobody holds and no map keeps."""
    return free_device_state(
        is_ready=indexed.node.is_ready,
        is_cordoned=indexed.node.is_cordoned,
        evidence=indexed.state,
        needs_evidence=needs_evidence,
    )
