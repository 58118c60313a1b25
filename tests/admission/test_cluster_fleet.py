"""The inventory of a cluster: Nodes and GPUNodes are combined, whatever the order of their events."""

from typing import Any

import pytest
from attrs import evolve

from tests.builders import NOW, SECOND, Raw, evidence
from tests.ledger.fake_store import gpu_node
from webhook.admission.cluster_fleet import ClusterFleet, GpuNodesListener, NodesListener
from webhook.core.device import Device, DeviceUuid, Node, Taint
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet


class Scene:
    """Both listeners, and the objects that the ledger was given."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.told: list[str] = []
        inventory = ClusterFleet(self.fleet, lambda: NOW, {"node-a": evidence("node-a")}.get)
        self.nodes = NodesListener(inventory)
        self.gpu_nodes = GpuNodesListener(
            inventory,
            learn=lambda raw: self.told.append(f"learn {raw['metadata']['name']}"),
            forget=lambda name: self.told.append(f"forget {name}"),
        )

    def node(self, name: str = "node-a") -> Node | None:
        indexed = self.fleet.indexed_nodes.get(name)
        return indexed.node if indexed else None


def raw_node(name: str = "node-a", *, ready: str = "True", **spec: Any) -> Raw:
    return {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": spec,
        "status": {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]},
    }


def raw_gpu_node(name: str = "node-a", *uuids: str) -> Raw:
    raw = gpu_node(name, *uuids)
    raw["metadata"]["resourceVersion"] = "7"
    return raw


@pytest.fixture
def scene() -> Scene:
    return Scene()


DEVICES = (Device(DeviceUuid("GPU-1")),)


@pytest.mark.parametrize("nodes_first", [True, False], ids=["node first", "devices first"])
def test_node_is_built_from_node_and_gpu_node(scene: Scene, *, nodes_first: bool) -> None:
    if nodes_first:
        scene.nodes.changed(raw_node())
    scene.gpu_nodes.changed(raw_gpu_node("node-a", "GPU-1"))
    if not nodes_first:
        scene.nodes.changed(raw_node())
    assert scene.node() == Node("node-a", {"zone": "a"}, DEVICES)


@pytest.mark.defect("assigner-10")
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(raw_node(ready="False"), {"is_ready": False}, id="not ready"),
        pytest.param(raw_node(ready="Unknown"), {"is_ready": False}, id="silent"),
        pytest.param(raw_node(unschedulable=True), {"is_cordoned": True}, id="cordoned"),
        pytest.param(
            raw_node(taints=[{"key": "gpu", "effect": "NoSchedule"}]), {"taints": (Taint("gpu"),)}, id="tainted"
        ),
        pytest.param({"metadata": {"name": "node-a"}}, {"is_ready": False, "labels": {}}, id="no status yet"),
    ],
)
def test_node_conditions_are_applied(scene: Scene, raw: Raw, expected: dict[str, Any]) -> None:
    scene.nodes.changed(raw)
    node = scene.node()
    assert node is not None
    assert {member: getattr(node, member) for member in expected} == expected


def test_gpu_without_its_node_is_not_offered(scene: Scene) -> None:
    scene.nodes.changed(raw_node())
    scene.gpu_nodes.changed(raw_gpu_node("node-a", "GPU-1"))
    scene.nodes.deleted(raw_node())
    assert scene.node() is None
    scene.nodes.changed(raw_node())
    assert scene.node() == Node("node-a", {"zone": "a"}, DEVICES)


def test_list_replaces_all_nodes(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.nodes.changed(raw_node(name))
        scene.gpu_nodes.changed(raw_gpu_node(name, f"GPU-{name}"))
    scene.nodes.replaced({"/node-b": raw_node("node-b")})
    scene.gpu_nodes.replaced({"/node-a": raw_gpu_node("node-a", "GPU-1")})
    assert scene.node("node-a") is None
    assert scene.node("node-b") == Node("node-b", {"zone": "a"})
    assert scene.told[-2:] == ["forget node-b", "learn node-a"]


@pytest.mark.defect("assigner-14")
def test_unreadable_object_does_not_affect_others(scene: Scene) -> None:
    scene.nodes.changed(raw_node())
    scene.gpu_nodes.changed(raw_gpu_node("node-a", "GPU-1"))
    scene.nodes.changed({"metadata": {"name": "node-a", "labels": 5}})
    scene.gpu_nodes.changed({**raw_gpu_node("node-a"), "spec": {"devices": [{"uuid": 5}]}})
    scene.nodes.changed(raw_node("node-b"))
    known = scene.node("node-a")
    assert known is not None
    assert known.labels == {"zone": "a"}
    # Their reservations cannot be read either, so they are not offered.
    assert known.devices == tuple(evolve(one, is_healthy=False) for one in DEVICES)
    assert scene.node("node-b") is not None
    scene.gpu_nodes.changed(raw_gpu_node("node-a", "GPU-1"))
    assert scene.node("node-a") == Node("node-a", {"zone": "a"}, DEVICES)


def test_reservations_are_known_before_devices_are_offered(scene: Scene) -> None:
    """Otherwise a decision in between would take a reserved device for a free one."""
    scene.nodes.changed(raw_node())
    offered: list[bool] = []
    listener = GpuNodesListener(
        ClusterFleet(scene.fleet, lambda: NOW, lambda name: None),
        learn=lambda raw: offered.append(bool(scene.fleet.device_count)),
        forget=lambda name: None,
    )
    listener.changed(raw_gpu_node("node-a", "GPU-1"))
    assert offered == [False]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        pytest.param(
            evidence("node-a", since=NOW - 2 * SECOND, until=NOW + SECOND), "absent", id="of the earlier node"
        ),
        pytest.param(evidence("node-a", since=NOW - SECOND, until=NOW + SECOND), "absent", id="of the same second"),
        pytest.param(evidence("node-a", since=NOW, until=NOW + SECOND), "fresh", id="its own"),
        pytest.param(evidence("node-a"), "fresh", id="static"),
        pytest.param(evidence("node-a", since=NOW - 2 * SECOND, is_banned=True), "banned", id="banned before"),
    ],
)
def test_recreated_node_must_attest_again(word: Evidence, state: str) -> None:
    fleet = Fleet()
    inventory = ClusterFleet(fleet, lambda: NOW, lambda name: word)
    born = (NOW - SECOND).isoformat().replace("+00:00", "Z")
    raw = raw_node()
    NodesListener(inventory).changed({**raw, "metadata": {**raw["metadata"], "creationTimestamp": born}})
    assert fleet.indexed_nodes["node-a"].state == state


def test_node_gets_its_evidence(scene: Scene) -> None:
    for name in ("node-a", "node-b"):
        scene.nodes.changed(raw_node(name))
    assert {name: indexed.state for name, indexed in scene.fleet.indexed_nodes.items()} == {
        "node-a": "fresh",
        "node-b": "absent",
    }


def test_gpu_node_being_deleted_offers_no_device(scene: Scene) -> None:
    scene.nodes.changed(raw_node())
    raw = raw_gpu_node("node-a", "GPU-1")
    scene.gpu_nodes.changed({**raw, "metadata": {**raw["metadata"], "deletionTimestamp": "2026-03-02T12:00:00Z"}})
    node = scene.node()
    assert node is not None
    assert [one.is_healthy for one in node.devices] == [False]


@pytest.mark.parametrize(
    ("allocatable", "gpus"),
    [
        ({"nvidia.com/gpu": "4"}, 4),
        ({"nvidia.com/gpu": "0", "cpu": "4"}, 0),
        ({"example.com/gpu": "4"}, 0),
        (None, 0),
        (["nvidia.com/gpu"], 0),
        ({"nvidia.com/gpu": "many"}, 0),
    ],
    ids=["offered", "gone", "another", "none", "malformed", "no-number"],
)
def test_fleet_knows_what_the_device_plugin_of_a_node_offers(allocatable: Any, gpus: int) -> None:
    def seen(*, is_strict: bool, labels: dict[str, str] | None = None) -> Node:
        fleet = Fleet()
        raw = raw_node()
        raw["status"]["allocatable"] = allocatable
        raw["metadata"]["labels"] = labels or {}
        NodesListener(ClusterFleet(fleet, lambda: NOW, lambda _: None, is_strict=is_strict)).changed(raw)
        return fleet.indexed_nodes["node-a"].node

    assert not seen(is_strict=False).is_refused_for_plugin
    assert seen(is_strict=True).is_refused_for_plugin is (gpus > 0)
    assert seen(is_strict=True).plugin_gpus is None
    uses_plugin = seen(is_strict=True, labels={"gpuwarden.io/injection": "plugin"})
    assert (uses_plugin.plugin_gpus, uses_plugin.is_refused_for_plugin) == (gpus, False)


@pytest.mark.parametrize("nodes_first", [True, False], ids=["node first", "GPUNode first"])
def test_injection_of_the_gpu_node_counts_instead_of_the_label(scene: Scene, *, nodes_first: bool) -> None:
    raw, gpus = raw_node(), raw_gpu_node("node-a", "GPU-1")
    raw["metadata"]["labels"] = {"gpuwarden.io/injection": "nvidia"}
    raw["status"]["allocatable"] = {"nvidia.com/gpu": "4"}
    gpus["spec"]["injection"] = "plugin"
    if nodes_first:
        scene.nodes.changed(raw)
    scene.gpu_nodes.changed(gpus)
    if not nodes_first:
        scene.nodes.changed(raw)
    found = scene.node()
    assert found is not None
    assert (found.injection, found.plugin_gpus) == ("plugin", 4)
    scene.gpu_nodes.changed({**gpus, "spec": {**gpus["spec"], "injection": "native"}})
    found = scene.node()
    assert found is not None
    assert (found.injection, found.plugin_gpus) == ("native", None)
    scene.gpu_nodes.changed(raw_gpu_node("node-a", "GPU-1"))
    found = scene.node()
    assert found is not None
    assert found.injection is None
