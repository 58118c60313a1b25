"""Objects that somebody has had the API server store, as deep or as odd as it takes them."""

import json

import msgspec
import pytest

from tests.builders import Raw
from webhook.kube.json_objects import decoded, object_in, without_managed_fields

DEEPEST = 10_000  # that the API server itself reads


def text_of(raw: Raw, levels: int) -> bytes:
    """With so many levels where it says so. To write them is as hard as to read them."""
    nested = '{"f:a":' * levels + "{}" + "}" * levels
    return json.dumps(raw, separators=(",", ":")).replace('"@@@"', nested).encode()


def pod(**meta: object) -> Raw:
    return {"kind": "Pod", "metadata": {"name": "train-0", **meta}, "spec": {"containers": [{"name": "a"}]}}


FIELDS = [{"manager": "x", "fieldsV1": "@@@", "time": None}, {"manager": "]}", "operation": 'a "quote" \\'}]


@pytest.mark.parametrize("levels", [1_200, DEEPEST])
def test_what_is_nested_too_deep_to_be_read_is_left_out(levels: int) -> None:
    text = text_of(pod(managedFields=FIELDS, uid="u"), levels)
    assert object_in(text) == pod(managedFields=[], uid="u")


def test_each_of_a_list_is_read() -> None:
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
def test_what_only_looks_like_it_stays(raw: Raw) -> None:
    text = json.dumps(raw, separators=(",", ":")).encode()
    assert without_managed_fields(text) == text


def test_what_is_deep_elsewhere_is_no_object() -> None:
    text = text_of({"kind": "Pod", "spec": "@@@"}, 5_000)
    with pytest.raises(msgspec.DecodeError, match="nested too deep"):
        object_in(text)
    with pytest.raises(msgspec.DecodeError):
        object_in(text_of(pod(managedFields=FIELDS), 5_000)[:-2_000])


@pytest.mark.parametrize(
    "nested", [b"", b'"managedFields":[' + b"[" * 2_000 + b"]" * 2_000 + b"],"], ids=["flat", "deep"]
)
def test_an_object_that_is_not_utf_8_is_refused_as_unreadable(nested: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        object_in(b"{" + nested + b'"name":"\xe7"}')
