"""Whether a pod is still as gpuwarden dressed it, and exposes no other GPUs. Every denial names a field."""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta

import msgspec
from attrs import evolve

from webhook.core import claim_keys, gpu_order, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, ClaimRules, claim_of
from webhook.core.decide import HINTS, REASONS, ClaimSearch, EvidencePolicy, Objection, ordinal_not_in_map
from webhook.core.dress import (
    Allocation,
    DressRules,
    MapVisible,
    RawPod,
    changes,
    dressed,
    left_to_scheduler,
    nodes_pinned_to,
    reservation_values,
    waiting,
)
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.gpu_demand import demand_of
from webhook.core.gpu_visibility import exposes_all_gpus, is_harmless, visible_env
from webhook.core.injection import Injection
from webhook.core.pod import Container, EnvVar, Pod
from webhook.core.pod_claims import own_claim_of, own_template_of
from webhook.core.proof_claims import MAX_PAIRS
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.core.verdict import Deny

# No node has more than a thousand GPUs, so a longer number is a serial number.
MAX_INDEX_DIGITS = 4
RESOURCE_CLAIMS = "spec.resourceClaims"
GPU_RESOURCES = (keys.NVIDIA_RESOURCES, "deviceclass.resource.kubernetes.io/")
OTHER_WAYS_HINT = "ask with nvidia.com/gpu, gpuwarden.io/gpu-count or a gpuwarden.io/gpu. label"
CHANGED = "another webhook or the user changed what gpuwarden wrote"


# Fields that show a pod GPUs without a reservation.


def gpu_fields(pod: Pod, rules: DressRules) -> Iterator[str]:
    """Every field of the pod that would show it a GPU, requests of our own resource included."""
    yield from gpu_env_fields(pod)
    yield from bypass_fields(pod, rules)
    for path, container in pod.containers():
        if rules.resource in container.resource_names():
            yield f"{path}.resources[{rules.resource}]"


def gpu_env_fields(pod: Pod) -> Iterator[str]:
    for path, container in pod.containers():
        yield from (f"{path}.env[{one.name}]" for one in visible_env(container))


def bypass_fields(pod: Pod, rules: DressRules) -> Iterator[str]:
    """Fields that give GPUs without the ledger, whether or not the pod has a claim."""
    for key in pod.annotations:
        if keys.is_cdi(key):
            yield f"metadata.annotations[{key}]"
    for path, container in pod.containers():
        for name in container.resource_names():
            is_ours = name == rules.resource
            is_refused = rules.injection is Injection.CUDA if is_ours else name.startswith(GPU_RESOURCES)
            if is_refused:
                yield f"{path}.resources[{name}]"
    if pod.body.resource_claims:
        yield RESOURCE_CLAIMS


def no_gpu_fields(pod: Pod, rules: DressRules) -> Deny | None:
    """A pod without a claim gets no GPU."""
    fields = sorted(set(gpu_fields(pod, rules)))
    return gpu_without_claim(fields, "the pod has no claim") if fields else None


def no_bypass_fields(pod: Pod, rules: DressRules) -> Deny | None:
    """A pod with a claim gets GPUs from its claim only. `rules` are those of its claim."""
    fields = set(bypass_fields(pod, rules))
    if rules.uses_resource_claims and has_only_own_claim(pod):
        fields.discard(RESOURCE_CLAIMS)
    return gpu_without_claim(sorted(fields), "the pod's GPUs come from its claim only") if fields else None


def gets_other_gpus(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """Why the pod would get other GPUs than those of its claim."""
    return no_bypass_fields(pod, rules) or not_for_device_plugin(pod, claim, rules)


def has_only_own_claim(pod: Pod) -> bool:
    """Whether its only ResourceClaim has a form that gpuwarden writes."""
    claims = pod.body.resource_claims or ()
    spec = {"resourceClaims": claims}
    return len(claims) == 1 and bool(own_claim_of(spec) or own_template_of(spec))


def no_exposed_containers(pod: Pod, rules: DressRules) -> Deny | None:
    """No new pod has a container to which `CUDA_VERSION` shows all GPUs of its node."""
    found = [f"{path}.env[{keys.CUDA_VERSION}]" for path, container in pod.containers() if exposes_all_gpus(container)]
    return gpu_without_claim(found, f"{keys.NVIDIA_ENV} is not set") if found and rules.hides_gpus else None


def precheck(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """Why a pod with a claim is denied, whatever nodes there are."""
    if not claim.count:
        return no_gpu_fields(pod, rules)
    rules = rules.of(claim)
    if rules.map_visible is MapVisible.INDEX and any(is_serial(gpu) for gpu in claim.record.devices):
        return Deny(
            Reason.INVALID_POD,
            f"{claim_keys.GPU_MAP.name}: {','.join(claim.record.devices)} is not a list of indices; "
            "this installation passes the names in the map to containers",
            hint="name GPUs by index or by UUID",
        )
    if rules.injection is Injection.CUDA and claim.record.asked:
        return Deny(
            Reason.INJECTION_CONFLICT,
            f"the containers request {rules.resource}, and with injection cuda only {keys.CUDA_ENV} is set: "
            "the device plugin would allocate a different GPU",
            hint=f"ask with {claim_keys.GPU_COUNT.name} instead",
        )
    return (
        no_unclaimable(claim, rules)
        or not_for_device_plugin(pod, claim, rules)
        or (no_node_name(pod) if claim.is_reserved_at_binding else None)
        or grace_within_limit(pod, rules)
        or no_bypass_fields(pod, rules)
    )


def no_node_name(pod: Pod) -> Deny | None:
    """A pod that names its node is never bound, so no GPUs would be reserved for it."""
    if not pod.body.node_name:
        return None
    return Deny(
        Reason.INVALID_POD,
        "spec.nodeName: the pod's GPUs are reserved when a scheduler binds it, and none binds a pod with a node",
        hint="name the node in the node affinity",
    )


def no_unclaimable(claim: Claim, rules: DressRules) -> Deny | None:
    """Why no ResourceClaim can take the GPUs, if they come from one."""
    if not rules.uses_resource_claims:
        return None
    if rules.leaves_to_scheduler:
        return ordinal_not_in_map(claim) or no_undemandable(claim)
    if claim.is_shared:
        return Deny(
            Reason.INJECTION_CONFLICT,
            f"{claim_keys.SHARED.name}: the pod's GPUs come from a ResourceClaim, which takes whole GPUs",
            hint="ask for a whole GPU, or use a namespace with another injection",
        )
    if claim.count > MAX_PAIRS:
        return Deny(
            Reason.INVALID_POD,
            f"the pod asks for {claim.count} GPUs; a ResourceClaim has at most {MAX_PAIRS}",
            hint="ask for fewer GPUs",
        )
    return None


def not_for_device_plugin(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """Why the kubelet cannot give the pod its GPUs by a device plugin, or the containers would see others."""
    if not rules.uses_device_plugin:
        return None
    if claim.record.selects_devices or claim.is_mapped:
        why = "the kubelet chooses the GPUs, so the pod cannot ask for particular ones or share them"
        hint = "ask for a number of GPUs, or use a namespace with another injection"
        return Deny(Reason.INJECTION_CONFLICT, f"{claim.sentence}: {why}", hint=hint)
    asked = {container.name: n for _, container in pod.containers() if (n := container.asked(rules.resource))}
    if not asked or asked != claim.record.asked:
        return Deny(
            Reason.INJECTION_CONFLICT,
            f"{claim.sentence}: the kubelet gives GPUs to containers that request {rules.resource}, and the containers "
            f"request {sum(asked.values())}",
            hint=f"request {rules.resource} in the resources of the containers",
        )
    fields = sorted(set(fields_against_device_plugin(pod, rules)))
    if not fields:
        return None
    return Deny(
        Reason.INJECTION_CONFLICT,
        f"{', '.join(fields[:5])}: the kubelet chooses the GPUs; it does not report those of init containers, and "
        "variables of a container override those of the device plugin",
        hint="request GPUs in regular containers, without envFrom, NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
        causes=tuple(fields[:20]),
    )


def fields_against_device_plugin(pod: Pod, rules: DressRules) -> Iterator[str]:
    for path, container in pod.containers():
        if not container.asked(rules.resource):
            yield from (f"{path}.env[{one.name}]" for one in visible_env(container))
            continue
        if group_of(path) != "spec.containers":
            yield f"{path}.resources[{rules.resource}]"
        if container.env_from:
            yield f"{path}.envFrom"
        yield from (f"{path}.env[{one.name}]" for one in gpu_env(container))


def no_undemandable(claim: Claim) -> Deny | None:
    """What a ResourceClaim cannot say to kube-scheduler."""
    try:
        demand_of(claim.record)
    except InvalidPodError as exc:
        return Deny(
            Reason.INJECTION_CONFLICT,
            f"kube-scheduler chooses the pod's GPUs by a ResourceClaim: {'; '.join(exc.mistakes)}",
            hint="ask in another way, or use a namespace with another injection",
            causes=exc.mistakes,
        )
    return None


def grace_within_limit(pod: Pod, rules: DressRules) -> Deny | None:
    """The reconciler keeps the GPUs of a pod whose end it has not seen for the longest grace period that is allowed.
    Those that kube-scheduler or the kubelet chooses are given away at once."""
    if (rules.leaves_to_scheduler or rules.uses_device_plugin) and pod.body.termination_grace_period_seconds == 0:
        return Deny(
            Reason.INVALID_POD,
            "spec.terminationGracePeriodSeconds: 0: each deletion would free the pod's GPUs while its containers run",
            hint="set 1 or more",
        )
    most, asked = rules.max_grace, pod.body.longest_grace
    if most is None or asked <= most.total_seconds():
        return None
    return Deny(
        Reason.INVALID_POD,
        f"spec.terminationGracePeriodSeconds: {asked} s, probes included; a pod with GPUs may have at most "
        f"{most.total_seconds():g} s",
        hint="shorten the grace period, or ask the administrator to raise maxGrace",
    )


def is_serial(gpu: str) -> bool:
    return gpu.isdecimal() and len(gpu) > MAX_INDEX_DIGITS


def gpu_without_claim(fields: list[str], why: str) -> Deny:
    return Deny(
        Reason.GPU_WITHOUT_CLAIM,
        f"{', '.join(fields[:5])}: would expose a GPU to the pod, and {why}",
        hint=OTHER_WAYS_HINT,
        causes=tuple(fields[:20]),
    )


# A pod at its creation.


def no_added_request(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """No other webhook has added a GPU request since the GPUs were chosen. Dressing would remove the request."""
    known = claim.record.asked
    added = [
        (f"{path}.resources[{rules.resource}]", container.name)
        for path, container in pod.containers()
        if container.asked(rules.resource) not in (0, known.get(container.name))
    ]
    if not added:
        return None
    field, name = added[0]
    return Deny(
        Reason.INVALID_POD,
        f"{field}: the GPU request of container {name} was added after gpuwarden chose the pod's GPUs",
        hint="call the webhook that adds the request before gpuwarden's webhook",
        causes=tuple(one for one, _ in added[:20]),
    )


CREATE_AGAIN = (
    "create the pod again if its generated name was taken and the API server generated another; "
    "otherwise remove the gpuwarden.io/ annotations from the copied manifest"
)


def matches_reservation(
    raw: RawPod,
    claim: Claim,
    reservation: Reservation,
    pod: PodIdentity,
    rules: DressRules,
    *,
    has_waited: bool = False,
) -> Deny | None:
    """The final pod is the one for which the reservation was made, dressed as gpuwarden dressed it."""
    if reservation.claim_digest != claim.digest:
        return Deny(
            Reason.FORGED,
            f"metadata.annotations[{keys.CLAIM.name}]: not the claim of reservation {reservation.id}",
        )
    if reservation.phase is Phase.RELEASING:
        return Deny(Reason.RESERVATION_EXPIRED, f"reservation {reservation.id} is being released: create the pod again")
    if not reservation.may_belong_to(pod):
        return Deny(
            Reason.RESERVATION_CONFLICT,
            f"metadata.annotations[{keys.RESERVATION_ID.name}]: reservation {reservation.id} belongs to another pod",
            hint=CREATE_AGAIN
            if has_new_generated_name(raw, reservation)
            else "remove the gpuwarden.io/ annotations from the copied manifest",
        )
    uuids = gpu_order.in_annotated_order(raw["metadata"].get("annotations") or {}, reservation.uuids)
    name = own_claim_of(raw.get("spec") or {})
    outfit = Allocation(claim, (reservation.node,), reservation.id, uuids, has_waited=has_waited, claim_name=name)
    fields = changed_fields(
        raw, (dressed(raw, evolve(outfit, hides_gpus_everywhere=all_), rules) for all_ in (True, False))
    )
    fields += sorted(set(debug_env(raw, outfit.visible)))
    reserved = f"{reservation.id}: {outfit.visible or 'GPUs'} on {reservation.node}"
    return not_as_dressed(fields, f"does not match the reservation ({reserved})")


def not_as_dressed(fields: list[str], problem: str, hint: str = CHANGED) -> Deny | None:
    """The denial of a pod in which these fields differ from what gpuwarden wrote; None without fields."""
    if not fields:
        return None
    return Deny(Reason.FORGED, f"{', '.join(fields[:5])}: {problem}", hint=hint, causes=tuple(fields[:20]))


def changed_fields(raw: RawPod, wanted: Iterable[RawPod]) -> list[str]:
    """The fields in which the pod differs from the first of the wanted pods. Empty if it equals any of them: a replica
    of an older version may have dressed it."""
    found = ([field_path(change["path"]) for change in changes(raw, one)] for one in wanted)
    first = next(found, [])
    return first if first and all(found) else []


def debug_env(raw: RawPod, visible: str) -> Iterator[str]:
    """The variables by which debug containers would see GPUs of other pods. Most debug containers are added after
    creation, so dressing does not touch them."""
    if not (raw.get("spec") or {}).get("ephemeralContainers"):
        return
    for path, container in Pod.parse(raw).containers():
        if group_of(path) == "spec.ephemeralContainers":
            yield from (f"{path}.env[{one.name}]" for one in gpu_env(container) if not is_own(one, (visible,)))


def has_new_generated_name(raw: RawPod, reservation: Reservation) -> bool:
    """Whether the pod may have a new generated name. If a generated name is taken, the API server generates another one
    and a new uid, and calls validating webhooks only. A copy of a pod with a generated name looks the same, so both are
    denied."""
    prefix = raw["metadata"].get("generateName")
    return bool(prefix) and (reservation.pod_name or "").startswith(prefix)


def matches_unreserved_pod(raw: RawPod, pod: Pod, claim: Claim, rules: DressRules, claims: ClaimRules) -> Deny | None:
    """A pod whose GPUs are reserved at its Binding is as gpuwarden dressed it. Its affinity is not compared: the review
    of the Binding checks the node."""
    unexpected = reservation_annotations(pod)
    if unexpected:
        return Deny(Reason.FORGED, f"metadata.annotations[{unexpected[0]}]: the pod has no GPUs yet")
    denied = no_bypass_fields(pod, rules.of(claim)) or is_as_asked(pod, claim, claims)
    if denied is not None:
        return denied
    fields = changed_fields(raw, [dressed(raw, Allocation(claim, (), has_waited=True), rules)])
    fields += sorted(set(debug_env(raw, "")))
    return not_as_dressed(fields, "not as gpuwarden dressed the pod", f"{CHANGED}: create the pod again")


def matches_queued_pod(raw: RawPod, pod: Pod, claim: Claim, rules: DressRules, claims: ClaimRules) -> Deny | None:
    """A gated pod without a reservation is as gpuwarden dressed it: it names no GPUs, no field shows it any, and its
    recorded claim is what the pod asks for."""
    unexpected = reservation_annotations(pod)
    if unexpected:
        return Deny(Reason.FORGED, f"metadata.annotations[{unexpected[0]}]: a queued pod has no GPUs yet")
    denied = gets_other_gpus(pod, claim, rules.of(claim)) if claim.count else no_gpu_fields(pod, rules)
    denied = denied or is_as_asked(pod, claim, claims)
    if denied is not None:
        return denied
    why, name = pod.annotations.get(keys.WAITING) or "", own_claim_of(raw.get("spec") or {})
    fields = changed_fields(
        raw,
        (waiting(raw, claim, rules, why, hides_gpus_everywhere=all_, claim_name=name) for all_ in (True, False)),
    )
    if not fields and not pod.is_gated:
        fields = ["spec.schedulingGates"]
    problem, hint = "not as gpuwarden dressed the queued pod", f"{CHANGED}: create the pod again"
    return not_as_dressed(fields, problem, hint) or preset_node(pod, ())


def is_as_asked(pod: Pod, claim: Claim, claims: ClaimRules) -> Deny | None:
    """The record of a pod that no ledger knows is what the pod asks for."""
    asked = claim_of(pod, claims, claim.record.asked)
    if asked is None or not is_at_least_as_strict(claim, asked):
        return Deny(Reason.FORGED, f"metadata.annotations[{keys.CLAIM.name}]: not what the pod asks for")
    return None


def matches_claim(raw: RawPod, pod: Pod, claim: Claim, rules: DressRules, claims: ClaimRules) -> Deny | None:
    """A pod whose GPUs kube-scheduler chooses is as gpuwarden dressed it, and its ResourceClaim is what it asks for.
    Its affinity is not compared: the GPUs of a placement map are in the claim."""
    unexpected = reservation_annotations(pod)
    if unexpected:
        return Deny(Reason.FORGED, f"metadata.annotations[{unexpected[0]}]: kube-scheduler chooses the pod's GPUs")
    denied = no_unclaimable(claim, rules.of(claim)) or is_as_asked(pod, claim, claims)
    if denied is not None:
        return denied
    name = own_claim_of(raw.get("spec") or {})
    fields = changed_fields(raw, [left_to_scheduler(raw, claim, rules, name)])
    fields += sorted(set(debug_env(raw, "")))
    return not_as_dressed(fields, "not as gpuwarden dressed the pod") or preset_node(pod, ())


def has_modes_of_namespace(claim: Claim, rules: ClaimRules) -> Deny | None:
    """A new pod that no ledger knows gets its GPUs in the way of its namespace."""
    was, now = claim.record, (rules.injection, rules.reserve)
    if not claim.count or (was.injection, was.reserve) == now:
        return None
    return Deny(
        Reason.FORGED,
        f"metadata.annotations[{keys.CLAIM.name}]: not the injection of the pod's namespace",
        hint="create the pod again if the injection of its namespace has changed",
    )


def no_stray_gate(pod: Pod) -> Deny | None:
    """The queue never opens the gate of a pod that gpuwarden did not dress, so the pod would wait for ever."""
    if not pod.is_gated:
        return None
    return Deny(Reason.FORGED, f"spec.schedulingGates[{keys.QUEUE_GATE}]: only gpuwarden may add this gate")


def preset_node(pod: Pod, allowed: Collection[str]) -> Deny | None:
    """A preset nodeName needs no Binding, so the webhook for Bindings never sees the pod."""
    name = pod.body.node_name
    if not name or name in allowed:
        return None
    reserved = " or ".join(sorted(allowed)) or "no node"
    return Deny(Reason.FORGED, f"spec.nodeName: is {name}, but the reservation is on {reserved}")


def matches_claim_without_gpus(
    raw: RawPod, pod: Pod, claim: Claim, fleet: Fleet, policy: EvidencePolicy, rules: ClaimRules
) -> Deny | None:
    """Only its affinity keeps a claim without GPUs on proven nodes, so each node that it allows must be proven."""
    asked = claim_of(pod, rules)
    if asked is None or not is_at_least_as_strict(claim, asked):
        return Deny(
            Reason.FORGED,
            f"metadata.annotations[{keys.CLAIM.name}]: not what the pod asks for",
            hint="create the pod again if the required hash of its namespace has changed"
            if rules.hash_policy.hashes
            else "",
        )
    return allows_only_proven_nodes(raw, claim, fleet, policy) or preset_node(
        pod, {n for n in nodes_pinned_to(raw) if n}
    )


def is_dressed_without_gpus(pod: Pod, rules: DressRules) -> Deny | None:
    """A pod whose claim is only for a proven node has no annotation of a reservation, and no field shows it a GPU."""
    unexpected = reservation_annotations(pod)
    if unexpected:
        return Deny(Reason.FORGED, f"metadata.annotations[{unexpected[0]}]: the pod has no reservation")
    return no_gpu_fields(pod, rules)


def reservation_annotations(pod: Pod) -> list[str]:
    """The annotations in the pod that only a reservation adds."""
    return sorted((keys.OUTPUT_NAMES - {keys.CLAIM.name}) & pod.annotations.keys())


def allows_only_proven_nodes(raw: RawPod, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> Deny | None:
    """The evidence of every node that the pod's affinity allows satisfies the claim."""
    search = ClaimSearch(claim, fleet, policy)
    allowed = nodes_pinned_to(raw)
    for name in sorted(name or "" for name in allowed):
        indexed = fleet.indexed_nodes.get(name)
        if indexed is None:
            return Deny(Reason.NOT_RESERVED, "spec.affinity.nodeAffinity: allows nodes that are not proven")
        objection = search.evidence_objection(indexed)
        if objection is not None:
            return Deny(Reason.NO_PROVEN_NODE, f"{claim.sentence}: node {name}: {objection}")
    return None


def is_at_least_as_strict(recorded: Claim, asked: Claim) -> bool:
    """Whether the recorded claim equals what the pod asks for now, or allows fewer hashes: the namespace may allow more
    hashes since. A record that allows more hashes is not trusted where no ledger knows it. `named` is not compared: a
    copy of a dressed pod names the node to which it was pinned. Neither are `injection` and `reserve`: a pod keeps
    those with which it was created."""
    own = asked.record
    alike = (
        msgspec.structs.replace(
            recorded.record, hashes=own.hashes, named=own.named, injection=own.injection, reserve=own.reserve
        )
        == own
    )
    return alike and (not asked.hashes or (bool(recorded.hashes) and recorded.hashes <= asked.hashes))


def still_proven(claim: Claim, node: str, fleet: Fleet, policy: EvidencePolicy) -> Deny | None:
    """The evidence of the reserved node still satisfies the claim."""
    indexed = fleet.indexed_nodes.get(node)
    if indexed is None:
        return Deny(Reason.NO_SUITABLE_NODE, f"node {node} no longer exists")
    objection = ClaimSearch(claim, fleet, policy).evidence_objection(indexed)
    return Deny(Reason.NO_PROVEN_NODE, f"{claim.sentence}: node {node}: {objection}") if objection else None


def still_allows_node(claim: Claim, node: str, fleet: Fleet) -> Deny | None:
    """The pod's selectors still allow the node of its GPUs: another webhook may have changed them. `preset_node` checks
    nodeName."""
    indexed = fleet.indexed_nodes.get(node)
    if indexed is None or evolve(claim.nodes, node_name=None).matches(node, indexed.labels):
        return None
    fields = [f"spec.nodeSelector[{key}]" for key, value in claim.nodes.selector if indexed.labels.get(key) != value]
    fields = fields or ["spec.affinity.nodeAffinity"]
    return Deny(
        Reason.NO_SUITABLE_NODE,
        f"{', '.join(fields[:5])}: excludes {node}, where the pod's GPUs are reserved",
        hint="set reinvocationPolicy: IfNeeded for gpuwarden's webhook, or call it after the other webhook",
        causes=tuple(fields[:20]),
    )


# A pod that is being bound to a node.


def still_reserved(claim: Claim, held: Reservation | None, living: Pod) -> Deny | None:
    """The GPUs with which the pod was created are still reserved for it."""
    is_its_own = (
        held is not None
        and held.phase is not Phase.RELEASING
        and held.claim_digest == claim.digest
        and held.may_belong_to(identity_of(living))
    )
    if is_its_own:
        return None
    state = "does not exist" if held is None else "does not belong to this pod"
    return Deny(
        Reason.NOT_RESERVED,
        f"metadata.annotations[{keys.RESERVATION_ID.name}]: reservation "
        f"{living.annotations.get(keys.RESERVATION_ID.name)!r} {state}; "
        "the containers would see GPUs that may belong to another pod",
        hint="create the pod again",
    )


def kubelet_counts_gpus(claim: Claim, node: str, fleet: Fleet) -> Deny | None:
    """The device plugin of the node cannot give the pod a GPU that is in use without its knowledge."""
    indexed = fleet.indexed_nodes.get(node)
    if claim.delivery is None or indexed is None:
        return None
    if not fleet.node_class(indexed.node_group.node_class).has_uncounted_gpus:
        return None
    return has_uncounted_gpu(claim, node)


def has_uncounted_gpu(claim: Claim, node: str) -> Deny:
    """The kubelet may give a GPU to the pod that a container uses."""
    return Deny(
        Reason.NO_FREE_DEVICE,
        f"{claim.sentence}: node {node}: {Objection.UNCOUNTED}",
        hint="the scheduler tries again; wait until the GPU is free",
    )


def before_bind_deadline(living: Pod, held: Reservation | None, now: datetime, bind_deadline: timedelta) -> Deny | None:
    """The reconciler has not released the pod's GPUs, and will not do so while the API server binds it. For a pod from
    the queue the time counts from its reservation."""
    created = living.meta.creation_timestamp
    if created is None:
        return None
    since = created if held is None else max(created, held.since)
    if now < since + bind_deadline:
        return None
    return Deny(
        Reason.RESERVATION_EXPIRED,
        f"the pod was not bound within {bind_deadline}: its GPUs are released",
        hint="create the pod again",
    )


def identity_of(living: Pod) -> PodIdentity:
    return PodIdentity(living.meta.namespace or "", living.meta.name or "", living.meta.uid or "")


def serves_on(claim: Claim, node: str, fleet: Fleet, policy: EvidencePolicy, *, has_reservation: bool) -> Deny | None:
    """The node can serve a pod whose GPUs are reserved at its Binding. With a reservation, its GPUs are not counted."""
    indexed = fleet.indexed_nodes.get(node)
    if indexed is None:
        return Deny(Reason.NO_SUITABLE_NODE, f"node {node} is not known")
    search = ClaimSearch(claim, fleet, policy)
    objection = search.node_objection(indexed) if has_reservation else search.objection(indexed)
    if objection is None:
        return None
    reason = next(reason for reason, group in REASONS if objection in group)
    return Deny(reason, f"{claim.sentence}: node {node}: {objection.text_for(claim)}", hint=HINTS[reason])


def carries_reservation(binding: Binding, held: Reservation) -> Deny | None:
    """The Binding writes the reservation that was made for it into this pod, and into no other pod of its name."""
    uuids = gpu_order.in_annotated_order(binding.annotations, held.uuids)
    values = reservation_values(held.id, ",".join(uuids), held.node)
    wrong = [key.name for key, value in values if binding.annotations.get(key.name) != value]
    if wrong or binding.pod.uid != held.uid:
        field = f"metadata.annotations[{wrong[0]}]" if wrong else "metadata.uid"
        return Deny(
            Reason.FORGED,
            f"{field}: does not match the reservation ({held.id}: {','.join(uuids)} on {held.node})",
            hint="another webhook or the scheduler changed what gpuwarden wrote",
        )
    return binds_as_reserved(binding, held)


def can_be_bound(raw: RawPod) -> Deny | None:
    """The API server refuses other Bindings, after GPUs would have been reserved."""
    spec = raw.get("spec") or {}
    why = (
        f"is on node {spec['nodeName']} already"
        if spec.get("nodeName")
        else "has scheduling gates"
        if spec.get("schedulingGates")
        else "is being deleted"
        if raw["metadata"].get("deletionTimestamp")
        else ""
    )
    name = f"{raw['metadata'].get('namespace')}/{raw['metadata'].get('name')}"
    return Deny(Reason.RESERVATION_CONFLICT, f"pod {name} {why}") if why else None


def binds_as_reserved(binding: Binding, held: Reservation | None, living: Pod | None = None) -> Deny | None:
    """The Binding names the node of the pod's GPUs. It sets none of our annotations, except to the pod's own values."""
    if held is not None and binding.node != held.node:
        return Deny(
            Reason.NOT_RESERVED,
            f"target.name: the GPUs of pod {binding.pod.namespace}/{binding.pod.name} are reserved on {held.node}, "
            f"not on {binding.node}",
            hint="use a scheduler that respects node affinity",
        )
    annotations = binding.annotations if living is None else living.annotations
    uuids = () if held is None or held.delivery else gpu_order.in_annotated_order(annotations, held.uuids)
    values = () if held is None else reservation_values(held.id, ",".join(uuids), held.node)
    ours = {name: value for key, value in values for name in key.names}
    forbidden = sorted(
        key
        for key, value in binding.annotations.items()
        if keys.is_protected_annotation(key) and ours.get(key) != value
    )
    if forbidden:
        return Deny(Reason.FORGED, f"metadata.annotations[{forbidden[0]}]: only gpuwarden may set it")
    return None


# A pod that exists.


def gpu_access_unchanged(new: Pod, old: Pod, reserved: Collection[str], rules: DressRules) -> Deny | None:
    """An update does not change which GPUs the pod sees; `reserved` are the values that name the pod's own GPUs."""
    before, after = protected(old), protected(new)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        fields = [f"metadata.annotations[{key}]" for key in changed]
        return Deny(Reason.IMMUTABLE, f"{', '.join(fields[:5])}: only gpuwarden may change it", causes=tuple(fields))
    fields = sorted(set(changed_env(new, old, reserved)))
    if fields:
        return Deny(
            Reason.IMMUTABLE,
            f"{', '.join(fields[:5])}: GPU variables cannot change after creation",
            hint="a debug container may set them to the pod's own GPUs, or to void",
            causes=tuple(fields[:20]),
        )
    added = sorted(set(bypass_fields(new, rules)) - set(bypass_fields(old, rules)))
    return gpu_without_claim(added, "the pod was created without it") if added else None


def protected(pod: Pod) -> dict[str, str | None]:
    return {key: value for key, value in pod.annotations.items() if keys.is_protected_annotation(key)}


def changed_env(new: Pod, old: Pod, reserved: Collection[str]) -> Iterator[str]:
    is_claimed = keys.CLAIM.name in old.annotations
    known = {(group_of(path), one.name): gpu_env(one) for path, one in old.containers()}
    for path, container in new.containers():
        was, now = known.get((group_of(path), container.name)), gpu_env(container)
        if was is None:
            yield from (f"{path}.env[{one.name}]" for one in visible_env(container) if one.literal not in reserved)
            if exposes_all_gpus(container):
                yield f"{path}.env[{keys.CUDA_VERSION}]"
            if is_claimed and container.env_from and not any(one.name == keys.NVIDIA_ENV for one in now):
                yield f"{path}.envFrom"  # may set NVIDIA_VISIBLE_DEVICES; a variable of the container would override it
        elif was != now:
            for name in keys.GPU_ENV:
                if [one for one in was if one.name == name] != [one for one in now if one.name == name]:
                    yield f"{path}.env[{name}]"


def is_own(one: EnvVar, reserved: Collection[str]) -> bool:
    return is_harmless(one) or one.literal in reserved


def gpu_env(container: Container) -> list[EnvVar]:
    return [one for one in container.env or () if one.name in keys.GPU_ENV]


def group_of(path: str) -> str:
    return path.partition("[")[0]


def field_path(pointer: str) -> str:
    """A JSON pointer as a field path: `/spec/containers/0` is `spec.containers[0]`."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    text = ""
    for step in steps:
        text += f"[{step}]" if step.isdecimal() or "/" in step or "." in step else f".{step}"
    return text.lstrip(".") or "the pod"
