"""Claims and volumes as the API server shows them: what a pod wants, and whether it can have it."""

import json
from typing import Any

import msgspec
import pytest

from tests.builders import Raw, identity
from webhook.core.device import Node
from webhook.core.nodes_asked import Expression, NodesAsked, NodeTerm, node_term
from webhook.scheduler.binder_volumes import (
    ClaimWire,
    PersistentVolumeWire,
    UnusableVolumeError,
    Volume,
    VolumeWire,
    Wanted,
    volume_of,
)

OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "train-0", "uid": identity().uid, "controller": True}


def claim(phase: str = "Bound", volume: str | None = "pv-1", **meta: Any) -> ClaimWire:
    raw = {"metadata": {"name": "data", **meta}, "spec": {"volumeName": volume}, "status": {"phase": phase}}
    return msgspec.json.decode(json.dumps(raw), type=ClaimWire)


@pytest.mark.parametrize(
    ("volume", "wanted"),
    [
        ({"name": "a", "persistentVolumeClaim": {"claimName": "data"}}, [Wanted("data")]),
        ({"name": "a", "ephemeral": {"volumeClaimTemplate": {}}}, [Wanted("train-0-a", is_ephemeral=True)]),
        ({"name": "a", "emptyDir": {}}, []),
        ({"name": "a", "hostPath": {"path": "/x"}}, []),
    ],
    ids=["claim", "ephemeral", "empty-dir", "host-path"],
)
def test_what_a_volume_of_a_pod_asks_for(volume: Raw, wanted: list[Wanted]) -> None:
    assert list(msgspec.convert(volume, VolumeWire).wanted("train-0")) == wanted


@pytest.mark.parametrize(
    ("found", "is_ephemeral"),
    [(claim(), False), (claim(ownerReferences=[OWNER]), True)],
    ids=["bound", "made-for-the-pod"],
)
def test_a_bound_claim_has_its_volume(found: ClaimWire, is_ephemeral: bool) -> None:
    assert volume_of(found, identity(), Wanted("data", is_ephemeral)) == "pv-1"


@pytest.mark.parametrize(
    ("found", "is_ephemeral", "words"),
    [
        (claim("Pending", None), False, "claim data is not bound to a volume"),
        (claim("Pending"), False, "claim data is not bound to a volume"),
        (claim("Lost"), False, "claim data is not bound to a volume"),
        (claim(deletionTimestamp="2026-03-02T12:00:00Z"), False, "claim data is being deleted"),
        (claim(), True, "claim data was not made for this pod"),
        (claim(ownerReferences=[{**OWNER, "uid": "another"}]), True, "claim data was not made for this pod"),
    ],
    ids=["without-a-volume", "not-yet", "lost", "being-deleted", "nobodys", "anothers"],
)
def test_what_cannot_be_used_is_said(found: ClaimWire, is_ephemeral: bool, words: str) -> None:
    with pytest.raises(UnusableVolumeError, match=words):
        volume_of(found, identity(), Wanted("data", is_ephemeral))


def test_a_volume_is_on_nodes_that_match_one_of_its_terms() -> None:
    expression = {"key": "zone", "operator": "In", "values": ["a", "b"]}
    raw = {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}}
    wire = msgspec.json.decode(json.dumps(raw), type=PersistentVolumeWire)
    assert wire.spec.node_affinity is not None
    assert wire.spec.node_affinity.required is not None
    found = Volume("data", "pv-1", tuple(map(node_term, wire.spec.node_affinity.required.node_selector_terms or ())))
    assert [found.is_on(Node("n", {"zone": zone})) for zone in "abc"] == [True, True, False]
    assert not found.is_on(Node("n"))
    assert Volume("data", "pv-1").is_on(Node("n"))
    assert not Volume("data", "pv-1", ()).is_on(Node("n"))


def test_what_a_pod_asks_of_nodes_holds_beside_its_volume() -> None:
    def term(key: str, value: str) -> NodeTerm:
        return NodeTerm((Expression(key, "In", frozenset({value})),), ())

    both = NodesAsked(terms=(term("pool", "x"), term("pool", "y"))).within((term("zone", "a"), term("zone", "b")))
    assert both.matches("n", {"pool": "y", "zone": "b"})
    assert not both.matches("n", {"pool": "y", "zone": "c"})
    assert not both.matches("n", {"pool": "z", "zone": "a"})
    only = NodesAsked(selector=(("pool", "x"),)).within((term("zone", "a"),))
    assert only.matches("n", {"pool": "x", "zone": "a"})
    assert not only.matches("n", {"pool": "x"})
    assert not NodesAsked(terms=(NodeTerm((), ()),)).within((term("zone", "a"),)).matches("n", {"zone": "a"})
