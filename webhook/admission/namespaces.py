"""The hashes that namespaces require of their pods, and the rules by which claims are read in each namespace."""

from collections.abc import Mapping
from typing import Any, Protocol

from attrs import evolve, field, frozen

from webhook.core.claim import ClaimRules
from webhook.core.errors import GpuwardenError
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.raw import Raw
from webhook.kube.view import ObjectView


class NamespacesUnavailableError(GpuwardenError):
    """The namespace's requirements cannot be read."""


class NamespaceDemands(Protocol):
    """Knows what each namespace requires."""

    def known(self, namespace: str) -> HashPolicy | None:
        """The policy by the last event; None if the namespace is not known."""

    async def bond(self, namespace: str) -> HashPolicy:
        """The policy; looks an unknown namespace up. Raises NamespacesUnavailableError."""


class NoDemands:
    """Embedded mode: namespaces require nothing."""

    def known(self, namespace: str) -> HashPolicy | None:
        return NO_HASH_POLICY

    async def bond(self, namespace: str) -> HashPolicy:
        return NO_HASH_POLICY


class NamespaceReader(Protocol):
    """Reads one namespace from the API server."""

    async def get(self, name: str) -> Raw | None:
        """A quorum read; None if the namespace does not exist. Raises NamespacesUnavailableError."""


class WatchedNamespaces:
    """The view of a watch of namespaces. An unknown namespace is looked up: it may be as new as its first pods, and
    must not pass as one without requirements."""

    def __init__(self, lookup: NamespaceReader) -> None:
        self.view: ObjectView[HashPolicy] = ObjectView(hash_policy_of)
        self._lookup = lookup

    def known(self, namespace: str) -> HashPolicy | None:
        return self.view.get(namespace)

    async def bond(self, namespace: str) -> HashPolicy:
        found = self.known(namespace)
        if found is not None or not namespace:
            return found or NO_HASH_POLICY
        raw = await self._lookup.get(namespace)
        return NO_HASH_POLICY if raw is None else hash_policy_of(raw)


def hash_policy_of(raw: Mapping[str, Any]) -> HashPolicy:
    meta = raw["metadata"]
    return HashPolicy.of(meta["name"], meta.get("annotations") or {})


@frozen
class ClaimReader:
    """Reads claims by the rules of the pod's namespace."""

    rules: ClaimRules
    namespaces: NamespaceDemands = field(factory=NoDemands)

    async def within(self, namespace: str) -> ClaimRules:
        """The rules for the namespace. Raises NamespacesUnavailableError."""
        return self._bound(await self.namespaces.bond(namespace))

    def known_within(self, namespace: str) -> ClaimRules:
        """The rules by the last event, without a lookup. Not for decisions."""
        return self._bound(self.namespaces.known(namespace) or NO_HASH_POLICY)

    def _bound(self, bond: HashPolicy) -> ClaimRules:
        return self.rules if bond is NO_HASH_POLICY else evolve(self.rules, hash_policy=bond)
