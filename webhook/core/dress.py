"""Dresses a pod for its reservation. Dressing a dressed pod changes nothing, so any difference is a forgery."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

from attrs import evolve, frozen

from webhook.core import keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none
from webhook.core.difference import Change, difference
from webhook.core.gpu_demand import pod_claim_of
from webhook.core.gpu_visibility import env_hiding_gpus, hidden_unless_set, hides_all, is_harmless, with_gpus_hidden
from webhook.core.injection import Injection, injection_of
from webhook.core.keys import Key
from webhook.core.pod import Pod
from webhook.core.pod_claims import (
    CONTAINER_GROUPS,
    pod_claim,
    with_container_claim,
    with_entry,
    without_container_claim,
    without_own_claim,
)
from webhook.core.reserve import Reserve, reserve_of

Json = Any
RawPod = Mapping[str, Json]
RawTerm = dict[str, Json]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# What hints can change in a pod, besides annotations, labels and affinity.
HINTED = ("priorityClassName", "priority", "preemptionPolicy", "nodeSelector", "tolerations")

# The value if the GPUs are chosen later: the annotation is written before the pod is on a node.
REFERENCE = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{keys.GPU_UUID.name}']"}}


class MapVisible(StrEnum):
    """How the variables of a container name the GPUs of a placement map."""

    UUID = "uuid"
    INDEX = "index"


@frozen
class DressRules:
    """How pods are dressed in this installation."""

    injection: Injection = Injection.NVIDIA
    resource: str = "nvidia.com/gpu"
    writes_aliases: bool = True
    map_visible: MapVisible = MapVisible.UUID
    runtime_class: str | None = None
    # The longest grace period of a pod with GPUs; None: unlimited.
    max_grace: timedelta | None = None
    reserve: Reserve = Reserve.CREATE

    def of(self, claim: Claim) -> "DressRules":
        """The rules for the pod with this claim: it may have been recorded with other settings. Raises
        InvalidPodError.

        With a ResourceClaim no other runtime is needed. An index means something else to a container that sees some of
        its node's GPUs.
        """
        if not claim.count:
            return self
        injection = injection_of(claim.record.injection, self.injection)
        return evolve(
            self,
            injection=injection,
            reserve=reserve_of(claim.record.reserve),
            runtime_class=None if injection is Injection.DRA else self.runtime_class,
            map_visible=self.map_visible if injection is Injection.CUDA else MapVisible.UUID,
        )

    @property
    def leaves_to_scheduler(self) -> bool:
        """Whether kube-scheduler allocates the pod's GPUs, after its containers were fixed."""
        return self.injection is Injection.DRA and self.reserve is Reserve.BIND

    @property
    def env_names(self) -> tuple[str, ...]:
        """The variables that gpuwarden sets to the pod's GPUs. A device plugin sets its own."""
        if self.injection is Injection.PLUGIN or self.leaves_to_scheduler:
            return ()
        return keys.GPU_ENV if self.injection is Injection.NVIDIA else (keys.CUDA_ENV,)

    @property
    def hides_gpus(self) -> bool:
        """Whether containers without GPUs see none. With `cuda` every container sees all GPUs."""
        return self.injection is not Injection.CUDA

    @property
    def removes_request(self) -> bool:
        """A device plugin that sees the request would allocate another GPU than the reserved one."""
        return self.injection in (Injection.NVIDIA, Injection.DRA)

    @property
    def uses_device_plugin(self) -> bool:
        """Whether the kubelet chooses the GPUs, for the request of the container."""
        return self.injection is Injection.PLUGIN

    @property
    def uses_resource_claims(self) -> bool:
        """Whether the GPUs come from a ResourceClaim. The variable of NVIDIA's runtime then hides all others."""
        return self.injection is Injection.DRA


@frozen
class Allocation:
    """What one pod gets: the nodes that it may run on and, unless it only asks for a proven node or its GPUs are
    reserved later, GPUs of one node. Without nodes its affinity stays as it is."""

    claim: Claim
    nodes: tuple[str, ...]
    reservation_id: str | None = None
    uuids: tuple[str, ...] = ()

    # Whether its containers were fixed before its GPUs were chosen.
    has_waited: bool = False
    # False for a pod of an older version, which hid GPUs only from containers with `envFrom`.
    hides_gpus_everywhere: bool = True
    # The ResourceClaim of the pod, if its GPUs come from one.
    claim_name: str = ""

    @property
    def visible(self) -> str:
        """The GPUs that the containers will see; empty if the kubelet chooses them."""
        return "" if self.claim.delivery else ",".join(self.uuids)

    def env(self, name: str, rules: DressRules) -> dict[str, Json]:
        """The variable of that name in a container. The indices of a placement map are known before GPUs are reserved.
        Otherwise the variable of a queued pod refers to an annotation, which is written later."""
        if rules.map_visible is MapVisible.INDEX and self.claim.map_entry is not None:
            return {"name": name, "value": ",".join(self.claim.map_entry.gpus)}
        return {"name": name, "valueFrom": REFERENCE} if self.has_waited else {"name": name, "value": self.visible}


def dressed(raw: RawPod, outfit: Allocation, rules: DressRules) -> dict[str, Json]:
    """The dressed pod. Parts that dressing does not change are shared with `raw`."""
    rules = rules.of(outfit.claim)
    meta = without_outputs(raw)
    meta["annotations"].update(annotations(outfit, rules))
    spec = ungated(raw.get("spec") or {})
    if outfit.nodes:
        spec["affinity"] = pinned(spec.get("affinity") or {}, outfit.nodes)
    made = {**raw, "metadata": meta, "spec": spec}
    if outfit.claim.count:
        spec |= dressed_containers(spec, outfit, rules)
    return dict(hide_gpus(made, rules)) if outfit.hides_gpus_everywhere and not outfit.claim.count else made


def left_to_scheduler(
    raw: RawPod, claim: Claim, rules: DressRules, claim_name: str, nodes: tuple[str, ...] = ()
) -> dict[str, Json]:
    """The dressed pod whose GPUs kube-scheduler chooses. `nodes` are those that its placement map names."""
    return dressed(raw, Allocation(claim, nodes, claim_name=claim_name), rules)


def waiting(
    raw: RawPod,
    claim: Claim,
    rules: DressRules,
    why: str,
    *,
    hides_gpus_everywhere: bool = True,
    claim_name: str = "",
) -> dict[str, Json]:
    """The dressed pod for the queue: gated, with all that cannot be changed after its creation."""
    rules = rules.of(claim)
    meta = without_outputs(raw)
    meta["annotations"] |= {keys.CLAIM.name: claim.record.text(), keys.WAITING: why}
    meta["labels"] = {**(meta.get("labels") or {}), keys.QUEUED_LABEL: "true"}
    spec = dict(raw.get("spec") or {})
    if not any(gate.get("name") == keys.QUEUE_GATE for gate in spec.get("schedulingGates") or ()):
        spec["schedulingGates"] = [*(spec.get("schedulingGates") or ()), {"name": keys.QUEUE_GATE}]
    made = {**raw, "metadata": meta, "spec": spec}
    if claim.count:
        outfit = Allocation(
            claim, (), has_waited=True, hides_gpus_everywhere=hides_gpus_everywhere, claim_name=claim_name
        )
        spec |= dressed_containers(spec, outfit, rules)
    return dict(hide_gpus(made, rules)) if hides_gpus_everywhere and not claim.count else made


def hide_gpus(raw: RawPod, rules: DressRules) -> RawPod:
    """The pod with all GPUs hidden, whatever its images and `envFrom` set. The same object if nothing changes."""
    return with_gpus_hidden(raw, *CONTAINER_GROUPS) if rules.hides_gpus else raw


def hide_gpus_from_debug_containers(raw: RawPod, old: RawPod, rules: DressRules) -> RawPod:
    """The pod with all GPUs hidden from its new debug containers. Existing ones cannot be changed."""
    groups = [(one.get("spec") or {}).get("ephemeralContainers") or [] for one in (raw, old)]
    known = {one.get("name") for one in groups[1]}
    if not rules.hides_gpus:
        return raw
    made = [one if one.get("name") in known else hidden_unless_set(one) for one in groups[0]]
    return raw if made == groups[0] else {**raw, "spec": {**raw["spec"], "ephemeralContainers": made}}


def dressed_containers(spec: Mapping[str, Json], outfit: Allocation, rules: DressRules) -> dict[str, Json]:
    """The containers, and the ResourceClaim if they get their GPUs from one."""
    made = {
        group: [dressed_container(one, outfit, rules) for one in spec[group]]
        for group in CONTAINER_GROUPS
        if spec.get(group)
    }
    if rules.uses_resource_claims:
        name = outfit.claim_name
        entry = pod_claim_of(outfit.claim.record, name) if rules.leaves_to_scheduler else pod_claim(name)
        made["resourceClaims"] = with_entry(spec.get("resourceClaims") or (), entry)
    return made


def with_runtime_class(raw: RawPod, rules: DressRules) -> RawPod:
    """The new pod with the runtime class for GPUs, if it names none.

    Not part of `dressed`: it cannot be changed after creation, and no guarantee depends on it.
    """
    spec = raw.get("spec") or {}
    if rules.runtime_class is None or spec.get("runtimeClassName"):
        return raw
    return {**raw, "spec": {**spec, "runtimeClassName": rules.runtime_class}}


def runtime_class_warnings(raw: RawPod, rules: DressRules) -> Iterator[str]:
    """A warning if the pod names a runtime class other than the one for GPUs."""
    named = (raw.get("spec") or {}).get("runtimeClassName")
    if rules.runtime_class is not None and named and named != rules.runtime_class:
        yield f"spec.runtimeClassName: {named} is kept, but {rules.runtime_class} is the runtime class for GPUs"


def undressed(raw: RawPod) -> dict[str, Json]:
    """The pod without our annotations, gate and ResourceClaim."""
    clean = {**raw, "metadata": without_outputs(raw)}
    return {**clean, "spec": without_own_claim(ungated(raw["spec"]))} if raw.get("spec") else clean


def ungated(spec: Mapping[str, Json]) -> dict[str, Json]:
    gates = spec.get("schedulingGates")
    if not any(gate.get("name") == keys.QUEUE_GATE for gate in gates or ()):
        return dict(spec)
    left = [gate for gate in gates or () if gate.get("name") != keys.QUEUE_GATE]
    rest = {name: value for name, value in spec.items() if name != "schedulingGates"}
    return {**rest, "schedulingGates": left} if left else rest


def undressed_with_claim(raw: RawPod, pod: Pod, rules: ClaimRules) -> tuple[RawPod, Claim | None]:
    """The pod without our annotations and gate, and its claim.

    Dressing removes resource requests. So a copy of a dressed pod asks for what its record says.
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
        written |= annotations_of(outfit.reservation_id, outfit.visible, outfit.nodes[0], rules)
    return written


def annotations_of(reservation_id: str, visible: str, node: str, rules: DressRules) -> dict[str, str]:
    """The annotations of a pod with a reservation, with their aliases."""
    written: dict[str, str] = {}
    for key, value in reservation_values(reservation_id, visible, node):
        written.update(dict.fromkeys(key.names if rules.writes_aliases else (key.name,), value))
    return written


def reservation_values(reservation_id: str, visible: str, node: str) -> tuple[tuple[Key, str], ...]:
    """The annotations of a pod with a reservation. If the kubelet chooses the GPUs, `visible` is empty, and the
    reconciler names them later."""
    gpus = ((keys.GPU_UUID, visible),) if visible else ()
    return ((keys.RESERVATION_ID, reservation_id), *gpus, (keys.NODE, node))


# Affinity: Kubernetes ORs the terms, so the node is added to each. A term without expressions matches no node. With our
# expression it would match, so it is left as it is.


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
    """The pod without the pin to that node. Only for pods that named no node themselves: their own term looks the
    same."""
    spec = raw.get("spec") or {}
    affinity = spec.get("affinity") or {}
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(REQUIRED) or {}
    terms = [without_pin(term, node) for term in required.get("nodeSelectorTerms") or ()]
    left = {**required, "nodeSelectorTerms": [term for term in terms if not is_empty(term)]}
    made = {name: value for name, value in node_affinity.items() if name != REQUIRED}
    if left["nodeSelectorTerms"]:
        made[REQUIRED] = left
    return {**raw, "spec": {**spec, "affinity": {**affinity, "nodeAffinity": made}}}


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
    """The nodes to which a term is pinned by name. All its fields must match, so two different names leave none."""
    named: set[str] | None = None
    for field in term.get("matchFields") or ():
        values = field.get("values") or []
        if field.get("key") == "metadata.name" and field.get("operator") == "In" and len(values) == 1:
            named = set(values) if named is None else named & set(values)
    return named


def nodes_pinned_to(raw: RawPod) -> set[str | None]:
    """The nodes that the pod's required affinity allows by name; with None if a term names no node."""
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
    gets_gpus = not named or raw.get("name") in named or shows_gpus(raw.get("env") or (), rules)
    if gets_gpus and rules.uses_device_plugin:
        return container
    if gets_gpus:
        container["env"] = dressed_env(raw.get("env") or [], outfit, rules)
    elif rules.hides_gpus and (outfit.hides_gpus_everywhere or has_unseen_variables(raw)):
        container["env"] = env_hiding_gpus(raw.get("env") or [])
    if rules.removes_request and raw.get("resources"):
        container["resources"] = without_request(raw["resources"], rules.resource)
    if rules.uses_resource_claims:
        container["env"] = env_hiding_gpus(container.get("env") or [])
        container |= with_container_claim(container) if gets_gpus else without_container_claim(container)
    return container


def shows_gpus(env: Iterable[Mapping[str, Json]], rules: DressRules) -> bool:
    names = keys.GPU_ENV if rules.hides_gpus else rules.env_names
    return any(one.get("name") in names and not hides_all(one) for one in env)


def has_unseen_variables(container: Mapping[str, Json]) -> bool:
    """Whether a ConfigMap or a Secret may set a variable that the webhook does not see."""
    env = container.get("env") or ()
    return bool(container.get("envFrom")) and not any(one.get("name") == keys.NVIDIA_ENV for one in env)


def dressed_env(env: Sequence[dict[str, Json]], outfit: Allocation, rules: DressRules) -> list[dict[str, Json]]:
    """Our variables replace the user's in place, so that later variables can refer to them. Each occurs once."""
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
    """A warning for each GPU variable of a container that is replaced."""
    for path, container in pod.containers():
        for one in container.env or ():
            wanted = outfit.env(one.name, rules)
            is_ours = (one.value_from or None, one.value or "") == (wanted.get("valueFrom"), wanted.get("value") or "")
            if one.name in rules.env_names and not is_ours and not is_harmless(one):
                yield f"{path}: gpuwarden replaces the value of {one.name} in container {container.name}"


# Differences.


def changes(old: RawPod, new: RawPod) -> list[Change]:
    """The JSON patch from `old` to `new`, for the parts that dressing can change."""
    return list(difference(touched(old), touched(new)))


def touched(raw: RawPod) -> dict[str, Json]:
    """The parts of the pod that dressing can change, in their structure."""
    parts = members(raw, "metadata", "spec")
    if parts.get("metadata"):
        parts["metadata"] = members(parts["metadata"], "annotations", "labels")
    if parts.get("spec"):
        changed = ("affinity", "schedulingGates", "runtimeClassName", "resourceClaims", *HINTED)
        spec = parts["spec"] = members(parts["spec"], *changed, *CONTAINER_GROUPS)
        if spec.get("affinity"):
            spec["affinity"] = members(spec["affinity"], "nodeAffinity", "podAntiAffinity")
        for group in CONTAINER_GROUPS:
            if spec.get(group):
                spec[group] = [members(one, "env", "resources") for one in spec[group]]
    return parts


def members(whole: Mapping[str, Json], *names: str) -> dict[str, Json]:
    return {name: whole[name] for name in names if name in whole}
