"""Whether a pod that someone else had in hand is still the pod that we dressed: every refusal names the field."""

from collections.abc import Collection, Iterable, Iterator
from datetime import datetime, timedelta

import msgspec
from attrs import evolve

from webhook.core import gpu_order, keys
from webhook.core.binding import Binding
from webhook.core.claim import Claim, ClaimRules, claim_of
from webhook.core.decide import ClaimSearch, EvidencePolicy
from webhook.core.dress import (
    Allocation,
    DressRules,
    Injection,
    MapVisible,
    RawPod,
    changes,
    dressed,
    nodes_pinned_to,
    reservation_values,
    waiting,
)
from webhook.core.fleet import Fleet
from webhook.core.gpu_visibility import exposes_all_gpus, is_harmless, visible_env
from webhook.core.pod import Container, EnvVar, Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.core.verdict import Deny

# No node has more than a thousand GPUs; a longer number is a serial number.
MAX_INDEX_DIGITS = 4
GPU_RESOURCES = (keys.NVIDIA_RESOURCES, "deviceclass.resource.kubernetes.io/")
OTHER_WAYS_HINT = "ask with nvidia.com/gpu, gpuwarden.io/gpu-count or a gpuwarden.io/gpu. label"


# Ways to a GPU that are not ours.


def gpu_fields(pod: Pod, rules: DressRules) -> Iterator[str]:
    """Every place in the pod that would show it a GPU, the request of our own resource included."""
    yield from gpu_env_fields(pod)
    yield from bypass_fields(pod, rules)
    for path, container in pod.containers():
        if rules.resource in container.resource_names():
            yield f"{path}.resources[{rules.resource}]"


def gpu_env_fields(pod: Pod) -> Iterator[str]:
    for path, container in pod.containers():
        yield from (f"{path}.env[{one.name}]" for one in visible_env(container))


def bypass_fields(pod: Pod, rules: DressRules) -> Iterator[str]:
    """Ways that lead past the ledger, whether or not the pod has a claim."""
    for key in pod.annotations:
        if keys.is_cdi(key):
            yield f"metadata.annotations[{key}]"
    for path, container in pod.containers():
        for name in container.resource_names():
            is_ours = name == rules.resource
            if (is_ours and not rules.takes_request_off) or (not is_ours and name.startswith(GPU_RESOURCES)):
                yield f"{path}.resources[{name}]"
    if pod.body.resource_claims:
        yield "spec.resourceClaims"


def no_gpu_fields(pod: Pod, rules: DressRules) -> Deny | None:
    """A pod without a claim gets no GPU by any way."""
    fields = sorted(set(gpu_fields(pod, rules)))
    return gpu_without_claim(fields, "the pod has no claim") if fields else None


def no_bypass_fields(pod: Pod, rules: DressRules) -> Deny | None:
    """A pod with a claim gets its GPUs in one way only."""
    fields = sorted(set(bypass_fields(pod, rules)))
    return gpu_without_claim(fields, "a claim is served in one way only") if fields else None


def no_exposed_containers(pod: Pod, rules: DressRules) -> Deny | None:
    """No new pod has a container that `CUDA_VERSION` shows all GPUs of its node."""
    found = [f"{path}.env[{keys.CUDA_VERSION}]" for path, container in pod.containers() if exposes_all_gpus(container)]
    return gpu_without_claim(found, f"{keys.NVIDIA_ENV} is not set beside it") if found and rules.hides_gpus else None


def precheck(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """What speaks against a pod with a claim before any node is looked at."""
    if not claim.count:
        return no_gpu_fields(pod, rules)
    if rules.map_visible is MapVisible.INDEX and any(is_serial(gpu) for gpu in claim.record.devices):
        return Deny(
            Reason.INVALID_POD,
            f"{keys.GPU_MAP.name}: {','.join(claim.record.devices)} is not a list of indices, "
            "and this installation shows containers what the map says",
            hint="name GPUs by index or by UUID",
        )
    if rules.injection is Injection.CUDA and claim.record.asked:
        return Deny(
            Reason.INJECTION_CONFLICT,
            f"the containers ask for {rules.resource}, and this installation only sets {keys.CUDA_ENV}: "
            "the device plugin would hand out another GPU",
            hint=f"ask with {keys.GPU_COUNT.name} instead",
        )
    return grace_within_limit(pod, rules) or no_bypass_fields(pod, rules)


def grace_within_limit(pod: Pod, rules: DressRules) -> Deny | None:
    """GPUs of a pod that goes unseen are kept from others for as long as any pod may take to stop."""
    most, asked = rules.max_grace, pod.body.longest_grace
    if most is None or asked <= most.total_seconds():
        return None
    return Deny(
        Reason.INVALID_POD,
        f"spec.terminationGracePeriodSeconds: {asked} s, a probe's included; of a pod with GPUs it is at most "
        f"{most.total_seconds():g} s",
        hint="give the containers less time to stop, or have the administrator raise maxGrace",
    )


def is_serial(gpu: str) -> bool:
    return gpu.isdecimal() and len(gpu) > MAX_INDEX_DIGITS


def gpu_without_claim(fields: list[str], why: str) -> Deny:
    return Deny(
        Reason.GPU_WITHOUT_CLAIM,
        f"{', '.join(fields[:5])}: would show the pod a GPU, and {why}",
        hint=OTHER_WAYS_HINT,
        causes=tuple(fields[:20]),
    )


# A pod at its creation.


def no_added_request(pod: Pod, claim: Claim, rules: DressRules) -> Deny | None:
    """Another webhook has a container ask for GPUs when the pod's own are chosen: dressing would take that off."""
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
        f"{field}: container {name} asks for GPUs after the pod was given its own",
        hint="have the webhook that adds it called before gpuwarden's",
        causes=tuple(one for one, _ in added[:20]),
    )


CREATE_AGAIN = (
    "create the pod again if its generated name was taken and the API server tried another; "
    "else take the gpuwarden.io/ annotations off a copied manifest"
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
    """The final pod is the one that the reservation was made for, dressed as we dressed it."""
    if reservation.claim_digest != claim.digest:
        return Deny(
            Reason.FORGED,
            f"metadata.annotations[{keys.CLAIM.name}]: not the claim that reservation {reservation.id} was made for",
        )
    if reservation.phase is Phase.RELEASING:
        return Deny(Reason.RESERVATION_EXPIRED, f"reservation {reservation.id} is being released: create the pod anew")
    if not reservation.may_belong_to(pod):
        return Deny(
            Reason.RESERVATION_CONFLICT,
            f"metadata.annotations[{keys.RESERVATION_ID.name}]: reservation {reservation.id} belongs to another pod",
            hint=CREATE_AGAIN
            if has_new_generated_name(raw, reservation)
            else "take the gpuwarden.io/ annotations off a copied manifest",
        )
    uuids = gpu_order.in_annotated_order(raw["metadata"].get("annotations") or {}, reservation.uuids)
    outfit = Allocation(claim, (reservation.node,), reservation.id, uuids, has_waited=has_waited)
    fields = differing(raw, (dressed(raw, evolve(outfit, hides_gpus_everywhere=all_), rules) for all_ in (True, False)))
    fields += sorted(set(debug_env(raw, outfit.visible)))
    if fields:
        return Deny(
            Reason.FORGED,
            f"{', '.join(fields[:5])}: not as reserved ({reservation.id}: {outfit.visible} on {reservation.node})",
            hint="another webhook or the user changed what gpuwarden wrote",
            causes=tuple(fields[:20]),
        )
    return None


def differing(raw: RawPod, wanted: Iterable[RawPod]) -> list[str]:
    """The fields in which the pod is not the first that is wanted, unless it is another of them: a replica of an older
    version may have dressed it."""
    found = ([readable(change["path"]) for change in changes(raw, one)] for one in wanted)
    first = next(found, [])
    return first if first and all(found) else []


def debug_env(raw: RawPod, visible: str) -> Iterator[str]:
    """What debug containers would see beside the pod's own GPUs: dressing leaves them alone, for most come later."""
    if not (raw.get("spec") or {}).get("ephemeralContainers"):
        return
    for path, container in Pod.parse(raw).containers():
        if group_of(path) == "spec.ephemeralContainers":
            yield from (f"{path}.env[{one.name}]" for one in gpu_env(container) if not is_own(one, (visible,)))


def has_new_generated_name(raw: RawPod, reservation: Reservation) -> bool:
    """Where a generated name is taken the API server makes up another, and a uid; it asks validating webhooks only. Or
    somebody has copied a pod with a generated name: nothing here tells the one from the other, so both are refused."""
    prefix = raw["metadata"].get("generateName")
    return bool(prefix) and (reservation.pod_name or "").startswith(prefix)


def matches_queued_pod(raw: RawPod, pod: Pod, claim: Claim, rules: DressRules, claims: ClaimRules) -> Deny | None:
    """A gated pod without a reservation is as we made it: nothing of what its GPUs will be is said yet, nothing else
    would show it any, and the claim that they will be chosen by is what the pod asks for."""
    forged = reservation_annotations(pod)
    if forged:
        return Deny(Reason.FORGED, f"metadata.annotations[{forged[0]}]: a pod that waits for GPUs has none yet")
    other_way = no_bypass_fields(pod, rules) if claim.count else no_gpu_fields(pod, rules)
    if other_way is not None:
        return other_way
    asked = claim_of(pod, claims, claim.record.asked)
    if asked is None or not is_at_least_as_strict(claim, asked):
        return Deny(Reason.FORGED, f"metadata.annotations[{keys.CLAIM.name}]: not what the pod asks for")
    why = pod.annotations.get(keys.WAITING) or ""
    fields = differing(raw, (waiting(raw, claim, rules, why, hides_gpus_everywhere=all_) for all_ in (True, False)))
    if fields or not pod.is_gated:
        return Deny(
            Reason.FORGED,
            f"{', '.join(fields[:5]) or 'spec.schedulingGates'}: not as a pod waits in the queue",
            hint="another webhook or the user changed what gpuwarden wrote: create the pod anew",
            causes=tuple(fields[:20]),
        )
    return preset_node(pod, ())


def no_stray_gate(pod: Pod) -> Deny | None:
    """Our gate in a pod that nobody of ours has dressed would never be opened."""
    if not pod.is_gated:
        return None
    return Deny(Reason.FORGED, f"spec.schedulingGates[{keys.QUEUE_GATE}]: the gate is put there by gpuwarden only")


def preset_node(pod: Pod, allowed: Collection[str]) -> Deny | None:
    """A preset nodeName needs no binding, so no later door would see it."""
    name = pod.body.node_name
    if not name or name in allowed:
        return None
    reserved = " or ".join(sorted(allowed)) or "no node"
    return Deny(Reason.FORGED, f"spec.nodeName: the pod is set on {name}, reserved is {reserved}")


def matches_claim_without_gpus(
    raw: RawPod, pod: Pod, claim: Claim, fleet: Fleet, policy: EvidencePolicy, rules: ClaimRules
) -> Deny | None:
    """A claim without GPUs is held to proven nodes by its affinity alone: every node it allows must be one."""
    asked = claim_of(pod, rules)
    if asked is None or not is_at_least_as_strict(claim, asked):
        return Deny(
            Reason.FORGED,
            f"metadata.annotations[{keys.CLAIM.name}]: not what the pod asks for",
            hint="create the pod anew if what its namespace demands has changed" if rules.hash_policy.hashes else "",
        )
    return allows_only_proven_nodes(raw, claim, fleet, policy) or preset_node(
        pod, {n for n in nodes_pinned_to(raw) if n}
    )


def is_dressed_without_gpus(pod: Pod, rules: DressRules) -> Deny | None:
    """Nothing in a pod whose claim is for a proven node alone says that GPUs are its own, or would show it one."""
    forged = reservation_annotations(pod)
    if forged:
        return Deny(Reason.FORGED, f"metadata.annotations[{forged[0]}]: the pod has no reservation")
    return no_gpu_fields(pod, rules)


def reservation_annotations(pod: Pod) -> list[str]:
    """The annotations that only a reservation brings."""
    return sorted((keys.OUTPUT_NAMES - {keys.CLAIM.name}) & pod.annotations.keys())


def allows_only_proven_nodes(raw: RawPod, claim: Claim, fleet: Fleet, policy: EvidencePolicy) -> Deny | None:
    """Every node that the pod's affinity allows is one that suits the claim."""
    question = ClaimSearch(claim, fleet, policy)
    allowed = nodes_pinned_to(raw)
    for name in sorted(name or "" for name in allowed):
        indexed = fleet.indexed_nodes.get(name)
        if indexed is None:
            return Deny(Reason.NOT_RESERVED, "spec.affinity.nodeAffinity: the pod is not held to proven nodes")
        objection = question.evidence_objection(indexed)
        if objection is not None:
            return Deny(Reason.NO_PROVEN_NODE, f"{claim.sentence}: node {name}: {objection}")
    return None


def is_at_least_as_strict(recorded: Claim, asked: Claim) -> bool:
    """Whether the record is what is asked, or holds the pod to fewer hashes: what a namespace demands may have been
    loosened meanwhile. A record that allows more is nobody's promise where no ledger knows it. A copy of a dressed pod
    names the node that it was pinned to; no promise hangs on that."""
    own = asked.record
    alike = msgspec.structs.replace(recorded.record, hashes=own.hashes, named=own.named) == own
    return alike and (not asked.hashes or (bool(recorded.hashes) and recorded.hashes <= asked.hashes))


def still_proven(claim: Claim, node: str, fleet: Fleet, policy: EvidencePolicy) -> Deny | None:
    """The evidence that the reservation was made on holds at this moment too."""
    indexed = fleet.indexed_nodes.get(node)
    if indexed is None:
        return Deny(Reason.NO_SUITABLE_NODE, f"node {node} is no longer known")
    objection = ClaimSearch(claim, fleet, policy).evidence_objection(indexed)
    return Deny(Reason.NO_PROVEN_NODE, f"{claim.sentence}: node {node}: {objection}") if objection else None


def still_allows_node(claim: Claim, node: str, fleet: Fleet) -> Deny | None:
    """The pod lets itself be put where its GPUs are: another webhook may have seen to the contrary after us. A nodeName
    is `preset_node`'s question."""
    indexed = fleet.indexed_nodes.get(node)
    if indexed is None or evolve(claim.nodes, node_name=None).matches(node, indexed.labels):
        return None
    fields = [f"spec.nodeSelector[{key}]" for key, value in claim.nodes.selector if indexed.labels.get(key) != value]
    fields = fields or ["spec.affinity.nodeAffinity"]
    return Deny(
        Reason.NO_SUITABLE_NODE,
        f"{', '.join(fields[:5])}: keeps the pod from {node}, where its GPUs are reserved",
        hint="let gpuwarden's webhook be called again (reinvocationPolicy: IfNeeded), or after the one that changed it",
        causes=tuple(fields[:20]),
    )


# A pod on its way to a node.


def still_reserved(claim: Claim, held: Reservation | None, living: Pod) -> Deny | None:
    """The GPUs that a living pod was created with are its own at this moment too."""
    is_its_own = (
        held is not None
        and held.phase is not Phase.RELEASING
        and held.claim_digest == claim.digest
        and held.may_belong_to(identity_of(living))
    )
    if is_its_own:
        return None
    said = "gone" if held is None else "not this pod's, or not any more"
    return Deny(
        Reason.NOT_RESERVED,
        f"metadata.annotations[{keys.RESERVATION_ID.name}]: reservation "
        f"{living.annotations.get(keys.RESERVATION_ID.name)!r} is {said}; "
        "the pod's containers would see GPUs that may be another's",
        hint="create the pod anew",
    )


def before_bind_deadline(living: Pod, held: Reservation | None, now: datetime, bind_deadline: timedelta) -> Deny | None:
    """Its GPUs have not been given up meanwhile, and will not be while the API server puts it on its node. A pod that
    has waited in the queue has them from when they were reserved."""
    created = living.meta.creation_timestamp
    if created is None:
        return None
    since = created if held is None else max(created, held.since)
    if now < since + bind_deadline:
        return None
    return Deny(
        Reason.RESERVATION_EXPIRED,
        f"the pod has had GPUs for more than {bind_deadline} without being on a node: they are given up",
        hint="create the pod anew",
    )


def identity_of(living: Pod) -> PodIdentity:
    return PodIdentity(living.meta.namespace or "", living.meta.name or "", living.meta.uid or "")


def binds_as_reserved(binding: Binding, held: Reservation | None, living: Pod | None = None) -> Deny | None:
    """The Binding leads where the pod's GPUs are, and plants nothing that only we may write, but what the pod says."""
    if held is not None and binding.node != held.node:
        return Deny(
            Reason.NOT_RESERVED,
            f"target.name: the GPUs of pod {binding.pod.namespace}/{binding.pod.name} are reserved on {held.node}, "
            f"not on {binding.node}",
            hint="let a scheduler that obeys node affinity place the pod",
        )
    said = binding.annotations if living is None else living.annotations
    uuids = () if held is None else gpu_order.in_annotated_order(said, held.uuids)
    values = () if held is None else reservation_values(held.id, ",".join(uuids), held.node)
    ours = {name: value for key, value in values for name in key.names}
    planted = sorted(
        key
        for key, value in binding.annotations.items()
        if keys.is_protected_annotation(key) and ours.get(key) != value
    )
    if planted:
        return Deny(Reason.FORGED, f"metadata.annotations[{planted[0]}]: written by gpuwarden only")
    return None


# A pod that exists.


def gpu_access_unchanged(new: Pod, old: Pod, reserved: Collection[str], rules: DressRules) -> Deny | None:
    """What shows a pod its GPUs stays as it was created; `reserved` are values that are the pod's own GPUs."""
    before, after = protected(old), protected(new)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if changed:
        fields = [f"metadata.annotations[{key}]" for key in changed]
        return Deny(Reason.IMMUTABLE, f"{', '.join(fields[:5])}: changed by gpuwarden only", causes=tuple(fields))
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
                yield f"{path}.envFrom"  # which may bring it, and which a variable of its own would beat
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


def readable(pointer: str) -> str:
    """A JSON pointer as the path of a field."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    text = ""
    for step in steps:
        text += f"[{step}]" if step.isdecimal() or "/" in step or "." in step else f".{step}"
    return text.lstrip(".") or "the pod"
