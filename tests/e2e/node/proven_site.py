"""Installs gpuwarden with proof devices, for real nodes with NVIDIA's DRA driver and `attest`."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

from attrs import frozen

from scripts.controlplane.cluster import Cluster
from scripts.node.files import RUNTIME
from scripts.node.real import DRA_DRIVER, RealNode
from tests.e2e.cluster_users import BINDING_ENDS
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_CLAIM_TEMPLATES,
    device_classes,
    proof_devices,
    remove_slices,
)
from tests.e2e.evidence import write_evidence
from tests.e2e.kube import NAMESPACES, NODES, Kube, Raw, wait_until
from tests.e2e.node.containers import START_TIMEOUT
from tests.e2e.node.front import HASH, WRITES_TO_HOST, wait_until_empty
from tests.e2e.node.plugins import AttestPlugin, attest_account, attesting
from tests.e2e.processes import Site, remove_nodes, site_on_nodes, with_policies
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.running import challenging
from webhook.core.native import MAX_GPUS
from webhook.core.proof_claims import template_name
from webhook.core.proof_devices import DRIVER, hash_attribute
from webhook.kube.install.policies import Installation, dra, policies
from webhook.runtime.clock import utc_now

LONG = timedelta(hours=2)


@frozen(eq=False)
class ProvenSite:
    """The installation, and `attest` of each real node."""

    here: Site
    account: Path
    attests: Mapping[str, AttestPlugin]


@asynccontextmanager
async def proven_site(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    nodes: Sequence[RealNode],
    *,
    flags: Iterable[str] = (),
    is_native: bool = False,
) -> AsyncIterator[ProvenSite]:
    """CRDs, policies, a replica, a reconciler, and the plugins of the nodes. No node is proven yet. With `is_native`
    there are no webhooks."""
    devices = {node.name: node.gpus for node in nodes}
    own = ("--require-evidence", "all", "--proof-devices", "true", "--on-evidence-lost", "evict")
    mode = ("--native-templates", "true") if is_native else ("--runtime-class", RUNTIME)
    async with AsyncExitStack() as stack:
        await installed(kube)
        await stack.enter_async_context(device_classes(kube, GPU_DRIVER, DRIVER))
        stack.push_async_callback(remove_nodes, kube, tuple(devices), (GPU_NODES, NODE_EVIDENCES))
        stack.push_async_callback(remove_slices, kube, *devices)
        standing = site_on_nodes(
            cluster,
            kube,
            directory,
            devices,
            replicas=1,
            flags=(*challenging(directory), *own, *mode, *flags),
            is_native=is_native,
            is_discovered=True,
        )
        here = await stack.enter_async_context(standing)
        await kube.patch(NAMESPACES, here.namespace, WRITES_TO_HOST)
        await stack.enter_async_context(with_policies(here, manifests_of(here, is_native=is_native)))
        account = await stack.enter_async_context(attest_account(cluster, kube, here.own_namespace))
        await here.reconciler()
        attests = {}
        for node in nodes:
            await asyncio.to_thread(node.start_dra_driver)
            stack.push_async_callback(asyncio.to_thread, node.kill, DRA_DRIVER)
            attests[node.name] = await stack.enter_async_context(attesting(node, HASH, account))
        stack.push_async_callback(wait_until_empty, here)
        yield ProvenSite(here, account, attests)


def manifests_of(here: Site, *, is_native: bool) -> list[Raw]:
    """The policies of an installation with ResourceClaims."""
    installation = Installation(here.own_namespace, native=is_native)
    return [*policies(installation), *(one for one in dra(installation) if one["kind"] != "DeviceClass")]


async def prove(kube: Kube, node: str, gpus: int) -> None:
    """Writes evidence of the node, and waits until its GPUs have proof devices that can be allocated."""
    await write_evidence(kube, node, HASH, LONG)
    await wait_until(lambda: proof_devices(kube, node), lambda found: len(found) == gpus, START_TIMEOUT)

    async def may_be_allocated() -> bool:
        ends = await kube.find(BINDING_ENDS, "gpuwarden")
        listed = (ends or {}).get("spec", {}).get("nodes") or {}
        return node in listed and datetime.fromisoformat(listed[node]) > utc_now()

    await wait_until(may_be_allocated, seconds=START_TIMEOUT)


async def templates_are_there(kube: Kube, namespace: str) -> None:
    """Waits until native pods of the namespace get claims."""
    name = template_name(MAX_GPUS, hash_attribute(HASH))
    await wait_until(lambda: kube.find(RESOURCE_CLAIM_TEMPLATES, name, namespace))


async def label_injection(kube: Kube, node: str, injection: str | None) -> None:
    await kube.patch(NODES, node, {"metadata": {"labels": {"gpuwarden.io/injection": injection}}})
