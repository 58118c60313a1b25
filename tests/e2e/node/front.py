"""Installs gpuwarden for real nodes, with everything that an installation creates in the API server."""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME
from scripts.node.real import RealNode
from tests.e2e.kube import NAMESPACES, PODS, Kube, Raw, wait_until
from tests.e2e.node.containers import START_TIMEOUT
from tests.e2e.processes import Site, reconciler_account, remove_nodes, site_on_nodes, with_policies
from tests.e2e.test_ledger import GPU_NODES, installed

HASH: Final = "sha256:aa11"
# Heartbeats are written to files on the host.
WRITES_TO_HOST: Final[Raw] = {"metadata": {"labels": {"gpuwarden.io/isolation": "none"}}}


@asynccontextmanager
async def installed_on(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    nodes: Sequence[RealNode],
    *,
    replicas: int = 1,
    flags: Iterable[str] = (),
    attesting: Callable[[Site], AbstractAsyncContextManager[None]] | None = None,
    has_account: bool = False,
) -> AsyncIterator[Site]:
    """CRDs, policies, webhooks, replicas, a reconciler. Every node is proven; pods get the runtime class `nvidia`.
    `attesting` runs alongside if `flags` require evidence that is not static. With `has_account`, the reconciler has
    its own service account instead of the administrator's rights."""
    proven = json.dumps({node.name: HASH for node in nodes})
    evidence = ("--evidence", "static", "--require-evidence", "all", "--node-hash-map", proven)
    devices = {node.name: node.gpus for node in nodes}
    async with AsyncExitStack() as stack:
        await installed(kube)
        stack.push_async_callback(remove_nodes, kube, tuple(devices), (GPU_NODES,))
        own = ("--runtime-class", RUNTIME, *evidence, *flags)
        standing = site_on_nodes(cluster, kube, directory, devices, replicas=replicas, flags=own)
        here = await stack.enter_async_context(standing)
        await stack.enter_async_context(with_policies(here))
        await kube.patch(NAMESPACES, here.namespace, WRITES_TO_HOST)
        stack.push_async_callback(wait_until_empty, here)
        if has_account:
            here.reconcile_account = await stack.enter_async_context(reconciler_account(here, cluster))
        await here.reconciler()
        if attesting is not None:
            await stack.enter_async_context(attesting(here))
        await here.wait_until_offered()
        yield here


async def wait_until_empty(here: Site) -> None:
    """Waits for the end of the containers: until then they hold their GPUs against the next test."""
    await here.free_all()
    await wait_until(lambda: here.kube.list(PODS, here.namespace), lambda pods: not pods, START_TIMEOUT)
