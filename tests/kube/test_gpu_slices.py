"""GPUs in the slices of NVIDIA's DRA driver."""

from typing import Any

import pytest

from tests.builders import Raw
from tests.e2e.dra.gpus import gpu_device, mig_device
from tests.e2e.dra.gpus import gpu_slice as slice_of
from webhook.core.device import Device, DeviceUuid
from webhook.kube.gpu_slices import gpu_slice
from webhook.kube.resource_slices import UnreadableSliceError

MODEL, MIG = "NVIDIA H100 80GB HBM3", "MIG-11111111-0000-4000-8000-000000000001"

LABELS = frozenset({"model=NVIDIA-H100-80GB-HBM3", "architecture=Hopper", "brand=Nvidia"})


def devices(*raws: Raw) -> tuple[Device, ...]:
    return gpu_slice(slice_of("node-a", raws)).devices


def with_attribute(raw: Raw, name: str, value: Any) -> Raw:
    return {**raw, "attributes": {**raw["attributes"], name: value}}


def test_gpus_and_mig_devices_are_read_with_model_memory_and_pci_address() -> None:
    assert devices(gpu_device("GPU-1", 0), mig_device(MIG, "GPU-2", 0)) == (
        Device(DeviceUuid("GPU-1"), model=MODEL, memory="81559Mi", pci="0000:01:00.0", labels=LABELS),
        Device(
            DeviceUuid(MIG),
            model=f"{MODEL} 1g.10gb",
            memory="9856Mi",
            pci="0000:01:00.0",
            labels=frozenset({"model=NVIDIA-H100-80GB-HBM3"}),
        ),
    )


@pytest.mark.parametrize(
    ("effect", "is_healthy"), [("NoSchedule", False), ("NoExecute", False), ("None", True)], ids=str
)
def test_gpu_that_its_driver_taints_is_unhealthy(effect: str, *, is_healthy: bool) -> None:
    (found,) = devices(gpu_device("GPU-1", 0, taints=[{"key": "gpu.nvidia.com/xid", "effect": effect}]))
    assert found.is_healthy is is_healthy


@pytest.mark.parametrize(
    "raw",
    [
        with_attribute(gpu_device("GPU-1", 0), "type", {"string": "vfio"}),
        gpu_device("all", 0),
        gpu_device("0", 0),
        with_attribute(gpu_device("GPU-1", 0), "uuid", {"int": 7}),
        {"name": "gpu-0"},
    ],
    ids=["for a virtual machine", "all", "index", "number", "no attributes"],
)
def test_device_without_a_uuid_of_its_own_is_left_out(raw: Raw) -> None:
    assert devices(raw) == ()


def test_texts_that_cannot_be_shown_are_left_out() -> None:
    raw = gpu_device("GPU-1", 0, model="H100\x1b[31m")
    raw = with_attribute(raw, "resource.kubernetes.io/pciBusID", {"string": "0000:01:00.0\n"})
    assert devices({**raw, "capacity": {"memory": {"value": "8" * 33}}}) == (
        Device(DeviceUuid("GPU-1"), labels=LABELS - {"model=NVIDIA-H100-80GB-HBM3"}),
    )


@pytest.mark.parametrize(
    ("where", "node"),
    [
        ({"nodeName": "node-b"}, "node-b"),
        ({"nodeSelector": {"nodeSelectorTerms": []}}, "node-a"),
        ({"allNodes": True}, ""),
        ({"perDeviceNodeSelection": True}, ""),
    ],
    ids=["by name", "by selector", "all", "by device"],
)
def test_node_of_a_slice(where: Raw, node: str) -> None:
    raw = slice_of("node-a", [])
    del raw["spec"]["nodeName"]
    assert gpu_slice({**raw, "spec": {**raw["spec"], **where}}).node == node


def test_object_that_is_no_slice_is_refused() -> None:
    with pytest.raises(UnreadableSliceError):
        gpu_slice({"spec": {"driver": "gpu.nvidia.com"}})
