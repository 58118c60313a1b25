"""Moves on the reservations of one node, without a store."""

from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from tests import builders
from webhook.core.errors import ReservationExpiredError
from webhook.core.reservation import PodProof, ReservationEvent
from webhook.ledger.moves import BindPod, Times

TIMES = Times(pending_deadline=timedelta(seconds=90), clock_skew=timedelta(seconds=5))


@pytest.mark.parametrize("proof", [PodProof.REPORTED, PodProof.CONFIRMED])
def test_releasing_reservation_is_given_to_no_pod(proof: PodProof) -> None:
    leaving = builders.reservation().after(ReservationEvent.POD_ENDED)
    move = BindPod(leaving.id, builders.identity(), proof)
    with pytest.raises(ReservationExpiredError):
        move.apply({leaving.id: leaving}, {leaving.id: leaving}, builders.NOW, TIMES)


SHORT, LONG = timedelta(seconds=5), timedelta(seconds=600)


@pytest.mark.parametrize(
    ("before", "said", "after"),
    [
        pytest.param({"uid": None}, SHORT, SHORT, id="new pod"),
        pytest.param({"uid": None}, None, None, id="not given"),
        pytest.param({"grace": SHORT}, LONG, LONG, id="longer"),
        pytest.param({"grace": LONG}, SHORT, LONG, id="shorter"),
        pytest.param({"grace": LONG}, None, LONG, id="not given again"),
        pytest.param({}, LONG, None, id="pod may exist, none stored"),
    ],
)
def test_grace_period_is_stored_with_the_pod_and_never_shortened(
    before: dict[str, Any], said: timedelta | None, after: timedelta | None
) -> None:
    pod = builders.identity()
    one = evolve(builders.reservation(), **{"uid": pod.uid, "grace": None, **before})
    held = {one.id: one}
    BindPod(one.id, pod, PodProof.NAMED, said).apply(held, held, builders.NOW, TIMES)
    assert held[one.id].grace == after
