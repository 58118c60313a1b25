"""Deeply nested and unusual objects, as users can have the API server store them."""

import json

import msgspec
import pytest

from tests.builders import Raw
from webhook.kube.json_objects import decoded, object_in, without_managed_fields

DEEPEST = 10_000  # the API server's own limit


def text_of(raw: Raw, levels: int) -> bytes:
    """With so many levels of nesting; written as text, because encoders fail on it too."""
    nested = '{"f:a":' * levels + "{}" + "}" * levels
    return json.dumps(raw, separators=(",", ":")).replace('"@@@"', nested).encode()


def pod(**meta: object) -> Raw:
    return {"kind": "Pod", "metadata": {"name": "train-0", **meta}, "spec": {"containers": [{"name": "a"}]}}


FIELDS = [{"manager": "x", "fieldsV1": "@@@", "time": None}, {"manager": "]}", "operation": 'a "quote" \\'}]


@pytest.mark.parametrize("levels", [1_200, DEEPEST])
def test_deep_managed_fields_are_left_out(levels: int) -> None:
    text = text_of(pod(managedFields=FIELDS, uid="u"), levels)
    assert object_in(text) == pod(managedFields=[], uid="u")


def test_managed_fields_of_each_object_in_a_list_are_left_out() -> None:
    one, two = (text_of(pod(labels={"n": n}, managedFields=FIELDS), 2_000).decode() for n in "12")
    found = decoded(f'{{"items":[{one},{two}]}}'.encode(), Raw)
    assert [each["metadata"]["labels"]["n"] for each in found["items"]] == ["1", "2"]


@pytest.mark.parametrize(
    "raw",
    [
        pod(),
        pod(labels={"managedFields": "x"}, annotations={"a": '"managedFields":[{'}),
        {"managedFields": "[", "name": "managedFields"},
    ],
)
def test_text_that_looks_like_managed_fields_is_kept(raw: Raw) -> None:
    text = json.dumps(raw, separators=(",", ":")).encode()
    assert without_managed_fields(text) == text


def test_deep_nesting_elsewhere_is_an_error() -> None:
    text = text_of({"kind": "Pod", "spec": "@@@"}, 5_000)
    with pytest.raises(msgspec.DecodeError, match="nested too deep"):
        object_in(text)
    with pytest.raises(msgspec.DecodeError):
        object_in(text_of(pod(managedFields=FIELDS), 5_000)[:-2_000])


@pytest.mark.parametrize(
    "nested", [b"", b'"managedFields":[' + b"[" * 2_000 + b"]" * 2_000 + b"],"], ids=["flat", "deep"]
)
def test_invalid_utf_8_is_an_error(nested: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        object_in(b"{" + nested + b'"name":"\xe7"}')
