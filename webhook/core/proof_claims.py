"""ResourceClaims that take GPUs together with their proof devices."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from webhook.core.device import is_mig
from webhook.core.proof_devices import AT_BIND, DRIVER, ProofMode
from webhook.core.raw import Raw

# A claim has at most 32 requests, and each GPU takes two.
MAX_PAIRS: Final = 16
EVIDENCE_ENDS: Final = "gpuwarden.io/evidence-ends"
# The taint of closed devices, which no claim tolerates.
EVIDENCE_ENDED: Final = "gpuwarden.io/evidence-ended"
# The labels of a claim that may take proven GPUs, and of `spec.metadata` in a template of such claims. Without them the
# API server refuses the allocation (proofs.yaml), and only gpuwarden may write them.
GPU_CLAIM: Final = "gpuwarden.io/gpu-claim"
CLAIM_LABELS: Final = {GPU_CLAIM: "true"}
# What the API server adds to a request for devices.
DEFAULTS: Final[Raw] = {"allocationMode": "ExactCount", "count": 1}
TEMPLATE_NAME: Final = re.compile(r"gpuwarden-[1-9][0-9]?-([a-z0-9]{1,64})(-bind)?")


def template_name(count: int, hash: str, *, is_challenged: bool = False) -> str:
    """The ResourceClaimTemplate for `count` GPUs that are proven for the attribute `hash`."""
    return f"gpuwarden-{count}-{hash}{AT_BIND if is_challenged else ''}"


def hash_of_template(name: str) -> str | None:
    """The attribute that claims from the template ask for; None if it is not one of ours."""
    found = TEMPLATE_NAME.fullmatch(name)
    return None if found is None else found[1]


def claim_spec(
    count: int, hash: str, *, gpu_driver: str, gpu_class: str, evicts: bool, is_challenged: bool = False
) -> Raw:
    """The spec of a claim for `count` GPUs that are proven for the attribute `hash`. With `evicts`, the pod is evicted
    when the evidence ends."""
    mode = ProofMode.CHALLENGED if is_challenged else ProofMode.NATIVE
    return {
        "devices": {
            "requests": [one for k in range(count) for one in pair(k, count, hash, gpu_class, mode, evicts=evicts)],
            **tied(count, hash, gpu_driver),
        }
    }


def tied(count: int, hash: str, gpu_driver: str) -> Raw:
    """The constraints that both devices of a pair are for one GPU, and the hash for the plugin on the node."""
    attribute = f"{gpu_driver}/uuid"
    return {
        "constraints": [{"requests": [f"gpu{k}", f"proof{k}"], "matchAttribute": attribute} for k in range(count)],
        "config": [
            {
                "requests": [f"proof{k}" for k in range(count)],
                "opaque": {"driver": DRIVER, "parameters": {"hash": hash}},
            }
        ],
    }


def pair(k: int, count: int, hash: str, gpu_class: str, mode: ProofMode, *, evicts: bool) -> Iterator[Raw]:
    """The proof first: the allocator then finds its GPU without a search."""
    yield request(f"proof{k}", DRIVER, proof_selector(k, count, hash, mode), tolerations=[toleration(evicts=evicts)])
    yield {"name": f"gpu{k}", "exactly": {"deviceClassName": gpu_class}}


def request(name: str, device_class: str, selector: str, **members: object) -> Raw:
    exactly = {"deviceClassName": device_class, "selectors": [{"cel": {"expression": selector}}], **members}
    return {"name": name, "exactly": exactly}


def proof_selector(k: int, count: int, hash: str, mode: ProofMode) -> str:
    """Selects proofs of the hash and mode for the k-th pair.

    The allocator tries all permutations of requests that could have the same devices, before it gives up on a node. So
    the k-th of `count` pairs gets only devices that can be the k-th by index: every set of `count` devices, in the
    order of their indices, satisfies that.
    """
    own = f"device.attributes['{DRIVER}']"
    places = f"{own}.index >= {k} && {own}.index <= {k - count} + {own}.count"
    return f"{own}.hash == '{hash}' && {own}.mode == '{mode}' && {places}"


def reserved_claim_spec(
    uuids: Sequence[str], hash: str | None, *, gpu_driver: str, gpu_class: str, mig_class: str, evicts: bool
) -> Raw:
    """The spec of a claim for the GPUs of a reservation, each with its proof for the attribute `hash` if there is one.
    UUIDs have no quotes (`core/device.UUID`)."""
    requests: list[Raw] = []
    for k, uuid in enumerate(uuids):
        is_gpu = f"device.attributes['{gpu_driver}'].uuid == '{uuid}'"
        if hash is not None:
            own = f"device.attributes['{DRIVER}']"
            selector = f"{own}.hash == '{hash}' && {own}.mode == '{ProofMode.DRA}' && {is_gpu}"
            requests.append(request(f"proof{k}", DRIVER, selector, tolerations=[toleration(evicts=evicts)]))
        requests.append(request(f"gpu{k}", mig_class if is_mig(uuid) else gpu_class, is_gpu))
    devices: Raw = {"requests": requests}
    return {"devices": devices if hash is None else devices | tied(len(uuids), hash, gpu_driver)}


def toleration(*, evicts: bool) -> Raw:
    """Tolerates the end of the evidence for no time, or for ever."""
    seconds = {"tolerationSeconds": 0} if evicts else {}
    return {"key": EVIDENCE_ENDS, "operator": "Exists", "effect": "NoExecute", **seconds}


def without_defaults(spec: Raw) -> Raw:
    """The spec of a claim in the API server, as it was written."""
    devices = spec.get("devices") or {}
    if not devices.get("requests"):
        return spec
    requests = [without_default_members(one) for one in devices["requests"]]
    return {**spec, "devices": {**devices, "requests": requests}}


def without_default_members(request: Raw) -> Raw:
    if not isinstance(request.get("exactly"), dict):
        return request
    exactly = {key: value for key, value in request["exactly"].items() if DEFAULTS.get(key) != value}
    return {**request, "exactly": exactly}
