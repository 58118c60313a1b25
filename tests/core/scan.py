"""A brute-force decision: every node, every device and every held slot, each time again.

It is slow and simple, so that tests can compare the indexed decision with it. The two share only their input.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from attrs import define, field

from webhook.core.claim import Claim
from webhook.core.device import Device, DeviceUuid, Node, Slot, Taint
from webhook.core.evidence import Evidence
from webhook.core.nodes_asked import Expression, NodesAsked, NodeTerm
from webhook.core.reservation import Placement, Reservation

# The objections of a denial in their order, with the verbs for one node and for several.
OBJECTIONS = {
    "not selected by the pod": ("is", "are"),
    "stale evidence": ("has", "have"),
    "no evidence": ("has", "have"),
    "banned": ("is", "are"),
    "conflicting evidence": ("has", "have"),
    "a different hash": ("has", "have"),
    "not ready": ("is", "are"),
    "cordoned": ("is", "are"),
    "an untolerated taint": ("has", "have"),
    "a device plugin for its GPUs": ("has", "have"),
    "no matching GPU": ("has", "have"),
    "fewer than {} matching GPUs": ("has", "have"),
    "no free GPU": ("has", "have"),
    "fewer than {} free GPUs": ("has", "have"),
}


@define
class World:
    """The state of a cluster as plain lists."""

    now: datetime
    needs_evidence: bool = False
    nodes: dict[str, Node] = field(factory=dict)
    evidence: dict[str, Evidence] = field(factory=dict)
    reservations: list[Reservation] = field(factory=list)
    # By the node name in a map: the GPUs that it sets aside, by the names in the map.
    mapped: dict[str, set[str]] = field(factory=dict)

    def held(self) -> list[Slot]:
        return [slot for one in self.reservations for slot in one.slots]

    def nodes_with(self, uuid: DeviceUuid) -> list[str]:
        return [node.name for node in self.nodes.values() if any(d.uuid == uuid for d in node.devices)]

    def is_available(self, device: Device) -> bool:
        holders = [one for one in self.reservations if device.uuid in one.uuids]
        is_taken = len(holders) >= device.shares or any(not one.is_shared for one in holders)
        is_disputed = len(self.nodes_with(device.uuid)) != 1
        return (
            device.is_healthy
            and not device.mismatch
            and not is_disputed
            and not is_taken
            and not self.is_set_aside(device)
        )

    def is_set_aside(self, device: Device) -> bool:
        """A map names the node by its name, or by its label while no node has that name."""
        for node in self.nodes.values():
            label = node.labels.get("gpu-node-name")
            names = {node.name} if label in self.nodes else {node.name, label}
            gpus = {gpu for name in names for gpu in self.mapped.get(name or "", ())}
            if any(one.uuid == device.uuid and gpus & {one.uuid, str(one.index)} for one in node.devices):
                return True
        return False

    # One node.

    def objection(self, node: Node, claim: Claim) -> str | None:
        """Why the node cannot serve the claim, in the words of a denial."""
        if not self.is_selected(node, claim):
            return "not selected by the pod"
        return self.evidence_objection(node, claim) or condition(node, claim) or self.device_objection(node, claim)

    def is_selected(self, node: Node, claim: Claim) -> bool:
        if not selects(claim.nodes, node.name, dict(node.labels)):
            return False
        wanted = claim.record.node
        if wanted is None:
            return True
        if wanted in self.nodes:
            return node.name == wanted
        labelled = [one.name for one in self.nodes.values() if one.labels.get("gpu-node-name") == wanted]
        return labelled == [node.name]

    def evidence_objection(self, node: Node, claim: Claim) -> str | None:
        if not claim.record.hashes and not self.needs_evidence:
            return None
        known = self.evidence.get(node.name)
        if known is None:
            return "no evidence"
        if known.is_banned:
            return "banned"
        if known.is_conflict:
            return "conflicting evidence"
        if known.since is not None and known.since > self.now:
            return "no evidence"
        if known.until is not None and known.until <= self.now:
            return "stale evidence"
        return "a different hash" if claim.record.hashes and known.hash not in claim.record.hashes else None

    def device_objection(self, node: Node, claim: Claim) -> str | None:
        count = claim.record.gpus
        if claim.record.node is not None:
            named = [[d for d in node.devices if gpu in (d.uuid, str(d.index))] for gpu in claim.record.devices]
            wanted = [found[0] for found in named if len(found) == 1]
        else:
            wanted = list(node.devices)
        matching = [d for d in wanted if serves(d, claim)]
        if len(matching) < count:
            return "no matching GPU" if count == 1 else f"fewer than {count} matching GPUs"
        if sum(map(self.is_available, matching)) < count:
            return "no free GPU" if count == 1 else f"fewer than {count} free GPUs"
        return None

    # All nodes.

    def fitting(self, claim: Claim) -> set[str]:
        return {node.name for node in self.nodes.values() if self.objection(node, claim) is None}

    def causes(self, claim: Claim) -> tuple[str, ...]:
        """The causes of the denial: the number of nodes for each objection."""
        counts = Counter(self.objection(node, claim) for node in self.nodes.values())
        texts = {text.format(claim.record.gpus): verbs for text, verbs in OBJECTIONS.items()}
        return tuple(
            f"{counts[text]} {verbs[counts[text] > 1]} {text}" for text, verbs in texts.items() if counts[text]
        )

    def flaws(self, placement: Placement, claim: Claim) -> list[str]:
        """What is wrong with a placement; empty if the decision is right."""
        node = self.nodes.get(placement.node)
        if node is None:
            return ["the node does not exist"]
        found = []
        if (objection := self.objection(node, claim)) is not None:
            found.append(f"the node: {objection}")
        if len(placement.slots) != claim.record.gpus:
            found.append(f"{len(placement.slots)} slots for {claim.record.gpus} GPUs")
        if len({slot.uuid for slot in placement.slots}) != len(placement.slots):
            found.append("a device is in two slots")
        devices = {device.uuid: device for device in node.devices}
        for slot in placement.slots:
            found.extend(self._slot_flaws(slot, devices.get(slot.uuid), claim))
        return found

    def _slot_flaws(self, slot: Slot, device: Device | None, claim: Claim) -> Iterable[str]:
        if device is None:
            yield f"{slot} is on another node"
            return
        if not 0 <= slot.k < device.shares:
            yield f"{slot} is not a share of the device"
        if slot in self.held():
            yield f"{slot} is held"
        if not self.is_available(device):
            yield f"{slot} is not available"
        if not serves(device, claim):
            yield f"{slot} does not match the claim"


def serves(device: Device, claim: Claim) -> bool:
    return set(claim.record.requirements) <= device.labels and (device.shares > 1) == claim.record.shared


def condition(node: Node, claim: Claim) -> str | None:
    if not node.is_ready:
        return "not ready"
    if node.is_cordoned:
        return "cordoned"
    if any(repels(taint, claim.nodes) for taint in node.taints):
        return "an untolerated taint"
    return "a device plugin for its GPUs" if node.is_refused_for_plugin and claim.record.gpus else None


def repels(taint: Taint, asked: NodesAsked) -> bool:
    """The tests' tolerations name a key and tolerate every value of it."""
    return taint.effect != "PreferNoSchedule" and all(one.key != taint.key for one in asked.tolerations)


def selects(asked: NodesAsked, name: str, labels: dict[str, str]) -> bool:
    if asked.node_name is not None and asked.node_name != name:
        return False
    if any(key not in labels or labels[key] != value for key, value in asked.selector):
        return False
    return asked.terms is None or any(term_holds(one, name, labels) for one in asked.terms)


def term_holds(term: NodeTerm, name: str, labels: dict[str, str]) -> bool:
    if not term.labels and not term.fields:
        return False
    fields = {"metadata.name": name}
    return all(holds(one, fields) for one in term.fields) and all(holds(one, labels) for one in term.labels)


def holds(expression: Expression, labels: dict[str, str]) -> bool:
    is_set = expression.key in labels
    value = labels.get(expression.key, "")
    if expression.operator == "In":
        return is_set and value in expression.values
    if expression.operator == "NotIn":
        return not is_set or value not in expression.values
    if expression.operator == "Exists":
        return is_set
    if expression.operator == "DoesNotExist":
        return not is_set
    (bound,) = expression.values
    if not is_set or not value.isdigit():
        return False
    return int(value) > int(bound) if expression.operator == "Gt" else int(value) < int(bound)
