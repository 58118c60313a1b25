"""A real reconciler writes SPIRE's data on agents as NodeEvidence to a real API server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests import builders
from tests.e2e.kube import NODES, Kube, Raw, Resource, delete_without_finalizers, gone, pod, wait_until
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.test_shutdown import LEASES
from tests.evidence.certificates import Authority
from tests.evidence.doubles import SERVER_ID, TRUST_DOMAIN, VERIFIER, SpireDouble, WorkloadApiDouble, agent
from tests.ledger.fake_store import gpu_node
from tests.running import Running, reconciling, serving
from webhook.commands.reconcile import LEASE
from webhook.evidence.node_evidence import new_node_evidence
from webhook.runtime.clock import utc_now

NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
NODE = "spire-a"
TTL = timedelta(hours=1)
MAX_AGE = timedelta(minutes=40)
SKEW = timedelta(seconds=5)
HASH, OTHER_HASH = "sha256:aa11", "sha256:bb22"


@frozen(eq=False)
class Harness:
    """A SPIRE Server that the reconciler queries, and the NodeEvidence of one node."""

    cluster: Cluster
    kube: Kube
    spire: SpireDouble
    namespace: str
    flags: tuple[str, ...]

    async def entry(self) -> Raw | None:
        found = await self.kube.find(NODE_EVIDENCES, NODE)
        sources = ((found or {}).get("status") or {}).get("sources") or {}
        return sources.get("spire-server")

    async def wait_for_entry(self, **members: object) -> Raw | None:
        """Waits until the entry has these values."""
        return await wait_until(
            self.entry, lambda entry: entry is not None and all(entry.get(key) == one for key, one in members.items())
        )


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Harness]:
    await installed(kube)
    await kube.create(NODE_EVIDENCES, new_node_evidence(NODE))
    static = {"status": {"sources": {"static": {"hash": HASH, "banned": False, "conflict": False}}}}
    await kube.patch(NODE_EVIDENCES, NODE, static, subresource="status")
    authority, spire = Authority(), SpireDouble()
    await spire.start(authority.issue(SERVER_ID), authority)
    api = WorkloadApiDouble(str(tmp_path / "agent.sock"), [authority.issue(VERIFIER)], [authority.root])
    await api.start()
    flags = f"--evidence spire-server --spire-server 127.0.0.1:{spire.port} --spire-trust-domain {TRUST_DOMAIN}"
    also = f"--spire-workload-api unix:{api.path} --evidence-poll 500ms"
    cluster_flags = ["--kubeconfig", str(cluster.kubeconfig), "--lease-namespace", namespace]
    with ExitStack() as stack:
        await asyncio.to_thread(
            stack.enter_context, reconciling(tmp_path, [*cluster_flags, *flags.split(), *also.split()])
        )
        quiet = ("--log-level", "warn")  # the log is a pipe of 64 KiB that is not read
        yield Harness(cluster, kube, spire, namespace, (*cluster_flags[:2], *flags.split(), *also.split(), *quiet))
    await spire.stop()
    await api.stop()
    if await kube.find(NODE_EVIDENCES, NODE):  # the reconciler deletes evidence without a Node
        await kube.delete(NODE_EVIDENCES, NODE)


async def test_reconciler_writes_evidence_of_spire(harness: Harness) -> None:
    expires_at = utc_now().replace(microsecond=0) + TTL
    harness.spire.agents = [agent(NODE, HASH, expires_at=expires_at)]
    until = (expires_at - TTL + MAX_AGE).strftime("%Y-%m-%dT%H:%M:%SZ")
    await harness.wait_for_entry(hash=HASH, banned=False, conflict=False, until=until)

    clone = agent(NODE, OTHER_HASH, expires_at=expires_at, id="/spire/agent/x509pop/clone")
    harness.spire.agents.append(clone)
    await harness.wait_for_entry(conflict=True, banned=False)

    harness.spire.agents = [agent(NODE, HASH, expires_at=expires_at, banned=True)]
    await harness.wait_for_entry(banned=True)

    harness.spire.agents = []
    await wait_until(harness.entry, lambda entry: entry is None)


async def test_evidence_of_a_removed_source_is_deleted(harness: Harness) -> None:
    """Evidence without an end would be valid for ever."""

    async def sources() -> Raw:
        found = await harness.kube.find(NODE_EVIDENCES, NODE) or {}
        return dict((found.get("status") or {}).get("sources") or {})

    await wait_until(sources, lambda found: found == {})


@asynccontextmanager
async def spire_down(spire: SpireDouble) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Makes SPIRE close every connection. Yields a function that waits for a second failure, so that the first has been
    processed."""
    await spire.stop()
    failed = asyncio.Event()

    def refuse(reader: object, writer: asyncio.StreamWriter) -> None:
        writer.close()
        failed.set()

    async def failed_twice() -> None:
        for _ in range(2):
            failed.clear()
            await asyncio.wait_for(failed.wait(), 60)

    closing_server = await asyncio.start_server(refuse, "127.0.0.1", spire.port)
    yield failed_twice
    closing_server.close()


async def test_evidence_stays_unchanged_while_spire_is_down(harness: Harness) -> None:
    harness.spire.agents = [agent(NODE, HASH, expires_at=utc_now() + TTL)]
    before = await harness.wait_for_entry(hash=HASH)
    async with spire_down(harness.spire) as failed_twice:
        await failed_twice()
        assert await harness.entry() == before


async def test_reelected_leader_does_not_revert_a_ban_of_another_leader(
    harness: Harness,
) -> None:
    harness.spire.agents = [agent(NODE, HASH, expires_at=utc_now() + TTL)]
    await harness.wait_for_entry(hash=HASH, banned=False)
    ban = {"status": {"sources": {"spire-server": {"banned": True}}}}

    async def is_led_by_another() -> bool:
        """A leader corrects manual changes at once."""
        await harness.kube.patch(NODE_EVIDENCES, NODE, ban, subresource="status")
        await asyncio.sleep(2)
        entry = await harness.entry()
        return entry is not None and bool(entry["banned"])

    async def holder() -> str:
        lease = await harness.kube.get(LEASES, LEASE, harness.namespace)
        return str(lease["spec"]["holderIdentity"])

    async with spire_down(harness.spire) as failed_twice:
        another = {"spec": {"holderIdentity": "another", "renewTime": f"{utc_now():%Y-%m-%dT%H:%M:%S.%fZ}"}}
        await harness.kube.patch(LEASES, LEASE, another, harness.namespace)
        await wait_until(is_led_by_another)
        assert await holder() == "another"
        await wait_until(holder, lambda found: found != "another")
        await failed_twice()
    entry = await harness.entry()
    assert entry is not None
    assert entry["banned"] is True


@frozen(eq=False)
class Served:
    """The node with a GPU, and a server that uses its stored evidence."""

    harness: Harness
    server: Running

    async def recreate_node(self) -> datetime:
        """Creates the Node, and waits until an agent can have attested after that."""
        await asyncio.to_thread(self.harness.cluster.add_nodes, [node_object(NODE)])
        made = datetime.fromisoformat((await self.harness.kube.get(NODES, NODE))["metadata"]["creationTimestamp"])

        async def age() -> timedelta:
            return utc_now() - made

        await wait_until(age, lambda found: found > SKEW)
        return made

    def attested_after(self, made: datetime, serial: str) -> None:
        """Attested at the earliest time that is certainly after the Node was created: the skew and a little more."""
        expires_at = made + SKEW + timedelta(seconds=1) + TTL
        self.harness.spire.agents = [agent(NODE, HASH, expires_at=expires_at, serial=serial)]

    async def admits(self) -> bool:
        asked = {"gpuwarden.io/required-hash": HASH}
        raw = pod("probe", 1, asked, nodeSelector={"kubernetes.io/hostname": NODE})
        review = builders.mutating_create(raw, uid=builders.REVIEW_UID, dry_run=True)
        async with self.server.client(timeout=30) as client:
            return bool((await client.post("/mutate", json=review)).json()["response"]["allowed"])

    async def comes_to_admit(self, *, admitted: bool) -> None:
        await wait_until(self.admits, lambda found: found is admitted)


@pytest.fixture
async def served(harness: Harness, tmp_path: Path) -> AsyncIterator[Served]:
    (tmp_path / "serve").mkdir()
    async with AsyncExitStack() as stack:
        for of in (NODES, GPU_NODES):
            stack.push_async_callback(removed, harness.kube, of)
        await asyncio.to_thread(harness.cluster.add_nodes, [node_object(NODE)])
        await harness.kube.create(GPU_NODES, gpu_node(NODE, "GPU-spire"))
        starting = serving(tmp_path / "serve", None, harness.flags)
        yield Served(harness, await asyncio.to_thread(stack.enter_context, starting))


async def removed(kube: Kube, of: Resource) -> None:
    if await kube.find(of, NODE) is not None:
        await delete_without_finalizers(kube, of, NODE)


async def test_recreated_node_must_be_attested_again(served: Served) -> None:
    """The agent of the previous machine is still in the registry, alive and not banned."""
    harness = served.harness
    served.attested_after(await served.recreate_node(), serial="1")
    await served.comes_to_admit(admitted=True)
    await harness.kube.delete(NODES, NODE)
    await gone(harness.kube, NODES, NODE)
    made = await served.recreate_node()
    await served.comes_to_admit(admitted=False)
    assert (await harness.wait_for_entry(hash=HASH))["banned"] is False  # type: ignore[index]  # it says something
    served.attested_after(made, serial="2")
    await served.comes_to_admit(admitted=True)


async def test_server_started_while_spire_is_down_uses_stored_evidence(served: Served, tmp_path: Path) -> None:
    served.attested_after(await served.recreate_node(), serial="1")
    await served.comes_to_admit(admitted=True)
    await served.harness.spire.stop()
    (tmp_path / "again").mkdir()
    with ExitStack() as stack:
        starting = serving(tmp_path / "again", None, served.harness.flags)
        again = Served(served.harness, await asyncio.to_thread(stack.enter_context, starting))
        assert await again.admits()
