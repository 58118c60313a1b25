"""Turns of queued claims, and repeated conflicts."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import NOW
from webhook.admission.reserving import Reserver
from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
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


# Turns.


class CountingFleet(Fleet):
    """Counts the searches."""

    questions = 0

    def index_labels(self, asked: NodesAsked) -> frozenset[str]:
        self.questions += 1
        return super().index_labels(asked)


ZONE = builders.required_affinity(builders.term(builders.expression("kubernetes.io/hostname", "NotIn", "node-x")))


def reserver_of(fleet: Fleet, *, always: bool = False) -> Reserver:
    ledger = MemoryLedger(fleet, lambda: NOW, Times(DEADLINE, SKEW))
    return Reserver(fleet, ledger, EvidencePolicy(is_always_required=always), lambda: NOW, Metrics())


def waiter(count: int, **members: Any) -> QueuedPod:
    claim = builders.claim(builders.raw_pod(builders.raw_container(gpus=count), **members))
    return QueuedPod(PodIdentity("ml", f"p{count}", f"uid-{count}"), NOW + timedelta(seconds=count), claim)


def sized(name: str, gpus: int, **members: Any) -> Node:
    return builders.node(name, *(builders.device(f"{name}-{k}") for k in range(gpus)), **members)


async def test_one_search_decides_the_turn_of_any_number_of_waiting_claims() -> None:
    fleet = CountingFleet()
    for number in range(20):
        fleet.put(sized(f"node-{number}", 8, labels={"kubernetes.io/hostname": f"node-{number}"}), NOW)
    reserver = reserver_of(fleet)
    for count in range(9, 500):
        reserver.queue_order.put(waiter(count, affinity=ZONE))
    claim = waiter(1, affinity=ZONE).claim
    assert reserver.queued_ahead(claim) is None
    assert fleet.questions == 1
    reserver.queue_order.put(waiter(8, affinity=ZONE))
    refused = reserver.queued_ahead(claim)
    assert refused is not None
    assert refused.hint == "the earlier pod asks for 8"


def test_claim_without_gpus_neither_waits_for_nor_blocks_claims_with_gpus() -> None:
    fleet = builders.fleet(sized("node-a", 2), proven={"node-a": builders.HASH})
    asked: dict[str, Any] = {"annotations": {"gpuwarden.io/required-hash": builders.HASH}}
    reserver = reserver_of(fleet)
    only_proven = builders.claim(builders.raw_pod(**asked))
    reserver.queue_order.put(waiter(2, **asked))
    assert reserver.queued_ahead(waiter(1, **asked).claim) is not None
    assert reserver.queued_ahead(only_proven) is None
    reserver.queue_order.drop("uid-2")
    reserver.queue_order.put(QueuedPod(PodIdentity("ml", "p0", "uid-0"), NOW, only_proven))
    assert reserver.queued_ahead(waiter(1, **asked).claim) is None


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
def test_queued_claim_blocks_others_if_it_can_be_served_or_waits_for_free_gpus(
    nodes: list[Node], members: dict[str, Any], *, always: bool
) -> None:
    """The decision on each queued claim is the reference."""
    fleet = builders.fleet(*nodes, proven={"node-b": builders.HASH})
    for count in range(1, 6):
        reserver = reserver_of(fleet, always=always)
        first = waiter(count, **members)
        reserver.queue_order.put(first)
        found = decide(first.claim, fleet, reserver.policy)
        holds_up = not isinstance(found, Deny) or found.reason is Reason.NO_FREE_DEVICE
        assert (reserver.queued_ahead(waiter(1, **members).claim) is not None) is holds_up


@pytest.mark.parametrize(
    ("text", "holds_up"), [("0=node-a:0", True), ("0=node-a:7", False), ("0=node-b:0", False), ("1=node-a:0", False)]
)
@pytest.mark.parametrize("is_free", [True, False])
def test_mapped_pod_blocks_only_claims_for_its_own_gpus(text: str, *, holds_up: bool, is_free: bool) -> None:
    fleet = builders.fleet(builders.node("node-a", builders.device("GPU-0", index=0), builders.device("GPU-1")))
    if not is_free:
        fleet.hold(builders.reservation(builders.slot("GPU-0")))
    reserver = reserver_of(fleet)
    mapped: dict[str, Any] = {
        "name": "web-0",
        "annotations": {"gpuwarden.io/gpu-map": text},
        "owners": [builders.stateful_set("web")],
    }
    first = QueuedPod(PodIdentity("ml", "web-0", "uid-0"), NOW, builders.claim(builders.raw_pod(**mapped)))
    reserver.queue_order.put(first)
    assert (reserver.queued_ahead(first.claim) is not None) is holds_up


def test_largest_node_follows_the_fleet() -> None:
    fleet = Fleet()
    reserver = reserver_of(fleet)
    asked = waiter(4).claim
    assert reserver.exceeds_every_node(asked) is None
    fleet.put(sized("node-a", 2), NOW)
    assert reserver.exceeds_every_node(asked) == Deny(
        Reason.NO_MATCHING_DEVICE, "4 GPUs: no node has more than 2 GPUs", hint="ask for GPUs that a node has"
    )
    fleet.put(sized("node-b", 4), NOW)
    assert reserver.exceeds_every_node(asked) is None
    fleet.put(sized("node-b", 3), NOW)
    assert reserver.exceeds_every_node(asked) is not None
    fleet.remove("node-b")
    fleet.remove("node-a")
    assert reserver.exceeds_every_node(asked) is None


class RefusingLedger(MemoryLedger):
    """A ledger that refuses every placement: it knows something that the fleet does not."""

    tries = 0

    async def reserve(self, ask: ReservationRequest, *_: object, answer_by: datetime) -> Reservation:
        await asyncio.sleep(0)
        self.tries += 1
        if utc_now() >= answer_by:
            raise DeadlinePassedError(ask.id)
        raise SlotsTakenError(ask.id)


async def test_repeated_conflicts_are_retried_with_pauses_that_do_not_block_others() -> None:
    fleet = Fleet()
    fleet.put(Node("node-a", devices=(Device(DeviceUuid("GPU-0")),)), utc_now())
    ledger = RefusingLedger(fleet, utc_now, Times(DEADLINE, SKEW))
    reserver = Reserver(fleet, ledger, EvidencePolicy(), utc_now, Metrics())
    ask = ReservationRequest(ReservationId("r1"), "ml", CLAIM.digest)
    denied = await reserver.reserve(ask, CLAIM, answer_by=utc_now() + timedelta(seconds=0.5))
    assert isinstance(denied, Deny)
    assert denied.reason is Reason.DEADLINE_PASSED
    assert 3 <= ledger.tries <= 30
