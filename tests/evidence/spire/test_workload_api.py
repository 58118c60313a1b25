"""This process's SVID, from a Workload API on a real socket that answers with py-spiffe's messages."""

import socket
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.builders import SECOND
from tests.evidence.certificates import HOUR, Authority
from tests.evidence.doubles import TRUST_DOMAIN, VERIFIER, WorkloadApiDouble, until
from webhook.evidence.protobuf import MalformedMessageError, message_field, text_field
from webhook.evidence.spire.workload_api import NoIdentityError, OwnIdentity
from webhook.evidence.spire.x509_svid import X509Svid, each_der
from webhook.runtime.clock import utc_now

CA = Authority()
# For messages that are only parsed: a test that uses an identity issues its own.
ISSUED = CA.issue(VERIFIER)


class Scene:
    """A Workload API and its client, with a clock that the test may set."""

    def __init__(self, directory: Path) -> None:
        self.first = CA.issue(VERIFIER)  # valid for one hour
        self.api = WorkloadApiDouble(str(directory / "agent.sock"), [self.first], [CA.root])
        self.ahead = timedelta(0)
        self.own_id: str | None = None
        self._identities: list[OwnIdentity] = []

    def identity(self, trust_domain: str = TRUST_DOMAIN) -> OwnIdentity:
        made = OwnIdentity(
            self.api.path,
            trust_domain,
            lambda: utc_now() + self.ahead,
            own_id=self.own_id,
            retry=timedelta(milliseconds=20),
        )
        self._identities.append(made)
        return made

    async def close(self) -> None:
        for one in self._identities:
            await one.close()
        await self.api.stop()


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    await made.api.start()
    yield made
    await made.close()


async def test_svid_has_its_key_and_the_roots_of_its_trust_domain(scene: Scene) -> None:
    svid = await scene.identity().current()
    assert (svid.spiffe_id, svid.trust_domain, svid.roots) == (VERIFIER, TRUST_DOMAIN, CA.root)
    assert svid.pem.decode() == scene.first.pem
    assert "PRIVATE" not in repr(svid)


async def test_rotated_svid_arrives_without_a_request(scene: Scene) -> None:
    identity = scene.identity()
    before = await identity.current()
    other = Authority()
    scene.api.rotate(CA.issue(VERIFIER), roots=[CA.root, other.root])

    async def has_arrived() -> bool:
        return (await identity.current()).pem != before.pem

    await until(has_arrived)
    assert list(each_der((await identity.current()).roots)) == [CA.root, other.root]
    assert scene.api.asked == 1


async def test_svid_is_selected_by_its_id(scene: Scene) -> None:
    chosen = CA.issue(f"spiffe://{TRUST_DOMAIN}/chosen")
    scene.api.identities = [scene.first, chosen]
    assert (await scene.identity().current()).spiffe_id == VERIFIER
    scene.own_id = chosen.spiffe_id
    assert (await scene.identity().current()).spiffe_id == chosen.spiffe_id


async def test_missing_svid_is_not_replaced_by_another(scene: Scene) -> None:
    scene.own_id = f"spiffe://{TRUST_DOMAIN}/another"
    with pytest.raises(NoIdentityError, match=f"no SVID spiffe://{TRUST_DOMAIN}/another for us"):
        await scene.identity().current()


async def test_svid_of_another_trust_domain_is_rejected(scene: Scene) -> None:
    with pytest.raises(NoIdentityError, match=r"is not of the trust domain other\.org"):
        await scene.identity("other.org").current()


async def test_last_svid_stays_in_use_while_the_workload_api_is_unavailable(scene: Scene) -> None:
    identity = scene.identity()
    before = await identity.current()
    await scene.api.stop()
    scene.ahead = HOUR - 60 * SECOND
    assert await identity.current() is before


async def test_expired_svid_is_not_used(scene: Scene) -> None:
    identity = scene.identity()
    await identity.current()
    await scene.api.stop()
    scene.ahead = HOUR + SECOND
    with pytest.raises(NoIdentityError, match="our own SVID has expired"):
        await identity.current()


async def test_connection_is_reopened_after_the_svid_has_expired(scene: Scene) -> None:
    identity = scene.identity()
    await identity.current()
    scene.ahead = HOUR + SECOND
    scene.api.identities = [CA.issue(VERIFIER, not_after=utc_now() + 2 * HOUR)]  # without an update on the stream

    async def has_arrived() -> bool:
        try:
            return (await identity.current()).pem != scene.first.pem.encode()
        except NoIdentityError:
            return False

    await until(has_arrived)


async def test_workload_api_is_used_again_after_an_outage(scene: Scene) -> None:
    identity = scene.identity()
    before = await identity.current()
    await scene.api.stop()
    Path(scene.api.path).unlink(missing_ok=True)
    scene.api.identities = [CA.issue(VERIFIER)]
    await scene.api.start()

    async def has_arrived() -> bool:
        return (await identity.current()).pem != before.pem

    await until(has_arrived)


async def test_refusal_of_the_workload_api_is_reported(scene: Scene) -> None:
    scene.api.identities = []
    with pytest.raises(NoIdentityError, match="PERMISSION_DENIED: no identity issued"):
        await scene.identity().current()


async def test_missing_workload_api_is_reported(tmp_path: Path) -> None:
    identity = OwnIdentity(str(tmp_path / "nobody"), TRUST_DOMAIN, utc_now)
    with pytest.raises(NoIdentityError, match="the Workload API: "):
        await identity.current()
    await identity.close()


async def test_silent_workload_api_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        identity = OwnIdentity(path, TRUST_DOMAIN, utc_now, first_answer=timedelta(milliseconds=50))
        with pytest.raises(NoIdentityError, match="no answer in time"):
            await identity.current()
        await identity.close()


def entry(spiffe_id: str, chain: bytes, key: bytes, roots: bytes) -> bytes:
    return text_field(1, spiffe_id) + message_field(2, chain) + message_field(3, key) + message_field(4, roots)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        pytest.param(b"", "without certificate, key or roots", id="nothing"),
        pytest.param(entry(VERIFIER, ISSUED.chain, b"", CA.root), "without certificate, key or roots", id="no-key"),
        pytest.param(
            entry(VERIFIER, ISSUED.chain, ISSUED.key, b""), "without certificate, key or roots", id="no-roots"
        ),
        pytest.param(
            entry("spiffe://example.org/x", ISSUED.chain, ISSUED.key, CA.root),
            "is for another identity",
            id="another-id",
        ),
        pytest.param(entry(VERIFIER, ISSUED.chain[:-1], ISSUED.key, CA.root), "truncated", id="cut-off"),
        pytest.param(entry(VERIFIER, ISSUED.chain + b"\x30", ISSUED.key, CA.root), "truncated", id="rubbish"),
        pytest.param(entry(VERIFIER, b"\x30\x03abc", ISSUED.key, CA.root), "not a certificate", id="no-certificate"),
        pytest.param(entry(VERIFIER, b"\x31" + ISSUED.chain, ISSUED.key, CA.root), "truncated", id="no-sequence"),
    ],
)
def test_malformed_svid_is_rejected(raw: bytes, problem: str) -> None:
    with pytest.raises(MalformedMessageError, match=problem):
        X509Svid.parse(raw)


def test_concatenated_certificates_are_split_by_their_lengths() -> None:
    parts = [CA.root, ISSUED.chain, b"\x30\x01a", b"\x30\x80"[:1] + b"\x81\x80" + bytes(128)]
    assert list(each_der(b"".join(parts))) == parts
