"""What a write to the API server comes to: written, refused, stale, or unknown."""

from webhook.core.errors import LedgerError, LedgerUnavailableError


class StaleError(LedgerError):
    """Somebody else has written since: nothing was written."""


class RefusedError(LedgerError):
    """The store's own rules forbid it: nothing was written."""


class StoreUnavailableError(LedgerUnavailableError):
    """No answer, or one that says nothing: it may have been written, or not."""
