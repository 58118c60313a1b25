"""The outcomes of a write to the API server other than success: refused, stale, or unknown."""

from webhook.core.errors import LedgerError, LedgerUnavailableError


class StaleError(LedgerError):
    """The object has changed since it was read. Nothing was written."""


class RefusedError(LedgerError):
    """A rule of the API server rejects the object. Nothing was written."""


class StoreUnavailableError(LedgerUnavailableError):
    """There was no usable answer. The write may have been carried out."""
