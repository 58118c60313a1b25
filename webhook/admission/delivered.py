"""Compares the GPUs that the kubelet has given to pods by a device plugin with the reservations. No I/O."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec
from attrs import frozen

from webhook.core.device import DeviceUuid
from webhook.core.pod import WireStruct
from webhook.core.raw import Raw
from webhook.core.reservation import Phase, PodIdentity, Reservation
from webhook.ledger.end_of_use import ContainerUse, container_use_in
from webhook.ledger.given import GivenContainerWire, GivenStatusWire, uuids_in


class GivenPodStatusWire(GivenStatusWire, frozen=True):
    init_container_statuses: list[GivenContainerWire] | None = None


class GivenPodMetaWire(WireStruct, frozen=True):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    deletion_timestamp: str | None = None


class GivenPodSpecWire(WireStruct, frozen=True):
    node_name: str | None = None


class GivenPodWire(WireStruct, frozen=True):
    metadata: GivenPodMetaWire | None = None
    spec: GivenPodSpecWire | None = None
    status: GivenPodStatusWire | None = None


@frozen
class GivenDevices:
    """The GPUs that a pod was given on its node, by any name of the resource."""

    pod: PodIdentity
    node: str
    uuids: tuple[DeviceUuid, ...]
    is_leaving: bool = False

    @classmethod
    def of(cls, raw: Raw) -> "GivenDevices | None":
        """None if the pod was given no GPU, if its containers have ended, or if the status cannot be read."""
        try:
            wire = msgspec.convert(raw, GivenPodWire)
        except msgspec.ValidationError:
            return None
        meta, node = wire.metadata or GivenPodMetaWire(), wire.spec and wire.spec.node_name
        status = wire.status or GivenPodStatusWire()
        uuids = uuids_in([*(status.init_container_statuses or ()), *(status.container_statuses or ())])
        if not (uuids and meta.uid and node) or container_use_in(raw) is ContainerUse.ENDED:
            return None
        pod = PodIdentity(meta.namespace or "", meta.name or "", meta.uid)
        return cls(pod, node, uuids, meta.deletion_timestamp is not None)


class DeliveryFault(StrEnum):
    """How the GPUs that a pod was given differ from the reservations."""

    MISMATCHED = "mismatched"  # the pod has a reservation, for other GPUs
    COLLISION = "collision"  # the GPUs are reserved for other pods
    UNRESERVED = "unreserved"  # neither the pod nor the GPUs have a reservation


@frozen
class WrongDelivery:
    """GPUs that a pod was given and has not reserved."""

    fault: DeliveryFault
    given: GivenDevices
    uuids: tuple[DeviceUuid, ...]
    # The reservations of other pods on these GPUs.
    holders: tuple[Reservation, ...] = ()
    # The GPUs that are reserved for the pod instead; empty if only their number is.
    reserved: tuple[DeviceUuid, ...] = ()

    @property
    def expected(self) -> str:
        return ", ".join(self.reserved) or "as many GPUs as it asks for, which no other pod has"


def wrong_deliveries(
    given: GivenDevices,
    own: Reservation | None,
    holders: Callable[[DeviceUuid], Sequence[Reservation]],
    is_listed: Callable[[str, DeviceUuid], bool],
) -> Iterator[WrongDelivery]:
    """`own` is the reservation of the pod by the ledger: anyone can write annotations where gpuwarden does not review.

    GPUs that are not in the inventory of the node are not compared. A reservation whose GPUs the kubelet chooses has
    none of its own until the choice is recorded, so only their number can be wrong, or GPUs that others have.
    """
    on_node = {uuid: holders_on(given.node, holders(uuid)) for uuid in given.uuids if is_listed(given.node, uuid)}
    wrong = {uuid: found for uuid, found in on_node.items() if all(one.uid != given.pod.uid for one in found)}
    if own is not None and own.is_awaited and len(given.uuids) == len(own.slots):
        wrong = {uuid: found for uuid, found in wrong.items() if found}
    held = tuple(uuid for uuid, found in wrong.items() if found)
    free = tuple(uuid for uuid, found in wrong.items() if not found)
    if own is not None and wrong:
        reserved = () if own.is_awaited else tuple(dict.fromkeys(own.uuids))
        yield WrongDelivery(DeliveryFault.MISMATCHED, given, tuple(wrong), reserved=reserved)
    if held:
        others = tuple(dict.fromkeys(one for found in wrong.values() for one in found))
        yield WrongDelivery(DeliveryFault.COLLISION, given, held, others)
    if free and own is None:
        yield WrongDelivery(DeliveryFault.UNRESERVED, given, free)


def holders_on(node: str, found: Sequence[Reservation]) -> tuple[Reservation, ...]:
    """The reservations on this node that have the GPU and have not been released."""
    return tuple(one for one in found if one.node == node and one.phase is not Phase.RELEASING and not one.is_awaited)


# The marks of devices in GPUNodes. Callers of /devices see them, so they name no pods.
IN_USE = "in use by a pod that has not reserved it"
REPLACED = "its pod was given another GPU"


def marks_of(wrong: WrongDelivery) -> Mapping[DeviceUuid, str]:
    """The marks of the GPUs on the pod's node."""
    replaced = dict.fromkeys((uuid for uuid in wrong.reserved if uuid not in wrong.given.uuids), REPLACED)
    return {**replaced, **dict.fromkeys(wrong.uuids, IN_USE)}
