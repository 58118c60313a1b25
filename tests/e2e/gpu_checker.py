"""Who has which GPU, judged from the pods alone: neither our ledger nor our word for anything is asked.

The API server's watch tells of pods in the order in which they were written, so two holders at one moment are seen.
"""

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
    """A pod that lives, as the API server last showed it. A terminating one lives."""

    uid: str
    name: str
    namespace: str
    gpus: tuple[str, ...]
    phase: str
    is_terminating: bool


class InvariantViolatedError(AssertionError):
    """What no second try of a test makes good."""


class GpuChecker:
    """All pods with GPUs, from a watch; what must never be is noted with the version at which it was."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self.live_pods: dict[str, Holder] = {}
        self.holder_by_gpu: dict[str, str] = {}
        self.violations: list[str] = []
        self.seen: set[str] = set()
        """The uid of every pod that has ever held a GPU."""
        self.ready = asyncio.Event()
        self.lists = 0
        """Between a watch that ended and a list a pod may come and go unseen: with one list none has."""

    @property
    def gpus(self) -> set[str]:
        return set(self.holder_by_gpu)

    def assert_no_violations(self) -> None:
        if self.violations:
            raise InvariantViolatedError("\n".join(self.violations[:5]))

    async def run(self) -> None:
        """For ever; a watch that ends goes on where it was, so that no pod is missed. Where that is too long ago a list
        is made, which is one moment too."""
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
    """What a container runtime would go by; what is read from the pod's annotation says the same. A container that
    is not the GPUs' is shown nothing."""
    return {
        env.get("value", "") if "valueFrom" not in env else annotated
        for container in spec["containers"]
        for env in container.get("env", ())
        if env["name"] == "NVIDIA_VISIBLE_DEVICES" and env.get("value") != "void"
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
