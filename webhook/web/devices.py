"""The device view: every GPU, what it is doing and for whom, as JSON for programs and as a page for people.

It only looks. A fleet may have 100,000 devices and admission shares the event loop, so the view walks through them
in short slices and lets everybody else have a turn after each.
"""

import asyncio
import base64
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import resources
from itertools import islice
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import jinja2
import msgspec
from attrs import define, evolve, field, frozen
from markupsafe import Markup
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse

from webhook.admission.fleet_updater import Staleness
from webhook.core.caller import Caller, CallersUnavailableError
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.device_state import DeviceState, device_state, free_device_state, or_set_aside, reservation_state
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.fleet import Fleet
from webhook.core.keys import S4_DOMAIN
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, Reservation, ReservationId
from webhook.core.verdict import plain
from webhook.ledger import Ledger
from webhook.ledger.lapses import Lapse, Lapses
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import CountsSource, FleetCounts
from webhook.web.body import error
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, caller_of, list_pods

# Devices between two turns of the event loop: about a millisecond. Small enough, too, that a slice's tuples are gone
# before the garbage collector (700 new ones) looks at them: once old, they would bring on collections of everything.
SLICE = 250
ROWS_PER_PAGE = 200

# The id of a reservation of which names are not told: none has an empty one.
UNNAMED = ReservationId("")
# So many namespaces are asked about for one page, so many at once. Whoever may list all pods is asked about once.
MOST_NAMESPACES = 1000
AT_ONCE = 16

Thing = TypeVar("Thing")
# Of these namespaces, those whose names may be told.
Told = Callable[[Collection[str]], Awaitable[Collection[str]]]
LapsesByDevice = dict[DeviceUuid, list[Lapse]]

STARTING = "the server is starting: what devices there are is not known yet"


# What is there to see.


@frozen
class Holders:
    """Who holds each device. Nearly all have one holder at most, and a tuple for each would cost a collection."""

    first: dict[DeviceUuid, Reservation] = field(factory=dict)
    all_of_shared: dict[DeviceUuid, tuple[Reservation, ...]] = field(factory=dict)

    def add(self, reservation: Reservation) -> None:
        for slot in reservation.slots:
            first = self.first.setdefault(slot.uuid, reservation)
            if first is not reservation:
                self.all_of_shared[slot.uuid] = (*self.all_of_shared.get(slot.uuid, (first,)), reservation)

    def of(self, uuid: DeviceUuid) -> tuple[Reservation, ...]:
        first = self.first.get(uuid)
        return () if first is None else self.all_of_shared.get(uuid) or (first,)


@frozen
class DevicesSnapshot:
    """What there was at one moment, so that each UUID is told once whatever changes while it is told."""

    nodes: Sequence[Node]
    rivals: Mapping[DeviceUuid, Sequence[str]]  # the nodes of a UUID that more than one node claims
    holders: Holders
    vanished: Sequence[DeviceUuid]  # held, and not in the inventory
    if_free: Mapping[str, DeviceState]  # by node, where a device that nobody holds is not available
    kept: Collection[DeviceUuid]  # by placement maps
    lapses: LapsesByDevice


class DevicesView(NamedTuple):
    """One device as it is shown. A tuple, because a page counts all of them to show two hundred."""

    device: Device
    nodes: Sequence[str]
    holders: Sequence[Reservation]
    state: DeviceState
    is_vanished: bool = False

    @property
    def trouble(self) -> str:
        """Why it is quarantined, if it is."""
        if self.is_vanished:
            return "vanished"
        if len(self.nodes) > 1:
            return f"on {len(self.nodes)} nodes"
        return "" if self.device.is_healthy else "unhealthy"


async def unhurried(things: Iterable[Thing]) -> AsyncIterator[list[Thing]]:
    """Slice by slice, with a turn for the rest of the process after each."""
    remaining = iter(things)
    while piece := list(islice(remaining, SLICE)):
        yield piece
        await asyncio.sleep(0)


async def take_snapshot(
    fleet: Fleet,
    ledger: Ledger,
    now: datetime,
    told: Told,
    *,
    needs_evidence: bool = False,
    lapses: Sequence[Lapse] = (),
) -> DevicesSnapshot:
    """`told` says whose names may be told: of the others no more is kept than that they hold a device."""
    indexed_nodes = [fleet.indexed_nodes[name] for name in sorted(fleet.indexed_nodes)]
    nodes = [indexed.node for indexed in indexed_nodes]
    evidence = [indexed.evidence for indexed in indexed_nodes]
    kept = frozenset(fleet.set_aside_devices)
    reservations = tuple(ledger.reservations())  # before the first await, so of the same moment
    homes, rivals = await find_homes(nodes)
    named = await told({one.namespace for one in (*reservations, *(lapse.reservation for lapse in lapses))})
    holders = await find_holders(reservations, named)
    vanished = [uuid async for piece in unhurried(holders.first) for uuid in piece if uuid not in homes]
    if_free = await find_kept_back(nodes, evidence, now, needs_evidence=needs_evidence)
    told_of = by_device(one for one in lapses if one.reservation.namespace in named)
    return DevicesSnapshot(nodes, rivals, holders, vanished, if_free, kept, told_of)


async def find_kept_back(
    nodes: Sequence[Node], evidence: Sequence[Evidence | None], now: datetime, *, needs_evidence: bool
) -> dict[str, DeviceState]:
    """The nodes whose free devices no pod could be given, and why."""
    found: dict[str, DeviceState] = {}
    async for piece in unhurried(zip(nodes, evidence, strict=True)):
        for node, word in piece:
            state = free_device_state(
                is_ready=node.is_ready,
                is_cordoned=node.is_cordoned,
                evidence=state_of(word, now),
                needs_evidence=needs_evidence,
            )
            if state is not DeviceState.AVAILABLE:
                found[node.name] = state
    return found


async def find_homes(nodes: Sequence[Node]) -> tuple[dict[DeviceUuid, str], dict[DeviceUuid, tuple[str, ...]]]:
    """The first node of each UUID; and all nodes of those that have several."""
    homes: dict[DeviceUuid, str] = {}
    rivals: dict[DeviceUuid, tuple[str, ...]] = {}
    async for piece in unhurried((device.uuid, node.name) for node in nodes for device in node.devices):
        for uuid, name in piece:
            home = homes.setdefault(uuid, name)
            if home != name:
                rivals[uuid] = (*rivals.get(uuid, (home,)), name)
    return homes, rivals


async def find_holders(reservations: Sequence[Reservation], told: Collection[str]) -> Holders:
    """One look at the ledger is quicker than 100,000 questions."""
    holders = Holders()
    async for piece in unhurried(reservations):
        for reservation in piece:
            holders.add(reservation if reservation.namespace in told else unnamed(reservation))
    return holders


def unnamed(reservation: Reservation) -> Reservation:
    """What anybody may know of it."""
    return evolve(reservation, id=UNNAMED, namespace="", claim_digest="", pod_name=None, uid=None, name_prefix=None)


def sightings(snapshot: DevicesSnapshot, now: datetime) -> Iterator[DevicesView]:
    """Every device once: node by node, the vanished ones last."""
    for node in snapshot.nodes:
        home = (node.name,)
        if_free = snapshot.if_free.get(node.name, DeviceState.AVAILABLE)
        for device in node.devices:
            nodes = snapshot.rivals.get(device.uuid, home)
            if nodes[0] == node.name:
                holders = snapshot.holders.of(device.uuid)
                is_quarantined = len(nodes) > 1 or not device.is_healthy
                own = or_set_aside(if_free, is_set_aside=device.uuid in snapshot.kept)
                state = device_state(holders, now, is_quarantined=is_quarantined, if_free=own)
                yield DevicesView(device, nodes, holders, state)
    for uuid in snapshot.vanished:
        holders = snapshot.holders.of(uuid)
        yield DevicesView(Device(uuid), (holders[0].node,), holders, DeviceState.QUARANTINED, is_vanished=True)


def evidence_of(fleet: Fleet, name: str, now: datetime) -> EvidenceState:
    """By the clock, not by when the fleet was last told the time."""
    indexed = fleet.indexed_nodes.get(name)
    return state_of(indexed.evidence if indexed else None, now)


# As JSON.


def described(seen: DevicesView, now: datetime, evidence: EvidenceState, *, shows_pending_ids: bool = True) -> Raw:
    """One device: the members that S4's users read first, our own beside them."""
    device = seen.device
    told: Raw = {"node": seen.nodes[0], "labels": sorted(device.labels)}
    if seen.holders:
        told["assignment"] = assignment(foremost(seen.holders, now), shows_pending_ids=shows_pending_ids)
    told["state"] = seen.state
    if len(seen.nodes) > 1:
        told["nodes"] = list(seen.nodes)
    properties = {"index": device.index, "model": device.model, "memory": device.memory, "serial": device.serial}
    told.update((name, value) for name, value in properties.items() if value not in (None, ""))
    if device.is_shared:
        told["shares"] = device.shares
    if device.is_shared or len(seen.holders) > 1:
        told["reservations"] = [assignment(one, shows_pending_ids=shows_pending_ids) for one in seen.holders]
    told["evidence"] = evidence
    return told


def assignment(reservation: Reservation, *, shows_pending_ids: bool = True) -> Raw:
    """S4's `assignment`. A name without a uid is only what a review said, and no pod need ever bear it."""
    told: Raw = {"exists?": reservation.phase is Phase.FINALIZED}
    if reservation.id == UNNAMED:
        return told | {"state": state_told(reservation)}
    told |= {"namespace": reservation.namespace, "uid": reservation.uid}
    if reservation.uid and reservation.pod_name:
        told["name"] = reservation.pod_name
    if shows_pending_ids or has_pod(reservation):
        told["reservation-id"] = reservation.id
    told["state"] = state_told(reservation)
    return told


def lapsed(lapse: Lapse, *, tells_id: bool) -> Raw:
    """A reservation that ended a short while ago, and why."""
    one = lapse.reservation
    told: Raw = {"namespace": one.namespace}
    if one.pod_name:
        told["name"] = one.pod_name
    if tells_id:
        told["reservation-id"] = one.id
    return {**told, "at": lapse.at, "reason": Reason.RESERVATION_EXPIRED, "message": lapse.why}


def by_device(lapses: Iterable[Lapse]) -> LapsesByDevice:
    found: LapsesByDevice = {}
    for one in lapses:
        for uuid in one.reservation.uuids:
            found.setdefault(uuid, []).append(one)
    return found


def quotable(text: str) -> str:
    """As it can stand between quotes in a header."""
    return plain(text).encode("ascii", "replace").decode().replace("\\", "/").replace('"', "'")


def state_told(reservation: Reservation) -> str:
    return "proposal" if reservation.phase is Phase.PENDING else "active"


def has_pod(reservation: Reservation) -> bool:
    """Whether the API server has had a pod for it: nobody else can be named for it any more."""
    return reservation.uid is not None and reservation.phase is not Phase.PENDING


def foremost(holders: Sequence[Reservation], now: datetime) -> Reservation:
    """The holder that the state of a shared device speaks of."""
    busiest = device_state(holders, now, is_quarantined=False)
    return next(one for one in holders if reservation_state(one, now) is busiest)


def prefers_html(accept: str) -> bool:
    """Whether HTML is asked for, as browsers do; who does not mind gets JSON."""
    weights = dict(map(weighed, accept.lower().split(",")))
    return quality(weights, "text", "html") > quality(weights, "application", "json")


def weighed(media_range: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in media_range.split(";"))
    weight = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
    try:
        return name, float(weight)
    except ValueError:
        return name, 0.0


def quality(weights: Mapping[str, float], kind: str, form: str) -> float:
    """The most exact range that covers the media type decides."""
    covering = (f"{kind}/{form}", f"{kind}/*", "*/*")
    return next((weights[name] for name in covering if name in weights), 0.0)


# As a page.


class UnreadableQueryError(GpuwardenError):
    """The page was asked for in a way that cannot be read; every mistake is named."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


@frozen
class Query:
    """Which devices the page shall show."""

    state: DeviceState | None = None
    node: str = ""
    text: str = ""
    page: int = 1
    finds_pending_ids: bool = True

    @classmethod
    def parse(cls, raw_query: QueryParams) -> "Query":
        raw_state, raw_page = raw_query.get("state", ""), raw_query.get("page") or "1"
        mistakes = []
        if raw_state and raw_state not in tuple(DeviceState):
            mistakes.append(f"state: {raw_state!r} is none of {', '.join(DeviceState)}")
        if not (raw_page.isascii() and raw_page.isdecimal() and len(raw_page) < 10 and int(raw_page)):
            mistakes.append(f"page: {raw_page!r} is no page number, 1 being the first")
        if mistakes:
            raise UnreadableQueryError(*mistakes)
        return cls(
            state=DeviceState(raw_state) if raw_state else None,
            node=raw_query.get("node", "").strip(),
            text=raw_query.get("text", "").strip(),
            page=int(raw_page),
        )

    @property
    def rows(self) -> range:
        return range((self.page - 1) * ROWS_PER_PAGE, self.page * ROWS_PER_PAGE)

    @property
    def is_narrow(self) -> bool:
        return bool(self.state or self.node or self.text)

    def is_about(self, seen: DevicesView) -> bool:
        """Whether node and text fit; the state does not count, so that the page can say what other states hold."""
        return (not self.node or self.node in seen.nodes) and (not self.text or self._is_in(seen))

    def _is_in(self, seen: DevicesView) -> bool:
        device = seen.device
        words = [device.uuid, device.model, device.serial, *seen.nodes, *device.labels]
        for holder in (one for one in seen.holders if one.id != UNNAMED):
            is_told = self.finds_pending_ids or has_pod(holder)
            words += (pod_of(holder), holder.id if is_told else "", holder.uid or "")
        return self.text.casefold() in "\n".join(words).casefold()

    def with_state(self, state: DeviceState | None) -> str:
        return evolve(self, state=state, page=1).link()

    def with_page(self, page: int) -> str:
        return evolve(self, page=page).link()

    def link(self) -> str:
        """Relative, because the page has more than one address."""
        asked = {"state": self.state, "node": self.node, "text": self.text, "page": self.page if self.page > 1 else ""}
        return "?" + urlencode({name: value for name, value in asked.items() if value})


@define
class Findings:
    """What a page shows of the fleet."""

    query: Query
    counts: Counter[DeviceState] = field(factory=Counter)  # whatever state is asked for
    found: int = 0
    rows: list[DevicesView] = field(factory=list)

    def add_all(self, seen: Iterable[DevicesView]) -> None:
        query, wanted = self.query, self.query.rows
        for one in filter(query.is_about, seen) if query.is_narrow else seen:
            self.counts[one.state] += 1
            if query.state in (None, one.state):
                if self.found in wanted:
                    self.rows.append(one)
                self.found += 1

    @property
    def last_page(self) -> int:
        return max(1, -(-self.found // ROWS_PER_PAGE))


def pod_of(reservation: Reservation) -> str:
    if reservation.id == UNNAMED:
        return "a pod of another namespace"
    return f"{reservation.namespace}/{reservation.pod_name or reservation.uid or ''}"


def short_label(label: str) -> str:
    return label.removeprefix(f"{S4_DOMAIN}/")


def make_templates() -> jinja2.Environment:
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("webhook.web", "ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"pod_of": pod_of, "short_label": short_label}
    templates.globals |= {"DeviceState": DeviceState, "reservation_state": reservation_state}
    return templates


def page_headers(css: str) -> dict[str, str]:
    """The page may do nothing but be read: its one style sheet is named by its hash, scripts there are none."""
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "img-src data:",  # the icon
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
    }


ELSEWHERE = "Every GPU, and for whoever may list its pod that pod: / and /devices at the TLS listener, with a token.\n"
COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Devices:
    """`GET /devices` and `GET /`."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        clock: Clock,
        *,
        notes: Sequence[str] = (),
        shows_pending_ids: bool = True,
        needs_evidence: bool = False,
        is_starting: Callable[[], bool] = lambda: False,
        outdated: Callable[[], Staleness | None] = lambda: None,
        lapses: Lapses | None = None,
        gate: CallerGate | None = None,
        count: CountsSource = FleetCounts,
    ) -> None:
        """`tells_pending_ids`: whoever knows the id of a pending reservation can name a pod for it, where anybody may
        post a review. `needs_evidence`: all claims need a proven node."""
        self._needs_evidence = needs_evidence
        self._is_starting = is_starting
        self._outdated = outdated
        self._lapses = Lapses() if lapses is None else lapses
        self._fleet = fleet
        self._ledger = ledger
        self._clock = clock
        self._notes = notes
        self._tells_pending_ids = shows_pending_ids
        self._gate = gate or CallerGate(clock)
        self._count = count
        self._template = make_templates().get_template("devices.html")
        self._css = (resources.files("webhook.web") / "ui" / "devices.css").read_text(encoding="utf-8")
        self._page_headers = COMMON_HEADERS | page_headers(self._css)

    async def listing(self, request: Request) -> Response:
        """JSON, unless HTML is asked for."""
        if request.query_params.get("format") != "json" and prefers_html(request.headers.get("accept", "")):
            response = await self.page(request)
        else:
            response = await self._streamed(request)
        response.headers["Vary"] = "Accept"
        return response

    async def summary(self, request: Request) -> Response:
        """Numbers, and no names of anything: for everybody."""
        if problem := self._problem:
            return error(503, problem)
        return JSONResponse(
            {"nodes": len(self._fleet.indexed_nodes), "devices": self._numbers()}, headers=COMMON_HEADERS
        )

    async def summary_page(self, request: Request) -> Response:
        if problem := self._problem:
            return error(503, problem)
        numbers = "".join(f"{state}: {count}\n" for state, count in self._numbers().items())
        return PlainTextResponse(f"GPUs by state\n\n{numbers}\n{ELSEWHERE}", headers=COMMON_HEADERS)

    def _numbers(self) -> dict[str, int]:
        """By state. They are counted without a look at every device."""
        counted = self._count().devices
        return {state.value: counted.get(state, 0) for state in DeviceState}

    @property
    def _problem(self) -> str:
        """Why an answer would be a guess: before the first readings, and while changes are missed."""
        if self._is_starting():
            return STARTING
        outdated = self._outdated()
        return outdated.why if outdated is not None and outdated.is_blind else ""

    async def _streamed(self, request: Request) -> Response:
        if problem := self._problem:
            return error(503, problem)
        outdated = self._outdated()
        try:
            response = await self._as_json(request)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        if outdated is not None:
            response.headers["Warning"] = f'110 gpuwarden "{quotable(outdated.why)}"'
        return response

    async def _as_json(self, request: Request) -> Response:
        if request.method == "HEAD":
            response = Response(media_type="application/json", headers=COMMON_HEADERS)
            del response.headers["Content-Length"]  # the length of GET's answer is not known before it is told
            return response
        now = self._clock()
        snapshot = await self._seen_by(caller_of(request), now)
        return StreamingResponse(self._json(snapshot, now), media_type="application/json", headers=COMMON_HEADERS)

    async def _json(self, snapshot: DevicesSnapshot, now: datetime) -> AsyncIterator[bytes]:
        opening = b"{"
        async for piece in unhurried(sightings(snapshot, now)):
            devices = {seen.device.uuid: self._described(seen, now, snapshot.lapses) for seen in piece}
            yield opening + msgspec.json.encode(devices)[1:-1]
            opening = b","
        yield b"{}" if opening == b"{" else b"}"

    async def _seen_by(self, caller: Caller, now: datetime) -> DevicesSnapshot:
        told = partial(self._told, caller)
        lapses = self._lapses.since(now)
        return await take_snapshot(
            self._fleet, self._ledger, now, told, needs_evidence=self._needs_evidence, lapses=lapses
        )

    async def _told(self, caller: Caller, namespaces: Collection[str]) -> Collection[str]:
        """Those whose pods the caller may list."""
        if await self._gate.may(caller, list_pods("")):
            return namespaces
        places = asyncio.Semaphore(AT_ONCE)

        async def may(namespace: str) -> bool:
            async with places:
                return bool(namespace) and await self._gate.may(caller, list_pods(namespace))

        asked = sorted(namespaces)[:MOST_NAMESPACES]
        answers = await asyncio.gather(*map(may, asked))
        return {namespace for namespace, is_told in zip(asked, answers, strict=True) if is_told}

    def _described(self, seen: DevicesView, now: datetime, lapses: LapsesByDevice) -> Raw:
        evidence = evidence_of(self._fleet, seen.nodes[0], now)
        told = described(seen, now, evidence, shows_pending_ids=self._tells_pending_ids)
        if expired := lapses.get(seen.device.uuid):
            told["expired"] = [lapsed(one, tells_id=self._tells_pending_ids) for one in expired]
        indexed = self._fleet.indexed_nodes.get(seen.nodes[0])
        if indexed is not None and not indexed.node.is_ready:
            told["node-ready"] = False
        if indexed is not None and indexed.node.is_cordoned:
            told["cordoned"] = True
        return told

    async def page(self, request: Request) -> Response:
        """A table for people; it needs no script and nothing from elsewhere."""
        now = self._clock()
        if self._is_starting():
            return self._html(request, 503, Findings(Query()), now, banner=STARTING)
        outdated = self._outdated()
        banner = "" if outdated is None else f"This may not be what there is: {outdated.why}."
        try:
            query = evolve(Query.parse(request.query_params), finds_pending_ids=self._tells_pending_ids)
        except UnreadableQueryError as exc:
            return self._html(request, 400, Findings(Query()), now, exc.mistakes)
        try:
            snapshot = await self._seen_by(caller_of(request), now)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        findings = await self._find(snapshot, query, now)
        return self._html(request, 200, findings, now, banner=banner, lapses=snapshot.lapses)

    async def _find(self, snapshot: DevicesSnapshot, query: Query, now: datetime) -> Findings:
        findings = Findings(query)
        async for piece in unhurried(sightings(snapshot, now)):
            findings.add_all(piece)
        return findings

    def _html(
        self,
        request: Request,
        status: int,
        findings: Findings,
        now: datetime,
        mistakes: Sequence[str] = (),
        banner: str = "",
        lapses: LapsesByDevice | None = None,
    ) -> Response:
        html = self._template.render(
            findings=findings,
            query=findings.query,
            now=now,
            mistakes=mistakes,
            banner=banner,
            is_starting=self._is_starting(),
            lapses=lapses or {},
            notes=self._notes,
            css=Markup(self._css),  # noqa: S704 - a file of this package, not input
            evidence_of=lambda name: evidence_of(self._fleet, name, now),
        )
        response = HTMLResponse(html, status, headers=self._page_headers)
        if request.method == "HEAD":
            response.body = b""  # the headers, the length included, stay those of the page
        return response
