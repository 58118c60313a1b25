"""GPUs of placement maps stay out of the general pool while their sets exist; names of two nodes are told of."""

from typing import Any

import pytest

from tests import builders
from tests.builders import NOW, Raw, device, node, raw_container
from tests.recorded_events import RecordedEvents
from webhook.admission.placement_maps import MapNamespaceListener, MappedStatefulSets, NodeNameConflicts, not_kept
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
        """How many GPUs a claim without a map can have at once."""
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
def test_mapped_gpus_are_for_maps_while_the_set_has_these_ordinals(scene: Scene, text: str) -> None:
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
def test_a_set_keeps_the_gpus_of_its_ordinals_and_no_others(scene: Scene, spec: dict[str, Any], free: int) -> None:
    scene.sets.changed(stateful_set("0=node-a:0\n1=node-a:1\n7=node-a:2", **spec))
    assert scene.free() == free


def test_scaling_down_frees_gpus_and_scaling_up_keeps_them_again(scene: Scene) -> None:
    text = "0=node-a:0\n1=node-a:1"
    for replicas, free in ((2, 1), (0, 3), (1, 2), (2, 1)):
        scene.sets.changed(stateful_set(text, replicas=replicas))
        assert scene.free() == free
    scene.sets.changed(stateful_set(text, "late", created="2026-01-02"))
    assert not scene.serves(mapped(text, "late"))
    scene.sets.changed(stateful_set(text, replicas=0))
    assert scene.serves(mapped(text, "late"))


def test_a_set_has_what_it_keeps_in_its_own_namespace_only(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert scene.serves(mapped("0=node-a:0"))
    assert not scene.serves(mapped("0=node-a:0", namespace="others"))


def test_without_the_label_a_map_is_followed_and_keeps_nothing(scene: Scene) -> None:
    scene.news.changed(namespace("ml", **{"gpuwarden.io/enabled": "true"}))
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert scene.free() == 3
    assert scene.serves(mapped("0=node-a:0"))
    assert scene.serves(mapped("0=node-a:0", "of-another-set"))


def test_sets_for_which_nothing_is_kept_are_listed() -> None:
    namespaces = [
        namespace("labelled", **OPTED_IN),
        namespace("without", **{"gpuwarden.io/enabled": "true"}),
        namespace("with-another", **{"gpuwarden.io/enabled": "true", "gpuwarden.io/maps": "false"}),
        namespace("elsewhere"),
    ]
    names = [raw["metadata"]["name"] for raw in namespaces]
    sets = [stateful_set("0=node-a:0", namespace=name) for name in names]
    sets += [stateful_set(None, "plain", name) for name in names]
    assert not_kept(sets, namespaces) == [("with-another", "web"), ("without", "web")]
    assert not_kept(sets, namespaces, opt_in="acme.io/gpu") == []


def test_a_gpu_of_two_sets_is_free_when_both_are_gone(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:0", "other"))
    scene.sets.deleted(stateful_set("0=node-a:0"))
    assert scene.free() == 2
    scene.sets.replaced({})
    assert scene.free() == 3


@pytest.mark.defect("S1-3")
@pytest.mark.parametrize("late", ["0=node-a:0", "0=node-a:GPU-0", "7=rack-1:90000"], ids=["index", "uuid", "serial"])
@pytest.mark.parametrize("is_heard_first", [True, False], ids=["late-first", "early-first"])
def test_of_two_sets_the_older_keeps_the_gpu_by_whatever_name(scene: Scene, late: str, is_heard_first: bool) -> None:
    devices = scene.fleet.indexed_nodes["node-a"].node.devices
    scene.fleet.put(node("node-a", *devices, labels={"gpu-node-name": "rack-1"}), NOW)
    early, other = stateful_set("0=rack-1:0"), stateful_set(late, "late", created="2026-01-02")
    for raw in (other, early) if is_heard_first else (early, other):
        scene.sets.changed(raw)
    assert scene.serves(mapped("0=rack-1:0"))
    refused = decide(mapped("0=rack-1:0", "late"), scene.fleet, LAX)
    assert isinstance(refused, Deny)
    assert refused.reason is Reason.NO_FREE_DEVICE
    assert "; kept for the map of an older StatefulSet: GPU-0; name other GPUs" in refused.sentence
    scene.sets.deleted(early)
    assert scene.serves(mapped("0=rack-1:0", "late"))
    scene.sets.changed(stateful_set("0=rack-1:0", created="2026-01-03"))  # made anew, it is the younger one
    assert scene.serves(mapped("0=rack-1:0", "late"))
    assert not scene.serves(mapped("0=rack-1:0"))


def test_a_label_that_is_another_nodes_name_sets_nothing_aside() -> None:
    scene = Scene()
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1
    scene.fleet.put(node("node-b", device("GPU-b0", index=0), labels={"gpu-node-name": "node-a"}), NOW)
    assert not scene.fleet.is_offered(device("GPU-0", index=0))
    assert scene.fleet.is_offered(device("GPU-b0", index=0))


def test_a_label_counts_while_no_node_has_it_as_its_name() -> None:
    scene = Scene()
    scene.sets.changed(stateful_set("0=node-c:0"))
    scene.fleet.put(node("node-b", device("GPU-b0", index=0), labels={"gpu-node-name": "node-c"}), NOW)
    assert not scene.fleet.is_offered(device("GPU-b0", index=0))
    scene.fleet.put(node("node-c", device("GPU-c0", index=0)), NOW)
    assert scene.fleet.is_offered(device("GPU-b0", index=0))
    assert not scene.fleet.is_offered(device("GPU-c0", index=0))
    scene.fleet.remove("node-c")
    assert not scene.fleet.is_offered(device("GPU-b0", index=0))


@pytest.mark.defect("S1-3")
def test_who_is_of_no_set_has_no_gpu_of_a_set(scene: Scene) -> None:
    raw = builders.raw_pod(
        name="web-0",
        annotations={"gpu-scheduling-map": "0=node-a:0"},
        labels={"apps.kubernetes.io/pod-index": "0"},
    )
    assert scene.serves(builders.claim(raw))
    scene.sets.changed(stateful_set("0=node-a:0"))
    assert not scene.serves(builders.claim(raw))


def test_a_gpu_that_is_there_to_be_shared_is_for_both_sets() -> None:
    scene = Scene(shares=2)
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:0", "late", created="2026-01-02"))
    for name in ("web", "late"):
        assert scene.serves(mapped("0=node-a:0", name, **{"gpuwarden.io/shared": "true"}))


def test_a_set_counts_where_its_namespace_has_asked_for_us(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0,1,2", namespace="elsewhere"))
    assert scene.free() == 3
    scene.news.changed({"metadata": {"name": "elsewhere", "resourceVersion": "2", "labels": OPTED_IN}})
    assert scene.free() == 0
    scene.news.changed({"metadata": {"name": "elsewhere", "resourceVersion": "3"}})
    assert scene.free() == 3


def test_a_changed_map_and_one_that_nobody_can_read(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:1,2"))
    assert scene.free() == 1
    scene.sets.changed(stateful_set("nonsense"))
    assert scene.free() == 3


def test_a_node_that_comes_later_or_is_labelled_later_is_the_maps_too(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=rack-1:0,1"))
    assert scene.free() == 3
    devices = scene.fleet.indexed_nodes["node-a"].node.devices
    scene.fleet.put(node("node-a", *devices, labels={"gpu-node-name": "rack-1"}), NOW)
    assert scene.free() == 1
    scene.fleet.put(node("node-a", *devices), NOW)
    assert scene.free() == 3


def test_a_map_is_not_read_again_whenever_something_else_of_its_set_changes(scene: Scene) -> None:
    """Each pod of a set that comes or goes changes it."""
    scene.sets.changed(stateful_set("0=node-a:0"))
    before = parse_map.cache_info()
    scene.sets.changed({**stateful_set("0=node-a:0"), "status": {"readyReplicas": 1}})
    assert parse_map.cache_info() == before
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1
    scene.sets.deleted(stateful_set("0=node-a:0,1"))
    scene.sets.changed(stateful_set("0=node-a:0,1"))
    assert scene.free() == 1


@pytest.mark.defect("S1-12")
async def test_a_logical_name_of_two_nodes_is_told_on_both_once() -> None:
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


async def test_a_label_that_is_another_nodes_name_is_told_on_both_nodes() -> None:
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
        "label gpu-node-name=node-a of node-b is this node's own name, and counts for nothing there",
        "label gpu-node-name=node-a is the name of another node, and counts for nothing here: "
        "placement maps mean node node-a",
    ]
