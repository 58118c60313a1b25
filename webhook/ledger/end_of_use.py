"""When a pod's containers cannot use its devices any more: docs/decisions/0024.

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

TERMINAL = frozenset({"Succeeded", "Failed"})
# What a GPUNode has room for.
MOST_OF_A_BOOT_ID = 128
# The reason of the condition under which the pod garbage collector sets a pod Failed. It does not know what runs.
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
        """A status without a state says nothing, so the container may run."""
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
    """What one version of a pod's object says of its containers."""

    NEVER_BOUND = "never bound"
    ENDED = "ended"
    # Failed, and no container has a status: refused by the kubelet, which may say so of a pod that ran before the
    # kubelet was restarted.
    REJECTED = "rejected"
    POSSIBLE = "possible"


def use_in(raw: Raw) -> ContainerUse:
    """The kubelet sets a phase that is final only when none of the pod's containers can run any more. A container that
    is terminated in any other phase may be started again."""
    try:
        wire = msgspec.convert(raw, UsedPodWire)
    except msgspec.ValidationError:
        return ContainerUse.POSSIBLE
    status = wire.status or UsedPodStatusWire()
    if not (wire.spec and wire.spec.node_name):
        return ContainerUse.NEVER_BOUND
    is_by_pod_gc = any(one.reason == BY_POD_GC for one in status.conditions or ())
    if status.phase not in TERMINAL or is_by_pod_gc or any(one.runs for one in status.containers()):
        return ContainerUse.POSSIBLE
    return ContainerUse.ENDED if status.container_statuses else ContainerUse.REJECTED


def has_ended(raw: Raw) -> bool:
    return use_in(raw) is ContainerUse.ENDED


def has_started(raw: Raw) -> bool:
    try:
        status = msgspec.convert(raw, UsedPodWire).status or UsedPodStatusWire()
    except msgspec.ValidationError:
        return True
    return any(one.has_started for one in status.containers())


def grace_in(raw: Mapping[str, Any]) -> timedelta | None:
    """The longest grace period that the object names; None if it cannot be read. A probe may have one of its own."""
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
    """The longest grace period of a pod that was seen."""

    longest: timedelta = timedelta(0)
    # Whether none can have gone unseen: a pod may be deleted with a longer one before anybody looks.
    is_all: bool = False

    def and_of(self, raw: Raw) -> "Grace":
        found = grace_in(raw)
        return Grace(self.longest, is_all=False) if found is None else evolve(self, longest=max(self.longest, found))


@frozen
class PodHistory:
    """What is known of one pod from its first sight on."""

    grace: Grace
    has_started: bool

    @classmethod
    def begun(cls, raw: Raw) -> "PodHistory":
        is_late = is_being_deleted(raw) or use_in(raw) is ContainerUse.REJECTED
        return cls(Grace(is_all=not is_late).and_of(raw), has_started(raw) or is_late)

    def after(self, raw: Raw) -> "PodHistory":
        return PodHistory(self.grace.and_of(raw), self.has_started or has_started(raw))

    def is_over(self, raw: Raw) -> bool:
        """Whether this version of the pod, seen after all that came before, proves that its devices are not used."""
        use = use_in(raw)
        return use in (ContainerUse.NEVER_BOUND, ContainerUse.ENDED) or (
            use is ContainerUse.REJECTED and not self.has_started
        )


@frozen
class Departure:
    """How a pod was last seen: with proof that it uses nothing, or not."""

    at: datetime
    is_over: bool = False
    grace: Grace = Grace()


class PodHistories:
    """Of the pods of a list, and of all that a watch has told since."""

    def __init__(self) -> None:
        self._known: dict[str, PodHistory] = {}

    def listed(self, pods: Mapping[str, Raw]) -> None:
        """What happened between the end of the watch and the list was not seen."""
        self._known = {uid: PodHistory.begun(raw) for uid, raw in pods.items()}

    def seen(self, uid: str, raw: Raw) -> None:
        known = self._known.get(uid)
        self._known[uid] = PodHistory.begun(raw) if known is None else known.after(raw)

    def is_over(self, uid: str, raw: Raw) -> bool:
        return self._of(uid, raw).is_over(raw)

    def grace(self, uid: str) -> Grace:
        known = self._known.get(uid)
        return Grace() if known is None else known.grace

    def departed(self, uid: str, raw: Raw, now: datetime) -> Departure:
        """`raw` is the object's last version."""
        history = self._of(uid, raw).after(raw)
        self._known.pop(uid, None)
        return Departure(now, history.is_over(raw), history.grace)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

    def _of(self, uid: str, raw: Raw) -> PodHistory:
        return self._known.get(uid) or PodHistory.begun(raw)


# When a pod that went without proof has ended.


@frozen
class OrphanTimes:
    """How long devices are kept from others where nobody has seen a pod's containers end."""

    # The longest grace period that a pod with devices may have, and a deletion.
    max_grace: timedelta = timedelta(hours=1)
    # How long a dead kubelet may pass for a living one, and how long a new one takes to stop what it finds.
    margin: timedelta = timedelta(seconds=90)

    def grace(self, seen: Grace, stored: timedelta | None = None) -> timedelta:
        """In whole seconds, as it is stored. What went unseen is no longer than `stored`, or else than the limit,
        which a pod that is older than the limit may exceed."""
        unseen = timedelta(0) if seen.is_all else self.max_grace
        longest = max(seen.longest, unseen if stored is None else stored)
        return timedelta(seconds=ceil(longest.total_seconds()))


@frozen
class NodeSnapshot:
    """A node as it was just read."""

    boot_id: str = ""
    is_ready: bool = False
    # Since when it is ready, as its own condition says.
    ready_since: datetime | None = None

    @classmethod
    def of(cls, raw: Raw) -> "NodeSnapshot":
        """Raises msgspec.ValidationError for what is no node."""
        status = msgspec.convert(raw, NodeBootWire).status or NodeBootStatusWire()
        ready = next((one for one in status.conditions or () if one.type == "Ready" and one.status == "True"), None)
        boot_id = ((status.node_info and status.node_info.boot_id) or "")[:MOST_OF_A_BOOT_ID]
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
    """What the looks at one node have shown, by this process's own clock."""

    sight: NodeSnapshot | None
    # Since when every look has found the node ready, and since when none has found it.
    ready_since: datetime | None = None
    gone_since: datetime | None = None

    @classmethod
    def after(
        cls, before: "OrphanObservation | None", sight: NodeSnapshot | None, now: datetime
    ) -> "OrphanObservation":
        if sight is None:
            return cls(None, gone_since=now if before is None or before.gone_since is None else before.gone_since)
        if not sight.is_ready:
            return cls(sight)
        known = sight.ready_since or now
        if before is None:
            return cls(sight, ready_since=known)
        return cls(sight, ready_since=max(known, now if before.ready_since is None else before.ready_since))

    def end_of(self, orphan: Orphan, patience: OrphanTimes) -> datetime | None:
        """When the orphan's devices may be offered again, by what is known now; None if that cannot be said."""
        if self.gone_since is not None:
            return max(self.gone_since, orphan.at) + max(patience.max_grace, orphan.grace) + patience.margin
        if self._is_new_boot(orphan):
            return orphan.at
        if self.ready_since is None:
            return None
        return max(orphan.at, self.ready_since) + orphan.grace + patience.margin

    def why(self, orphan: Orphan) -> str:
        """Why it has ended, where it has."""
        if self.gone_since is not None:
            return "its node is gone"
        return "its node has been started anew" if self._is_new_boot(orphan) else "its time is over"

    def _is_new_boot(self, orphan: Orphan) -> bool:
        return self.sight is not None and bool(orphan.boot_id) and self.sight.boot_id not in ("", orphan.boot_id)
