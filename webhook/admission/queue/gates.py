"""Gates of pods whose turn has come: opened in one patch with all that a reservation means to the pod, tried again
after a pause where that fails."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Protocol

import structlog
from attrs import evolve

from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core import keys
from webhook.core.difference import Change
from webhook.core.dress import Allocation, DressRules, RawPod, changes, dressed
from webhook.core.errors import GpuwardenError
from webhook.core.queue_order import QueuedPod
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.kube.events import Events, Subject
from webhook.runtime.backoff import Backoff, Retry
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

Action = Callable[[], Awaitable[None]]

AT_ONCE = 16
# Between two tries at one gate: doubling, up to half a minute.
BACKOFF = Backoff(timedelta(seconds=1), timedelta(seconds=30))


class GateError(GpuwardenError):
    """Nothing can be done about the gate now; the text says why."""


class GateClient(Protocol):
    """What is done to pods that wait. All raise GateError; a pod that is gone is no mistake."""

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        """The whole JSON patch or nothing of it. Whether there still was a pod of that name."""

    async def say(self, pod: PodIdentity, why: str) -> None:
        """What it waits for, in its annotation."""

    async def is_shut(self, pod: PodIdentity) -> bool:
        """Whether this very pod is there and waits behind our gate, by a quorum read."""


class GateOpener:
    """Opens gates, and knows which could not be opened."""

    def __init__(self, pods: WaitingPods, gates: GateClient, rules: DressRules, events: Events, clock: Clock) -> None:
        self._pods = pods
        self._gates = gates
        self._rules = rules
        self._events = events
        self._clock = clock
        self._tries: dict[str, Retry] = {}

    def forget_all_but(self, uids: Collection[str]) -> None:
        for uid in self._tries.keys() - set(uids):
            del self._tries[uid]

    def is_to_wait(self, uid: str) -> bool:
        """Whether it failed a moment ago."""
        tries = self._tries.get(uid)
        return tries is not None and tries.not_before > self._clock()

    def leave(self, uid: str, pause: timedelta) -> None:
        """For so long, if its gate could not be opened."""
        tries = self._tries.get(uid)
        if tries is not None:
            tries.not_before = self._clock() + pause

    def try_later(self, uid: str) -> None:
        """It failed, and not by chance."""
        now = self._clock()
        self._tries.setdefault(uid, Retry(now)).postpone(now, BACKOFF)

    async def open(self, waiter: QueuedPod, outfit: Allocation) -> None:
        pod, raw, known = waiter.pod, self._pods.raws.get(waiter.pod.uid), self._pods.lines.get(waiter.pod.uid)
        if raw is None or known is None or known.claim != waiter.claim:
            return  # it is gone, and so will be what it holds; or has been changed meanwhile
        try:
            is_there = await self._gates.open(pod, opened(raw, outfit, self._rules))
        except GateError as exc:
            self.try_later(pod.uid)
            log.warning("gate not opened", namespace=pod.namespace, name=pod.name, problem=str(exc))
            return
        self._pods.forget(pod.uid, was_served=is_there)
        if is_there:
            text = f"{outfit.visible or 'proven'} on {outfit.nodes[0]}: the gate is open"
            self._events.record(Subject.of_pod(pod), Reason.GATE_OPENED, text, is_warning=False)


def opened(raw: RawPod, outfit: Allocation, rules: DressRules) -> list[Change]:
    """All that a reservation means to a gated pod, on the condition that the pod is as it was seen. Its containers were
    blinded when it was created; an older version left some as they were, and nobody can change them now."""
    meta: dict[str, Any] = raw["metadata"]
    gates = raw["spec"]["schedulingGates"]
    place = next(number for number, gate in enumerate(gates) if gate.get("name") == keys.QUEUE_GATE)
    return [
        {"op": "test", "path": "/metadata/uid", "value": meta["uid"]},
        {"op": "test", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
        {"op": "test", "path": f"/spec/schedulingGates/{place}/name", "value": keys.QUEUE_GATE},
        *changes(raw, dressed(raw, evolve(outfit, hides_gpus_everywhere=False), rules)),
    ]


async def some_at_once(actions: Sequence[Action]) -> None:
    """All of them, so many at a time."""
    waiting = iter(actions)

    async def work() -> None:
        for action in waiting:
            await action()

    await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(actions)))))
