"""Answers the admission checks of Workloads: Ready if all pods of the Workload could have their GPUs now.

Nothing is reserved. Kueue starts the job after the answer, and its pods reserve as all pods do. What a Workload was
told Ready for counts as taken until its pods have reserved it, for a minute at most.
"""

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Protocol

import structlog
from attrs import define, field, frozen

from webhook.admission.kueue.gangs import Gang, GangReader, GangRefusal
from webhook.admission.kueue.promises import Promise, Promises
from webhook.admission.kueue.workload import AdmissionCheck, CheckPhase, CheckWire, Workload
from webhook.admission.kueue.workloads import PROMISED_FOR, Workloads
from webhook.core.backfill import queued_ahead
from webhook.core.decide import EvidencePolicy
from webhook.core.errors import GpuwardenError
from webhook.core.fleet import Fleet
from webhook.core.gang import TrialHolds, trial
from webhook.core.queue_order import QueueOrder
from webhook.core.raw import Raw
from webhook.core.verdict import Deny
from webhook.kube.view import ObjectView
from webhook.ledger import Ledger
from webhook.ledger.pending import too_many_orphans
from webhook.runtime.backoff import Backoff, Retries
from webhook.runtime.clock import Clock
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

# The most that one pass does, so that the process's other work is not held up: seconds for decisions, and Workloads.
BUDGET = 0.5
AT_A_TIME = 200
AT_ONCE = 16
# A Workload that could not be served is decided again after this, even if the fleet has not changed.
DECIDED_AFTER = timedelta(seconds=5)
# A changed message is written at most this often.
WRITTEN_AFTER = timedelta(seconds=5)
# How long Kueue waits before it tries a Workload again that gave its quota back.
REQUEUED_AFTER = Backoff(timedelta(seconds=10), timedelta(seconds=60))
# Between two tries of a write.
WRITE_BACKOFF = Backoff(timedelta(seconds=1), timedelta(seconds=30))
# The schema allows 32,768 characters, and people read the message in a terminal.
MAX_MESSAGE = 2000

OF_PODS = "the pods are created before this check: gpuwarden judges them then"


class CheckNotWrittenError(GpuwardenError):
    """The status was not written; the text says why."""


class WorkloadChangedError(CheckNotWrittenError):
    """The Workload has changed since it was decided on."""


def cut(message: str) -> str:
    return message[:MAX_MESSAGE]


@frozen
class CheckAnswer:
    """The state of a check, with its message."""

    state: CheckPhase
    message: str = field(converter=cut)
    requeue_after: timedelta | None = None


class CheckWriter(Protocol):
    """Writes the status of Kueue's objects. Both methods raise CheckNotWrittenError and return the written object."""

    async def answer(self, workload: Workload, checks: Sequence[CheckWire], answer: CheckAnswer, now: datetime) -> Raw:
        """Answers these checks. Raises WorkloadChangedError."""

    async def activate(self, check: AdmissionCheck, now: datetime) -> Raw:
        """Writes that the AdmissionCheck has a controller."""


@define
class LastDecision:
    """The state that a Workload was last decided on."""

    version: str
    fleet_changes: int
    at: datetime


async def nothing_to_list(workloads: Workloads) -> bool:
    return True


@define(eq=False, repr=False)
class KueueChecks:
    """One pass for each call of `step`."""

    workloads: Workloads
    gangs: GangReader
    _ledger: Ledger
    _fleet: Fleet
    _policy: EvidencePolicy
    _writer: CheckWriter
    _clock: Clock
    # How long a Workload keeps its quota while it cannot be served.
    _wait: timedelta = field(default=timedelta(seconds=30), kw_only=True)
    _is_current: Callable[[], bool] = field(default=lambda: True, kw_only=True)
    # Reads Workloads from the API server and returns whether it could.
    _list_again: Callable[[Workloads], Awaitable[bool]] = field(default=nothing_to_list, kw_only=True)
    _queue_order: QueueOrder = field(factory=QueueOrder, kw_only=True)
    _orphans_per_namespace: int = field(default=0, kw_only=True)
    _timer: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    checks: ObjectView[AdmissionCheck] = field(init=False)
    _promises: Promises = field(factory=Promises, init=False)
    # By uid of the Workload.
    _decided: dict[str, LastDecision] = field(factory=dict, init=False)
    _reported: dict[str, datetime] = field(factory=dict, init=False)
    # Failed writes, by uid of the Workload or name of the AdmissionCheck.
    _failed: Retries = field(factory=partial(Retries, WRITE_BACKOFF), init=False)
    # Where the next pass starts, if this one had no time for all: a Workload that nothing fits must not hold up others.
    _next: str | None = field(default=None, init=False)
    _is_up_to_date: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.checks = ObjectView(AdmissionCheck.of)

    def begin(self) -> None:
        """Called when this process is elected: the watch may not show what the last leader has answered."""
        self._is_up_to_date = False

    async def step(self) -> None:
        """One pass. A failed write is tried again after a pause."""
        if not self._is_current():
            self._is_up_to_date = False
            return
        ours = self._ours()
        if not ours:
            return
        self._is_up_to_date = self._is_up_to_date or await self._list_again(self.workloads)
        if not self._is_up_to_date:
            return
        for one in ours.values():
            await self._activate(one)
        known = {one.uid: one for one in self.workloads.all() if not ours.keys().isdisjoint(one.checks)}
        self._retain({*known, *ours})
        pending = {uid: one for uid, one in known.items() if checks_in(one, ours, CheckPhase.PENDING)}
        await self._keep_promises({uid: one for uid, one in known.items() if uid not in pending}, ours)
        await self._answer_all(pending.values(), ours)

    def _retain(self, keys: Collection[str]) -> None:
        self._decided = {key: one for key, one in self._decided.items() if key in keys}
        self._reported = {key: one for key, one in self._reported.items() if key in keys}
        self._failed.retain(keys)

    # AdmissionChecks.

    def _ours(self) -> dict[str, AdmissionCheck]:
        found = {name: self.checks.get(name) for name in self.checks.names()}
        return {name: one for name, one in found.items() if one is not None and one.is_ours}

    async def _activate(self, one: AdmissionCheck) -> None:
        if one.is_active or not self._failed.is_due(one.name, self._clock()):
            return
        try:
            self.checks.changed(await self._writer.activate(one, self._clock()))
        except CheckNotWrittenError as exc:
            self._failed.postpone(one.name, self._clock())
            log.warning("AdmissionCheck not activated", name=one.name, problem=str(exc))

    # Promises.

    async def _keep_promises(self, answered: dict[str, Workload], ours: Collection[str]) -> None:
        """Drops promises that are kept or too old, and restores those of an earlier leader."""
        now = self._clock()
        self._promises.retain(answered.keys(), now)
        for uid, one in answered.items():
            told = [found.last_transition_time for found in checks_in(one, ours, CheckPhase.READY)]
            since = max((moment for moment in told if moment is not None), default=None)
            if uid in self._promises or one.is_of_pods or since is None or since + PROMISED_FOR <= now:
                continue
            gang = await self.gangs.gang(one)
            if isinstance(gang, tuple):
                self._promises.put(uid, Promise(one.namespace, gang, since, is_restored=True))
        self._promises.see(self._ledger.reservations())

    # Answers.

    async def _answer_all(self, pending: Iterable[Workload], ours: Collection[str]) -> None:
        now = self._clock()
        self._fleet.advance(now)
        due = [one for one in pending if self._is_due(one, now) and self._failed.is_due(one.uid, now)]
        due.sort(key=lambda one: (-one.priority, one.since, one.key))
        first = next((place for place, one in enumerate(due) if one.uid == self._next), 0)
        due = [*due[first:], *due[:first]]
        read = [(one, await self.gangs.gang(one)) for one in due[:AT_A_TIME]]
        gangs = [(one, gang) for one, gang in read if gang is not None]
        answers = self._decide(gangs) if gangs else []
        left = [*(one for one, _ in gangs[len(answers) :]), *due[AT_A_TIME:]]
        self._next = left[0].uid if left else None
        news = [(one, answer) for one, answer in answers if self._is_news(one, ours, answer)]
        await run_concurrently((self._write(one, ours, answer) for one, answer in news), AT_ONCE)

    def _is_due(self, one: Workload, now: datetime) -> bool:
        """Whether the last decision may be outdated."""
        last = self._decided.get(one.uid)
        if last is None or (last.version, last.fleet_changes) != (one.version, self._fleet.changes):
            return True
        return now - last.at >= DECIDED_AFTER or one.since + self._wait <= now

    def _decide(self, gangs: Sequence[tuple[Workload, Gang | GangRefusal]]) -> list[tuple[Workload, CheckAnswer]]:
        """Awaits nothing: meanwhile the fleet has trial holds. Stops when the time runs out."""
        until, changes, now = self._timer() + BUDGET, self._fleet.changes, self._clock()
        answers: list[tuple[Workload, CheckAnswer]] = []
        with trial(self._fleet, self._policy, now) as holds:
            holds.place_possible(self._promises.open())
            for one, gang in gangs:
                if answers and self._timer() >= until:
                    break
                answers.append((one, self._answer(one, gang, holds)))
                self._decided[one.uid] = LastDecision(one.version, changes, now)
        return answers

    def _answer(self, one: Workload, gang: Gang | GangRefusal, holds: TrialHolds) -> CheckAnswer:
        if one.is_of_pods:
            return CheckAnswer(CheckPhase.READY, OF_PODS)
        if isinstance(gang, GangRefusal):
            return CheckAnswer(CheckPhase.REJECTED, gang.why) if gang.is_final else self._unavailable(one, gang.why)
        held_back = self._held_back(one, gang)
        if held_back is not None:
            return self._unavailable(one, held_back.sentence)
        unplaced = holds.place_all(gang)
        if unplaced is not None:
            return self._unavailable(one, unplaced.message)
        self._promises.put(one.uid, Promise(one.namespace, gang, self._clock()))
        return CheckAnswer(CheckPhase.READY, available(gang))

    def _held_back(self, one: Workload, gang: Gang) -> Deny | None:
        """Why the pods would not be served although devices are free."""
        limit = self._orphans_per_namespace
        for part in gang:
            denied = too_many_orphans(self._ledger.orphaned, one.namespace, part.gpus, limit)
            denied = denied or queued_ahead(part.claim, self._queue_order, self._fleet, self._policy)
            if denied is not None:
                return denied
        return None

    def _unavailable(self, one: Workload, why: str) -> CheckAnswer:
        """The Workload keeps its quota for some time. Then it gives the quota back, so that others can have it."""
        if self._clock() - one.since < self._wait:
            return CheckAnswer(CheckPhase.PENDING, why)
        pending = checks_in(one, self._ours(), CheckPhase.PENDING)
        retries = max((found.retry_count or 0 for found in pending), default=0)
        return CheckAnswer(CheckPhase.RETRY, why, REQUEUED_AFTER.pause(retries + 1))

    def _is_news(self, one: Workload, ours: Collection[str], answer: CheckAnswer) -> bool:
        if answer.state is not CheckPhase.PENDING:
            return True
        if all(found.message == answer.message for found in checks_in(one, ours, CheckPhase.PENDING)):
            return False
        last = self._reported.get(one.uid)
        return last is None or self._clock() - last >= WRITTEN_AFTER

    async def _write(self, one: Workload, ours: Collection[str], answer: CheckAnswer) -> None:
        now = self._clock()
        try:
            written = await self._writer.answer(one, checks_in(one, ours, CheckPhase.PENDING), answer, now)
        except CheckNotWrittenError as exc:
            self._decided.pop(one.uid, None)
            if not isinstance(exc, WorkloadChangedError):
                self._failed.postpone(one.uid, self._clock())
                log.warning("admission check not answered", workload=one.key, problem=str(exc))
            return
        self._failed.forget(one.uid)
        self._reported[one.uid] = now
        self.workloads.changed(written)
        log.info("admission check answered", workload=one.key, state=answer.state.value, message=answer.message)


def checks_in(one: Workload, ours: Collection[str], state: CheckPhase) -> list[CheckWire]:
    """Our checks of the Workload that are in this state."""
    return [found for name, found in one.checks.items() if name in ours and found.state == state]


def available(gang: Gang) -> str:
    """What the pods can have: `4 GPUs proven for sha256:aa can be had`."""
    if not gang:
        return "no pod asks for GPUs or a proven node"
    gpus = sum(part.gpus for part in gang)
    what = f"{gpus} GPU{'' if gpus == 1 else 's'}" if gpus else "a node"
    hashes = sorted({digest for part in gang for digest in part.claim.hashes})
    return f"{what}{' proven for ' + ' or '.join(hashes) if hashes else ''} can be had"
