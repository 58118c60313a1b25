"""Reservations that were made in the review of a Binding, until the Binding is carried out or lost."""

from datetime import timedelta

import pytest
from attrs import evolve

from tests import builders
from tests.builders import Raw
from tests.ledger.contract import CLOCK_SKEW, on
from tests.ledger.test_reconcile import POD, RECORD, Scene
from webhook.core.errors import ReservationConflictError
from webhook.core.reservation import Phase, ReservationRequest
from webhook.ledger.at_binding import ACCEPTED_FOR, MAX_BINDING_DURATION, reservation_id_on
from webhook.ledger.reconcile import RECHECK_DELAY

ID = reservation_id_on("node-a", POD)
ASK = ReservationRequest(ID, POD.namespace, RECORD.digest(), POD.name, uid=POD.uid)
IN_FLIGHT = ACCEPTED_FOR + MAX_BINDING_DURATION + 2 * CLOCK_SKEW


def raw_pod(node: str | None = None, **annotations: str) -> Raw:
    """The pod, before its Binding or on the node."""
    record = {"gpuwarden.io/claim": RECORD.text()}
    raw = builders.raw_pod(
        name=POD.name, namespace=POD.namespace, uid=POD.uid, annotations=record | annotations, nodeName=node
    )
    meta = {**raw["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {**raw, "metadata": meta, "status": {"phase": "Pending"}}


def bound_to(node: str) -> Raw:
    written = {
        "gpuwarden.io/reservation-id": reservation_id_on(node, POD),
        "gpuwarden.io/node": node,
        "gpuwarden.io/gpu-uuid": "GPU-a0" if node == "node-a" else "GPU-b0",
    }
    return raw_pod(node, **written)


@pytest.fixture
async def scene() -> Scene:
    """The pod exists, and a review has reserved a GPU for its Binding."""
    there = Scene()
    there.show(raw_pod())
    await there.bench.reserve(ASK, on("node-a", "GPU-a0"))
    return there


async def test_reservation_belongs_to_the_pod_at_once_and_has_no_deadline(scene: Scene) -> None:
    entry = scene.bench.held()["GPU-a0/0"]
    assert (entry["phase"], entry["uid"]) == ("finalized", POD.uid)
    assert "deadline" not in entry


async def test_reservation_stays_while_the_binding_may_be_carried_out(scene: Scene) -> None:
    scene.bench.now += IN_FLIGHT - timedelta(seconds=1)
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_reservation_of_a_lost_binding_is_released(scene: Scene) -> None:
    scene.bench.now += IN_FLIGHT
    await scene.reconciler.step()
    assert scene.bench.held() == {}


async def test_repeated_binding_renews_the_reservation(scene: Scene) -> None:
    scene.bench.now += IN_FLIGHT - timedelta(seconds=1)
    await scene.bench.reserve(ASK, on("node-a", "GPU-a0"))
    scene.bench.now += timedelta(seconds=2)
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_release_that_was_decided_before_the_renewal_has_no_effect(scene: Scene) -> None:
    (held,) = scene.bench.ledger.reservations()
    scene.bench.now += timedelta(seconds=1)
    await scene.bench.reserve(ASK, on("node-a", "GPU-a0"))
    assert not await scene.bench.ledger.release(held.id, POD, node=held.node, since=held.since)
    assert scene.phase is Phase.FINALIZED


async def test_request_of_another_claim_does_not_renew_it(scene: Scene) -> None:
    with pytest.raises(ReservationConflictError):
        await scene.bench.reserve(evolve(ASK, claim_digest="another"), on("node-a", "GPU-a0"))


async def test_bound_pod_keeps_its_reservation(scene: Scene) -> None:
    scene.show(bound_to("node-a"))
    scene.bench.now += IN_FLIGHT + 2 * RECHECK_DELAY
    await scene.reconciler.step()
    assert scene.phase is Phase.FINALIZED


async def test_pod_that_is_bound_elsewhere_frees_it_at_once(scene: Scene) -> None:
    other = evolve(ASK, id=reservation_id_on("node-b", POD))
    await scene.bench.reserve(other, on("node-b", "GPU-b0"))
    await scene.reconciler.step()
    assert (set(scene.bench.held()), set(scene.bench.held("node-b"))) == ({"GPU-a0/0"}, {"GPU-b0/0"})
    scene.bench.now += RECHECK_DELAY
    scene.show(bound_to("node-b"))
    await scene.reconciler.step()
    assert (set(scene.bench.held()), set(scene.bench.held("node-b"))) == (set(), {"GPU-b0/0"})


async def test_pod_that_is_deleted_before_its_binding_frees_it_at_once(scene: Scene) -> None:
    scene.bench.pods.uids.discard(POD.uid)
    scene.reconciler.deleted(raw_pod())
    await scene.reconciler.step()
    assert scene.bench.held() == {}
