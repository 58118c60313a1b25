"""Kubernetes quantities."""

import pytest

from webhook.core.errors import InvalidPodError
from webhook.core.quantity import thousandths


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("1", 1000),
        ("100m", 100),
        ("0.5", 500),
        (".5", 500),
        ("1.", 1000),
        ("2k", 2_000_000),
        ("1Ki", 1_024_000),
        ("1.5Gi", 1_610_612_736_000),
        ("1e3", 1_000_000),
        ("1E3", 1_000_000),
        ("1E", 10**21),
        ("1Ei", 1000 * 2**60),
        ("5e-1", 500),
        ("1n", 1),  # rounded up, as the scheduler does
        ("1500u", 2),
        ("+1", 1000),
        (4, 4000),
        (0.25, 250),
        (None, 0),
        ("", 0),
        ("-1", -1000),
    ],
    ids=repr,
)
def test_quantity_in_thousandths(amount: str | int | float | None, expected: int) -> None:
    assert thousandths(amount) == expected


@pytest.mark.parametrize("text", ["x", "1 Gi", "1gi", "1e", "1e999", "nan", "0x1", "1_000", "1" * 41, "٣"], ids=repr)
def test_invalid_quantity_is_a_mistake(text: str) -> None:
    with pytest.raises(InvalidPodError, match="is not a quantity"):
        thousandths(text)
