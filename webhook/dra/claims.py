"""Which devices are allocated, by which claims, from a watch of ResourceClaims."""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
import structlog
from attrs import define, field

from webhook.core.proof_devices import DRIVER
from webhook.core.raw import Raw
from webhook.kube.resource_claims import AllocatedClaim, AllocatedDevice, allocated_claim
from webhook.kube.watch import key_of

log = structlog.get_logger(__name__)

NOTHING: Final[Mapping[str, Mapping[str, AllocatedClaim]]] = {}


@define(eq=False, repr=False)
class AllocatedClaims:
    """Listener of the watch. A claim that cannot be parsed keeps its last state."""

    _claims: dict[str, AllocatedClaim] = field(factory=dict, init=False)
    # By driver and pool: the claims of each device, by their keys.
    _pools: dict[tuple[str, str], dict[str, dict[str, AllocatedClaim]]] = field(factory=dict, init=False)
    # The pools of each driver.
    _changed: dict[str, set[str]] = field(factory=dict, init=False)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for key in self._claims.keys() - objects.keys():
            self._put(key, None)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        try:
            claim = allocated_claim(raw)
        except msgspec.ValidationError as exc:
            log.warning("ResourceClaim cannot be read, its last state is kept", claim=key_of(raw), problem=str(exc))
            return
        self._put(key_of(raw), claim)

    def deleted(self, raw: Raw) -> None:
        self._put(key_of(raw), None)

    def _put(self, key: str, claim: AllocatedClaim | None) -> None:
        before = self._claims.pop(key, None)
        for one in before.devices if before is not None else ():
            self._remove(key, one)
        if claim is not None:
            self._claims[key] = claim
            for one in claim.devices:
                self._pools.setdefault((one.driver, one.pool), {}).setdefault(one.name, {})[key] = claim
        for driver, pool, _ in devices_of(before) ^ devices_of(claim):
            self._changed.setdefault(driver, set()).add(pool)

    def _remove(self, key: str, one: AllocatedDevice) -> None:
        pool = self._pools.get((one.driver, one.pool), {})
        claims = pool.get(one.name, {})
        claims.pop(key, None)
        if not claims:
            pool.pop(one.name, None)
        if not pool:
            self._pools.pop((one.driver, one.pool), None)

    def devices(self, driver: str, pool: str) -> Mapping[str, Mapping[str, AllocatedClaim]]:
        """The allocated devices of a pool by name, each with its claims."""
        return self._pools.get((driver, pool), NOTHING)

    def proofs_in_use(self, node: str) -> Collection[str]:
        """The names of the node's proof devices that a claim has."""
        return self.devices(DRIVER, node).keys()

    def take_changes(self, driver: str = DRIVER) -> set[str]:
        """The pools whose allocated devices may have changed since the last call. A pool of proof devices is named
        after its node."""
        return self._changed.pop(driver, set())


def devices_of(claim: AllocatedClaim | None) -> set[tuple[str, str, str]]:
    """The devices of the claim, by driver, pool and name."""
    return {(one.driver, one.pool, one.name) for one in (claim.devices if claim is not None else ())}
