"""What SPIRE says of agents becomes NodeEvidence in a real API server, by a real reconciler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import Kube, Raw, Resource, wait_until
from tests.e2e.test_ledger import installed
from tests.evidence.certificates import Authority
from tests.evidence.doubles import SERVER_ID, TRUST_DOMAIN, VERIFIER, SpireDouble, WorkloadApiDouble, agent
from tests.running import reconciling
from webhook.clock import utc_now
from webhook.evidence.node_evidence import new_node_evidence

NODE_EVIDENCES = Resource("apis/gpuwarden.io/v1alpha1", "nodeevidences", is_namespaced=False)
NODE = "spire-a"
TTL = timedelta(hours=1)
MAX_AGE = timedelta(minutes=40)
HASH, OTHER_HASH = "sha256:aa11", "sha256:bb22"


class Scene:
    """A SPIRE Server that the reconciler asks, and the NodeEvidence of one node."""

    def __init__(self, kube: Kube, spire: SpireDouble) -> None:
        self.kube = kube
        self.spire = spire

    async def entry(self) -> Raw | None:
        found = await self.kube.find(NODE_EVIDENCES, NODE)
        sources = ((found or {}).get("status") or {}).get("sources") or {}
        return sources.get("spire-server")

    async def says(self, **members: object) -> Raw | None:
        """Wait until the entry says this."""
        return await wait_until(
            self.entry, lambda entry: entry is not None and all(entry.get(key) == one for key, one in members.items())
        )


@pytest.fixture
async def scene(cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Scene]:
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
        yield Scene(kube, spire)
    await spire.stop()
    await api.stop()
    await kube.delete(NODE_EVIDENCES, NODE)


async def test_the_reconciler_writes_what_spire_says(scene: Scene) -> None:
    expires_at = utc_now().replace(microsecond=0) + TTL
    scene.spire.agents = [agent(NODE, HASH, expires_at=expires_at)]
    until = (expires_at - TTL + MAX_AGE).strftime("%Y-%m-%dT%H:%M:%SZ")
    await scene.says(hash=HASH, banned=False, conflict=False, until=until)

    clone = agent(NODE, OTHER_HASH, expires_at=expires_at, id="/spire/agent/x509pop/clone")
    scene.spire.agents.append(clone)
    await scene.says(conflict=True, banned=False)

    scene.spire.agents = [agent(NODE, HASH, expires_at=expires_at, banned=True)]
    await scene.says(banned=True)

    scene.spire.agents = []
    await wait_until(scene.entry, lambda entry: entry is None)


async def test_evidence_of_a_source_that_is_no_longer_asked_does_not_stay(scene: Scene) -> None:
    """Somebody's word that has no end would stand for ever."""

    async def sources() -> Raw:
        found = await scene.kube.get(NODE_EVIDENCES, NODE)
        return dict((found.get("status") or {}).get("sources") or {})

    await wait_until(sources, lambda found: found == {})


async def test_while_spire_is_away_its_evidence_stays_as_it_was(scene: Scene) -> None:
    scene.spire.agents = [agent(NODE, HASH, expires_at=utc_now() + TTL)]
    before = await scene.says(hash=HASH)
    await scene.spire.stop()
    failed = asyncio.Event()

    def refuse(reader: object, writer: asyncio.StreamWriter) -> None:
        writer.close()
        failed.set()

    nobody = await asyncio.start_server(refuse, "127.0.0.1", scene.spire.port)
    await asyncio.wait_for(failed.wait(), 60)
    failed.clear()
    await asyncio.wait_for(failed.wait(), 60)  # asked once more: the first failure has been dealt with
    assert await scene.entry() == before
    nobody.close()
