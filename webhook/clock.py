"""The time of day. Nobody else asks for it: whoever needs `now` is told, so that a test can say what time it is."""

from collections.abc import Callable
from datetime import UTC, datetime

# Always aware, always UTC.
Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)  # noqa: TID251 - the one place that may ask
