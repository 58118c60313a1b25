"""Reports why pods wait whose GPUs kube-scheduler chooses. Its own message names no hash and no evidence."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from attrs import define, field

from webhook.core.check import identity_of
from webhook.core.claim import Claim, recorded_claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny
from webhook.kube.events import Events, Subject
from webhook.runtime.clock import Clock

# kube-scheduler may need this long.
FIRST_AFTER: Final = timedelta(seconds=5)
AGAIN_AFTER: Final = timedelta(minutes=1)
# Pods explained in one pass.
BATCH_SIZE: Final = 50


@define(eq=False, repr=False)
class UnplacedPods:
    """Listener of the watch of pods. The elected leader reports in `step`."""

    _fleet: Fleet
    _policy: EvidencePolicy
    _events: Events
    _clock: Clock
    # The pods without a node, and when each is explained next.
    _waiting: dict[str, tuple[PodIdentity, Claim]] = field(factory=dict, init=False)
    _due: dict[str, datetime] = field(factory=dict, init=False)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for uid in self._waiting.keys() - {str(raw["metadata"].get("uid")) for raw in objects.values()}:
            self._forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid, found = str(raw["metadata"].get("uid")), unplaced(raw)
        if found is None:
            self._forget(uid)
        else:
            self._waiting[uid] = found
            self._due.setdefault(uid, self._clock() + FIRST_AFTER)

    def deleted(self, raw: Raw) -> None:
        self._forget(str(raw["metadata"].get("uid")))

    def _forget(self, uid: str) -> None:
        self._waiting.pop(uid, None)
        self._due.pop(uid, None)

    async def step(self) -> None:
        now = self._clock()
        due = [uid for uid, moment in self._due.items() if moment <= now][:BATCH_SIZE]
        if due:
            self._fleet.advance(now)
        for uid in due:
            # To the end, so that all get their turn.
            del self._due[uid]
            self._due[uid] = now + AGAIN_AFTER
            pod, claim = self._waiting[uid]
            why = decide(claim, self._fleet, self._policy, most=1)
            if isinstance(why, Deny):
                self._events.record(Subject.of_pod(pod), why.reason, f"waits: {why.sentence}")


def unplaced(raw: Raw) -> tuple[PodIdentity, Claim] | None:
    """The pod and its claim; None if it is on a node, is being deleted, or waits for something else."""
    try:
        pod = Pod.parse(raw)
        claim = recorded_claim(pod)
    except InvalidPodError:
        return None
    if claim is None or not claim.is_left_to_scheduler:
        return None
    is_leaving = raw["metadata"].get("deletionTimestamp") is not None
    if pod.body.node_name or is_leaving or raw["spec"].get("schedulingGates"):
        return None
    return identity_of(pod), claim
