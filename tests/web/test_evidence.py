"""Challenges and proofs of nodes through the HTTP routes, with a fake Workload API."""

import json
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from attrs import evolve
from structlog.testing import capture_logs

from tests import builders
from tests.builders import HASH, NOW, OTHER_HASH, raw_container, raw_pod
from tests.evidence.jwt.bad_tokens import BAD, Bad, World
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble, endpoint, http
from tests.evidence.jwt.test_bundle_endpoint import web_context
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, document, evidence_id, seconds, token
from tests.web.harness import INVENTORY, Harness
from webhook.core.device import DeviceUuid, Slot
from webhook.core.reservation import Orphan, Phase, Reservation, ReservationId
from webhook.evidence.jwt.jwt_svid import TokenFault
from webhook.evidence.jwt.node_reports import MAX_GIVEN, MAX_PODS, NodeReports, uid_digest

KEY, FOREIGN = SigningKey.make("key-1"), SigningKey.make("key-1")


class Site:
    """A server that challenges nodes, and its nodes."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.agent = JwtWorkloadApiDouble(str(directory / "agent.sock"), KEY)
        self.harness = Harness(
            directory,
            INVENTORY,
            None,
            evidence=("jwt-svid",),
            spire_trust_domain=TRUST_DOMAIN,
            spire_workload_api=f"unix:{self.agent.path}",
            **settings,
        )

    async def open(self) -> "Site":
        await self.agent.start()
        await self.harness.start()
        assert self.harness.parts.attestation is not None
        await self.harness.parts.attestation.load()
        return self

    async def close(self) -> None:
        await self.harness.close()
        await self.agent.stop()

    async def nonce(self, node: str = "node-a") -> str:
        reply = await self.harness.tls.get("/evidence/challenge", params={"node": node})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["nonce"])

    async def token(self, node: str = "node-a", **members: Any) -> str:
        members.setdefault("sub", evidence_id(node))
        return token(KEY, await self.nonce(node), self.harness.now, **members)

    async def post(self, text: str) -> httpx.Response:
        return await self.harness.tls.post("/evidence", json={"token": text})

    async def admits(self, *hashes: str, uid: str = builders.REVIEW_UID) -> bool:
        """Whether a pod that requires one of these hashes is admitted now. Nothing is reserved."""
        await self.harness.fleet_source.refresh()
        return await self.admits_at_once(*hashes, uid=uid)

    async def admits_at_once(self, *hashes: str, uid: str = builders.REVIEW_UID) -> bool:
        """The same without a poll before it."""
        raw = raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hash": ",".join(hashes)})
        return bool((await self.harness.mutate(raw, uid, dry_run=True))["allowed"])

    def counted(self, outcome: str) -> float:
        name = "gpuwarden_evidence_proofs_total"
        return self.harness.parts.metrics.registry.get_sample_value(name, {"outcome": outcome}) or 0


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    opened = await Site(tmp_path).open()
    yield opened
    await opened.close()


async def test_node_is_proven_until_its_evidence_expires(site: Site) -> None:
    assert not await site.admits(HASH)
    reply = await site.post(await site.token())
    assert (reply.status_code, reply.json()) == (
        200,
        {"node": "node-a", "hash": HASH, "since": "2026-03-02T12:00:00Z", "until": "2026-03-02T12:40:00Z"},
    )
    assert await site.admits(HASH)
    assert not await site.admits(OTHER_HASH)
    shown = (await site.harness.plain.get("/metrics")).text
    assert 'gpuwarden_evidence_age_seconds{node_class="",state="fresh"} 5.0' in shown
    site.harness.now += timedelta(minutes=40) - timedelta(seconds=1)
    assert await site.admits(HASH)
    site.harness.now += timedelta(seconds=1)
    assert not await site.admits(HASH)
    assert site.counted("accepted") == 1


async def test_accepted_proof_applies_to_the_next_review(site: Site) -> None:
    assert (await site.post(await site.token())).status_code == 200
    assert await site.admits_at_once(HASH)
    assert await site.admits(HASH), "the next poll removes nothing"


async def test_challenge_has_a_nonce_and_an_expiry(site: Site) -> None:
    reply = await site.harness.tls.get("/evidence/challenge?node=node-a")
    assert set(reply.json()) == {"nonce", "expires"}
    assert (reply.json()["expires"], reply.headers["cache-control"]) == ("2026-03-02T12:01:00Z", "no-store")


@pytest.mark.parametrize("query", ["", "?node=", "?node=Node-A", "?node=a%0Ab", "?node=" + "a" * 254, "?name=node-a"])
async def test_challenge_needs_a_valid_node_name(site: Site, query: str) -> None:
    assert (await site.harness.tls.get(f"/evidence/challenge{query}")).status_code == 400


@pytest.mark.parametrize(("bad", "fault"), [pytest.param(bad, fault, id=name) for name, bad, fault in BAD])
async def test_invalid_token_does_not_prove_a_node(site: Site, bad: Bad, fault: TokenFault) -> None:
    nonces = {node: await site.nonce(node) for node in ("node-a", "node-b")}
    world = World(KEY, FOREIGN, lambda node: nonces.get(node, nonces["node-b"]), NOW)
    text = bad(world)
    reply = await site.post(text)
    expected = {TokenFault.FORM: 400, TokenFault.SIZE: 413}.get(fault, 403)
    assert (reply.status_code, len(reply.content) < 300) == (expected, True), reply.text
    assert text[:40] not in reply.text or not text
    assert not await site.admits(HASH)
    assert not await site.admits(OTHER_HASH)


@pytest.mark.defect("extender-2")
async def test_replayed_token_is_refused_and_counted(site: Site) -> None:
    text = await site.token()
    assert (await site.post(text)).status_code == 200
    for _ in range(3):
        assert (await site.post(text)).status_code == 409
    assert (site.counted("accepted"), site.counted("replayed")) == (1, 3)


async def test_second_token_for_a_challenge_is_refused_as_a_replay(site: Site) -> None:
    nonce = await site.nonce()
    assert (await site.post(token(KEY, nonce, site.harness.now))).status_code == 200
    site.harness.now += timedelta(seconds=5)
    assert (await site.post(token(KEY, nonce, site.harness.now))).status_code == 409


async def test_challenges_are_accepted_once_and_in_order(site: Site) -> None:
    nonces = []
    for _ in range(3):
        nonces.append(await site.nonce())
        site.harness.now += timedelta(milliseconds=1)
    answers = []
    for number in (0, 1, 0, 1, 2, 1, 2):
        site.harness.now += timedelta(seconds=1)
        answers.append((await site.post(token(KEY, nonces[number], site.harness.now))).status_code)
    assert answers == [200, 200, 409, 409, 200, 409, 409]
    assert await site.admits(HASH)


async def test_token_accepted_before_a_restart_is_refused(site: Site, tmp_path: Path) -> None:
    """Evidence and challenges end with the process, even if the key of the nonces stays the same."""
    text, key = await site.token(), tmp_path / "nonce.key"
    assert (await site.post(text)).status_code == 200
    key.write_bytes(b"k" * 32)
    (tmp_path / "again").mkdir()
    again = await Site(tmp_path / "again", nonce_key=key).open()
    try:
        assert (await again.post(text)).status_code == 403
        assert again.counted("nonce") == 1
        assert not await again.admits(HASH)
    finally:
        await again.close()


async def test_later_token_renews_the_evidence(site: Site) -> None:
    await site.post(await site.token())
    site.harness.now += timedelta(minutes=20)
    reply = await site.post(await site.token())
    assert reply.json()["until"] == "2026-03-02T13:00:00Z"
    site.harness.now += timedelta(minutes=30)
    assert await site.admits(HASH)


async def test_signer_clock_ahead_leaves_no_gap_between_two_proofs(site: Site) -> None:
    await site.post(await site.token())
    site.harness.now += timedelta(minutes=20)
    ahead = seconds(site.harness.now) + 5
    reply = await site.post(await site.token(iat=ahead, exp=ahead + 60))
    assert (reply.status_code, reply.json()["since"]) == (200, "2026-03-02T12:20:05Z")
    assert await site.admits(HASH)


@pytest.mark.parametrize("hash", ["SHA256:AA11", "sha256:AA11", "sha256:aa11.", "aa11"])
async def test_hash_with_another_spelling_does_not_match(site: Site, hash: str) -> None:
    assert (await site.post(await site.token(sub=evidence_id(hash=hash)))).status_code == 200
    assert not await site.admits(HASH)


@pytest.mark.parametrize("hash", [" sha256:aa11x", "sha256:aa11\t", "sha256:aa 11", "sha256:aa11\n"])
async def test_hash_with_whitespace_is_refused(site: Site, hash: str) -> None:
    assert (await site.post(await site.token(sub=evidence_id(hash=hash)))).status_code == 403


async def test_unknown_node_is_refused(site: Site) -> None:
    assert (await site.post(await site.token("node-x"))).status_code == 403
    assert site.counted("node") == 1


async def test_recreated_node_needs_a_new_proof(site: Site) -> None:
    in_hand = await site.token()
    site.harness.now += timedelta(seconds=1)
    assert (await site.post(await site.token())).status_code == 200
    assert await site.admits(HASH)
    inventory = json.loads(site.harness.file.read_text())
    for nodes in (inventory["nodes"][1:], inventory["nodes"]):
        site.harness.file.write_text(json.dumps({"nodes": nodes}, indent=len(nodes)))
        site.harness.now += timedelta(seconds=1)
        await site.harness.fleet_source.refresh()
    assert not await site.admits(HASH)
    assert (await site.post(in_hand)).status_code == 403
    site.harness.now += timedelta(seconds=6)
    assert (await site.post(await site.token())).status_code == 200
    assert await site.admits(HASH)


async def test_token_of_a_revoked_key_is_refused(site: Site) -> None:
    other = SigningKey.make("key-2")
    site.agent.bundles = {f"spiffe://{TRUST_DOMAIN}": document(other)}
    assert site.harness.parts.attestation is not None
    await site.harness.parts.attestation.load()
    assert (await site.post(await site.token())).status_code == 403
    text = token(other, await site.nonce(), site.harness.now)
    assert (await site.post(text)).status_code == 200


@pytest.mark.parametrize("rolled_back", [7, 8, None], ids=["older", "same-number", "no-number"])
async def test_older_bundle_does_not_restore_a_revoked_key(tmp_path: Path, rolled_back: int | None) -> None:
    """A real endpoint serves an older bundle. A token with the revoked key triggers a fetch, which is refused."""
    ca, lost = trustme.CA(), SigningKey.make("key-2")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with endpoint(web_context(ca), document(KEY, lost, sequence=7)) as shown:
        trusted: dict[str, Any] = {"bundle_endpoint": shown.url, "bundle_endpoint_ca": tmp_path / "ca.pem"}
        site = await Site(tmp_path, **trusted).open()

        async def posted(key: SigningKey) -> int:
            site.harness.now += timedelta(seconds=6)
            return (await site.post(token(key, await site.nonce(), site.harness.now))).status_code

        assert await posted(lost) == 200
        shown.reply = http(document(KEY, sequence=8))
        assert site.harness.parts.attestation is not None
        await site.harness.parts.attestation.load()
        assert await posted(lost) == 403
        shown.reply = http(document(KEY, lost, sequence=rolled_back))
        for _ in range(3):
            assert await posted(lost) == 403
        assert await posted(KEY) == 200
        name = "gpuwarden_trust_bundle_looks_total"
        looks = site.harness.parts.metrics.registry.get_sample_value(name, {"outcome": "refused"})
        assert looks == 3
        await site.close()


async def test_unknown_key_is_looked_up_in_a_new_bundle(site: Site) -> None:
    other = SigningKey.make("key-2")
    site.agent.bundles = {f"spiffe://{TRUST_DOMAIN}": document(KEY, other)}
    site.harness.now += timedelta(seconds=5)
    assert (await site.post(token(other, await site.nonce(), site.harness.now))).status_code == 200


async def test_evidence_stays_valid_until_it_expires_while_the_provider_is_unavailable(site: Site) -> None:
    await site.post(await site.token())
    await site.agent.stop()
    site.harness.now += timedelta(minutes=35)
    text = await site.token("node-b", sub=evidence_id("node-b", OTHER_HASH))
    assert (await site.post(text)).status_code == 200  # the keys are valid for an hour
    site.harness.now += timedelta(minutes=5)
    assert not await site.admits(HASH)
    site.harness.now += timedelta(minutes=20)
    reply = await site.post(await site.token())
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert site.counted("unavailable") == 1


async def test_many_tokens_are_logged_once_while_the_keys_are_unavailable(site: Site) -> None:
    """Any caller can get a challenge and sign it with any key."""
    await site.agent.stop()
    site.harness.now += timedelta(hours=1)
    forged = token(FOREIGN, await site.nonce(), site.harness.now)
    with capture_logs() as lines:
        for _ in range(50):
            assert (await site.post(forged)).status_code == 503
    assert site.counted("unavailable") == 50
    loud = [line["event"] for line in lines if line["log_level"] != "debug"]
    assert loud == ["trust bundle unavailable, the last one stays"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{}", 400),
        (b"[]", 400),
        (b'{"token": 1}', 400),
        (b'{"token": "\xff"}', 400),
        (b"[" * 9000, 400),
        (b'{"token": ""}', 400),
        (b'{"token": "' + b"A" * 2**20 + b'"}', 413),
        (b"x" * (3 * 2**20), 413),
    ],
    ids=["empty", "no token", "list", "number", "no UTF-8", "deep", "blank", "one megabyte", "three megabytes"],
)
async def test_malformed_body_is_refused(site: Site, content: bytes, status: int) -> None:
    assert (await site.harness.tls.post("/evidence", content=content)).status_code == status


async def test_forged_nonce_is_refused_before_the_signature_is_checked(site: Site) -> None:
    """Without a challenge made by this server no signature is checked and no bundle is fetched."""
    forged = token(FOREIGN, "gpuwarden/nonce/" + "A" * 76, site.harness.now)
    for _ in range(200):
        assert (await site.post(forged)).status_code == 403
    assert (site.counted("nonce"), site.counted("signature")) == (200, 0)


async def test_routes_are_absent_without_a_challenging_provider(tmp_path: Path) -> None:
    harness = await Harness(tmp_path, INVENTORY, None).start()
    assert (await harness.tls.get("/evidence/challenge?node=node-a")).status_code == 404
    assert (await harness.tls.post("/evidence", json={})).status_code == 404
    await harness.close()


async def test_evidence_routes_answer_503_while_the_server_is_not_serving(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert (await site.harness.tls.get("/evidence/challenge?node=node-a")).status_code == 503
    assert (await site.harness.tls.post("/evidence", json={"token": ""})).status_code == 503
    await site.harness.close()


# Orphans.


class FakeOrphans:
    """A ledger with one orphan on node-a."""

    def __init__(self, at: datetime) -> None:
        self.orphan = Orphan(at, timedelta(hours=1))
        self.marked: list[tuple[str, datetime]] = []
        self.given: dict[str, tuple[str, ...]] = {}

    def orphans_on(self, node: str) -> list[Reservation]:
        if node != "node-a":
            return []
        slots = (Slot(DeviceUuid("GPU-1"), 0),)
        held = Reservation(ReservationId("r1"), "ml", "d", node, slots, NOW, None, Phase.FINALIZED, "old", "uid-1")
        return [evolve(held, orphan=self.orphan)]

    async def mark_unused(self, one: Reservation, asked_at: datetime) -> bool:
        self.marked.append((one.id, asked_at))
        return True

    def of_pod(self, uid: str) -> Reservation | None:
        return next((one for one in self.orphans_on("node-a") if one.uid == uid), None)

    async def note_given(self, one: Reservation, given: tuple[DeviceUuid, ...]) -> bool:
        self.given[one.id] = given
        return True


@pytest.fixture
def orphans(site: Site) -> FakeOrphans:
    found = FakeOrphans(site.harness.now - timedelta(minutes=1))
    attestation = site.harness.parts.attestation
    assert attestation is not None
    object.__setattr__(attestation, "reports", NodeReports(found, timedelta(seconds=5)))
    return found


async def test_challenge_has_digests_of_the_orphans_on_its_node_only(site: Site, orphans: FakeOrphans) -> None:
    reply = await site.harness.tls.get("/evidence/challenge?node=node-a")
    assert reply.json()["orphans"] == [uid_digest("uid-1")]
    assert "uid-1" not in reply.text
    assert "orphans" not in (await site.harness.tls.get("/evidence/challenge?node=node-b")).json()


async def test_end_report_of_a_proven_node_has_the_time_of_its_challenge(site: Site, orphans: FakeOrphans) -> None:
    asked, text = site.harness.now, await site.token()
    site.harness.now += timedelta(seconds=7)
    reply = await site.harness.tls.post("/evidence", json={"token": text, "ended": ["uid-0", "uid-1"]})
    assert reply.status_code == 200, reply.text
    assert orphans.marked == [("r1", asked)]


async def test_node_cannot_report_orphans_of_another_node(site: Site, orphans: FakeOrphans) -> None:
    text = await site.token("node-b", sub=evidence_id("node-b", OTHER_HASH))
    assert (await site.harness.tls.post("/evidence", json={"token": text, "ended": ["uid-1"]})).status_code == 200
    assert orphans.marked == []


@pytest.mark.parametrize(
    ("node", "given", "noted"),
    [
        ("node-a", {"uid-1": ["GPU-2"], "uid-2": ["GPU-3"]}, {"r1": ("GPU-2",)}),
        ("node-a", {"uid-1": ["GPU-2", "GPU-1", "all", "GPU-2"]}, {"r1": ("GPU-1", "GPU-2")}),
        ("node-a", {"uid-1": ["GPU-1"]}, {}),
        ("node-b", {"uid-1": ["GPU-2"]}, {}),
    ],
    ids=["its own pod", "no UUID", "the reserved GPU", "a pod of another node"],
)
async def test_node_reports_the_gpus_of_its_own_pods_only(
    site: Site, orphans: FakeOrphans, node: str, given: dict[str, list[str]], noted: dict[str, tuple[str, ...]]
) -> None:
    text = await site.token(node, sub=evidence_id(node, HASH if node == "node-a" else OTHER_HASH))
    reply = await site.harness.tls.post("/evidence", json={"token": text, "given": given})
    assert (reply.status_code, orphans.given) == (200, noted)


@pytest.mark.parametrize(
    "given",
    [
        ["uid-1"],
        {"uid-1": "GPU-2"},
        {"uid-1": [2]},
        {"uid-1": ["G" * 128]},
        {"u" * 65: ["GPU-2"]},
        {"uid-1": ["GPU-2"] * (MAX_GIVEN + 1)},
        {f"uid-{number}": ["GPU-2"] for number in range(MAX_GIVEN + 1)},
    ],
)
async def test_malformed_report_of_gpus_is_refused(site: Site, orphans: FakeOrphans, given: Any) -> None:
    reply = await site.harness.tls.post("/evidence", json={"token": await site.token(), "given": given})
    assert (reply.status_code, orphans.given) == (400, {})


async def test_end_report_with_a_refused_token_is_ignored(site: Site, orphans: FakeOrphans) -> None:
    used = await site.token()
    assert (await site.post(used)).status_code == 200
    foreign = token(FOREIGN, await site.nonce(), site.harness.now, sub=evidence_id("node-a"))
    for text in (used, foreign, "a.b.c"):
        reply = await site.harness.tls.post("/evidence", json={"token": text, "ended": ["uid-1"]})
        assert reply.status_code in (400, 403, 409)
    assert orphans.marked == []


@pytest.mark.parametrize("ended", ["uid-1", [1], [None], ["u" * 65], ["uid-1"] * (MAX_PODS + 1)])
async def test_malformed_list_of_uids_is_refused(site: Site, orphans: FakeOrphans, ended: Any) -> None:
    reply = await site.harness.tls.post("/evidence", json={"token": await site.token(), "ended": ended})
    assert (reply.status_code, orphans.marked) == (400, [])
