"""Lists and watches one kind of object, with bookmarks. Lists again when the server no longer knows the version.

The client library has no informer for asyncio. A failed list or a watch that ended changes nothing: the listener keeps
its state until a later answer.
"""

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from datetime import timedelta
from typing import Protocol

import aiohttp
import msgspec
import structlog
from aiohttp.http_exceptions import LineTooLong
from attrs import define, field
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.json_objects import decoded, object_in
from webhook.kube.requests import REQUEST_ERRORS
from webhook.runtime.backoff import Backoff

log = structlog.get_logger(__name__)

Trimmed = Callable[[Raw], Raw]
# Held for each page of a list, from the request until its objects are trimmed. Lists that share a lock hold one page in
# memory together.
PageTurn = AbstractAsyncContextManager[object]

# The server ends a watch after this time, a little less than the usual timeout of proxies.
WATCH_SECONDS = 290
# Bookmarks arrive about every minute. Without data for this time the connection is considered dead; otherwise a dead
# connection would go unnoticed until the end of the watch.
SILENCE = 90.0
LIST_TIMEOUT = 60.0
PAGE = 500
# The largest stored object has 1.5 MiB and may be several times as long in JSON. After a longer line the objects are
# listed again.
MAX_LINE = 2**26
# If a watch ends sooner, the next one waits: the server may end every watch at once.
SOON = 1.0
# After failures. A server that is back is noticed within the longest pause.
BACKOFF = Backoff(timedelta(seconds=0.1), timedelta(seconds=5), jitter=(0.5, 1.5))

WATCH_ERRORS = (*REQUEST_ERRORS, msgspec.DecodeError)


class StartOverError(GpuwardenError):
    """The server no longer knows our resource version: list again."""


class WatchListener(Protocol):
    """Receives the objects."""

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        """All objects, by `namespace/name`. Objects that are not among them were deleted."""

    def changed(self, raw: Raw) -> None:
        """An object was created or changed."""

    def deleted(self, raw: Raw) -> None:
        """An object was deleted; `raw` is its last state."""


@define(eq=False, repr=False)
class Watch:
    """Watches the objects under one path of the API server."""

    _api: client.ApiClient
    path: str
    _listener: WatchListener
    # Query parameters such as selectors.
    _only: Mapping[str, str] = field(factory=dict)
    # Reduces each object of a list to what the listener reads; a list may have many thousands of objects.
    _trimmed: Trimmed | None = None
    # For lists that are trimmed.
    _turn: PageTurn = field(factory=nullcontext)
    _silence: float = SILENCE
    _backoff: Backoff = BACKOFF
    _max_line: int = MAX_LINE
    _version: str = field(default="", init=False)
    is_current: bool = field(default=False, init=False)
    """Whether a list is complete and nothing has failed since."""
    ready: asyncio.Event = field(factory=asyncio.Event, init=False)
    """Set after the first list."""
    lists: int = field(default=0, init=False)
    _lost_at: float | None = field(default=None, init=False)

    async def run(self) -> None:
        """Runs until cancelled."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            try:
                if not self._version:
                    await self._list()
                async for event in self._events():
                    self._dispatch(event)
                    failures = 0
                if loop.time() - begun >= SOON:
                    continue
            except StartOverError:
                self._start_over()
            except WATCH_ERRORS as exc:
                self._mark_stale()
                log.warning("watch interrupted", path=self.path, error=type(exc).__name__)
                log.debug("watch interrupted", path=self.path, exc_info=exc)
                if isinstance(exc, ApiException) and exc.status == 410:
                    self._start_over()
            failures += 1
            await asyncio.sleep(self._backoff.seconds(failures))

    @property
    def stale_for(self) -> float:
        """Seconds since the connection was lost; 0 while it is current or before the first list."""
        if self.is_current or self._lost_at is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._lost_at

    def _mark_stale(self) -> None:
        if self.is_current:
            self._lost_at = asyncio.get_running_loop().time()
        self.is_current = False

    def _start_over(self) -> None:
        """Events were missed, so the objects have to be listed again."""
        self._mark_stale()
        self._version = ""

    async def _list(self) -> None:
        if self._trimmed is None:
            found: Mapping[str, Raw]
            found, self._version = await whole_list(self._api, self.path, self._only)
        else:
            found, self._version = await packed_list(self._api, self.path, self._only, self._trimmed, self._turn)
        self.lists += 1
        self._listener.replaced(found)
        self.is_current = True
        self.ready.set()

    async def _events(self) -> AsyncIterator[Raw]:
        query = {
            **self._only,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        async with asyncio.timeout(self._silence):
            response = await open_response(self._api, self.path, query, WATCH_SECONDS + 30)
        self.is_current = True
        async with response:
            while line := await self._line(response):
                yield object_in(line)

    async def _line(self, response: aiohttp.ClientResponse) -> bytes:
        """The next line; empty at the end. Raises TimeoutError after `silence` seconds without data."""
        async with asyncio.timeout(self._silence):
            try:
                return await response.content.readuntil(b"\n", max_size=self._max_line)
            except LineTooLong as exc:
                raise StartOverError(self.path) from exc

    def _dispatch(self, event: Raw) -> None:
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            if raw.get("code") == 410:
                raise StartOverError(self.path)
            raise ApiException(status=raw.get("code"), reason=raw.get("reason"))
        self._version = raw["metadata"]["resourceVersion"]
        if kind == "DELETED":
            self._listener.deleted(raw)
        elif kind != "BOOKMARK":
            self._listener.changed(raw)


class WatchGroup:
    """Watches that belong together. It exists before its watches, so that their listeners can refer to it."""

    def __init__(self) -> None:
        self._watches: list[Watch] = []

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches)

    def add(self, *watches: Watch) -> None:
        self._watches.extend(watches)

    def are_current(self) -> bool:
        """Whether there are watches, and each of them is current."""
        return bool(self._watches) and all(watch.is_current for watch in self._watches)

    def have_listed(self) -> bool:
        """Whether there are watches, and the first list of each is complete."""
        return bool(self._watches) and all(watch.ready.is_set() for watch in self._watches)


def key_of(raw: Raw) -> str:
    meta = raw["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


async def whole_list(
    api: client.ApiClient, path: str, only: Mapping[str, str] | None = None
) -> tuple[dict[str, Raw], str]:
    """All objects by `namespace/name`, and their resource version. The read is consistent, not from a cache."""
    found: dict[str, Raw] = {}
    version = ""
    async for page, at in pages(api, path, only):
        found.update((key_of(raw), raw) for raw in page)
        version = at
    return found, version


class PackedObjects(Mapping[str, Raw]):
    """Objects compressed in memory, about a tenth of their size."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def put(self, key: str, raw: Raw) -> None:
        self._texts[key] = zlib.compress(msgspec.json.encode(raw))

    def __getitem__(self, key: str) -> Raw:
        found: Raw = msgspec.json.decode(zlib.decompress(self._texts[key]))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


async def packed_list(
    api: client.ApiClient, path: str, only: Mapping[str, str], trimmed: Trimmed, turn: PageTurn
) -> tuple[PackedObjects, str]:
    """Like `whole_list`, with trimmed and compressed objects."""
    found, version = PackedObjects(), ""
    async with aclosing(pages(api, path, only, turn)) as listed:
        async for page, at in listed:
            for raw in page:
                found.put(key_of(raw), trimmed(raw))
            version = at
    return found, version


class ListWire(msgspec.Struct, frozen=True):
    version: str = msgspec.field(name="resourceVersion")
    rest: str = msgspec.field(name="continue", default="")


class PageWire(msgspec.Struct, frozen=True):
    kind: str
    group: str = msgspec.field(name="apiVersion")
    metadata: ListWire
    items: list[msgspec.Raw] | None = None


async def pages(
    api: client.ApiClient, path: str, only: Mapping[str, str] | None = None, turn: PageTurn | None = None
) -> AsyncGenerator[tuple[Iterator[Raw], str]]:
    """The pages of a list, each with the version of the list. Objects are decoded one by one to save memory."""
    query = {**(only or {}), "limit": str(PAGE)}
    turn = turn or nullcontext()
    while True:
        async with turn:
            page = await one_page(api, path, query)
            query["continue"] = page.metadata.rest
            yield objects_in(page), page.metadata.version
            del page  # frees some megabytes before the next page arrives
        if not query["continue"]:
            return


async def one_page(api: client.ApiClient, path: str, query: Mapping[str, str]) -> PageWire:
    async with await open_response(api, path, query, LIST_TIMEOUT) as response:
        page: PageWire = decoded(await response.read(), PageWire)
        return page


def objects_in(page: PageWire) -> Iterator[Raw]:
    named = {"kind": page.kind.removesuffix("List"), "apiVersion": page.group}
    return ({**named, **object_in(text)} for text in page.items or ())


async def open_response(
    api: client.ApiClient, path: str, query: Mapping[str, str], seconds: float
) -> aiohttp.ClientResponse:
    """The response, with its body not read yet. Raises ApiException for status 400 and above."""
    request = await api.param_serialize(
        method="GET",
        resource_path=path,
        query_params=list(query.items()),
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
    )
    answer = await api.call_api(*request, _request_timeout=seconds)
    response: aiohttp.ClientResponse = answer.response
    if response.status >= 400:
        async with response:
            raise ApiException(status=response.status, reason=response.reason)
    return response
