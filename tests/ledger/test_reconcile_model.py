"""A model of the reconciler: two real ones at once, with the real ledger and the real check of Bindings. Names of pods
are reused, watches lag, responses get lost, namespaces and GPUNodes are deleted, clocks differ.

Which pod has a GPU is determined from the pods of the API server, not from any ledger.
"""

import asyncio
import copy
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from attrs import define
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from structlog.testing import capture_logs

from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, PENDING_DEADLINE
from tests.ledger.fake_store import FakeStore, Fault, gpu_node
from tests.ledger.test_cluster import Replica
from tests.ledger.test_model import PLACES, REQUEST_TIMEOUT, record_of, same_shape
from tests.recorded_events import RecordedEvents
from webhook.admission.binding_check import BindingCheck
from webhook.admission.namespaces import ClaimReader, NoDemands
from webhook.admission.reserving import Reserver
from webhook.core.binding import Binding
from webhook.core.claim import ClaimRules
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import LedgerError
from webhook.core.pod import Pod
from webhook.core.reservation import (
    Phase,
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationId,
    ReservationRequest,
)
from webhook.evidence.jwt.node_reports import NodeReports, uid_digest
from webhook.kube.gpu_node import FINALIZER
from webhook.ledger.cluster import PodReaderUnavailableError
from webhook.ledger.end_of_use import NodeSnapshot, OrphanTimes
from webhook.ledger.orphans import CHECK_INTERVAL as LOOK
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.reconcile import RECHECK_DELAY, BindDeadline, OnBindDeadline, Reconciler
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import LONG_AGO
from webhook.runtime.telemetry import Metrics

T = TypeVar("T")

DEVICES = {"node-a": ("GPU-a0", "GPU-a1"), "node-b": ("GPU-b0",)}
BIND_DEADLINE = timedelta(minutes=5)
PROCESSES = 2
WHICH = st.integers(0, PROCESSES - 1)
NAMES = st.sampled_from(["one", "two", "three"])
NAMESPACES = st.sampled_from(["ml", "dl"])
ENDED = ("Succeeded", "Failed")
# Grace periods in seconds: of pods, of deletions that ask for another one, and the maximum of any.
OWN, GRACES, MAX_GRACE = st.sampled_from([5, 30]), st.sampled_from([0, 5, 30, 200]), 200
# How long a kubelet may be dead before its node is not ready, and the margin after a grace period.
UNNOTICED, MARGIN = timedelta(seconds=50), timedelta(seconds=60)
BEFORE_IT_IS_GONE = st.sampled_from([200, 5, "crash", "start over", "kubelet dies", "collected", "unheard"])
SHORT = st.sampled_from([1, 12, 49, 58, 100, 140, 255])
# How many pending watch events to deliver, or all.
HEARD = st.sampled_from([None, 0, 1, 3, None])
QUICK = Backoff(timedelta(milliseconds=0.1), timedelta(milliseconds=1))


class ApiServer:
    """Pods by namespace and name, and all their versions in order."""

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], Raw] = {}
        self.history: list[tuple[str, Raw]] = []
        self.is_away = False
        self.nodes = {name: NodeSnapshot(f"{name}-1", is_ready=True, ready_since=LONG_AGO) for name in DEVICES}

    def of_uid(self, uid: str) -> Raw | None:
        return next((raw for raw in self.pods.values() if raw["metadata"]["uid"] == uid), None)

    def put(self, raw: Raw) -> None:
        self.pods[raw["metadata"]["namespace"], raw["metadata"]["name"]] = raw
        self.history.append(("MODIFIED", copy.deepcopy(raw)))

    def change(self, uid: str, **parts: Raw) -> None:
        raw = self.of_uid(uid)
        assert raw is not None
        self.put({**raw, **{name: {**raw[name], **part} for name, part in parts.items()}})

    def delete(self, uid: str, grace: int | None = None) -> None:
        """Running pods are stopped first."""
        raw = self.of_uid(uid)
        if raw is None:
            return
        grace = own_grace(raw) if grace is None else grace
        if grace and raw["spec"].get("nodeName") and raw["status"]["phase"] not in ENDED:
            asked = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}
            self.change(uid, metadata=asked)
        else:
            self.remove_pod(uid)

    def remove_pod(self, uid: str) -> None:
        raw = self.of_uid(uid)
        if raw is not None:
            del self.pods[raw["metadata"]["namespace"], raw["metadata"]["name"]]
            self.history.append(("DELETED", copy.deepcopy(raw)))

    # The interface of the Binding check.

    trusts_reviews = False

    async def read(self, namespace: str, name: str) -> Raw | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodsUnavailableError("away")
        return self.pods.get((namespace, name))

    async def find(self, namespace: str, name: str) -> Pod | None:
        raw = await self.read(namespace, name)
        return None if raw is None else Pod.parse(raw)

    async def uid_of(self, namespace: str, name: str) -> str:
        found = await self.find(namespace, name)
        return (found and found.meta.uid) or ""

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        return None if await self.uid_of(pod.namespace, pod.name) == pod.uid else "another pod"

    def created(self, pod: PodIdentity) -> None:
        """A watch event."""

    def ended(self, pod: PodIdentity) -> None:
        """A watch event."""

    # The interface of quorum reads.

    async def _read(self, pod: PodIdentity) -> Raw | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        raw = self.pods.get((pod.namespace, pod.name))
        return raw if raw is not None and raw["metadata"]["uid"] == pod.uid else None

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        raw = await self._read(pod)
        return None if raw is None else PodSnapshot.of(copy.deepcopy(raw))

    async def read_node(self, name: str) -> NodeSnapshot | None:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return self.nodes[name]

    async def annotate(self, pod: PodIdentity, annotations: Mapping[str, str]) -> None:
        raise AssertionError("no kubelet chooses GPUs here")

    async def remove(self, pod: PodIdentity, version: str) -> None:
        raw = await self._read(pod)
        if raw is not None and version == raw["metadata"].get("resourceVersion", ""):
            self.delete(pod.uid)

    async def reserved_pods(self) -> list[ReservedPod]:
        await asyncio.sleep(0)
        if self.is_away:
            raise PodReaderUnavailableError("away")
        return [one for one in map(ReservedPod.of, copy.deepcopy(list(self.pods.values()))) if one is not None]


class Process:
    """A replica that reviews and reconciles. Each of its watches may lag."""

    def __init__(self, world: "World", which: int) -> None:
        self.world, self.which = world, which
        self.api, self.store = world.api, world.store
        self.replica = Replica(world.store, world.api, self.clock, QUICK)
        self.ledger = self.replica.ledger
        waiting = BindDeadline(BIND_DEADLINE, OnBindDeadline.REMOVE, CLOCK_SKEW)
        patience = OrphanTimes(timedelta(seconds=MAX_GRACE), MARGIN)
        self.reconciler = Reconciler(self.ledger, world.api, RecordedEvents(), self.clock, waiting, patience)
        reserver = Reserver(self.replica.fleet, self.ledger, EvidencePolicy(), self.clock, Metrics())
        self.door = BindingCheck(reserver, world.api, ClaimReader(ClaimRules(), NoDemands()), BIND_DEADLINE, self.clock)
        self.seen = 0
        self.list_pods()

    def clock(self) -> datetime:
        return self.world.now + self.world.skews[self.which]

    def list_pods(self) -> None:
        """After a restart or a 410."""
        listed = {"/".join(key): copy.deepcopy(raw) for key, raw in self.api.pods.items()}
        self.reconciler.replaced(listed)
        self.seen = len(self.api.history)

    def deliver_pod_events(self, events: int | None = None) -> None:
        until = len(self.api.history) if events is None else min(self.seen + events, len(self.api.history))
        for kind, raw in self.api.history[self.seen : until]:
            tell = self.reconciler.deleted if kind == "DELETED" else self.reconciler.changed
            tell(copy.deepcopy(raw))
        self.seen = until

    def deliver_node_events(self, events: int | None = None) -> None:
        self.replica.watch.catch_up(events)
        for name in DEVICES if events is None else ():
            if name not in self.store.objects:
                self.ledger.forget(name)


@define
class Creation:
    """One pod request in the API server, as the mutating webhook has dressed it."""

    pod: PodIdentity
    begun: datetime
    placement: Placement
    reservation_id: ReservationId
    is_owned: bool
    is_preset: bool
    grace: int
    is_validated: bool = False

    def raw(self, created: datetime) -> Raw:
        annotations = {
            "gpuwarden.io/reservation-id": self.reservation_id,
            "gpuwarden.io/node": self.placement.node,
            "gpuwarden.io/gpu-uuid": ",".join(slot.uuid for slot in self.placement.slots),
            "gpuwarden.io/claim": record_of(self.placement).text(),
        }
        owners = [{"kind": "ReplicaSet", "name": "rs", "uid": "u", "controller": True}] if self.is_owned else []
        meta = {
            "namespace": self.pod.namespace,
            "name": self.pod.name,
            "uid": self.pod.uid,
            "annotations": annotations,
            "creationTimestamp": created.isoformat(),
            "ownerReferences": owners,
        }
        spec: Raw = {"nodeName": self.placement.node} if self.is_preset else {}
        spec["terminationGracePeriodSeconds"] = self.grace
        return {"metadata": meta, "spec": spec, "status": {"phase": "Pending"}}


@define
class AllowedBinding:
    """A Binding that was allowed and that the API server has not carried out yet."""

    uid: str
    node: str
    begun: datetime


@define
class Containers:
    """The containers of a pod on a node, whether or not the pod still exists: the truth, which no component can
    read."""

    node: str
    gpus: list[str]
    grace: int
    # When the kubelet has to stop them; it kills them then if it is alive.
    is_told: bool = False
    ends: datetime | None = None


def gpus_of(raw: Raw) -> list[str]:
    carried = raw["metadata"]["annotations"].get("gpuwarden.io/gpu-uuid")
    return [] if carried is None else str(carried).split(",")


def own_grace(raw: Raw) -> int:
    return int(raw["spec"].get("terminationGracePeriodSeconds", 30))


class World(RuleBasedStateMachine):
    """Everything that a component of the cluster can do, at any time."""

    creations = Bundle("creations")
    reviewed = Bundle("reviewed")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.quiet = ExitStack()
        self.quiet.enter_context(capture_logs())  # writing the log would take longer than everything else
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.api, self.store = ApiServer(), FakeStore()
        for name in DEVICES:
            self.make(name)
        self.skews = [timedelta(0)] * PROCESSES
        self.processes: list[Process] = []
        self.number = 0
        self.containers: dict[str, Containers] = {}
        self.dead_since: dict[str, datetime] = {}  # kubelets, by node
        self.back_at: dict[str, datetime] = {}

    def teardown(self) -> None:
        self.loop.close()
        self.quiet.close()

    def make(self, name: str) -> None:
        made = gpu_node(name, *DEVICES[name])
        self.store.apply({**made, "metadata": {**made["metadata"], "finalizers": [FINALIZER]}})

    @initialize(skews=st.lists(st.integers(-5, 5), min_size=PROCESSES, max_size=PROCESSES))
    def begin(self, skews: list[int]) -> None:
        self.skews = [timedelta(seconds=skew) for skew in skews]
        self.processes = [Process(self, which) for which in range(PROCESSES)]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        with suppress(LedgerError, PodsUnavailableError):
            return self.loop.run_until_complete(coroutine)
        return None

    def pods(self) -> list[Raw]:
        return sorted(self.api.pods.values(), key=lambda raw: str(raw["metadata"]["uid"]))

    # A pod is created.

    @rule(
        target=creations,
        which=WHICH,
        places=PLACES,
        name=NAMES,
        namespace=NAMESPACES,
        is_owned=st.booleans(),
        is_preset=st.booleans(),
        grace=OWN,
    )
    def mutate(
        self,
        which: int,
        places: list[Placement],
        name: str,
        namespace: str,
        is_owned: bool,
        is_preset: bool,
        grace: int,
    ) -> Any:
        self.number += 1
        one, ledger = self.processes[which], self.processes[which].ledger
        places = same_shape(places, places[0])
        what = ReservationRequest(ReservationId(f"r{self.number}"), namespace, record_of(places[0]).digest())
        self.run(ledger.collect(one.clock()))
        held = self.run(ledger.reserve(what, places, answer_by=one.clock() + timedelta(seconds=10)))
        if held is None:
            return multiple()
        pod = PodIdentity(namespace, name, f"uid-{self.number}")
        return Creation(pod, self.now, Placement(held.node, held.slots), held.id, is_owned, is_preset, grace)

    @rule(one=creations, which=WHICH, is_heard=st.booleans(), is_older=st.booleans())
    def validate(self, one: Creation, which: int, is_heard: bool, is_older: bool) -> None:
        self.bind(one, which, is_heard=is_heard, is_older=is_older)

    def bind(self, one: Creation, which: int, *, is_heard: bool, is_older: bool = False) -> None:
        """A replica of an older version stores no grace period."""
        ledger = self.processes[which].ledger
        found = self.run(ledger.find(one.reservation_id, node=one.placement.node))
        if found is None or found.phase is Phase.RELEASING or found.slots != one.placement.slots:
            return
        grace = None if is_older else timedelta(seconds=one.grace)
        bound = self.run(ledger.bind_to_pod(PodProof.NAMED, one.reservation_id, one.pod, node=found.node, grace=grace))
        one.is_validated = one.is_validated or (bound is not None and is_heard)

    @rule(one=consumes(creations))
    def create(self, one: Creation) -> None:
        self.store_pod(one)

    def store_pod(self, one: Creation) -> None:
        """If the request is still in progress and the name is free."""
        is_late = self.now - one.begun > REQUEST_TIMEOUT
        if one.is_validated and not is_late and (one.pod.namespace, one.pod.name) not in self.api.pods:
            raw = one.raw(self.now)
            self.api.put(raw)
            if one.is_preset:
                # No webhook sees it again. The threat model states the limit: no watch lags beyond the reservation's
                # deadline.
                for process in self.processes:
                    process.deliver_pod_events()
                self.start(raw)

    # The kubelets. They start the pods they are given, and may take the full grace period to stop them.

    def start(self, raw: Raw) -> None:
        self.containers[raw["metadata"]["uid"]] = Containers(raw["spec"]["nodeName"], gpus_of(raw), own_grace(raw))

    def is_alive(self, node: str) -> bool:
        return node not in self.dead_since

    def request_deletion(self, uid: str, grace: int) -> None:
        """A deletion. A shorter grace period does not replace a longer one."""
        one = self.containers.get(uid)
        if one is not None:
            one.grace, one.is_told = max(one.grace, grace), True
            if self.is_alive(one.node):
                ends = self.now + timedelta(seconds=one.grace)
                one.ends = ends if one.ends is None else max(one.ends, ends)

    def kill_in_time(self) -> None:
        over = [uid for uid, one in self.containers.items() if one.ends is not None and one.ends <= self.now]
        for uid in over:
            del self.containers[uid]

    @rule(node=st.sampled_from(sorted(DEVICES)))
    def kill_a_kubelet(self, node: str) -> None:
        """A new kubelet is started, and does not die again at once: see the threat model."""
        rested = self.back_at.get(node, LONG_AGO) + timedelta(seconds=MAX_GRACE) + 2 * MARGIN
        if self.is_alive(node) and rested <= self.now:
            self.dead_since[node] = self.now
            for one in self.containers.values():
                one.ends = None if one.node == node else one.ends

    @rule(node=st.sampled_from(sorted(DEVICES)), is_reboot=st.booleans())
    def start_a_kubelet(self, node: str, is_reboot: bool) -> None:
        """A new kubelet stops what has to be stopped. A rebooted machine has nothing to stop."""
        if self.is_alive(node):
            return
        self.check_heartbeats()
        del self.dead_since[node]
        self.back_at[node] = self.now
        before = self.api.nodes[node]
        since = before.ready_since if before.is_ready else self.now
        boot_id = f"{node}-{self.now.isoformat()}" if is_reboot else before.boot_id
        self.api.nodes[node] = NodeSnapshot(boot_id, is_ready=True, ready_since=since)
        for uid, one in [(uid, one) for uid, one in self.containers.items() if one.node == node and one.is_told]:
            if is_reboot:
                del self.containers[uid]
            else:
                one.ends = self.now + timedelta(seconds=one.grace)

    def check_heartbeats(self) -> None:
        for node, since in self.dead_since.items():
            if since + UNNOTICED <= self.now:
                self.api.nodes[node] = NodeSnapshot(self.api.nodes[node].boot_id)

    @rule(
        which=WHICH,
        places=PLACES,
        name=NAMES,
        is_owned=st.booleans(),
        is_preset=st.booleans(),
        is_bound=st.booleans(),
        grace=OWN,
        is_older=st.booleans(),
    )
    def create_confirmed_pod(
        self,
        which: int,
        places: list[Placement],
        name: str,
        is_owned: bool,
        is_preset: bool,
        is_bound: bool,
        grace: int,
        is_older: bool,
    ) -> None:
        """The usual case."""
        one = self.mutate(which, places, name, "ml", is_owned, is_preset, grace)
        if isinstance(one, Creation):
            self.bind(one, which, is_heard=True, is_older=is_older)
            self.store_pod(one)
            raw = self.api.of_uid(one.pod.uid)
            if raw is not None and is_bound:
                binding = self.review_binding(which, raw)
                if binding is not None:
                    self.carry_out_a_binding(binding)

    # Other pods, and forgeries.

    def run_a_pod_without_gpus(self, node: str) -> Raw:
        self.number += 1
        meta = {"namespace": "ml", "name": f"plain-{self.number}", "uid": f"uid-{self.number}", "annotations": {}}
        raw: Raw = {"metadata": meta, "spec": {"nodeName": node}, "status": {"phase": "Running"}}
        self.api.put(raw)
        return raw

    @rule(which=WHICH, places=PLACES, is_of_its_own=st.booleans(), data=st.data())
    def forge(self, which: int, places: list[Placement], is_of_its_own: bool, data: st.DataObject) -> None:
        """Forged reviews of the creation of an existing pod."""
        if self.api.pods and not is_of_its_own:
            meta = data.draw(st.sampled_from(self.pods()))["metadata"]
        else:
            meta = self.run_a_pod_without_gpus(places[0].node)["metadata"]
        forged = self.mutate(which, places, meta["name"], meta["namespace"], False, False, 5)
        if isinstance(forged, Creation):
            forged.pod = PodIdentity(meta["namespace"], meta["name"], meta["uid"])
            self.bind(forged, which, is_heard=False)

    # A pod is bound, runs, ends and is deleted.

    @rule(target=reviewed, which=WHICH, data=st.data())
    def review_a_binding(self, which: int, data: st.DataObject) -> Any:
        waiting = [raw for raw in self.pods() if not raw["spec"].get("nodeName")]
        return (waiting and self.review_binding(which, data.draw(st.sampled_from(waiting)))) or multiple()

    def review_binding(self, which: int, raw: Raw) -> "AllowedBinding | None":
        """With the check of Bindings."""
        meta = raw["metadata"]
        node = meta["annotations"]["gpuwarden.io/node"]
        binding = Binding(PodIdentity(meta["namespace"], meta["name"], meta["uid"]), node, {})
        is_let_through = False

        async def review() -> None:
            nonlocal is_let_through
            is_let_through = await self.processes[which].door.refusal(binding) is None

        self.run(review())
        return AllowedBinding(meta["uid"], node, self.now) if is_let_through else None

    @rule(one=consumes(reviewed))
    def carry_out_a_binding(self, one: AllowedBinding) -> None:
        """At any time while the request is in progress."""
        raw = self.api.of_uid(one.uid)
        if raw is None or raw["spec"].get("nodeName") or self.now - one.begun > REQUEST_TIMEOUT:
            return
        self.api.change(one.uid, spec={"nodeName": one.node})
        bound = self.api.of_uid(one.uid)
        assert bound is not None
        self.start(bound)

    @rule(data=st.data(), phase=st.sampled_from(["Running", "Running", *ENDED]), is_crash=st.booleans())
    def change_phase(self, data: st.DataObject, phase: str, is_crash: bool) -> None:
        """As its kubelet reports. A crashed container is about to be restarted."""
        there = [raw for raw in self.alive() if raw["status"]["phase"] not in ENDED]
        if there:
            self.set_phase(data.draw(st.sampled_from(there))["metadata"]["uid"], phase, is_crash=is_crash)

    def set_phase(self, uid: str, phase: str, *, is_crash: bool) -> None:
        state = "terminated" if is_crash or phase in ENDED else "running"
        self.api.change(uid, status={"phase": phase, "containerStatuses": [{"state": {state: {}}}]})
        if phase in ENDED:
            self.containers.pop(uid, None)

    def alive(self) -> list[Raw]:
        """Pods on nodes with a living kubelet."""
        return [raw for raw in self.pods() if (node := raw["spec"].get("nodeName")) and self.is_alive(node)]

    @rule(data=st.data())
    def collect_garbage(self, data: st.DataObject) -> None:
        """The pod garbage collector fails a pod, whether or not it runs."""
        there = [raw for raw in self.pods() if raw["spec"].get("nodeName") and raw["status"]["phase"] not in ENDED]
        if there:
            uid = data.draw(st.sampled_from(there))["metadata"]["uid"]
            self.api.change(uid, status={"phase": "Failed", "conditions": [{"reason": "DeletionByPodGC"}]})
            self.delete_with(uid, 0)

    def delete_with(self, uid: str, grace: int) -> None:
        """The policies limit a deletion to the stored grace period, or to the limit if none is stored."""
        entries = [
            entry
            for raw in self.store.objects.values()
            for entry in (raw["status"].get("held") or {}).values()
            if entry.get("uid") == uid
        ]
        grace = min(grace, *(entry.get("grace") or MAX_GRACE for entry in entries), MAX_GRACE)
        self.api.delete(uid, grace)
        self.request_deletion(uid, grace)

    @rule(node=st.sampled_from(sorted(DEVICES)))
    def let_an_older_replica_write(self, node: str) -> None:
        """A replica of an older version drops fields it does not know."""
        raw = self.store.objects.get(node)
        if raw is not None and raw["status"].get("held"):
            held = {
                slot: {name: value for name, value in entry.items() if name not in ("orphanedAt", "grace", "bootID")}
                for slot, entry in raw["status"]["held"].items()
            }
            self.store.apply({**raw, "status": {**raw["status"], "held": held}})

    @rule(data=st.data(), grace=GRACES)
    def delete_one(self, data: st.DataObject, grace: int) -> None:
        """As its owner may request; 0 is a forced deletion."""
        if self.api.pods:
            self.delete_with(data.draw(st.sampled_from(self.pods()))["metadata"]["uid"], grace)

    @rule(
        which=WHICH,
        place=PLACES,
        moves=st.lists(BEFORE_IT_IS_GONE, max_size=4),
        seconds=SHORT,
        grace=OWN,
        is_older=st.booleans(),
        is_watched=st.booleans(),
    )
    def succeed(
        self,
        which: int,
        place: list[Placement],
        moves: list[str | int],
        seconds: int,
        grace: int,
        is_older: bool,
        is_watched: bool,
    ) -> None:
        """A running pod is deleted by force, and another one wants its devices: a sequence that random rules seldom
        produce."""
        before = set(self.containers)
        self.create_confirmed_pod(which, place[:1], "one", True, False, True, grace, is_older)
        uids = list(self.containers.keys() - before)
        node = place[0].node
        self.reconcile(which, None, None)
        for uid in uids:
            self.set_phase(uid, "Running", is_crash="crash" in moves)
            for move in [*moves, 0]:
                if isinstance(move, int):
                    self.delete_with(uid, move)
                elif move == "start over":
                    self.processes[which] = Process(self, which)
                elif move == "kubelet dies":
                    self.kill_a_kubelet(node)
                elif move == "collected" and self.api.of_uid(uid) is not None:
                    self.api.change(uid, status={"phase": "Failed", "conditions": [{"reason": "DeletionByPodGC"}]})
                if is_watched and move != "unheard":
                    self.reconcile(which, None, None)
        if not is_watched:
            self.processes[which] = Process(self, which)
            self.reconcile(which, None, None)
        self.wait(seconds)
        self.reconcile(which, None, None)
        if "kubelet dies" in moves:
            self.start_a_kubelet(node, is_reboot=False)
            self.reconcile(which, None, None)
        self.create_confirmed_pod(which, place[:1], "two", True, False, True, grace, is_older)

    @rule(data=st.data(), is_all=st.booleans())
    def delete(self, data: st.DataObject, is_all: bool) -> None:
        """A pod, or a namespace with all its pods."""
        if self.api.pods:
            meta = data.draw(st.sampled_from(self.pods()))["metadata"]
            for raw in self.pods():
                if raw["metadata"]["uid"] == meta["uid"] or (
                    is_all and raw["metadata"]["namespace"] == meta["namespace"]
                ):
                    self.delete_with(raw["metadata"]["uid"], own_grace(raw))

    @rule()
    def stop_what_is_terminating(self) -> None:
        for raw in self.alive():
            if "deletionTimestamp" in raw["metadata"]:
                uid = raw["metadata"]["uid"]
                self.containers.pop(uid, None)
                self.api.change(uid, status={"phase": "Failed", "containerStatuses": [{"state": {"terminated": {}}}]})
                self.api.remove_pod(uid)

    @rule(which=WHICH, node=st.sampled_from(sorted(DEVICES)), of_nodes=HEARD)
    def ask_a_node_about_its_orphans(self, which: int, node: str, of_nodes: int | None) -> None:
        """No answer from a dead kubelet, or from one that still wants the pod."""
        one = self.processes[which]
        one.deliver_node_events(of_nodes)
        wanted = {raw["metadata"]["uid"] for raw in self.pods()}
        reports = NodeReports(one.ledger, CLOCK_SKEW)
        digests = reports.digests(node, one.clock())
        known = [held.uid for held in one.ledger.orphans_on(node) if held.uid and uid_digest(held.uid) in digests]
        ended = [uid for uid in known if uid not in self.containers and uid not in wanted]
        if self.is_alive(node) and ended:
            self.run(reports.take_ended(node, ended, one.clock()))

    # The reconcilers.

    @rule(which=WHICH, of_pods=HEARD, of_nodes=HEARD)
    def reconcile(self, which: int, of_pods: int | None, of_nodes: int | None) -> None:
        """With as many events of each watch as were delivered."""
        self.processes[which].deliver_pod_events(of_pods)
        self.processes[which].deliver_node_events(of_nodes)
        self.run(self.processes[which].reconciler.step())

    @rule()
    def reconcile_both_at_once(self) -> None:
        """One that has lost its Lease, and one that holds it."""

        async def both() -> None:
            await asyncio.gather(*(one.reconciler.step() for one in self.processes))

        self.run(both())

    @rule(which=WHICH, is_new=st.booleans())
    def relist(self, which: int, is_new: bool) -> None:
        """After a restart, or after a 410 to the watch of pods."""
        if is_new:
            self.processes[which] = Process(self, which)
        else:
            self.processes[which].list_pods()

    @rule(name=st.sampled_from(sorted(DEVICES)))
    def delete_a_gpu_node(self, name: str) -> None:
        """A deleted object is recreated first."""
        self.discover()
        self.store.delete(name)

    def discover(self) -> None:
        for name in DEVICES:
            if name not in self.store.objects:
                self.make(name)

    # Faults.

    @rule(faults=st.lists(st.sampled_from(list(Fault)), max_size=3), is_away=st.booleans())
    def inject_faults(self, faults: list[Fault], is_away: bool) -> None:
        self.store.faults, self.api.is_away = faults, is_away

    @rule(seconds=st.sampled_from([1, 12, 58, 100, 290, 420]))
    def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)
        self.kill_in_time()
        self.check_heartbeats()

    # Invariants.

    @invariant()
    def no_device_is_with_two_pods_on_their_node(self) -> None:
        there = [raw for raw in self.pods() if raw["spec"].get("nodeName") and raw["status"]["phase"] not in ENDED]
        uuids = [uuid for raw in there for uuid in gpus_of(raw)]
        assert len(uuids) == len(set(uuids))

    @invariant()
    def no_device_is_used_by_two_pods(self) -> None:
        uuids = [uuid for one in self.containers.values() for uuid in one.gpus]
        assert len(uuids) == len(set(uuids))

    @invariant()
    def whoever_is_on_a_node_holds_what_it_was_promised(self) -> None:
        for raw in self.pods():
            node = raw["spec"].get("nodeName")
            if not node or raw["status"]["phase"] in ENDED:
                continue
            held = self.store.objects.get(node, {"status": {}})["status"].get("held")
            if held is not None:
                entries = [held.get(f"{uuid}/0") for uuid in gpus_of(raw)]
                assert [entry and entry.get("uid") for entry in entries] == [raw["metadata"]["uid"]] * len(entries)

    @rule(is_fresh=st.booleans(), which=WHICH)
    def in_the_end_the_ledger_matches_the_pods(self, is_fresh: bool, which: int) -> None:
        """When there are no faults and no requests in progress, one reconciler alone reaches the right state."""
        self.store.faults, self.api.is_away = [], False
        one = self.processes[which] = Process(self, which) if is_fresh else self.processes[which]
        for node in list(self.dead_since):
            self.start_a_kubelet(node, is_reboot=False)
        for _ in range(6):
            self.now += BIND_DEADLINE + REQUEST_TIMEOUT + PENDING_DEADLINE + 4 * CLOCK_SKEW + 2 * RECHECK_DELAY + LOOK
            self.kill_in_time()
            one.deliver_pod_events()
            one.deliver_node_events()
            self.run(one.reconciler.step())
            self.discover()
        expected = {
            f"{uuid}/0": raw["metadata"]["uid"]
            for raw in self.pods()
            if raw["spec"].get("nodeName") and raw["status"]["phase"] not in ENDED
            for uuid in gpus_of(raw)
        }
        held = {
            slot: entry.get("uid")
            for raw in self.store.objects.values()
            for slot, entry in (raw["status"].get("held") or {}).items()
        }
        assert held == expected
        one.deliver_node_events()
        known = {str(slot): one.uid for one in one.ledger.reservations() for slot in one.slots}
        assert known == expected


World.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestWorld = World.TestCase
