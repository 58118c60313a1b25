"""The Workloads that have their quota, by the watch of Workloads."""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

import structlog
from attrs import define, field

from webhook.admission.kueue.workload import CheckPhase, UnreadableObjectError, Workload
from webhook.core.raw import Raw
from webhook.kube.view import version_of
from webhook.kube.watch import key_of
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# How long the GPUs of a Workload that was told Ready count as taken while its pods are not there.
PROMISED_FOR = timedelta(seconds=60)


def ignore_pending() -> None:
    return None


@define(eq=False, repr=False)
class Workloads:
    """Listener of the watch of Workloads. Keeps those whose checks are pending or were answered a short time ago."""

    _clock: Clock
    _on_pending: Callable[[], None] = ignore_pending
    _known: dict[str, Workload] = field(factory=dict, init=False)
    _versions: dict[str, int] = field(factory=dict, init=False)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._known.clear()
        self._versions.clear()
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        """Called by the watch, and with the answers of our own writes, which the watch repeats later."""
        key = key_of(raw)
        if self._versions.get(key, -1) > version_of(raw):
            return
        self._versions[key] = version_of(raw)
        try:
            found = Workload.of(raw)
        except UnreadableObjectError as exc:
            log.warning("unreadable Workload", workload=key, problem=str(exc))
            found = None
        if found is None or not is_of_interest(found, self._clock()):
            self._known.pop(key, None)
            return
        self._known[key] = found
        if any(one.state == CheckPhase.PENDING for one in found.checks.values()):
            self._on_pending()

    def deleted(self, raw: Raw) -> None:
        self._known.pop(key_of(raw), None)
        self._versions.pop(key_of(raw), None)

    def all(self) -> Iterable[Workload]:
        """Those with a pending check, and those that were answered a short time ago."""
        now = self._clock()
        for one in list(self._known.values()):
            if not is_of_interest(one, now):
                del self._known[one.key]
        return self._known.values()


def is_of_interest(workload: Workload, now: datetime) -> bool:
    checks = workload.checks.values()
    return any(one.state == CheckPhase.PENDING for one in checks) or any(
        one.state == CheckPhase.READY
        and one.last_transition_time is not None
        and one.last_transition_time + PROMISED_FOR > now
        for one in checks
    )
