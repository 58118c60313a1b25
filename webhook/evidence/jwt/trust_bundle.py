"""Keeps the keys of the trust domain: asks for them now and then, and when a token names one that is not known yet."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final, Protocol

import jwt
import structlog

from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import BadBundleError, BundleVersion, JwtBundle, check_succession
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# An endpoint may ask to be asked more often, not less.
MAX_PAUSE: Final = timedelta(seconds=60)
MIN_PAUSE: Final = timedelta(seconds=5)
# Between two looks for a first bundle, and how many of them pass between two words about it.
FIRST_PAUSE: Final = timedelta(seconds=1)
LOOKS_A_WORD: Final = 30


class KeysUnavailableError(EvidenceUnavailableError):
    """No bundle is good at this moment. Each look that found none has said so."""


class BundleSource(Protocol):
    """Where the bundle is to be had."""

    async def fetch(self) -> JwtBundle:
        """Raises EvidenceUnavailableError, or BadBundleError for an answer that is no bundle."""

    def accepted(self, bundle: JwtBundle) -> None:
        """What was fetched is in use from now on."""


class BundleVersions(Protocol):
    """Knows how far the bundle has come."""

    async def advance(self, bundle: JwtBundle) -> None:
        """From now on nothing that came before it is taken.

        Raises BadBundleError for a bundle that may not take the place of the last, EvidenceUnavailableError where that
        cannot be known.
        """


class MemoryBundleVersions:
    """As far as this process has seen it."""

    def __init__(self) -> None:
        self._last: BundleVersion | None = None

    async def advance(self, bundle: JwtBundle) -> None:
        check_succession(self._last, bundle)
        self._last = bundle.mark


class TrustBundle:
    """The newest bundle. One that may not take its place leaves it; one that nobody confirms any more ends."""

    def __init__(
        self,
        source: BundleSource,
        clock: Clock,
        max_age: timedelta,
        tell: Callable[[str], None],
        marks: BundleVersions | None = None,
    ) -> None:
        self._source = source
        self._marks = marks or MemoryBundleVersions()
        self._clock = clock
        self._max_age = max_age
        self._tell = tell
        self._bundle: JwtBundle | None = None
        self._confirmed: datetime | None = None
        self._tried: datetime | None = None
        self._turn = asyncio.Lock()

    async def key(self, key_id: str) -> jwt.PyJWK | None:
        """A key that is not known is asked for, once in a while for all askers. Raises KeysAwayError."""
        known = self._known(key_id)
        if known is None:
            async with self._turn:  # who comes while somebody asks waits for that answer
                known = self._known(key_id)
                if known is None and self._may_try:
                    await self._refresh()
                    known = self._known(key_id)
        if self._current is None:
            raise KeysUnavailableError("the keys of the trust domain are not known at this moment")
        return known

    async def refresh(self) -> None:
        async with self._turn:
            await self._refresh()

    async def first(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Until there has been one."""
        looks = 0
        while self._bundle is None:
            if looks % LOOKS_A_WORD == 0:
                log.warning("not ready: the first trust bundle is waited for")
            looks += 1
            await sleep(FIRST_PAUSE.total_seconds())
            await self.refresh()

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """For ever."""
        while True:
            await sleep(self.pause.total_seconds() * random.uniform(0.8, 1.0))  # noqa: S311 - to keep out of step
            await self.refresh()

    @property
    def pause(self) -> timedelta:
        """How long a bundle is good without another look."""
        if self._current is None:
            return MIN_PAUSE
        hint = self._current.refresh_hint
        return MAX_PAUSE if not hint or hint < 0 else max(MIN_PAUSE, min(MAX_PAUSE, timedelta(seconds=min(hint, 60))))

    @property
    def _current(self) -> JwtBundle | None:
        is_confirmed = self._confirmed is not None and self._clock() - self._confirmed < self._max_age
        return self._bundle if is_confirmed else None

    @property
    def _may_try(self) -> bool:
        return self._tried is None or self._clock() - self._tried >= MIN_PAUSE

    def _known(self, key_id: str) -> jwt.PyJWK | None:
        return None if self._current is None else self._current.keys.get(key_id)

    async def _refresh(self) -> None:
        asked = self._tried = self._clock()
        try:
            found = await self._source.fetch()
            await self._succeed(found)
        except EvidenceUnavailableError as exc:
            self._tell("away")
            log.warning("trust bundle not to be had, the last one stays", problem=str(exc))
        except BadBundleError as exc:
            self._tell("refused")
            log.warning("trust bundle refused, the last one stays", problem=str(exc))
        else:
            self._take(found, asked)

    async def _succeed(self, found: JwtBundle) -> None:
        """The same once more is no step."""
        if found.mark is None or self._bundle is None or found.mark != self._bundle.mark:
            await self._marks.advance(found)

    def _take(self, found: JwtBundle, asked: datetime) -> None:
        is_new = self._bundle is None or found.fingerprints != self._bundle.fingerprints
        self._bundle, self._confirmed = found, asked
        self._source.accepted(found)
        self._tell("renewed" if is_new else "confirmed")
        if is_new:
            log.info("trust bundle renewed", keys=sorted(found.keys), sequence=found.sequence)
