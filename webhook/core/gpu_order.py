"""In which order a pod is shown its GPUs: CUDA numbers devices as they are listed."""

from collections.abc import Iterable, Mapping, Sequence

from webhook.core import keys
from webhook.core.claim import Claim
from webhook.core.device import Device, DeviceUuid


def in_map_order(claim: Claim, uuids: Sequence[DeviceUuid], devices: Iterable[Device]) -> tuple[DeviceUuid, ...]:
    """The GPUs as the line of the claim's map lists them, by the names that the node's devices have at this moment."""
    gpus = () if claim.map_entry is None else claim.map_entry.gpus
    known = {device.uuid: device for device in devices}

    def position(uuid: DeviceUuid) -> int:
        device = known.get(uuid, Device(uuid))
        return next((number for number, gpu in enumerate(gpus) if device.has_name(gpu)), len(gpus))

    return tuple(sorted(uuids, key=position))


def in_annotated_order(annotations: Mapping[str, str | None], uuids: Sequence[DeviceUuid]) -> tuple[DeviceUuid, ...]:
    """The GPUs as a dressed pod lists them itself, if it names these and each once.

    Indices may have changed since it was dressed, so its map says it no more; and in another order its GPUs are its own
    all the same.
    """
    said = tuple(map(DeviceUuid, (annotations.get(keys.GPU_UUID.name) or "").split(",")))
    return said if sorted(said) == sorted(uuids) else tuple(uuids)
