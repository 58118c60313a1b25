"""GPUs of placement maps stay out of the general pool while their sets exist; names of two nodes are told of."""

import pytest

from tests import builders
from tests.builders import NOW, Raw, device, node, raw_container
from tests.heard import Heard
from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason
from webhook.core.verdict import Deny
from webhook.maps import MappedSets, NamespaceNews, NodeNames

LAX = EvidencePolicy()


def stateful_set(text: str | None, name: str = "web", namespace: str = "ml") -> Raw:
    annotations = {} if text is None else {"gpu-scheduling-map": text}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"template": {"metadata": {"annotations": annotations}}},
    }


def namespace(name: str = "ml", **labels: str) -> Raw:
    return {"metadata": {"name": name, "resourceVersion": "1", "labels": labels}}


class Scene:
    def __init__(self) -> None:
        self.fleet = builders.fleet(
            node("node-a", *(device(f"GPU-{k}", index=k, serial=f"9000{k}") for k in range(3)), labels={"zone": "a"})
        )
        self.sets = MappedSets(self.fleet)
        self.news = NamespaceNews(self.sets)
        self.news.changed({"metadata": {"name": "ml", "resourceVersion": "1", "labels": OPTED_IN}})

    def free(self) -> int:
        """How many GPUs a claim without a map can have at once."""
        for count in (3, 2, 1):
            if not isinstance(decide(general(count), self.fleet, LAX), Deny):
                return count
        return 0


OPTED_IN = {"gpuwarden.io/enabled": "true"}


def general(count: int = 1) -> Claim:
    return builders.claim(builders.raw_pod(raw_container(gpus=count)))


def mapped(text: str) -> Claim:
    return builders.claim(
        builders.raw_pod(name="web-0", annotations={"gpu-scheduling-map": text}, owners=[builders.stateful_set()])
    )


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize("text", ["0=node-a:0,01", "0=node-a:0\n9=node-a:1", "0=node-a:GPU-0,90001"])
def test_mapped_gpus_are_for_maps_while_the_set_exists(scene: Scene, text: str) -> None:
    scene.sets.changed(stateful_set(text))
    assert scene.free() == 1
    found = decide(mapped("0=node-a:0"), scene.fleet, LAX)
    assert not isinstance(found, Deny)
    assert [slot.uuid for slot in found[0].slots] == ["GPU-0"]
    scene.sets.deleted(stateful_set(text))
    assert scene.free() == 3


def test_a_gpu_of_two_sets_is_free_when_both_are_gone(scene: Scene) -> None:
    scene.sets.changed(stateful_set("0=node-a:0"))
    scene.sets.changed(stateful_set("0=node-a:0", "other"))
    scene.sets.deleted(stateful_set("0=node-a:0"))
    assert scene.free() == 2
    scene.sets.replaced({})
    assert scene.free() == 3


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
    devices = scene.fleet.berths["node-a"].node.devices
    scene.fleet.put(node("node-a", *devices, labels={"gpu-node-name": "rack-1"}), NOW)
    assert scene.free() == 1
    scene.fleet.put(node("node-a", *devices), NOW)
    assert scene.free() == 3


@pytest.mark.defect("S1-12")
async def test_a_logical_name_of_two_nodes_is_told_on_both_once() -> None:
    fleet, heard = Fleet(), Heard()
    names = NodeNames(fleet, heard)
    for name in ("node-a", "node-b"):
        fleet.put(node(name, labels={"gpu-node-name": "rack-1"}), NOW)
        await names.step()
        await names.step()
    assert heard.told == [("node-a", Reason.AMBIGUOUS_NODE), ("node-b", Reason.AMBIGUOUS_NODE)]
    fleet.put(node("node-b"), NOW)
    await names.step()
    fleet.put(node("node-b", labels={"gpu-node-name": "rack-1"}), NOW)
    await names.step()
    assert len(heard.told) == 4
