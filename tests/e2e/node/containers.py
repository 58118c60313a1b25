"""Pods for a real node, and the GPUs that their containers see."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import REAL_NODE
from scripts.node.files import RUNTIME
from scripts.node.images import BUSYBOX
from tests.e2e.kube import PODS, ApiError, Found, Kube, NotInTimeError, Raw, Resource, wait_until

NODE: Final = "real-0"
GPUS: Final = tuple(f"GPU-00000000-0000-4000-8000-{number:012}" for number in range(4))
RUNTIME_CLASSES: Final = Resource("apis/node.k8s.io/v1", "runtimeclasses", is_namespaced=False)
RUNTIME_CLASS: Final[Raw] = {"metadata": {"name": RUNTIME}, "handler": RUNTIME}
# For a busy machine; an idle one takes a second.
START_TIMEOUT: Final = 90.0

# sh as the first process ignores SIGTERM; `exec` would not change that.
SLEEP: Final = "sleep 100000"
SEEN: Final = "if [ -x /usr/bin/nvidia-smi ]; then nvidia-smi -L; fi; cd /dev; ls | grep '^nvidia' || true"


@frozen
class Seen:
    """The GPUs that a container sees: by `nvidia-smi -L`, and by the device nodes in its `/dev`."""

    uuids: tuple[str, ...]
    devices: tuple[str, ...]


NOTHING: Final = Seen((), ())


def seen_of(*numbers: int) -> Seen:
    """These GPUs of `real-0`, and no others."""
    devices = (*(f"nvidia{number}" for number in sorted(numbers)), *(["nvidiactl"] if numbers else []))
    return Seen(tuple(GPUS[number] for number in sorted(numbers)), devices)


def container(
    gpus: int = 0,
    *,
    script: str = SLEEP,
    image: str = BUSYBOX,
    name: str = "main",
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> Raw:
    one: Raw = {"name": name, "image": image, "command": ["/bin/sh", "-c", script], **more}
    if env is not None:
        one["env"] = [{"name": key, "value": value} for key, value in env.items()]
    if gpus:
        one["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return one


def real_pod(name: str, *containers: Raw, grace: int = 1, runtime: str | None = None, **spec: Any) -> Raw:
    """A pod for a real node. Without `runtime` it names no runtime class."""
    content: Raw = {
        "nodeSelector": {REAL_NODE: "true"},
        "terminationGracePeriodSeconds": grace,
        "automountServiceAccountToken": False,
        "containers": list(containers) or [container()],
        **spec,
    }
    if runtime is not None:
        content["runtimeClassName"] = runtime
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": content}


async def runs(kube: Kube, namespace: str, name: str) -> Raw:
    """Waits until all containers run, and returns the pod."""
    return await wait_until(lambda: kube.get(PODS, name, namespace), is_ready, START_TIMEOUT)


async def tried_until(
    kube: Kube, namespace: str, name: str, look: Callable[[], Awaitable[Found]], is_right: Callable[[Found], object]
) -> Found:
    """Like `wait_until`, and changes the pod from time to time: after a failure of a DRA driver the kubelet tries again
    when the pod changes, or after a minute. It fails also if the API server does not know yet that the node may read
    the pod's claim."""
    until = time.monotonic() + START_TIMEOUT
    while time.monotonic() < until:
        with suppress(NotInTimeError):
            return await wait_until(look, is_right, 2)
        changed = {"metadata": {"annotations": {"test/again": str(time.monotonic())}}}
        with suppress(ApiError):  # it may be gone
            await kube.patch(PODS, name, changed, namespace)
    return await wait_until(look, is_right, 0)


def is_ready(pod: Raw) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", ()))


def offers_gpus(node: Raw) -> bool:
    """Whether a device plugin offers all GPUs of the node."""
    return bool(node["status"]["allocatable"].get("nvidia.com/gpu", "0") == str(len(GPUS)))


def containers_of(pod: Raw) -> list[tuple[str | None, int]]:
    """The containers with their restarts. Simulated ones have no ID."""
    return [(one.get("containerID"), one["restartCount"]) for one in pod["status"]["containerStatuses"]]


async def run_in(cluster: Cluster, namespace: str, pod: str, script: str, container: str | None = None) -> str:
    """The output of a shell script in the container."""
    named = ["--container", container] if container is not None else []
    return await kubectl(cluster, "exec", "--namespace", namespace, pod, *named, "--", "/bin/sh", "-c", script)


async def kubectl(cluster: Cluster, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *cluster.kubectl, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def seen_in(cluster: Cluster, namespace: str, pod: str, container: str | None = None) -> Seen:
    lines = (await run_in(cluster, namespace, pod, SEEN, container)).splitlines()
    return Seen(uuids_of(lines), tuple(line for line in lines if line.startswith("nvidia")))


def uuids_of(lines: Sequence[str]) -> tuple[str, ...]:
    """The UUIDs in the output of `nvidia-smi -L`."""
    return tuple(line.rpartition("UUID: ")[2].rstrip(")") for line in lines if line.startswith("GPU "))
