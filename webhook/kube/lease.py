"""A Lease that elects one of several processes. The leader releases it only after its last write.

A process measures the age of the Lease with its own clock, from when it saw the Lease change. It trusts no other clock.
"""

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, Protocol

import structlog
from attrs import frozen

from webhook.core.raw import Raw
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
LEASE: Final = LEASES + "/{name}"


class LeaseClient(Protocol):
    async def call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None = None) -> Raw | None:
        """Raises ApiUnavailableError, ApiRefusesError."""


@frozen
class LeaseTerms:
    """Each duration is shorter than the previous one."""

    duration: timedelta
    renew_deadline: timedelta
    retry_period: timedelta


class Candidate:
    """One process in the election. `now` is a monotonic clock."""

    def __init__(
        self,
        calls: LeaseClient,
        namespace: str,
        name: str,
        pod: str,
        terms: LeaseTerms,
        clock: Clock,
        now: Callable[[], float],
    ) -> None:
        self.identity = f"{pod}_{uuid.uuid4()}"
        self._call = calls.call
        self._path_names = {"namespace": namespace, "name": name}
        self.terms = terms
        self._clock = clock
        self._now = now
        self._seen: tuple[str, float] = ("", 0.0)  # the Lease's version and when it was first seen
        self._renewed = float("-inf")

    @property
    def left(self) -> timedelta:
        """For how long no other process can take the Lease."""
        return timedelta(seconds=max(0.0, self._renewed + self.terms.duration.total_seconds() - self._now()))

    async def win(self) -> None:
        """Returns once this process is the leader."""
        logged = ""
        while True:
            try:
                if await self._take():
                    log.info("leading", identity=self.identity)
                    return
            except (ApiUnavailableError, ApiRefusesError) as exc:
                if str(exc) != logged:
                    log.warning("the Lease cannot be taken", problem=str(exc), **self._path_names)
                logged = str(exc)
            await asyncio.sleep(self.terms.retry_period.total_seconds())

    async def hold(self) -> None:
        """Returns once the Lease is lost: taken by another process, or not renewed in time."""
        deadline = self.terms.renew_deadline.total_seconds()
        while True:
            await asyncio.sleep(self.terms.retry_period.total_seconds())
            try:
                async with asyncio.timeout(max(0.0, self._renewed + deadline - self._now())):
                    if not await self._take():
                        log.error("the Lease was taken by another process", identity=self.identity)
                        self._renewed = float("-inf")
                        return
            except (ApiUnavailableError, ApiRefusesError, TimeoutError) as exc:
                log.warning("the Lease is not renewed", problem=str(exc) or "no answer")
            if self._now() - self._renewed >= deadline:
                log.error("the Lease was not renewed in time", identity=self.identity)
                return

    async def release(self) -> None:
        """Clears the holder, so that another process can take the Lease at once. If that fails, the Lease expires."""
        problem = "repeated conflicts"
        try:
            async with asyncio.timeout(self.terms.renew_deadline.total_seconds()):
                for _ in range(3):
                    if await self._try_release():
                        return
        except (ApiUnavailableError, ApiRefusesError, TimeoutError) as exc:
            problem = str(exc) or "no answer"
        log.warning("the Lease is not released", problem=problem)

    async def _try_release(self) -> bool:
        """True if the Lease is released or another's. A conflict may come from our own last renewal, if it was
        cancelled."""
        raw = await self._call("GET", LEASE, self._path_names)
        if raw is None or (raw.get("spec") or {}).get("holderIdentity") != self.identity:
            return True
        spec = {**raw["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._call("PUT", LEASE, self._path_names, {**raw, "spec": spec})
        except ApiRefusesError as exc:
            if exc.status == 409:
                return False
            raise
        log.info("the Lease is released", identity=self.identity)
        return True

    async def _take(self) -> bool:
        """Takes or renews the Lease. False if another process holds it. Retries after conflicts."""
        for _ in range(3):
            began = self._now()
            raw = await self._call("GET", LEASE, self._path_names)
            if raw is None:
                await self._create()
                continue
            spec = raw.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            if holder not in ("", self.identity) and not self._is_expired(raw, spec):
                return False
            try:
                await self._call("PUT", LEASE, self._path_names, {**raw, "spec": self._spec(spec, holder)})
            except ApiRefusesError as exc:
                if exc.status == 409:
                    continue
                raise
            self._renewed = began
            return True
        return False

    async def _create(self) -> None:
        body = {"metadata": {"name": self._path_names["name"]}, "spec": {}}
        try:
            made = await self._call("POST", LEASES, self._path_names, body)
        except ApiRefusesError as exc:
            if exc.status == 409:
                return
            raise
        if made is None:
            raise ApiRefusesError(404, f"there is no namespace {self._path_names['namespace']}")

    def _is_expired(self, raw: Raw, spec: Raw) -> bool:
        version = str(raw["metadata"]["resourceVersion"])
        if self._seen[0] != version:
            self._seen = (version, self._now())
        duration = spec.get("leaseDurationSeconds") or self.terms.duration.total_seconds()
        return self._now() - self._seen[1] > duration

    def _spec(self, old: Raw, holder: str) -> Raw:
        time = self._clock().isoformat(timespec="microseconds").replace("+00:00", "Z")
        is_same = holder == self.identity
        return {
            "holderIdentity": self.identity,
            # Whole seconds, rounded up: other processes must not wait for less time than this one assumes.
            "leaseDurationSeconds": max(1, math.ceil(self.terms.duration.total_seconds())),
            "renewTime": time,
            "acquireTime": (old.get("acquireTime") if is_same else None) or time,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (0 if is_same else 1),
        }
