"""Checks from the pods alone that each GPU has one holder. It reads neither gpuwarden's ledger nor its API. The watch
of the API server reports pods in the order in which they were written, so two concurrent holders are seen."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from attrs import frozen

from tests.e2e.kube import PODS, ApiError, Kube, Raw

ENDED = ("Succeeded", "Failed")


@frozen
class Holder:
    """A live pod with GPUs, as the API server last reported it. A terminating pod is live."""

    uid: str
    name: str
    namespace: str
    gpus: tuple[str, ...]
    phase: str
    is_terminating: bool


class InvariantViolatedError(AssertionError):
    """A violation that a rerun of the test does not excuse."""


class GpuChecker:
    """Watches all pods with GPUs and records every violation with the resource version at which it was seen."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.live_pods: dict[str, Holder] = {}
        self.holder_by_gpu: dict[str, str] = {}
        self.violations: list[str] = []
        self.seen: set[str] = set()
        """The UID of every pod that has held a GPU."""
        self.ready = asyncio.Event()
        self.lists = 0
        """The number of lists. A pod can come and go unseen between a watch that ended and the next list; with one
        list, none has."""

    @property
    def gpus(self) -> set[str]:
        return set(self.holder_by_gpu)

    def assert_no_violations(self) -> None:
        if self.violations:
            raise InvariantViolatedError("\n".join(self.violations[:5]))

    async def run(self) -> None:
        """Runs until cancelled. A watch that ends is continued at its last version, so no pod is missed. If that
        version has expired, a new list is a consistent snapshot too."""
        version: str | None = None
        while True:
            try:
                version = version or await self._list()
                self.ready.set()
                async for event in self._kube.watch(PODS, resourceVersion=version):
                    if event["type"] == "ERROR":
                        version = None
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._apply(event)
            except ApiError:
                version = None
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)

    async def _list(self) -> str:
        whole = await self._kube.call("GET", PODS.path(None))
        self.lists += 1
        self.live_pods.clear()
        self.holder_by_gpu.clear()
        for raw in whole["items"]:
            self._observe(raw)
        return str(whole["metadata"]["resourceVersion"])

    def _apply(self, event: Raw) -> None:
        if event["type"] == "DELETED":
            self._forget(event["object"]["metadata"]["uid"])
        else:
            self._observe(event["object"])

    def _observe(self, raw: Raw) -> None:
        holder = holder_of(raw)
        if not holder.gpus:
            return
        if holder.phase in ENDED:
            self._forget(holder.uid)
            return
        self._check(raw, holder)
        self.live_pods[holder.uid] = holder
        self.seen.add(holder.uid)
        for gpu in holder.gpus:
            self.holder_by_gpu[gpu] = holder.uid

    def _check(self, raw: Raw, holder: Holder) -> None:
        meta, spec = raw["metadata"], raw["spec"]
        version = f"{holder.namespace}/{holder.name} at {meta['resourceVersion']}"
        for gpu in holder.gpus:
            other = self.holder_by_gpu.get(gpu, holder.uid)
            if other != holder.uid:
                self.violations.append(f"{version}: {gpu} is also of {self.live_pods[other].name}")
        shown = shown_gpus(spec, meta["annotations"].get("gpuwarden.io/gpu-uuid", ""))
        if shown != {",".join(holder.gpus)}:
            self.violations.append(f"{version}: its containers see {shown}, its annotation says {holder.gpus}")
        on, reserved = spec.get("nodeName"), meta["annotations"].get("gpuwarden.io/node")
        if on and on != reserved:
            self.violations.append(f"{version}: on {on}, reserved on {reserved}")
        if len(set(holder.gpus)) != len(holder.gpus):
            self.violations.append(f"{version}: {holder.gpus}")
        before = self.live_pods.get(holder.uid)
        if before is not None and before.gpus != holder.gpus:
            self.violations.append(f"{version}: had {before.gpus}, has {holder.gpus}")

    def _forget(self, uid: str) -> None:
        holder = self.live_pods.pop(uid, None)
        for gpu in holder.gpus if holder is not None else ():
            if self.holder_by_gpu.get(gpu) == uid:
                del self.holder_by_gpu[gpu]


def holder_of(raw: Raw) -> Holder:
    meta = raw["metadata"]
    text = (meta.get("annotations") or {}).get("gpuwarden.io/gpu-uuid", "")
    return Holder(
        uid=meta["uid"],
        name=meta["name"],
        namespace=meta["namespace"],
        gpus=tuple(text.split(",")) if text else (),
        phase=raw.get("status", {}).get("phase", ""),
        is_terminating="deletionTimestamp" in meta,
    )


def shown_gpus(spec: dict[str, Any], annotated: str) -> set[str]:
    """The values that a container runtime uses; a value that refers to the annotation counts as the annotation.
    Containers without GPUs are left out. The runtime gives a pod with a ResourceClaim none by its own variable. A
    device plugin shows what the kubelet has given to it."""
    variable = "CUDA_VISIBLE_DEVICES" if spec.get("resourceClaims") else "NVIDIA_VISIBLE_DEVICES"
    limits = (one.get("resources", {}).get("limits", {}) for one in spec["containers"])
    by_plugin = {annotated} if any("nvidia.com/gpu" in one for one in limits) else set()
    return by_plugin | {
        env.get("value", "") if "valueFrom" not in env else annotated
        for container in spec["containers"]
        for env in container.get("env", ())
        if env["name"] == variable and env.get("value") != "void"
    }


@asynccontextmanager
async def checking_gpus(kube: Kube) -> AsyncIterator[GpuChecker]:
    checker = GpuChecker(kube)
    task = asyncio.create_task(checker.run())
    try:
        await checker.ready.wait()
        yield checker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
