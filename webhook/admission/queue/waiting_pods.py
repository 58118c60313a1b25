"""The pods that wait behind our gate, by the watch of pods. Only pods that were dressed by us are queued."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

from attrs import define, field

from webhook.admission.namespaces import ClaimReader, hash_policy_of
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


def ignore_new_pod(uid: str) -> None:
    return None


@define(eq=False, repr=False)
class WaitingPods:
    """Listener of the watch of pods. A pod whose gate was not set by us is never queued: anyone could have added it."""

    _claims: ClaimReader
    _rules: DressRules
    queue_order: QueueOrder = field(factory=QueueOrder, kw_only=True)
    _on_new_pod: Callable[[str], None] = field(default=ignore_new_pod, kw_only=True)
    raws: dict[str, Raw] = field(factory=dict, init=False)
    """All waiting pods: queued and rejected ones."""
    rejected: dict[str, tuple[PodIdentity, Deny]] = field(factory=dict, init=False)
    # Uids of pods to check again because the rules of their namespace have changed.
    _to_recheck: dict[str, None] = field(factory=dict, init=False)

    # The listener of the watch of pods.

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
        self._classify(uid, raw)
        if is_new:
            self._on_new_pod(uid)

    def deleted(self, raw: Raw) -> None:
        self.forget(str(raw["metadata"].get("uid")))

    def forget(self, uid: str, *, was_served: bool = False) -> None:
        """Drops a pod that is gone, or whose gate is open (`was_served`)."""
        if self.raws.pop(uid, None) is not None:
            self.queue_order.drop(uid, was_served=was_served)
            self.rejected.pop(uid, None)
            self._to_recheck.pop(uid, None)

    # Other sources.

    def read(self, asked: Collection[str], found: Iterable[Raw]) -> None:
        """Applies a list of all pods without a node. It was requested when `asked` were known; for pods that came or
        went since, the watch is newer."""
        there = {str(raw["metadata"].get("uid")): raw for raw in found}
        for uid in [uid for uid in asked if uid in self.raws]:
            raw = there.get(uid)
            if raw is None:
                self.forget(uid)
            elif version_of(raw) > version_of(self.raws[uid]):
                self.changed(raw)

    def refuse(self, uid: str, refused: Deny) -> None:
        """Takes the pod out of the queue, because a fresh check has refused it."""
        waiter = self.queue_order.get(uid)
        if waiter is not None:
            self.queue_order.drop(uid)
            self.rejected[uid] = waiter.pod, refused

    def mark_for_recheck(self, namespaces: Collection[str]) -> None:
        """Marks the pods in namespaces whose requirements have changed."""
        found = (uid for uid, raw in self.raws.items() if raw["metadata"].get("namespace") in namespaces)
        self._to_recheck.update(dict.fromkeys(found))

    def recheck(self, most: int) -> None:
        """Checks some of the marked pods again."""
        for uid in list(islice(self._to_recheck, most)):
            del self._to_recheck[uid]
            self._classify(uid, self.raws[uid])

    def _classify(self, uid: str, raw: Raw) -> None:
        self.raws[uid] = raw
        found = self._waiter(raw)
        if isinstance(found, QueuedPod):
            self.rejected.pop(uid, None)
            self.queue_order.put(found)
        else:
            self.queue_order.drop(uid)
            self.rejected[uid] = found

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
    """Listener of the watch of namespaces, for the pods that wait in them. It must come after the listener by which
    pods are checked."""

    def __init__(self, pods: WaitingPods) -> None:
        self._pods = pods
        self._policies: dict[str, HashPolicy] = {}

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {raw["metadata"]["name"]: hash_policy_of(raw) for raw in objects.values()}
        gone = self._policies.keys() - there.keys()
        self._pods.mark_for_recheck(
            gone | {name for name, policy in there.items() if self._policies.get(name) != policy}
        )
        self._policies = there

    def changed(self, raw: Raw) -> None:
        name, policy = raw["metadata"]["name"], hash_policy_of(raw)
        if self._policies.get(name) != policy:
            self._policies[name] = policy
            self._pods.mark_for_recheck({name})

    def deleted(self, raw: Raw) -> None:
        if self._policies.pop(raw["metadata"]["name"], None) is not None:
            self._pods.mark_for_recheck({raw["metadata"]["name"]})


NOT_OURS = Deny(Reason.FORGED, "the pod was not put into the queue by gpuwarden")


def is_waiting(raw: Raw) -> bool:
    """Whether only our gate holds the pod back. Cheap, because it runs for every pod."""
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
