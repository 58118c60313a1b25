"""Who calls, and what that caller may do: tokens are the API server's to judge, and so are rights."""

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

# A token that was taken back is refused after this at the latest.
REMEMBERED = timedelta(seconds=30)
# A right that was given or taken back counts after this at the latest.
RIGHT_REMEMBERED = timedelta(seconds=10)
MAX_REMEMBERED = 1000
MAX_RIGHTS = 10_000
MAX_TOKEN = 8192


class Guard(StrEnum):
    """Whom a route is for, where callers are asked who they are. Every route has one."""

    # Everybody: probes, numbers without names, and routes whose body is the credential.
    OPEN = "open"
    # The API server, as far as it can be told from others.
    REVIEWER = "reviewer"
    # Whoever has a token that the API server knows; the route shows each caller what it may see.
    CALLER = "caller"
    # The same for people: browsers are asked for a password, which is the token.
    PERSON = "person"
    # A scheduler: a token, or a certificate where those are demanded.
    SCHEDULER = "scheduler"


# Where nobody is asked who he is.
EVERYBODY: Final = Caller("")


def list_pods(namespace: str) -> Right:
    """What names pods of a namespace is for whoever may list them; of all, if it is empty."""
    return Right("list", "pods", namespace)


def bind_pods(namespace: str) -> Right:
    return Right("create", "pods", namespace, subresource="binding")


def finalize_reservations(namespace: str) -> Right:
    return Right("finalize", "reservations", namespace, group="gpuwarden.io")


class Authority(Protocol):
    """The API server. Both raise CallersUnavailableError."""

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        """Whose it is, if it was made out for that audience; None if it is nobody's."""

    async def may(self, caller: Caller, right: Right) -> bool: ...


K = TypeVar("K")
V = TypeVar("V")


class TtlCache(Generic[K, V]):
    """Answers for a while, and no more than so many."""

    def __init__(self, clock: Clock, lasting: timedelta, most: int) -> None:
        self._clock = clock
        self._lasting = lasting
        self._most = most
        self._known: dict[K, tuple[datetime, V]] = {}

    async def get(self, key: K, ask: Callable[[], Awaitable[V]], *, keep: Callable[[V], bool] = lambda _: True) -> V:
        until, value = self._known.get(key, (None, None))
        if until is not None and until > self._clock():
            return value  # type: ignore[return-value]  # it was put there with the time
        found = await ask()
        self._known.pop(key, None)
        if keep(found):
            if len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            self._known[key] = (self._clock() + self._lasting, found)
        return found


@frozen
class Reviewers:
    """How reviewers prove who they are; with nothing set they do not."""

    audience: str | None = None
    users: Collection[str] = ()
    with_certificate: bool = False


class CallerGate:
    """Lets callers in to routes, by their guards; without an authority everybody."""

    def __init__(
        self,
        clock: Clock,
        authority: Authority | None = None,
        reviewers: Reviewers | None = None,
        *,
        schedulers_show_certificates: bool = False,
    ) -> None:
        self._authority = authority
        self._reviewers = reviewers or Reviewers()
        self._schedulers_show_certificates = schedulers_show_certificates
        self._callers: TtlCache[tuple[str | None, bytes], Caller | None] = TtlCache(clock, REMEMBERED, MAX_REMEMBERED)
        self._rights: TtlCache[tuple[Caller, Right], bool] = TtlCache(clock, RIGHT_REMEMBERED, MAX_RIGHTS)

    @property
    def asks(self) -> bool:
        """Whether anybody is asked who he is."""
        return self._authority is not None

    async def refusal(self, guard: Guard, request: Request) -> Response | None:
        """None if the caller is let in; then `caller_of` says who it is."""
        try:
            match guard:
                case Guard.OPEN:
                    return None
                case Guard.REVIEWER:
                    return await self._reviewers_refusal(request)
                case Guard.SCHEDULER if self._schedulers_show_certificates:
                    request.state.caller = EVERYBODY  # the listener has demanded the certificate
                    return None
                case _:
                    return await self._callers_refusal(guard, request)
        except CallersUnavailableError:
            return error(503, "callers cannot be checked at this moment")

    async def may(self, caller: Caller, right: Right) -> bool:
        """Raises CallersUnavailableError."""
        authority = self._authority
        if authority is None or caller is EVERYBODY:
            return True
        return await self._rights.get((caller, right), lambda: authority.may(caller, right))

    async def _reviewers_refusal(self, request: Request) -> Response | None:
        who = self._reviewers
        if who.with_certificate and CLIENT_CERTIFICATE not in request.scope:
            return error(403, "a client certificate is needed")
        if who.audience is None or self._authority is None:
            return None
        caller = await self._known(request, who.audience)
        if caller is None or (who.users and caller.user not in who.users):
            return unauthorized("Bearer")
        return None

    async def _callers_refusal(self, guard: Guard, request: Request) -> Response | None:
        if self._authority is None:
            request.state.caller = EVERYBODY
            return None
        caller = await self._known(request, None, passwords=guard is Guard.PERSON)
        if caller is None:
            return unauthorized('Basic realm="gpuwarden", Bearer' if guard is Guard.PERSON else "Bearer")
        request.state.caller = caller
        return None

    async def _known(self, request: Request, audience: str | None, *, passwords: bool = False) -> Caller | None:
        authority, token = self._authority, token_in(request.headers.get("authorization", ""), passwords=passwords)
        if authority is None or not 0 < len(token) <= MAX_TOKEN:
            return None
        key = (audience, hashlib.sha256(token.encode()).digest())
        return await self._callers.get(
            key, lambda: authority.caller_of(token, audience), keep=lambda found: found is not None
        )


def caller_of(request: Request) -> Caller:
    """Who was let in."""
    caller: Caller = request.state.caller
    return caller


def token_in(authorization: str, *, passwords: bool = False) -> str:
    """A bearer token; or a password. Browsers send those by themselves, so they count only where nothing is changed."""
    scheme, _, said = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return said
    if scheme.lower() != "basic" or not passwords or len(said) > 2 * MAX_TOKEN:
        return ""
    try:
        return base64.b64decode(said, validate=True).decode("ascii").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def unauthorized(ways: str) -> Response:
    refusal = error(401, "a bearer token is needed that the API server knows and that is for this")
    refusal.headers["WWW-Authenticate"] = ways
    return refusal


def forbidden(text: str) -> Response:
    return error(403, text)
