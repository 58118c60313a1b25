"""Valid names of objects and labels."""

import pytest

from webhook.core.names import is_label_key, is_label_value, is_object_name


@pytest.mark.parametrize("name", ["train-0", "a", "0", "gpu-1.example.com", "a" * 253])
def test_dns_subdomain_is_an_object_name(name: str) -> None:
    assert is_object_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a%b", "a/b", "a..b", ".a", "a.", "-a", "a-", "a.-b", "A", "a_b", "a b", "a\n", "ä", "a" * 254],
)
def test_text_that_is_not_a_subdomain_is_not_an_object_name(name: str) -> None:
    assert not is_object_name(name)


@pytest.mark.parametrize("key", ["a", "A_b.c-d", "a" * 63, "example.com/a", f"{'a' * 253}/b"])
def test_key_with_or_without_a_domain_is_a_label_key(key: str) -> None:
    assert is_label_key(key)


@pytest.mark.parametrize(
    "key", ["", "/", "a/", "/a", "A.com/a", "a/b/c", "-a", "a-", "a" * 64, f"{'a' * 254}/b", "a b", "a\n"]
)
def test_other_text_is_no_label_key(key: str) -> None:
    assert not is_label_key(key)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [("", True), ("a", True), ("a.b_c-d", True), ("a" * 63, True), ("a" * 64, False), ("a/b", False), (".a", False)],
)
def test_label_value_is_empty_or_a_name(value: str, *, is_one: bool) -> None:
    assert is_label_value(value) is is_one
