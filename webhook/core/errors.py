"""The faults that the product knows by name. A denial is a value (`verdict.py`), not one of these."""


class GpuwardenError(Exception):
    """A fault that is translated where it arises and answered in one place."""


class MalformedReviewError(GpuwardenError):
    """The body is no AdmissionReview that could be answered by uid: HTTP 400."""


class InvalidPodError(GpuwardenError):
    """The pod asks for something in a way that cannot be read; every mistake is named."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


class LedgerError(GpuwardenError):
    """A reservation could not be made or changed."""


class SlotsTakenError(LedgerError):
    """None of the placements was free any more: decide afresh."""


class PlacementRefusedError(SlotsTakenError):
    """No placement can be held, taken or not: the ledger's own rules forbid it."""


class ReservationConflictError(LedgerError):
    """The reservation belongs to another claim or another pod."""


class ReservationExpiredError(LedgerError):
    """The reservation's deadline has passed: nobody may count on it."""


class UnknownReservationError(LedgerError):
    """There is no such reservation."""


class DeadlinePassedError(LedgerError):
    """The caller has stopped waiting: nothing was written."""


class LedgerUnavailableError(LedgerError):
    """The ledger could not be asked."""


class IllegalMoveError(GpuwardenError):
    """A reservation was asked to do what `MOVES` does not list."""
