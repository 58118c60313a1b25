"""What each namespace holds the claims of its pods to, and how claims are read for it."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import evolve, field, frozen

from webhook.core.claim import ClaimRules
from webhook.core.errors import GpuwardenError
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.raw import Raw
from webhook.kube.view import ObjectView


class NamespacesUnavailableError(GpuwardenError):
    """What a namespace demands could not be looked up."""


class NamespaceDemands(Protocol):
    """Knows what each namespace demands."""

    def known(self, namespace: str) -> HashPolicy | None:
        """As it was last heard; None if nothing was."""

    async def bond(self, namespace: str) -> HashPolicy:
        """The same, looked up if nothing was heard. Raises NamespacesUnavailableError."""


class NoDemands:
    """Where there is no cluster, no namespace demands anything."""

    def known(self, namespace: str) -> HashPolicy | None:
        return NO_HASH_POLICY

    async def bond(self, namespace: str) -> HashPolicy:
        return NO_HASH_POLICY


class NamespaceReader(Protocol):
    """Can read one namespace as it is now."""

    async def get(self, name: str) -> Raw | None:
        """By a quorum read; None if there is none. Raises NamespacesUnavailableError."""


class WatchedNamespaces:
    """Hears of namespaces from a watch. One that it has not heard of may have come with its first pods, so it is
    looked up: absence in a view would be a namespace that demands nothing."""

    def __init__(self, lookup: NamespaceReader) -> None:
        self.view: ObjectView[HashPolicy] = ObjectView(bond_of)
        self._lookup = lookup

    def known(self, namespace: str) -> HashPolicy | None:
        return self.view.get(namespace)

    async def bond(self, namespace: str) -> HashPolicy:
        found = self.known(namespace)
        if found is not None or not namespace:
            return found or NO_HASH_POLICY
        raw = await self._lookup.get(namespace)
        return NO_HASH_POLICY if raw is None else bond_of(raw)


def bond_of(raw: Mapping[str, Any]) -> HashPolicy:
    meta = raw["metadata"]
    return HashPolicy.of(meta["name"], meta.get("annotations") or {})


@frozen
class ClaimReader:
    """How claims are read in each namespace of this installation."""

    rules: ClaimRules
    namespaces: NamespaceDemands = field(factory=NoDemands)

    async def within(self, namespace: str) -> ClaimRules:
        """Raises NamespacesUnavailableError."""
        return self._bound(await self.namespaces.bond(namespace))

    def known_within(self, namespace: str) -> ClaimRules:
        """By what was heard so far: for what decides nothing."""
        return self._bound(self.namespaces.known(namespace) or NO_HASH_POLICY)

    def _bound(self, bond: HashPolicy) -> ClaimRules:
        return self.rules if bond is NO_HASH_POLICY else evolve(self.rules, hash_policy=bond)
