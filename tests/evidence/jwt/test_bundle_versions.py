"""Versions of the trust bundle: the same contract for one process and for replicas that share a store."""

import asyncio
from typing import Any

import pytest

from tests.evidence.jwt.tokens import SigningKey, document
from tests.fake_objects import FakeObjects
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.cluster_proofs import ClusterBundleVersions
from webhook.evidence.jwt.jwt_bundle import BadBundleError, JwtBundle, parse_bundle
from webhook.evidence.jwt.trust_bundle import BundleVersions, MemoryBundleVersions

KEY, OTHER = SigningKey.make("key-1"), SigningKey.make("key-2")
NAME = "example.org"


def bundle(sequence: int | None, *keys: SigningKey) -> JwtBundle:
    return parse_bundle(document(*(keys or (KEY,)), sequence=sequence))


@pytest.fixture
def objects() -> FakeObjects:
    return FakeObjects()


@pytest.fixture(params=["own", "cluster"])
def versions(request: pytest.FixtureRequest, objects: FakeObjects) -> BundleVersions:
    return MemoryBundleVersions() if request.param == "own" else ClusterBundleVersions(objects, NAME)


@pytest.mark.parametrize("later", [bundle(7), bundle(8), bundle(8, KEY, OTHER), bundle(700, OTHER)])
async def test_later_version_is_accepted(versions: BundleVersions, later: JwtBundle) -> None:
    await versions.advance(bundle(7))
    await versions.advance(later)


@pytest.mark.parametrize(
    "older",
    [bundle(6), bundle(0), bundle(7, KEY, OTHER), bundle(7, OTHER), bundle(None)],
    ids=["lower", "none", "one more key", "another key", "unnumbered"],
)
async def test_earlier_version_is_rejected(versions: BundleVersions, older: JwtBundle) -> None:
    await versions.advance(bundle(7))
    for _ in range(2):
        with pytest.raises(BadBundleError):
            await versions.advance(older)
    await versions.advance(bundle(7))


async def test_bundles_without_a_sequence_are_not_ordered(versions: BundleVersions) -> None:
    for one in (bundle(None), bundle(None, OTHER), bundle(1)):
        await versions.advance(one)


async def test_bundle_without_a_key_is_rejected(versions: BundleVersions) -> None:
    with pytest.raises(BadBundleError):
        await versions.advance(parse_bundle(document(sequence=9)))
    await versions.advance(bundle(8))


# In a cluster.


async def test_version_accepted_by_one_replica_binds_all_replicas(objects: FakeObjects) -> None:
    await ClusterBundleVersions(objects, NAME).advance(bundle(7, KEY, OTHER))
    await ClusterBundleVersions(objects, NAME).advance(bundle(8))
    with pytest.raises(BadBundleError, match="went back from sequence 8 to 7"):
        await ClusterBundleVersions(objects, NAME).advance(bundle(7, KEY, OTHER))


async def test_same_version_is_written_once(objects: FakeObjects) -> None:
    for _ in range(3):
        await ClusterBundleVersions(objects, NAME).advance(bundle(7))
    assert objects.done == [f"create {NAME}", f"status {NAME}"]


async def test_deleting_the_object_resets_the_version(objects: FakeObjects) -> None:
    versions = ClusterBundleVersions(objects, NAME)
    await versions.advance(bundle(700))
    objects.remove(NAME)
    await versions.advance(bundle(1, OTHER))
    with pytest.raises(BadBundleError):
        await ClusterBundleVersions(objects, NAME).advance(bundle(0, OTHER))


async def test_highest_of_concurrent_versions_is_stored(objects: FakeObjects) -> None:
    every = [ClusterBundleVersions(objects, NAME).advance(bundle(number)) for number in (3, 9, 1, 7, 5)]
    await asyncio.gather(*every, return_exceptions=True)
    with pytest.raises(BadBundleError):
        await ClusterBundleVersions(objects, NAME).advance(bundle(8))
    await ClusterBundleVersions(objects, NAME).advance(bundle(9))


async def test_version_write_conflict_is_retried(objects: FakeObjects) -> None:
    await ClusterBundleVersions(objects, NAME).advance(bundle(7))
    objects.overtaken = 2
    await ClusterBundleVersions(objects, NAME).advance(bundle(8))
    with pytest.raises(BadBundleError):
        await ClusterBundleVersions(objects, NAME).advance(bundle(7))


class ConflictingObjects(FakeObjects):
    """Between our read and our write, another replica writes a later version."""

    async def replace_status(self, raw: dict[str, Any]) -> dict[str, Any]:
        if raw["status"]["sequence"] == 8:
            await ClusterBundleVersions(self, NAME).advance(bundle(9))
        return await super().replace_status(raw)


async def test_version_write_conflict_does_not_revert_a_later_version() -> None:
    objects = ConflictingObjects()
    await ClusterBundleVersions(objects, NAME).advance(bundle(7))
    with pytest.raises(BadBundleError, match="went back from sequence 9 to 8"):
        await ClusterBundleVersions(objects, NAME).advance(bundle(8))


@pytest.mark.parametrize("trouble", ["away", "refused", "always overtaken"])
async def test_bundle_is_rejected_if_the_version_cannot_be_read_or_stored(objects: FakeObjects, trouble: str) -> None:
    objects.is_away = trouble == "away"
    objects.refused = {NAME} if trouble == "refused" else set()
    objects.overtaken = 99 if trouble == "always overtaken" else 0
    with pytest.raises(EvidenceUnavailableError, match="the version of the trust bundle cannot be read or stored"):
        await ClusterBundleVersions(objects, NAME).advance(bundle(7))


async def test_trust_domain_that_is_no_object_name_gets_a_hashed_one(objects: FakeObjects) -> None:
    for domain in ("my_domain", "other_domain", "a..b", "-a"):
        await ClusterBundleVersions(objects, domain).advance(bundle(7))
    assert {raw["spec"]["trustDomain"] for raw in objects.objects.values()} == {
        "my_domain",
        "other_domain",
        "a..b",
        "-a",
    }
    assert all(name.startswith("trust-domain-") for name in objects.objects)
