"""Pods with GPUs that come and go all the time in one namespace, and pods that stay. Nothing but the test may end them.

Their GPUs come by variables or by ResourceClaims, as the namespace and the nodes say.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress

from attrs import define, evolve, field

from tests.e2e.dra.gpus import GPU_DRIVER
from tests.e2e.dra.seen import DeviceKey, SeenObjects
from tests.e2e.kube import NAMESPACES, PODS, ApiError, Kube, Raw, pod, pod_in_phase, wait_until
from tests.e2e.processes import Site, running_tasks
from tests.e2e.storm import GRACE, Storm

HASH = "sha256:aa11"
INJECTION = "gpuwarden.io/injection"
# Names of pods that the test deletes while they run. The others end by themselves.
DELETED = "deleted-"
CLIENTS = 4
# For pods that wait for a GPU.
PATIENCE = 120.0


def asking(gpus: int = 1) -> Raw:
    return pod(None, gpus, {"gpuwarden.io/required-hash": HASH}, terminationGracePeriodSeconds=GRACE)


def short_lived(rng: random.Random) -> Raw:
    content = asking(2 if rng.random() < 0.2 else 1)
    if rng.random() < 0.5:
        content["metadata"]["generateName"] = DELETED
    else:
        runs = {"kubelet.test/ends": "Succeeded", "kubelet.test/runs-for": f"{rng.randint(300, 2000)}ms"}
        content["metadata"]["annotations"] |= runs
    return content


@define(eq=False)
class Workload:
    """The pods of one namespace. `uuids` has the GPUs that a DRA driver publishes."""

    storm: Storm
    seen: SeenObjects
    uuids: Mapping[DeviceKey, str]
    is_reserved: bool = True
    """Whether GPUs are reserved for the pods. Else kube-scheduler chooses them."""
    _asked: set[str] = field(factory=set, init=False)

    @property
    def namespace(self) -> str:
        return self.storm.site.namespace

    @property
    def kube(self) -> Kube:
        return self.storm.site.kube

    async def create(self, count: int) -> None:
        """Creates pods, each retried until it is created."""
        await self.storm.create(count, short_lived)

    async def create_all_the_time(self) -> None:
        """Runs until cancelled."""
        await asyncio.gather(*(self._create_again() for _ in range(CLIENTS)))

    async def _create_again(self) -> None:
        while True:
            await self.storm.create_until_made(short_lived(self.storm.rng))
            await asyncio.sleep(self.storm.rng.uniform(0.5, 2))

    async def create_lasting(self, name: str) -> None:
        """Creates a pod that stays, and waits until it runs."""
        content = asking()
        content["metadata"]["name"] = name
        del content["metadata"]["generateName"]
        await self.storm.create_until_made(content)
        await pod_in_phase(self.kube, self.namespace, name, "Running", PATIENCE)

    async def change_injection(self, injection: str | None) -> None:
        """Changes the injection of new pods."""
        await self.kube.patch(NAMESPACES, self.namespace, {"metadata": {"annotations": {INJECTION: injection}}})

    async def waiting_with_claim(self, node: str) -> list[str]:
        """The names of pods with a ResourceClaim that have GPUs of the node reserved and are on no node yet."""
        pods = [one for one in await self.kube.list(PODS, self.namespace) if one["spec"].get("resourceClaims")]
        return [
            str(one["metadata"]["name"])
            for one in pods
            if not one["spec"].get("nodeName") and one["metadata"]["annotations"].get("gpuwarden.io/node") == node
        ]

    async def more_are_bound(self, count: int) -> None:
        wanted = await self._bound() + count
        await wait_until(self._bound, lambda now: now >= wanted, PATIENCE)

    @property
    def bound(self) -> list[str]:
        """The names of the pods that are or were on a node."""
        return [one.name for one in self.seen.pods.values() if one.bound]

    async def _bound(self) -> int:
        return len(self.bound)

    async def delete(self, name: str) -> None:
        self._asked.add(name)
        with suppress(ApiError):
            await self.kube.delete(PODS, name, self.namespace)

    async def end_pods(self) -> None:
        """Deletes pods some time after they are bound. Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for one in list(self.seen.pods.values()):
                    if one.name.startswith(DELETED) and one.bound and one.name not in self._asked:
                        self._asked.add(one.name)
                        tasks.create_task(self._delete_later(one.name))
                await asyncio.sleep(0.1)

    async def _delete_later(self, name: str) -> None:
        await asyncio.sleep(self.storm.rng.uniform(0.3, 2))
        await self.delete(name)

    def faults(self) -> list[str]:
        """What must never be: a GPU of two claims, a pod that something else has ended, other GPUs than reserved."""
        return [*self.seen.faults, *self._killed(), *self._other_gpus()]

    def _killed(self) -> Iterator[str]:
        for one in self.seen.pods.values():
            if one.name not in self._asked and (one.has_failed or (one.marked and not one.ended)):
                yield f"{one.name} was ended"

    def _other_gpus(self) -> Iterator[str]:
        for claim in self.seen.claims.values():
            pod, allocated = self.seen.pods[claim.pod], {self.uuids[gpu] for gpu, _ in claim.pairs}
            if allocated != pod.gpus and (self.is_reserved or pod.gpus):
                yield f"{pod.name} has reserved {pod.gpus} and is allocated {allocated}"


@asynccontextmanager
async def workload(here: Site, namespace: str, seed: int, *, is_reserved: bool = True) -> AsyncIterator[Workload]:
    uuids = {
        (GPU_DRIVER, node, f"gpu-{number}"): f"GPU-{node}-{number}"
        for node in here.nodes
        for number in range(len(here.gpus) // len(here.nodes))
    }
    storm = Storm(evolve(here, namespace=namespace), clients=CLIENTS, seed=seed)
    one = Workload(storm, SeenObjects(here.kube, namespace), uuids, is_reserved)
    async with one.seen.watching(), running_tasks(one.end_pods()):
        yield one
