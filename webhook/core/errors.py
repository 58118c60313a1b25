"""The errors of the product. A denial is a value (`verdict.py`), not an error."""


class GpuwardenError(Exception):
    """An expected error: translated where it occurs, answered in one place."""


class MalformedReviewError(GpuwardenError):
    """The body is not an AdmissionReview with a uid: HTTP 400."""


class InvalidPodError(GpuwardenError):
    """The pod's claim is invalid; the error has every mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


class LedgerError(GpuwardenError):
    """A reservation could not be made or changed."""


class SlotsTakenError(LedgerError):
    """None of the placements is free any more: decide again."""


class PlacementRefusedError(SlotsTakenError):
    """The ledger's own rules forbid every placement, whether free or not."""


class ReservationConflictError(LedgerError):
    """The reservation belongs to another claim or another pod."""


class ReservationExpiredError(LedgerError):
    """The reservation's deadline has passed."""


class UnknownReservationError(LedgerError):
    """The reservation does not exist."""


class DeadlinePassedError(LedgerError):
    """The caller has stopped waiting. Nothing was written."""


class LedgerUnavailableError(LedgerError):
    """The ledger could not be reached."""


class IllegalMoveError(GpuwardenError):
    """`MOVES` does not list this change of a reservation."""
