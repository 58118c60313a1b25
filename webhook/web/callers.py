"""Authentication and authorization of callers. The API server decides about tokens and rights."""

import base64
import binascii
import hashlib
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from webhook.core.caller import Caller, CallersUnavailableError, Right
from webhook.runtime.clock import Clock
from webhook.runtime.tls.certificate_source import CLIENT_CERTIFICATE
from webhook.web.body import error

# A revoked token is refused after this time at the latest.
TOKEN_TTL = timedelta(seconds=30)
# A granted or revoked right takes effect after this time at the latest.
RIGHT_TTL = timedelta(seconds=10)
MAX_CACHED_TOKENS = 1000
MAX_RIGHTS = 10_000
MAX_TOKEN = 8192

CALLERS_UNAVAILABLE: Final = "callers cannot be checked at this moment"


class Guard(StrEnum):
    """Who may call a route if callers are authenticated. Every route has a guard."""

    # All callers: probes, numbers without names, and routes whose body is the credential.
    OPEN = "open"
    # The API server, if reviewers are authenticated.
    REVIEWER = "reviewer"
    # All callers with a token that the API server accepts. The route filters what each caller may see.
    CALLER = "caller"
    # The same for people: browsers ask for a password, which is the token.
    PERSON = "person"
    # A scheduler with a token, or with a certificate if the listener requires one.
    SCHEDULER = "scheduler"


# The caller if no token is checked. It has all rights.
UNCHECKED: Final = Caller("")


def list_pods(namespace: str) -> Right:
    """The right to see names of pods in a namespace; in all namespaces if it is empty."""
    return Right("list", "pods", namespace)


def bind_pods(namespace: str) -> Right:
    return Right("create", "pods", namespace, subresource="binding")


def finalize_reservations(namespace: str) -> Right:
    return Right("finalize", "reservations", namespace, group="gpuwarden.io")


class Authority(Protocol):
    """The API server. Both methods raise CallersUnavailableError."""

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        """The caller that the token belongs to; None if the token is invalid, or not for the audience."""

    async def may(self, caller: Caller, right: Right) -> bool: ...


K = TypeVar("K")
V = TypeVar("V")


class TtlCache(Generic[K, V]):
    """A cache of at most `max_entries` values, each valid for `ttl`."""

    def __init__(self, clock: Clock, ttl: timedelta, max_entries: int) -> None:
        self._clock = clock
        self._ttl = ttl
        self._max_entries = max_entries
        self._entries: dict[K, tuple[datetime, V]] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]], *, keep: Callable[[V], bool] = lambda _: True) -> V:
        until, value = self._entries.get(key, (None, None))
        if until is not None and until > self._clock():
            return value  # type: ignore[return-value]  # `value` is set together with `until`
        found = await ask()
        self._entries.pop(key, None)
        if keep(found):
            if len(self._entries) >= self._max_entries:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = (self._clock() + self._ttl, found)
        return found


@frozen
class Reviewers:
    """How reviewers are authenticated. By default they are not."""

    audience: str | None = None
    users: Collection[str] = ()
    with_certificate: bool = False


class CallerGate:
    """Admits callers to routes by the guards of the routes. Without an authority it admits all callers."""

    def __init__(
        self,
        clock: Clock,
        authority: Authority | None = None,
        reviewers: Reviewers | None = None,
        *,
        schedulers_use_certificates: bool = False,
    ) -> None:
        self._authority = authority
        self._reviewers = reviewers or Reviewers()
        self._schedulers_use_certificates = schedulers_use_certificates
        self._callers: TtlCache[tuple[str | None, bytes], Caller | None] = TtlCache(clock, TOKEN_TTL, MAX_CACHED_TOKENS)
        self._rights: TtlCache[tuple[Caller, Right], bool] = TtlCache(clock, RIGHT_TTL, MAX_RIGHTS)

    @property
    def checks_callers(self) -> bool:
        """Whether callers are authenticated."""
        return self._authority is not None

    async def refusal(self, guard: Guard, request: Request) -> Response | None:
        """The answer to a refused caller. None if the caller is admitted; then `caller_of` returns it."""
        try:
            match guard:
                case Guard.OPEN:
                    return None
                case Guard.REVIEWER:
                    return await self._reviewers_refusal(request)
                case Guard.SCHEDULER if self._schedulers_use_certificates:
                    request.state.caller = UNCHECKED  # the listener has verified the certificate
                    return None
                case _:
                    return await self._callers_refusal(guard, request)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)

    async def may(self, caller: Caller, right: Right) -> bool:
        """Raises CallersUnavailableError."""
        authority = self._authority
        if authority is None or caller is UNCHECKED:
            return True
        return await self._rights.get((caller, right), lambda: authority.may(caller, right))

    async def _reviewers_refusal(self, request: Request) -> Response | None:
        reviewers = self._reviewers
        if reviewers.with_certificate and CLIENT_CERTIFICATE not in request.scope:
            return error(403, "a client certificate is required")
        if reviewers.audience is None or self._authority is None:
            return None
        caller = await self._authenticate(request, reviewers.audience)
        if caller is None or (reviewers.users and caller.user not in reviewers.users):
            return unauthorized("Bearer")
        return None

    async def _callers_refusal(self, guard: Guard, request: Request) -> Response | None:
        if self._authority is None:
            request.state.caller = UNCHECKED
            return None
        caller = await self._authenticate(request, None, passwords=guard is Guard.PERSON)
        if caller is None:
            return unauthorized('Basic realm="gpuwarden", Bearer' if guard is Guard.PERSON else "Bearer")
        request.state.caller = caller
        return None

    async def _authenticate(self, request: Request, audience: str | None, *, passwords: bool = False) -> Caller | None:
        authority, token = self._authority, token_in(request.headers.get("authorization", ""), passwords=passwords)
        if authority is None or not 0 < len(token) <= MAX_TOKEN:
            return None
        key = (audience, hashlib.sha256(token.encode()).digest())
        return await self._callers.get(
            key, lambda: authority.caller_of(token, audience), keep=lambda found: found is not None
        )


def caller_of(request: Request) -> Caller:
    """The admitted caller of a request."""
    caller: Caller = request.state.caller
    return caller


def token_in(authorization: str, *, passwords: bool = False) -> str:
    """A bearer token, or with `passwords` a password. Browsers send passwords automatically, so they must not authorize
    changes."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials
    if scheme.lower() != "basic" or not passwords or len(credentials) > 2 * MAX_TOKEN:
        return ""
    try:
        return base64.b64decode(credentials, validate=True).decode("ascii").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def unauthorized(schemes: str) -> Response:
    refusal = error(401, "a bearer token that the API server accepts for this audience is required")
    refusal.headers["WWW-Authenticate"] = schemes
    return refusal


def forbidden(text: str) -> Response:
    return error(403, text)
