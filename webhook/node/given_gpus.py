"""Which pods of this node have other GPUs than those reserved for them: the kubelet's answer compared with the pods'
annotations."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Final

from attrs import define, field

from webhook.core.proof_devices import gpu_of_device
from webhook.node.node_pods import NodePodsSnapshot, PodName, RemainingContainers

# A difference must last this long: the kubelet names pods without their uids, and a pod that was deleted by force may
# have a successor of the same name.
LASTING: Final = timedelta(seconds=10)
# Between two reports of one pod.
AGAIN_AFTER: Final = timedelta(minutes=1)

Gpus = tuple[str, ...]


@define(eq=False)
class DifferenceDetector:
    """Remembers since when pods have other GPUs, and when that was reported. Times are in seconds on any monotonic
    clock."""

    _since: dict[tuple[str, Gpus], float] = field(factory=dict, init=False)
    _reported: dict[str, float] = field(factory=dict, init=False)

    def observe(self, snapshot: NodePodsSnapshot, now: float) -> Mapping[str, Gpus]:
        """The GPUs of the pods that are to be reported now, by uid."""
        wrong = dict(different_gpus(snapshot))
        self._since = {key: self._since.get(key, now) for key in wrong.items()}
        self._reported = {uid: at for uid, at in self._reported.items() if uid in wrong}
        lasting = {uid: gpus for (uid, gpus), since in self._since.items() if now - since >= LASTING.total_seconds()}
        return {uid: gpus for uid, gpus in lasting.items() if self._is_due(uid, now)}

    def _is_due(self, uid: str, now: float) -> bool:
        at = self._reported.get(uid)
        return at is None or now - at >= AGAIN_AFTER.total_seconds()

    def reported(self, uid: str, now: float) -> None:
        self._reported[uid] = now


def different_gpus(snapshot: NodePodsSnapshot) -> Iterator[tuple[str, Gpus]]:
    """The GPUs of each pod that has one which its annotation does not name, by uid. A pod without the annotation is not
    compared, nor is one whose name two pods have."""
    alive: dict[PodName, list[RemainingContainers]] = {}
    for one in snapshot.remains.values():
        if one.is_alive:
            alive.setdefault(one.pod, []).append(one)
    for pod, found in alive.items():
        given = snapshot.wanted.get(pod)
        if given is not None and len(found) == 1 and found[0].reserved:
            proven = {gpu_of_device(name, found[0].reserved) for name in given.proof_devices}
            gpus = proven | given.uuids
            if not gpus <= set(found[0].reserved):
                yield found[0].uid, tuple(sorted(gpus))
