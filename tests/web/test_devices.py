"""The device view: what programs and people are told of every GPU."""

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

from webhook.core.device import Device, DeviceUuid, Node, Slot
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
from webhook.web.callers import Guard
from webhook.web.devices import Devices, prefers_html, sightings, take_snapshot
from webhook.web.routes import application, get

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
PATIENCE = timedelta(seconds=90)
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"

STATES = "available, not-ready, cordoned, stale, unproven, kept, pending, assigned, expired, orphaned, quarantined"

GPU = [DeviceUuid(f"GPU-00000000-0000-4000-8000-{n:012}") for n in range(10)]
COMPUTE = "fudo.org/gpu.compute"
MEMORY = "fudo.org/gpu.memory-80g"


class SettableClock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


class SlowLedger(MemoryLedger):
    """A ledger that takes time to release, as one does that has to write to a cluster: the pod is gone already."""

    def begin_release(self, reservation_id: ReservationId) -> None:
        one = self._index.find(reservation_id)
        assert one is not None
        self._index.replace(one.node, {**self._index.on(one.node), one.id: one.after(ReservationEvent.POD_ENDED)})


class House:
    """A fleet, its ledger, its clock, and the view of them."""

    def __init__(self, *nodes: Node, notes: Sequence[str] = (), shows_pending_ids: bool = True) -> None:
        self.clock = SettableClock()
        self.fleet = Fleet()
        self.ledger = SlowLedger(self.fleet, self.clock, Times(PATIENCE, timedelta(seconds=2)))
        for node in nodes:
            self.put(node)
        devices = Devices(self.fleet, self.ledger, self.clock, notes=notes, shows_pending_ids=shows_pending_ids)
        self.app = application(
            Metrics(), get("/", devices.page, Guard.PERSON), get("/devices", devices.listing, Guard.PERSON)
        )

    def put(self, node: Node) -> None:
        self.fleet.put(node, self.clock.now)

    def prove(self, name: str, until: datetime | None = None) -> None:
        self.fleet.set_evidence(name, Evidence(name, "sha256:aa11", "static", until=until), self.clock.now)

    async def pending(self, id: str, *uuids: DeviceUuid, k: int = 0, pod: str | None = None) -> Reservation:
        home = self.fleet.node_of_device(uuids[0])
        assert home is not None
        placement = Placement(home, tuple(Slot(uuid, k) for uuid in uuids))
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
    """What a person can read of the page; fails where an element is not closed in its turn."""

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
        """Where the link with this text leads."""
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


# As JSON.


@pytest.mark.defect("S4-15")
async def test_devices_have_the_shape_that_users_of_s4_read() -> None:
    house = House(node("gpu-a", gpu(1, MEMORY, COMPUTE), gpu(2, COMPUTE), gpu(3, COMPUTE)))
    house.prove("gpu-a")
    await house.pending("reservation-1", GPU[1])
    pod = PodIdentity("ml", "infer-x7k2p", "00000000-0000-4000-8000-000000000041")
    await house.ledger.bind_to_pod(PodProof.REPORTED, ReservationId("reservation-1"), pod)
    await house.pending("reservation-2", GPU[2])

    response = await house.get("/devices")

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


async def test_no_devices_are_an_empty_object() -> None:
    response = await House(node("cpu-only")).get("/devices")
    assert response.content == b"{}"


async def test_what_is_known_of_a_device_is_told_and_what_is_not_is_left_out() -> None:
    house = House(node("gpu-a", gpu(1, index=0, model="H100", memory="80Gi", serial="16503"), gpu(2)))
    assert await house.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [],
            "state": "available",
            "index": 0,
            "model": "H100",
            "memory": "80Gi",
            "serial": "16503",
            "evidence": "absent",
        },
        GPU[2]: {"node": "gpu-a", "labels": [], "state": "available", "evidence": "absent"},
    }


async def test_a_pending_reservation_that_has_its_pods_uid_tells_it() -> None:
    house = House(node("gpu-a", gpu(1)))
    reservation = await house.pending("r1", GPU[1])
    await house.ledger.bind_to_pod(PodProof.NAMED, reservation.id, PodIdentity("ml", "infer-x7k2p", "uid-1"))
    assert (await house.devices())[GPU[1]]["assignment"] == {
        "exists?": False,
        "namespace": "ml",
        "uid": "uid-1",
        "name": "infer-x7k2p",
        "reservation-id": "r1",
        "state": "proposal",
    }


async def test_a_name_without_a_uid_is_not_yet_a_pods_name() -> None:
    house = House(node("gpu-a", gpu(1)))
    await house.pending("r1", GPU[1], pod="infer-0")
    assert "name" not in (await house.devices())[GPU[1]]["assignment"]
    assert (await house.page()).body[0][3] == "ml/infer-0"


@pytest.mark.defect("S4-22")
async def test_expired_by_the_clock_and_orphaned_are_told_apart() -> None:
    house = House(node("gpu-a", gpu(1), gpu(2)))
    await house.pending("late", GPU[1])
    gone = await house.assigned("gone", GPU[2])
    house.ledger.begin_release(gone.id)
    house.clock.now += PATIENCE

    seen = await house.devices()

    assert (seen[GPU[1]]["state"], seen[GPU[1]]["assignment"]["state"]) == ("expired", "proposal")
    assert seen[GPU[1]]["assignment"]["exists?"] is False
    assert (seen[GPU[2]]["state"], seen[GPU[2]]["assignment"]["state"]) == ("orphaned", "active")
    assert seen[GPU[2]]["assignment"]["exists?"] is False
    assert [row[4] for row in (await house.page()).body] == ["expired", "orphaned"]


async def test_a_pending_device_is_pending_until_its_deadline_and_expired_on_it() -> None:
    house = House(node("gpu-a", gpu(1)))
    await house.pending("r1", GPU[1])
    house.clock.now += PATIENCE - timedelta(microseconds=1)
    assert (await house.devices())[GPU[1]]["state"] == "pending"
    house.clock.now += timedelta(microseconds=1)
    assert (await house.devices())[GPU[1]]["state"] == "expired"


async def test_a_held_device_that_vanished_is_still_shown() -> None:
    house = House(node("gpu-a", gpu(1), gpu(2)))
    await house.assigned("r1", GPU[1])
    house.put(node("gpu-a", gpu(2)))
    house.fleet.remove("gpu-a")
    assert await house.devices() == {
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
    assert (await house.page()).body == [
        [GPU[1], "-", "gpu-a evidence absent", "ml/infer-x7k2p", "quarantined vanished"]
    ]


async def test_a_uuid_on_two_nodes_is_told_once_with_both() -> None:
    house = House(node("gpu-b", gpu(1, COMPUTE)), node("gpu-a", gpu(1, COMPUTE), gpu(2)))
    house.prove("gpu-b")
    assert await house.devices() == {
        GPU[1]: {
            "node": "gpu-a",
            "labels": [COMPUTE],
            "state": "quarantined",
            "nodes": ["gpu-a", "gpu-b"],
            "evidence": "absent",
        },
        GPU[2]: {"node": "gpu-a", "labels": [], "state": "available", "evidence": "absent"},
    }
    assert (await house.page()).body[0] == [
        GPU[1],
        "gpu.compute",
        "gpu-a evidence absent\ngpu-b evidence fresh",
        "-",
        "quarantined on 2 nodes",
    ]


async def test_an_unhealthy_device_is_quarantined_and_says_so() -> None:
    house = House(node("gpu-a", gpu(1, is_healthy=False)))
    assert (await house.devices())[GPU[1]]["state"] == "quarantined"
    assert (await house.page()).body[0][4] == "quarantined unhealthy"


async def test_a_shared_device_tells_all_its_holders_and_the_busiest_first() -> None:
    house = House(node("gpu-a", gpu(1, shares=3)))
    await house.pending("r1", GPU[1], k=0)
    await house.assigned("r2", GPU[1], k=1)
    pending = {"exists?": False, "namespace": "ml", "uid": None, "reservation-id": "r1", "state": "proposal"}
    active = {
        "exists?": True,
        "namespace": "ml",
        "uid": "uid-of-infer-x7k2p",
        "name": "infer-x7k2p",
        "reservation-id": "r2",
        "state": "active",
    }
    assert await house.devices() == {
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
    assert (await house.page()).body[0] == [
        f"{GPU[1]}\n3 shares",
        "-",
        "gpu-a evidence absent",
        "ml/ pending\nml/infer-x7k2p assigned",
        "assigned",
    ]


async def test_where_anybody_may_post_a_review_no_pending_id_is_told_nor_found() -> None:
    shared = Device(GPU[1], shares=2)
    house = House(Node("node-a", devices=(Device(GPU[0]), shared)), shows_pending_ids=False)
    await house.pending("secret-1", GPU[0])
    await house.pending("secret-2", GPU[1], k=0)
    await house.assigned("told-3", GPU[1], k=1)
    text = (await house.get("/devices")).text
    assert "secret" not in text
    assert "told-3" in text
    for asked, found in (("secret", 0), ("told-3", 1)):
        rows = (await house.page(f"/?text={asked}")).rows
        assert sum("GPU-" in row[0] for row in rows if row) == found
    assert "secret" not in (await house.get("/", accept=BROWSER)).text


async def test_a_shared_device_that_nobody_holds_has_no_reservations() -> None:
    house = House(node("gpu-a", gpu(1, shares=2)))
    assert (await house.devices())[GPU[1]] == {
        "node": "gpu-a",
        "labels": [],
        "state": "available",
        "shares": 2,
        "reservations": [],
        "evidence": "absent",
    }


async def test_evidence_is_judged_by_the_clock() -> None:
    house = House(node("gpu-a", gpu(1)))
    house.prove("gpu-a", until=NOON + timedelta(minutes=40))
    assert (await house.devices())[GPU[1]]["evidence"] == "fresh"
    house.clock.now += timedelta(minutes=40)
    assert (await house.devices())[GPU[1]]["evidence"] == "stale"


# JSON or HTML.


@pytest.mark.parametrize(
    ("accept", "is_html"),
    [
        pytest.param("", False, id="nothing"),
        pytest.param("*/*", False, id="anything"),
        pytest.param("application/json", False, id="json"),
        pytest.param("text/html", True, id="html"),
        pytest.param(BROWSER, True, id="a-browser"),
        pytest.param("TEXT/HTML", True, id="capitals"),
        pytest.param("text/*", True, id="any-text"),
        pytest.param("text/html, application/json", False, id="both-alike"),
        pytest.param("text/html;q=0.5, application/json;q=0.9", False, id="json-rather"),
        pytest.param("text/html;q=0.9, application/json;q=0.5", True, id="html-rather"),
        pytest.param("text/html;q=0", False, id="no-html"),
        pytest.param("text/html;level=1;q=0.4, */*;q=0.1", True, id="with-parameters"),
        pytest.param("text/html;q=much, ;;,", False, id="nonsense"),
    ],
)
async def test_json_unless_html_is_asked_for(accept: str, is_html: bool) -> None:
    assert prefers_html(accept) is is_html
    response = await House(node("gpu-a", gpu(1))).get("/devices", accept=accept or None)
    assert response.headers["content-type"] == ("text/html; charset=utf-8" if is_html else "application/json")
    assert response.headers["vary"] == "Accept"


async def test_a_browser_can_have_json_by_name() -> None:
    response = await House(node("gpu-a", gpu(1))).get("/devices?format=json", accept=BROWSER)
    assert list(response.json()) == [GPU[1]]


@pytest.mark.parametrize(
    ("url", "accept", "length"),
    [pytest.param("/", "*/*", True, id="page"), pytest.param("/devices", "*/*", False, id="json")],
)
async def test_head_has_the_headers_of_get_and_no_body(url: str, accept: str, length: bool) -> None:
    house = House(node("gpu-a", gpu(1)))
    got, head = await house.get(url, accept=accept), await house.get(url, "HEAD", accept)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers == got.headers
    assert ("content-length" in head.headers) is length


# As a page.


@pytest.fixture
async def busy() -> House:
    """One device in each state."""
    house = House(
        node("gpu-a", gpu(1, COMPUTE, MEMORY, "model=h100", index=0, model="H100", memory="80Gi"), gpu(2), gpu(3)),
        node("gpu-b", gpu(4), gpu(5), gpu(6, is_healthy=False)),
        notes=["evidence is static: development only"],
    )
    house.prove("gpu-a")
    await house.pending("expired", GPU[4])
    house.clock.now += timedelta(seconds=60)
    await house.pending("pending", GPU[2])
    await house.assigned("assigned", GPU[3])
    house.ledger.begin_release((await house.assigned("orphaned", GPU[5], pod="gone-0")).id)
    house.clock.now += timedelta(seconds=30)
    return house


async def test_the_page_has_a_row_for_every_device(busy: House) -> None:
    page = await busy.page()
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


async def test_a_state_is_told_by_a_shape_too_that_is_silent_in_a_screen_reader(busy: House) -> None:
    page = await busy.page("/?state=expired")
    shapes = [attributes["href"] for tag, attributes in page.tags if tag == "use"]
    assert {f"#{state}" for state in STATES.split(", ")} == set(shapes)
    assert set(shapes) == {f"#{attributes['id']}" for tag, attributes in page.tags if tag == "symbol"}
    assert {attributes.get("aria-hidden") for tag, attributes in page.tags if tag == "svg"} == {"true"}


async def test_the_page_can_be_read_by_a_screen_reader_and_as_cards(busy: House) -> None:
    tags = (await busy.page()).tags
    assert ("html", {"lang": "en"}) in tags
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in tags
    assert [tag for tag, _ in tags].count("table") == 1
    assert [tag for tag, _ in tags].count("caption") == 1
    assert {attributes.get("scope") for tag, attributes in tags if tag == "th"} == {"col"}
    cells = [attributes.get("data-label") for tag, attributes in tags if tag == "td"]
    assert cells == ["Device", "Labels", "Node", "Assignment", "Status"] * 6
    labelled = {attributes["for"] for tag, attributes in tags if tag == "label"}
    assert labelled == {attributes["id"] for tag, attributes in tags if tag in ("input", "select")}


async def test_the_page_may_do_nothing_but_be_read(busy: House) -> None:
    response = await busy.get("/")
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


async def test_notes_are_shown(busy: House) -> None:
    assert "evidence is static: development only" in (await busy.get("/")).text


async def test_no_devices_are_one_row_with_a_sentence() -> None:
    page = await House().page()
    assert page.body == [["No devices are known: no node of the inventory has a GPU."]]
    assert ("td", {"role": "cell", "class": "empty", "colspan": "5"}) in page.tags


HOSTILE = """"'><script>alert(1)</script><img src=x onerror=alert(1)>{{7*7}}"""


async def test_nothing_that_others_wrote_becomes_markup() -> None:
    device = gpu(1, HOSTILE, model=HOSTILE, memory=HOSTILE, serial=HOSTILE)
    house = House(node(HOSTILE, device), notes=[HOSTILE])
    reservation = await house.pending("r1", GPU[1])
    await house.ledger.bind_to_pod(PodProof.REPORTED, reservation.id, PodIdentity("ml", HOSTILE, "uid-1"))
    for url in ("/", str(httpx.URL("/", params={"text": HOSTILE})), str(httpx.URL("/", params={"node": HOSTILE}))):
        page = await house.page(url)
        assert not {"script", "img"} & {tag for tag, _ in page.tags}
        assert page.body[0][1] == HOSTILE
        assert page.body[0][3] == f"ml/{HOSTILE}"
    response = await house.get("/", "GET")
    refused = await house.get(str(httpx.URL("/", params={"state": HOSTILE})))
    assert refused.status_code == 400
    assert "<script" not in response.text + refused.text
    assert (await house.devices())[GPU[1]]["labels"] == [HOSTILE]


# Filters and pages.


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param("", [1, 2, 3, 4, 5, 6], id="all"),
        pytest.param("state=&node=&text=&page=", [1, 2, 3, 4, 5, 6], id="the-empty-form"),
        pytest.param("state=pending", [2], id="state"),
        pytest.param("state=quarantined", [6], id="quarantined"),
        pytest.param("node=gpu-b", [4, 5, 6], id="node"),
        pytest.param("node=gpu", [], id="node-is-the-whole-name"),
        pytest.param("text=MEMORY-80", [1], id="label"),
        pytest.param("text=h100", [1], id="model"),
        pytest.param("text=000000000003", [3], id="uuid"),
        pytest.param("text=infer-x7", [3], id="pod"),
        pytest.param("text=uid-of-gone", [5], id="uid"),
        pytest.param("text=ml/", [2, 3, 4, 5], id="namespace"),
        pytest.param("text=ml/&node=gpu-b&state=orphaned", [5], id="all-three"),
        pytest.param("colour=red", [1, 2, 3, 4, 5, 6], id="other-parameters-do-not-count"),
    ],
)
async def test_a_filter_leaves_what_fits(busy: House, query: str, expected: list[int]) -> None:
    page = await busy.page(f"/?{query}")
    if expected:
        assert page.uuids == [GPU[n] for n in expected]
    else:
        assert page.body == [["No device matches the filter."]]


async def test_the_summary_counts_every_state_and_links_to_it(busy: House) -> None:
    page = await busy.page("/?node=gpu-b&state=orphaned")
    assert {words: page.link(words) for words in (" ".join(text.split()) for text, _ in page.links[2:14])} == {
        "3 devices": "?node=gpu-b",
        "0 available": "?state=available&node=gpu-b",
        **{f"0 {state}": f"?state={state}&node=gpu-b" for state in STATES.split(", ")[1:6]},
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
            [f"state: 'busy' is none of {STATES}"],
            id="state",
        ),
        pytest.param("page=0", ["page: '0' is no page number, 1 being the first"], id="page-zero"),
        pytest.param("page=-1", ["page: '-1' is no page number, 1 being the first"], id="page-below"),
        pytest.param("page=two", ["page: 'two' is no page number, 1 being the first"], id="page-word"),
        pytest.param("page=%C2%B2", ["page: '²' is no page number, 1 being the first"], id="page-superscript"),
        pytest.param(
            "state=Pending&page=9999999999",
            [
                f"state: 'Pending' is none of {STATES}",
                "page: '9999999999' is no page number, 1 being the first",
            ],
            id="both",
        ),
    ],
)
async def test_a_query_that_cannot_be_read_is_refused_with_every_mistake(
    busy: House, query: str, mistakes: list[str]
) -> None:
    response = await busy.get(f"/?{query}")
    assert response.status_code == 400
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(response.text)
    assert page.texts["li"].split("\n") == ["".join(mistakes)]
    assert page.link("Show all devices") == "?"
    assert page.rows == []


def many(count: int, per_node: int = 8) -> Iterator[Node]:
    labels = frozenset({COMPUTE, MEMORY})
    for first in range(0, count, per_node):
        devices = (
            Device(DeviceUuid(f"GPU-{n:06}"), n % per_node, labels=labels) for n in range(first, first + per_node)
        )
        yield Node(f"gpu-{first:06}", devices=tuple(devices))


async def test_a_page_has_200_rows_and_leads_to_the_others() -> None:
    house = House(*many(408))
    first, middle, last = [await house.page(f"/?text=gpu&page={n}") for n in (1, 2, 3)]
    assert [len(page.body) for page in (first, middle, last)] == [200, 200, 8]
    assert first.uuids + middle.uuids + last.uuids == [f"GPU-{n:06}" for n in range(408)]
    assert (first.texts["caption"]).strip() == "Devices 1 to 200 of 408 that match the filter"
    assert (last.texts["caption"]).strip() == "Devices 401 to 408 of 408 that match the filter"
    assert pager(first) == [None, None, "?text=gpu&page=2", "?text=gpu&page=3"]
    assert pager(middle) == ["?text=gpu", "?text=gpu", "?text=gpu&page=3", "?text=gpu&page=3"]
    assert pager(last) == ["?text=gpu", "?text=gpu&page=2", None, None]


def pager(page: Page) -> list[str | None]:
    return [page.link(text) for text in ("First", "Previous", "Next", "Last")]


async def test_a_page_past_the_end_says_which_is_the_last() -> None:
    page = await House(*many(208)).page("/?page=9")
    assert page.body == [["There is no page 9: the last one is page 2."]]
    assert page.link("Previous") == "?page=2"


# A large fleet, and one that changes.


async def longest_wait_during(work: Awaitable[httpx.Response]) -> tuple[httpx.Response, float]:
    """How long another coroutine had to wait for its turn while the work was done."""
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
async def test_a_fleet_of_100_000_devices_leaves_others_their_turn(url: str) -> None:
    house = House(*many(100_000))
    response, longest = await longest_wait_during(house.get(url))
    assert response.status_code == 200
    if url == "/devices":
        seen = response.json()
        assert len(seen) == 100_000
        assert seen["GPU-099999"]["node"] == "gpu-099992"
    assert longest < 0.25  # a slice takes a millisecond; the rest is for slow machines


async def test_what_changes_while_it_is_told_is_told_once() -> None:
    house = House(*many(2_000))
    telling = asyncio.create_task(house.get("/devices"))
    changes = 0
    while not telling.done():
        house.fleet.remove(f"gpu-{changes * 8:06}")
        house.put(Node(f"new-{changes}", devices=(Device(DeviceUuid(f"GPU-{1999 - changes:06}")),)))
        await house.pending(f"r{changes}", DeviceUuid(f"GPU-{1000 + changes:06}"))
        changes += 1
        await asyncio.sleep(0)
    response = await telling
    assert changes > 8
    assert response.text.count('"node"') == len(response.json())


async def everything(namespaces: Collection[str]) -> Collection[str]:
    return namespaces


async def test_a_snapshot_is_of_the_moment_it_was_begun() -> None:
    house = House(*many(1_600))
    await house.pending("r0", DeviceUuid("GPU-000000"))
    looking = asyncio.create_task(take_snapshot(house.fleet, house.ledger, NOON, everything))
    await asyncio.sleep(0)
    house.fleet.remove("gpu-000008")
    house.put(Node("later", devices=(Device(DeviceUuid("GPU-later")),)))
    await house.pending("r1", DeviceUuid("GPU-000001"))
    seen = {one.device.uuid: one for one in sightings(await looking, NOON)}
    assert sorted(seen) == [f"GPU-{n:06}" for n in range(1_600)]
    assert [uuid for uuid, one in seen.items() if one.holders] == ["GPU-000000"]
