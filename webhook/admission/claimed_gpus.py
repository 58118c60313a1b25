"""Marks the GPUs that ResourceClaims have without a reservation, so that no replica reserves them."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Final

from attrs import define, field

from webhook.core.device import CLAIMED, DeviceUuid
from webhook.core.fleet import Fleet
from webhook.core.pod_claims import CLAIM_NAME
from webhook.dra.claims import AllocatedClaims
from webhook.inventory.discovery import DeviceMarks
from webhook.inventory.published_gpus import PoolDevice, PublishedGpus
from webhook.kube.resource_claims import AllocatedClaim
from webhook.runtime.clock import Clock

# Kubernetes deallocates the claim of a reservation shortly after the reservation has ended.
LEFT_OVER: Final = timedelta(seconds=10)


@define(eq=False, repr=False)
class ClaimedGpus:
    """A source of marks. `is_current` is about the watches of claims and GPUNodes: without them the last marks stay."""

    _fleet: Fleet
    _claims: AllocatedClaims
    _published: PublishedGpus
    _gpu_driver: str
    _clock: Clock
    _is_current: Callable[[], bool]
    _changed: set[str] = field(init=False)
    # The last marks of each node, since the election.
    _last: dict[str, Mapping[DeviceUuid, str]] = field(factory=dict, init=False)
    # The uids of the claims that devices have had while reservations held them.
    _of_reservations: dict[DeviceUuid, frozenset[str]] = field(factory=dict, init=False)
    # Since when the claim of a reservation outlasts it, and the nodes of these claims.
    _left_over: dict[DeviceUuid, datetime] = field(factory=dict, init=False)
    _waiting: set[str] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._changed = self._fleet.collect_changes()

    def begin(self) -> None:
        """This process was elected: another leader may have written marks since."""
        self._last.clear()
        self._of_reservations.clear()
        self._left_over.clear()
        self._changed.update(self._fleet.indexed_nodes)

    def marks_on(self, node: str) -> Mapping[DeviceUuid, str]:
        if self._is_current():
            self._last[node] = self._found(node)
        elif node not in self._last:
            self._changed.add(node)
            return self._written(node)
        return self._last[node]

    def take_changes(self) -> Collection[str]:
        if not self._is_current():
            return ()
        todo = self._changed | self._waiting
        for pool in self._claims.take_changes(self._gpu_driver):
            todo.update(self._published.nodes_of(pool))
        self._changed.clear()
        self._waiting.clear()
        return [node for node in sorted(todo) if self._last.get(node) != self._found(node)]

    def _found(self, node: str) -> Mapping[DeviceUuid, str]:
        marks, now = {}, self._clock()
        for device, uuid in self._published.uuids_on(node).items():
            claims = self._claims_of(device)
            if not claims or self._fleet.holders(uuid):
                self._left_over.pop(uuid, None)
                self._of_reservations.pop(uuid, None)
                if claims:
                    self._of_reservations[uuid] = frozenset(one.uid for one in claims if CLAIM_NAME.fullmatch(one.name))
            elif (
                self._of_reservations.get(uuid, frozenset()).issuperset(one.uid for one in claims)
                and now < self._left_over.setdefault(uuid, now) + LEFT_OVER
            ):
                self._waiting.add(node)
            else:
                marks[uuid] = CLAIMED
        return marks

    def _claims_of(self, device: PoolDevice) -> list[AllocatedClaim]:
        """The claims that take the device from others."""
        found = self._claims.devices(self._gpu_driver, device.pool).get(device.name, {})
        return [one for one in found.values() if self._takes(one, device)]

    def _takes(self, claim: AllocatedClaim, device: PoolDevice) -> bool:
        return any(
            (one.driver, one.pool, one.name) == (self._gpu_driver, *device) and not one.is_admin
            for one in claim.devices
        )

    def _written(self, node: str) -> Mapping[DeviceUuid, str]:
        indexed = self._fleet.indexed_nodes.get(node)
        devices = indexed.node.devices if indexed is not None else ()
        return {one.uuid: CLAIMED for one in devices if one.is_claimed}


@define(eq=False, repr=False)
class CombinedMarks:
    """The marks of the kubelet's use, and those of claims for other GPUs."""

    _deliveries: DeviceMarks
    _claimed: ClaimedGpus

    def marks_on(self, node: str) -> Mapping[DeviceUuid, str] | None:
        delivered = self._deliveries.marks_on(node)
        return None if delivered is None else {**self._claimed.marks_on(node), **delivered}

    def take_changes(self) -> Collection[str]:
        return {*self._deliveries.take_changes(), *self._claimed.take_changes()}
