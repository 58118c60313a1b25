"""Which pods have ended on this node, determined from successive snapshots of the kubelet and the container runtime."""

from collections.abc import Collection
from datetime import timedelta
from typing import Final

from attrs import define, field

from webhook.node.node_pods import NodePodsSnapshot, PodName, RemainingContainers

# Between two snapshots that agree. The kubelet decides on a new sandbox by what it has read from the runtime. It reads
# every second, and waits for a read when a sync begins, so the read of the last sync is older than the second snapshot.
MIN_INTERVAL: Final = timedelta(seconds=5)
# A deletion does not stop a sync that creates a new sandbox, and the runtime lists no sandbox before it is ready.
# Limits of the kubelet: 2 min to stop the old sandbox, 45 s for each DRA driver, 4 min to run the new one.
MAX_SYNC_DURATION: Final = timedelta(minutes=10)
# How long the end of a pod is remembered: its deletion, and then its orphan, may be observed later.
RETENTION: Final = timedelta(hours=1)
# How many ended pods are remembered; the latest ones are kept.
MAX_PODS: Final = 4096


@define(eq=False)
class SeenPod:
    """What snapshots have shown of one pod. Times are in seconds on any monotonic clock."""

    name: PodName
    # No snapshot since then has the pod among those that the kubelet names.
    unnamed_since: float | None = None
    # No snapshot since then has anything alive of the pod.
    gone_since: float | None = None
    # It had a ready sandbox while the kubelet did not name it: no new one can follow.
    has_last_sandbox: bool = False

    def observe(self, found: RemainingContainers | None, *, is_named: bool, began: float, now: float) -> None:
        if is_named:
            self.unnamed_since, self.gone_since, self.has_last_sandbox = None, None, False
            return
        if self.unnamed_since is None:
            self.unnamed_since = now
        if found is None or not found.is_alive:
            self.gone_since = now if self.gone_since is None else self.gone_since
            return
        self.gone_since = None
        # With two ready sandboxes the kubelet replaces them.
        if found.ready_sandboxes == 1 and began - self.unnamed_since >= MIN_INTERVAL.total_seconds():
            self.has_last_sandbox = True

    def has_ended(self, began: float) -> bool:
        required = MIN_INTERVAL if self.has_last_sandbox else MAX_SYNC_DURATION
        return self.gone_since is not None and began - self.gone_since >= required.total_seconds()


@define(eq=False)
class PodEndDetector:
    """Only pods that were observed on this node can end here: a kubelet that does not know a pod yet has no containers
    of it either."""

    # By uid.
    _pods: dict[str, SeenPod] = field(factory=dict)

    def observe(self, snapshot: NodePodsSnapshot, began: float, now: float) -> Collection[str]:
        """The pods that have ended, by this snapshot and the earlier ones. A snapshot's data may be as old as
        `began`."""
        for uid, one in snapshot.remains.items():
            self._pods.setdefault(uid, SeenPod(one.pod))
        for uid, pod in self._pods.items():
            pod.observe(snapshot.remains.get(uid), is_named=pod.name in snapshot.wanted, began=began, now=now)
        self._forget(snapshot, now)
        return [uid for uid, pod in self._pods.items() if pod.has_ended(began)]

    def _forget(self, snapshot: NodePodsSnapshot, now: float) -> None:
        """Pods of which the runtime still has something are kept: they would be observed, and end, again."""
        gone = {uid: pod.gone_since for uid, pod in self._pods.items() if pod.gone_since is not None}
        old = [uid for uid, since in gone.items() if now - since >= RETENTION.total_seconds()]
        extra = sorted(gone, key=gone.__getitem__)[: max(0, len(gone) - MAX_PODS)]
        for uid in {*old, *extra} - snapshot.remains.keys():
            del self._pods[uid]
