"""The device view as JSON and as an HTML page."""

import asyncio
import base64
import hashlib
import time
from collections.abc import Awaitable, Collection, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from attrs import evolve

from webhook.core.device import CLAIMED, Device, DeviceUuid, Node, Slot
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.reservation import (
    Placement,
    PodIdentity,
    PodProof,
    Reservation,
    ReservationEvent,
    ReservationId,
    ReservationRequest,
)
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.runtime.telemetry import Metrics
from webhook.web.callers import CallerGate, Guard
from webhook.web.devices import Devices, device_views, prefers_html, take_snapshot
from webhook.web.routes import application, get

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
PATIENCE = timedelta(seconds=90)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"

STATES = (
    "available, not-ready, cordoned, stale, unproven, kept, claimed, pending, assigned, expired, orphaned, "
    "quarantined, mismatched"
)

GPU = [DeviceUuid(f"GPU-00000000-0000-4000-8000-{n:012}") for n in range(10)]
COMPUTE = "fudo.org/gpu.compute"
MEMORY = "fudo.org/gpu.memory-80g"


class SettableClock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


class SlowLedger(MemoryLedger):
    """A ledger that does not release at once, as a ledger in a cluster: the pod is gone before its reservation."""

    def begin_release(self, reservation_id: ReservationId) -> None:
        one = self._index.find(reservation_id)
        assert one is not None
        self._index.replace(one.node, {**self._index.on(one.node), one.id: one.after(ReservationEvent.POD_ENDED)})


class Harness:
    """A fleet, a ledger and a clock, and the device view of them."""

    def __init__(self, *nodes: Node, notes: Sequence[str] = (), shows_pending_ids: bool = True) -> None:
        self.clock = SettableClock()
        self.fleet = Fleet()
        self.ledger = SlowLedger(self.fleet, self.clock, Times(PATIENCE, timedelta(seconds=2)))
        for node in nodes:
            self.put(node)
        gate = CallerGate(self.clock)
        devices = Devices(
            self.fleet, self.ledger, self.clock, notes=notes, shows_pending_ids=shows_pending_ids, gate=gate
        )
        page, listing = get("/", devices.page, Guard.PERSON), get("/devices", devices.listing, Guard.PERSON)
        self.app = application(Metrics(), page, listing, gate=gate)

    def put(self, node: Node) -> None:
        self.fleet.put(node, self.clock.now)

    def prove(self, name: str, until: datetime | None = None) -> None:
        self.fleet.set_evidence(name, Evidence(name, "sha256:aa11", "static", until=until), self.clock.now)

    async def pending(self, id: str, *uuids: DeviceUuid, k: int = 0, pod: str | None = None) -> Reservation:
        node_name = self.fleet.node_of_device(uuids[0])
        assert node_name is not None
        placement = Placement(node_name, tuple(Slot(uuid, k) for uuid in uuids))
        ask = ReservationRequest(ReservationId(id), "ml", "digest", pod, is_shared=True)
        return await self.ledger.reserve(ask, [placement], answer_by=self.clock.now + timedelta(seconds=8))

    async def assigned(self, id: str, *uuids: DeviceUuid, k: int = 0, pod: str = "infer-x7k2p") -> Reservation:
        reservation = await self.pending(id, *uuids, k=k)
        return await self.ledger.bind_to_pod(PodProof.REPORTED, reservation.id, PodIdentity("ml", pod, f"uid-of-{pod}"))

    async def get(self, url: str, method: str = "GET", accept: str | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gpuwarden") as client:
            return await client.request(method, url, headers={"accept": accept} if accept else {})

    async def devices(self) -> Any:
        return (await self.get("/devices")).json()

    async def page(self, url: str = "/") -> "Page":
        response = await self.get(url, accept=BROWSER)
        assert response.status_code == 200
        return Page(response.text)


VOID = frozenset({"meta", "link", "br", "input"})


class Page(HTMLParser):
    """The visible content of a page. Parsing fails if elements are not closed in the right order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headers: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[list[str]] = []
        self.texts: dict[str, str] = {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        match tag:
            case "tr":
                self.rows.append([])
            case "td":
                self.rows[-1].append("")
            case "th":
                self.headers.append("")
            case "br":
                self.handle_data("\n")
            case "a":
                self.links.append(["", dict(attrs)["href"] or ""])
            case _:
                pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "td":
            lines = self.rows[-1][-1].split("\n")
            self.rows[-1][-1] = "\n".join(" ".join(line.split()) for line in lines if line.strip())

    def handle_data(self, data: str) -> None:
        for tag in self.open[-1:]:
            self.texts[tag] = self.texts.get(tag, "") + data
        if "td" in self.open:
            self.rows[-1][-1] += data
        if "th" in self.open:
            self.headers[-1] += data
        if "a" in self.open:
            self.links[-1][0] += data

    def link(self, text: str) -> str | None:
        """The target of the link with this text."""
        return next((href for words, href in self.links if " ".join(words.split()) == text), None)

    @property
    def body(self) -> list[list[str]]:
        return self.rows[1:]

    @property
    def uuids(self) -> list[str]:
        return [row[0].split("\n")[0] for row in self.body]


def node(name: str, *devices: Device) -> Node:
    return Node(name, devices=devices)


def gpu(n: int, *labels: str, **properties: Any) -> Device:
    return Device(GPU[n], labels=frozenset(labels), **properties)


# JSON.


@pytest.mark.defect("assigner-15")
async def test_devices_json_has_the_form_of_the_assigner() -> None:
    harness = Harness(node("gpu-a", gpu(1, MEMORY, COMPUTE), gpu(2, COMPUTE), gpu(3, COMPUTE)))
    harness.prove("gpu-a")
    await harness.pending("reservation-1", GPU[1])
    pod = PodIdentity("ml", "infer-x7k2p", "00000000-0000-4000-8000-000000000041")
    await harness.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("reservation-1"), pod)
    await harness.pending("reservation-2", GPU[2])

    response = await harness.get("/devices")

    assert response.status_code == 200
    assert dict(response.headers) == {
        "cache-control": "no-store",
        "content-type": "application/json",
        "vary": "Accept",
        "x-content-type-options": "nosniff",
    }
    assert response.json() == {
        "GPU-00000000-0000-4000-8000-000000000001": {
            "node": "gpu-a",
            "labels": ["fudo.org/gpu.compute", "fudo.org/gpu.memory-80g"],
            "assignment": {
                "exists?": True,
                "namespace": "ml",
                "uid": "00000000-0000-4000-8000-000000000041",
                "name": "infer-x7k2p",
                "reservation-id": "reservation-1",
                "state": "active",
            },
            "state": "assigned",
            "evidence": "fresh",
        },
        "GPU-00000000-0000-4000-8000-000000000002": {
            "node": "gpu-a",
            "labels": ["fudo.org/gpu.compute"],
            "assignment": {
                "exists?": False,
                "namespace": "ml",
                "uid": None,
                "reservation-id": "reservation-2",
                "state": "proposal",
            },
            "state": "pending",
            "evidence": "fresh",
        },
        "GPU-00000000-0000-4000-8000-000000000003": {
            "node": "gpu-a",
            "labels": ["fudo.org/gpu.compute"],
            "state": "available",
            "evidence": "fresh",
        },
    }


async def test_devices_json_is_an_empty_object_without_devices() -> None:
    response = await Harness(node("cpu-only")).get("/devices")
    assert response.content == b"{}"


async def test_device_json_has_known_properties_only() -> None:
    harness = Harness(
        node("gpu-a", gpu(1, index=0, model="H100", memory="80Gi", serial="16503", pci="0000:3b:00.0"), gpu(2))
    )
    assert await harness.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [],
            "state": "available",
            "index": 0,
            "model": "H100",
            "memory": "80Gi",
            "serial": "16503",
            "pci": "0000:3b:00.0",
            "evidence": "absent",
        },
        GPU[2]: {"node": "gpu-a", "labels": [], "state": "available", "evidence": "absent"},
    }


async def test_pending_reservation_shows_its_pod_uid() -> None:
    harness = Harness(node("gpu-a", gpu(1)))
    reservation = await harness.pending("r1", GPU[1])
    await harness.ledger.bind_to_pod(PodProof.NAMED, reservation.id, PodIdentity("ml", "infer-x7k2p", "uid-1"))
    assert (await harness.devices())[GPU[1]]["assignment"] == {
        "exists?": False,
        "namespace": "ml",
        "uid": "uid-1",
        "name": "infer-x7k2p",
        "reservation-id": "r1",
        "state": "proposal",
    }


async def test_json_omits_the_name_of_a_pod_without_uid() -> None:
    harness = Harness(node("gpu-a", gpu(1)))
    await harness.pending("r1", GPU[1], pod="infer-0")
    assert "name" not in (await harness.devices())[GPU[1]]["assignment"]
    assert (await harness.page()).body[0][3] == "ml/infer-0"


@pytest.mark.defect("assigner-22")
async def test_expired_and_orphaned_devices_have_different_states() -> None:
    harness = Harness(node("gpu-a", gpu(1), gpu(2)))
    await harness.pending("late", GPU[1])
    gone = await harness.assigned("gone", GPU[2])
    harness.ledger.begin_release(gone.id)
    harness.clock.now += PATIENCE

    seen = await harness.devices()

    assert (seen[GPU[1]]["state"], seen[GPU[1]]["assignment"]["state"]) == ("expired", "proposal")
    assert seen[GPU[1]]["assignment"]["exists?"] is False
    assert (seen[GPU[2]]["state"], seen[GPU[2]]["assignment"]["state"]) == ("orphaned", "active")
    assert seen[GPU[2]]["assignment"]["exists?"] is False
    assert [row[4] for row in (await harness.page()).body] == ["expired", "orphaned"]


async def test_pending_device_expires_at_its_deadline() -> None:
    harness = Harness(node("gpu-a", gpu(1)))
    await harness.pending("r1", GPU[1])
    harness.clock.now += PATIENCE - timedelta(microseconds=1)
    assert (await harness.devices())[GPU[1]]["state"] == "pending"
    harness.clock.now += timedelta(microseconds=1)
    assert (await harness.devices())[GPU[1]]["state"] == "expired"


async def test_held_device_stays_listed_after_it_vanished() -> None:
    harness = Harness(node("gpu-a", gpu(1), gpu(2)))
    await harness.assigned("r1", GPU[1])
    harness.put(node("gpu-a", gpu(2)))
    harness.fleet.remove("gpu-a")
    assert await harness.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [],
            "assignment": {
                "exists?": True,
                "namespace": "ml",
                "uid": "uid-of-infer-x7k2p",
                "name": "infer-x7k2p",
                "reservation-id": "r1",
                "state": "active",
            },
            "state": "quarantined",
            "evidence": "absent",
        }
    }
    assert (await harness.page()).body == [
        [GPU[1], "-", "gpu-a evidence absent", "ml/infer-x7k2p", "quarantined vanished"]
    ]


async def test_uuid_on_two_nodes_is_listed_once_with_both_nodes() -> None:
    harness = Harness(node("gpu-b", gpu(1, COMPUTE)), node("gpu-a", gpu(1, COMPUTE), gpu(2)))
    harness.prove("gpu-b")
    assert await harness.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [COMPUTE],
            "state": "quarantined",
            "nodes": ["gpu-a", "gpu-b"],
            "evidence": "absent",
        },
        GPU[2]: {"node": "gpu-a", "labels": [], "state": "available", "evidence": "absent"},
    }
    assert (await harness.page()).body[0] == [
        GPU[1],
        "gpu.compute",
        "gpu-a evidence absent\ngpu-b evidence fresh",
        "-",
        "quarantined on 2 nodes",
    ]


async def test_unhealthy_device_is_quarantined() -> None:
    harness = Harness(node("gpu-a", gpu(1, is_healthy=False)))
    assert (await harness.devices())[GPU[1]]["state"] == "quarantined"
    assert (await harness.page()).body[0][4] == "quarantined unhealthy"


async def test_device_of_a_claim_is_claimed() -> None:
    harness = Harness(node("gpu-a", evolve(gpu(1), mismatch=CLAIMED)))
    seen = (await harness.devices())[GPU[1]]
    assert (seen["state"], seen["mismatch"]) == ("claimed", "in use by a ResourceClaim")
    assert (await harness.page()).body[0][4] == "claimed in use by a ResourceClaim"


async def test_device_with_a_mark_is_mismatched_and_keeps_its_assignment() -> None:
    harness = Harness(node("gpu-a", evolve(gpu(1), mismatch="its pod was given another GPU")))
    await harness.assigned("r", GPU[1])
    seen = (await harness.devices())[GPU[1]]
    assert (seen["state"], seen["mismatch"]) == ("mismatched", "its pod was given another GPU")
    assert seen["assignment"]["name"] == "infer-x7k2p"
    assert (await harness.page()).body[0][4] == "mismatched its pod was given another GPU"


async def test_shared_device_lists_all_holders_and_the_busiest_as_assignment() -> None:
    harness = Harness(node("gpu-a", gpu(1, shares=3)))
    await harness.pending("r1", GPU[1], k=0)
    await harness.assigned("r2", GPU[1], k=1)
    pending = {"exists?": False, "namespace": "ml", "uid": None, "reservation-id": "r1", "state": "proposal"}
    active = {
        "exists?": True,
        "namespace": "ml",
        "uid": "uid-of-infer-x7k2p",
        "name": "infer-x7k2p",
        "reservation-id": "r2",
        "state": "active",
    }
    assert await harness.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [],
            "assignment": active,
            "state": "assigned",
            "shares": 3,
            "reservations": [pending, active],
            "evidence": "absent",
        }
    }
    assert (await harness.page()).body[0] == [
        f"{GPU[1]}\n3 shares",
        "-",
        "gpu-a evidence absent",
        "ml/ pending\nml/infer-x7k2p assigned",
        "assigned",
    ]


async def test_pending_ids_are_neither_shown_nor_found_if_they_are_hidden() -> None:
    shared = Device(GPU[1], shares=2)
    harness = Harness(Node("node-a", devices=(Device(GPU[0]), shared)), shows_pending_ids=False)
    await harness.pending("secret-1", GPU[0])
    await harness.pending("secret-2", GPU[1], k=0)
    await harness.assigned("told-3", GPU[1], k=1)
    text = (await harness.get("/devices")).text
    assert "secret" not in text
    assert "told-3" in text
    for asked, found in (("secret", 0), ("told-3", 1)):
        rows = (await harness.page(f"/?text={asked}")).rows
        assert sum("GPU-" in row[0] for row in rows if row) == found
    assert "secret" not in (await harness.get("/", accept=BROWSER)).text


async def test_free_shared_device_has_no_reservations() -> None:
    harness = Harness(node("gpu-a", gpu(1, shares=2)))
    assert (await harness.devices())[GPU[1]] == {
        "node": "gpu-a",
        "labels": [],
        "state": "available",
        "shares": 2,
        "reservations": [],
        "evidence": "absent",
    }


async def test_evidence_state_follows_the_clock() -> None:
    harness = Harness(node("gpu-a", gpu(1)))
    harness.prove("gpu-a", until=NOON + timedelta(minutes=40))
    assert (await harness.devices())[GPU[1]]["evidence"] == "fresh"
    harness.clock.now += timedelta(minutes=40)
    assert (await harness.devices())[GPU[1]]["evidence"] == "stale"


# JSON or HTML.


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        pytest.param("", False, id="nothing"),
        pytest.param("*/*", False, id="anything"),
        pytest.param("application/json", False, id="json"),
        pytest.param("text/html", True, id="html"),
        pytest.param(BROWSER, True, id="browser"),
        pytest.param("TEXT/HTML", True, id="capitals"),
        pytest.param("text/*", True, id="any-text"),
        pytest.param("text/html, application/json", False, id="equal-weights"),
        pytest.param("text/html;q=0.5, application/json;q=0.9", False, id="json-preferred"),
        pytest.param("text/html;q=0.9, application/json;q=0.5", True, id="html-preferred"),
        pytest.param("text/html;q=0", False, id="no-html"),
        pytest.param("text/html;level=1;q=0.4, */*;q=0.1", True, id="with-parameters"),
        pytest.param("text/html;q=much, ;;,", False, id="malformed"),
    ],
)
async def test_devices_are_json_unless_the_client_prefers_html(accept: str, is_html: bool) -> None:
    assert prefers_html(accept) is is_html
    response = await Harness(node("gpu-a", gpu(1))).get("/devices", accept=accept or None)
    assert response.headers["content-type"] == ("text/html; charset=utf-8" if is_html else "application/json")
    assert response.headers["vary"] == "Accept"


async def test_browser_gets_json_with_format_json() -> None:
    response = await Harness(node("gpu-a", gpu(1))).get("/devices?format=json", accept=BROWSER)
    assert list(response.json()) == [GPU[1]]


@pytest.mark.parametrize(
    ("url", "accept", "length"),
    [pytest.param("/", "*/*", True, id="page"), pytest.param("/devices", "*/*", False, id="json")],
)
async def test_head_has_the_headers_of_get_without_a_body(url: str, accept: str, length: bool) -> None:
    harness = Harness(node("gpu-a", gpu(1)))
    got, head = await harness.get(url, accept=accept), await harness.get(url, "HEAD", accept)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers == got.headers
    assert ("content-length" in head.headers) is length


# The HTML page.


@pytest.fixture
async def all_states() -> Harness:
    """One device in each state."""
    harness = Harness(
        node("gpu-a", gpu(1, COMPUTE, MEMORY, "model=h100", index=0, model="H100", memory="80Gi"), gpu(2), gpu(3)),
        node("gpu-b", gpu(4), gpu(5), gpu(6, is_healthy=False)),
        notes=["evidence is static: development only"],
    )
    harness.prove("gpu-a")
    await harness.pending("expired", GPU[4])
    harness.clock.now += timedelta(seconds=60)
    await harness.pending("pending", GPU[2])
    await harness.assigned("assigned", GPU[3])
    harness.ledger.begin_release((await harness.assigned("orphaned", GPU[5], pod="gone-0")).id)
    harness.clock.now += timedelta(seconds=30)
    return harness


async def test_page_has_a_row_for_each_device(all_states: Harness) -> None:
    page = await all_states.page()
    assert page.texts["title"] == "GPU Device Assignment"
    assert page.texts["h1"] == "GPU Device Assigner"
    assert page.link("/devices") == "/devices"
    assert page.headers == ["Device", "Labels", "Node", "Assignment", "Status"]
    assert page.body == [
        [
            f"{GPU[1]}\n#0 H100 80Gi",
            "gpu.compute\ngpu.memory-80g\nmodel=h100",
            "gpu-a evidence fresh",
            "-",
            "available",
        ],
        [GPU[2], "-", "gpu-a evidence fresh", "ml/", "pending"],
        [GPU[3], "-", "gpu-a evidence fresh", "ml/infer-x7k2p", "assigned"],
        [GPU[4], "-", "gpu-b evidence absent", "ml/", "expired"],
        [GPU[5], "-", "gpu-b evidence absent", "ml/gone-0", "orphaned"],
        [GPU[6], "-", "gpu-b evidence absent", "-", "quarantined unhealthy"],
    ]


async def test_each_state_has_a_shape_that_screen_readers_ignore(all_states: Harness) -> None:
    page = await all_states.page("/?state=expired")
    shapes = [attributes["href"] for tag, attributes in page.tags if tag == "use"]
    assert {f"#{state}" for state in STATES.split(", ")} == set(shapes)
    assert set(shapes) == {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "symbol"}
    assert {attributes.get("aria-hidden") for tag, attributes in page.tags if tag == "svg"} == {"true"}


async def test_page_is_accessible_and_has_labels_for_cards(all_states: Harness) -> None:
    tags = (await all_states.page()).tags
    assert ("html", {"lang": "en"}) in tags
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in tags
    assert [tag for tag, _ in tags].count("table") == 1
    assert [tag for tag, _ in tags].count("caption") == 1
    assert {attributes.get("scope") for tag, attributes in tags if tag == "th"} == {"col"}
    cells = [attributes.get("data-label") for tag, attributes in tags if tag == "td"]
    assert cells == ["Device", "Labels", "Node", "Assignment", "Status"] * 6
    labelled = {attributes["for"] for tag, attributes in tags if tag == "label"}
    assert labelled == {attributes["id"] for tag, attributes in tags if tag in ("input", "select")}


async def test_page_headers_forbid_scripts_and_external_resources(all_states: Harness) -> None:
    response = await all_states.get("/")
    policy = response.headers["content-security-policy"]
    digest = policy.partition("style-src 'sha256-")[2].partition("'")[0]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    assert digest == sha256_of(response.text.partition("<style>")[2].partition("</style>")[0])
    assert {name: response.headers[name] for name in sorted(set(response.headers) - {"content-security-policy"})} == {
        "cache-control": "no-store",
        "content-length": str(len(response.content)),
        "content-type": "text/html; charset=utf-8",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }
    page = Page(response.text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "style"]
    assert not [link for _, link in page.links if not link.startswith(("?", "/devices"))]


def sha256_of(style: str) -> str:
    return base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()


async def test_page_shows_notes(all_states: Harness) -> None:
    assert "evidence is static: development only" in (await all_states.get("/")).text


async def test_page_without_devices_has_one_row_with_a_message() -> None:
    page = await Harness().page()
    assert page.body == [["There are no devices: no node in the inventory has a GPU."]]
    assert ("td", {"role": "cell", "class": "empty", "colspan": "5"}) in page.tags


INJECTION = """"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"""


async def test_page_escapes_all_external_text() -> None:
    device = gpu(1, INJECTION, model=INJECTION, memory=INJECTION, serial=INJECTION, pci=INJECTION)
    harness = Harness(node(INJECTION, device), notes=[INJECTION])
    reservation = await harness.pending("r1", GPU[1])
    await harness.ledger.bind_to_pod(PodProof.REPORTED, reservation.id, PodIdentity("ml", INJECTION, "uid-1"))
    for url in ("/", str(httpx.URL("/", params={"text": INJECTION})), str(httpx.URL("/", params={"node": INJECTION}))):
        page = await harness.page(url)
        assert not {"script", "img"} & {tag for tag, _ in page.tags}
        assert page.body[0][1] == INJECTION
        assert page.body[0][3] == f"ml/{INJECTION}"
    response = await harness.get("/", "GET")
    refused = await harness.get(str(httpx.URL("/", params={"state": INJECTION})))
    assert refused.status_code == 400
    assert "<script" not in response.text + refused.text
    assert (await harness.devices())[GPU[1]]["labels"] == [INJECTION]


# Filters and pages.


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param("", [1, 2, 3, 4, 5, 6], id="all"),
        pytest.param("state=&node=&text=&page=", [1, 2, 3, 4, 5, 6], id="empty-form"),
        pytest.param("state=pending", [2], id="state"),
        pytest.param("state=quarantined", [6], id="quarantined"),
        pytest.param("node=gpu-b", [4, 5, 6], id="node"),
        pytest.param("node=gpu", [], id="part-of-a-node-name"),
        pytest.param("text=MEMORY-80", [1], id="label"),
        pytest.param("text=h100", [1], id="model"),
        pytest.param("text=000000000003", [3], id="uuid"),
        pytest.param("text=infer-x7", [3], id="pod"),
        pytest.param("text=uid-of-gone", [5], id="uid"),
        pytest.param("text=ml/", [2, 3, 4, 5], id="namespace"),
        pytest.param("text=ml/&node=gpu-b&state=orphaned", [5], id="all-three"),
        pytest.param("colour=red", [1, 2, 3, 4, 5, 6], id="unknown-parameter"),
    ],
)
async def test_filter_shows_matching_devices(all_states: Harness, query: str, expected: list[int]) -> None:
    page = await all_states.page(f"/?{query}")
    if expected:
        assert page.uuids == [GPU[n] for n in expected]
    else:
        assert page.body == [["No device matches the filter."]]


async def test_summary_counts_and_links_each_state(all_states: Harness) -> None:
    page = await all_states.page("/?node=gpu-b&state=orphaned")
    assert {words: page.link(words) for words in (" ".join(text.split()) for text, _ in page.links[2:15])} == {
        "3 devices": "?node=gpu-b",
        "0 available": "?state=available&node=gpu-b",
        **{f"0 {state}": f"?state={state}&node=gpu-b" for state in STATES.split(", ")[1:7]},
        "0 pending": "?state=pending&node=gpu-b",
        "0 assigned": "?state=assigned&node=gpu-b",
        "1 expired": "?state=expired&node=gpu-b",
        "1 orphaned": "?state=orphaned&node=gpu-b",
        "1 quarantined": "?state=quarantined&node=gpu-b",
    }


@pytest.mark.parametrize(
    ("query", "mistakes"),
    [
        pytest.param(
            "state=busy",
            [f"state: 'busy' is not one of {STATES}"],
            id="state",
        ),
        pytest.param("page=0", ["page: '0' is not a page number; the first page is 1"], id="page-zero"),
        pytest.param("page=-1", ["page: '-1' is not a page number; the first page is 1"], id="page-below"),
        pytest.param("page=two", ["page: 'two' is not a page number; the first page is 1"], id="page-word"),
        pytest.param("page=%C2%B2", ["page: '²' is not a page number; the first page is 1"], id="page-superscript"),
        pytest.param(
            "state=Pending&page=9999999999",
            [
                f"state: 'Pending' is not one of {STATES}",
                "page: '9999999999' is not a page number; the first page is 1",
            ],
            id="both",
        ),
    ],
)
async def test_invalid_query_is_refused_with_all_mistakes(all_states: Harness, query: str, mistakes: list[str]) -> None:
    response = await all_states.get(f"/?{query}")
    assert response.status_code == 400
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    assert page.texts["li"].split("\n") == ["".join(mistakes)]
    assert page.link("Show all devices") == "?"
    assert page.rows == []


def many_nodes(count: int, per_node: int = 8) -> Iterator[Node]:
    labels = frozenset({COMPUTE, MEMORY})
    for first in range(0, count, per_node):
        devices = (
            Device(DeviceUuid(f"GPU-{n:06}"), n % per_node, labels=labels) for n in range(first, first + per_node)
        )
        yield Node(f"gpu-{first:06}", devices=tuple(devices))


async def test_page_has_200_rows_and_links_to_other_pages() -> None:
    harness = Harness(*many_nodes(408))
    first, middle, last = [await harness.page(f"/?text=gpu&page={n}") for n in (1, 2, 3)]
    assert [len(page.body) for page in (first, middle, last)] == [200, 200, 8]
    assert first.uuids + middle.uuids + last.uuids == [f"GPU-{n:06}" for n in range(408)]
    assert (first.texts["caption"]).strip() == "Devices 1 to 200 of 408 that match the filter"
    assert (last.texts["caption"]).strip() == "Devices 401 to 408 of 408 that match the filter"
    assert pager(first) == [None, None, "?text=gpu&page=2", "?text=gpu&page=3"]
    assert pager(middle) == ["?text=gpu", "?text=gpu", "?text=gpu&page=3", "?text=gpu&page=3"]
    assert pager(last) == ["?text=gpu", "?text=gpu&page=2", None, None]


def pager(page: Page) -> list[str | None]:
    return [page.link(text) for text in ("First", "Previous", "Next", "Last")]


async def test_page_after_the_last_names_the_last_page() -> None:
    page = await Harness(*many_nodes(208)).page("/?page=9")
    assert page.body == [["There is no page 9: the last one is page 2."]]
    assert page.link("Previous") == "?page=2"


# A large fleet, and a fleet that changes during the request.


async def longest_wait_during(work: Awaitable[httpx.Response]) -> tuple[httpx.Response, float]:
    """The longest time for which the work blocked the event loop."""
    waits = [0.0]

    async def wait() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            waits.append(time.perf_counter() - before)

    waiting = asyncio.create_task(wait())
    result = await work
    waiting.cancel()
    return result, max(waits)


@pytest.mark.parametrize("url", ["/devices", "/", "/?text=nowhere&page=1"])
async def test_view_of_100_000_devices_does_not_block_the_event_loop(url: str) -> None:
    harness = Harness(*many_nodes(100_000))
    response, longest = await longest_wait_during(harness.get(url))
    assert response.status_code == 200
    if url == "/devices":
        seen = response.json()
        assert len(seen) == 100_000
        assert seen["GPU-099999"]["node"] == "gpu-099992"
    assert longest < 0.25  # a slice takes a millisecond; the rest is for slow machines


async def test_changes_during_the_response_do_not_duplicate_devices() -> None:
    harness = Harness(*many_nodes(2_000))
    responding = asyncio.create_task(harness.get("/devices"))
    changes = 0
    while not responding.done():
        harness.fleet.remove(f"gpu-{changes * 8:06}")
        harness.put(Node(f"new-{changes}", devices=(Device(DeviceUuid(f"GPU-{1999 - changes:06}")),)))
        await harness.pending(f"r{changes}", DeviceUuid(f"GPU-{1000 + changes:06}"))
        changes += 1
        await asyncio.sleep(0)
    response = await responding
    assert changes > 8
    assert response.text.count('"node"') == len(response.json())


async def all_namespaces(namespaces: Collection[str]) -> Collection[str]:
    return namespaces


async def test_snapshot_has_the_state_at_its_start() -> None:
    harness = Harness(*many_nodes(1_600))
    await harness.pending("r0", DeviceUuid("GPU-000000"))
    snapshotting = asyncio.create_task(take_snapshot(harness.fleet, harness.ledger, NOON, all_namespaces))
    await asyncio.sleep(0)
    harness.fleet.remove("gpu-000008")
    harness.put(Node("later", devices=(Device(DeviceUuid("GPU-later")),)))
    await harness.pending("r1", DeviceUuid("GPU-000001"))
    seen = {one.device.uuid: one for one in device_views(await snapshotting, NOON)}
    assert sorted(seen) == [f"GPU-{n:06}" for n in range(1_600)]
    assert [uuid for uuid, one in seen.items() if one.holders] == ["GPU-000000"]
