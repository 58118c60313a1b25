"""Which pods have ended on this node, as looks at kubelet and container runtime have shown it."""

from collections.abc import Collection
from datetime import timedelta
from typing import Final

from attrs import define, field

from webhook.node_pods import Look, PodName

# Two looks that find nothing of a pod are so far apart: what its kubelet had begun to start as it heard of the deletion
# is there in the second one.
APART: Final = timedelta(seconds=5)
# So long the end of a pod is remembered: its deletion, and then its orphan, may be heard of later.
KEPT: Final = timedelta(hours=1)
# And the ends of so many pods at most, the latest ones.
MOST: Final = 4096


@define(eq=False)
class PodEnds:
    """Only pods that this has seen here can end here: a kubelet that has not heard of a pod yet has nothing of it
    either."""

    _pods: dict[str, PodName] = field(factory=dict)
    # By uid, when nothing of them was first found in looks that have found nothing since; in seconds on any clock.
    _gone_since: dict[str, float] = field(factory=dict)

    def see(self, look: Look, now: float) -> Collection[str]:
        """The pods that have ended: of each, two looks so far apart, this one among them, have found nothing."""
        self._pods.update((uid, one.pod) for uid, one in look.remains.items())
        for uid, pod in self._pods.items():
            if look.is_left(uid, pod):
                self._gone_since.pop(uid, None)
            else:
                self._gone_since.setdefault(uid, now)
        self._forget(look, now)
        return [uid for uid, since in self._gone_since.items() if now - since >= APART.total_seconds()]

    def _forget(self, look: Look, now: float) -> None:
        """What the runtime still has something of is not forgotten: it would be seen again, and end again."""
        old = [uid for uid, since in self._gone_since.items() if now - since >= KEPT.total_seconds()]
        extra = list(self._gone_since)[: max(0, len(self._gone_since) - MOST)]
        for uid in {*old, *extra} - look.remains.keys():
            self._gone_since.pop(uid, None)
            self._pods.pop(uid, None)
