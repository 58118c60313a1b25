"""The GPUs that the kubelet has given to a pod's containers by a device plugin, as the pod's status shows them."""

from collections.abc import Iterable, Iterator

import msgspec

from webhook.core.device import REPLICA, DeviceUuid, is_uuid
from webhook.core.pod import WireStruct


class GivenDeviceWire(WireStruct, frozen=True):
    resource_id: str | None = msgspec.field(name="resourceID", default=None)


class GivenResourceWire(WireStruct, frozen=True):
    resources: list[GivenDeviceWire] | None = None


class GivenContainerWire(WireStruct, frozen=True):
    allocated_resources_status: list[GivenResourceWire] | None = None


class GivenStatusWire(WireStruct, frozen=True):
    container_statuses: list[GivenContainerWire] | None = None


def uuids_in(containers: Iterable[GivenContainerWire]) -> tuple[DeviceUuid, ...]:
    """Each once. Claims of Dynamic Resource Allocation are listed too, by names that are not UUIDs."""
    return tuple(dict.fromkeys(listed_uuids(containers)))


def listed_uuids(containers: Iterable[GivenContainerWire]) -> Iterator[DeviceUuid]:
    for container in containers:
        for resource in container.allocated_resources_status or ():
            for one in resource.resources or ():
                uuid = (one.resource_id or "").partition(REPLICA)[0]
                if is_uuid(uuid):
                    yield DeviceUuid(uuid)
