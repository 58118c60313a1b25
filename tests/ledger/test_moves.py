"""Moves on the reservations of one node, with no store around them."""

from datetime import timedelta

import pytest

from tests import builders
from webhook.core.errors import ReservationExpiredError
from webhook.core.reservation import Event
from webhook.ledger.moves import Name, Times

TIMES = Times(pending_deadline=timedelta(seconds=90), clock_skew=timedelta(seconds=5))


@pytest.mark.parametrize("is_proven", [False, True], ids=["told", "seen in the API server"])
def test_no_pod_gets_a_reservation_that_is_being_released(*, is_proven: bool) -> None:
    leaving = builders.reservation().after(Event.POD_ENDED)
    move = Name(leaving.id, builders.identity(), exists=True, is_proven=is_proven)
    with pytest.raises(ReservationExpiredError):
        move.apply({leaving.id: leaving}, {leaving.id: leaving}, builders.NOW, TIMES)
