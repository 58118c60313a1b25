"""Who waits is told why, when that changes: in the pod, and by an event."""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice

import structlog

from webhook.admission.queue.gates import GateClient, GateError, some_at_once
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core.queue_order import ClaimKind
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny, plain
from webhook.kube.events import Events, Subject

log = structlog.get_logger(__name__)

# What one pass does: more would keep other work of the process waiting. In seconds, and in pods.
TELLING_BUDGET = 2.0
TOLD_AT_A_TIME = 50
SAID_AGAIN_AT_A_TIME = 8
MAX_SAID = 900

# Why those of a kind wait who want so many.
Reasons = Mapping[ClaimKind, Mapping[int, Deny]]


class QueueReporter:
    """Remembers what each pod was told last."""

    def __init__(self, pods: WaitingPods, gates: GateClient, events: Events) -> None:
        self._pods = pods
        self._gates = gates
        self._events = events
        self._told: dict[str, Reason] = {}
        self._unsaid: dict[str, tuple[PodIdentity, Deny]] = {}
        """What could not be written into pods."""

    def forget_all_but(self, uids: Collection[str]) -> None:
        for uid in self._told.keys() - set(uids):
            del self._told[uid]
        for uid in self._unsaid.keys() - set(uids):
            del self._unsaid[uid]

    async def tell(self, why: Reasons, served: Collection[str]) -> None:
        """Some of those for whom the reason has changed; the next pass goes on with the others."""
        for uid, (pod, refused) in islice(self._untold_misfits(), TOLD_AT_A_TIME):
            self._told[uid] = refused.reason
            self._events.record(Subject.of_pod(pod), refused.reason, refused.sentence)
        untold = list(islice(self._untold(why, served), TOLD_AT_A_TIME))
        unsaid = list(islice(self._still_unsaid({pod.uid for pod, _ in untold}, served), SAID_AGAIN_AT_A_TIME))
        with suppress(TimeoutError):
            async with asyncio.timeout(TELLING_BUDGET):
                await some_at_once(
                    [partial(self._tell_one, *one) for one in untold] + [partial(self._say, *one) for one in unsaid]
                )

    def _untold_misfits(self) -> Iterator[tuple[str, tuple[PodIdentity, Deny]]]:
        return ((uid, one) for uid, one in self._pods.misfits.items() if self._told.get(uid) is not one[1].reason)

    def _untold(self, why: Reasons, served: Collection[str]) -> Iterator[tuple[PodIdentity, Deny]]:
        for kind, by_count in why.items():
            for head in self._pods.lines.heads(kind):
                refused = by_count.get(head.claim.count)
                if refused is None:
                    continue
                for waiter in self._pods.lines.same_count_from(head):
                    uid = waiter.pod.uid
                    if self._told.get(uid) is not refused.reason and uid not in served:
                        yield waiter.pod, refused

    def _still_unsaid(self, told_now: Collection[str], served: Collection[str]) -> Iterator[tuple[PodIdentity, Deny]]:
        for uid, one in self._unsaid.items():
            if uid in self._pods.lines and uid not in told_now and uid not in served:
                yield one

    async def _say(self, pod: PodIdentity, refused: Deny) -> None:
        self._unsaid.pop(pod.uid, None)
        self._unsaid[pod.uid] = pod, refused  # behind the others
        try:
            await self._gates.say(pod, plain(refused.sentence, MAX_SAID))
        except GateError as exc:
            log.info("pod not told", namespace=pod.namespace, name=pod.name, problem=str(exc))
        else:
            self._unsaid.pop(pod.uid, None)

    async def _tell_one(self, pod: PodIdentity, refused: Deny) -> None:
        await self._say(pod, refused)
        self._told[pod.uid] = refused.reason
        self._events.record(Subject.of_pod(pod), refused.reason, f"waits: {refused.sentence}")
