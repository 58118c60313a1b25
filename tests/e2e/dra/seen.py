"""What watches of the API server show of pods, their ResourceClaims and proof devices. Nothing is read from gpuwarden.

The resource versions of all kinds are revisions of one store, so they tell what was written first.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import httpx
from attrs import define, field, frozen

from tests.e2e.dra.gpus import GPU_DRIVER, RESOURCE_CLAIMS, RESOURCE_SLICES
from tests.e2e.kube import PODS, Kube, Raw, Resource, wait_until
from tests.e2e.processes import running_tasks
from webhook.core.proof_claims import EVIDENCE_ENDS
from webhook.core.proof_devices import DRIVER
from webhook.runtime.clock import LATEST

# The pause before a watch that ended is continued.
PAUSE = 0.1
REQUIRED_HASH = "gpuwarden.io/required-hash"
GPUS = "gpuwarden.io/gpu-uuid"
ENDED = ("Succeeded", "Failed")
# A device: its driver, its pool, which is named after its node, and its name.
DeviceKey = tuple[str, str, str]


@define
class SeenPod:
    """A pod. `bound`, `marked` for deletion and `ended` are the versions of the first events that show it, or 0."""

    name: str
    hash: str
    gpus: frozenset[str] = frozenset()
    """The UUIDs in its annotation. Native pods have none."""
    node: str = ""
    bound: int = 0
    marked: int = 0
    ended: int = 0
    has_failed: bool = False


@frozen
class DeviceState:
    """A proof device as one version of its slice has it."""

    version: int
    uuid: str
    hash: str
    end: datetime


@frozen
class SeenClaim:
    """The devices of a claim by request."""

    pod: str
    devices: Mapping[str, DeviceKey]

    @property
    def pairs(self) -> Iterator[tuple[DeviceKey, DeviceKey]]:
        """Each GPU with its proof."""
        for number in range(len(self.devices) // 2):
            yield self.devices[f"gpu{number}"], self.devices[f"proof{number}"]


@define(eq=False)
class SeenObjects:
    """All pods, claims and proof devices, by watches that have no gap."""

    kube: Kube
    namespace: str
    pods: dict[str, SeenPod] = field(factory=dict)
    claims: dict[str, SeenClaim] = field(factory=dict)
    devices: dict[DeviceKey, list[DeviceState]] = field(factory=lambda: defaultdict(list))
    faults: list[str] = field(factory=list)
    removed: asyncio.Queue[str] = field(factory=asyncio.Queue)
    """The names of pods that are gone."""
    ended: asyncio.Queue[str] = field(factory=asyncio.Queue)
    """The names of pods whose containers have ended."""
    _holders: dict[DeviceKey, str] = field(factory=dict)
    _live: int = 0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        watches = (
            self._follow(PODS, self.namespace, self.see_pod),
            self._follow(RESOURCE_CLAIMS, self.namespace, self.see_claim),
            self._follow(RESOURCE_SLICES, None, self.see_slice),
        )
        async with running_tasks(*watches):
            await wait_until(self._live_watches, lambda count: count == len(watches))
            yield

    async def _live_watches(self) -> int:
        return self._live

    async def _follow(self, of: Resource, namespace: str | None, see: Callable[[Raw, bool], None]) -> None:
        listed = await self.kube.call("GET", of.path(namespace))
        version = listed["metadata"]["resourceVersion"]
        for raw in listed["items"]:
            see(raw, False)
        self._live += 1
        while True:
            with suppress(httpx.HTTPError):
                async for event in self.kube.watch(of, namespace, resourceVersion=version):
                    if event["type"] == "ERROR":
                        self.faults.append(f"the watch of {of.plural} has a gap after {version}")
                        return
                    version = event["object"]["metadata"]["resourceVersion"]
                    see(event["object"], event["type"] == "DELETED")
            await asyncio.sleep(PAUSE)

    def see_pod(self, raw: Raw, is_deleted: bool) -> None:
        meta, version = raw["metadata"], int(raw["metadata"]["resourceVersion"])
        notes = meta.get("annotations") or {}
        one = self.pods.setdefault(meta["name"], SeenPod(meta["name"], notes.get(REQUIRED_HASH, "")))
        if notes.get(GPUS):
            one.gpus = frozenset(notes[GPUS].split(","))
        if not one.bound and raw["spec"].get("nodeName"):
            one.node, one.bound = raw["spec"]["nodeName"], version
        if not one.ended and raw["status"].get("phase") in ENDED:
            one.ended, one.has_failed = version, raw["status"]["phase"] == "Failed"
            self.ended.put_nowait(one.name)
        if not one.marked and (is_deleted or "deletionTimestamp" in meta):
            one.marked = version
        if is_deleted:
            self.removed.put_nowait(one.name)

    def see_claim(self, raw: Raw, is_deleted: bool) -> None:
        """Versions are in order, so a device that two claims have at one time is seen."""
        name = raw["metadata"]["name"]
        allocation = (raw.get("status") or {}).get("allocation") or {}
        results = [] if is_deleted else allocation.get("devices", {}).get("results", [])
        devices = {one["request"]: (one["driver"], one["pool"], one["device"]) for one in results}
        for one in [one for one, holder in self._held_by(name) if holder == name and one not in devices.values()]:
            del self._holders[one]
        for one in devices.values():
            if self._holders.setdefault(one, name) != name:
                self.faults.append(f"{one} is of {self._holders[one]} and of {name}")
        if devices:
            (owner,) = raw["metadata"]["ownerReferences"]
            self.claims[name] = SeenClaim(owner["name"], devices)

    def _held_by(self, name: str) -> list[tuple[DeviceKey, str | None]]:
        known = self.claims.get(name)
        return [] if known is None else [(one, self._holders.get(one)) for one in known.devices.values()]

    def see_slice(self, raw: Raw, is_deleted: bool) -> None:
        spec, version = raw["spec"], int(raw["metadata"]["resourceVersion"])
        if spec["driver"] != DRIVER or is_deleted:
            return
        for one in spec.get("devices", ()):
            ends = [taint["timeAdded"] for taint in one.get("taints", ()) if taint["key"] == EVIDENCE_ENDS]
            uuid, hash = (one["attributes"][key]["string"] for key in (f"{GPU_DRIVER}/uuid", "hash"))
            state = DeviceState(version, uuid, hash, min(map(datetime.fromisoformat, ends), default=LATEST))
            self.devices[DRIVER, spec["pool"]["name"], one["name"]].append(state)
