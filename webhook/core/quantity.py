"""Kubernetes quantities such as `100m`, `1.5`, `2Gi` or `1e3`, as whole thousandths."""

import re
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache

from webhook.core.errors import InvalidPodError

MILLI = 1000
MAX_LENGTH = 40
DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]?))")


def thousandths(amount: str | int | float | None) -> int:
    """The amount in thousandths, rounded up as the scheduler does. None and the empty text are 0."""
    if amount is None or amount == "":
        return 0
    return read(str(amount))


@lru_cache(maxsize=10_000)
def read(text: str) -> int:
    found = FORM.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None:
        raise InvalidPodError(f"{text[:MAX_LENGTH]!r} is not a quantity")
    digits, exponent, suffix = found.groups()
    number = Decimal(digits) * MILLI
    if exponent is not None:
        number = number.scaleb(int(exponent))
    elif suffix in BINARY:
        number *= 2 ** BINARY[suffix]
    else:
        number = number.scaleb(DECIMAL[suffix or ""])
    return int(number.to_integral_value(ROUND_CEILING))
