"""Finds running pods that would be refused today, and contradictions between pods, ledger and evidence. No I/O."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from attrs import field, frozen

from webhook.admission.delivered import DeliveryFault, GivenDevices, WrongDelivery, wrong_deliveries
from webhook.core import keys
from webhook.core.check import RESOURCE_CLAIMS, gpu_fields, grace_within_limit
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none
from webhook.core.device import DeviceUuid
from webhook.core.dress import DressRules
from webhook.core.errors import InvalidPodError
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.gpu_demand import has_claim_of
from webhook.core.gpu_visibility import exposes_all_gpus
from webhook.core.isolation import ClaimName, refusals
from webhook.core.native import NativeClaim
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import Phase, Reservation
from webhook.ledger.end_of_use import TERMINAL_PHASES
from webhook.ledger.reserved_pod import ReservedPod, ReservedPodWire

# The pod may be created this long after its reservation, and its event takes time too.
CREATION_MARGIN = timedelta(minutes=2)
MOST_FIELDS = 4


class FindingKind(StrEnum):
    """The kinds of findings, in the order of the report."""

    GPU_TWICE = "GpuTwice"
    UNKNOWN_RESERVATION = "UnknownReservation"
    GPU_WITHOUT_RESERVATION = "GpuWithoutReservation"
    CONTAINER_NOT_BLINDED = "ContainerNotBlinded"
    POD_NOT_ISOLATED = "PodNotIsolated"
    GRACE_TOO_LONG = "GraceTooLong"
    NODE_WITHOUT_EVIDENCE = "NodeWithoutEvidence"
    RESERVATION_WITHOUT_POD = "ReservationWithoutPod"
    GPU_MISMATCHED = "GpuMismatched"
    GPU_COLLISION = "GpuCollision"
    GPU_UNRESERVED = "GpuUnreserved"
    DEVICE_PLUGIN_FOUND = "DevicePluginFound"
    MAP_WITHOUT_LABEL = "MapWithoutLabel"
    UNREADABLE = "Unreadable"


@frozen
class Finding:
    """One problem for an administrator to look at."""

    kind: FindingKind
    object: str
    message: str
    namespace: str = ""
    node: str = ""


@frozen
class AuditedPod:
    """What the audit needs of a pod that has not ended."""

    namespace: str
    name: str
    uid: str
    node: str
    reserved_pod: ReservedPod | None = None
    hashes: tuple[str, ...] = ()
    # A sentence on GPUs that the pod asks for and has not been given; empty if there are none.
    asks: str = ""
    # The containers that see all GPUs of the node through `CUDA_VERSION`.
    unblinded: tuple[str, ...] = ()
    # What lets the pod open devices of its node by itself, in the words of the policy.
    exposed: tuple[str, ...] = ()
    # Why a pod with GPUs may take too long to stop; empty if it does not.
    slow: str = ""
    # The GPUs that its kubelet has given to it.
    given: GivenDevices | None = None

    @property
    def title(self) -> str:
        return f"pod {self.namespace}/{self.name}"


@frozen
class AuditRules:
    """How the audit reads pods in this installation."""

    claims: ClaimRules
    dress: DressRules
    # Directories of the node that administrators allow pods to mount.
    host_paths: Collection[str] = ()
    # Paths of the node behind PersistentVolumes that no tenant could create, by claim.
    volumes: Mapping[ClaimName, str] = field(factory=dict)

    def pod(self, raw: Raw) -> AuditedPod | None:
        """None if the pod has ended, or if there is nothing to report of it."""
        try:
            wire, pod = msgspec.convert(raw, ReservedPodWire), Pod.parse(raw)
            exposed = refusals(raw, self.host_paths, self.volumes)
        except (msgspec.ValidationError, InvalidPodError):
            return None
        if wire.status is not None and wire.status.phase in TERMINAL_PHASES:
            return None
        recorded, reserved_pod = recorded_claim_or_none(pod), ReservedPod.of(raw)
        found = AuditedPod(
            namespace=pod.meta.namespace or "",
            name=pod.meta.name or "",
            uid=pod.meta.uid or "",
            node=pod.body.node_name or "",
            reserved_pod=reserved_pod,
            hashes=recorded.record.hashes if recorded else (),
            asks=self._beside_claim(pod) if is_allocated(pod, recorded) else self._asks(pod, recorded, reserved_pod),
            unblinded=tuple(path for path, container in pod.containers() if exposes_all_gpus(container)),
            exposed=tuple(exposed[:MOST_FIELDS]),
            slow=self._slow(pod, recorded, reserved_pod),
            given=GivenDevices.of(raw),
        )
        is_kept = reserved_pod or recorded or found.asks or found.unblinded or exposed or found.given
        return found if is_kept else None

    def _slow(self, pod: Pod, recorded: Claim | None, reserved_pod: ReservedPod | None) -> str:
        has_gpus = reserved_pod is not None or (recorded is not None and recorded.count)
        refused = grace_within_limit(pod, self.dress) if has_gpus else None
        return refused.message if refused else ""

    def _beside_claim(self, pod: Pod) -> str:
        """What would show a pod a GPU besides its ResourceClaim."""
        fields = sorted(set(gpu_fields(pod, self.dress)) - {RESOURCE_CLAIMS})
        return f"{', '.join(fields[:MOST_FIELDS])} would show it a GPU besides its claim" if fields else ""

    def _asks(self, pod: Pod, recorded: Claim | None, reserved_pod: ReservedPod | None) -> str:
        """Empty for a pod that has its GPUs, waits for them, or has a record without GPUs."""
        if reserved_pod is not None:
            return ""
        if recorded is not None and (pod.is_gated or not recorded.count or waits_for_binding(pod, recorded)):
            return ""
        try:
            claim = claim_of(pod, self.claims)
        except InvalidPodError as exc:
            return "has a request that cannot be read: " + "; ".join(exc.mistakes[:MOST_FIELDS])
        if claim is not None:
            return f"asks for {claim.sentence}, but has no reservation"
        fields = sorted(set(gpu_fields(pod, self.dress)))
        return f"{', '.join(fields[:MOST_FIELDS])} would show it a GPU, but it has no claim" if fields else ""


def waits_for_binding(pod: Pod, recorded: Claim) -> bool:
    """Whether the pod's GPUs are reserved when it is bound."""
    return recorded.is_reserved_at_binding and not pod.body.node_name


def is_allocated(pod: Pod, recorded: Claim | None) -> bool:
    """Whether kube-scheduler allocates the GPUs of the pod: a native pod, or one with such a record."""
    if recorded is not None and recorded.is_left_to_scheduler:
        return has_claim_of(pod.body.resource_claims, recorded.record)
    return pod.annotations.get(keys.NATIVE) == "true" and NativeClaim.of(pod.body.resource_claims) is not None


@frozen
class Facts:
    """What was read from the cluster. The reservations in `held` existed both before and after the pods were read."""

    pods: Collection[AuditedPod]
    held: Collection[Reservation]
    opted_in: Collection[str]
    # The namespaces in `opted_in` that administrators have not exempted from the policy on isolation.
    isolated: Collection[str] = ()
    # Reservations that appeared or disappeared while the facts were read. Their pods are not reported.
    unsettled: Collection[str] = ()
    evidence: Mapping[str, Evidence | None] = field(factory=dict)
    # StatefulSets with a placement map in namespaces whose maps reserve no GPUs, as namespace and name.
    maps_without_label: Collection[tuple[str, str]] = ()
    unreadable: Collection[str] = ()
    # Whether the inventory of the node lists the GPU.
    is_listed: Callable[[str, DeviceUuid], bool] = lambda node, uuid: True
    # The nodes on which a device plugin offers GPUs of the inventory.
    plugin_nodes: Collection[str] = ()


def findings(facts: Facts, now: datetime, *, needs_evidence: bool) -> list[Finding]:
    """All findings, ordered by kind and name. `needs_evidence`: claims without a hash need a proven node too."""
    found = [
        *shared_devices(facts),
        *unknown_reservations(facts),
        *pods_without_reservation(facts),
        *pods_not_isolated(facts),
        *(
            Finding(FindingKind.GRACE_TOO_LONG, one.title, one.slow, one.namespace, one.node)
            for one in facts.pods
            if one.slow
        ),
        *pods_without_evidence(facts, now, needs_evidence=needs_evidence),
        *reservations_without_pod(facts, now),
        *wrongly_given_devices(facts),
        *device_plugins(facts),
        *maps_without_namespace_label(facts),
        *(
            Finding(FindingKind.UNREADABLE, one, "was not written by any version of gpuwarden")
            for one in facts.unreadable
        ),
    ]
    order = {kind: number for number, kind in enumerate(FindingKind)}
    return sorted(found, key=lambda one: (order[one.kind], one.namespace, one.object, one.message))


def shared_devices(facts: Facts) -> Iterator[Finding]:
    """GPUs that two pods on one node were given, although they are not shared."""
    carrying: dict[tuple[str, DeviceUuid], list[AuditedPod]] = defaultdict(list)
    for pod in facts.pods:
        if pod.reserved_pod is not None and pod.node:
            for uuid in set(pod.reserved_pod.uuids):
                carrying[pod.node, uuid].append(pod)
    for (node, uuid), pods in carrying.items():
        if len(pods) > 1 and not all(pod.reserved_pod is not None and pod.reserved_pod.is_shared for pod in pods):
            first, *others = sorted(pods, key=lambda pod: pod.title)
            names = ", ".join(pod.title for pod in others)
            yield Finding(
                FindingKind.GPU_TWICE, first.title, f"has {uuid}, which {names} has too", first.namespace, node
            )


def unknown_reservations(facts: Facts) -> Iterator[Finding]:
    held = {(one.id, str(one.node), uuid) for one in facts.held for uuid in one.uuids}
    known = {(one.id, one.node) for one in facts.held}
    for pod in facts.pods:
        reserved_pod = pod.reserved_pod
        if reserved_pod is None or reserved_pod.reservation_id in facts.unsettled:
            continue
        missing = [
            uuid for uuid in reserved_pod.uuids if (reserved_pod.reservation_id, reserved_pod.node, uuid) not in held
        ]
        if missing or (reserved_pod.reservation_id, reserved_pod.node) not in known:
            gpus = ", ".join(missing) or reserved_pod.title_of_gpus
            message = f"was given {gpus}, which no GPUNode holds for it"
            yield Finding(FindingKind.UNKNOWN_RESERVATION, pod.title, message, pod.namespace, pod.node)


def pods_without_reservation(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        if pod.namespace not in facts.opted_in:
            continue
        if pod.asks:
            yield Finding(FindingKind.GPU_WITHOUT_RESERVATION, pod.title, pod.asks, pod.namespace, pod.node)
        if pod.unblinded:
            fields = ", ".join(f"{path}.env[{keys.CUDA_VERSION}]" for path in pod.unblinded[:MOST_FIELDS])
            message = f"{fields} shows it all GPUs of its node; gpuwarden hides them from pods that are created today"
            yield Finding(FindingKind.CONTAINER_NOT_BLINDED, pod.title, message, pod.namespace, pod.node)


def pods_not_isolated(facts: Facts) -> Iterator[Finding]:
    for pod in facts.pods:
        if pod.exposed and pod.namespace in facts.isolated:
            message = f"could reach GPUs that are not its own: {'; '.join(pod.exposed)}"
            yield Finding(FindingKind.POD_NOT_ISOLATED, pod.title, message, pod.namespace, pod.node)


def pods_without_evidence(facts: Facts, now: datetime, *, needs_evidence: bool) -> Iterator[Finding]:
    for pod in facts.pods:
        is_held_to_it = bool(pod.hashes) or (needs_evidence and pod.reserved_pod is not None)
        if not pod.node or not is_held_to_it:
            continue
        evidence = facts.evidence.get(pod.node)
        state = state_of(evidence, now)
        if state is not EvidenceState.FRESH:
            message = f"the evidence of node {pod.node} is {state}"
        elif pod.hashes and evidence is not None and evidence.hash not in pod.hashes:
            message = f"node {pod.node} has proven {evidence.hash}, but the pod requires {' or '.join(pod.hashes)}"
        else:
            continue
        yield Finding(FindingKind.NODE_WITHOUT_EVIDENCE, pod.title, message, pod.namespace, pod.node)


def reservations_without_pod(facts: Facts, now: datetime) -> Iterator[Finding]:
    """A reservation with a uid needs a pod of that uid. Without a uid it may wait for its pod until its deadline."""
    uids = {pod.uid for pod in facts.pods}
    carried = {pod.reserved_pod.reservation_id for pod in facts.pods if pod.reserved_pod is not None}
    for one in facts.held:
        if one.id in facts.unsettled or one.id in carried or (one.uid is not None and one.uid in uids):
            continue
        if one.phase is Phase.PENDING and one.deadline is not None and now < one.deadline + CREATION_MARGIN:
            continue
        if now < one.since + CREATION_MARGIN:
            continue
        pod = f"pod {one.namespace}/{one.pod_name}" if one.pod_name else f"a pod of {one.namespace}"
        state = one.phase.value if one.orphan is None else "orphaned"
        message = f"is {state} and holds {', '.join(one.uuids)} of node {one.node} for {pod}, which does not exist"
        yield Finding(FindingKind.RESERVATION_WITHOUT_POD, f"reservation {one.id}", message, one.namespace, one.node)


FAULT_KINDS = {
    DeliveryFault.MISMATCHED: FindingKind.GPU_MISMATCHED,
    DeliveryFault.COLLISION: FindingKind.GPU_COLLISION,
    DeliveryFault.UNRESERVED: FindingKind.GPU_UNRESERVED,
}


def wrongly_given_devices(facts: Facts) -> Iterator[Finding]:
    """GPUs that a kubelet gave to a pod that has not reserved them."""
    by_uid = {one.uid: one for one in facts.held if one.uid is not None}
    by_uuid: dict[DeviceUuid, list[Reservation]] = defaultdict(list)
    for one in facts.held:
        for uuid in set(one.uuids):
            by_uuid[uuid].append(one)
    for pod in facts.pods:
        if pod.given is None or (pod.reserved_pod and pod.reserved_pod.reservation_id in facts.unsettled):
            continue
        own = by_uid.get(pod.uid)
        for wrong in wrong_deliveries(pod.given, own, lambda uuid: by_uuid.get(uuid, ()), facts.is_listed):
            yield Finding(FAULT_KINDS[wrong.fault], pod.title, message_of(wrong), pod.namespace, pod.node)


def message_of(wrong: WrongDelivery) -> str:
    given = f"was given {', '.join(wrong.uuids)} by the kubelet"
    match wrong.fault:
        case DeliveryFault.MISMATCHED:
            return f"{given}; reserved for it: {wrong.expected}"
        case DeliveryFault.COLLISION:
            pods = sorted({f"pod {one.namespace}/{one.pod_name or ''}" for one in wrong.holders})
            return f"{given}, reserved for {', '.join(pods)}"
        case DeliveryFault.UNRESERVED:
            return f"{given}, and has not reserved it"


def device_plugins(facts: Facts) -> Iterator[Finding]:
    """One finding for all nodes: an installation usually has the device plugin on all nodes or on none."""
    if not facts.plugin_nodes:
        return
    names, number = sorted(facts.plugin_nodes), len(facts.plugin_nodes)
    more = f" and {number - MOST_FIELDS} more" if number > MOST_FIELDS else ""
    message = f"can give reserved GPUs to other pods on {', '.join(names[:MOST_FIELDS])}{more}"
    yield Finding(FindingKind.DEVICE_PLUGIN_FOUND, "device plugin", message)


def maps_without_namespace_label(facts: Facts) -> Iterator[Finding]:
    for namespace, name in facts.maps_without_label:
        yield Finding(
            FindingKind.MAP_WITHOUT_LABEL,
            f"statefulset {namespace}/{name}",
            f"has a placement map, but its namespace has no label {keys.MAPS_LABEL}=true: no GPUs are reserved for it",
            namespace,
        )
