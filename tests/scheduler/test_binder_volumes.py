"""Claims and volumes as the API server shows them: what a pod wants, and whether it can have it."""

import json
from typing import Any

import msgspec
import pytest
from kubernetes.aio import client

from tests.builders import Raw, identity
from tests.scheduler.api_server import ApiServer
from webhook.core.device import Node
from webhook.core.nodes_asked import Expression, NodesAsked, NodeTerm
from webhook.scheduler.binder_volumes import (
    ApiVolumes,
    ClaimWire,
    UnusableVolumeError,
    Volume,
    VolumesUnavailableError,
    VolumeWire,
    Wanted,
    volume_of,
)

OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "train-0", "uid": identity().uid, "controller": True}


def claim(phase: str = "Bound", volume: str | None = "pv-1", **meta: Any) -> ClaimWire:
    return msgspec.json.decode(json.dumps(raw_claim(phase, volume, **meta)), type=ClaimWire)


def raw_claim(phase: str = "Bound", volume: str | None = "pv-1", **meta: Any) -> Raw:
    named = {"kind": "PersistentVolumeClaim", "metadata": {"name": "data", **meta}}
    return {**named, "spec": {"volumeName": volume}, "status": {"phase": phase}}


def raw_volume(*zones: str) -> Raw:
    expression = {"key": "zone", "operator": "In", "values": list(zones)}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}
    return {
        "kind": "PersistentVolume",
        "metadata": {"name": "pv-1"},
        "spec": {"nodeAffinity": affinity} if zones else {"capacity": {"storage": "1Gi"}},
    }


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


# What is read.

CLAIM = "/api/v1/namespaces/ml/persistentvolumeclaims/data"
VOLUME = "/api/v1/persistentvolumes/pv-1"
DATA = Wanted("data")


async def test_a_volume_is_on_nodes_that_match_one_of_its_terms(api_server: ApiServer, api: client.ApiClient) -> None:
    api_server.has = {CLAIM: raw_claim(), VOLUME: raw_volume("a", "b")}
    found = await ApiVolumes(api).of(identity(), DATA)
    assert (found.claim, found.name) == ("data", "pv-1")
    assert [found.is_on(Node("n", {"zone": zone})) for zone in "abc"] == [True, True, False]
    assert not found.is_on(Node("n"))
    assert not Volume("data", "pv-1", ()).is_on(Node("n"))
    api_server.has[VOLUME] = raw_volume()
    assert (await ApiVolumes(api).of(identity(), DATA)).is_on(Node("n"))


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ({}, "claim data is not there"),
        ({CLAIM: raw_claim("Pending")}, "claim data is not bound to a volume"),
        ({CLAIM: raw_claim()}, "volume pv-1 of claim data is not there"),
        ({CLAIM: {**raw_claim(), "kind": "Secret"}}, "'data' is not the name of a claim or of a volume"),
        ({CLAIM: raw_claim(name="other")}, "'data' is not the name of a claim or of a volume"),
    ],
    ids=["no-claim", "not-bound", "no-volume", "another-kind", "another-name"],
)
async def test_what_is_not_there_is_said(
    api_server: ApiServer, api: client.ApiClient, has: dict[str, Raw | int], words: str
) -> None:
    api_server.has = has
    with pytest.raises(UnusableVolumeError, match=words):
        await ApiVolumes(api).of(identity(), DATA)


@pytest.mark.parametrize("found", [403, 500, {"kind": "PersistentVolumeClaim"}], ids=str)
async def test_what_cannot_be_read_is_no_absence(
    api_server: ApiServer, api: client.ApiClient, found: Raw | int
) -> None:
    api_server.has = {CLAIM: found}
    with pytest.raises(VolumesUnavailableError):
        await ApiVolumes(api).of(identity(), DATA)


async def test_a_name_leads_nowhere_else(api_server: ApiServer, api: client.ApiClient) -> None:
    """The API server checks no claim's name in a pod."""
    with pytest.raises(UnusableVolumeError):
        await ApiVolumes(api).of(identity(), Wanted("../secrets/x"))
    assert api_server.asked == []
    api_server.has = {"/api/v1/namespaces/ml/": {**raw_claim(), "kind": "Namespace"}}
    with pytest.raises(UnusableVolumeError):
        await ApiVolumes(api).of(identity(), Wanted(".."))
