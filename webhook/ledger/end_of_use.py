"""When a pod's containers can no longer use its devices: docs/decisions/0024.

A pod that is gone from the API server may still run: a forced deletion removes the object at once, and the kubelet
stops the containers later.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from math import ceil
from typing import Annotated, Any

import msgspec
from attrs import evolve, frozen

from webhook.core.pod import Spec, WireStruct
from webhook.core.raw import Raw
from webhook.core.reservation import Orphan
from webhook.kube.gpu_node import MOST_SECONDS
from webhook.runtime.clock import is_plausible

# The kubelet starts no more containers in these phases. Those that it has started may still run.
TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})
# The limit in the GPUNode CRD.
MAX_BOOT_ID = 128
# The condition reason under which the pod garbage collector sets a pod to Failed. It does not know what still runs.
BY_POD_GC = "DeletionByPodGC"


class StateWire(WireStruct, frozen=True):
    waiting: Raw | None = None
    running: Raw | None = None
    terminated: Raw | None = None


class ContainerStatusWire(WireStruct, frozen=True):
    state: StateWire | None = None
    last_state: StateWire | None = None
    restart_count: int = 0

    @property
    def has_started(self) -> bool:
        state, last = self.state or StateWire(), self.last_state or StateWire()
        seen = (state.running, state.terminated, last.running, last.terminated)
        return self.restart_count > 0 or any(one is not None for one in seen)

    @property
    def runs(self) -> bool:
        """A status without a state proves nothing, so the container may run."""
        state = self.state or StateWire()
        return state.running is not None or (state.waiting is None and state.terminated is None)


class UsedPodConditionWire(WireStruct, frozen=True):
    reason: str | None = None


class UsedPodStatusWire(WireStruct, frozen=True):
    phase: str | None = None
    conditions: list[UsedPodConditionWire] | None = None
    init_container_statuses: list[ContainerStatusWire] | None = None
    container_statuses: list[ContainerStatusWire] | None = None
    ephemeral_container_statuses: list[ContainerStatusWire] | None = None

    def containers(self) -> list[ContainerStatusWire]:
        lists = (self.init_container_statuses, self.container_statuses, self.ephemeral_container_statuses)
        return [one for found in lists for one in found or ()]


class UsedPodMetaWire(WireStruct, frozen=True):
    uid: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


class UsedPodWire(WireStruct, frozen=True):
    metadata: UsedPodMetaWire | None = None
    spec: Spec | None = None
    status: UsedPodStatusWire | None = None


class ContainerUse(StrEnum):
    """What one version of a pod object shows about its containers."""

    NEVER_BOUND = "never bound"
    ENDED = "ended"
    # Failed without any container status: the kubelet rejected the pod. It may report that of a pod that ran before the
    # kubelet restarted.
    REJECTED = "rejected"
    POSSIBLE = "possible"


def container_use_in(raw: Raw) -> ContainerUse:
    """The kubelet sets a terminal phase only when no container of the pod can run any more. In any other phase a
    terminated container may be started again."""
    try:
        wire = msgspec.convert(raw, UsedPodWire)
    except msgspec.ValidationError:
        return ContainerUse.POSSIBLE
    status = wire.status or UsedPodStatusWire()
    if not (wire.spec and wire.spec.node_name):
        return ContainerUse.NEVER_BOUND
    is_by_pod_gc = any(one.reason == BY_POD_GC for one in status.conditions or ())
    if status.phase not in TERMINAL_PHASES or is_by_pod_gc or any(one.runs for one in status.containers()):
        return ContainerUse.POSSIBLE
    return ContainerUse.ENDED if status.container_statuses else ContainerUse.REJECTED


def has_ended(raw: Raw) -> bool:
    return container_use_in(raw) is ContainerUse.ENDED


def has_started(raw: Raw) -> bool:
    try:
        status = msgspec.convert(raw, UsedPodWire).status or UsedPodStatusWire()
    except msgspec.ValidationError:
        return True
    return any(one.has_started for one in status.containers())


def longest_grace_in(raw: Mapping[str, Any]) -> timedelta | None:
    """The longest grace period in the object, including those of probes; None if the object cannot be parsed."""
    try:
        wire = msgspec.convert(raw, UsedPodWire)
    except msgspec.ValidationError:
        return None
    meta, spec = wire.metadata or UsedPodMetaWire(), wire.spec or Spec()
    longest = max(spec.longest_grace, meta.deletion_grace_period_seconds or 0)
    return timedelta(seconds=min(longest, MOST_SECONDS))


def is_being_deleted(raw: Raw) -> bool:
    meta = raw.get("metadata")
    return isinstance(meta, dict) and meta.get("deletionTimestamp") is not None


# What a watch without gaps has shown of pods.


@frozen
class Grace:
    """The longest grace period of a pod that was observed."""

    longest: timedelta = timedelta(0)
    # Whether no longer one can have been missed: a pod may be deleted with a longer grace period before the first watch
    # event is handled.
    is_all: bool = False

    def and_of(self, raw: Raw) -> "Grace":
        found = longest_grace_in(raw)
        return Grace(self.longest, is_all=False) if found is None else evolve(self, longest=max(self.longest, found))


@frozen
class PodHistory:
    """What is known of one pod since it was first observed."""

    grace: Grace
    has_started: bool

    @classmethod
    def begun(cls, raw: Raw) -> "PodHistory":
        is_late = is_being_deleted(raw) or container_use_in(raw) is ContainerUse.REJECTED
        return cls(Grace(is_all=not is_late).and_of(raw), has_started(raw) or is_late)

    def after(self, raw: Raw) -> "PodHistory":
        return PodHistory(self.grace.and_of(raw), self.has_started or has_started(raw))

    def is_over(self, raw: Raw) -> bool:
        """Whether this version of the pod, together with all earlier ones, proves that its devices are not in use."""
        use = container_use_in(raw)
        return use in (ContainerUse.NEVER_BOUND, ContainerUse.ENDED) or (
            use is ContainerUse.REJECTED and not self.has_started
        )


@frozen
class DeletedPod:
    """When a pod was last observed, and whether it provably used nothing by then."""

    at: datetime
    is_over: bool = False
    grace: Grace = Grace()


class PodHistories:
    """Histories of the pods of a list, and of all watch events since."""

    def __init__(self) -> None:
        self._known: dict[str, PodHistory] = {}

    def listed(self, pods: Mapping[str, Raw]) -> None:
        """Start again from a list: changes between the end of the last watch and the list were not observed."""
        self._known = {uid: PodHistory.begun(raw) for uid, raw in pods.items()}

    def seen(self, uid: str, raw: Raw) -> None:
        known = self._known.get(uid)
        self._known[uid] = PodHistory.begun(raw) if known is None else known.after(raw)

    def is_over(self, uid: str, raw: Raw) -> bool:
        return self._of(uid, raw).is_over(raw)

    def grace(self, uid: str) -> Grace:
        known = self._known.get(uid)
        return Grace() if known is None else known.grace

    def deleted(self, uid: str, raw: Raw, now: datetime) -> DeletedPod:
        """`raw` is the last version of the object."""
        history = self._of(uid, raw).after(raw)
        self._known.pop(uid, None)
        return DeletedPod(now, history.is_over(raw), history.grace)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

    def _of(self, uid: str, raw: Raw) -> PodHistory:
        return self._known.get(uid) or PodHistory.begun(raw)


# When a pod that is gone without proof has ended.


@frozen
class OrphanTimes:
    """How long devices stay reserved if no one saw the pod's containers end."""

    # The longest grace period allowed for a pod with devices, and for its deletion.
    max_grace: timedelta = timedelta(hours=1)
    # How long a dead kubelet may still appear ready, and how long a new one takes to stop the containers it finds.
    margin: timedelta = timedelta(seconds=90)

    def grace(self, seen: Grace, stored: timedelta | None = None) -> timedelta:
        """In whole seconds, as it is stored. A missed grace period is assumed to be at most `stored`, or `max_grace` if
        nothing is stored. A pod that is older than the limit may exceed it."""
        unseen = timedelta(0) if seen.is_all else self.max_grace
        longest = max(seen.longest, unseen if stored is None else stored)
        return timedelta(seconds=ceil(longest.total_seconds()))


@frozen
class NodeSnapshot:
    """A Node as it was just read."""

    boot_id: str = ""
    is_ready: bool = False
    # The lastTransitionTime of its Ready condition.
    ready_since: datetime | None = None

    @classmethod
    def of(cls, raw: Raw) -> "NodeSnapshot":
        """Raises msgspec.ValidationError if this is not a Node."""
        status = msgspec.convert(raw, NodeBootWire).status or NodeBootStatusWire()
        ready = next((one for one in status.conditions or () if one.type == "Ready" and one.status == "True"), None)
        boot_id = ((status.node_info and status.node_info.boot_id) or "")[:MAX_BOOT_ID]
        since = None if ready is None else ready.last_transition_time
        is_known = since is not None and is_plausible(since)
        return cls(boot_id, ready is not None, since if is_known else None)


class NodeInfoWire(msgspec.Struct, frozen=True):
    boot_id: str = msgspec.field(name="bootID", default="")


class NodeReadyWire(WireStruct, frozen=True):
    type: str = ""
    status: str = ""
    last_transition_time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class NodeBootStatusWire(WireStruct, frozen=True):
    conditions: list[NodeReadyWire] | None = None
    node_info: NodeInfoWire | None = None


class NodeBootWire(WireStruct, frozen=True):
    status: NodeBootStatusWire | None = None


@frozen
class OrphanObservation:
    """What successive reads of one Node have shown, by this process's own clock."""

    node: NodeSnapshot | None
    # Since when every read has found the Node ready, and since when every read has found no Node.
    ready_since: datetime | None = None
    gone_since: datetime | None = None

    @classmethod
    def after(cls, before: "OrphanObservation | None", node: NodeSnapshot | None, now: datetime) -> "OrphanObservation":
        if node is None:
            return cls(None, gone_since=now if before is None or before.gone_since is None else before.gone_since)
        if not node.is_ready:
            return cls(node)
        known = node.ready_since or now
        if before is None:
            return cls(node, ready_since=known)
        return cls(node, ready_since=max(known, now if before.ready_since is None else before.ready_since))

    def end_of(self, orphan: Orphan, times: OrphanTimes) -> datetime | None:
        """When the orphan's devices may be offered again, as far as known now; None if that cannot be determined."""
        if self.gone_since is not None:
            return max(self.gone_since, orphan.at) + max(times.max_grace, orphan.grace) + times.margin
        if self._is_new_boot(orphan):
            return orphan.at
        if self.ready_since is None:
            return None
        return max(orphan.at, self.ready_since) + orphan.grace + times.margin

    def why(self, orphan: Orphan) -> str:
        """Why the orphan has ended, if it has."""
        if self.gone_since is not None:
            return "its node is gone"
        return "its node has rebooted" if self._is_new_boot(orphan) else "its grace period is over"

    def _is_new_boot(self, orphan: Orphan) -> bool:
        return self.node is not None and bool(orphan.boot_id) and self.node.boot_id not in ("", orphan.boot_id)
