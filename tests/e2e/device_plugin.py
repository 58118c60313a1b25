"""The device plugins of simulated nodes: GPUs are given to pods that request them, and shown in the pods' status."""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from attrs import define, field

from tests.e2e.kube import PODS, ApiError, Kube, Raw

RESOURCE = "nvidia.com/gpu"
LOOK_EVERY = 0.1


def given(raw: Raw, uuids: Sequence[str]) -> Raw:
    """The status of a pod with one container, as a kubelet writes it after it gave these GPUs to the container."""
    (status,) = raw["status"]["containerStatuses"]
    shown = [{"name": RESOURCE, "resources": [{"resourceID": one, "health": "Healthy"} for one in uuids]}]
    return {"status": {"containerStatuses": [{**status, "allocatedResourcesStatus": shown}]}}


def is_shown(raw: Raw) -> bool:
    return any("allocatedResourcesStatus" in one for one in raw["status"]["containerStatuses"])


@define(eq=False)
class DevicePlugins:
    """Gives random free GPUs to the running pods of a namespace, which all have the injection plugin. `gpus` has those
    of each node."""

    kube: Kube
    namespace: str
    gpus: Mapping[str, Sequence[str]]
    given: dict[str, list[str]] = field(factory=dict, init=False)
    """By the name of the pod."""
    faults: list[str] = field(factory=list, init=False)
    _rng: random.Random = field(factory=lambda: random.Random(3), init=False)  # noqa: S311 - a plan, not a secret

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            pods = await self.kube.list(PODS, self.namespace)
            running = {one["metadata"]["name"]: one for one in pods if one["status"].get("phase") == "Running"}
            for name, raw in running.items():
                if name not in self.given:
                    self._choose(name, raw, running)
                if not is_shown(raw):
                    with suppress(ApiError):  # it is gone
                        await self.kube.patch(PODS, name, given(raw, self.given[name]), self.namespace, "status")
            await asyncio.sleep(LOOK_EVERY)

    def _choose(self, name: str, raw: Raw, running: Collection[str]) -> None:
        node, count = raw["spec"]["nodeName"], requested(raw)
        used = {uuid for other in running for uuid in self.given.get(other, ())}
        free = [uuid for uuid in self.gpus[node] if uuid not in used]
        if len(free) < count:
            self.faults.append(f"{node} has {len(free)} free GPUs for {name}")
        self.given[name] = self._rng.sample(free, min(count, len(free)))


def requested(raw: Raw) -> int:
    (container,) = raw["spec"]["containers"]
    return int(container["resources"]["limits"][RESOURCE])
