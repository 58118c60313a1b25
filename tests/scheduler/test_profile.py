"""A kube-scheduler in our own Pod: its Lease, and what it and the extender show each other."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from attrs import define, field
from starlette.applications import Starlette

from tests.builders import NOW, Raw
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.runtime.clock import utc_now
from webhook.runtime.http.listener import Listener
from webhook.runtime.telemetry import Metrics
from webhook.runtime.tls.certificate_source import CertificateSource
from webhook.scheduler.profile import make_certificates
from webhook.scheduler.profile_lease import SchedulerLease
from webhook.web.app import probes
from webhook.web.health import Health, SchedulerHealth, Stage
from webhook.web.routes import application

WHERE = "the Lease gpuwarden/gpuwarden-scheduler"


@define
class Leases:
    """An API server that has one Lease, or none, or a mistake."""

    spec: Raw | None = None
    trouble: ApiUnavailableError | ApiRefusesError | None = None
    now: float = 1000.0
    asked: list[str] = field(factory=list)

    async def call(self, method: str, path: str, names: Mapping[str, str], body: Raw | None = None) -> Raw | None:
        self.asked.append(f"{method} {path.format(**names)}")
        if self.trouble is not None:
            raise self.trouble
        return None if self.spec is None else {"spec": self.spec}

    def renewed(self, holder: str = "pod-a_1", lasts: int = 15) -> None:
        self.spec = {"holderIdentity": holder, "renewTime": f"at {self.now}", "leaseDurationSeconds": lasts}


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def lease(leases: Leases) -> SchedulerLease:
    return SchedulerLease(leases, "gpuwarden", "gpuwarden-scheduler", lambda: leases.now)


async def held(lease: SchedulerLease, leases: Leases) -> None:
    """Seen to be renewed."""
    leases.renewed()
    await lease.look()
    leases.now += 2
    leases.renewed()
    await lease.look()
    assert lease.problem() == ""


async def test_a_lease_that_nobody_has_made_is_held_by_nobody(lease: SchedulerLease, leases: Leases) -> None:
    assert lease.problem() == f"{WHERE} is held by no kube-scheduler"
    await lease.look()
    assert leases.asked == ["GET /apis/coordination.k8s.io/v1/namespaces/gpuwarden/leases/gpuwarden-scheduler"]
    assert lease.problem() == f"{WHERE} is held by no kube-scheduler"


async def test_what_was_written_before_the_first_look_proves_nothing(lease: SchedulerLease, leases: Leases) -> None:
    leases.renewed()
    await lease.look()
    await lease.look()
    assert lease.problem() == f"{WHERE} is not renewed"
    await held(lease, leases)


async def test_a_lease_that_is_not_renewed_for_its_duration_is_a_problem(lease: SchedulerLease, leases: Leases) -> None:
    await held(lease, leases)
    leases.now += 15
    await lease.look()
    assert lease.problem() == ""
    leases.now += 0.1
    assert lease.problem() == f"{WHERE} is not renewed"


async def test_a_lease_that_is_given_back_is_a_problem_until_another_has_it(
    lease: SchedulerLease, leases: Leases
) -> None:
    await held(lease, leases)
    leases.renewed(holder="", lasts=1)
    await lease.look()
    assert lease.problem() == f"{WHERE} is held by no kube-scheduler"
    leases.renewed(holder="pod-b_2")
    await lease.look()
    assert lease.problem() == ""


@pytest.mark.parametrize(
    "trouble", [ApiUnavailableError("it does not answer"), ApiRefusesError(403, "no")], ids=["away", "forbidden"]
)
async def test_who_cannot_look_is_well_until_the_lease_may_be_over(
    lease: SchedulerLease, leases: Leases, trouble: ApiUnavailableError | ApiRefusesError
) -> None:
    await held(lease, leases)
    leases.trouble = trouble
    await lease.look()
    assert lease.problem() == ""
    leases.now += 16
    assert lease.problem() == f"{WHERE} is not renewed: {trouble}"


async def test_the_two_older_paths_are_the_schedulers_and_the_others_ours(
    lease: SchedulerLease, leases: Leases
) -> None:
    health, metrics = Health(), Metrics()
    health.stage = Stage.SERVING
    app = application(metrics, *probes(health, metrics, SchedulerHealth(lease)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/health", "/ready"):
            found = await client.get(path)
            assert (found.status_code, found.headers["retry-after"]) == (503, "1")
            assert found.json() == {"status": f"{WHERE} is held by no kube-scheduler", "service": "gpu-scheduler"}
        assert [(await client.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        await held(lease, leases)
        assert (await client.get("/health")).json() == {"status": "healthy", "service": "gpu-scheduler"}
        assert (await client.get("/ready")).json() == {"status": "ready", "service": "gpu-scheduler"}


# What the two show each other.


@asynccontextmanager
async def extender(directory: Path) -> AsyncIterator[str]:
    source = CertificateSource(
        directory / "tls.crt", directory / "tls.key", clock=utc_now, client_ca=directory / "ca.crt"
    )
    listener = Listener(Starlette(), host="127.0.0.1", port=0, ssl_context=source.context)
    await listener.start()
    yield listener.url
    await listener.stop(0)


async def test_the_scheduler_of_the_pod_is_let_in_and_nobody_else(tmp_path: Path) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    made = make_certificates(ours, now=utc_now())
    make_certificates(others, now=utc_now())
    assert {path.name for path in made} == {"ca.crt", "tls.crt", "tls.key", "client.crt", "client.key"}
    async with extender(ours) as url:

        async def asked(shows: Path | None, trusts: Path) -> int:
            context = ssl.create_default_context(cafile=str(trusts / "ca.crt"))
            if shows is not None:
                context.load_cert_chain(shows / "client.crt", shows / "client.key")
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                return (await client.get(url)).status_code

        assert await asked(ours, ours) == 404
        for shows in (None, others):
            with pytest.raises(httpx.TransportError):
                await asked(shows, ours)
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await asked(ours, others)


def test_the_key_of_the_ca_is_not_kept_and_the_others_are_their_owners(tmp_path: Path) -> None:
    make_certificates(tmp_path, now=NOW)
    text = "".join(path.read_text() for path in tmp_path.iterdir() if path.suffix == ".key")
    assert text.count("PRIVATE KEY-----") == 4  # two keys, begin and end
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}


def test_the_certificates_outlast_any_pod(tmp_path: Path) -> None:
    make_certificates(tmp_path, now=NOW)
    source = CertificateSource(tmp_path / "tls.crt", tmp_path / "tls.key", clock=lambda: NOW)
    assert source.not_after >= NOW + timedelta(days=3650)
