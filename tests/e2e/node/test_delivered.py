"""On a real node: the GPUs that a device plugin gives to pods beside gpuwarden, and pods that the kubelet rejects."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME
from scripts.node.real import DEVICE_PLUGIN, RealNode
from tests.e2e.kube import EVENTS, NODES, PODS, ApiError, Kube, Raw, gone, wait_until
from tests.e2e.node.containers import GPUS, NODE, START_TIMEOUT, container, offers_gpus, real_pod, runs
from tests.e2e.node.test_delivery import devices_by_uuid
from tests.e2e.processes import Site
from tests.e2e.test_ledger import GPU_NODES
from tests.evidence.doubles import Table, built
from webhook.evidence.rpc import RawCodec, ask


@pytest.fixture
async def plugin(real_kube: Kube, real_node: RealNode) -> AsyncIterator[None]:
    """NVIDIA's device plugin offers the GPUs of the node, too."""
    await asyncio.to_thread(real_node.start_device_plugin)
    try:
        await wait_until(lambda: real_kube.get(NODES, NODE), offers_gpus, START_TIMEOUT)
        yield
    finally:
        await asyncio.to_thread(real_node.kill, DEVICE_PLUGIN)
        await wait_until(lambda: real_kube.get(NODES, NODE), lambda node: not offers_gpus(node), START_TIMEOUT)


async def given_to(kube: Kube, namespace: str, name: str) -> str:
    """Waits until the pod runs, and returns the GPU that its kubelet gave to it."""
    await kube.create(PODS, real_pod(name, container(1), runtime=RUNTIME), namespace)
    found = await runs(kube, namespace, name)
    (status,) = found["status"]["containerStatuses"]
    (given,) = status["allocatedResourcesStatus"]
    (device,) = given["resources"]
    return str(device["resourceID"])


async def marks(kube: Kube) -> dict[str, str]:
    """The marks of devices in the GPUNode."""
    devices = (await kube.get(GPU_NODES, NODE))["spec"]["devices"]
    return {one["uuid"]: one["mismatch"] for one in devices if "mismatch" in one}


async def reasons(kube: Kube, namespace: str, name: str) -> set[str]:
    """The reasons of the Events about an object."""
    return {one["reason"] for one in await kube.list(EVENTS, namespace) if one["involvedObject"]["name"] == name}


async def delete(kube: Kube, namespace: str, name: str) -> None:
    await kube.delete(PODS, name, namespace)
    await gone(kube, PODS, name, namespace, START_TIMEOUT)


async def test_gpus_that_a_device_plugin_gives_to_other_pods_are_marked_and_reported(
    front: Site, real_cluster: Cluster, plain_namespace: str, plugin: None
) -> None:
    kube, namespace = front.kube, front.namespace

    async def mismatched() -> list[str]:
        devices = await devices_by_uuid(front, real_cluster)
        return [uuid for uuid, one in devices.items() if one["state"] == "mismatched"]

    await wait_until(lambda: reasons(kube, "default", NODE), lambda found: "DevicePluginFound" in found)
    given = await given_to(kube, plain_namespace, "plug")
    await wait_until(lambda: marks(kube), lambda found: found == {given: "in use by a pod that has not reserved it"})
    await wait_until(lambda: reasons(kube, plain_namespace, "plug"), lambda found: "GPUUnreserved" in found)
    await wait_until(mismatched, lambda found: found == [given])
    await kube.create(PODS, real_pod("others", container(3)), namespace)
    others = await runs(kube, namespace, "others")
    annotated = others["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"].split(",")
    assert sorted([*annotated, given]) == list(GPUS)
    with pytest.raises(ApiError, match="NoFreeDevice"):
        await kube.create(PODS, real_pod("late", container(1)), namespace)

    await delete(kube, plain_namespace, "plug")
    await wait_until(lambda: marks(kube), lambda found: not found)
    await wait_until(mismatched, lambda found: not found)
    await kube.create(PODS, real_pod("late", container(1)), namespace)
    late = await runs(kube, namespace, "late")
    assert late["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == given
    front.checker.assert_no_violations()

    # The plugin gives a reserved GPU to another pod.
    await front.free_all()
    await wait_until(front.held, lambda held: not held)
    await kube.create(PODS, real_pod("train", container(len(GPUS))), namespace)
    train = await runs(kube, namespace, "train")
    given = await given_to(kube, plain_namespace, "plug")
    await wait_until(lambda: reasons(kube, plain_namespace, "plug"), lambda found: "GPUCollision" in found)
    await wait_until(lambda: reasons(kube, namespace, "train"), lambda found: "GPUCollision" in found)
    await wait_until(lambda: reasons(kube, "default", NODE), lambda found: "GPUCollision" in found)
    await wait_until(mismatched, lambda found: found == [given])
    assert (await devices_by_uuid(front, real_cluster))[given]["assignment"]["uid"] == train["metadata"]["uid"]
    await delete(kube, plain_namespace, "plug")
    await wait_until(lambda: marks(kube), lambda found: not found)


# A pod that the kubelet rejects.

NIC: Final = "example.com/nic"
SOCKET: Final = "nic.sock"
TABLE: Table = {
    "Empty": (),
    "RegisterRequest": ((1, "version", "string"), (2, "endpoint", "string"), (3, "resource_name", "string")),
    "Device": ((1, "id", "string"), (2, "health", "string")),
    "ListAndWatchResponse": ((1, "devices", "*Device"),),
    "AllocateRequest": ((1, "container_requests", "*Empty"),),
    "AllocateResponse": ((1, "container_responses", "*Empty"),),
}
MESSAGES = built(TABLE)


class NicPlugin:
    """A device plugin with these devices, which do nothing in a container."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids
        self.is_over = asyncio.Event()

    def __mapping__(self) -> dict[str, Handler]:
        service, empty, answer = "/v1beta1.DevicePlugin/", MESSAGES["Empty"], MESSAGES["ListAndWatchResponse"]
        return {
            f"{service}GetDevicePluginOptions": Handler(self._options, Cardinality.UNARY_UNARY, empty, empty),
            f"{service}ListAndWatch": Handler(self._devices, Cardinality.UNARY_STREAM, empty, answer),
            f"{service}Allocate": Handler(
                self._allocate, Cardinality.UNARY_UNARY, MESSAGES["AllocateRequest"], MESSAGES["AllocateResponse"]
            ),
        }

    async def _options(self, stream: "Stream[Any, Any]") -> None:
        await stream.recv_message()
        await stream.send_message(MESSAGES["Empty"]())

    async def _devices(self, stream: "Stream[Any, Any]") -> None:
        await stream.recv_message()
        devices = [MESSAGES["Device"](id=one, health="Healthy") for one in self.ids]
        await stream.send_message(MESSAGES["ListAndWatchResponse"](devices=devices))
        await self.is_over.wait()

    async def _allocate(self, stream: "Stream[Any, Any]") -> None:
        asked: Any = await stream.recv_message()
        answers = [MESSAGES["Empty"]() for _ in asked.container_requests]
        await stream.send_message(MESSAGES["AllocateResponse"](container_responses=answers))


def offered_nics(node: Raw) -> str:
    return str(node["status"]["allocatable"].get(NIC, "0"))


@asynccontextmanager
async def nic_plugin(kube: Kube, node: RealNode, *ids: str) -> AsyncIterator[None]:
    sockets: Path = node.directory / "kubelet/device-plugins"
    plugin = NicPlugin(*ids)
    server = Server([plugin])
    await server.start(path=str(sockets / SOCKET))
    request = MESSAGES["RegisterRequest"](version="v1beta1", endpoint=SOCKET, resource_name=NIC)
    channel = Channel(path=str(sockets / "kubelet.sock"), codec=RawCodec())
    try:
        await ask(channel, "/v1beta1.Registration/Register", request.SerializeToString())
        await wait_until(lambda: kube.get(NODES, NODE), lambda found: offered_nics(found) == str(len(ids)))
        yield
    finally:
        channel.close()
        plugin.is_over.set()  # the kubelet then closes its connections
        await wait_until(lambda: kube.get(NODES, NODE), lambda found: offered_nics(found) == "0")
        server.close()
        await server.wait_closed()


async def test_pod_that_the_kubelet_rejects_frees_its_gpu_at_once(front: Site, real_node: RealNode) -> None:
    kube, namespace = front.kube, front.namespace
    limits = {"nvidia.com/gpu": "1", NIC: "2"}
    content = real_pod("rejected", container(resources={"limits": limits}), nodeName=NODE, restartPolicy="Never")
    async with nic_plugin(kube, real_node, "nic-0"):
        await kube.create(PODS, content, namespace)
        assert (
            "GPU-" in (await kube.get(PODS, "rejected", namespace))["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        )
        rejected = await wait_until(
            lambda: kube.get(PODS, "rejected", namespace), lambda pod: pod["status"]["phase"] == "Failed"
        )
        assert rejected["status"]["reason"] == "UnexpectedAdmissionError"
        await wait_until(front.held, lambda held: not held, 5)
    # Other tests may have left Events of the node.
    assert not [one for one in await kube.list(EVENTS, "default") if f"{namespace}/rejected" in one["message"]]
