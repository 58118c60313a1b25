"""Keeps the keys of the trust domain current: fetches them regularly, and when a token names an unknown key."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final, Protocol

import jwt
import structlog
from attrs import define, field

from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import BadBundleError, BundleVersion, JwtBundle, check_succession
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# A refresh hint can shorten the interval, not extend it.
MAX_PAUSE: Final = timedelta(seconds=60)
MIN_PAUSE: Final = timedelta(seconds=5)
# Between two attempts to fetch a first bundle, and after how many attempts a warning is logged again.
FIRST_PAUSE: Final = timedelta(seconds=1)
ATTEMPTS_PER_LOG: Final = 30


class KeysUnavailableError(EvidenceUnavailableError):
    """There is no valid bundle at this moment. Each failed attempt has been logged."""


class BundleSource(Protocol):
    """Where the bundle is fetched from."""

    async def fetch(self) -> JwtBundle:
        """Raises EvidenceUnavailableError, or BadBundleError if the response is not a bundle."""

    def accepted(self, bundle: JwtBundle) -> None:
        """The fetched bundle is in use from now on."""


class BundleVersions(Protocol):
    """Stores the last accepted version of the bundle."""

    async def advance(self, bundle: JwtBundle) -> None:
        """From now on no earlier version is accepted.

        Raises BadBundleError if the bundle is not a valid successor of the last one, and EvidenceUnavailableError if
        that cannot be determined.
        """


class MemoryBundleVersions:
    """The last version that this process has accepted."""

    def __init__(self) -> None:
        self._last: BundleVersion | None = None

    async def advance(self, bundle: JwtBundle) -> None:
        check_succession(self._last, bundle)
        self._last = bundle.version


@define(eq=False, repr=False)
class TrustBundle:
    """The newest bundle. An invalid successor leaves it in place; without confirmation it expires after `max_age`."""

    _source: BundleSource
    _clock: Clock
    _max_age: timedelta
    _count: Callable[[str], None]
    _versions: BundleVersions = field(factory=MemoryBundleVersions)
    _bundle: JwtBundle | None = field(default=None, init=False)
    _confirmed_at: datetime | None = field(default=None, init=False)
    _attempted_at: datetime | None = field(default=None, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def key(self, key_id: str) -> jwt.PyJWK | None:
        """The key with that ID; an unknown one causes a fetch, at most one per MIN_PAUSE. Raises
        KeysUnavailableError."""
        known = self._find_key(key_id)
        if known is None:
            async with self._lock:  # concurrent callers share one fetch
                known = self._find_key(key_id)
                if known is None and self._may_refresh:
                    await self._refresh()
                    known = self._find_key(key_id)
        if self._current is None:
            raise KeysUnavailableError("the keys of the trust domain are not known at this moment")
        return known

    async def refresh(self) -> None:
        async with self._lock:
            await self._refresh()

    async def first(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Wait until a bundle has been fetched."""
        attempts = 0
        while self._bundle is None:
            if attempts % ATTEMPTS_PER_LOG == 0:
                log.warning("not ready: waiting for the first trust bundle")
            attempts += 1
            await sleep(FIRST_PAUSE.total_seconds())
            await self.refresh()

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Runs forever."""
        while True:
            await sleep(self.pause.total_seconds() * random.uniform(0.8, 1.0))  # noqa: S311 - jitter
            await self.refresh()

    @property
    def pause(self) -> timedelta:
        """The time until the next fetch."""
        if self._current is None:
            return MIN_PAUSE
        hint = self._current.refresh_hint
        return MAX_PAUSE if not hint or hint < 0 else max(MIN_PAUSE, min(MAX_PAUSE, timedelta(seconds=min(hint, 60))))

    @property
    def _current(self) -> JwtBundle | None:
        is_confirmed = self._confirmed_at is not None and self._clock() - self._confirmed_at < self._max_age
        return self._bundle if is_confirmed else None

    @property
    def _may_refresh(self) -> bool:
        return self._attempted_at is None or self._clock() - self._attempted_at >= MIN_PAUSE

    def _find_key(self, key_id: str) -> jwt.PyJWK | None:
        return None if self._current is None else self._current.keys.get(key_id)

    async def _refresh(self) -> None:
        asked = self._attempted_at = self._clock()
        try:
            found = await self._source.fetch()
            await self._check_version(found)
        except EvidenceUnavailableError as exc:
            self._count("away")
            log.warning("trust bundle unavailable, the last one stays", problem=str(exc))
        except BadBundleError as exc:
            self._count("refused")
            log.warning("trust bundle rejected, the last one stays", problem=str(exc))
        else:
            self._store(found, asked)

    async def _check_version(self, found: JwtBundle) -> None:
        """The same version again needs no check."""
        if found.version is None or self._bundle is None or found.version != self._bundle.version:
            await self._versions.advance(found)

    def _store(self, found: JwtBundle, asked: datetime) -> None:
        is_new = self._bundle is None or found.fingerprints != self._bundle.fingerprints
        self._bundle, self._confirmed_at = found, asked
        self._source.accepted(found)
        self._count("renewed" if is_new else "confirmed")
        if is_new:
            log.info("trust bundle renewed", keys=sorted(found.keys), sequence=found.sequence)
