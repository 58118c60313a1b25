"""Kubernetes Events about pods and nodes, for `kubectl describe`. Recording one never blocks."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import frozen
from kubernetes.aio import client

from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.kube.requests import REQUEST_ERRORS, request_json
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)


EVENTS_PATH = "/api/v1/namespaces/{namespace}/events"
COMPONENT = "gpuwarden"
# An equal event is repeated after this; the API server deletes events after an hour.
QUIET = timedelta(minutes=30)
MAX_REMEMBERED = 10_000
MAX_WAITING = 1_000
# The API server's limit.
MAX_MESSAGE = 1024
REQUEST_TIMEOUT = 5.0
CLUSTER_NAMESPACE = "default"  # required for events about cluster-scoped objects


@frozen
class Subject:
    """The object that an event is about."""

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
        # As kubelet does: `kubectl describe node` looks for events whose uid is the node's name.
        return cls("Node", name, uid=name)


class Events(Protocol):
    """Records events, without waiting and without errors."""

    def record(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None: ...


@frozen
class QueuedEvent:
    subject: Subject
    reason: Reason
    message: str
    is_warning: bool
    at: datetime


class ApiEvents:
    """Writes events to the API server in order. Equal events are written once per QUIET."""

    def __init__(self, api: client.ApiClient, clock: Clock, count: Callable[[Reason], None]) -> None:
        self._api = api
        self._clock = clock
        self._count = count
        self._waiting: asyncio.Queue[QueuedEvent] = asyncio.Queue(MAX_WAITING)
        self._last_recorded: dict[tuple[Subject, Reason, str], datetime] = {}

    def record(self, subject: Subject, reason: Reason, message: str, *, is_warning: bool = True) -> None:
        now = self._clock()
        if not self._is_due((subject, reason, message), now):
            return
        self._count(reason)
        write = log.warning if is_warning else log.info
        write(
            "event", kind=subject.kind, namespace=subject.namespace, name=subject.name, reason=reason, message=message
        )
        if not self._waiting.full():
            self._waiting.put_nowait(QueuedEvent(subject, reason, message, is_warning, now))

    def _is_due(self, key: tuple[Subject, Reason, str], now: datetime) -> bool:
        last = self._last_recorded.get(key)
        if last is not None and now - last < QUIET:
            return False
        if len(self._last_recorded) >= MAX_REMEMBERED:
            self._last_recorded.clear()
        self._last_recorded[key] = now
        return True

    async def run(self) -> None:
        """Runs until cancelled. Events that cannot be written are only in the log."""
        while True:
            one = await self._waiting.get()
            names = {"namespace": one.subject.namespace or CLUSTER_NAMESPACE}
            try:
                status, _ = await request_json(
                    self._api, "POST", EVENTS_PATH, names, event_of(one), seconds=REQUEST_TIMEOUT
                )
            except REQUEST_ERRORS as exc:
                log.warning("event lost", reason=one.reason, error=type(exc).__name__)
            else:
                if status >= 400:
                    log.warning("event lost", reason=one.reason, error=f"the API server answered {status}")


def event_of(one: QueuedEvent) -> Raw:
    subject = one.subject
    involved = {
        "apiVersion": subject.api_version,
        "kind": subject.kind,
        "name": subject.name,
        "namespace": subject.namespace,
        "uid": subject.uid,
    }
    return {
        "metadata": {"generateName": f"{subject.name[:200]}."},
        "involvedObject": {key: value for key, value in involved.items() if value},
        "reason": one.reason.value,
        "message": one.message[:MAX_MESSAGE],
        "type": "Warning" if one.is_warning else "Normal",
        "firstTimestamp": one.at.isoformat(),
        "lastTimestamp": one.at.isoformat(),
        "count": 1,
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
    }
