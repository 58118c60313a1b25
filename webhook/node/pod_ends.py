"""Which pods have ended on this node, as looks at kubelet and container runtime have shown it."""

from collections.abc import Collection
from datetime import timedelta
from typing import Final

from attrs import define, field

from webhook.node.node_pods import NodePodsSnapshot, PodName, RemainingContainers

# Two looks that agree are so far apart. By what the kubelet has read from the runtime it decides on a new sandbox. It
# reads every second, and waits for that as a sync begins, so of the last sync it is older than the second look.
APART: Final = timedelta(seconds=5)
# A deletion does not stop a sync that makes a new sandbox, and the runtime lists no sandbox before it is ready.
# Limits of the kubelet: 2 min to stop the old sandbox, 45 s for each DRA driver, 4 min to run the new one.
LONGEST_SYNC: Final = timedelta(minutes=10)
# So long the end of a pod is remembered: its deletion, and then its orphan, may be heard of later.
KEPT: Final = timedelta(hours=1)
# And the ends of so many pods at most, the latest ones.
MOST: Final = 4096


@define(eq=False)
class SeenPod:
    """What looks have shown of one pod. Times are in seconds on any clock."""

    name: PodName
    # The kubelet has not named it in any look since.
    unnamed_since: float | None = None
    # And the runtime has had nothing alive of it in any look since.
    gone_since: float | None = None
    # While unnamed it had a ready sandbox: no new one can follow.
    has_last_sandbox: bool = False

    def see(self, found: RemainingContainers | None, *, is_named: bool, began: float, now: float) -> None:
        if is_named:
            self.unnamed_since, self.gone_since, self.has_last_sandbox = None, None, False
            return
        if self.unnamed_since is None:
            self.unnamed_since = now
        if found is None or not found.is_alive:
            self.gone_since = now if self.gone_since is None else self.gone_since
            return
        self.gone_since = None
        # The kubelet replaces ready sandboxes too if there are two.
        if found.ready_sandboxes == 1 and began - self.unnamed_since >= APART.total_seconds():
            self.has_last_sandbox = True

    def has_ended(self, began: float) -> bool:
        patience = APART if self.has_last_sandbox else LONGEST_SYNC
        return self.gone_since is not None and began - self.gone_since >= patience.total_seconds()


@define(eq=False)
class PodEnds:
    """Only pods that this has seen here can end here: a kubelet that has not heard of a pod yet has nothing of it
    either."""

    # By uid.
    _pods: dict[str, SeenPod] = field(factory=dict)

    def see(self, look: NodePodsSnapshot, began: float, now: float) -> Collection[str]:
        """The pods that have ended, by this look and those before. What a look shows may be as old as its beginning."""
        for uid, one in look.remains.items():
            self._pods.setdefault(uid, SeenPod(one.pod))
        for uid, pod in self._pods.items():
            pod.see(look.remains.get(uid), is_named=pod.name in look.wanted, began=began, now=now)
        self._forget(look, now)
        return [uid for uid, pod in self._pods.items() if pod.has_ended(began)]

    def _forget(self, look: NodePodsSnapshot, now: float) -> None:
        """What the runtime still has something of is not forgotten: it would be seen again, and end again."""
        gone = {uid: pod.gone_since for uid, pod in self._pods.items() if pod.gone_since is not None}
        old = [uid for uid, since in gone.items() if now - since >= KEPT.total_seconds()]
        extra = sorted(gone, key=gone.__getitem__)[: max(0, len(gone) - MOST)]
        for uid in {*old, *extra} - look.remains.keys():
            del self._pods[uid]
