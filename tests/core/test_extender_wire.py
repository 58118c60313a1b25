"""The extender's requests and responses as kube-scheduler encodes them."""

import json
from typing import Any

import pytest

from tests.builders import Raw, raw_pod
from webhook.core.extender_wire import (
    BindArgs,
    ExtenderArgs,
    FilterResult,
    MalformedArgsError,
    PreemptArgs,
    Refusal,
    error_answer,
    filter_error,
    filter_result,
    preempt_result,
    priorities,
)
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity

NODE: Raw = {"metadata": {"name": "node-a", "labels": {"a": "b"}}, "spec": {}, "status": {"x": [1.50, "é"]}}


def args(**members: Any) -> bytes:
    return json.dumps({"Pod": raw_pod(), "Nodes": None, "NodeNames": None} | members).encode()


def sent(*nodes: Raw, **frame: Any) -> Raw:
    return {"metadata": {}, **frame, "items": list(nodes)}


NO = Refusal(Reason.NOT_IN_MAP, "no", ", of ordinal 7")


def named(name: str) -> Raw:
    return {**NODE, "metadata": {"name": name}}


def test_names_are_answered_with_names() -> None:
    offer = ExtenderArgs.parse(args(NodeNames=["node-b", "node-a", "node-c"])).offer
    assert offer.names == ("node-b", "node-a", "node-c")
    sifted = FilterResult(frozenset({"node-a", "node-b"}), {}, {"node-c": NO})
    assert json.loads(filter_result(offer, sifted)) == {
        "Nodes": None,
        "NodeNames": ["node-b", "node-a"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {"node-c": "no, of ordinal 7 (gpuwarden: NotInMap)"},
        "Error": "",
    }


@pytest.mark.defect("extender-3")
def test_objects_are_answered_with_the_same_objects_byte_for_byte() -> None:
    offer = ExtenderArgs.parse(args(Nodes=sent(NODE, named("node-b"), metadata={"resourceVersion": "7"}))).offer
    assert offer.names == ("node-a", "node-b")
    answered = filter_result(offer, FilterResult(frozenset({"node-a"}), {"node-b": NO}))
    assert json.dumps(NODE).encode() in answered
    answer = json.loads(answered)
    assert answer["Nodes"] == {"metadata": {"resourceVersion": "7"}, "items": [NODE]}
    assert answer["NodeNames"] is None


@pytest.mark.parametrize(
    ("members", "names", "are_objects"),
    [
        pytest.param({}, (), False, id="both null"),
        pytest.param({"NodeNames": []}, (), False, id="no name"),
        pytest.param({"Nodes": sent()}, (), True, id="no object"),
        pytest.param({"Nodes": {"metadata": {}, "items": None}}, (), True, id="items null"),
        pytest.param({"Nodes": {}}, (), True, id="items absent"),
        pytest.param({"Nodes": sent(NODE), "NodeNames": []}, ("node-a",), True, id="names empty beside objects"),
        pytest.param({"Nodes": sent(NODE), "NodeNames": ["node-b"]}, ("node-b",), False, id="names win"),
        pytest.param({"NodeNames": ["a", "b", "a"]}, ("a", "b", "a"), False, id="a name twice"),
        pytest.param({"nodeNames": ["a"], "NodeNames": None}, (), False, id="the right casing wins"),
    ],
)
def test_null_members_and_both_forms_are_parsed(members: Raw, names: tuple[str, ...], *, are_objects: bool) -> None:
    offer = ExtenderArgs.parse(args(**members)).offer
    assert offer.names == names
    assert (offer.objects is not None) == are_objects
    answer = json.loads(filter_result(offer, FilterResult(frozenset(names))))
    assert (answer["Nodes"] is not None) == are_objects
    assert (answer["NodeNames"] is not None) != are_objects
    if are_objects:
        assert [one["metadata"]["name"] for one in answer["Nodes"]["items"]] == list(names)
        assert "metadata" in answer["Nodes"]
    else:
        assert answer["NodeNames"] == list(names)


def test_member_names_are_case_insensitive() -> None:
    body = json.dumps({"pod": raw_pod(), "NODES": {"Items": [NODE]}, "nodenames": None}).encode()
    assert ExtenderArgs.parse(body).offer.names == ("node-a",)
    assert BindArgs.parse(b'{"podName": "p", "PODNAMESPACE": "ml", "poduid": "u", "node": "n"}') == BindArgs(
        PodIdentity("ml", "p", "u"), "n"
    )


MALFORMED = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"{", id="half"),
    pytest.param(b"not JSON", id="not JSON"),
    pytest.param(b"\xff\xfe{}", id="not UTF-8"),
    pytest.param(b"null", id="null"),
    pytest.param(b"[]", id="a list"),
    pytest.param(b"{}", id="no Pod"),
    pytest.param(args(Pod=None), id="Pod null"),
    pytest.param(args(Pod=[]), id="Pod a list"),
    pytest.param(args(Pod={"metadata": {"annotations": {"a": 5}}}), id="an annotation that is a number"),
    pytest.param(args(NodeNames="node-a"), id="NodeNames a text"),
    pytest.param(args(NodeNames=[1]), id="NodeNames of numbers"),
    pytest.param(args(Nodes=[]), id="Nodes a list"),
    pytest.param(args(Nodes={"items": {}}), id="items an object"),
    pytest.param(args(Nodes={"items": [{}]}), id="a node without a name"),
    pytest.param(args(Nodes={"items": [None]}), id="a node that is null"),
    pytest.param(b'{"Pod": {"metadata": ' + b'{"a":' * 50_000 + b"}" * 50_000 + b"}}", id="nested without end"),
]


@pytest.mark.defect("extender-8")
@pytest.mark.parametrize("body", MALFORMED)
def test_invalid_args_are_rejected(body: bytes) -> None:
    with pytest.raises(MalformedArgsError):
        ExtenderArgs.parse(body)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"PodName": "p"}', b'{"PodName": 5, "PodNamespace": "ml", "Node": "n"}', b"[]"]
)
def test_invalid_binding_args_are_rejected(body: bytes) -> None:
    with pytest.raises(MalformedArgsError):
        BindArgs.parse(body)


VICTIMS: Raw = {
    "by uid": {"node-a": {"Pods": [{"UID": "u1"}, {"UID": "u2"}], "NumPDBViolations": 1}, "node-b": {"Pods": None}},
    "whole": {
        "node-a": {"Pods": [raw_pod(uid="u1"), raw_pod(uid="u2")], "NumPDBViolations": 1},
        "node-b": {"Pods": [], "NumPDBViolations": 0},
    },
}


@pytest.mark.parametrize(
    ("by_uid", "whole"), [(VICTIMS["by uid"], None), (None, VICTIMS["whole"])], ids=["by uid", "whole"]
)
def test_victims_are_answered_by_uid(by_uid: Raw | None, whole: Raw | None) -> None:
    body = json.dumps({"Pod": raw_pod(), "NodeNameToVictims": whole, "NodeNameToMetaVictims": by_uid}).encode()
    assert json.loads(preempt_result(PreemptArgs.parse(body).victims)) == {
        "NodeNameToMetaVictims": {
            "node-a": {"Pods": [{"UID": "u1"}, {"UID": "u2"}], "NumPDBViolations": 1},
            "node-b": {"Pods": [], "NumPDBViolations": 0},
        }
    }


@pytest.mark.parametrize("found", [[], {"node-a": []}, {"node-a": {"Pods": [{}]}}, {"node-a": {"Pods": [5]}}], ids=str)
def test_invalid_victims_are_rejected(found: Any) -> None:
    with pytest.raises(MalformedArgsError):
        PreemptArgs.parse(json.dumps({"Pod": raw_pod(), "NodeNameToMetaVictims": found}).encode())


def test_answers_have_go_member_names() -> None:
    assert json.loads(priorities([("node-a", 10), ("node-b", 0)])) == [
        {"Host": "node-a", "Score": 10},
        {"Host": "node-b", "Score": 0},
    ]
    assert json.loads(error_answer("")) == {"Error": ""}
    assert json.loads(filter_error("away")) == {
        "Nodes": None,
        "NodeNames": None,
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "away",
    }
