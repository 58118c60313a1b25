"""The order of a pod's GPUs in its variables: CUDA numbers devices in this order."""

from collections.abc import Iterable, Mapping, Sequence

from webhook.core import keys
from webhook.core.claim import Claim
from webhook.core.device import Device, DeviceUuid


def in_map_order(claim: Claim, uuids: Sequence[DeviceUuid], devices: Iterable[Device]) -> tuple[DeviceUuid, ...]:
    """The GPUs in the order of the claim's map entry, by the current names of the node's devices."""
    gpus = () if claim.map_entry is None else claim.map_entry.gpus
    known = {device.uuid: device for device in devices}

    def position(uuid: DeviceUuid) -> int:
        device = known.get(uuid, Device(uuid))
        return next((number for number, gpu in enumerate(gpus) if device.has_name(gpu)), len(gpus))

    return tuple(sorted(uuids, key=position))


def in_annotated_order(annotations: Mapping[str, str | None], uuids: Sequence[DeviceUuid]) -> tuple[DeviceUuid, ...]:
    """The GPUs in the order of the pod's annotation, if it lists exactly these.

    Indices may have changed since the pod was dressed, so its map does not give the order any more. A pod may have its
    own GPUs in any order.
    """
    listed = tuple(map(DeviceUuid, (annotations.get(keys.GPU_UUID.name) or "").split(",")))
    return listed if sorted(listed) == sorted(uuids) else tuple(uuids)
