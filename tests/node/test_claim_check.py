"""Problems that may pass are waited for within the kubelet's call, without delaying other claims."""

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest
from attrs import define, field

from tests.builders import HASH, OTHER_HASH, Raw
from tests.evidence.jwt.tokens import SigningKey, evidence_id, token
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId, EvidenceIdParts
from webhook.core.proof_devices import DRIVER, device_name, hash_attribute
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_workload_api import JwtSvid, JwtWorkloadApi
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.node.claim_check import MAX_READS, PATIENCE, ClaimCheck
from webhook.node.dra_messages import ClaimName
from webhook.node.dra_plugin import DEADLINE
from webhook.node.node_identity import NodeIdentity, NotOneIdentityError
from webhook.runtime.clock import utc_now

KEY = SigningKey.make()
ATTRIBUTE = hash_attribute(HASH)

pytestmark = pytest.mark.simulated_time


def claim(
    hash: str = ATTRIBUTE,
    pool: str = "node-a",
    uid: str = "u",
    *,
    is_allocated: bool = True,
    hashes: list[str] | None = None,
) -> Raw:
    results = [{"request": "proof0", "driver": DRIVER, "pool": pool, "device": device_name("GPU-0", hash)}]
    parameters = {"hash": hash} if hashes is None else {"hashes": hashes}
    config = [{"source": "FromClaim", "opaque": {"driver": DRIVER, "parameters": parameters}}]
    allocation = {"devices": {"results": results, "config": config}}
    return {"metadata": {"name": "train", "uid": uid}, "status": {"allocation": allocation} if is_allocated else {}}


@define(eq=False)
class Node:
    """The API server and the Workload API, which a test makes fail until a moment."""

    claim: Raw | None = field(factory=claim)
    unallocated_for: float = 0
    api_problem: Exception | None = None
    spire_problem: Exception | None = None
    # Until then, in seconds from the start.
    lasts: float = 0
    # Of the later reads of claims whose name begins with `slow`.
    seconds: float = 0
    slow: set[str] = field(factory=set)
    hash: str = HASH
    token_age: float = 0
    started: float = field(factory=lambda: asyncio.get_running_loop().time())
    reads: int = 0

    @property
    def passed(self) -> float:
        return asyncio.get_running_loop().time() - self.started

    async def get(self, namespace: str, name: str) -> Raw | None:
        self.reads += 1
        if name.startswith("slow"):
            if name in self.slow:
                await asyncio.sleep(self.seconds)
            self.slow.add(name)
            raise ApiUnavailableError("slow")
        if self.api_problem is not None and self.passed < self.lasts:
            raise self.api_problem
        return claim(is_allocated=False) if self.passed < self.unallocated_for else self.claim

    @property
    def check(self) -> ClaimCheck:
        node = self

        class Identity(NodeIdentity):
            async def svid(self, audience: str) -> tuple[JwtSvid, EvidenceIdParts]:
                if node.spire_problem is not None and node.passed < node.lasts:
                    raise node.spire_problem
                name = evidence_id(hash=node.hash)
                parts = self.evidence_id.read(name)
                assert parts is not None
                issued = utc_now() - timedelta(seconds=node.token_age)
                return JwtSvid(name, token(KEY, audience, issued, sub=name)), parts

        identity = Identity("node-a", JwtWorkloadApi("unix:/none"), EvidenceId(DEFAULT_TEMPLATE, "example.org"))
        return ClaimCheck(identity, self, utc_now, timedelta(seconds=5))

    async def answer(self, check: ClaimCheck | None = None, name: str = "train") -> tuple[str, float]:
        """The error, and after how many seconds it came."""
        began = self.passed
        answers = await (check or self.check).prepare([ClaimName("ml", "u", name)])
        return answers["u"].error, self.passed - began


def failing(problem: Exception, lasts: float) -> Node:
    if isinstance(problem, EvidenceUnavailableError | NotOneIdentityError):
        return Node(lasts=lasts, spire_problem=problem)
    return Node(lasts=lasts, api_problem=problem)


PASSING = [
    ApiUnavailableError("the API server did not answer"),
    ApiRefusesError(403, "no relationship found between node and claim"),
    EvidenceUnavailableError("no answer in time"),
    NotOneIdentityError("expected exactly one identity"),
]


@pytest.mark.parametrize("problem", PASSING, ids=str)
async def test_problem_that_passes_is_waited_for(problem: Exception) -> None:
    error, seconds = await failing(problem, lasts=3).answer()
    assert error == ""
    assert 3 <= seconds < 8


@pytest.mark.parametrize("problem", PASSING, ids=str)
async def test_problem_that_stays_is_the_answer_before_the_deadline_of_the_call(problem: Exception) -> None:
    node = failing(problem, lasts=60)
    error, seconds = await node.answer()
    assert str(problem) in error
    assert PATIENCE.total_seconds() <= seconds < DEADLINE - 1
    assert node.reads < 12


async def test_allocation_that_is_not_seen_yet_is_waited_for() -> None:
    error, seconds = await Node(unallocated_for=1).answer()
    assert error == ""
    assert seconds < 3


@pytest.mark.parametrize("hashes", [["bb22", ATTRIBUTE], []], ids=["one of several", "any"])
async def test_claim_may_accept_several_hashes_or_any(hashes: list[str]) -> None:
    assert await Node(claim=claim(hashes=hashes)).answer() == ("", 0)


FINAL: dict[str, tuple[Callable[[], Node], str]] = {
    "another hash": (lambda: Node(hash=OTHER_HASH), "is proven for the hash"),
    "none of several hashes": (lambda: Node(claim=claim(hashes=["bb22", "cc33"])), "requires bb22 or cc33"),
    "a device of another hash": (lambda: Node(hash=OTHER_HASH, claim=claim(hashes=[])), "is not for the hash"),
    "hashes of another form": (lambda: Node(claim=claim(hashes=[1])), "does not say which hash"),  # type: ignore[list-item]
    "another node": (lambda: Node(claim=claim(pool="node-b")), "is of node node-b"),
    "another uid": (lambda: Node(claim=claim(uid="new")), "another one of the same name"),
    "no claim": (lambda: Node(claim=None), "does not exist"),
    "expired token": (lambda: Node(token_age=3600), "has expired"),
}


@pytest.mark.parametrize("name", FINAL)
async def test_final_refusal_is_answered_at_once(name: str) -> None:
    make, words = FINAL[name]
    node = make()
    error, seconds = await node.answer()
    assert words in error
    assert (node.reads, seconds) == (1, 0)


async def test_claims_that_wait_delay_no_other_claim() -> None:
    """Even if each of their later reads takes as long as it may."""
    node = Node(seconds=5)
    check = node.check
    waiting = [asyncio.ensure_future(node.answer(check, f"slow-{number}")) for number in range(4 * MAX_READS)]
    await asyncio.sleep(4)
    assert await node.answer(check) == ("", 0)
    for error, seconds in await asyncio.gather(*waiting):
        assert error == "slow"
        assert seconds < DEADLINE - 1
