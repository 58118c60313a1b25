"""Moves on the reservations of one node, without a store."""

from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from tests import builders
from webhook.core.errors import ReservationExpiredError
from webhook.core.reservation import Orphan, Phase, PodProof, Reservation, ReservationEvent
from webhook.ledger.moves import BindPod, ClearOrphanMark, Expire, MarkOrphaned, MarkUnused, Move, Times

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


ORPHAN = Orphan(builders.NOW, SHORT)
POD = builders.identity()
CONFIRMED = builders.reservation(phase=Phase.FINALIZED, uid=POD.uid)
MARKED = evolve(CONFIRMED, orphan=ORPHAN)
LATER = builders.NOW + timedelta(seconds=60)


@pytest.mark.parametrize(
    ("move", "held"),
    [
        pytest.param(
            MarkOrphaned(CONFIRMED.id, POD, CONFIRMED.since, ORPHAN),
            CONFIRMED.after(ReservationEvent.POD_ENDED),
            id="orphan-is-released-meanwhile",
        ),
        pytest.param(
            MarkOrphaned(CONFIRMED.id, POD, LATER, ORPHAN), CONFIRMED, id="reservation-is-newer-than-the-orphan"
        ),
        pytest.param(
            ClearOrphanMark(MARKED.id, "another", MARKED.since, ORPHAN), MARKED, id="mark-of-another-pod-stays"
        ),
        pytest.param(
            ClearOrphanMark(MARKED.id, POD.uid, MARKED.since, evolve(ORPHAN, at=LATER)), MARKED, id="newer-mark-stays"
        ),
        pytest.param(
            MarkUnused(CONFIRMED.id, POD.uid, CONFIRMED.since, LATER), CONFIRMED, id="reservation-is-no-orphan"
        ),
        pytest.param(
            MarkUnused(MARKED.id, POD.uid, MARKED.since, ORPHAN.at + 2 * TIMES.clock_skew),
            MARKED,
            id="node-was-asked-too-early",
        ),
        pytest.param(Expire(CONFIRMED.id), CONFIRMED, id="confirmed-reservation-does-not-expire"),
    ],
)
def test_move_that_no_longer_applies_changes_nothing(move: Move, held: Reservation) -> None:
    now = {held.id: held}
    assert move.apply(now, now, builders.NOW, TIMES) is None
    assert now == {held.id: held}


def test_repeated_report_that_an_orphan_is_unused_keeps_the_first_time() -> None:
    held = {MARKED.id: MARKED}
    first = MarkUnused(MARKED.id, POD.uid, MARKED.since, LATER).apply(held, held, LATER, TIMES)
    assert first is not None
    assert first.orphan == evolve(ORPHAN, unused_at=LATER)
    again = MarkUnused(MARKED.id, POD.uid, MARKED.since, 2 * SHORT + LATER).apply(held, held, LATER, TIMES)
    assert again == first == held[MARKED.id]
