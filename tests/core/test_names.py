"""Names that objects can have."""

import pytest

from webhook.core.names import is_object_name


@pytest.mark.parametrize("name", ["train-0", "a", "0", "gpu-1.example.com", "a" * 253])
def test_a_dns_subdomain_is_a_name(name: str) -> None:
    assert is_object_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a%b", "a/b", "a..b", ".a", "a.", "-a", "a-", "a.-b", "A", "a_b", "a b", "a\n", "ä", "a" * 254],
)
def test_what_leads_elsewhere_is_none(name: str) -> None:
    assert not is_object_name(name)
