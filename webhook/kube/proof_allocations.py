"""Reads which proof devices a ResourceClaim has, each with the hash that the claim asks for."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
from attrs import frozen

from webhook.core.proof_devices import DRIVER
from webhook.core.raw import Raw
from webhook.kube.requests import RateLimitedClient

RESOURCE_CLAIM_PATH: Final = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"


class OpaqueWire(msgspec.Struct, frozen=True):
    driver: str
    # Each driver has parameters of its own.
    parameters: Any = None


class ConfigWire(msgspec.Struct, frozen=True):
    source: str = ""
    requests: list[str] | None = None
    opaque: OpaqueWire | None = None


class ProofResultWire(msgspec.Struct, frozen=True):
    request: str
    driver: str
    pool: str
    device: str


class ConfiguredDevicesWire(msgspec.Struct, frozen=True):
    results: list[ProofResultWire] | None = None
    config: list[ConfigWire] | None = None


class ConfiguredAllocationWire(msgspec.Struct, frozen=True):
    devices: ConfiguredDevicesWire = ConfiguredDevicesWire()


class ConfiguredStatusWire(msgspec.Struct, frozen=True):
    allocation: ConfiguredAllocationWire | None = None


class UidWire(msgspec.Struct, frozen=True):
    uid: str


class ConfiguredClaimWire(msgspec.Struct, frozen=True):
    metadata: UidWire
    status: ConfiguredStatusWire = ConfiguredStatusWire()


@frozen
class AllocatedProof:
    """A proof device of a claim. `hash` is the attribute that the claim asks for; None if it does not say so."""

    request: str
    pool: str
    device: str
    hash: str | None


@frozen
class ProofAllocation:
    """The proof devices of one claim; None without an allocation."""

    uid: str
    proofs: tuple[AllocatedProof, ...] | None


def proof_allocation(raw: Raw) -> ProofAllocation:
    """A claim that cannot be parsed raises msgspec.ValidationError."""
    wire = msgspec.convert(raw, ConfiguredClaimWire)
    allocation = wire.status.allocation
    return ProofAllocation(wire.metadata.uid, None if allocation is None else tuple(proofs_of(allocation.devices)))


def proofs_of(devices: ConfiguredDevicesWire) -> Iterator[AllocatedProof]:
    for one in devices.results or ():
        if one.driver == DRIVER:
            yield AllocatedProof(one.request, one.pool, one.device, hash_of(one.request, devices.config or ()))


def hash_of(request: str, config: Iterable[ConfigWire]) -> str | None:
    """The hash in the parameters for our driver. They must be those of the claim: a class names no hash.

    kube-scheduler repeats the parameters of a claim for each of its requests.
    """
    found = {
        parameter_hash(one)
        for one in config
        if one.opaque is not None and one.opaque.driver == DRIVER and is_for(request, one.requests)
    }
    return found.pop() if len(found) == 1 else None


def parameter_hash(one: ConfigWire) -> str | None:
    match one.source, one.opaque and one.opaque.parameters:
        case "FromClaim", {"hash": str() as hash}:
            return hash
        case _:
            return None


def is_for(request: str, requests: list[str] | None) -> bool:
    """A subrequest is named `request/subrequest`. Parameters of a request are for its subrequests too, and parameters
    without requests for all."""
    return not requests or request in requests or request.partition("/")[0] in requests


class ResourceClaims:
    """Reads single claims from the API server."""

    def __init__(self, client: RateLimitedClient) -> None:
        self._client = client

    async def get(self, namespace: str, name: str) -> Raw | None:
        """None if there is none. Raises ApiUnavailableError or ApiRefusesError."""
        return await self._client.call("GET", RESOURCE_CLAIM_PATH, {"namespace": namespace, "name": name})
