"""The JWT part of the Workload API, on a real socket, with py-spiffe's messages on the other side."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import SigningKey, document, evidence_id
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import BadBundleError
from webhook.evidence.jwt.jwt_svid import read_token
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi, WorkloadBundles

KEY = SigningKey.make()


@pytest.fixture
async def double(tmp_path: Path) -> AsyncIterator[JwtWorkloadApiDouble]:
    double = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), KEY)
    await double.start()
    yield double
    await double.stop()


def api(double: JwtWorkloadApiDouble, seconds: float = 5) -> JwtWorkloadApi:
    return JwtWorkloadApi(f"unix:{double.path}", timedelta(seconds=seconds))


async def test_each_identity_gets_a_token_for_the_audience(double: JwtWorkloadApiDouble) -> None:
    double.identities = [evidence_id(), evidence_id(node="é-node")]
    found = await api(double).jwt_svids("gpuwarden/nonce/x")
    assert [one.spiffe_id for one in found] == double.identities
    assert read_token(found[0].token).audience == "gpuwarden/nonce/x"


async def test_long_response_is_accepted(double: JwtWorkloadApiDouble) -> None:
    double.identities = [evidence_id(node=f"node-{number}") for number in range(2000)]
    assert len(await api(double).jwt_svids("gpuwarden/nonce/x")) == 2000


async def test_bundle_of_the_trust_domain_is_selected(double: JwtWorkloadApiDouble) -> None:
    double.bundles["spiffe://other.org"] = document(SigningKey.make("other"))
    source = WorkloadBundles(api(double), "example.org")
    for _ in range(3):
        assert set((await source.fetch()).keys) == {"key-1"}
    with pytest.raises(BadBundleError, match=r"no bundle of third\.org"):
        await WorkloadBundles(api(double), "third.org").fetch()


async def test_caller_without_an_identity_gets_an_error(double: JwtWorkloadApiDouble) -> None:
    double.identities = []
    with pytest.raises(EvidenceUnavailableError, match="no identity issued"):
        await api(double).jwt_svids("gpuwarden/nonce/x")


async def test_agent_that_does_not_respond_times_out(double: JwtWorkloadApiDouble) -> None:
    double.is_banned = True
    with pytest.raises(EvidenceUnavailableError, match="no answer in time"):
        await api(double, 0.2).jwt_svids("gpuwarden/nonce/x")


async def test_agent_that_restarts_is_reached_again(double: JwtWorkloadApiDouble) -> None:
    asking = api(double)
    await double.stop()
    for _ in range(2):
        with pytest.raises(EvidenceUnavailableError):
            await asking.jwt_bundle("example.org")
    await double.start()
    assert set((await asking.jwt_bundle("example.org")).keys) == {"key-1"}
