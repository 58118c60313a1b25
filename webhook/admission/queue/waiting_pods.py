"""The pods that wait behind our gate, as a watch tells of them: in lines, and only those that we have dressed."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from webhook.admission.namespaces import ClaimReader, bond_of
from webhook.core import check, keys
from webhook.core.claim import recorded_claim
from webhook.core.dress import DressRules
from webhook.core.errors import InvalidPodError
from webhook.core.hashes import HashPolicy
from webhook.core.pod import Pod
from webhook.core.queue_order import QueuedPod, QueueOrder
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny
from webhook.runtime.clock import LONG_AGO


def nobody_cares(uid: str) -> None:
    return None


class WaitingPods:
    """Hears of pods. A gate that anybody could have put on keeps its pod out of the lines for ever."""

    def __init__(
        self,
        claims: ClaimReader,
        rules: DressRules,
        *,
        lines: QueueOrder | None = None,
        has_come: Callable[[str], None] = nobody_cares,
    ) -> None:
        self.lines = QueueOrder() if lines is None else lines
        self.raws: dict[str, Raw] = {}
        """All of them, those in the lines and the misfits."""
        self.misfits: dict[str, tuple[PodIdentity, Deny]] = {}
        self._claims = claims
        self._rules = rules
        self._has_come = has_come
        self._doubtful: dict[str, None] = {}  # uids of those that were judged by what no longer holds

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {str(raw["metadata"].get("uid")) for raw in objects.values()}
        for uid in self.raws.keys() - there:
            self.forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        if not is_waiting(raw):
            self.forget(uid, was_served="deletionTimestamp" not in raw["metadata"])
            return
        is_new = uid not in self.raws
        self._judge(uid, raw)
        if is_new:
            self._has_come(uid)

    def deleted(self, raw: Raw) -> None:
        self.forget(str(raw["metadata"].get("uid")))

    def forget(self, uid: str, *, was_served: bool = False) -> None:
        """It is gone, or, if it was served, its gate is open."""
        if self.raws.pop(uid, None) is not None:
            self.lines.drop(uid, was_served=was_served)
            self.misfits.pop(uid, None)
            self._doubtful.pop(uid, None)

    # What else is learnt of them.

    def read(self, asked: Collection[str], found: Iterable[Raw]) -> None:
        """All that are on no node, as a list has them that was asked for when `asked` were known. Those that came or
        went meanwhile, the watch knows better."""
        there = {str(raw["metadata"].get("uid")): raw for raw in found}
        for uid in [uid for uid in asked if uid in self.raws]:
            raw = there.get(uid)
            if raw is None:
                self.forget(uid)
            elif version_of(raw) > version_of(self.raws[uid]):
                self.changed(raw)

    def refuse(self, uid: str, refused: Deny) -> None:
        """It is not as it has to be, as somebody has found who knows better."""
        waiter = self.lines.get(uid)
        if waiter is not None:
            self.lines.drop(uid)
            self.misfits[uid] = waiter.pod, refused

    def doubt(self, namespaces: Collection[str]) -> None:
        """Those in namespaces that demand something else than before."""
        found = (uid for uid, raw in self.raws.items() if raw["metadata"].get("namespace") in namespaces)
        self._doubtful.update(dict.fromkeys(found))

    def judge_again(self, most: int) -> None:
        """Some of those that are in doubt."""
        for uid in list(islice(self._doubtful, most)):
            del self._doubtful[uid]
            self._judge(uid, self.raws[uid])

    def _judge(self, uid: str, raw: Raw) -> None:
        self.raws[uid] = raw
        found = self._waiter(raw)
        if isinstance(found, QueuedPod):
            self.misfits.pop(uid, None)
            self.lines.put(found)
        else:
            self.lines.drop(uid)
            self.misfits[uid] = found

    def _waiter(self, raw: Raw) -> QueuedPod | tuple[PodIdentity, Deny]:
        identity = identity_in(raw)
        try:
            pod = Pod.parse(raw)
            claim = recorded_claim(pod)
            if claim is None:
                return identity, check.no_stray_gate(pod) or NOT_OURS
            rules = self._claims.known_within(identity.namespace)
            refused = check.matches_queued_pod(raw, pod, claim, self._rules, rules)
        except InvalidPodError as exc:
            return identity, Deny(Reason.INVALID_POD, "; ".join(exc.mistakes[:20]))
        if refused is not None:
            return identity, refused
        return QueuedPod(identity, pod.meta.creation_timestamp or LONG_AGO, claim)


class DemandsListener:
    """Hears of namespaces on behalf of the pods that wait in them; after whoever the pods are judged by."""

    def __init__(self, pods: WaitingPods) -> None:
        self._pods = pods
        self._bonds: dict[str, HashPolicy] = {}

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {raw["metadata"]["name"]: bond_of(raw) for raw in objects.values()}
        gone = self._bonds.keys() - there.keys()
        self._pods.doubt(gone | {name for name, bond in there.items() if self._bonds.get(name) != bond})
        self._bonds = there

    def changed(self, raw: Raw) -> None:
        name, bond = raw["metadata"]["name"], bond_of(raw)
        if self._bonds.get(name) != bond:
            self._bonds[name] = bond
            self._pods.doubt({name})

    def deleted(self, raw: Raw) -> None:
        if self._bonds.pop(raw["metadata"]["name"], None) is not None:
            self._pods.doubt({raw["metadata"]["name"]})


NOT_OURS = Deny(Reason.FORGED, "the pod is not as a pod waits in the queue")


def is_waiting(raw: Raw) -> bool:
    """Whether our gate is all that keeps it; cheap, for it is asked of every pod."""
    spec = raw.get("spec") or {}
    gates = spec.get("schedulingGates")
    if not gates or spec.get("nodeName") or raw["metadata"].get("deletionTimestamp"):
        return False
    return any(gate.get("name") == keys.QUEUE_GATE for gate in gates)


def identity_in(raw: Mapping[str, Any]) -> PodIdentity:
    meta = raw["metadata"]
    return PodIdentity(meta.get("namespace") or "", meta["name"], str(meta.get("uid")))


def version_of(raw: Raw) -> int:
    return int(raw["metadata"].get("resourceVersion") or 0)
