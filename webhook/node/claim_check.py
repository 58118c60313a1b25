"""Decides whether a claim with proof devices may be prepared: only while this node is proven for its hash.

Nothing is remembered between two calls. The kubelet repeats a call if another driver of the same pod was not ready, and
evidence may have ended in between.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

import msgspec
import structlog
from attrs import evolve, field, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceIdParts
from webhook.core.proof_devices import HASH_DIGITS, digits_of_device, hash_attribute
from webhook.core.raw import Raw
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_svid import MAX_LIFE, read_token
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.resource_claims import AllocatedProof, ProofAllocation, proof_allocation
from webhook.node.dra_messages import ClaimName, PreparedClaim, PreparedDevice
from webhook.node.evidence_records import EvidenceRecords, NotRecordedError
from webhook.node.node_identity import NodeIdentity, NotOneIdentityError
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

# Fixed, so that the SPIRE agent keeps a token for it: a short outage of SPIRE Server does not matter. `serve` accepts
# no token with this audience.
AUDIENCE: Final = "gpuwarden.io/prepare"
# The reason is shown in an Event of the pod, with at most 1024 characters.
MAX_REASON: Final = 500
# How long a problem that may pass is waited for. After an error the kubelet calls again only 60 to 90 s later.
PATIENCE: Final = timedelta(seconds=15)
BACKOFF: Final = Backoff(timedelta(seconds=0.5), timedelta(seconds=4), jitter=(0.8, 1.2))
# Claims that are checked at the same time, and those of them that are checked again. The latter are fewer than the
# former, so that claims that wait for something do not delay others.
MAX_READS: Final = 8
MAX_REPEATED_READS: Final = 4


class NotPreparedError(GpuwardenError):
    """The claim must not be prepared now. The text is the reason in the pod's Event."""


class NotYetPreparedError(NotPreparedError):
    """The reason may be gone within seconds."""


# The node authorizer and RBAC may not know a new pod or role yet. The last two are about the record.
PASSING: Final = (
    NotYetPreparedError,
    ApiUnavailableError,
    ApiRefusesError,
    EvidenceUnavailableError,
    NotRecordedError,
)


class PodClaims(Protocol):
    """Where claims are read from."""

    async def get(self, namespace: str, name: str) -> Raw | None:
        """None if there is none. Raises GpuwardenError."""


@frozen(eq=False)
class ClaimCheck:
    """Checks claims against the evidence of this node."""

    identity: NodeIdentity
    claims: PodClaims
    clock: Clock
    skew: timedelta
    # Where records of the evidence are written, if containers get them.
    records: EvidenceRecords | None = None
    patience: timedelta = PATIENCE
    _first: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(MAX_READS), init=False)
    _repeated: asyncio.Semaphore = field(factory=lambda: asyncio.Semaphore(MAX_REPEATED_READS), init=False)

    async def prepare(self, names: Sequence[ClaimName]) -> Mapping[str, PreparedClaim]:
        """The answer for each claim, by uid."""
        found = await asyncio.gather(*map(self._answer, names))
        return {name.uid: one for name, one in zip(names, found, strict=True)}

    async def remove_stale_records(self) -> None:
        """Removes the records of claims that do not exist any more: the kubelet may have forgotten them."""
        for uid, name in (self.records.claims() if self.records is not None else {}).items():
            try:
                raw = await self.claims.get(name.namespace, name.name)
            except GpuwardenError as exc:
                log.warning("record of the evidence not checked", claim=str(name), problem=str(exc))
                continue
            if self.records is not None and (raw is None or raw["metadata"].get("uid") != uid):
                self.records.remove(uid)
                log.info("record of the evidence removed", claim=str(name))

    async def _answer(self, name: ClaimName) -> PreparedClaim:
        try:
            devices = await self._devices_in_time(name)
        except GpuwardenError as exc:
            log.warning("claim not prepared", claim=str(name), problem=str(exc))
            return PreparedClaim(error=str(exc)[:MAX_REASON])
        log.info("claim prepared", claim=str(name), devices=[one.device for one in devices])
        return PreparedClaim(devices)

    async def _devices_in_time(self, name: ClaimName) -> tuple[PreparedDevice, ...]:
        """Tries again for a while if the problem may pass. Raises GpuwardenError."""
        problem: GpuwardenError = NotPreparedError("the checks before it have taken too long")
        try:
            async with asyncio.timeout(self.patience.total_seconds()):
                for failures in itertools.count(1):
                    try:
                        async with self._first if failures == 1 else self._repeated:
                            return await self._devices(name)
                    except PASSING as exc:
                        problem = exc
                    await asyncio.sleep(BACKOFF.seconds(failures))
        except TimeoutError:
            pass
        raise problem

    async def _devices(self, name: ClaimName) -> tuple[PreparedDevice, ...]:
        """The evidence is read after the claim: it has to be good now. Raises GpuwardenError."""
        allocation = allocation_in(await self.claims.get(name.namespace, name.name), name)
        proofs = proofs_in(allocation, name)
        spiffe_id, parts = await self._evidence()
        hash = hash_attribute(parts.hash)
        for one in proofs:
            check_proof(one, self.identity.node, hash)
        first, *rest = (PreparedDevice(one.device.request, one.device.pool, one.device.name) for one in proofs)
        if self.records is not None:
            first = evolve(first, cdi=await self.records.write(name, allocation.pods, proofs, spiffe_id, parts))
        return (first, *rest)

    async def _evidence(self) -> tuple[str, EvidenceIdParts]:
        """The identity that proves this node at this moment, and what it says. Raises GpuwardenError."""
        try:
            svid, parts = await self.identity.svid(AUDIENCE)
            check_token(svid.token, svid.spiffe_id, self.clock(), self.skew)
        except GpuwardenError as exc:
            may_pass = isinstance(exc, EvidenceUnavailableError | NotOneIdentityError)
            error = NotYetPreparedError if may_pass else NotPreparedError
            raise error(f"node {self.identity.node} has no evidence at this moment: {exc}") from exc
        return svid.spiffe_id, parts


def allocation_in(raw: Raw | None, name: ClaimName) -> ProofAllocation:
    """What is allocated to the claim. Raises NotPreparedError."""
    if raw is None:
        raise NotPreparedError(f"the ResourceClaim {name} does not exist")
    try:
        found = proof_allocation(raw)
    except msgspec.ValidationError as exc:
        raise NotPreparedError(f"the ResourceClaim {name} cannot be parsed: {exc}") from exc
    if found.uid != name.uid:
        raise NotPreparedError(f"the ResourceClaim {name} is another one of the same name")
    return found


def proofs_in(found: ProofAllocation, name: ClaimName) -> tuple[AllocatedProof, ...]:
    """The proof devices of the claim. Raises NotPreparedError."""
    if not found.proofs:
        # The scheduler's write may not be in this answer yet.
        error = NotYetPreparedError if found.proofs is None else NotPreparedError
        raise error(f"the ResourceClaim {name} has no allocated proof device")
    return found.proofs


def check_proof(proof: AllocatedProof, node: str, hash: str) -> None:
    """Whether the device is a proof of this node for this hash. Raises NotPreparedError."""
    device = proof.device
    if device.pool != node:
        raise NotPreparedError(f"the proof device {device.name} is of node {device.pool}, and this is node {node}")
    if proof.hashes is None:
        raise NotPreparedError(f"the ResourceClaim does not say which hash the request {device.request} is for")
    if proof.hashes and hash not in proof.hashes:
        wanted = " or ".join(proof.hashes)
        raise NotPreparedError(f"node {node} is proven for the hash {hash}, and the pod requires {wanted}")
    if digits_of_device(device.name) != hash[:HASH_DIGITS]:
        raise NotPreparedError(f"the proof device {device.name} is not for the hash {hash}")


def check_token(text: str, spiffe_id: str, now: datetime, skew: timedelta) -> None:
    """The Workload API is trusted, so the signature is not checked; its answer may be old. Raises NotPreparedError or
    BadTokenError."""
    token = read_token(text)
    if (token.subject, token.audience) != (spiffe_id, AUDIENCE):
        raise NotPreparedError("the Workload API has sent a token for another identity or audience")
    seconds, life = now.timestamp(), token.expires - token.issued
    if token.expires <= seconds:
        raise NotPreparedError(f"its token has expired {seconds - token.expires:.0f} s ago")
    if max(token.issued, token.not_before) > seconds + skew.total_seconds():
        raise NotPreparedError("its token was issued in the future")
    if life > MAX_LIFE.total_seconds():
        raise NotPreparedError(
            f"its token is valid for {min(life, 10**9)} s, the maximum is {MAX_LIFE.total_seconds():g} s: "
            "set jwtSVIDTTL to 60 s in its registration entry"
        )
