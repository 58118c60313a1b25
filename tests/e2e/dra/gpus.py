"""GPUs of simulated nodes as NVIDIA's DRA driver publishes them, and claims and pods that use them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from attrs import frozen

from tests.e2e.kube import PODS, ApiError, Kube, Raw, Resource, gone, wait_until
from webhook.core.proof_claims import CLAIM_LABELS, claim_spec, template_name
from webhook.core.proof_devices import DRIVER, hash_attribute

GPU_DRIVER: Final = "gpu.nvidia.com"
RESOURCE_API: Final = "apis/resource.k8s.io/v1"
DEVICE_CLASSES = Resource(RESOURCE_API, "deviceclasses", is_namespaced=False)
RESOURCE_CLAIMS = Resource(RESOURCE_API, "resourceclaims")
RESOURCE_CLAIM_TEMPLATES = Resource(RESOURCE_API, "resourceclaimtemplates")
RESOURCE_SLICES = Resource(RESOURCE_API, "resourceslices", is_namespaced=False)
# The name of the claim within the pod.
CLAIM: Final = "gpuwarden"


def device_class(driver: str) -> Raw:
    """A class of all devices of the driver, with the driver's name."""
    expression = f"device.driver == '{driver}'"
    return {"metadata": {"name": driver}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}


@asynccontextmanager
async def device_classes(kube: Kube, *drivers: str) -> AsyncIterator[None]:
    """Creates the missing classes, and deletes them at the end."""
    made = [driver for driver in drivers if await kube.find(DEVICE_CLASSES, driver) is None]
    for driver in made:
        await kube.create(DEVICE_CLASSES, device_class(driver))
    try:
        yield
    finally:
        for driver in made:
            await kube.delete(DEVICE_CLASSES, driver)


# Slices of the GPUs.


def gpu_uuid(node: str, number: int) -> str:
    """A UUID that tells the node and the number."""
    return f"GPU-{node}-{number}"


def gpu_device(uuid: str, number: int, *, model: str = "NVIDIA H100 80GB HBM3", taints: Sequence[Raw] = ()) -> Raw:
    """A GPU as NVIDIA's driver 0.5.0 publishes it."""
    attributes: Raw = {
        "type": {"string": "gpu"},
        "uuid": {"string": uuid},
        "productName": {"string": model},
        "brand": {"string": "Nvidia"},
        "architecture": {"string": "Hopper"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "driverVersion": {"version": "580.95.5"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "resource.kubernetes.io/pciBusID": {"string": f"0000:{number + 1:02x}:00.0"},
    }
    made: Raw = {"name": f"gpu-{number}", "attributes": attributes, "capacity": {"memory": {"value": "81559Mi"}}}
    return {**made, "taints": list(taints)} if taints else made


def mig_device(uuid: str, parent: str, number: int) -> Raw:
    """A MIG device as NVIDIA's driver 0.5.0 publishes it."""
    attributes: Raw = {
        "type": {"string": "mig"},
        "uuid": {"string": uuid},
        "parentUUID": {"string": parent},
        "profile": {"string": "1g.10gb"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
    }
    return {
        "name": f"gpu-0-mig-1g10gb-19-{number}",
        "attributes": attributes,
        "capacity": {"memory": {"value": "9856Mi"}},
    }


def gpu_slice(node: str, devices: Sequence[Raw], *, name: str = "", generation: int = 1, count: int = 1) -> Raw:
    """A slice of the node's pool, as kubelet plugins write it."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name or f"{node}-{GPU_DRIVER}"},
        "spec": {
            "driver": GPU_DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": count},
            "devices": list(devices),
        },
    }


def slice_of_gpus(node: str, uuids: Sequence[str]) -> Raw:
    return gpu_slice(node, [gpu_device(uuid, number) for number, uuid in enumerate(uuids)])


async def published_gpus(kube: Kube, node: str, count: int) -> list[str]:
    """Publishes GPUs for a node. Returns their UUIDs."""
    uuids = [gpu_uuid(node, number) for number in range(count)]
    await kube.create(RESOURCE_SLICES, slice_of_gpus(node, uuids))
    return uuids


async def remove_slices(kube: Kube, *nodes: str) -> None:
    """Deletes the slices of all drivers for these nodes."""
    for one in await kube.list(RESOURCE_SLICES):
        if one["spec"]["pool"]["name"] in nodes:
            with suppress(ApiError):
                await kube.delete(RESOURCE_SLICES, one["metadata"]["name"])


async def proof_slices(kube: Kube, node: str) -> list[Raw]:
    """gpuwarden's slices of the node, by name."""
    found = await kube.list(RESOURCE_SLICES, fieldSelector=f"spec.driver={DRIVER}")
    return sorted(
        (one for one in found if one["spec"]["pool"]["name"] == node), key=lambda one: one["metadata"]["name"]
    )


async def proof_devices(kube: Kube, node: str) -> dict[str, Raw]:
    """gpuwarden's devices of the node, by UUID."""
    devices = [one for raw in await proof_slices(kube, node) for one in raw["spec"].get("devices", ())]
    return {one["attributes"][f"{GPU_DRIVER}/uuid"]["string"]: one for one in devices}


# Claims and pods.


def pairs(count: int, hash: str, *, evicts: bool = True) -> Raw:
    """The spec of a claim for GPUs that are proven for the hash."""
    attribute = hash_attribute(hash)
    return claim_spec(count, attribute, gpu_driver=GPU_DRIVER, gpu_class=GPU_DRIVER, evicts=evicts)


async def claim_template(kube: Kube, namespace: str, count: int, hash: str, *, evicts: bool = True) -> str:
    """Creates the template if it is missing. Returns its name."""
    name = template_name(count, hash_attribute(hash))
    if await kube.find(RESOURCE_CLAIM_TEMPLATES, name, namespace) is None:
        content = {
            "metadata": {"name": name},
            "spec": {"metadata": {"labels": CLAIM_LABELS}, "spec": pairs(count, hash, evicts=evicts)},
        }
        await kube.create(RESOURCE_CLAIM_TEMPLATES, content, namespace)
    return name


def claiming_pod(name: str, **claim: str) -> Raw:
    """A pod that uses `resourceClaimTemplateName` or `resourceClaimName`. It stops at once when it is deleted."""
    container = {"name": "main", "image": "example.test/main:1", "resources": {"claims": [{"name": CLAIM}]}}
    spec: dict[str, Any] = {"containers": [container], "resourceClaims": [{"name": CLAIM, **claim}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**spec, "terminationGracePeriodSeconds": 1},
    }


async def claiming(kube: Kube, namespace: str, name: str, count: int, hash: str, **spec: Any) -> Raw:
    """Creates a pod that takes `count` GPUs of the hash by a template."""
    template = await claim_template(kube, namespace, count, hash)
    content = claiming_pod(name, resourceClaimTemplateName=template)
    return await kube.create(PODS, {**content, "spec": {**content["spec"], **spec}}, namespace)


# What the scheduler has decided.


@frozen
class AllocatedPair:
    """A GPU and the proof that were allocated together."""

    node: str
    gpu: str
    proof: str


async def bound(kube: Kube, namespace: str, name: str, seconds: float = 30.0) -> Raw:
    """The pod, once it is on a node."""
    return await wait_until(lambda: kube.get(PODS, name, namespace), lambda pod: pod["spec"].get("nodeName"), seconds)


async def refused_by_scheduler(kube: Kube, namespace: str, name: str, words: str = "cannot allocate all claims") -> str:
    """Waits until the scheduler has tried the pod and says these words. Returns its message."""

    async def look() -> str:
        pod = await kube.get(PODS, name, namespace)
        assert not pod["spec"].get("nodeName"), f"{name} is bound"
        conditions = {one["type"]: one for one in pod["status"].get("conditions", ())}
        return str(conditions.get("PodScheduled", {}).get("message", ""))

    return await wait_until(look, lambda text: words in text)


async def claim_of_pod(kube: Kube, namespace: str, name: str) -> Raw:
    """The claim that Kubernetes made from the pod's template."""

    async def look() -> str:
        pod = await kube.get(PODS, name, namespace)
        statuses = pod["status"].get("resourceClaimStatuses", ())
        return next((str(one["resourceClaimName"]) for one in statuses if one["name"] == CLAIM), "")

    return await kube.get(RESOURCE_CLAIMS, await wait_until(look), namespace)


async def allocation(kube: Kube, namespace: str, name: str) -> list[AllocatedPair]:
    """The pairs that the pod's claim has, in the order of its requests. Asserts that each pair is of one node."""
    return await pairs_of(kube, await claim_of_pod(kube, namespace, name))


async def pairs_of(kube: Kube, claim: Raw) -> list[AllocatedPair]:
    """The pairs that the claim has, in the order of its requests. Asserts that each pair is of one node."""
    results = {one["request"]: one for one in claim["status"]["allocation"]["devices"]["results"]}
    slices = await kube.list(RESOURCE_SLICES)
    found = []
    for number in range(len(results) // 2):
        gpu, proof = results[f"gpu{number}"], results[f"proof{number}"]
        assert gpu["pool"] == proof["pool"], results
        uuid = uuid_of(slices, gpu["driver"], gpu["pool"], gpu["device"], "uuid")
        proven = uuid_of(slices, proof["driver"], proof["pool"], proof["device"], f"{GPU_DRIVER}/uuid")
        found.append(AllocatedPair(gpu["pool"], uuid, proven))
    return found


def uuid_of(slices: Sequence[Raw], driver: str, pool: str, device: str, attribute: str) -> str:
    devices = [
        one
        for raw in slices
        if (raw["spec"]["driver"], raw["spec"]["pool"]["name"]) == (driver, pool)
        for one in raw["spec"].get("devices", ())
    ]
    return next((str(one["attributes"][attribute]["string"]) for one in devices if one["name"] == device), "")


async def gpus_of(kube: Kube, namespace: str, name: str) -> list[str]:
    """The GPUs of the pod. Asserts that the proof of each is of the same GPU."""
    found = await allocation(kube, namespace, name)
    assert all(one.gpu == one.proof for one in found), found
    return [one.gpu for one in found]


async def marked_for_deletion(kube: Kube, namespace: str, name: str, seconds: float = 30.0) -> None:
    async def look() -> bool:
        pod = await kube.find(PODS, name, namespace)
        return pod is None or "deletionTimestamp" in pod["metadata"]

    await wait_until(look, seconds=seconds)


async def ended(kube: Kube, namespace: str, name: str) -> None:
    """Deletes the pod and waits until it is gone."""
    with suppress(ApiError):
        await kube.delete(PODS, name, namespace)
    await gone(kube, PODS, name, namespace)
