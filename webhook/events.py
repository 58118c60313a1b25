"""What somebody reads under `kubectl describe`: what became of a pod or a node, and why. Nothing waits for it."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import frozen
from kubernetes.aio import client

from webhook.calls import LOST
from webhook.clock import Clock
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity

log = structlog.get_logger(__name__)

COMPONENT = "gpuwarden"
# The same of the same is said again after this: the API server forgets events after an hour.
QUIET = timedelta(minutes=30)
MAX_REMEMBERED = 10_000
MAX_WAITING = 1_000
# The API server takes no longer ones.
MAX_MESSAGE = 1024
REQUEST_TIMEOUT = 5.0
CLUSTER_NAMESPACE = "default"  # where events about objects without a namespace have to live


@frozen
class Subject:
    """The object that something happened to."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"

    @classmethod
    def of_pod(cls, pod: PodIdentity) -> "Subject":
        return cls("Pod", pod.name, pod.namespace, pod.uid)

    @classmethod
    def of_node(cls, name: str) -> "Subject":
        # kubelet's way, which `kubectl describe node` looks for: the name stands for the uid.
        return cls("Node", name, uid=name)


class Events(Protocol):
    """Takes what happened, at once and whatever comes of it."""

    def tell(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None: ...


@frozen
class Happening:
    subject: Subject
    reason: Reason
    message: str
    is_warning: bool
    at: datetime


class ApiEvents:
    """Events in the API server, in the order told, each once in a while."""

    def __init__(self, api: client.ApiClient, clock: Clock, count: Callable[[Reason], None]) -> None:
        self._events = client.CoreV1Api(api)
        self._clock = clock
        self._count = count
        self._waiting: asyncio.Queue[Happening] = asyncio.Queue(MAX_WAITING)
        self._told: dict[tuple[Subject, Reason, str], datetime] = {}

    def tell(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None:
        now = self._clock()
        if not self._is_news((subject, reason, message), now):
            return
        self._count(reason)
        write = log.warning if is_warning else log.info
        write(
            "event", kind=subject.kind, namespace=subject.namespace, name=subject.name, reason=reason, message=message
        )
        if not self._waiting.full():
            self._waiting.put_nowait(Happening(subject, reason, message, is_warning, now))

    def _is_news(self, what: tuple[Subject, Reason, str], now: datetime) -> bool:
        told = self._told.get(what)
        if told is not None and now - told < QUIET:
            return False
        if len(self._told) >= MAX_REMEMBERED:
            self._told.clear()
        self._told[what] = now
        return True

    async def run(self) -> None:
        """For ever. What the API server does not take is lost: the log has it."""
        while True:
            one = await self._waiting.get()
            try:
                await self._events.create_namespaced_event(
                    one.subject.namespace or CLUSTER_NAMESPACE, event_of(one), _request_timeout=REQUEST_TIMEOUT
                )
            except LOST as exc:
                log.warning("event lost", reason=one.reason, error=type(exc).__name__)


def event_of(one: Happening) -> client.CoreV1Event:
    subject = one.subject
    return client.CoreV1Event(
        metadata=client.V1ObjectMeta(generate_name=f"{subject.name[:200]}."),
        involved_object=client.V1ObjectReference(
            api_version=subject.api_version,
            kind=subject.kind,
            name=subject.name,
            namespace=subject.namespace or None,
            uid=subject.uid or None,
        ),
        reason=one.reason.value,
        message=one.message[:MAX_MESSAGE],
        type="Warning" if one.is_warning else "Normal",
        first_timestamp=one.at,
        last_timestamp=one.at,
        count=1,
        source=client.V1EventSource(component=COMPONENT),
        reporting_component=COMPONENT,
    )
