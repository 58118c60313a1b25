"""GPUs in placement maps are reserved while their StatefulSets exist; conflicts of logical node names are reported."""

from typing import Any

import pytest

from tests import builders
from tests.builders import NOW, Raw, device, node, raw_container
from tests.recorded_events import RecordedEvents
from webhook.admission.placement_maps import (
    MapNamespaceListener,
    MappedStatefulSets,
    NodeNameConflicts,
)
from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import parse_map
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny

LAX = EvidencePolicy()


def stateful_set(
    text: str | None, name: str = "web", namespace: str = "ml", created: str = "2026-01-01", **spec: Any
) -> Raw:
    annotations = {} if text is None else {"gpu-scheduling-map": text}
    stamp = f"{created}T00:00:00Z"
    return {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}", "creationTimestamp": stamp},
        "spec": {"replicas": 10, "template": {"metadata": {"annotations": annotations}}, **spec},
    }


def namespace(name: str = "ml", **labels: str) -> Raw:
    return {"metadata": {"name": name, "resourceVersion": "1", "labels": labels}}


class Scene:
    def __init__(self, shares: int = 1, opt_in: str = "gpuwarden.io/enabled") -> None:
        devices = [device(f"GPU-{k}", index=k, serial=f"9000{k}", shares=shares) for k in range(3)]
        self.fleet = builders.fleet(node("node-a", *devices, labels={"zone": "a"}))
        self.sets = MappedStatefulSets(self.fleet, opt_in)
        self.news = MapNamespaceListener(self.sets)
        self.news.changed({"metadata": {"name": "ml", "resourceVersion": "1", "labels": OPTED_IN}})

    def serves(self, claim: Claim) -> bool:
        return not isinstance(decide(claim, self.fleet, LAX), Deny)

    def free(self) -> int:
        """The most GPUs that a claim without a map can get at once."""
        for count in (3, 2, 1):
            if not isinstance(decide(general(count), self.fleet, LAX), Deny):
                return count
        return 0


OPTED_IN = {"gpuwarden.io/enabled": "true", "gpuwarden.io/maps": "true"}


def general(count: int = 1) -> Claim:
    return builders.claim(builders.raw_pod(raw_container(gpus=count)))


def mapped(text: str, of_set: str = "web", namespace: str = "ml", **annotations: str) -> Claim:
    owner = {**builders.stateful_set(of_set), "uid": f"uid-{of_set}"}
    asked = {"gpu-scheduling-map": text, **annotations}
    raw = builders.raw_pod(name=f"{of_set}-0", namespace=namespace, annotations=asked, owners=[owner])
    return builders.claim(raw)


@pytest.mark.parametrize(
    ("opt_in", "label", "free"),
    [
        ("gpuwarden.io/enabled", "acme.io/gpu", 3),
        ("acme.io/gpu", "acme.io/gpu", 2),
        ("acme.io/gpu", "gpuwarden.io/enabled", 3),
        ("acme.io/gpu", "scheduler.radix.ai/enabled", 2),
    ],
)
def test_a_namespace_opts_in_by_the_label_of_the_webhook_configurations(opt_in: str, label: str, free: int) -> None:
    scene = Scene(opt_in=opt_in)
    scene.news.changed(namespace("ml", **{label: "true", "gpuwarden.io/maps": "true"}))
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert scene.free() == free


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("text", ["0=node-a:0,01", "0=node-a:0\n9=node-a:1", "0=node-a:GPU-0,90001"])
def test_mapped_gpus_are_reserved_while_the_set_has_their_ordinals(scene: Scene, text: str) -> None:
    scene.sets.changed(stateful_set(text))
    assert scene.free() == 1
    found = decide(mapped("0=node-a:0"), scene.fleet, LAX)
    assert not isinstance(found, Deny)
    assert [slot.uuid for slot in found[0].slots] == ["GPU-0"]
    scene.sets.deleted(stateful_set(text))
    assert scene.free() == 3


@pytest.mark.parametrize(
    ("spec", "free"),
    [
        pytest.param({"replicas": 0}, 3, id="no-ordinal"),
        pytest.param({"replicas": 1}, 2, id="one"),
        pytest.param({"replicas": 2}, 1, id="two"),
        pytest.param({"replicas": None}, 2, id="nothing-said-is-one"),
        pytest.param({"replicas": 2, "ordinals": None}, 1, id="no-start"),
        pytest.param({"replicas": 2, "ordinals": {}}, 1, id="empty-start"),
        pytest.param({"replicas": 2, "ordinals": {"start": 1}}, 2, id="from-one"),
        pytest.param({"replicas": 2, "ordinals": {"start": 6}}, 2, id="from-six"),
        pytest.param({"replicas": 2**31 - 1, "ordinals": {"start": 2**31 - 1}}, 3, id="beyond"),
        pytest.param({"replicas": 2**31 - 1}, 0, id="many"),
        pytest.param({"replicas": "many"}, 3, id="no-number"),
        pytest.param({"replicas": -1}, 3, id="less-than-none"),
    ],
)
def test_set_reserves_only_the_gpus_of_its_ordinals(scene: Scene, spec: dict[str, Any], free: int) -> None:
    scene.sets.changed(stateful_set("0=node-a:0\n1=node-a:1\n7=node-a:2", **spec))
    assert scene.free() == free


def test_scaling_down_frees_gpus_and_scaling_up_reserves_them_again(scene: Scene) -> None:
    text = "0=node-a:0\n1=node-a:1"
    for replicas, free in ((2, 1), (0, 3), (1, 2), (2, 1)):
        scene.sets.changed(stateful_set(text, replicas=replicas))
        assert scene.free() == free
    scene.sets.changed(stateful_set(text, "late", created="2026-01-02"))
    assert not scene.serves(mapped(text, "late"))
    scene.sets.changed(stateful_set(text, replicas=0))
    assert scene.serves(mapped(text, "late"))


def test_reserved_gpus_are_usable_in_the_sets_namespace_only(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert scene.serves(mapped("0=node-a:0"))
    assert not scene.serves(mapped("0=node-a:0", namespace="others"))


def test_map_without_namespace_label_is_followed_but_reserves_nothing(scene: Scene) -> None:
    scene.news.changed(namespace("ml", **{"gpuwarden.io/enabled": "true"}))
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert scene.free() == 3
    assert scene.serves(mapped("0=node-a:0"))
    assert scene.serves(mapped("0=node-a:0", "of-another-set"))


def test_gpu_of_two_sets_is_free_when_both_are_gone(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:0", "other"))
    scene.sets.deleted(stateful_set("0=node-a:0"))
    assert scene.free() == 2
    scene.sets.replaced({})
    assert scene.free() == 3


@pytest.mark.defect("binder-3")
@pytest.mark.parametrize("late", ["0=node-a:0", "0=node-a:GPU-0", "7=rack-1:90000"], ids=["index", "uuid", "serial"])
@pytest.mark.parametrize("is_heard_first", [True, False], ids=["late-first", "early-first"])
def test_older_of_two_sets_owns_the_gpu_by_any_of_its_names(scene: Scene, late: str, is_heard_first: bool) -> None:
    devices = scene.fleet.indexed_nodes["node-a"].node.devices
    scene.fleet.put(node("node-a", *devices, labels={"gpu-node-name": "rack-1"}), NOW)
    early, other = stateful_set("0=rack-1:0"), stateful_set(late, "late", created="2026-01-02")
    for raw in (other, early) if is_heard_first else (early, other):
        scene.sets.changed(raw)
    assert scene.serves(mapped("0=rack-1:0"))
    refused = decide(mapped("0=rack-1:0", "late"), scene.fleet, LAX)
    assert isinstance(refused, Deny)
    assert refused.reason is Reason.NO_FREE_DEVICE
    assert "; set aside for the map of an older StatefulSet: GPU-0; name other GPUs" in refused.sentence
    scene.sets.deleted(early)
    assert scene.serves(mapped("0=rack-1:0", "late"))
    scene.sets.changed(stateful_set("0=rack-1:0", created="2026-01-03"))  # recreated, it is the younger one
    assert scene.serves(mapped("0=rack-1:0", "late"))
    assert not scene.serves(mapped("0=rack-1:0"))


def test_label_equal_to_another_nodes_name_reserves_nothing() -> None:
    scene = Scene()
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1
    scene.fleet.put(node("node-b", device("GPU-b0", index=0), labels={"gpu-node-name": "node-a"}), NOW)
    assert not scene.fleet.is_offered(device("GPU-0", index=0))
    assert scene.fleet.is_offered(device("GPU-b0", index=0))


def test_label_counts_while_no_node_has_it_as_name() -> None:
    scene = Scene()
    scene.sets.changed(stateful_set("0=node-c:0"))
    scene.fleet.put(node("node-b", device("GPU-b0", index=0), labels={"gpu-node-name": "node-c"}), NOW)
    assert not scene.fleet.is_offered(device("GPU-b0", index=0))
    scene.fleet.put(node("node-c", device("GPU-c0", index=0)), NOW)
    assert scene.fleet.is_offered(device("GPU-b0", index=0))
    assert not scene.fleet.is_offered(device("GPU-c0", index=0))
    scene.fleet.remove("node-c")
    assert not scene.fleet.is_offered(device("GPU-b0", index=0))


@pytest.mark.defect("binder-3")
def test_pod_outside_the_set_gets_none_of_its_gpus(scene: Scene) -> None:
    raw = builders.raw_pod(
        name="web-0",
        annotations={"gpu-scheduling-map": "0=node-a:0"},
        labels={"apps.kubernetes.io/pod-index": "0"},
    )
    assert scene.serves(builders.claim(raw))
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert not scene.serves(builders.claim(raw))


def test_shared_gpu_is_usable_by_both_sets() -> None:
    scene = Scene(shares=2)
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:0", "late", created="2026-01-02"))
    for name in ("web", "late"):
        assert scene.serves(mapped("0=node-a:0", name, **{"gpuwarden.io/shared": "true"}))


def test_set_counts_only_in_an_opted_in_namespace(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0,1,2", namespace="elsewhere"))
    assert scene.free() == 3
    scene.news.changed({"metadata": {"name": "elsewhere", "resourceVersion": "2", "labels": OPTED_IN}})
    assert scene.free() == 0
    scene.news.changed({"metadata": {"name": "elsewhere", "resourceVersion": "3"}})
    assert scene.free() == 3


def test_changed_map_takes_effect_and_unreadable_map_reserves_nothing(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:1,2"))
    assert scene.free() == 1
    scene.sets.changed(stateful_set("nonsense"))
    assert scene.free() == 3


def test_map_applies_to_nodes_added_or_labelled_later(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=rack-1:0,1"))
    assert scene.free() == 3
    devices = scene.fleet.indexed_nodes["node-a"].node.devices
    scene.fleet.put(node("node-a", *devices, labels={"gpu-node-name": "rack-1"}), NOW)
    assert scene.free() == 1
    scene.fleet.put(node("node-a", *devices), NOW)
    assert scene.free() == 3


def test_map_is_not_parsed_again_when_its_set_changes_elsewhere(scene: Scene) -> None:
    """A StatefulSet changes with each of its pods."""
    scene.sets.changed(stateful_set("0=node-a:0"))
    before = parse_map.cache_info()
    scene.sets.changed({**stateful_set("0=node-a:0"), "status": {"readyReplicas": 1}})
    assert parse_map.cache_info() == before
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1
    scene.sets.deleted(stateful_set("0=node-a:0,1"))
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1


@pytest.mark.defect("binder-12")
async def test_logical_name_of_two_nodes_is_reported_once_on_both() -> None:
    fleet, heard = Fleet(), RecordedEvents()
    names = NodeNameConflicts(fleet, heard)
    for name in ("node-a", "node-b"):
        fleet.put(node(name, labels={"gpu-node-name": "rack-1"}), NOW)
        await names.step()
        await names.step()
    assert heard.recorded == [("node-a", Reason.AMBIGUOUS_NODE), ("node-b", Reason.AMBIGUOUS_NODE)]
    fleet.put(node("node-b"), NOW)
    await names.step()
    fleet.put(node("node-b", labels={"gpu-node-name": "rack-1"}), NOW)
    await names.step()
    assert len(heard.recorded) == 4


async def test_label_equal_to_another_nodes_name_is_reported_on_both_nodes() -> None:
    fleet, heard = Fleet(), RecordedEvents()
    names = NodeNameConflicts(fleet, heard)
    fleet.put(node("node-a", labels={"gpu-node-name": "node-a"}), NOW)
    await names.step()
    assert heard.recorded == []
    fleet.put(node("node-b", labels={"gpu-node-name": "node-a"}), NOW)
    await names.step()
    await names.step()
    assert heard.recorded == [("node-a", Reason.AMBIGUOUS_NODE), ("node-b", Reason.AMBIGUOUS_NODE)]
    assert heard.messages == [
        "label gpu-node-name=node-a of node-b is this node's own name and is ignored there",
        "label gpu-node-name=node-a is the name of another node and is ignored here: "
        "placement maps refer to node node-a",
    ]
