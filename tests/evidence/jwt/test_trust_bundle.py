"""The trust domain's keys in a process: the last valid bundle, until it expires."""

import asyncio
from datetime import timedelta

import pytest
from structlog.testing import capture_logs

from tests.builders import NOW, SECOND
from tests.evidence.jwt.tokens import SigningKey, document
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import JwtBundle, parse_bundle
from webhook.evidence.jwt.trust_bundle import MemoryBundleVersions, TrustBundle

KEY, OTHER = SigningKey.make("key-1"), SigningKey.make("key-2")
HOUR = timedelta(hours=1)


class Scene:
    """A source and a clock that the test sets."""

    def __init__(self, *keys: SigningKey, sequence: int | None = 1) -> None:
        self.now = NOW
        self.document: bytes | None = document(*keys, sequence=sequence)
        self.asked = 0
        self.accepted_bundles: list[JwtBundle] = []
        self.told: list[str] = []
        self.bundle = TrustBundle(self, lambda: self.now, HOUR, self.told.append)

    async def fetch(self) -> JwtBundle:
        self.asked += 1
        await asyncio.sleep(0)
        if self.document is None:
            raise EvidenceUnavailableError("away")
        return parse_bundle(self.document)

    def accepted(self, bundle: JwtBundle) -> None:
        self.accepted_bundles.append(bundle)

    async def has(self, key_id: str) -> bool:
        return await self.bundle.key(key_id) is not None


async def test_keys_are_known_after_the_first_fetch() -> None:
    scene = Scene(KEY)
    await scene.bundle.refresh()
    assert [await scene.has("key-1"), await scene.has("key-2")] == [True, False]
    assert (scene.told, len(scene.accepted_bundles)) == (["renewed"], 1)


async def test_unknown_key_causes_one_fetch_for_all_callers() -> None:
    scene = Scene(KEY)
    await scene.bundle.refresh()
    scene.document = document(KEY, OTHER, sequence=2)
    scene.now += 5 * SECOND
    assert await asyncio.gather(*(scene.has("key-2") for _ in range(100))) == [True] * 100
    for _ in range(100):
        assert not await scene.has("key-9")
    assert scene.asked == 2
    scene.now += 5 * SECOND
    assert not await scene.has("key-9")
    assert scene.asked == 3


async def test_bundle_with_a_lower_sequence_is_rejected() -> None:
    scene = Scene(KEY, OTHER, sequence=7)
    await scene.bundle.refresh()
    scene.document = document(KEY, sequence=8)
    await scene.bundle.refresh()
    scene.document = document(KEY, OTHER, sequence=7)
    await scene.bundle.refresh()
    assert not await scene.has("key-2")
    assert scene.told == ["renewed", "renewed", "refused"]


class ResettableVersions(MemoryBundleVersions):
    """The version is in an object that a user may delete."""

    def forget(self) -> None:
        self._last = None


async def test_reset_version_is_accepted_without_a_restart() -> None:
    """A rebuilt SPIRE Server starts at sequence 1."""
    scene, versions = Scene(KEY, sequence=700), ResettableVersions()
    scene.bundle = TrustBundle(scene, lambda: scene.now, HOUR, scene.told.append, versions)
    await scene.bundle.refresh()
    scene.document = document(OTHER, sequence=1)
    await scene.bundle.refresh()
    versions.forget()
    await scene.bundle.refresh()
    assert [await scene.has("key-1"), await scene.has("key-2")] == [False, True]
    assert scene.told == ["renewed", "refused", "renewed"]


async def test_unavailable_source_leaves_the_last_bundle_until_it_expires() -> None:
    scene = Scene(KEY)
    await scene.bundle.refresh()
    scene.document = None
    scene.now += HOUR - SECOND
    await scene.bundle.refresh()
    assert await scene.has("key-1")
    scene.now += SECOND
    with pytest.raises(EvidenceUnavailableError):
        await scene.has("key-1")
    scene.document = document(KEY)
    scene.now += 5 * SECOND
    assert await scene.has("key-1")


async def test_rejected_bundle_confirms_nothing() -> None:
    scene = Scene(KEY, sequence=7)
    await scene.bundle.refresh()
    scene.document = document(KEY, sequence=6)
    scene.now += HOUR
    await scene.bundle.refresh()
    with pytest.raises(EvidenceUnavailableError):
        await scene.has("key-1")


async def test_lower_sequence_is_rejected_after_the_bundle_has_expired() -> None:
    scene = Scene(KEY, sequence=7)
    await scene.bundle.refresh()
    scene.now += 2 * HOUR
    scene.document = document(OTHER, sequence=6)
    with pytest.raises(EvidenceUnavailableError):
        await scene.has("key-2")


async def test_waiting_for_the_first_bundle_is_logged_at_intervals() -> None:
    scene = Scene(KEY)
    found, scene.document = scene.document, None
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 61:
            scene.document = found

    with capture_logs() as lines:
        await scene.bundle.first(sleep)
    assert (len(pauses), set(pauses)) == (61, {1.0})
    assert await scene.has("key-1")
    told = [line["event"] for line in lines]
    assert told.count("not ready: waiting for the first trust bundle") == 3
    await scene.bundle.first(sleep)
    assert len(pauses) == 61


async def test_keys_are_unavailable_before_the_first_bundle() -> None:
    scene = Scene(KEY)
    scene.document = None
    with pytest.raises(EvidenceUnavailableError):
        await scene.has("key-1")


@pytest.mark.parametrize(("hint", "pause"), [(10, 10), (1, 5), (300, 60), (0, 60), (-5, 60), (10**30, 60), (None, 60)])
async def test_refresh_hint_shortens_the_interval(hint: int | None, pause: int) -> None:
    scene = Scene(KEY)
    scene.document = document(KEY, hint=hint)
    assert scene.bundle.pause == 5 * SECOND
    await scene.bundle.refresh()
    assert scene.bundle.pause == pause * SECOND


async def test_bundle_is_fetched_repeatedly() -> None:
    scene = Scene(KEY)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await scene.bundle.run(sleep)
    assert (scene.asked, all(0 < one <= 10 for one in pauses[1:])) == (3, True)
