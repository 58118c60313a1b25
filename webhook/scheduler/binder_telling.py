"""What users hear of pods that wait for a node: events and the condition `PodScheduled`. Nothing waits for it."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

import structlog

from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.kube.events import Events, Subject
from webhook.runtime.clock import Clock
from webhook.scheduler.binder_view import Waiter
from webhook.scheduler.binder_wish import Outcome

log = structlog.get_logger(__name__)

# A pod's event says something else no sooner than this after the last, and the same again after the longer while.
QUIET, SAME_AGAIN = timedelta(seconds=3), timedelta(minutes=30)
MAX_WAITING = 2_000
WRITERS = 4


class Conditions(Protocol):
    """Can write what a pod says of itself."""

    async def unscheduled(self, pod: PodIdentity, version: str, message: str, at: str) -> bool:
        """It has no node, and why. Whether that is said now; whatever becomes of it, nothing is raised."""


class Told:
    """Tells by events, conditions and counts."""

    def __init__(self, events: Events, conditions: Conditions, count: Callable[[str], None], clock: Clock) -> None:
        self._events = events
        self._conditions = conditions
        self._count = count
        self._clock = clock
        # The last word on each pod: what it replaces need not be written any more.
        self._waiting: dict[str, tuple[Waiter, str, datetime]] = {}
        self._news = asyncio.Event()

    def waits(self, waiter: Waiter, why: str, outcome: Outcome | None = None) -> None:
        now, is_new = self._clock(), why != waiter.told
        if waiter.told_at is not None and now < waiter.told_at + (QUIET if is_new else SAME_AGAIN):
            if is_new:
                waiter.retry_at = waiter.told_at + QUIET
            else:
                self._show(waiter, why, now)
            return
        waiter.told, waiter.told_at = why, now
        if outcome is not None:
            self._count(outcome)
        self._events.record(Subject.of_pod(waiter.identity), Reason.FAILED_SCHEDULING, why)
        self._show(waiter, why, now)

    def _show(self, waiter: Waiter, why: str, now: datetime) -> None:
        """In its condition, until that says so: what could not be written is tried again when the pod is looked at."""
        is_over = waiter.shown == why or len(self._waiting) >= MAX_WAITING
        if is_over or (waiter.shown_at is not None and now < waiter.shown_at + QUIET):
            return
        self._waiting[waiter.identity.uid] = (waiter, why, now)
        self._news.set()

    def tried(self, waiter: Waiter, node: str, outcome: Outcome) -> None:
        self._count(outcome)
        pod = waiter.identity
        if outcome is Outcome.BOUND:
            self._waiting.pop(pod.uid, None)
            log.info("pod bound", namespace=pod.namespace, name=pod.name, node=node)
            said = f"put {pod.namespace}/{pod.name} on {node}"
            self._events.record(Subject.of_pod(pod), Reason.SCHEDULED, said, is_warning=False)
        else:
            log.info("pod not bound", namespace=pod.namespace, name=pod.name, node=node, outcome=outcome)

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as writers:
            for _ in range(WRITERS):
                writers.create_task(self._write())

    async def _write(self) -> None:
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            waiter, why, at = self._waiting.pop(next(iter(self._waiting)))
            if not waiter.is_on_its_way:
                waiter.shown_at, stamp = self._clock(), at.strftime("%Y-%m-%dT%H:%M:%SZ")
                if await self._conditions.unscheduled(waiter.identity, waiter.version, why, stamp):
                    waiter.shown = why
