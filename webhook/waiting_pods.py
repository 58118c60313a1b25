"""The pods that wait behind our gate, as a watch tells of them: in lines, and only those that we have dressed."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from webhook.core import check, keys
from webhook.core.claim import recorded_claim
from webhook.core.dress import DressRules
from webhook.core.errors import InvalidPodError
from webhook.core.lines import Lines, Waiter
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny
from webhook.namespaces import ClaimReading

Raw = dict[str, Any]

LONG_AGO = datetime.fromtimestamp(0, UTC)


def nobody_cares(uid: str) -> None:
    return None


class WaitingPods:
    """Hears of pods. A gate that anybody could have put on keeps its pod out of the lines for ever."""

    def __init__(
        self,
        claims: ClaimReading,
        rules: DressRules,
        *,
        lines: Lines | None = None,
        has_come: Callable[[str], None] = nobody_cares,
    ) -> None:
        self.lines = Lines() if lines is None else lines
        self.raws: dict[str, Raw] = {}
        self.misfits: dict[str, tuple[PodIdentity, Deny]] = {}
        self._claims = claims
        self._rules = rules
        self._has_come = has_come

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        there = {str(raw["metadata"].get("uid")) for raw in objects.values()}
        for uid in (self.lines.uids() | self.misfits.keys()) - there:
            self.forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        if not is_waiting(raw):
            self.forget(uid)
            return
        is_new = uid not in self.lines and uid not in self.misfits
        found = self._waiter(raw)
        if isinstance(found, Waiter):
            self.misfits.pop(uid, None)
            self.lines.put(found)
            self.raws[uid] = raw
        else:
            self.forget(uid)
            self.misfits[uid] = found
        if is_new:
            self._has_come(uid)

    def deleted(self, raw: Raw) -> None:
        self.forget(str(raw["metadata"].get("uid")))

    def forget(self, uid: str) -> None:
        if uid in self.lines or uid in self.misfits:
            self.lines.drop(uid)
            self.raws.pop(uid, None)
            self.misfits.pop(uid, None)

    def _waiter(self, raw: Raw) -> Waiter | tuple[PodIdentity, Deny]:
        meta = raw["metadata"]
        identity = PodIdentity(meta.get("namespace") or "", meta["name"], str(meta.get("uid")))
        try:
            pod = Pod.parse(raw)
            claim = recorded_claim(pod)
            if claim is None:
                return identity, check.gate_alone(pod) or NOT_OURS
            rules = self._claims.known_within(identity.namespace)
            refused = check.waits_as_dressed(raw, pod, claim, self._rules, rules)
        except InvalidPodError as exc:
            return identity, Deny(Reason.INVALID_POD, "; ".join(exc.mistakes[:20]))
        if refused is not None:
            return identity, refused
        return Waiter(identity, pod.meta.creation_timestamp or LONG_AGO, claim)


NOT_OURS = Deny(Reason.FORGED, "the pod is not as a pod waits in the queue")


def is_waiting(raw: Raw) -> bool:
    """Whether our gate is all that keeps it; cheap, for it is asked of every pod."""
    spec = raw.get("spec") or {}
    gates = spec.get("schedulingGates")
    if not gates or spec.get("nodeName") or raw["metadata"].get("deletionTimestamp"):
        return False
    return any(gate.get("name") == keys.QUEUE_GATE for gate in gates)
