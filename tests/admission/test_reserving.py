"""Whose turn it is, and what is chosen over and over."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import NOW
from webhook.admission.reserving import Reserver
from webhook.core.claim import Claim, ClaimRecord
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.errors import DeadlinePassedError, SlotsTakenError
from webhook.core.fleet import Fleet
from webhook.core.nodes_asked import NodesAsked
from webhook.core.queue_order import QueuedPod
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity, Reservation, ReservationId, ReservationRequest
from webhook.core.verdict import Deny
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.runtime.clock import utc_now
from webhook.runtime.telemetry import Metrics

DEADLINE, SKEW = timedelta(seconds=90), timedelta(seconds=5)
CLAIM = Claim(ClaimRecord(gpus=1))


# Whose turn it is.


class Asked(Fleet):
    """Counts the questions that it was asked."""

    questions = 0

    def index_labels(self, asked: NodesAsked) -> frozenset[str]:
        self.questions += 1
        return super().index_labels(asked)


ZONE = builders.required_affinity(builders.term(builders.expression("kubernetes.io/hostname", "NotIn", "node-x")))


def holder(fleet: Fleet, *, always: bool = False) -> Reserver:
    ledger = MemoryLedger(fleet, lambda: NOW, Times(DEADLINE, SKEW))
    return Reserver(fleet, ledger, EvidencePolicy(is_always_required=always), lambda: NOW, Metrics())


def waiter(count: int, **members: Any) -> QueuedPod:
    claim = builders.claim(builders.raw_pod(builders.raw_container(gpus=count), **members))
    return QueuedPod(PodIdentity("ml", f"p{count}", f"uid-{count}"), NOW + timedelta(seconds=count), claim)


def sized(name: str, gpus: int, **members: Any) -> Node:
    return builders.node(name, *(builders.device(f"{name}-{k}") for k in range(gpus)), **members)


async def test_however_many_wait_it_is_one_question_whose_turn_it_is() -> None:
    fleet = Asked()
    for number in range(20):
        fleet.put(sized(f"node-{number}", 8, labels={"kubernetes.io/hostname": f"node-{number}"}), NOW)
    house = holder(fleet)
    for count in range(9, 500):
        house.lines.put(waiter(count, affinity=ZONE))
    claim = waiter(1, affinity=ZONE).claim
    assert house.others_first(claim) is None
    assert fleet.questions == 1
    house.lines.put(waiter(8, affinity=ZONE))
    refused = house.others_first(claim)
    assert refused is not None
    assert refused.hint == "the earlier pod asks for 8"


def test_who_wants_no_gpu_waits_behind_nobody_who_does_and_holds_up_nobody() -> None:
    fleet = builders.fleet(sized("node-a", 2), proven={"node-a": builders.HASH})
    asked: dict[str, Any] = {"annotations": {"gpuwarden.io/required-hash": builders.HASH}}
    house = holder(fleet)
    only_proven = builders.claim(builders.raw_pod(**asked))
    house.lines.put(waiter(2, **asked))
    assert house.others_first(waiter(1, **asked).claim) is not None
    assert house.others_first(only_proven) is None
    house.lines.drop("uid-2")
    house.lines.put(QueuedPod(PodIdentity("ml", "p0", "uid-0"), NOW, only_proven))
    assert house.others_first(waiter(1, **asked).claim) is None


FLEETS = {
    "plain": [sized("node-a", 4), sized("node-b", 2)],
    "not-ready": [sized("node-a", 4, is_ready=False), sized("node-b", 2)],
    "cordoned": [sized("node-a", 4, is_cordoned=True)],
    "not-selected": [sized("node-x", 4, labels={"kubernetes.io/hostname": "node-x"}), sized("node-b", 1)],
    "without-gpus": [sized("node-a", 0)],
    "none": [],
}


@pytest.mark.parametrize("members", [{}, {"affinity": ZONE}, {"nodeSelector": {"kubernetes.io/hostname": "node-x"}}])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("nodes", FLEETS.values(), ids=FLEETS)
def test_those_hold_up_others_who_could_be_served_or_wait_for_free_gpus(
    nodes: list[Node], members: dict[str, Any], *, always: bool
) -> None:
    """As the decision on each of them says."""
    fleet = builders.fleet(*nodes, proven={"node-b": builders.HASH})
    for count in range(1, 6):
        house = holder(fleet, always=always)
        first = waiter(count, **members)
        house.lines.put(first)
        found = decide(first.claim, fleet, house.policy)
        holds_up = not isinstance(found, Deny) or found.reason is Reason.NO_FREE_DEVICE
        assert (house.others_first(waiter(1, **members).claim) is not None) is holds_up


@pytest.mark.parametrize(
    ("text", "holds_up"), [("0=node-a:0", True), ("0=node-a:7", False), ("0=node-b:0", False), ("1=node-a:0", False)]
)
@pytest.mark.parametrize("is_free", [True, False])
def test_a_mapped_pod_holds_up_those_of_its_place_where_its_gpus_are(
    text: str, *, holds_up: bool, is_free: bool
) -> None:
    fleet = builders.fleet(builders.node("node-a", builders.device("GPU-0", index=0), builders.device("GPU-1")))
    if not is_free:
        fleet.hold(builders.reservation(builders.slot("GPU-0")))
    house = holder(fleet)
    mapped: dict[str, Any] = {
        "name": "web-0",
        "annotations": {"gpuwarden.io/gpu-map": text},
        "owners": [builders.stateful_set("web")],
    }
    first = QueuedPod(PodIdentity("ml", "web-0", "uid-0"), NOW, builders.claim(builders.raw_pod(**mapped)))
    house.lines.put(first)
    assert (house.others_first(first.claim) is not None) is holds_up


def test_what_is_more_than_any_node_has_is_known_as_nodes_come_and_go() -> None:
    fleet = Fleet()
    house = holder(fleet)
    asked = waiter(4).claim
    assert house.never(asked) is None
    fleet.put(sized("node-a", 2), NOW)
    assert house.never(asked) == Deny(
        Reason.NO_MATCHING_DEVICE, "4 GPUs: no node has more than 2 GPUs", hint="ask for GPUs that a node has"
    )
    fleet.put(sized("node-b", 4), NOW)
    assert house.never(asked) is None
    fleet.put(sized("node-b", 3), NOW)
    assert house.never(asked) is not None
    fleet.remove("node-b")
    fleet.remove("node-a")
    assert house.never(asked) is None


class BehindLedger(MemoryLedger):
    """Knows what the fleet has not heard of yet: what is chosen cannot be had."""

    tries = 0

    async def reserve(self, ask: ReservationRequest, *_: object, answer_by: datetime) -> Reservation:
        await asyncio.sleep(0)
        self.tries += 1
        if utc_now() >= answer_by:
            raise DeadlinePassedError(ask.id)
        raise SlotsTakenError(ask.id)


async def test_what_cannot_be_had_over_and_over_is_waited_for_and_keeps_nobody_else_waiting() -> None:
    fleet = Fleet()
    fleet.put(Node("node-a", devices=(Device(DeviceUuid("GPU-0")),)), utc_now())
    ledger = BehindLedger(fleet, utc_now, Times(DEADLINE, SKEW))
    reserver = Reserver(fleet, ledger, EvidencePolicy(), utc_now, Metrics())
    ask = ReservationRequest(ReservationId("r1"), "ml", CLAIM.digest)
    denied = await reserver.hold(ask, CLAIM, answer_by=utc_now() + timedelta(seconds=0.5))
    assert isinstance(denied, Deny)
    assert denied.reason is Reason.DEADLINE_PASSED
    assert 3 <= ledger.tries <= 30
