"""The demand of a pod whose GPUs kube-scheduler chooses, and the ResourceClaim that states it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from webhook.core.claim_keys import GPU_MAP, REQUIREMENT_PREFIX, SHARED, ClaimRecord
from webhook.core.device import is_mig, is_uuid
from webhook.core.errors import InvalidPodError
from webhook.core.native import MAX_GPUS
from webhook.core.pod_claims import own_claim_of, own_template_of, pod_claim, pod_claim_from
from webhook.core.proof_claims import MAX_PAIRS, GpuDemand, template_name
from webhook.core.proof_devices import HASH_ATTRIBUTE, hash_attribute

# The attributes of NVIDIA's driver by the keys of the labels that ask for them.
ATTRIBUTES: Final = {"architecture": "architecture", "brand": "brand", "model": "productName"}
# The form of a label's value. It needs no escapes in CEL.
VALUE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
# A selector has at most 10 KiB.
MAX_HASHES: Final = 64


def demand_of(record: ClaimRecord) -> GpuDemand:
    """The demand of a claim for GPUs. Raises InvalidPodError with everything that a ResourceClaim cannot ask for."""
    mistakes = [*mistakes_in(record)]
    if mistakes:
        raise InvalidPodError(*mistakes)
    pairs = (one.partition("=") for one in record.requirements)
    return GpuDemand(
        record.gpus,
        tuple(dict.fromkeys(map(hash_attribute, record.hashes))),
        tuple((ATTRIBUTES[key], value) for key, _, value in pairs),
        record.devices,
    )


def mistakes_in(record: ClaimRecord) -> Iterator[str]:
    if record.gpus > MAX_PAIRS:
        yield f"the pod asks for {record.gpus} GPUs; a ResourceClaim has at most {MAX_PAIRS}"
    if len(record.hashes) > MAX_HASHES:
        yield f"the pod accepts {len(record.hashes)} hashes; a ResourceClaim has at most {MAX_HASHES}"
    if record.shared:
        yield f"{SHARED.name}: a ResourceClaim takes whole GPUs"
    for one in record.requirements:
        key, _, value = one.partition("=")
        if key not in ATTRIBUTES or not VALUE.fullmatch(value):
            known = ", ".join(f"{REQUIREMENT_PREFIX}{known}" for known in ATTRIBUTES)
            yield f"{one}: the ResourceSlices of GPUs do not show it; they show {known}"
    if record.devices and len(record.devices) != record.gpus:
        yield f"{GPU_MAP.name}: the map lists {len(record.devices)} GPUs, the pod asks for {record.gpus}"
    named = [gpu for gpu in record.devices if not is_uuid(gpu)]
    if named:
        yield f"{GPU_MAP.name}: the ResourceSlices of GPUs do not show {', '.join(named)}; name GPUs by UUID"
    if any(map(is_mig, record.devices)):
        yield f"{GPU_MAP.name}: kube-scheduler gives whole GPUs; the map names MIG devices"
    if len(set(record.devices)) < len(record.devices):
        yield f"{GPU_MAP.name}: the map names a GPU twice"


def pod_claim_of(record: ClaimRecord, name: str) -> dict[str, Any]:
    """The claim in the pod. A demand for one hash is made from the template that `reconcile` keeps for it, even while
    `reconcile` is down. Any other is a claim of this name, which `reconcile` creates."""
    template = template_of(record)
    return pod_claim(name) if template is None else pod_claim_from(template)


def has_claim_of(claims: Sequence[Mapping[str, Any]] | None, record: ClaimRecord) -> bool:
    """Whether the pod's only claim is the one of this record."""
    spec = {"resourceClaims": claims}
    name = own_claim_of(spec)
    return bool(name or own_template_of(spec)) and list(claims or ()) == [pod_claim_of(record, name)]


def template_of(record: ClaimRecord) -> str | None:
    """The template for the demand; None if there is none. Policies compare its name with the digits of the hash that
    the namespace requires."""
    is_other = bool(record.requirements or record.devices or record.shared)
    if is_other or len(record.hashes) != 1 or record.gpus > MAX_GPUS:
        return None
    digits = record.hashes[0].removeprefix("sha256:")
    return template_name(record.gpus, digits) if HASH_ATTRIBUTE.fullmatch(digits) else None
