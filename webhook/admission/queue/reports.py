"""Reports to waiting pods why they wait, in an annotation and an Event, when the reason changes."""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice

import structlog

from webhook.admission.queue.gates import AT_ONCE, GateClient, GateError
from webhook.admission.queue.waiting_pods import WaitingPods
from webhook.core.queue_order import ClaimKind
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import Deny, plain
from webhook.kube.events import Events, Subject
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

# The most that one pass does, so that the process's other work is not held up: seconds and pods.
REPORT_BUDGET = 2.0
REPORTED_AT_A_TIME = 50
RETRIED_AT_A_TIME = 8
MAX_REASON = 900

# Why pods of a kind wait, by their number of GPUs.
Reasons = Mapping[ClaimKind, Mapping[int, Deny]]


class QueueReporter:
    """Remembers the last reason that was reported to each pod."""

    def __init__(self, pods: WaitingPods, gates: GateClient, events: Events) -> None:
        self._pods = pods
        self._gates = gates
        self._events = events
        self._reported: dict[str, Reason] = {}
        self._unwritten: dict[str, tuple[PodIdentity, Deny]] = {}
        """Reasons that could not be written into their pods."""

    def retain(self, uids: Collection[str]) -> None:
        for uid in self._reported.keys() - set(uids):
            del self._reported[uid]
        for uid in self._unwritten.keys() - set(uids):
            del self._unwritten[uid]

    async def report(self, why: Reasons, served: Collection[str]) -> None:
        """Reports changed reasons to some pods. The next pass goes on with the others."""
        for uid, (pod, refused) in islice(self._unreported_rejections(), REPORTED_AT_A_TIME):
            self._reported[uid] = refused.reason
            self._events.record(Subject.of_pod(pod), refused.reason, refused.sentence)
        unreported = list(islice(self._unreported(why, served), REPORTED_AT_A_TIME))
        unwritten = list(islice(self._still_unwritten({pod.uid for pod, _ in unreported}, served), RETRIED_AT_A_TIME))
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_BUDGET):
                reports = (self._report_one(*one) for one in unreported)
                retries = (self._write_reason(*one) for one in unwritten)
                await run_concurrently(chain(reports, retries), AT_ONCE)

    def _unreported_rejections(self) -> Iterator[tuple[str, tuple[PodIdentity, Deny]]]:
        return ((uid, one) for uid, one in self._pods.rejected.items() if self._reported.get(uid) is not one[1].reason)

    def _unreported(self, why: Reasons, served: Collection[str]) -> Iterator[tuple[PodIdentity, Deny]]:
        for kind, by_count in why.items():
            for head in self._pods.queue_order.heads(kind):
                refused = by_count.get(head.claim.count)
                if refused is None:
                    continue
                for waiter in self._pods.queue_order.same_count_from(head):
                    uid = waiter.pod.uid
                    if self._reported.get(uid) is not refused.reason and uid not in served:
                        yield waiter.pod, refused

    def _still_unwritten(
        self, reported_now: Collection[str], served: Collection[str]
    ) -> Iterator[tuple[PodIdentity, Deny]]:
        for uid, one in self._unwritten.items():
            if uid in self._pods.queue_order and uid not in reported_now and uid not in served:
                yield one

    async def _write_reason(self, pod: PodIdentity, refused: Deny) -> None:
        self._unwritten.pop(pod.uid, None)
        self._unwritten[pod.uid] = pod, refused  # to the end
        try:
            await self._gates.write_reason(pod, plain(refused.sentence, MAX_REASON))
        except GateError as exc:
            log.info("reason not written into the pod", namespace=pod.namespace, name=pod.name, problem=str(exc))
        else:
            self._unwritten.pop(pod.uid, None)

    async def _report_one(self, pod: PodIdentity, refused: Deny) -> None:
        await self._write_reason(pod, refused)
        self._reported[pod.uid] = refused.reason
        self._events.record(Subject.of_pod(pod), refused.reason, f"waits: {refused.sentence}")
