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
    SELECTED_NODE,
    ApiVolumes,
    ClaimWire,
    Unmade,
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


def raw_claim(phase: str = "Bound", volume: str | None = "pv-1", storage: str | None = None, **meta: Any) -> Raw:
    named = {"kind": "PersistentVolumeClaim", "metadata": {"name": "data", **meta}}
    return {**named, "spec": {"volumeName": volume, "storageClassName": storage}, "status": {"phase": phase}}


def raw_class(**members: Any) -> Raw:
    made = {"provisioner": "csi.example.test", "volumeBindingMode": "WaitForFirstConsumer"}
    return {"kind": "StorageClass", "metadata": {"name": "fast"}, **made, **members}


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
        (claim("Pending"), False, "claim data is not bound to a volume"),
        (claim("Lost"), False, "claim data is not bound to a volume"),
        (claim(deletionTimestamp="2026-03-02T12:00:00Z"), False, "claim data is being deleted"),
        (claim(), True, "claim data was not made for this pod"),
        (claim(ownerReferences=[{**OWNER, "uid": "another"}]), True, "claim data was not made for this pod"),
    ],
    ids=["not-yet", "lost", "being-deleted", "nobodys", "anothers"],
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
CLASS = "/apis/storage.k8s.io/v1/storageclasses/fast"
DATA = Wanted("data")


def waiting(node: str = "", **meta: Any) -> Raw:
    """A claim that waits for its pod to have a node."""
    notes = {"annotations": {SELECTED_NODE: node}} if node else {}
    return raw_claim("Pending", None, "fast", **{"uid": "uid-data", "resourceVersion": "7", **notes, **meta})


async def test_a_volume_is_on_nodes_that_match_one_of_its_terms(api_server: ApiServer, api: client.ApiClient) -> None:
    api_server.has = {CLAIM: raw_claim(), VOLUME: raw_volume("a", "b")}
    found = await ApiVolumes(api).of(identity(), DATA)
    assert isinstance(found, Volume)
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
        ({CLAIM: raw_claim("Pending", None)}, "claim data is not bound to a volume"),
        ({CLAIM: waiting()}, "claim data is not bound to a volume, which is waited for"),
        ({CLAIM: waiting(), CLASS: raw_class(volumeBindingMode="Immediate")}, "which is waited for"),
        ({CLAIM: waiting(), CLASS: raw_class(provisioner="kubernetes.io/no-provisioner")}, "made by hand"),
        ({CLAIM: raw_claim()}, "volume pv-1 of claim data is not there"),
        ({CLAIM: {**raw_claim(), "kind": "Secret"}}, "'data' is not the name of a claim or of a volume"),
        ({CLAIM: raw_claim(name="other")}, "'data' is not the name of a claim or of a volume"),
    ],
    ids=[
        "no-claim",
        "not-bound",
        "no-storage-class-named",
        "no-storage-class",
        "made-without-a-pod",
        "made-by-nobody",
        "no-volume",
        "another-kind",
        "another-name",
    ],
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


# Volumes that are made once a node is chosen.


async def test_a_claim_waits_for_a_node_and_its_storage_class_says_for_which(
    api_server: ApiServer, api: client.ApiClient
) -> None:
    api_server.has = {CLAIM: waiting(), CLASS: raw_class()}
    assert await ApiVolumes(api).of(identity(), DATA) == Unmade("data", "uid-data", "7")
    zones = [{"matchLabelExpressions": [{"key": "zone", "values": ["a", "b"]}, {"key": "rack", "values": ["1"]}]}, {}]
    api_server.has[CLASS] = raw_class(allowedTopologies=zones)
    found = await ApiVolumes(api).of(identity(), DATA)
    nodes = [Node("n", {"zone": "b", "rack": "1"}), Node("n", {"zone": "c", "rack": "1"}), Node("n", {"zone": "a"})]
    assert [found.is_on(one) for one in nodes] == [True, False, False]


async def test_a_storage_class_may_be_named_in_the_older_way(api_server: ApiServer, api: client.ApiClient) -> None:
    older = raw_claim("Pending", None, annotations={"volume.beta.kubernetes.io/storage-class": "fast"})
    api_server.has = {CLAIM: older, CLASS: raw_class()}
    assert isinstance(await ApiVolumes(api).of(identity(), DATA), Unmade)


@pytest.mark.parametrize("volume", [None, "pv-1"], ids=["being-made", "about-to-be-bound"])
async def test_a_volume_that_is_made_for_a_node_is_had_there_alone(
    api_server: ApiServer, api: client.ApiClient, volume: str | None
) -> None:
    raw = waiting("node-a")
    api_server.has = {CLAIM: {**raw, "spec": {**raw["spec"], "volumeName": volume}}}
    found = await ApiVolumes(api).of(identity(), DATA)
    assert found == Unmade("data", "uid-data", "7", "node-a")
    assert [found.is_on(Node(name)) for name in ("node-a", "node-b")] == [True, False]
    assert api_server.asked == [CLAIM]  # whatever its StorageClass says by now


async def test_a_bound_claim_keeps_the_node_it_was_made_for_and_goes_by_its_volume(
    api_server: ApiServer, api: client.ApiClient
) -> None:
    api_server.has = {CLAIM: raw_claim(annotations={SELECTED_NODE: "node-a"}), VOLUME: raw_volume()}
    assert (await ApiVolumes(api).of(identity(), DATA)).is_on(Node("node-b"))


UNMADE = Unmade("data", "uid-data", "7")


async def test_a_node_is_written_into_the_claim_as_it_was_seen(api_server: ApiServer, api: client.ApiClient) -> None:
    api_server.has = {CLAIM: waiting("node-a")}
    await ApiVolumes(api).select(identity(), UNMADE, "node-a")
    meta = {"uid": "uid-data", "resourceVersion": "7", "annotations": {SELECTED_NODE: "node-a"}}
    assert api_server.sent == [(CLAIM, {"metadata": meta})]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, VolumesUnavailableError),
        (409, VolumesUnavailableError),
        (503, VolumesUnavailableError),
        (403, UnusableVolumeError),
    ],
)
async def test_a_claim_that_takes_no_node_is_asked_again_or_said(
    api_server: ApiServer, api: client.ApiClient, status: int, error: type[Exception]
) -> None:
    api_server.has = {CLAIM: status}
    with pytest.raises(error, match=r"cannot be given a node.*: no" if status == 403 else str(status)):
        await ApiVolumes(api).select(identity(), UNMADE, "node-a")
