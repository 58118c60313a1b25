"""No review is lost while certificates change, whether gpuwarden or cert-manager issues them."""

import asyncio
import base64
import itertools
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import define, field
from cryptography import x509

from scripts.certmanager import crds, started
from scripts.controlplane.cluster import ROOT, Cluster
from tests.builders import mutating_create
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import MUTATING, PODS, SERVICES, VALIDATING, ApiError, Kube, Raw, Resource, pod, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import external_name_service
from tests.e2e.test_access import apply
from tests.e2e.webhook_configurations import ENABLED, is_reviewed
from tests.running import GPUWARDEN, Running, ready_line, serving
from webhook.commands.certs import replace_files
from webhook.kube.install.policies import Installation, webhooks

OURS = "gpuwarden"
SECRETS = Resource("api/v1", "secrets")
CERTIFICATES = Resource("apis/cert-manager.io/v1", "certificates")
ISSUERS = Resource("apis/cert-manager.io/v1", "issuers")
CRDS = Resource("apis/apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False)
INVENTORY = {"nodes": [{"name": "node-0", "devices": [{"uuid": f"GPU-0-{n}"} for n in range(8)]}]}
HOST = f"{OURS}.{OURS}.svc"
# A certificate is renewed after a second and valid for 90 s; a CA is renewed after four seconds.
QUICK = ("--certs-leaf-life", "90s", "--certs-renew-before", "88900ms", "--certs-ca-life", "183s")
OFTEN = ("--certs-settle", "500ms", "--certs-look-interval", "200ms")
SLOW = 120.0
# Reviews per second in the long form; a busy machine has fewer in a short one.
LONG, PROMISED = 100, 200.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with policies, and an account with the shipped rights."""
    with Cluster(tmp_path_factory.mktemp("certificates")) as running:
        subprocess.run([*running.kubectl, "create", "namespace", OURS], check=True, capture_output=True)
        for what in ("rbac", "policies", "certs"):
            apply(running, what)
        yield running


@contextmanager
def certs_keep(cluster: Cluster, directory: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `gpuwarden certs keep` with its own account; killed at the end."""
    account = str(cluster.service_account_kubeconfig(OURS, "gpuwarden-certs"))
    where = ["--kubeconfig", account, "--ui-port", "0", "--log-level", "debug"]
    directory.mkdir(exist_ok=True)
    with (directory / "log").open("a") as log:
        command = [GPUWARDEN, "certs", "keep", *where, *flags]
        with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


@define
class Load:
    """Sends reviews through the API server, and over own connections that trust the CA bundle of the configuration."""

    kube: Kube
    namespace: str
    port: int
    reviews: int = 0
    failed: list[str] = field(factory=list)
    leaves: set[int] = field(factory=set)
    issuers: set[str] = field(factory=set)
    bundles: int = 0
    _trust: ssl.SSLContext | None = None
    _has_trust: asyncio.Event = field(factory=asyncio.Event)

    async def run(self, workers: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_ca_bundles())
            await self._has_trust.wait()
            for number in range(workers):
                tasks.create_task(self._create(number))
            tasks.create_task(self._call())

    async def _watch_ca_bundles(self) -> None:
        known = ""
        while True:
            found = await self.kube.get(MUTATING, "gpuwarden")
            bundle = found["webhooks"][0]["clientConfig"].get("caBundle", "")
            if bundle != known:
                known, self.bundles = bundle, self.bundles + 1
                self._trust = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
                self._has_trust.set()
            await asyncio.sleep(0.1)

    async def _create(self, number: int) -> None:
        for turn in itertools.count():
            one = pod(f"load-{number}-{turn}", gpus=1)
            try:
                await self.kube.create(PODS, one, self.namespace, dryRun="All")
            except ApiError as exc:
                self.failed.append(str(exc))
            self.reviews += 2  # one call of /mutate and one of /validate

    async def _call(self) -> None:
        while True:
            assert self._trust is not None
            try:
                await self._handshake(self._trust)
            except OSError as exc:
                self.failed.append(repr(exc))
            self.reviews += 1
            await asyncio.sleep(0.02)

    async def _handshake(self, trust: ssl.SSLContext) -> None:
        body = json.dumps(mutating_create(pod("direct", gpus=1), dry_run=True)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trust, server_hostname=HOST)
        try:
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            leaf = x509.load_der_x509_certificate(shown)
            self.leaves.add(leaf.serial_number)
            self.issuers.add(leaf.issuer.rfc4514_string())
            head = f"POST /mutate HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
        finally:
            writer.close()
        if b" 200 " not in answer.split(b"\r\n", 1)[0] or b'"allowed":true' not in answer.replace(b" ", b""):
            self.failed.append(answer[:300].decode(errors="replace"))


@asynccontextmanager
async def under_load(load: Load, workers: int = 4) -> AsyncIterator[None]:
    task = asyncio.ensure_future(load.run(workers))
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def webhooks_behind_service(kube: Kube, running: Running, annotations: Raw) -> AsyncIterator[str]:
    """The shipped configurations without a CA bundle; yields an enabled namespace once its pods are reviewed."""
    kinds = {"MutatingWebhookConfiguration": MUTATING, "ValidatingWebhookConfiguration": VALIDATING}
    async with AsyncExitStack() as stack:
        await kube.create(SERVICES, external_name_service(running.port), OURS)
        stack.push_async_callback(kube.delete, SERVICES, "gpuwarden", OURS)
        for manifest in webhooks(Installation(OURS, port=running.port)):
            manifest["metadata"]["annotations"] = annotations
            await kube.create(kinds[manifest["kind"]], manifest)
            stack.push_async_callback(kube.delete, kinds[manifest["kind"]], "gpuwarden")
        namespace = await stack.enter_async_context(new_namespace(kube, ENABLED))
        await wait_until(lambda: is_reviewed(kube, namespace))
        yield namespace


def served(directory: Path, files: Path) -> Any:
    directory.mkdir()
    flags = ["--tls-cert", str(files / "tls.crt"), "--tls-key", str(files / "tls.key"), "--reload-interval", "100ms"]
    return serving(directory, INVENTORY, [*flags, "--log-level", "warn"])


async def leaf_certificate(kube: Kube, secret: str) -> int:
    found = await kube.find(SECRETS, secret, OURS)
    pem = base64.b64decode((found or {}).get("data", {}).get("tls.crt", ""))
    return x509.load_pem_x509_certificate(pem).serial_number if pem else 0


async def wait_for_rotations(load: Load, times: int, seconds: float) -> None:
    """Waits until handshakes have shown `times` further certificates."""

    async def seen() -> int:
        return len(load.leaves) - 1

    await wait_until(seen, lambda count: count >= times or bool(load.failed), seconds)


@pytest.mark.parametrize("times", [10, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.defect("binder-21")
async def test_no_review_is_lost_while_own_certificates_change_under_load(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, times: int
) -> None:
    files = tmp_path / "files"
    with ExitStack() as processes:
        first = processes.enter_context(
            certs_keep(cluster, tmp_path / "keep", *QUICK, *OFTEN, "--certs-dir", str(files))
        )
        ready_line(first, tmp_path / "keep" / "log")
        running = processes.enter_context(served(tmp_path / "serve", files))
        async with webhooks_behind_service(kube, running, {}) as namespace:
            load, begin = Load(kube, namespace, running.port), time.monotonic()
            async with under_load(load):
                await wait_for_rotations(load, times, SLOW * 3)
            took = time.monotonic() - begin
    report_figures(
        request,
        reviews=load.reviews,
        a_second=load.reviews / took,
        certificates=len(load.leaves),
        cas=len(load.issuers),
    )
    assert load.failed == []
    assert len(load.leaves) > times
    assert len(load.issuers) >= times / 5  # CAs were replaced, too
    assert load.reviews > 20 * times
    assert times < LONG or load.reviews / took > PROMISED
    await forgotten(kube)


async def test_no_review_is_lost_when_a_certificate_keeper_is_killed(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Two processes keep the certificates; one is killed repeatedly at random moments."""
    files, log = tmp_path / "files", tmp_path / "other" / "log"
    with ExitStack() as processes:
        writer = processes.enter_context(
            certs_keep(cluster, tmp_path / "keep", *QUICK, *OFTEN, "--certs-dir", str(files))
        )
        ready_line(writer, tmp_path / "keep" / "log")
        running = processes.enter_context(served(tmp_path / "serve", files))
        async with webhooks_behind_service(kube, running, {}) as namespace:
            load = Load(kube, namespace, running.port)
            async with under_load(load, workers=1):
                for turn in range(3):
                    with certs_keep(cluster, tmp_path / "other", *QUICK, *OFTEN) as other:
                        await wait_for_steps(log, turn)
                        other.kill()
                    await wait_for_rotations(load, 1 + turn, SLOW)
    assert load.failed == []
    await forgotten(kube)


async def wait_for_steps(log: Path, more: int) -> None:
    """Waits until the process has taken further steps, or was too late for one."""

    async def steps() -> int:
        text = log.read_text() if log.exists() else ""
        return text.count("step=") + text.count('"step"') + text.count("faster")

    before = await steps()
    await wait_until(steps, lambda count: count > before + more, SLOW)


async def forgotten(kube: Kube) -> None:
    await kube.delete(SECRETS, "gpuwarden-certs", OURS)


async def test_certs_ensure_is_idempotent(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    account = cluster.service_account_kubeconfig(OURS, "gpuwarden-certs")
    command = [GPUWARDEN, "certs", "ensure", "--kubeconfig", str(account), "--certs-dir", "files"]
    for manifest in webhooks(Installation(OURS)):
        await kube.create(MUTATING if manifest["kind"].startswith("Mutating") else VALIDATING, manifest)
    try:
        seen = []
        for _ in range(2):
            done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            objects = [await kube.get(of, "gpuwarden") for of in (MUTATING, VALIDATING)]
            secret = await kube.get(SECRETS, "gpuwarden-certs", OURS)
            bundles = {hook["clientConfig"]["caBundle"] for one in objects for hook in one["webhooks"]}
            assert bundles == {secret["data"]["ca.crt"]}
            seen.append([one["metadata"]["resourceVersion"] for one in (*objects, secret)])
        assert seen[0] == seen[1]
        leaf = x509.load_pem_x509_certificate((tmp_path / "files" / "tls.crt").read_bytes())
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [
            "gpuwarden",
            "gpuwarden.gpuwarden",
            "gpuwarden.gpuwarden.svc",
            "gpuwarden.gpuwarden.svc.cluster.local",
        ]
    finally:
        for of in (MUTATING, VALIDATING):
            await kube.delete(of, "gpuwarden")
        await forgotten(kube)


async def test_secret_of_another_type_is_not_changed(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """For example cert-manager's: without tls.crt the API server refuses such a Secret, and with it there is no first
    step."""
    account = cluster.service_account_kubeconfig(OURS, "gpuwarden-certs")
    data = {"tls.crt": "", "tls.key": ""}
    theirs = {"metadata": {"name": "gpuwarden-certs"}, "type": "kubernetes.io/tls", "data": data}
    await kube.create(SECRETS, theirs, OURS)
    try:
        command = [GPUWARDEN, "certs", "ensure", "--kubeconfig", str(account)]
        done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert "name another by --certs-secret" in done.stderr
        assert (await kube.get(SECRETS, "gpuwarden-certs", OURS))["data"] == data
    finally:
        await forgotten(kube)


async def test_missing_permission_is_named(cluster: Cluster, tmp_path: Path) -> None:
    unprivileged = cluster.service_account_kubeconfig(OURS, "default")
    command = [GPUWARDEN, "certs", "ensure", "--kubeconfig", str(unprivileged)]
    done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'cannot get resource "mutatingwebhookconfigurations"' in done.stderr


# cert-manager.


@pytest.fixture
async def cert_manager(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[None]:
    for one in await asyncio.to_thread(crds):
        await kube.create(CRDS, one)
    await wait_until(lambda: is_served(kube))
    process = started(cluster.kubeconfig, tmp_path / "cert-manager.log")
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def is_served(kube: Kube) -> bool:
    with suppress(ApiError):
        return [await kube.list(of, OURS) for of in (CERTIFICATES, ISSUERS)] == [[], []]
    return False


async def shown(kube: Kube, files: Path) -> None:
    """Writes a Secret to files, as the kubelet does for a volume."""
    while True:
        found = await kube.find(SECRETS, "gpuwarden-tls", OURS)
        data = (found or {}).get("data", {})
        if data.get("tls.crt") and data.get("tls.key"):
            both = {name: base64.b64decode(data[name]) for name in ("tls.crt", "tls.key")}
            await asyncio.to_thread(replace_files, files, both)
        await asyncio.sleep(0.1)


async def renew_with_cert_manager(kube: Kube) -> None:
    """Requests a renewal as `cmctl renew` does, and waits for the new certificate."""
    before = await leaf_certificate(kube, "gpuwarden-tls")
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")  # noqa: TID251 - the API server's time
    condition = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "lastTransitionTime": now}

    async def asked() -> bool:
        found = await kube.get(CERTIFICATES, "gpuwarden-tls", OURS)
        known = found["status"].get("conditions", [])
        if any(one["type"] == "Issuing" and one["status"] == "True" for one in known):
            return False  # the previous renewal is not finished; its end would be mistaken for this one's
        others = [one for one in known if one["type"] != "Issuing"]
        found["status"]["conditions"] = [*others, {**condition, "message": "asked for by a test"}]
        with suppress(ApiError):
            await kube.replace(CERTIFICATES, found, OURS, subresource="status")
            return True
        return False

    await wait_until(asked)
    await wait_until(lambda: leaf_certificate(kube, "gpuwarden-tls"), lambda leaf: leaf not in (0, before), SLOW)


@pytest.mark.parametrize("times", [5, pytest.param(LONG, marks=pytest.mark.long)])
async def test_no_review_is_lost_while_cert_manager_certificates_change_under_load(
    cluster: Cluster, kube: Kube, tmp_path: Path, cert_manager: None, request: pytest.FixtureRequest, times: int
) -> None:
    kinds = {"Issuer": ISSUERS, "Certificate": CERTIFICATES}
    for name in ("issuer.yaml", "certificate.yaml"):
        for manifest in yaml.safe_load_all((ROOT / "certs" / name).read_text()):
            await kube.create(kinds[manifest["kind"]], manifest, OURS)
    files = tmp_path / "files"
    kubelet = asyncio.ensure_future(shown(kube, files))
    try:
        await wait_until(lambda: asyncio.to_thread((files / "tls.crt").exists), seconds=SLOW)
        with served(tmp_path / "serve", files) as running:
            injected = {"cert-manager.io/inject-ca-from": "gpuwarden/gpuwarden-tls"}
            async with webhooks_behind_service(kube, running, injected) as namespace:
                load, begin = Load(kube, namespace, running.port), time.monotonic()
                async with under_load(load):
                    for turn in range(times):
                        await renew_with_cert_manager(kube)
                        await wait_for_rotations(load, turn + 1, SLOW)
                took = time.monotonic() - begin
    finally:
        kubelet.cancel()
        with suppress(asyncio.CancelledError):
            await kubelet
    rate = load.reviews / took
    report_figures(request, reviews=load.reviews, a_second=rate, certificates=len(load.leaves), bundles=load.bundles)
    assert load.failed == []
    assert len(load.leaves) > times
    assert times < LONG or rate > PROMISED
    assert (load.bundles, len(load.issuers)) == (1, 1)
