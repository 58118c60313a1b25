"""Compares what different places say about the GPUs of each pod: its containers, its annotation, its ResourceClaim, the
ledger (GPUNodes) and `/devices`."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import httpx
from attrs import define, field

from scripts.controlplane.cluster import Cluster
from tests.e2e.dra.gpus import GPU_DRIVER, RESOURCE_CLAIMS, RESOURCE_SLICES
from tests.e2e.kube import PODS, ApiError, Kube, Raw, Resource
from tests.e2e.node.containers import Seen
from tests.e2e.node.test_delivery import devices_by_uuid
from tests.e2e.processes import Site, cancel_and_wait
from tests.e2e.test_ledger import GPU_NODES

ANNOTATION, CLAIM, LEDGER, PAGE = "annotation", "claim", "ledger", "/devices"
LOOK_EVERY = 0.5
Gpus = tuple[str, ...]


@define(eq=False)
class Deliveries:
    """Records from the start on. A pod with several lists of GPUs in one place has all of them in its set."""

    here: Site
    cluster: Cluster
    gpus: Sequence[str]
    """The GPUs of the node, in the order of its device nodes."""
    is_by_kubelet: bool = False
    """Whether the kubelet chooses the GPUs, for each container its own. Before the choice is recorded, `/devices` shows
    other GPUs, so only the last ones count."""
    names: dict[str, str] = field(factory=dict)
    """The names of pods by uid."""
    containers: dict[str, int] = field(factory=dict)
    """The number of containers of pods by uid."""
    found: dict[tuple[str, str], set[Gpus]] = field(factory=dict)
    """GPUs by uid of the pod and place."""
    published: dict[tuple[str, str], str] = field(factory=dict)
    """The UUIDs of the GPUs by pool and device."""

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        kube = self.here.kube
        observed = {
            PODS: self._pod,
            GPU_NODES: self._ledger,
            RESOURCE_CLAIMS: self._claim,
            RESOURCE_SLICES: self._slice,
        }
        tasks = [asyncio.create_task(follow(kube, of, observe)) for of, observe in observed.items()]
        tasks.append(asyncio.create_task(self._follow_page()))
        try:
            yield
        finally:
            await cancel_and_wait(tasks)

    def created(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        self.names[uid] = pod["metadata"]["name"]
        self.containers[uid] = len(pod["spec"]["containers"])

    def agree(self, uid: str, places: Iterable[str]) -> bool:
        """Whether all these places name the same GPUs of the pod."""
        said = [self.found.get((uid, place)) for place in places]
        return None not in said and all(one == said[0] for one in said)

    def _pod(self, raw: Raw) -> None:
        annotated = (raw["metadata"].get("annotations") or {}).get("gpuwarden.io/gpu-uuid")
        if annotated:
            self._note(raw["metadata"]["uid"], ANNOTATION, annotated.split(","))

    def _note(self, uid: str, place: str, gpus: Iterable[str]) -> None:
        self.found.setdefault((uid, place), set()).add(tuple(sorted(gpus)))

    def _slice(self, raw: Raw) -> None:
        if raw["spec"]["driver"] == GPU_DRIVER:
            pool, devices = raw["spec"]["pool"]["name"], raw["spec"].get("devices", ())
            self.published |= {(pool, one["name"]): one["attributes"]["uuid"]["string"] for one in devices}

    def _claim(self, raw: Raw) -> None:
        allocated = raw.get("status", {}).get("allocation")
        owners = raw["metadata"].get("ownerReferences", ())
        if allocated and owners:
            results = [one for one in allocated["devices"]["results"] if one["driver"] == GPU_DRIVER]
            self._note(owners[0]["uid"], CLAIM, [self.published[one["pool"], one["device"]] for one in results])

    def _ledger(self, raw: Raw) -> None:
        held = raw.get("status", {}).get("held") or {}
        known = {slot: one for slot, one in held.items() if one.get("delivery") != "awaited"}
        self._note_all(LEDGER, ((slot.partition("/")[0], one.get("uid")) for slot, one in known.items()))

    def _note_all(self, place: str, pairs: Iterable[tuple[str, str | None]]) -> None:
        by_uid: dict[str, list[str]] = {}
        for gpu, uid in pairs:
            if uid:
                by_uid.setdefault(uid, []).append(gpu)
        for uid, gpus in by_uid.items():
            self._note(uid, place, gpus)

    async def _follow_page(self) -> None:
        while True:
            devices = {}
            with suppress(httpx.HTTPError, IndexError):  # the replica was killed
                devices = await devices_by_uuid(self.here, self.cluster)
            pairs = [(gpu, one["assignment"].get("uid")) for gpu, one in devices.items() if one.get("assignment")]
            if self.is_by_kubelet:
                for _, uid in pairs:
                    self.found.pop((uid, PAGE), None)
            self._note_all(PAGE, pairs)
            self._note_claimed({gpu for gpu, one in devices.items() if one["state"] == "claimed"})
            await asyncio.sleep(LOOK_EVERY)

    def _note_claimed(self, claimed: set[str]) -> None:
        """`/devices` does not name the pods of these GPUs."""
        for (uid, place), found in list(self.found.items()):
            for gpus in found if place == CLAIM else ():
                if claimed.issuperset(gpus):
                    self._note(uid, PAGE, gpus)

    def violations(self, seen: Mapping[str, Sequence[Seen]], places: Callable[[str], Iterable[str]]) -> Iterator[str]:
        """Describes each pod whose containers see other GPUs than a place names for it. A pod without started
        containers is left out. `places` returns the places that have to know a pod of that name."""
        for uid, name in self.names.items():
            if name in seen:
                said: dict[str, set[Gpus]] = {place: set() for place in places(name)}
                known = {place: gpus for (of, place), gpus in self.found.items() if of == uid}
                if self.is_by_kubelet and PAGE not in said:
                    known.pop(PAGE, None)
                own = self.containers[uid] if self.is_by_kubelet else None
                yield from (f"{name}: {one}" for one in disagreements(seen[name], said | known, self.gpus, own))


def disagreements(
    seen: Sequence[Seen], said: Mapping[str, set[Gpus]], gpus: Sequence[str], containers: int | None = None
) -> Iterator[str]:
    """Describes differences between what the containers of a pod saw and what was said of it, on a node with these
    GPUs. If each container has GPUs of its own, `containers` is their number."""
    for one in seen:
        devices = tuple(f"nvidia{number}" for number, gpu in enumerate(gpus) if gpu in one.uuids)
        if not one.uuids or one.devices != (*devices, "nvidiactl"):
            yield f"a container sees {one.uuids} and has {one.devices}"
    uuids = {tuple(sorted(one.uuids)) for one in seen}
    if containers is not None:
        started = len(uuids)
        (own,) = uuids = {tuple(sorted(itertools.chain(*uuids)))}
        if started < containers:
            said = {place: {tuple(gpu for gpu in one if gpu in own) for one in found} for place, found in said.items()}
    if len(uuids) != 1 or any(found != uuids for found in said.values()):
        yield f"its containers see {uuids}, and {dict(said)}"


async def follow(kube: Kube, of: Resource, observe: Callable[[Raw], None]) -> None:
    """Calls `observe` with each version of each object, until cancelled."""
    version = ""
    while True:
        try:
            if not version:
                whole = await kube.call("GET", of.path(None))
                for raw in whole["items"]:
                    observe(raw)
                version = str(whole["metadata"]["resourceVersion"])
            async for event in kube.watch(of, resourceVersion=version):
                if event["type"] == "ERROR":
                    version = ""
                    break
                version = event["object"]["metadata"]["resourceVersion"]
                observe(event["object"])
        except ApiError:
            version = ""
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.1)
