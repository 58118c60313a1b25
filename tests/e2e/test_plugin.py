"""Pods whose GPUs the kubelet chooses, on simulated nodes: the test writes the status as a kubelet does.
tests/e2e/node/test_plugin.py has a real one."""

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import grant
from tests.e2e.device_plugin import given
from tests.e2e.kube import EVENTS, NAMESPACES, NODES, PODS, ApiError, Kube, Raw, gone, pod, pod_in_phase, wait_until
from tests.e2e.processes import Site, reconciler_account, site, with_policies
from tests.e2e.test_ledger import GPU_NODES
from tests.e2e.test_wrong_gpus import offer

NODE: Final = "plugged-0"
GPUS: Final = tuple(f"GPU-{NODE}-{number}" for number in range(4))
INJECTION: Final = "gpuwarden.io/injection"
ANNOTATION: Final = "gpuwarden.io/gpu-uuid"
IN_USE: Final = "a GPU in use that its device plugin considers free"


@pytest.fixture
async def plugged(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Site]:
    flags = ("--injection", "plugin", "--max-grace", "1m", "--orphan-margin", "10s")
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=4, name="plugged", replicas=1, flags=flags) as here,
        with_policies(here),
        reconciler_account(here, cluster) as account,
    ):
        await here.reconciler(account)
        await here.wait_until_offered()
        yield here
        here.checker.assert_no_violations()


def plugin_pod(name: str, gpus: int, **spec: Any) -> Raw:
    return pod(name, gpus, nodeSelector={"kubernetes.io/hostname": NODE}, terminationGracePeriodSeconds=1, **spec)


async def runs(here: Site, name: str, gpus: int = 1) -> Raw:
    made = await here.kube.create(PODS, plugin_pod(name, gpus), here.namespace)
    await pod_in_phase(here.kube, here.namespace, name, "Running")
    return made


async def give(here: Site, name: str, *uuids: str, namespace: str = "") -> None:
    """Writes the pod's status as a kubelet does that gave these GPUs to its container."""
    where = namespace or here.namespace
    found = await here.kube.get(PODS, name, where)
    await here.kube.patch(PODS, name, given(found, uuids), where, "status")


async def has(here: Site, name: str) -> list[str]:
    """The GPUs that the ledger holds for the pod, and that its annotation names."""
    found = await here.kube.get(PODS, name, here.namespace)
    uid = found["metadata"]["uid"]
    held = [slot.partition("/")[0] for slot, one in (await here.held()).items() if one.get("uid") == uid]
    named = found["metadata"]["annotations"].get(ANNOTATION, "")
    return sorted(held) if sorted(held) == sorted(named.split(",")) else []


async def wait_until_has(here: Site, name: str, *uuids: str) -> None:
    await wait_until(lambda: has(here, name), lambda found: found == sorted(uuids))


async def refusal(here: Site, content: Raw) -> str:
    try:
        await here.kube.create(PODS, content, here.namespace, dryRun="All")
    except ApiError as exc:
        return str(exc)
    return ""


async def test_ledger_holds_what_the_kubelet_chose(plugged: Site) -> None:
    for labels in {"gpuwarden.io/shared": "true"}, {"gpuwarden.io/gpu.model": "h100"}:
        content = plugin_pod("odd", 1)
        content["metadata"]["labels"] = labels
        assert "InjectionConflict" in await refusal(plugged, content)
    one, two, pair = await runs(plugged, "one"), await runs(plugged, "two"), await runs(plugged, "pair", 2)
    for made in one, two, pair:
        (container,) = made["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(2 if made is pair else 1)
        assert "env" not in container
        assert ANNOTATION not in made["metadata"]["annotations"]
    assert {entry["delivery"] for entry in (await plugged.held()).values()} == {"awaited"}
    assert "NoFreeDevice" in await refusal(plugged, plugin_pod("late", 1))

    # In a ring: each pod gets what stood for another one.
    stood = {entry["pod"]: slot.partition("/")[0] for slot, entry in sorted((await plugged.held()).items())}
    first, second = stood["one"], stood["two"]
    others = [uuid for uuid in GPUS if uuid not in (first, second)]
    await give(plugged, "one", second)
    await wait_until_has(plugged, "one", second)
    await give(plugged, "pair", first, others[0])
    await wait_until_has(plugged, "pair", first, others[0])
    await give(plugged, "two", others[1])
    await wait_until_has(plugged, "two", others[1])
    assert {entry["delivery"] for entry in (await plugged.held()).values()} == {"recorded"}
    assert len(await plugged.held()) == len(GPUS)

    # What ends is free, and the next pod gets it.
    await plugged.kube.delete(PODS, "pair", plugged.namespace)
    await gone(plugged.kube, PODS, "pair", plugged.namespace)
    await wait_until(plugged.held, lambda held: len(held) == 2)
    await runs(plugged, "next", 2)
    await give(plugged, "next", others[0], first)
    await wait_until_has(plugged, "next", first, others[0])
    await assert_second_lock(plugged, recorded=second)


async def test_gpu_has_one_pod_whatever_the_kubelet_gives_away(plugged: Site, cluster: Cluster) -> None:
    await runs(plugged, "owner")
    await give(plugged, "owner", GPUS[2])
    await wait_until_has(plugged, "owner", GPUS[2])
    await runs(plugged, "second")
    await give(plugged, "second", GPUS[2])

    async def reasons() -> set[str]:
        return {one["reason"] for one in await plugged.kube.list(EVENTS, plugged.namespace)}

    await wait_until(reasons, lambda found: {"GPUMismatched", "GPUCollision"} <= found)
    assert await has(plugged, "owner") == [GPUS[2]]
    assert len(await plugged.held()) == 2
    await plugged.kube.delete(PODS, "owner", plugged.namespace)
    await wait_until_has(plugged, "second", GPUS[2])
    await assert_only_administrators_delete_by_force(plugged, cluster, "second")
    await assert_no_pod_comes_beside_a_deleted_one(plugged, "second")


def removal(uuid: str) -> list[dict[str, Any]]:
    return [{"op": "remove", "path": f"/status/held/{uuid}~10"}]


def change(uuid: str, field: str, value: str) -> list[dict[str, Any]]:
    return [{"op": "add", "path": f"/status/held/{uuid}~10/{field}", "value": value}]


async def assert_second_lock(here: Site, recorded: str) -> None:
    """The API server lets only a slot that is awaited change its reservation."""
    await here.kube.delete(PODS, "next", here.namespace)
    await wait_until(here.held, lambda held: len(held) == 2)
    await runs(here, "last")
    (awaited,) = [slot.partition("/")[0] for slot, one in (await here.held()).items() if one["pod"] == "last"]

    async def said(changes: list[dict[str, Any]]) -> str:
        try:
            await here.kube.call("PATCH", GPU_NODES.path(None, NODE, "status"), changes, {"dryRun": "All"})
        except ApiError as exc:
            return exc.message
        return ""

    assert await said(removal(awaited)) == ""
    assert await said(change(awaited, "reservation", "another")) == ""
    assert await said(change(awaited, "delivery", "recorded")) == ""
    assert "only after it was marked releasing" in await said(removal(recorded))
    assert "held by another reservation" in await said(change(recorded, "reservation", "another"))
    assert "cannot become one that the kubelet chooses" in await said(change(recorded, "delivery", "awaited"))


async def assert_only_administrators_delete_by_force(plugged: Site, cluster: Cluster, name: str) -> None:
    """The kubelet would give the GPU to another pod while the containers run."""
    place, ended_at_once = PODS.path(plugged.namespace, name), plugin_pod("late", 1)
    forced: Raw = {"gracePeriodSeconds": 0, "dryRun": ["All"]}
    eviction: Raw = {"metadata": {"name": name}, "deleteOptions": forced}
    ended_at_once["spec"]["terminationGracePeriodSeconds"] = 0
    assert "each deletion would free the pod's GPUs" in await refusal(plugged, ended_at_once)
    async with AsyncExitStack() as stack:
        rules: list[Raw] = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]},
            {"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]},
        ]
        await grant(plugged.kube, stack, "may-delete", rules, {"kind": "User", "name": "tom"})
        tom = await stack.enter_async_context(Kube(cluster.as_user("tom")))
        with pytest.raises(ApiError, match=f"A forced deletion would free the GPUs of pod {name} .* so tom has to"):
            await tom.call("DELETE", place, forced)
        with pytest.raises(ApiError, match=f"in this eviction would free the GPUs of pod {name} .* so tom has to"):
            await tom.call("POST", f"{place}/eviction", eviction)
        for options in {**forced, "gracePeriodSeconds": 1}, {"dryRun": ["All"]}:
            await tom.call("DELETE", place, options)
            await tom.call("POST", f"{place}/eviction", {**eviction, "deleteOptions": options})
    await plugged.kube.call("DELETE", place, forced)
    await plugged.kube.call("POST", f"{place}/eviction", eviction)


async def assert_no_pod_comes_beside_a_deleted_one(plugged: Site, forced: str) -> None:
    """The kubelet takes the GPU of a pod that was deleted by force for free, also before `reconcile` has seen it."""
    kube, namespace = plugged.kube, plugged.namespace
    await kube.create(PODS, plugin_pod("waits", 1, schedulerName="none"), namespace)
    binding = {"metadata": {"name": "waits"}, "target": {"kind": "Node", "name": NODE}}
    await kube.call("POST", PODS.path(namespace, "waits", "binding"), binding, {"dryRun": "All"})
    (reconciler,) = plugged.reconcilers
    reconciler.process.send_signal(signal.SIGSTOP)
    await kube.delete(PODS, forced, namespace, grace=0)
    with pytest.raises(ApiError, match=IN_USE):
        await kube.post(PODS, "waits", "binding", binding, namespace)
    reconciler.process.send_signal(signal.SIGCONT)
    await wait_until(lambda: refusal(plugged, plugin_pod("late", 1)), lambda text: IN_USE in text)
    with pytest.raises(ApiError, match=IN_USE):
        await kube.post(PODS, "waits", "binding", binding, namespace)
    await wait_until(lambda: refusal(plugged, plugin_pod("late", 1)), lambda text: not text)
    await kube.post(PODS, "waits", "binding", binding, namespace)


async def test_node_is_used_only_while_its_device_plugin_offers_enough(plugged: Site) -> None:
    await offer(plugged.kube, NODE, nvidia="1")
    await wait_until(lambda: refusal(plugged, plugin_pod("pair", 2)), lambda text: "NoFreeDevice" in text)
    assert await refusal(plugged, plugin_pod("one", 1)) == ""
    await offer(plugged.kube, NODE, nvidia="0")
    await wait_until(
        lambda: refusal(plugged, plugin_pod("one", 1)), lambda text: "1 has no device plugin for its GPUs" in text
    )
    await offer(plugged.kube, NODE, nvidia="4")
    await wait_until(lambda: refusal(plugged, plugin_pod("all", 4)), lambda text: not text)
    await assert_injection_can_change(plugged)


async def assert_injection_can_change(plugged: Site) -> None:
    """Pods of another injection come when the kubelet has chosen. Pods of this one come back when no GPU is in use that
    its device plugin considers free."""
    kube, namespace = plugged.kube, plugged.namespace
    await runs(plugged, "before")
    await kube.patch(NODES, NODE, {"metadata": {"labels": {INJECTION: "nvidia"}}})
    await kube.patch(NAMESPACES, namespace, {"metadata": {"annotations": {INJECTION: "nvidia"}}})
    not_chosen = "1 has a GPU that its kubelet has not chosen yet"
    await wait_until(lambda: refusal(plugged, plugin_pod("after", 1)), lambda text: not_chosen in text)
    await give(plugged, "before", GPUS[0])
    await wait_until_has(plugged, "before", GPUS[0])
    await wait_until(lambda: refusal(plugged, plugin_pod("after", 3)), lambda text: not text)
    after = await runs(plugged, "after", 3)
    assert sorted(after["metadata"]["annotations"][ANNOTATION].split(",")) == list(GPUS[1:])

    await kube.delete(PODS, "before", namespace)
    await gone(kube, PODS, "before", namespace)
    await kube.patch(NODES, NODE, {"metadata": {"labels": {INJECTION: "plugin"}}})
    await kube.patch(NAMESPACES, namespace, {"metadata": {"annotations": {INJECTION: "plugin"}}})
    await wait_until(lambda: refusal(plugged, plugin_pod("again", 1)), lambda text: IN_USE in text)
    await kube.delete(PODS, "after", namespace)
    await wait_until(lambda: refusal(plugged, plugin_pod("again", 1)), lambda text: not text)
