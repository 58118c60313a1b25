"""The time of day. Nobody else asks for it: whoever needs `now` is told, so that a test can say what time it is."""

from collections.abc import Callable
from datetime import UTC, datetime

# Always aware, always UTC.
Clock = Callable[[], datetime]
# What clocks show lies between these; the first is also when something was of which nobody says when.
LONG_AGO, LATEST = datetime.fromtimestamp(0, UTC), datetime(3000, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 - the one place that may ask


def is_of_our_days(moment: datetime) -> bool:
    """Whether a clock could have shown it. Elsewhere the calendar would end under whoever reckons with it."""
    return LONG_AGO <= moment < LATEST
