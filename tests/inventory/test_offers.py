"""`kubectl get gpunodes` shows whether free devices can be given to a pod."""

from tests.builders import HASH, NOW, SECOND, Raw, reservation
from tests.fake_objects import FakeObjects
from webhook.core.device import Device, DeviceUuid, Node, Slot
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import MapOwner, SetId
from webhook.inventory.offers import BATCH_SIZE, Offers


class Scene:
    def __init__(self, *names: str) -> None:
        self.now, self.fleet, self.objects = NOW, Fleet(), FakeObjects()
        self.offers = Offers(self.objects, self.fleet, lambda: self.now, needs_evidence=True)
        self.objects.listener = self.offers.view
        for name in names:
            self.objects.put({"metadata": {"name": name}, "status": {"held": {}, "free": 1}})
            self.node(name)

    def node(self, name: str, *, is_ready: bool = True, is_cordoned: bool = False) -> None:
        self.fleet.put(Node(name, {}, (Device(DeviceUuid(f"GPU-{name}")),), is_ready, is_cordoned), self.now)

    async def steps(self, number: int = 1) -> "Scene":
        for _ in range(number):
            self.objects.tell()
            await self.offers.step()
        return self

    def status(self, name: str = "a") -> Raw:
        found: Raw = self.objects.objects[name]["status"]
        return found

    @property
    def writes(self) -> int:
        return sum("status" in one for one in self.objects.done)


async def test_offer_follows_node_and_evidence_and_is_written_once() -> None:
    scene = await Scene("a").steps(3)
    assert (scene.status(), scene.writes) == ({"held": {}, "free": 1, "offer": "unproven"}, 1)
    scene.fleet.set_evidence("a", Evidence("a", HASH, "static", until=NOW + SECOND), NOW)
    assert (await scene.steps(3)).status()["offer"] == "available"
    scene.now += SECOND
    assert (await scene.steps(3)).status()["offer"] == "stale"
    scene.node("a", is_cordoned=True)
    assert (await scene.steps(3)).status()["offer"] == "cordoned"
    scene.node("a", is_ready=False)
    assert (await scene.steps(3)).status()["offer"] == "not-ready"
    assert scene.writes == 5


async def test_gpus_reserved_for_placement_maps_are_not_offered_to_others() -> None:
    scene = Scene("a")
    keeper = MapOwner("2026-01-01", SetId("set", "ml"))
    scene.fleet.put(Node("a", {}, (Device(DeviceUuid("GPU-0")), Device(DeviceUuid("GPU-1")))), NOW)
    scene.fleet.set_evidence("a", Evidence("a", HASH, "static", until=NOW + SECOND), NOW)
    scene.fleet.set_aside({"a": {"GPU-0": keeper}}, {"a"})
    assert (await scene.steps(2)).status()["offer"] == "available", "the other one can be had"
    held = reservation(Slot(DeviceUuid("GPU-1"), 0), node="a")
    scene.fleet.hold(held)
    assert (await scene.steps(2)).status()["offer"] == "kept"
    scene.fleet.free(held)
    assert (await scene.steps(2)).status()["offer"] == "available"
    scene.fleet.set_aside({"a": {"GPU-0": keeper, "GPU-1": keeper}}, {"a"})
    assert (await scene.steps(2)).status()["offer"] == "kept"
    scene.now += SECOND
    assert (await scene.steps(2)).status()["offer"] == "stale"


async def test_offer_is_written_once_to_an_api_server_that_drops_it() -> None:
    scene = await Scene("a").steps(2)
    scene.objects.put({"metadata": {"name": "a"}, "status": {"held": {}, "free": 1}})  # as an older CRD stores it
    await scene.steps(5)
    assert scene.writes == 1
    scene.offers.begin()
    await scene.steps(2)
    assert scene.writes == 2, "whoever is elected tries again"


async def test_conflicting_offer_write_is_retried_without_undoing_the_ledger() -> None:
    scene = Scene("a")
    scene.objects.overtaken = 1
    await scene.steps(1)
    assert "offer" not in scene.status()
    scene.objects.status("a", free=0)
    await scene.steps(2)
    assert (scene.status()["free"], scene.status()["offer"]) == (0, "unproven")


async def test_offer_write_is_retried_after_an_outage() -> None:
    scene = Scene("a")
    scene.objects.is_away = True
    await scene.steps(2)
    scene.objects.is_away = False
    assert (await scene.steps(2)).status()["offer"] == "unproven"


async def test_object_without_status_gets_no_offer() -> None:
    scene = Scene()
    scene.objects.put({"metadata": {"name": "new"}})
    scene.node("new")
    await scene.steps(3)
    assert scene.writes == 0
    scene.objects.status("new", held={})
    assert (await scene.steps(2)).status("new")["offer"] == "unproven"


async def test_offers_are_written_in_batches() -> None:
    scene = Scene(*(f"n{number}" for number in range(2 * BATCH_SIZE + 1)))
    await scene.steps(1)
    assert scene.writes == BATCH_SIZE
    await scene.steps(2)
    assert scene.writes == 2 * BATCH_SIZE + 1


async def test_gpu_node_without_a_node_gets_no_offer() -> None:
    scene = Scene()
    scene.objects.put({"metadata": {"name": "lost"}, "status": {"held": {}}})
    await scene.steps(2)
    assert scene.writes == 0
