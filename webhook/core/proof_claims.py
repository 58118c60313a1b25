"""ResourceClaims that take GPUs together with their proof devices."""

import re
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from webhook.core.device import is_mig
from webhook.core.proof_devices import AT_BIND, DRIVER, ProofMode, mapped_mode
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


@frozen
class GpuDemand:
    """So many proven GPUs of one node, of which the scheduler chooses any that match."""

    count: int
    # The attributes of the hashes, one of which the node has proven; empty: any.
    hashes: tuple[str, ...] = ()
    # Attributes of the GPUs, with their values. Dashes stand for spaces.
    attributes: tuple[tuple[str, str], ...] = ()
    # One for each GPU; empty: any.
    uuids: tuple[str, ...] = ()
    # The digest of the pod's StatefulSet, whose map may keep the named GPUs.
    kept_for: str = ""


def claim_spec(
    count: int, hash: str, *, gpu_driver: str, gpu_class: str, evicts: bool, is_challenged: bool = False
) -> Raw:
    """The spec of a claim for `count` GPUs that are proven for the attribute `hash`. With `evicts`, the pod is evicted
    when the evidence ends."""
    mode = ProofMode.CHALLENGED if is_challenged else ProofMode.NATIVE
    demand = GpuDemand(count, (hash,))
    return demanded_spec(demand, mode, gpu_driver=gpu_driver, gpu_class=gpu_class, evicts=evicts)


def demanded_spec(
    demand: GpuDemand, mode: ProofMode = ProofMode.NATIVE, *, gpu_driver: str, gpu_class: str, evicts: bool
) -> Raw:
    """The spec of a claim for GPUs that the scheduler chooses. Nothing in the demand needs escapes in CEL."""
    requests: list[Raw] = []
    for k in range(demand.count):
        uuid = demand.uuids[k] if demand.uuids else None
        # The proof first: the allocator then finds its GPU without a search.
        selector = proof_selector(k, demand, uuid, gpu_driver, mode)
        requests.append(request(f"proof{k}", DRIVER, selector, tolerations=[toleration(evicts=evicts)]))
        requests.append(request(f"gpu{k}", gpu_class, gpu_selector(demand, uuid, gpu_driver)))
    return {"devices": {"requests": requests, **tied(demand.count, demand.hashes, gpu_driver)}}


def tied(count: int, hashes: Sequence[str], gpu_driver: str) -> Raw:
    """The constraints that both devices of a pair are for one GPU, and the hashes for the plugin on the node."""
    attribute = f"{gpu_driver}/uuid"
    parameters = {"hash": hashes[0]} if len(hashes) == 1 else {"hashes": list(hashes)}
    return {
        "constraints": [{"requests": [f"gpu{k}", f"proof{k}"], "matchAttribute": attribute} for k in range(count)],
        "config": [
            {
                "requests": [f"proof{k}" for k in range(count)],
                "opaque": {"driver": DRIVER, "parameters": parameters},
            }
        ],
    }


def request(name: str, device_class: str, selector: str, **members: object) -> Raw:
    selectors = {"selectors": [{"cel": {"expression": selector}}]} if selector else {}
    return {"name": name, "exactly": {"deviceClassName": device_class, **selectors, **members}}


def gpu_selector(demand: GpuDemand, uuid: str | None, gpu_driver: str) -> str:
    """Empty if any GPU with a proof will do. A device may lack an attribute, and an error would stop the scheduler."""
    own = f"device.attributes['{gpu_driver}']"
    terms = [f"has({own}.{name}) && {own}.{name}.matches('{pattern(value)}')" for name, value in demand.attributes]
    return " && ".join([*terms, *([] if uuid is None else [f"{own}.uuid == '{uuid}'"])])


def pattern(value: str) -> str:
    """Matches the value of a label and what it stands for: labels have dashes for spaces."""
    return f"^{value.replace('.', '[.]').replace('-', '[ -]')}$"


def proof_selector(k: int, demand: GpuDemand, uuid: str | None, gpu_driver: str, mode: ProofMode) -> str:
    """Selects proofs of the mode for the k-th pair.

    The allocator tries all permutations of requests that could have the same devices, before it gives up on a node. So
    the k-th of `count` pairs gets only devices that can be the k-th by index: every set of `count` devices, in the
    order of their indices, satisfies that.
    """
    own = f"device.attributes['{DRIVER}']"
    places = f"{own}.index >= {k} && {own}.index <= {k - demand.count} + {own}.count"
    place = places if uuid is None else f"device.attributes['{gpu_driver}'].uuid == '{uuid}'"
    has_mode = f"{own}.mode == '{mode}'"
    if uuid is not None and demand.kept_for:
        has_mode = f"{own}.mode in ['{mode}', '{mapped_mode(demand.kept_for)}']"
    return " && ".join([*hash_terms(demand.hashes), has_mode, place])


def hash_terms(hashes: Sequence[str]) -> list[str]:
    own = f"device.attributes['{DRIVER}'].hash"
    if len(hashes) <= 1:
        return [f"{own} == '{hash}'" for hash in hashes]
    return [f"{own} in [{', '.join(repr(hash) for hash in hashes)}]"]


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
    return {"devices": devices if hash is None else devices | tied(len(uuids), (hash,), gpu_driver)}


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
