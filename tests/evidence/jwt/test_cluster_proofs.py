"""Accepted proofs: the same contract for one process and for replicas that share a store."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

import pytest
from attrs import evolve

from tests.builders import HASH, NOW, OTHER_HASH, SECOND
from tests.fake_objects import FakeObjects
from webhook.core.evidence import Evidence
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.cluster_proofs import ClusterProofs
from webhook.evidence.jwt.proofs import MemoryProofs, ProofStore, ReplayedProofError, UnknownNodeError
from webhook.evidence.node_evidence import entry_in
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError

SKEW = timedelta(seconds=5)
LONG_AGO = NOW - timedelta(days=1)


def proof(
    at: float = 0, nonce: str = "n0", node: str = "node-a", hash: str = HASH, challenged: float | None = None
) -> Evidence:
    """A proof for a challenge that was issued a moment before it, or at a given time."""
    since = NOW + timedelta(seconds=at)
    asked = since if challenged is None else NOW + timedelta(seconds=challenged)
    return Evidence(node, hash, "jwt-svid", since, since + timedelta(minutes=40), nonce_digest=nonce, challenged=asked)


class Nodes:
    """Nodes by creation time."""

    def __init__(self) -> None:
        self.born_at: dict[str, datetime] = {"node-a": LONG_AGO, "node-b": LONG_AGO}
        self.is_away = False

    async def created_at(self, name: str) -> datetime | None:
        if self.is_away:
            raise StoreUnavailableError("away")
        return self.born_at.get(name)


class Setup:
    """One cluster, and as many proof stores for it as a test wants."""

    def __init__(self) -> None:
        self.now = NOW
        self.objects, self.nodes = FakeObjects(), Nodes()

    def proofs(self) -> ProofStore:
        raise NotImplementedError

    async def stored(self, name: str = "node-a") -> Evidence | None:
        raise NotImplementedError


class InMemory(Setup):
    def __init__(self) -> None:
        super().__init__()
        self._book = MemoryProofs(lambda: self.nodes.born_at.keys(), lambda: self.now, SKEW)

    def proofs(self) -> MemoryProofs:
        return self._book

    async def stored(self, name: str = "node-a") -> Evidence | None:
        """The accepted proof; the reported one begins one skew earlier."""
        told = (await self._book.poll()).get(name)
        return told if told is None or told.since is None else evolve(told, since=told.since + SKEW)


class InCluster(Setup):
    def proofs(self) -> ClusterProofs:
        return ClusterProofs(self.objects, self.nodes, SKEW)

    async def stored(self, name: str = "node-a") -> Evidence | None:
        raw = await self.objects.get(name)
        return None if raw is None else entry_in(raw, "jwt-svid")


@pytest.fixture(params=[InMemory, InCluster])
def setup(request: pytest.FixtureRequest) -> Setup:
    made: Setup = request.param()
    return made


@pytest.fixture
def cluster() -> InCluster:
    return InCluster()


async def refused(attempt: Awaitable[None]) -> bool:
    try:
        await attempt
    except ReplayedProofError:
        return True
    return False


async def test_accepted_proof_is_stored(setup: Setup) -> None:
    await setup.proofs().accept(proof())
    assert await setup.stored() == proof()


async def test_later_proof_replaces_an_earlier_one(setup: Setup) -> None:
    await setup.proofs().accept(proof())
    await setup.proofs().accept(proof(1, "n1", hash=OTHER_HASH))
    assert await setup.stored() == proof(1, "n1", hash=OTHER_HASH)


@pytest.mark.parametrize(
    "again",
    [
        proof(),
        proof(0, "n1"),
        proof(-1, "n1"),
        proof(1, "n0"),
        proof(0, "n1", hash=OTHER_HASH),
        proof(1, "n1", challenged=0),
        proof(1, "n1", challenged=-1),
        evolve(proof(1, "n1"), challenged=None),
    ],
    ids=[
        "itself",
        "as late",
        "earlier",
        "same challenge",
        "other hash",
        "a challenge of the same moment",
        "an older challenge",
        "nobody knows when it was challenged",
    ],
)
async def test_proof_is_accepted_once_across_replicas(setup: Setup, again: Evidence) -> None:
    await setup.proofs().accept(proof())
    with pytest.raises(ReplayedProofError):
        await setup.proofs().accept(again)
    assert await setup.stored() == proof()


@pytest.mark.defect("extender-2")
async def test_challenge_is_answered_once_although_its_token_is_signed_again(setup: Setup) -> None:
    await setup.proofs().accept(proof(0, "n0", challenged=0))
    await setup.proofs().accept(proof(1, "n1", challenged=0.5))
    for at, nonce, challenged in ((2, "n0", 0), (3, "n1", 0.5), (4, "n0", 0)):
        with pytest.raises(ReplayedProofError):
            await setup.proofs().accept(proof(at, nonce, challenged=challenged))
    await setup.proofs().accept(proof(5, "n2", challenged=0.501))


async def test_later_proof_is_accepted_after_one_without_challenge_time(setup: Setup) -> None:
    """Proofs of an older version."""
    await setup.proofs().accept(evolve(proof(), challenged=None))
    for again in (proof(1, "n0", challenged=-1), proof(0, "n1")):
        with pytest.raises(ReplayedProofError):
            await setup.proofs().accept(again)
    await setup.proofs().accept(proof(1, "n1", challenged=-1))
    assert await setup.stored() == proof(1, "n1", challenged=-1)


async def test_each_node_has_its_own_proof(setup: Setup) -> None:
    await setup.proofs().accept(proof(5))
    await setup.proofs().accept(proof(0, node="node-b"))
    assert [await setup.stored("node-a"), await setup.stored("node-b")] == [proof(5), proof(0, node="node-b")]


async def test_one_of_concurrent_identical_proofs_is_accepted(setup: Setup) -> None:
    await setup.proofs().accept(proof(-1, "before"))
    answers = await asyncio.gather(*(refused(setup.proofs().accept(proof())) for _ in range(5)))
    assert sorted(answers) == [False, True, True, True, True]


async def test_proof_of_a_missing_node_is_rejected(setup: Setup) -> None:
    with pytest.raises(UnknownNodeError):
        await setup.proofs().accept(proof(node="node-x"))
    assert await setup.stored("node-x") is None


async def recreate_node(setup: Setup) -> None:
    """The node is deleted and another one with its name is created, and both are observed."""
    setup.nodes.born_at.pop("node-a")
    await setup.stored()
    setup.now = NOW + 10 * SECOND
    setup.nodes.born_at["node-a"] = setup.now
    await setup.stored()


@pytest.mark.parametrize("at", [0, 9, 10, 15], ids=["before", "just before", "at that moment", "within the skew"])
async def test_proof_of_an_earlier_node_with_that_name_is_rejected(setup: Setup, at: float) -> None:
    await setup.stored()
    await recreate_node(setup)
    with pytest.raises(UnknownNodeError, match="before the Node was created"):
        await setup.proofs().accept(proof(at))
    await setup.proofs().accept(proof(16, "n1"))
    assert await setup.stored() == proof(16, "n1")


async def test_proof_in_memory_ends_with_its_node_and_cannot_be_replayed() -> None:
    setup = InMemory()
    await setup.proofs().accept(proof())
    await recreate_node(setup)
    assert await setup.stored() is None
    with pytest.raises(UnknownNodeError):
        await setup.proofs().accept(proof())


async def test_entries_of_other_sources_stay(cluster: InCluster) -> None:
    entry = {"hash": HASH, "banned": False, "conflict": False}
    cluster.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry}}})
    await cluster.proofs().accept(proof())
    assert set(cluster.objects.objects["node-a"]["status"]["sources"]) == {"static", "jwt-svid"}


async def test_write_conflict_with_another_source_is_retried(cluster: InCluster) -> None:
    cluster.objects.put({"metadata": {"name": "node-a"}})
    cluster.objects.overtaken = 2
    await cluster.proofs().accept(proof())
    assert await cluster.stored() == proof()


class ConflictingObjects(FakeObjects):
    """Between our read and our write, another replica writes the same proof."""

    def __init__(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.meanwhile: Callable[[], Awaitable[None]] | None = meanwhile

    async def replace_status(self, raw: dict[str, object]) -> dict[str, object]:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().replace_status(raw)


async def test_write_conflict_with_the_same_proof_is_a_replay() -> None:
    nodes = Nodes()
    objects = ConflictingObjects(lambda: ClusterProofs(objects, nodes, SKEW).accept(proof()))
    with pytest.raises(ReplayedProofError):
        await ClusterProofs(objects, nodes, SKEW).accept(proof())
    assert objects.done == ["create node-a", "status node-a"]


@pytest.mark.parametrize("fault", ["objects", "nodes", "refused", "overtaken for ever"])
async def test_proof_that_cannot_be_stored_is_not_accepted(cluster: InCluster, fault: str) -> None:
    cluster.objects.put({"metadata": {"name": "node-a"}})
    cluster.objects.is_away = fault == "objects"
    cluster.nodes.is_away = fault == "nodes"
    cluster.objects.refused = {"node-a"} if fault == "refused" else set()
    cluster.objects.overtaken = 99 if fault == "overtaken for ever" else 0
    with pytest.raises(EvidenceUnavailableError) as caught:
        await cluster.proofs().accept(proof())
    assert isinstance(caught.value.__cause__, (StoreUnavailableError, RefusedError, StaleError))


async def test_unreadable_entry_is_replaced_by_a_proof(cluster: InCluster) -> None:
    await cluster.proofs().accept(proof())
    for entry in ({"banned": True, "conflict": False}, {"hash": 1}):
        cluster.objects.status("node-a", sources={"jwt-svid": entry})
        await cluster.proofs().accept(proof())
        assert await cluster.stored() == proof()
