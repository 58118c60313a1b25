"""Watches which GPUs the kubelets give to pods. GPUs that are given to a pod without a reservation get a mark in their
GPUNode, so that no replica reserves them; differences from the ledger are reported, and the pods evicted if wanted."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Protocol

import structlog
from attrs import define, evolve, field, frozen

from webhook.admission.delivered import DeliveryFault, GivenDevices, WrongDelivery, marks_of, wrong_deliveries
from webhook.admission.evidence_loss import EvictionError
from webhook.core.device import DeviceUuid
from webhook.core.fleet import Fleet
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.kube.events import Events, Subject
from webhook.ledger import Ledger
from webhook.ledger.end_of_use import OrphanTimes, has_ended, longest_grace_in
from webhook.runtime.backoff import Backoff, Retries
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# A difference must last this long before it is reported: the watches of pods and GPUNodes are not in step.
SETTLED = timedelta(seconds=2)
# Between two evictions of one pod.
BACKOFF = Backoff(timedelta(seconds=2), timedelta(minutes=1))
# Evictions per pass, so that the process's other work is not held up.
AT_A_TIME = 50


class OnMismatch(StrEnum):
    """What happens to a pod that was given other GPUs than those reserved for it. It is reported in any case."""

    REPORT = "report"
    EVICT = "evict"


class PodEvictor(Protocol):
    """Evicts pods in the API server."""

    async def evict(self, pod: PodIdentity) -> None:
        """Evicts the pod of this uid within its disruption budgets. Does nothing if it is gone. Raises
        EvictionError."""


@frozen
class FaultKey:
    """A difference that is reported once."""

    fault: DeliveryFault
    uid: str
    uuids: tuple[DeviceUuid, ...]
    holders: tuple[str, ...]

    @classmethod
    def of(cls, one: WrongDelivery) -> "FaultKey":
        return cls(one.fault, one.given.pod.uid, one.uuids, tuple(sorted(held.id for held in one.holders)))


@define
class SeenFault:
    """Since when a difference has been seen."""

    since: datetime
    is_reported: bool = False


def reported_devices(one: Reservation, uid: str) -> GivenDevices:
    """The GPUs of the reservation's pod by the report of its node."""
    return GivenDevices(PodIdentity(one.namespace, one.pod_name or "", uid), one.node, one.given)


@define(eq=False, repr=False)
class DeliveryWatch:
    """Listener of the watch of pods. `step` reports and evicts; `marks_on` tells the writer of GPUNodes."""

    _fleet: Fleet
    _ledger: Ledger
    _events: Events
    _clock: Clock
    _evictor: PodEvictor
    _on_mismatch: OnMismatch
    _orphan_times: OrphanTimes = field(factory=OrphanTimes)
    _is_current: Callable[[], bool] = field(kw_only=True)
    _given: dict[str, GivenDevices] = field(factory=dict, init=False)
    # The uids of these pods by node, and what has changed since their faults were found: nodes of the fleet, and pods.
    _uids_on: dict[str, set[str]] = field(factory=lambda: defaultdict(set), init=False)
    _changed_in_fleet: set[str] = field(init=False)
    _changed_pods: set[str] = field(factory=set, init=False)
    # The GPUs of pods by the reports of their nodes, and the uids of these pods by node.
    _reported: dict[str, GivenDevices] = field(factory=dict, init=False)
    _reported_on: dict[str, set[str]] = field(factory=dict, init=False)
    # Pods that are gone and were not seen to end, until their containers must have ended.
    _gone: dict[str, tuple[GivenDevices, datetime]] = field(factory=dict, init=False)
    # The longest grace period seen of each pod with GPUs.
    _graces: dict[str, timedelta] = field(factory=dict, init=False)
    _has_listed: bool = field(default=False, init=False)
    _changes: int = field(default=0, init=False)  # of the pods above
    # The faults of the running pods by uid, and the state that they were found in.
    _faults: dict[str, tuple[WrongDelivery, ...]] = field(factory=dict, init=False)
    _seen_inputs: tuple[int, int, int] = field(default=(-1, -1, -1), init=False)
    _current_since: datetime | None = field(default=None, init=False)
    # None until this leader's first pass.
    _marks: dict[str, dict[DeviceUuid, str]] | None = field(default=None, init=False)
    _changed_nodes: dict[str, None] = field(factory=dict, init=False)
    _seen: dict[FaultKey, SeenFault] = field(factory=dict, init=False)
    _tries: Retries = field(factory=partial(Retries, BACKOFF), init=False)

    def __attrs_post_init__(self) -> None:
        self._changed_in_fleet = self._fleet.collect_changes()

    # The listener of the watch of pods.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        missing = self._given.keys() - {str(raw["metadata"].get("uid")) for raw in objects.values()}
        for uid in missing:
            self._keep(uid, self._graces.get(uid))
        for raw in objects.values():
            self.changed(raw)
        self._has_listed = True

    def changed(self, raw: Raw) -> None:
        uid, one = str(raw["metadata"].get("uid")), GivenDevices.of(raw)
        if one is None:
            self._forget(uid)
            return
        self._forget_node_of(uid)
        self._changes += 1
        self._given[uid] = one
        self._uids_on[one.node].add(uid)
        self._changed_pods.add(uid)
        grace = longest_grace_in(raw) or timedelta()
        self._graces[uid] = max(grace, self._graces.get(uid, grace))

    def deleted(self, raw: Raw) -> None:
        """A container of a pod that was deleted by force runs on for its grace period."""
        uid, grace = str(raw["metadata"].get("uid")), longest_grace_in(raw)
        if has_ended(raw):
            self._forget(uid)
        else:
            self._keep(uid, None if grace is None else max(grace, self._graces.get(uid, grace)))

    def _keep(self, uid: str, grace: timedelta | None) -> None:
        """Forgets a pod that is gone, but not the GPUs that it was given."""
        one = self._given.get(uid)
        if one is not None:
            times = self._orphan_times
            self._changes += 1
            self._gone[uid] = (one, self._clock() + (times.max_grace if grace is None else grace) + times.margin)
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        self._forget_node_of(uid)
        if self._given.pop(uid, None) is not None:
            self._changes += 1
        self._faults.pop(uid, None)
        self._changed_pods.discard(uid)
        self._graces.pop(uid, None)

    def _forget_node_of(self, uid: str) -> None:
        one = self._given.get(uid)
        if one is not None:
            self._uids_on[one.node].discard(uid)
            if not self._uids_on[one.node]:
                del self._uids_on[one.node]

    # What is wrong now, in any process.

    def counts(self) -> Mapping[str, int]:
        """The number of running pods by fault, zeros included."""
        found = Counter(one.fault for one in self._found())
        return {fault.value: found[fault] for fault in DeliveryFault}

    def _found(self) -> list[WrongDelivery]:
        """The faults of the running pods. Compares only what has changed: a large cluster has 40,000 pods with GPUs.

        A pod has no fault as long as its own reservation holds all its GPUs on its node, so only changes of this node
        matter. A fault also depends on reservations on other nodes, so all faults are compared again.
        """
        again = self._changed_pods | self._faults.keys()
        for node in self._changed_in_fleet:
            again |= self._uids_on.get(node, set()) | self._read_reports(node)
        self._changed_pods.clear()
        self._changed_in_fleet.clear()
        for uid in again:
            found = tuple(self._wrong(self._given_to(uid)))
            if found:
                self._faults[uid] = found
            else:
                self._faults.pop(uid, None)
        return [one for uid in sorted(self._faults) for one in self._faults[uid]]

    def _read_reports(self, node: str) -> set[str]:
        """Updates what the node has reported about its pods. Returns the uids of these pods, and of those before."""
        before = self._reported_on.pop(node, set())
        for uid in before:
            self._reported.pop(uid, None)
        found = {one.uid: reported_devices(one, one.uid) for one in self._ledger.on(node) if one.uid and one.given}
        if found:
            self._reported.update(found)
            self._reported_on[node] = set(found)
        return before | found.keys()

    def _given_to(self, uid: str) -> Collection[GivenDevices]:
        """The GPUs of a pod by its status and by the report of its node, which also sees those of sidecars and those of
        kubelets that write no such status."""
        shown, reported = self._given.get(uid), self._reported.get(uid)
        if shown is None or reported is None:
            return [one for one in (shown, reported) if one is not None]
        return [evolve(shown, uuids=tuple(dict.fromkeys((*shown.uuids, *reported.uuids))))]

    def _wrong(self, given: Collection[GivenDevices]) -> Iterator[WrongDelivery]:
        for one in given:
            own = self._ledger.of_pod(one.pod.uid)
            yield from wrong_deliveries(one, own, self._ledger.of_device, self._lists)

    def _lists(self, node: str, uuid: DeviceUuid) -> bool:
        return node in self._fleet.nodes_with_device(uuid)

    # The marks, for the writer of GPUNodes.

    def marks_on(self, node: str) -> Mapping[DeviceUuid, str] | None:
        return None if self._marks is None else self._marks.get(node, {})

    def take_changes(self) -> Collection[str]:
        changes, self._changed_nodes = self._changed_nodes, {}
        return changes.keys()

    # Reports and actions.

    def begin(self) -> None:
        """Called when this process is elected: earlier observations may be out of date."""
        self._current_since, self._marks = None, None
        self._seen.clear()

    async def step(self) -> None:
        """One pass. A failed eviction is tried again later."""
        now = self._clock()
        self._gone = {uid: kept for uid, kept in self._gone.items() if kept[1] > now}
        if not (self._has_listed and self._is_current()):
            self._current_since = None
            return
        inputs = (self._changes, self._fleet.changes, len(self._gone))
        if inputs != self._seen_inputs or self._marks is None:
            self._seen_inputs = inputs
            self._update_marks([*self._found(), *self._wrong([one for one, _ in self._gone.values()])])
        self._current_since = self._current_since or now
        lasting = self._lasting([one for found in self._faults.values() for one in found], now)
        for one, seen in lasting:
            if not seen.is_reported:
                seen.is_reported = True
                self._report(one)
        if self._on_mismatch is OnMismatch.EVICT:
            await self._evict([one.given for one, _ in lasting if one.fault is DeliveryFault.MISMATCHED], now)

    def _update_marks(self, wrong: Collection[WrongDelivery]) -> None:
        marks: dict[str, dict[DeviceUuid, str]] = defaultdict(dict)
        for one in wrong:
            marks[one.given.node].update(marks_of(one))
        before = self._marks
        if before is None:  # another leader may have marked devices of any node
            changed = set(self._fleet.indexed_nodes)
        else:
            changed = {name for name in before.keys() | marks.keys() if before.get(name) != marks.get(name)}
        self._changed_nodes.update(dict.fromkeys(sorted(changed)))
        self._marks = dict(marks)

    def _lasting(self, wrong: Collection[WrongDelivery], now: datetime) -> list[tuple[WrongDelivery, SeenFault]]:
        self._seen = {key: self._seen.get(key) or SeenFault(now) for key in map(FaultKey.of, wrong)}
        if self._current_since is None or now - self._current_since < SETTLED:
            return []
        found = [(one, self._seen[FaultKey.of(one)]) for one in wrong]
        return [(one, seen) for one, seen in found if now - seen.since >= SETTLED]

    def _report(self, one: WrongDelivery) -> None:
        """Events of a pod do not name the other one, which may be of another tenant. The Event of the node does."""
        gpus, node, pod = ", ".join(one.uuids), one.given.node, Subject.of_pod(one.given.pod)
        match one.fault:
            case DeliveryFault.MISMATCHED:
                text = f"the kubelet of {node} gave it {gpus}; reserved for it: {one.expected}"
                self._events.record(pod, Reason.GPU_MISMATCHED, text)
            case DeliveryFault.UNRESERVED:
                text = f"the kubelet of {node} gave it {gpus} without a reservation; no other pod gets them meanwhile"
                self._events.record(pod, Reason.GPU_UNRESERVED, text, is_warning=False)
            case DeliveryFault.COLLISION:
                self._report_collision(one)

    def _report_collision(self, one: WrongDelivery) -> None:
        gpus, node, pod = ", ".join(one.uuids), one.given.node, one.given.pod
        text = f"the kubelet of {node} gave it {gpus}, which is reserved for another pod"
        self._events.record(Subject.of_pod(pod), Reason.GPU_COLLISION, text)
        for held in one.holders:
            shared = ", ".join(uuid for uuid in dict.fromkeys(held.uuids) if uuid in one.uuids)
            if held.uid is not None and held.pod_name and held.phase is Phase.FINALIZED and held.orphan is None:
                text = f"the kubelet of {node} gave {shared}, which is reserved for this pod, to another one"
                holder = PodIdentity(held.namespace, held.pod_name, held.uid)
                self._events.record(Subject.of_pod(holder), Reason.GPU_COLLISION, text)
            text = (
                f"{shared} is reserved for pod {held.namespace}/{held.pod_name or ''}, "
                f"and the kubelet gave it to pod {pod.namespace}/{pod.name}"
            )
            self._events.record(Subject.of_node(node), Reason.GPU_COLLISION, text)

    async def _evict(self, mismatched: Collection[GivenDevices], now: datetime) -> None:
        wanted = {one.pod.uid: one.pod for one in mismatched if not one.is_leaving}
        self._tries.retain(wanted)
        due = [uid for uid in wanted if self._tries.is_due(uid, now)]
        for uid in due[:AT_A_TIME]:
            self._tries.postpone(uid, now)
            pod = wanted[uid]
            try:
                await self._evictor.evict(pod)
            except EvictionError as exc:
                log.warning(
                    "pod not evicted, it is tried again later", pod=f"{pod.namespace}/{pod.name}", problem=str(exc)
                )
                return
            log.info("pod evicted, it was given other GPUs", namespace=pod.namespace, name=pod.name)
