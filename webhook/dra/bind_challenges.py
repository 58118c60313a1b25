"""Answers the claims whose pods are bound only after a fresh challenge.

The devices of such a claim have a binding condition: the scheduler allocates them, and binds the pod when the status of
the claim says that the condition is true. It is, once the node has answered a challenge that is newer than the
allocation. Without an answer in time the scheduler takes the devices back and looks for others, so the node offers none
to such claims for a while. See docs/decisions/0037.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final, Protocol

import msgspec
import structlog
from attrs import define, evolve, field, frozen

from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.proof_devices import hash_attribute
from webhook.core.raw import Raw
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.resource_claims import AwaitedChallenge, awaited_challenge, with_answer
from webhook.kube.resource_slices import CHALLENGE_FAILED, CHALLENGED, stamp
from webhook.kube.watch import key_of
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

AT_ONCE: Final = 16
# The scheduler reads the condition 5 s after the allocation, and every 5 s from then on.
PATIENCE: Final = timedelta(seconds=4)
# How long the devices of a node that did not answer are closed to such claims, unless it answers a challenge before.
AVOIDED: Final = timedelta(minutes=1)


class ClaimStatusWriter(Protocol):
    """Writes the status of claims."""

    async def patch_devices(self, raw: Raw, devices: list[Raw]) -> None:
        """Replaces the status of the devices if the claim is still at this version. Raises ApiUnavailableError or
        ApiRefusesError."""


@frozen
class Answer:
    """What the status of a claim says: one condition, which is true."""

    condition: str
    reason: str
    message: str

    def as_condition(self, now: datetime) -> Raw:
        said = {"reason": self.reason, "message": self.message, "lastTransitionTime": stamp(now)}
        return {"type": self.condition, "status": "True", **said}


@frozen
class Waiting:
    """A claim that waits for an answer. `seen` is when this process saw it, or was elected after that."""

    raw: Raw
    awaited: AwaitedChallenge
    seen: datetime


@define(eq=False, repr=False)
class BindChallenges:
    """Listener of the watch of claims. The elected leader answers them in `step`."""

    _writer: ClaimStatusWriter
    _fleet: Fleet
    _clock: Clock
    _is_current: Callable[[], bool]
    _waiting: dict[str, Waiting] = field(factory=dict, init=False)
    # When nodes did not answer in time.
    _silent_since: dict[str, datetime] = field(factory=dict, init=False)
    _changed: set[str] = field(factory=set, init=False)

    # The listener of the watch.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for key in self._waiting.keys() - objects.keys():
            del self._waiting[key]
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        key = key_of(raw)
        before = self._waiting.pop(key, None)
        try:
            awaited = awaited_challenge(raw)
        except msgspec.ValidationError as exc:
            log.warning("ResourceClaim cannot be read, its challenge is not answered", claim=key, problem=str(exc))
            return
        if awaited is not None:
            is_known = before is not None and before.awaited == awaited
            seen = before.seen if before is not None and is_known else self._clock()
            self._waiting[key] = Waiting(raw, awaited, seen)
            self._changed.add(awaited.node)

    def deleted(self, raw: Raw) -> None:
        self._waiting.pop(key_of(raw), None)

    # For the slices of the nodes.

    def asked_after(self, node: str) -> datetime | None:
        """The node has to answer a challenge that is newer than this; None if no claim waits for it."""
        return max((one.awaited.since for one in self._waiting.values() if one.awaited.node == node), default=None)

    def is_silent(self, node: str) -> bool:
        """Whether the node did not answer in time a short while ago, and has not since."""
        since = self._silent_since.get(node)
        if since is None:
            return False
        evidence = self._fleet.fresh_evidence(node)
        if self._clock() - since < AVOIDED and not is_answered(evidence, since):
            return True
        del self._silent_since[node]
        return False

    def take_changes(self) -> set[str]:
        """The nodes for which this may have changed since the last call."""
        changed, self._changed = self._changed, {*self._silent_since}
        return changed

    # Answers.

    def begin(self) -> None:
        """This process was elected: nodes have not been asked while there was no leader."""
        now = self._clock()
        self._waiting = {key: evolve(one, seen=now) for key, one in self._waiting.items()}

    async def step(self) -> None:
        """Answers what can be answered now. A write that fails is tried again in the next pass."""
        if not self._is_current():
            return
        now, limit = self._clock(), asyncio.Semaphore(AT_ONCE)
        self._fleet.advance(now)
        answers = [(key, one, self._answer(one, now)) for key, one in self._waiting.items()]
        await asyncio.gather(*(self._write(key, one, answer, now, limit) for key, one, answer in answers if answer))

    def _answer(self, one: Waiting, now: datetime) -> Answer | None:
        """None if it is not decided yet."""
        node, evidence = one.awaited.node, self._fleet.fresh_evidence(one.awaited.node)
        if evidence is None or hash_attribute(evidence.hash) != one.awaited.hash:
            return Answer(CHALLENGE_FAILED, "NotProven", f"node {node} is not proven for the hash any more")
        if is_answered(evidence, one.awaited.since):
            return Answer(CHALLENGED, "ChallengeAnswered", f"node {node} has answered a challenge")
        if now - one.seen < PATIENCE:
            return None
        if node not in self._silent_since:
            log.warning("node did not answer a challenge", node=node)
        self._silent_since[node] = now
        self._changed.add(node)
        return Answer(CHALLENGE_FAILED, "NoAnswer", f"node {node} did not answer a challenge")

    async def _write(self, key: str, one: Waiting, answer: Answer, now: datetime, limit: asyncio.Semaphore) -> None:
        async with limit:
            try:
                await self._writer.patch_devices(one.raw, with_answer(one.raw, one.awaited, answer.as_condition(now)))
            except (ApiUnavailableError, ApiRefusesError) as exc:
                log.warning("claim not answered", claim=key, problem=str(exc))
                return
        if self._waiting.get(key) is one:
            del self._waiting[key]
        log.info("claim answered", claim=key, node=one.awaited.node, reason=answer.reason)


def is_answered(evidence: Evidence | None, since: datetime) -> bool:
    """Whether the evidence is the answer to a challenge that was issued after this moment."""
    return evidence is not None and evidence.challenged is not None and evidence.challenged > since
