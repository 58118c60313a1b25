"""How a pod looks once GPUs are set aside for it. Dressing a dressed pod changes nothing: so forgeries show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

from attrs import frozen

from webhook.core import keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none
from webhook.core.difference import Change, difference
from webhook.core.gpu_visibility import env_hiding_gpus, hidden_unless_set, hides_all, is_harmless, with_gpus_hidden
from webhook.core.keys import Key
from webhook.core.pod import Pod

Json = Any
RawPod = Mapping[str, Json]
RawTerm = dict[str, Json]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# What hints of a scorer can touch in a pod beside its annotations, its labels and its affinity.
HINTED = ("priorityClassName", "priority", "preemptionPolicy", "nodeSelector", "tolerations")

# What a pod that waits is shown, once it has been written there.
REFERENCE = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{keys.GPU_UUID.name}']"}}


class MapVisible(StrEnum):
    """By which names a container is told of the GPUs that a placement map gives it."""

    UUID = "uuid"
    INDEX = "index"


class Injection(StrEnum):
    """How the GPU gets into the container."""

    NVIDIA = "nvidia"
    CUDA = "cuda"


@frozen
class DressRules:
    """How pods are dressed in this installation."""

    injection: Injection = Injection.NVIDIA
    resource: str = "nvidia.com/gpu"
    writes_aliases: bool = True
    map_visible: MapVisible = MapVisible.UUID
    runtime_class: str | None = None
    # How long the containers of a pod with GPUs may take to stop; None: as long as they like.
    max_grace: timedelta | None = None

    @property
    def env_names(self) -> tuple[str, ...]:
        """The variables that are ours to set."""
        return keys.GPU_ENV if self.injection is Injection.NVIDIA else (keys.CUDA_ENV,)

    @property
    def hides_gpus(self) -> bool:
        """Containers without GPUs of their own are shown none. With `cuda` every container sees them all."""
        return self.injection is Injection.NVIDIA

    @property
    def takes_request_off(self) -> bool:
        """A device plugin that sees the request would hand out another GPU than ours."""
        return self.injection is Injection.NVIDIA


@frozen
class Allocation:
    """What one pod is given: nodes to run on and, unless it only asked for a proven node, GPUs of one of them."""

    claim: Claim
    nodes: tuple[str, ...]
    reservation_id: str | None = None
    uuids: tuple[str, ...] = ()

    # Whether it has waited in the queue: its containers were there before its GPUs were chosen.
    has_waited: bool = False
    # False for a pod of an older version, which blinded only containers with `envFrom`.
    hides_gpus_everywhere: bool = True

    @property
    def visible(self) -> str:
        return ",".join(self.uuids)

    def env(self, name: str, rules: DressRules) -> dict[str, Json]:
        """The variable of that name as a container gets it. A placement map's indices are known before any GPU is
        reserved; what else a pod that waits will see is written into its annotations later."""
        if rules.map_visible is MapVisible.INDEX and self.claim.map_entry is not None:
            return {"name": name, "value": ",".join(self.claim.map_entry.gpus)}
        return {"name": name, "valueFrom": REFERENCE} if self.has_waited else {"name": name, "value": self.visible}


def dressed(raw: RawPod, outfit: Allocation, rules: DressRules) -> dict[str, Json]:
    """The pod as it has to be; what is not ours to change is shared with `raw`."""
    meta = without_outputs(raw)
    meta["annotations"].update(annotations(outfit, rules))
    spec = ungated(raw.get("spec") or {})
    spec["affinity"] = pinned(spec.get("affinity") or {}, outfit.nodes)
    made = {**raw, "metadata": meta, "spec": spec}
    if outfit.uuids:
        spec |= dressed_containers(spec, outfit, rules)
    return dict(hide_gpus(made, rules)) if outfit.hides_gpus_everywhere and not outfit.uuids else made


def waiting(
    raw: RawPod, claim: Claim, rules: DressRules, why: str, *, hides_gpus_everywhere: bool = True
) -> dict[str, Json]:
    """The pod as it waits for its turn: gated, with all in its spec that cannot be changed once it exists."""
    meta = without_outputs(raw)
    meta["annotations"] |= {keys.CLAIM.name: claim.record.text(), keys.WAITING: why}
    meta["labels"] = {**(meta.get("labels") or {}), keys.QUEUED_LABEL: "true"}
    spec = dict(raw.get("spec") or {})
    if not any(gate.get("name") == keys.QUEUE_GATE for gate in spec.get("schedulingGates") or ()):
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), {"name": keys.QUEUE_GATE}]
    made = {**raw, "metadata": meta, "spec": spec}
    if claim.count:
        spec |= dressed_containers(
            spec, Allocation(claim, (), has_waited=True, hides_gpus_everywhere=hides_gpus_everywhere), rules
        )
    return dict(hide_gpus(made, rules)) if hides_gpus_everywhere and not claim.count else made


def hide_gpus(raw: RawPod, rules: DressRules) -> RawPod:
    """The pod as it is shown no GPU, whatever its images and `envFrom` bring; the same object if nothing changes."""
    return with_gpus_hidden(raw, "initContainers", "containers") if rules.hides_gpus else raw


def hide_gpus_from_debug_containers(raw: RawPod, old: RawPod, rules: DressRules) -> RawPod:
    """The same for the debug containers that a pod gets while it runs. Those that it has cannot be changed."""
    groups = [(one.get("spec") or {}).get("ephemeralContainers") or [] for one in (raw, old)]
    known = {one.get("name") for one in groups[1]}
    if not rules.hides_gpus:
        return raw
    made = [one if one.get("name") in known else hidden_unless_set(one) for one in groups[0]]
    return raw if made == groups[0] else {**raw, "spec": {**raw["spec"], "ephemeralContainers": made}}


def dressed_containers(spec: Mapping[str, Json], outfit: Allocation, rules: DressRules) -> dict[str, Json]:
    return {
        group: [dressed_container(one, outfit, rules) for one in spec[group]]
        for group in ("initContainers", "containers")
        if spec.get(group)
    }


def with_runtime_class(raw: RawPod, rules: DressRules) -> RawPod:
    """The pod as it is created, started by the runtime that hands out GPUs if it names none.

    No part of `dressed`: it cannot be changed once the pod exists, and no promise hangs on it.
    """
    spec = raw.get("spec") or {}
    if rules.runtime_class is None or spec.get("runtimeClassName"):
        return raw
    return {**raw, "spec": {**spec, "runtimeClassName": rules.runtime_class}}


def runtime_class_warnings(raw: RawPod, rules: DressRules) -> Iterator[str]:
    """The runtime class that stays although it is not the one for GPUs, as a warning."""
    named = (raw.get("spec") or {}).get("runtimeClassName")
    if rules.runtime_class is not None and named and named != rules.runtime_class:
        yield f"spec.runtimeClassName: GPUs are handed out by {rules.runtime_class}; the pod names {named}, which stays"


def undressed(raw: RawPod) -> dict[str, Json]:
    """The pod without what only we may write, and without our gate."""
    clean = {**raw, "metadata": without_outputs(raw)}
    return {**clean, "spec": ungated(raw["spec"])} if raw.get("spec") else clean


def ungated(spec: Mapping[str, Json]) -> dict[str, Json]:
    gates = spec.get("schedulingGates")
    if not any(gate.get("name") == keys.QUEUE_GATE for gate in gates or ()):
        return dict(spec)
    left = [gate for gate in gates or () if gate.get("name") != keys.QUEUE_GATE]
    rest = {name: value for name, value in spec.items() if name != "schedulingGates"}
    return {**rest, "schedulingGates": left} if left else rest


def undressed_with_claim(raw: RawPod, pod: Pod, rules: ClaimRules) -> tuple[RawPod, Claim | None]:
    """The pod without what only we may write, and what it asks for.

    A copy of a dressed pod asks for what that one asked for: its request was taken off when it was dressed.
    """
    if not keys.OUTPUT_NAMES & pod.annotations.keys() and not pod.is_gated:
        return raw, claim_of(pod, rules)
    clean, recorded = undressed(raw), recorded_claim_or_none(pod)
    if recorded is None:
        return clean, claim_of(Pod.parse(clean), rules)
    claim = claim_of(Pod.parse(clean), rules, recorded.record.asked)
    return clean, None if claim is None else claim.with_named(named=recorded.record.named)


def without_outputs(raw: RawPod) -> dict[str, Json]:
    meta = dict(raw.get("metadata") or {})
    found = meta.get("annotations") or {}
    dropped = keys.OUTPUT_NAMES | {keys.WAITING}
    meta["annotations"] = {key: value for key, value in found.items() if key not in dropped}
    labels = meta.get("labels")
    if labels and keys.QUEUED_LABEL in labels:
        meta["labels"] = {key: value for key, value in labels.items() if key != keys.QUEUED_LABEL}
    return meta


def annotations(outfit: Allocation, rules: DressRules) -> dict[str, str]:
    written = {keys.CLAIM.name: outfit.claim.record.text()}
    if outfit.reservation_id is not None:
        for key, value in reservation_values(outfit.reservation_id, outfit.visible, outfit.nodes[0]):
            written.update(dict.fromkeys(key.names if rules.writes_aliases else (key.name,), value))
    return written


def reservation_values(reservation_id: str, visible: str, node: str) -> tuple[tuple[Key, str], ...]:
    """What a reservation is to a pod."""
    return ((keys.RESERVATION_ID, reservation_id), (keys.GPU_UUID, visible), (keys.NODE, node))


# Affinity: the terms are ORed by Kubernetes, so the node is ANDed into each. A term without expressions matches
# nothing; ours in it would make it match, so it is left alone.


def pinned(affinity: Mapping[str, Json], nodes: Sequence[str]) -> dict[str, Json]:
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(REQUIRED)
    terms = (required or {}).get("nodeSelectorTerms") or []
    placed = list(pinned_terms(terms, nodes)) if required is not None else [on_node({}, name) for name in nodes]
    return {**affinity, "nodeAffinity": {**node_affinity, REQUIRED: {**(required or {}), "nodeSelectorTerms": placed}}}


def pinned_terms(terms: Iterable[RawTerm], nodes: Sequence[str]) -> Iterator[RawTerm]:
    for term in terms:
        names = names_of(term)
        if is_empty(term) or (names is not None and names <= set(nodes)):
            yield term
        else:
            yield from (on_node(term, name) for name in nodes)


def unpinned(raw: RawPod, node: str) -> RawPod:
    """The pod without our hold on that node. Only of a pod that named no node itself is it certain to be ours."""
    spec = raw.get("spec") or {}
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(REQUIRED) or {}
    terms = [without_pin(term, node) for term in required.get("nodeSelectorTerms") or ()]
    held = {**required, "nodeSelectorTerms": [term for term in terms if not is_empty(term)]}
    kept = {name: value for name, value in node_affinity.items() if name != REQUIRED}
    if held["nodeSelectorTerms"]:
        kept[REQUIRED] = held
    return {**raw, "spec": {**spec, "affinity": {**affinity, "nodeAffinity": kept}}}


def without_pin(term: RawTerm, node: str) -> RawTerm:
    return {**term, "matchFields": [one for one in term.get("matchFields") or () if one != pin_of(node)]}


def is_empty(term: RawTerm) -> bool:
    return not term.get("matchExpressions") and not term.get("matchFields")


def on_node(term: RawTerm, name: str) -> RawTerm:
    fields = term.get("matchFields") or []
    return {**term, "matchFields": [*fields, pin_of(name)]}


def pin_of(node: str) -> dict[str, Json]:
    return {"key": "metadata.name", "operator": "In", "values": [node]}


def names_of(term: RawTerm) -> set[str] | None:
    """The nodes that a term is held to by name: all its names must hold at once, so two leave none."""
    named: set[str] | None = None
    for field in term.get("matchFields") or ():
        values = field.get("values") or []
        if field.get("key") == "metadata.name" and field.get("operator") == "In" and len(values) == 1:
            named = set(values) if named is None else named & set(values)
    return named


def nodes_pinned_to(raw: RawPod) -> set[str | None]:
    """The nodes that the pod's required affinity allows; None among them if some term leaves it open."""
    affinity = ((raw.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    allowed: set[str | None] = set()
    for term in terms:
        names = names_of(term)
        if not is_empty(term):
            allowed |= {None} if names is None else names
    return allowed or {None}


# Containers.


def dressed_container(raw: dict[str, Json], outfit: Allocation, rules: DressRules) -> dict[str, Json]:
    container = dict(raw)
    named = outfit.claim.record.asked or outfit.claim.record.containers
    if not named or raw.get("name") in named or shows_gpus(raw.get("env") or (), rules):
        container["env"] = dressed_env(raw.get("env") or [], outfit, rules)
    elif rules.hides_gpus and (outfit.hides_gpus_everywhere or is_open_to_others(raw)):
        container["env"] = env_hiding_gpus(raw.get("env") or [])
    if rules.takes_request_off and raw.get("resources"):
        container["resources"] = without_request(raw["resources"], rules.resource)
    return container


def shows_gpus(env: Iterable[Mapping[str, Json]], rules: DressRules) -> bool:
    return any(one.get("name") in rules.env_names and not hides_all(one) for one in env)


def is_open_to_others(container: Mapping[str, Json]) -> bool:
    """Whether a ConfigMap or a Secret may bring a variable that no webhook sees."""
    env = container.get("env") or ()
    return bool(container.get("envFrom")) and not any(one.get("name") == keys.NVIDIA_ENV for one in env)


def dressed_env(env: Sequence[dict[str, Json]], outfit: Allocation, rules: DressRules) -> list[dict[str, Json]]:
    """Ours stand where the user's stood, so that later variables may refer to them; each stands once."""
    missing = list(rules.env_names)
    result = []
    for one in env:
        name = one.get("name")
        if name in rules.env_names:
            if name not in missing:
                continue
            missing.remove(name)
            one = outfit.env(name, rules)
        result.append(one)
    return result + [outfit.env(name, rules) for name in missing]


def without_request(resources: Mapping[str, Json], resource: str) -> dict[str, Json]:
    return {
        part: {name: amount for name, amount in amounts.items() if name != resource}
        if part in ("limits", "requests") and amounts
        else amounts
        for part, amounts in resources.items()
    }


def replaced_env_warnings(pod: Pod, outfit: Allocation, rules: DressRules) -> Iterator[str]:
    """The containers whose own GPU variables give way to ours, as warnings."""
    for path, container in pod.containers():
        for one in container.env or ():
            wanted = outfit.env(one.name, rules)
            is_ours = (one.value_from or None, one.value or "") == (wanted.get("valueFrom"), wanted.get("value") or "")
            if one.name in rules.env_names and not is_ours and not is_harmless(one):
                yield f"{path}: {one.name} of container {container.name} is set by gpuwarden; yours is replaced"


# What has changed.


def changes(old: RawPod, new: RawPod) -> list[Change]:
    """The JSON patch that makes `new` of `old`; only what dressing can touch is compared."""
    return list(difference(touched(old), touched(new)))


def touched(raw: RawPod) -> dict[str, Json]:
    """The members that dressing can touch, where they stand in the pod."""
    parts = members(raw, "metadata", "spec")
    if parts.get("metadata"):
        parts["metadata"] = members(parts["metadata"], "annotations", "labels")
    if parts.get("spec"):
        groups = ("affinity", "initContainers", "containers", "schedulingGates", "runtimeClassName", *HINTED)
        spec = parts["spec"] = members(parts["spec"], *groups)
        if spec.get("affinity"):
            spec["affinity"] = members(spec["affinity"], "nodeAffinity", "podAntiAffinity")
        for group in ("initContainers", "containers"):
            if spec.get(group):
                spec[group] = [members(one, "env", "resources") for one in spec[group]]
    return parts


def members(whole: Mapping[str, Json], *names: str) -> dict[str, Json]:
    return {name: whole[name] for name in names if name in whole}
