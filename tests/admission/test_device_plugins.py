"""Nodes on which a device plugin offers the GPUs of the inventory are reported once."""

from tests.builders import NOW, Raw, device, node
from tests.recorded_events import RecordedEvents
from webhook.admission.device_plugins import AT_A_TIME, DevicePlugins
from webhook.core.fleet import Fleet
from webhook.core.reasons import Reason

FOUND = Reason.DEVICE_PLUGIN_FOUND


def raw_node(name: str = "node-a", gpus: int = 4) -> Raw:
    return {"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


class Scene:
    """Nodes in the inventory, and the watch of Nodes."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self.heard = RecordedEvents()
        self.fleet = Fleet()
        self.fleet.put(node("node-a", device("GPU-a")), NOW)
        self.plugins = DevicePlugins(self.fleet, self.heard, "nvidia.com/gpu", is_strict=is_strict)

    async def step(self) -> list[tuple[str, Reason]]:
        """The Events of a pass."""
        already = len(self.heard.recorded)
        await self.plugins.step()
        return self.heard.recorded[already:]


async def test_node_is_reported_once_until_its_plugin_is_gone() -> None:
    scene = Scene()
    scene.plugins.replaced({"/node-a": raw_node()})
    assert await scene.step() == [("node-a", FOUND)]
    assert await scene.step() == []
    scene.plugins.changed(raw_node(gpus=0))
    assert (await scene.step(), scene.plugins.nodes()) == ([], set())
    scene.plugins.changed(raw_node())
    assert (await scene.step(), scene.plugins.nodes()) == ([("node-a", FOUND)], {"node-a"})
    scene.plugins.deleted(raw_node())
    assert scene.plugins.nodes() == set()
    assert scene.heard.messages[0] == (
        "a device plugin offers nvidia.com/gpu of GPUs that gpuwarden reserves: it may give a reserved GPU to any pod"
    )


async def test_message_of_a_strict_installation_says_that_no_claim_is_placed_there() -> None:
    scene = Scene(is_strict=True)
    scene.plugins.replaced({"/node-a": raw_node()})
    assert await scene.step() == [("node-a", FOUND)]
    assert scene.heard.messages[0].endswith(": no claim for GPUs is placed here")


async def test_node_whose_gpus_come_from_its_plugin_is_not_reported() -> None:
    scene = Scene()
    scene.fleet.put(node("node-a", device("GPU-a"), labels={"gpuwarden.io/injection": "plugin"}), NOW)
    scene.plugins.replaced({"/node-a": raw_node()})
    assert await scene.step() == []


async def test_node_without_gpus_in_the_inventory_is_not_reported() -> None:
    scene = Scene()
    scene.fleet.put(node("node-b"), NOW)
    scene.plugins.replaced({"/node-b": raw_node("node-b"), "/node-x": raw_node("node-x")})
    assert await scene.step() == []
    scene.fleet.put(node("node-b", device("GPU-b")), NOW)
    assert await scene.step() == [("node-b", FOUND)]


async def test_new_list_replaces_the_nodes() -> None:
    scene = Scene()
    scene.plugins.changed(raw_node())
    scene.plugins.replaced({})
    assert await scene.step() == []


async def test_many_nodes_are_reported_over_several_passes() -> None:
    scene = Scene()
    names = [f"node-{number}" for number in range(AT_A_TIME + 1)]
    for name in names:
        scene.fleet.put(node(name, device(f"GPU-{name}")), NOW)
    scene.plugins.replaced({name: raw_node(name) for name in names})
    found = [await scene.step() for _ in range(3)]
    assert [len(one) for one in found] == [AT_A_TIME, 1, 0]
    assert {name for one in found for name, _ in one} == set(names)
