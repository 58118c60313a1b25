"""Challenges on a real API server: replicas share only the API server and a key, and have the shipped permissions."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import trustme
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests import builders
from tests.builders import HASH, OTHER_HASH
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    NODES,
    SERVICE_ACCOUNTS,
    ApiError,
    Kube,
    Raw,
    Resource,
    delete_without_finalizers,
    pod,
    wait_until,
)
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble, endpoint, http
from tests.evidence.jwt.test_bundle_endpoint import web_context
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, document, evidence_id, token
from tests.ledger.fake_store import gpu_node
from tests.running import GPUWARDEN, Running, serving
from webhook.kube.install.policies import Installation, rbac
from webhook.runtime.clock import utc_now

TRUST_BUNDLES = Resource("apis/gpuwarden.io/v1alpha1", "trustbundles", is_namespaced=False)
NODE = "proof-a"
KEY = SigningKey.make()
RBAC = {"ServiceAccount": SERVICE_ACCOUNTS, "ClusterRole": CLUSTER_ROLES, "ClusterRoleBinding": CLUSTER_ROLE_BINDINGS}


@frozen(eq=False)
class Harness:
    """Replicas, one node, and its SPIRE agent."""

    cluster: Cluster
    kube: Kube
    agent: JwtWorkloadApiDouble
    replicas: tuple[Running, ...]

    async def is_old_enough(self) -> None:
        """Waits until the Node is older than the clock skew: a token issued before could belong to a previous node of
        this name."""
        made = datetime.fromisoformat((await self.kube.get(NODES, NODE))["metadata"]["creationTimestamp"])

        async def age() -> timedelta:
            return utc_now() - made

        await wait_until(age, lambda found: found > timedelta(seconds=7))

    async def challenged(self, replica: Running) -> str:
        async with replica.client() as client:
            reply = await client.get("/evidence/challenge", params={"node": NODE})
        return str(reply.json()["nonce"])

    async def token(self, replica: Running, hash: str = HASH) -> str:
        return token(KEY, await self.challenged(replica), utc_now(), sub=evidence_id(NODE, hash))

    async def posted(self, replica: Running, text: str) -> int:
        async with replica.client(timeout=30) as client:
            reply: httpx.Response = await client.post("/evidence", json={"token": text})
        return reply.status_code

    async def proves(self, replica: Running, hash: str = HASH) -> None:
        """Posts new proofs until one is accepted: only one per second can be."""

        async def attempt() -> int:
            return await self.posted(replica, await self.token(replica, hash))

        assert await wait_until(attempt, lambda status: status == 200) == 200

    async def admits(self, replica: Running, hash: str) -> bool:
        raw = pod("probe", 1, {"gpuwarden.io/required-hash": hash}, nodeSelector={"kubernetes.io/hostname": NODE})
        asked = builders.mutating_create(raw, uid=builders.REVIEW_UID, dry_run=True)
        async with replica.client(timeout=30) as client:
            reply = await client.post("/mutate", json=asked)
        return bool(reply.json()["response"]["allowed"])

    async def all_admit(self, hash: str, *, admitted: bool) -> None:
        for replica in self.replicas:
            await wait_until(lambda one=replica: self.admits(one, hash), lambda found: found is admitted)  # type: ignore[misc]  # bound now

    async def entry(self) -> Raw:
        found: Raw = (await self.kube.get(NODE_EVIDENCES, NODE))["status"]["sources"]["jwt-svid"]
        return found


@asynccontextmanager
async def account_of(cluster: Cluster, kube: Kube) -> AsyncIterator[Path]:
    """A kubeconfig with exactly the permissions of `serve`."""
    async with new_namespace(kube) as namespace:
        manifests = [
            one
            for one in rbac(Installation(namespace=namespace))
            if one["kind"] in RBAC and one["metadata"]["name"] == "gpuwarden"
        ]
        for one in manifests:
            await kube.create(RBAC[one["kind"]], one, one["metadata"].get("namespace"))
        yield cluster.service_account_kubeconfig(namespace, "gpuwarden")
        for one in manifests:
            await kube.delete(RBAC[one["kind"]], "gpuwarden", one["metadata"].get("namespace"))


async def create_node(cluster: Cluster, kube: Kube) -> None:
    await asyncio.to_thread(cluster.add_nodes, [node_object(NODE)])
    with suppress(ApiError):
        await kube.create(GPU_NODES, gpu_node(NODE, "GPU-proof"))


@asynccontextmanager
async def new_harness(cluster: Cluster, kube: Kube, account: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    await installed(kube)
    agent = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), KEY, [evidence_id(NODE)])
    (tmp_path / "nonce.key").write_bytes(os.urandom(32))
    flags = ["--ledger", "cluster", "--kubeconfig", str(account), "--log-level", "warn", "--evidence", "jwt-svid"]
    flags += ["--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{agent.path}"]
    flags += ["--nonce-key", str(tmp_path / "nonce.key")]
    await agent.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(agent.stop)
        for of in (NODES, GPU_NODES, NODE_EVIDENCES):
            stack.push_async_callback(delete_objects, kube, of)
        await create_node(cluster, kube)
        replicas = []
        for number in range(2):
            (tmp_path / f"replica-{number}").mkdir()
            starting = serving(tmp_path / f"replica-{number}", None, flags)
            processes = stack.enter_context(ExitStack())
            replicas.append(await asyncio.to_thread(processes.enter_context, starting))
        harness = Harness(cluster, kube, agent, tuple(replicas))
        await harness.is_old_enough()
        yield harness


async def delete_objects(kube: Kube, of: object) -> None:
    with suppress(ApiError):
        await delete_without_finalizers(kube, of, NODE)  # type: ignore[arg-type]  # a Resource


@pytest.fixture
async def account(cluster: Cluster, kube: Kube) -> AsyncIterator[Path]:
    async with account_of(cluster, kube) as found:
        yield found


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, account: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    async with new_harness(cluster, kube, account, tmp_path) as found:
        yield found


async def test_proof_accepted_by_one_replica_is_used_by_all(harness: Harness) -> None:
    first, second = harness.replicas
    assert not await harness.admits(first, HASH)
    text = token(KEY, await harness.challenged(first), utc_now(), sub=evidence_id(NODE))
    assert await harness.posted(second, text) == 200
    await harness.all_admit(HASH, admitted=True)
    entry = await harness.entry()
    assert (entry["hash"], entry["banned"], len(entry["nonceDigest"])) == (HASH, False, 64)
    await harness.proves(first, OTHER_HASH)
    await harness.all_admit(HASH, admitted=False)
    await harness.all_admit(OTHER_HASH, admitted=True)


@asynccontextmanager
async def another(harness: Harness, account: Path, directory: Path, *keys_from: str) -> AsyncIterator[Running]:
    """Starts another replica; its keys come from the same source by default."""
    flags = ["--ledger", "cluster", "--kubeconfig", str(account), "--evidence", "jwt-svid"]
    flags += ["--spire-trust-domain", TRUST_DOMAIN, "--nonce-key", str(directory / "nonce.key")]
    flags += keys_from or ["--spire-workload-api", f"unix:{harness.agent.path}"]
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(dir=directory)))
        yield await asyncio.to_thread(stack.enter_context, serving(place, None, flags))


async def test_replica_started_without_bundle_keys_uses_stored_evidence(
    harness: Harness, account: Path, tmp_path: Path
) -> None:
    """The replica is ready; it refuses what it cannot verify until it has the keys."""
    await harness.proves(harness.replicas[0])
    await harness.agent.stop()
    async with another(harness, account, tmp_path) as again:
        assert await harness.admits(again, HASH)
        assert await harness.posted(again, await harness.token(again)) == 503
        await harness.agent.start()
        await harness.proves(again)


async def test_a_node_attests_itself(harness: Harness) -> None:
    first, second = harness.replicas
    command = [GPUWARDEN, "attest", "--once", "--server", first.urls["https"], "--node", NODE]
    command += ["--server-ca", str(first.directory / "certs/dev/ca.crt"), "--spire-trust-domain", TRUST_DOMAIN]
    command += ["--spire-workload-api", f"unix:{harness.agent.path}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, log.decode()
    assert json.loads(log.splitlines()[-1])["hash"] == HASH
    await harness.all_admit(HASH, admitted=True)
    assert second.process.poll() is None


async def test_proofs_are_refused_while_the_api_server_is_down_and_stored_evidence_stays(harness: Harness) -> None:
    """A proof that was not stored is not accepted, and the answer says so in time."""
    first, _ = harness.replicas
    text = await harness.token(first)
    harness.cluster.pause("kube-apiserver")
    try:
        assert await harness.posted(first, text) == 503
    finally:
        harness.cluster.resume("kube-apiserver")
    await wait_until(lambda: harness.kube.find(NODES, NODE))
    await harness.proves(first)
    await harness.all_admit(HASH, admitted=True)


async def test_no_replica_accepts_an_older_trust_bundle(harness: Harness, account: Path, tmp_path: Path) -> None:
    """A revoked key would return with it. After rebuilding SPIRE an operator deletes the object."""
    ca, lost, new = trustme.CA(), SigningKey.make("key-2"), SigningKey.make("key-3")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with AsyncExitStack() as stack:
        shown = await stack.enter_async_context(endpoint(web_context(ca), document(KEY, sequence=8)))
        keys_from = ("--bundle-endpoint", shown.url, "--bundle-endpoint-ca", str(tmp_path / "ca.pem"))
        stack.push_async_callback(harness.kube.delete, TRUST_BUNDLES, TRUST_DOMAIN)
        async with another(harness, account, tmp_path, *keys_from) as first:
            await harness.proves(first)
        kept = await harness.kube.get(TRUST_BUNDLES, TRUST_DOMAIN)
        assert kept["status"]["sequence"] == 8
        backwards = {**kept, "status": {**kept["status"], "sequence": 7}}
        with pytest.raises(ApiError, match="never goes back"):
            await harness.kube.replace(TRUST_BUNDLES, backwards, subresource="status")

        shown.reply = http(document(KEY, lost, sequence=7))
        async with another(harness, account, tmp_path, *keys_from) as again:
            for key in (lost, KEY):
                text = token(key, await harness.challenged(again), utc_now(), sub=evidence_id(NODE, OTHER_HASH))
                assert await harness.posted(again, text) == 503
            assert not await harness.admits(again, OTHER_HASH)
            assert await harness.admits(again, HASH)  # stored evidence is valid, with or without keys

            shown.reply = http(document(new, sequence=1))
            await harness.kube.delete(TRUST_BUNDLES, TRUST_DOMAIN)

            async def attempt() -> int:
                challenge = await harness.challenged(again)
                return await harness.posted(again, token(new, challenge, utc_now(), sub=evidence_id(NODE)))

            assert await wait_until(attempt, lambda status: status == 200) == 200
        assert (await harness.kube.get(TRUST_BUNDLES, TRUST_DOMAIN))["status"]["sequence"] == 1
