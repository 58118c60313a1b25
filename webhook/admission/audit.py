"""What runs and would be refused today, and where pods, ledger and evidence do not fit: pure, on what was read."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from attrs import field, frozen

from webhook.core import keys
from webhook.core.check import gpu_fields, grace_within_limit
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none
from webhook.core.device import DeviceUuid
from webhook.core.dress import DressRules
from webhook.core.errors import InvalidPodError
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.gpu_visibility import exposes_all_gpus
from webhook.core.isolation import ClaimName, refusals
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import Phase, Reservation
from webhook.ledger.reserved_pod import ENDED, ReservedPod, ReservedPodWire

# A pod may be created this long after its reservation, and be heard of later still.
SETTLED = timedelta(minutes=2)
MOST_FIELDS = 4


class FindingKind(StrEnum):
    """What can be found, in the order of the report."""

    GPU_TWICE = "GpuTwice"
    UNKNOWN_RESERVATION = "UnknownReservation"
    GPU_WITHOUT_RESERVATION = "GpuWithoutReservation"
    CONTAINER_NOT_BLINDED = "ContainerNotBlinded"
    POD_NOT_ISOLATED = "PodNotIsolated"
    GRACE_TOO_LONG = "GraceTooLong"
    NODE_WITHOUT_EVIDENCE = "NodeWithoutEvidence"
    RESERVATION_WITHOUT_POD = "ReservationWithoutPod"
    MAP_WITHOUT_LABEL = "MapWithoutLabel"
    UNREADABLE = "Unreadable"


@frozen
class Finding:
    """One thing that somebody should look at."""

    kind: FindingKind
    object: str
    message: str
    namespace: str = ""
    node: str = ""


@frozen
class AuditedPod:
    """What matters of a pod that has not ended."""

    namespace: str
    name: str
    uid: str
    node: str
    reserved_pod: ReservedPod | None = None
    hashes: tuple[str, ...] = ()
    # What it asks for without having been given it, as a sentence; empty if there is nothing.
    asks: str = ""
    # The containers that `CUDA_VERSION` shows all GPUs.
    unblinded: tuple[str, ...] = ()
    # What would let it open devices of its node by itself, in the words of the policy.
    exposed: tuple[str, ...] = ()
    # Of a pod with GPUs: that its containers may take longer to stop than any may.
    slow: str = ""

    @property
    def title(self) -> str:
        return f"pod {self.namespace}/{self.name}"


@frozen
class AuditRules:
    """How pods are read in this installation."""

    claims: ClaimRules
    dress: DressRules
    # Directories of nodes that administrators let pods mount.
    host_paths: Collection[str] = ()
    # Paths of the node behind claims whose PersistentVolumes no tenant could make.
    volumes: Mapping[ClaimName, str] = field(factory=dict)

    def pod(self, raw: Raw) -> AuditedPod | None:
        """None if it has ended, or there is nothing to be said of it whatever else is known."""
        try:
            wire, pod = msgspec.convert(raw, ReservedPodWire), Pod.parse(raw)
            exposed = refusals(raw, self.host_paths, self.volumes)
        except (msgspec.ValidationError, InvalidPodError):
            return None
        if wire.status is not None and wire.status.phase in ENDED:
            return None
        recorded, reserved_pod = recorded_claim_or_none(pod), ReservedPod.of(raw)
        found = AuditedPod(
            namespace=pod.meta.namespace or "",
            name=pod.meta.name or "",
            uid=pod.meta.uid or "",
            node=pod.body.node_name or "",
            reserved_pod=reserved_pod,
            hashes=recorded.record.hashes if recorded else (),
            asks=self._asks(pod, recorded, reserved_pod),
            unblinded=tuple(path for path, container in pod.containers() if exposes_all_gpus(container)),
            exposed=tuple(exposed[:MOST_FIELDS]),
            slow=self._slow(pod, recorded, reserved_pod),
        )
        return found if reserved_pod or recorded or found.asks or found.unblinded or exposed else None

    def _slow(self, pod: Pod, recorded: Claim | None, reserved_pod: ReservedPod | None) -> str:
        has_gpus = reserved_pod is not None or (recorded is not None and recorded.count)
        refused = grace_within_limit(pod, self.dress) if has_gpus else None
        return refused.message if refused else ""

    def _asks(self, pod: Pod, recorded: Claim | None, reserved_pod: ReservedPod | None) -> str:
        """What was read before is served, waits, or asks for no GPU."""
        if reserved_pod is not None or (recorded is not None and (pod.is_gated or not recorded.count)):
            return ""
        try:
            claim = claim_of(pod, self.claims)
        except InvalidPodError as exc:
            return "asks in a way that cannot be read: " + "; ".join(exc.mistakes[:MOST_FIELDS])
        if claim is not None:
            return f"asks for {claim.sentence}, and nothing was reserved for it"
        fields = sorted(set(gpu_fields(pod, self.dress)))
        return f"{', '.join(fields[:MOST_FIELDS])} would show it a GPU, and it has no claim" if fields else ""


@frozen
class Facts:
    """What was read, nearly at one moment. `held` was held before the pods were read, and after."""

    pods: Collection[AuditedPod]
    held: Collection[Reservation]
    opted_in: Collection[str]
    # Of these, the namespaces that administrators have not exempted from the policy on isolation.
    isolated: Collection[str] = ()
    # Of pods that carry one of these nothing is said: it has come or gone meanwhile.
    unsettled: Collection[str] = ()
    evidence: Mapping[str, Evidence | None] = field(factory=dict)
    # StatefulSets with a placement map, as namespace and name, where the namespace lets no map keep GPUs.
    unkept_maps: Collection[tuple[str, str]] = ()
    unreadable: Collection[str] = ()


def findings(facts: Facts, now: datetime, *, needs_evidence: bool) -> list[Finding]:
    """Everything, in the order of kinds and names. `needs_evidence`: claims without a hash need a proven node too."""
    found = [
        *twice(facts),
        *unknown(facts),
        *unreserved(facts),
        *not_isolated(facts),
        *(
            Finding(FindingKind.GRACE_TOO_LONG, one.title, one.slow, one.namespace, one.node)
            for one in facts.pods
            if one.slow
        ),
        *unproven(facts, now, needs_evidence=needs_evidence),
        *without_pods(facts, now),
        *unkept(facts),
        *(Finding(FindingKind.UNREADABLE, one, "no version of gpuwarden has written this") for one in facts.unreadable),
    ]
    order = {kind: number for number, kind in enumerate(FindingKind)}
    return sorted(found, key=lambda one: (order[one.kind], one.namespace, one.object, one.message))


def twice(facts: Facts) -> Iterator[Finding]:
    """Two pods on one node that were both told of a GPU which is nobody's to share."""
    carrying: dict[tuple[str, DeviceUuid], list[AuditedPod]] = defaultdict(list)
    for pod in facts.pods:
        if pod.reserved_pod is not None and pod.node:
            for uuid in set(pod.reserved_pod.uuids):
                carrying[pod.node, uuid].append(pod)
    for (node, uuid), pods in carrying.items():
        if len(pods) > 1 and not all(pod.reserved_pod is not None and pod.reserved_pod.is_shared for pod in pods):
            first, *others = sorted(pods, key=lambda pod: pod.title)
            names = ", ".join(pod.title for pod in others)
            yield Finding(FindingKind.GPU_TWICE, first.title, f"has {uuid}, and so has {names}", first.namespace, node)


def unknown(facts: Facts) -> Iterator[Finding]:
    held = {(one.id, str(one.node), uuid) for one in facts.held for uuid in one.uuids}
    for pod in facts.pods:
        reserved_pod = pod.reserved_pod
        if reserved_pod is None or reserved_pod.reservation_id in facts.unsettled:
            continue
        missing = [
            uuid for uuid in reserved_pod.uuids if (reserved_pod.reservation_id, reserved_pod.node, uuid) not in held
        ]
        if missing:
            message = f"carries {', '.join(missing)}, which no GPUNode holds for it"
            yield Finding(FindingKind.UNKNOWN_RESERVATION, pod.title, message, pod.namespace, pod.node)


def unreserved(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        if pod.namespace not in facts.opted_in:
            continue
        if pod.asks:
            yield Finding(FindingKind.GPU_WITHOUT_RESERVATION, pod.title, pod.asks, pod.namespace, pod.node)
        if pod.unblinded:
            fields = ", ".join(f"{path}.env[{keys.CUDA_VERSION}]" for path in pod.unblinded[:MOST_FIELDS])
            message = f"{fields} shows it all GPUs of its node; a pod that is created today is blinded"
            yield Finding(FindingKind.CONTAINER_NOT_BLINDED, pod.title, message, pod.namespace, pod.node)


def not_isolated(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        if pod.exposed and pod.namespace in facts.isolated:
            message = f"could reach GPUs that are not its own: {'; '.join(pod.exposed)}"
            yield Finding(FindingKind.POD_NOT_ISOLATED, pod.title, message, pod.namespace, pod.node)


def unproven(facts: Facts, now: datetime, *, needs_evidence: bool) -> Iterator[Finding]:
    for pod in facts.pods:
        is_held_to_it = bool(pod.hashes) or (needs_evidence and pod.reserved_pod is not None)
        if not pod.node or not is_held_to_it:
            continue
        word = facts.evidence.get(pod.node)
        state = state_of(word, now)
        if state is not EvidenceState.FRESH:
            message = f"the evidence of node {pod.node} is {state}"
        elif pod.hashes and word is not None and word.hash not in pod.hashes:
            message = f"node {pod.node} has proven {word.hash}, and the pod asks for {' or '.join(pod.hashes)}"
        else:
            continue
        yield Finding(FindingKind.NODE_WITHOUT_EVIDENCE, pod.title, message, pod.namespace, pod.node)


def without_pods(facts: Facts, now: datetime) -> Iterator[Finding]:
    """By uid where one is known; else the reservation waits for its pod, until its deadline."""
    uids = {pod.uid for pod in facts.pods}
    carried = {pod.reserved_pod.reservation_id for pod in facts.pods if pod.reserved_pod is not None}
    for one in facts.held:
        if one.id in facts.unsettled or one.id in carried or (one.uid is not None and one.uid in uids):
            continue
        if one.phase is Phase.PENDING and one.deadline is not None and now < one.deadline + SETTLED:
            continue
        if now < one.since + SETTLED:
            continue
        pod = f"pod {one.namespace}/{one.pod_name}" if one.pod_name else f"a pod of {one.namespace}"
        state = one.phase.value if one.orphan is None else "orphaned"
        message = f"is {state} and holds {', '.join(one.uuids)} of node {one.node} for {pod}, which is not there"
        yield Finding(FindingKind.RESERVATION_WITHOUT_POD, f"reservation {one.id}", message, one.namespace, one.node)


def unkept(facts: Facts) -> Iterator[Finding]:
    for namespace, name in facts.unkept_maps:
        yield Finding(
            FindingKind.MAP_WITHOUT_LABEL,
            f"statefulset {namespace}/{name}",
            f"has a placement map, and its namespace has no label {keys.MAPS_LABEL}=true: its GPUs are not kept for it",
            namespace,
        )
