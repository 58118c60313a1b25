"""The device view: all GPUs with their states and pods, as JSON and as an HTML page.

The view is read-only. A fleet may have 100,000 devices, and admission shares the event loop. So the view processes the
devices in short slices and yields to the event loop after each.
"""

import asyncio
import base64
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
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
from webhook.core.keys import ASSIGNER_DOMAIN
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

# Devices per slice: about a millisecond of work. A slice is also small enough that its tuples are freed before the
# garbage collector runs (after 700 new objects). Tuples that survive would cause full collections.
SLICE = 250
ROWS_PER_PAGE = 200

# The id of a reservation without names. No real reservation has an empty id.
REDACTED = ReservationId("")
# How many namespaces one request checks, and how many at once. A caller that may list all pods needs one check only.
MAX_NAMESPACES = 1000
MAX_CONCURRENT_CHECKS = 16

# Members of a device in the JSON, if they are known.
PROPERTIES = ("index", "model", "memory", "serial", "pci")

T = TypeVar("T")
# Returns those of the given namespaces whose pods the caller may list.
FilterNamespaces = Callable[[Collection[str]], Awaitable[Collection[str]]]
LapsesByDevice = dict[DeviceUuid, list[Lapse]]

STARTING = "the server is starting: the devices are not known yet"


# The snapshot.


@frozen
class Holders:
    """The reservations of each device. Nearly all devices have at most one, so there is a tuple only for the others: a
    tuple per device would cause a garbage collection."""

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
    """The state of one moment, so that each UUID is listed once even if the fleet changes meanwhile."""

    nodes: Sequence[Node]
    duplicates: Mapping[DeviceUuid, Sequence[str]]  # the nodes of each UUID that is on several nodes
    holders: Holders
    vanished: Sequence[DeviceUuid]  # held, but not in the inventory
    if_free: Mapping[str, DeviceState]  # the state of free devices by node, if it is not `available`
    kept: Collection[DeviceUuid]  # set aside by placement maps
    lapses: LapsesByDevice


class DevicesView(NamedTuple):
    """One device of the view. It is a tuple for speed: a page counts all devices to show two hundred."""

    device: Device
    nodes: Sequence[str]
    holders: Sequence[Reservation]
    state: DeviceState
    is_vanished: bool = False

    @property
    def trouble(self) -> str:
        """Why the device is quarantined, mismatched or claimed; empty if it is none of these."""
        if self.is_vanished:
            return "vanished"
        if len(self.nodes) > 1:
            return f"on {len(self.nodes)} nodes"
        return self.device.mismatch or ("" if self.device.is_healthy else "unhealthy")


async def in_slices(items: Iterable[T]) -> AsyncIterator[list[T]]:
    """The items in slices. After each slice other tasks can run."""
    remaining = iter(items)
    while piece := list(islice(remaining, SLICE)):
        yield piece
        await asyncio.sleep(0)


async def take_snapshot(
    fleet: Fleet,
    ledger: Ledger,
    now: datetime,
    filter_namespaces: FilterNamespaces,
    *,
    needs_evidence: bool = False,
    lapses: Sequence[Lapse] = (),
) -> DevicesSnapshot:
    """Reservations in namespaces that `filter_namespaces` drops appear without names."""
    indexed_nodes = [fleet.indexed_nodes[name] for name in sorted(fleet.indexed_nodes)]
    nodes = [indexed.node for indexed in indexed_nodes]
    evidence = [indexed.evidence for indexed in indexed_nodes]
    kept = frozenset(fleet.set_aside_devices)
    reservations = tuple(ledger.reservations())  # before the first await, so that all data is of one moment
    first_nodes, duplicates = await find_nodes_of_devices(nodes)
    visible = await filter_namespaces(
        {one.namespace for one in (*reservations, *(lapse.reservation for lapse in lapses))}
    )
    holders = await find_holders(reservations, visible)
    vanished = [uuid async for piece in in_slices(holders.first) for uuid in piece if uuid not in first_nodes]
    if_free = await find_states_of_free_devices(nodes, evidence, now, needs_evidence=needs_evidence)
    visible_lapses = by_device(one for one in lapses if one.reservation.namespace in visible)
    return DevicesSnapshot(nodes, duplicates, holders, vanished, if_free, kept, visible_lapses)


async def find_states_of_free_devices(
    nodes: Sequence[Node], evidence: Sequence[Evidence | None], now: datetime, *, needs_evidence: bool
) -> dict[str, DeviceState]:
    """The state of the free devices of each node, if it is not `available`."""
    found: dict[str, DeviceState] = {}
    async for piece in in_slices(zip(nodes, evidence, strict=True)):
        for node, node_evidence in piece:
            state = free_device_state(
                is_ready=node.is_ready,
                is_cordoned=node.is_cordoned,
                evidence=state_of(node_evidence, now),
                needs_evidence=needs_evidence,
            )
            if state is not DeviceState.AVAILABLE:
                found[node.name] = state
    return found


async def find_nodes_of_devices(
    nodes: Sequence[Node],
) -> tuple[dict[DeviceUuid, str], dict[DeviceUuid, tuple[str, ...]]]:
    """The first node of each UUID, and all nodes of each UUID that is on several."""
    first_nodes: dict[DeviceUuid, str] = {}
    duplicates: dict[DeviceUuid, tuple[str, ...]] = {}
    async for piece in in_slices((device.uuid, node.name) for node in nodes for device in node.devices):
        for uuid, name in piece:
            first = first_nodes.setdefault(uuid, name)
            if first != name:
                duplicates[uuid] = (*duplicates.get(uuid, (first,)), name)
    return first_nodes, duplicates


async def find_holders(reservations: Sequence[Reservation], visible: Collection[str]) -> Holders:
    """The holders of all devices. One pass over the reservations is faster than 100,000 lookups in the ledger."""
    holders = Holders()
    async for piece in in_slices(reservations):
        for reservation in piece:
            holders.add(reservation if reservation.namespace in visible else redact(reservation))
    return holders


def redact(reservation: Reservation) -> Reservation:
    """The reservation without names, as all callers may see it."""
    return evolve(reservation, id=REDACTED, namespace="", claim_digest="", pod_name=None, uid=None, name_prefix=None)


def device_views(snapshot: DevicesSnapshot, now: datetime) -> Iterator[DevicesView]:
    """All devices, each once: by node, with the vanished ones last."""
    for node in snapshot.nodes:
        only_this_node = (node.name,)
        if_free = snapshot.if_free.get(node.name, DeviceState.AVAILABLE)
        for device in node.devices:
            nodes = snapshot.duplicates.get(device.uuid, only_this_node)
            if nodes[0] == node.name:
                holders = snapshot.holders.of(device.uuid)
                is_quarantined = len(nodes) > 1 or not device.is_healthy
                own = or_set_aside(if_free, is_set_aside=device.uuid in snapshot.kept)
                state = device_state(
                    holders,
                    now,
                    is_quarantined=is_quarantined,
                    is_mismatched=bool(device.mismatch) and not device.is_claimed,
                    is_claimed=device.is_claimed,
                    if_free=own,
                )
                yield DevicesView(device, nodes, holders, state)
    for uuid in snapshot.vanished:
        holders = snapshot.holders.of(uuid)
        yield DevicesView(Device(uuid), (holders[0].node,), holders, DeviceState.QUARANTINED, is_vanished=True)


def evidence_of(fleet: Fleet, name: str, now: datetime) -> EvidenceState:
    """The evidence state of the node at `now`, which may be later than the fleet's last update."""
    indexed = fleet.indexed_nodes.get(name)
    return state_of(indexed.evidence if indexed else None, now)


# As JSON.


def device_json(seen: DevicesView, now: datetime, evidence: EvidenceState, *, shows_pending_ids: bool = True) -> Raw:
    """One device as JSON: the members of the GPU Device Assigner first, then our own."""
    device = seen.device
    content: Raw = {"node": seen.nodes[0], "labels": sorted(device.labels)}
    if seen.holders:
        content["assignment"] = assignment_json(busiest_holder(seen.holders, now), shows_pending_ids=shows_pending_ids)
    content["state"] = seen.state
    if device.mismatch:
        content["mismatch"] = device.mismatch
    if len(seen.nodes) > 1:
        content["nodes"] = list(seen.nodes)
    properties = {name: getattr(device, name) for name in PROPERTIES}
    content.update((name, value) for name, value in properties.items() if value not in (None, ""))
    if device.is_shared:
        content["shares"] = device.shares
    if device.is_shared or len(seen.holders) > 1:
        content["reservations"] = [assignment_json(one, shows_pending_ids=shows_pending_ids) for one in seen.holders]
    content["evidence"] = evidence
    return content


def assignment_json(reservation: Reservation, *, shows_pending_ids: bool = True) -> Raw:
    """`assignment`, as the GPU Device Assigner has it.

    A name without a uid comes from a review only, so there may be no pod with this name."""
    content: Raw = {"exists?": reservation.phase is Phase.FINALIZED}
    if reservation.id == REDACTED:
        return content | {"state": assignment_state(reservation)}
    content |= {"namespace": reservation.namespace, "uid": reservation.uid}
    if reservation.uid and reservation.pod_name:
        content["name"] = reservation.pod_name
    if shows_pending_ids or has_pod(reservation):
        content["reservation-id"] = reservation.id
    content["state"] = assignment_state(reservation)
    return content


def lapse_json(lapse: Lapse, *, shows_id: bool) -> Raw:
    """A reservation that expired recently, and why."""
    one = lapse.reservation
    content: Raw = {"namespace": one.namespace}
    if one.pod_name:
        content["name"] = one.pod_name
    if shows_id:
        content["reservation-id"] = one.id
    return {**content, "at": lapse.at, "reason": Reason.RESERVATION_EXPIRED, "message": lapse.why}


def by_device(lapses: Iterable[Lapse]) -> LapsesByDevice:
    found: LapsesByDevice = {}
    for one in lapses:
        for uuid in one.reservation.uuids:
            found.setdefault(uuid, []).append(one)
    return found


def quoted_header_text(text: str) -> str:
    """The text in a form that is valid between quotes in a header."""
    return plain(text).encode("ascii", "replace").decode().replace("\\", "/").replace('"', "'")


def assignment_state(reservation: Reservation) -> str:
    return "proposal" if reservation.phase is Phase.PENDING else "active"


def has_pod(reservation: Reservation) -> bool:
    """Whether the reservation belongs to an existing pod, so that no other pod can be named for it."""
    return reservation.uid is not None and reservation.phase is not Phase.PENDING


def busiest_holder(holders: Sequence[Reservation], now: datetime) -> Reservation:
    """The holder that determines the state of a shared device."""
    busiest = device_state(holders, now, is_quarantined=False)
    return next(one for one in holders if reservation_state(one, now) is busiest)


def prefers_html(accept: str) -> bool:
    """Whether the client prefers HTML, as browsers do. Without a preference the answer is JSON."""
    weights = dict(map(parse_media_range, accept.lower().split(",")))
    return quality(weights, "text", "html") > quality(weights, "application", "json")


def parse_media_range(media_range: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in media_range.split(";"))
    weight = next((part.removeprefix("q=") for part in parameters if part.startswith("q=")), "1")
    try:
        return name, float(weight)
    except ValueError:
        return name, 0.0


def quality(weights: Mapping[str, float], kind: str, form: str) -> float:
    """The weight of the most specific media range that covers the media type."""
    covering = (f"{kind}/{form}", f"{kind}/*", "*/*")
    return next((weights[name] for name in covering if name in weights), 0.0)


# As an HTML page.


class UnreadableQueryError(GpuwardenError):
    """The query of the page is invalid. All mistakes are named."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


@frozen
class Query:
    """The filter and the number of the page."""

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
            mistakes.append(f"state: {raw_state!r} is not one of {', '.join(DeviceState)}")
        if not (raw_page.isascii() and raw_page.isdecimal() and len(raw_page) < 10 and int(raw_page)):
            mistakes.append(f"page: {raw_page!r} is not a page number; the first page is 1")
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
        """Whether node and text match. The state is ignored, because the page counts the devices in all states."""
        return (not self.node or self.node in seen.nodes) and (not self.text or self._is_in(seen))

    def _is_in(self, seen: DevicesView) -> bool:
        device = seen.device
        texts = [device.uuid, device.model, device.serial, device.pci, *seen.nodes, *device.labels]
        for holder in (one for one in seen.holders if one.id != REDACTED):
            shows_id = self.finds_pending_ids or has_pod(holder)
            texts += (pod_of(holder), holder.id if shows_id else "", holder.uid or "")
        return self.text.casefold() in "\n".join(texts).casefold()

    def with_state(self, state: DeviceState | None) -> str:
        return evolve(self, state=state, page=1).link()

    def with_page(self, page: int) -> str:
        return evolve(self, page=page).link()

    def link(self) -> str:
        """A relative link, because the page has several paths."""
        parameters = {
            "state": self.state,
            "node": self.node,
            "text": self.text,
            "page": self.page if self.page > 1 else "",
        }
        return "?" + urlencode({name: value for name, value in parameters.items() if value})


@define
class Findings:
    """The rows and counts of a page."""

    query: Query
    counts: Counter[DeviceState] = field(factory=Counter)  # of all states, not only the filtered one
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
    if reservation.id == REDACTED:
        return "a pod of another namespace"
    return f"{reservation.namespace}/{reservation.pod_name or reservation.uid or ''}"


def short_label(label: str) -> str:
    return label.removeprefix(f"{ASSIGNER_DOMAIN}/")


@cache
def page_template() -> jinja2.Template:
    """The compiled template of the page. Compiling takes 20 ms."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("webhook.web", "ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"pod_of": pod_of, "short_label": short_label}
    templates.globals |= {"DeviceState": DeviceState, "reservation_state": reservation_state}
    return templates.get_template("devices.html")


def page_headers(css: str) -> dict[str, str]:
    """Headers that forbid everything the page does not need: it has no scripts, and one style sheet with this hash."""
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


SUMMARY_HINT = "All GPUs, with the pods that you may list: / and /devices on the TLS listener, with a token.\n"
COMMON_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


@define(eq=False, repr=False)
class Devices:
    """`GET /devices` and `GET /`."""

    _fleet: Fleet
    _ledger: Ledger
    _clock: Clock
    _notes: Sequence[str] = field(default=(), kw_only=True)
    # If reviewers are not authenticated, a caller that knows the id of a pending reservation can name a pod for it.
    _shows_pending_ids: bool = field(default=True, kw_only=True)
    # Whether all claims need a proven node.
    _needs_evidence: bool = field(default=False, kw_only=True)
    _is_starting: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    _outdated: Callable[[], Staleness | None] = field(default=lambda: None, kw_only=True)
    _lapses: Lapses = field(factory=Lapses, kw_only=True)
    _gate: CallerGate = field(kw_only=True)
    _count: CountsSource = field(default=FleetCounts, kw_only=True)
    _template: jinja2.Template = field(init=False)
    _css: str = field(init=False)
    _page_headers: dict[str, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._template = page_template()
        self._css = (resources.files("webhook.web") / "ui" / "devices.css").read_text(encoding="utf-8")
        self._page_headers = COMMON_HEADERS | page_headers(self._css)

    async def listing(self, request: Request) -> Response:
        """JSON, or HTML if the client prefers it."""
        if request.query_params.get("format") != "json" and prefers_html(request.headers.get("accept", "")):
            response = await self.page(request)
        else:
            response = await self._json_response(request)
        response.headers["Vary"] = "Accept"
        return response

    async def summary(self, request: Request) -> Response:
        """Counts without any names, for all callers."""
        if problem := self._problem:
            return error(503, problem)
        return JSONResponse(
            {"nodes": len(self._fleet.indexed_nodes), "devices": self._numbers()}, headers=COMMON_HEADERS
        )

    async def summary_page(self, request: Request) -> Response:
        if problem := self._problem:
            return error(503, problem)
        numbers = "".join(f"{state}: {count}\n" for state, count in self._numbers().items())
        return PlainTextResponse(f"GPUs by state\n\n{numbers}\n{SUMMARY_HINT}", headers=COMMON_HEADERS)

    def _numbers(self) -> dict[str, int]:
        """The number of devices by state, without iterating over all devices."""
        counted = self._count().devices
        return {state.value: counted.get(state, 0) for state in DeviceState}

    @property
    def _problem(self) -> str:
        """Why there is no reliable answer: the first data is missing, or the watch has missed changes."""
        if self._is_starting():
            return STARTING
        outdated = self._outdated()
        return outdated.why if outdated is not None and outdated.is_blind else ""

    async def _json_response(self, request: Request) -> Response:
        if problem := self._problem:
            return error(503, problem)
        outdated = self._outdated()
        try:
            response = await self._as_json(request)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        if outdated is not None:
            response.headers["Warning"] = f'110 gpuwarden "{quoted_header_text(outdated.why)}"'
        return response

    async def _as_json(self, request: Request) -> Response:
        if request.method == "HEAD":
            response = Response(media_type="application/json", headers=COMMON_HEADERS)
            del response.headers["Content-Length"]  # the length of the answer to GET is not known before it is sent
            return response
        now = self._clock()
        snapshot = await self._snapshot_for(caller_of(request), now)
        return StreamingResponse(self._json(snapshot, now), media_type="application/json", headers=COMMON_HEADERS)

    async def _json(self, snapshot: DevicesSnapshot, now: datetime) -> AsyncIterator[bytes]:
        opening = b"{"
        async for piece in in_slices(device_views(snapshot, now)):
            devices = {seen.device.uuid: self._device_json(seen, now, snapshot.lapses) for seen in piece}
            yield opening + msgspec.json.encode(devices)[1:-1]
            opening = b","
        yield b"{}" if opening == b"{" else b"}"

    async def _snapshot_for(self, caller: Caller, now: datetime) -> DevicesSnapshot:
        visible = partial(self._visible_namespaces, caller)
        lapses = self._lapses.since(now)
        return await take_snapshot(
            self._fleet, self._ledger, now, visible, needs_evidence=self._needs_evidence, lapses=lapses
        )

    async def _visible_namespaces(self, caller: Caller, namespaces: Collection[str]) -> Collection[str]:
        """Those of the namespaces whose pods the caller may list."""
        if await self._gate.may(caller, list_pods("")):
            return namespaces
        checks = asyncio.Semaphore(MAX_CONCURRENT_CHECKS)

        async def may(namespace: str) -> bool:
            async with checks:
                return bool(namespace) and await self._gate.may(caller, list_pods(namespace))

        checked = sorted(namespaces)[:MAX_NAMESPACES]
        answers = await asyncio.gather(*map(may, checked))
        return {namespace for namespace, is_visible in zip(checked, answers, strict=True) if is_visible}

    def _device_json(self, seen: DevicesView, now: datetime, lapses: LapsesByDevice) -> Raw:
        evidence = evidence_of(self._fleet, seen.nodes[0], now)
        content = device_json(seen, now, evidence, shows_pending_ids=self._shows_pending_ids)
        if expired := lapses.get(seen.device.uuid):
            content["expired"] = [lapse_json(one, shows_id=self._shows_pending_ids) for one in expired]
        indexed = self._fleet.indexed_nodes.get(seen.nodes[0])
        if indexed is not None and not indexed.node.is_ready:
            content["node-ready"] = False
        if indexed is not None and indexed.node.is_cordoned:
            content["cordoned"] = True
        return content

    async def page(self, request: Request) -> Response:
        """The HTML page. It needs no scripts and no external resources."""
        now = self._clock()
        if self._is_starting():
            return self._html(request, 503, Findings(Query()), now, banner=STARTING)
        outdated = self._outdated()
        banner = "" if outdated is None else f"This page may be out of date: {outdated.why}."
        try:
            query = evolve(Query.parse(request.query_params), finds_pending_ids=self._shows_pending_ids)
        except UnreadableQueryError as exc:
            return self._html(request, 400, Findings(Query()), now, exc.mistakes)
        try:
            snapshot = await self._snapshot_for(caller_of(request), now)
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        findings = await self._find(snapshot, query, now)
        return self._html(request, 200, findings, now, banner=banner, lapses=snapshot.lapses)

    async def _find(self, snapshot: DevicesSnapshot, query: Query, now: datetime) -> Findings:
        findings = Findings(query)
        async for piece in in_slices(device_views(snapshot, now)):
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
            response.body = b""  # the headers, including the length, are those of GET
        return response
