"""The GPUs that a DRA driver publishes for each node, from a watch of its ResourceSlices."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from attrs import define, field

from webhook.core.device import Device, DeviceUuid
from webhook.core.raw import Raw
from webhook.kube.gpu_slices import GpuSlice, gpu_slice
from webhook.kube.view import NodeView
from webhook.runtime.clock import Clock

# kubelet deletes the slices of its node when it starts and when a driver is away for 30 seconds.
KEPT_WITHOUT_SLICES: Final = timedelta(minutes=2)


class PoolDevice(NamedTuple):
    """A device as a claim names it."""

    pool: str
    name: str


class CompletePools(NamedTuple):
    """The GPUs in the pools of a node."""

    devices: tuple[Device, ...]
    uuids: Mapping[PoolDevice, DeviceUuid]


NOTHING: Final = CompletePools((), {})


@define(eq=False, repr=False)
class PublishedGpus:
    """Listener of the watch. A pool that is being written, or that has just lost its slices, keeps its last GPUs."""

    _clock: Clock
    # A node may have several pools.
    _slices: NodeView[GpuSlice] = field(factory=lambda: NodeView(gpu_slice), init=False)
    _known: dict[str, CompletePools] = field(factory=dict, init=False)
    _nodes_of: dict[str, set[str]] = field(factory=dict, init=False)  # by pool
    _without_slices: dict[str, datetime] = field(factory=dict, init=False)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self._slices.replaced(objects)

    def changed(self, raw: Raw) -> None:
        self._slices.changed(raw)

    def deleted(self, raw: Raw) -> None:
        self._slices.deleted(raw)

    def devices_of(self, node: str) -> tuple[Device, ...] | None:
        """None if no driver publishes GPUs for the node."""
        known = self._known.get(node)
        return None if known is None else known.devices

    def uuids_on(self, node: str) -> Mapping[PoolDevice, DeviceUuid]:
        """The UUIDs of the node's GPUs by the names that claims have for them."""
        known = self._known.get(node)
        return {} if known is None else known.uuids

    def nodes_of(self, pool: str) -> Collection[str]:
        """The nodes with GPUs in a pool of this name."""
        return self._nodes_of.get(pool, ())

    def is_known(self, node: str) -> bool:
        """False if slices exist, and the pool has not been complete yet."""
        return node in self._known or not self._slices.of(node)

    def take_changes(self) -> list[str]:
        """The nodes whose GPUs have changed since the last call."""
        now = self._clock()
        nodes = dict.fromkeys(self._slices.take_changed_nodes())
        nodes |= dict.fromkeys(
            node for node, since in self._without_slices.items() if now - since >= KEPT_WITHOUT_SLICES
        )
        return [node for node in nodes if self._has_changed(node, now)]

    def _has_changed(self, node: str, now: datetime) -> bool:
        before = self._known.get(node)
        slices = self._slices.of(node)
        if slices:
            self._without_slices.pop(node, None)
            found = complete_pools(slices)
            if found is not None:
                self._put(node, found)
        elif now - self._without_slices.setdefault(node, now) >= KEPT_WITHOUT_SLICES:
            self._put(node, NOTHING)
            del self._known[node], self._without_slices[node]
        return self._known.get(node) != before

    def _put(self, node: str, found: CompletePools) -> None:
        for pool in {one.pool for one in self._known.get(node, NOTHING).uuids}:
            self._nodes_of[pool].discard(node)
            if not self._nodes_of[pool]:
                del self._nodes_of[pool]
        for pool in {one.pool for one in found.uuids}:
            self._nodes_of.setdefault(pool, set()).add(node)
        self._known[node] = found


def complete_pools(slices: Iterable[GpuSlice]) -> CompletePools | None:
    """The devices of the newest generation of each pool, once each. None while a pool is incomplete."""
    pools: dict[str, list[GpuSlice]] = {}
    for one in slices:
        pools.setdefault(one.pool, []).append(one)
    devices: dict[DeviceUuid, Device] = {}
    uuids: dict[PoolDevice, DeviceUuid] = {}
    for parts in pools.values():
        newest = max(one.generation for one in parts)
        current = [one for one in parts if one.generation == newest]
        if len(current) < max(one.count for one in current):
            return None
        devices.update({device.uuid: device for one in current for device in one.devices})
        for one in current:
            named = zip(one.names, one.devices, strict=True)
            uuids.update({PoolDevice(one.pool, name): device.uuid for name, device in named})
    return CompletePools(tuple(devices[uuid] for uuid in sorted(devices)), uuids)
