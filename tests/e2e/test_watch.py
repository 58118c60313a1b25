"""A view stays current through restarts, compaction and silence, and no failure empties it."""

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import CONFIG_MAPS, NAMESPACES, PODS, SERVICE_ACCOUNTS, Kube, Raw, pod, pod_in_phase, wait_until
from webhook.kube.client import connect
from webhook.kube.watch import Watch, key_of
from webhook.runtime.settings import Settings


class View:
    """The objects that the listener got, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.emptied = 0

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.emptied += bool(self.objects) and not objects
        self.objects = dict(objects)

    def changed(self, raw: Raw) -> None:
        self.objects[key_of(raw)] = raw

    def deleted(self, raw: Raw) -> None:
        self.objects.pop(key_of(raw), None)

    def values(self, namespace: str) -> dict[str, str]:
        return {
            raw["metadata"]["name"]: raw.get("data", {}).get("value", "")
            for key, raw in self.objects.items()
            if key.startswith(f"{namespace}/") and raw["metadata"]["name"] != "kube-root-ca.crt"
        }


@pytest.fixture
async def watching(cluster: Cluster) -> AsyncIterator[tuple[Watch, View]]:
    view = View()
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        watch = Watch(api, "/api/v1/configmaps", view)
        task = asyncio.create_task(watch.run())
        await asyncio.wait_for(watch.ready.wait(), 30)
        yield watch, view
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def shows(view: View, namespace: str, **expected: str) -> bool:
    await asyncio.sleep(0)
    return view.values(namespace) == expected


async def test_watch_reports_created_changed_and_deleted_objects(
    watching: tuple[Watch, View], kube: Kube, namespace: str
) -> None:
    watch, view = watching
    await kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"value": "1"}}, namespace)
    await wait_until(lambda: shows(view, namespace, a="1"))
    await kube.patch(CONFIG_MAPS, "a", {"data": {"value": "2"}}, namespace)
    await wait_until(lambda: shows(view, namespace, a="2"))
    await kube.delete(CONFIG_MAPS, "a", namespace)
    await wait_until(lambda: shows(view, namespace))
    assert watch.is_current
    assert watch.lists == 1


async def test_list_of_several_pages_is_complete(cluster: Cluster, kube: Kube, namespace: str) -> None:
    names = [f"n{number}" for number in range(620)]  # more than one page

    async def create(some: list[str]) -> None:
        for name in some:
            await kube.create(CONFIG_MAPS, {"metadata": {"name": name}, "data": {"value": "x"}}, namespace)

    await asyncio.gather(*(create(names[start::16]) for start in range(16)))
    view = View()
    async with await connect(Settings(kubeconfig=cluster.kubeconfig)) as api:
        task = asyncio.create_task(Watch(api, "/api/v1/configmaps", view).run())
        await wait_until(lambda: shows(view, namespace, **dict.fromkeys(names, "x")))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_view_survives_an_api_server_restart_and_sees_later_changes(
    watching: tuple[Watch, View], cluster: Cluster, kube: Kube, namespace: str
) -> None:
    watch, view = watching
    await kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"value": "1"}}, namespace)
    await wait_until(lambda: shows(view, namespace, a="1"))
    await asyncio.to_thread(cluster.restart, "kube-apiserver")
    assert view.values(namespace) == {"a": "1"}
    async with Kube(cluster.kubeconfig) as after:
        await after.create(CONFIG_MAPS, {"metadata": {"name": "b"}, "data": {"value": "2"}}, namespace)
        await wait_until(lambda: shows(view, namespace, a="1", b="2"))
        assert view.emptied == 0
        assert watch.is_current
        await wait_for_components(after)


async def wait_for_components(kube: Kube) -> None:
    """Waits for the other components: they detect a dead connection after 45 s, and later tests need them."""
    made = await kube.create(NAMESPACES, {"metadata": {"generateName": "e2e-"}})
    name = str(made["metadata"]["name"])
    await wait_until(lambda: kube.find(SERVICE_ACCOUNTS, "default", name), seconds=120)
    await kube.create(PODS, pod("back"), name)
    await pod_in_phase(kube, name, "back", "Running", seconds=120)
    await kube.delete(NAMESPACES, name)


async def test_compacted_resource_version_causes_a_new_list(
    watching: tuple[Watch, View], kube: Kube, namespace: str
) -> None:
    watch, view = watching
    await kube.create(CONFIG_MAPS, {"metadata": {"name": "a"}, "data": {"value": "1"}}, namespace)
    await wait_until(lambda: shows(view, namespace, a="1"))
    watch._dispatch({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}})  # as after a pause of a day
    with pytest.raises(Exception, match="configmaps"):
        watch._dispatch({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}})
    assert view.values(namespace) == {"a": "1"}
