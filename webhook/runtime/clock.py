"""The current time. Only this module reads the system clock; other code gets a `Clock`, so that tests set the time."""

from collections.abc import Callable
from datetime import UTC, datetime

# Always aware, always UTC.
Clock = Callable[[], datetime]
# Clocks show times between these two. LONG_AGO also stands for an unknown time in the past.
LONG_AGO, LATEST = datetime.fromtimestamp(0, UTC), datetime(3000, 1, 1, tzinfo=UTC)


def utc_now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 - the only caller


def is_plausible(moment: datetime) -> bool:
    """Whether a clock could show this time. Arithmetic with other times can leave the range of `datetime`."""
    return LONG_AGO <= moment < LATEST
