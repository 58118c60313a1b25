"""Replicas of the previous version and of this version serve one cluster during an upgrade and a rollback. Nodes and
pods have the injections nvidia, plugin and dra."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from attrs import define, evolve, frozen

from scripts.controlplane.cluster import ROOT, Cluster
from tests.e2e.conftest import emptied_namespace
from tests.e2e.device_plugin import DevicePlugins
from tests.e2e.dra.gpus import (
    GPU_DRIVER,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    device_classes,
    proof_devices,
    remove_slices,
    slice_of_gpus,
)
from tests.e2e.dra.seen import ENDED
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import KINDS, OPT_IN, Site, Worker, reconciler_account, running_tasks, site
from tests.e2e.skipping import skip_or_fail
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.workload import HASH, INJECTION, Workload, workload
from webhook.core.proof_devices import DRIVER
from webhook.kube.install.policies import Installation, dra, webhooks, while_down

# The commit of the previous version, whose replicas may still serve during the rollout.
BEFORE = "f863c69"
# The first version with the injection dra.
FIRST = "5dec181"
GPUS = 6
# The node of each injection.
NODE_OF = {"nvidia": "roll-0", "plugin": "roll-1", "dra": "roll-2"}
WITH_CLAIMS = NODE_OF["dra"]
DEADLINE, SKEW = 15, 1
PROVEN = json.dumps(dict.fromkeys(NODE_OF.values(), HASH))
FLAGS = (
    *("--pending-deadline", f"{DEADLINE}s", "--clock-skew", f"{SKEW}s"),
    *("--proof-devices", "true", "--node-hash-map", PROVEN),
)
PATIENCE = 120.0


@frozen
class Rollout:
    """From which version, with which settings, and the injections of the pods."""

    before: str
    default: str
    reserve: str
    injections: tuple[str, ...] = tuple(NODE_OF)
    # Created with each injection in each stage, while others are deleted.
    pods: int = 3

    @property
    def flags(self) -> tuple[str, ...]:
        own = () if self.reserve == "create" else ("--reserve", self.reserve, "--native-templates", "true")
        return (*FLAGS, "--injection", self.default, *own)

    def is_reserved(self, injection: str) -> bool:
        """Whether gpuwarden chooses the GPUs of such pods; else kube-scheduler does."""
        return self.reserve == "create" or injection != "dra"


SHORT = Rollout(BEFORE, "nvidia", "create"), Rollout(BEFORE, "dra", "bind")
LONG = (
    *(evolve(one, pods=40) for one in SHORT),
    Rollout(BEFORE, "nvidia", "bind", pods=40),
    Rollout(FIRST, "nvidia", "create", ("nvidia", "dra"), pods=12),
)


def named(rollout: Rollout) -> str:
    return f"{rollout.before}, {rollout.default}, {rollout.reserve}, {rollout.pods} pods"


def unpacked(before: str, directory: Path) -> list[str]:
    """The command of the previous version."""
    tree = directory / "before"
    tree.mkdir()
    archive = ["git", "archive", before, "webhook"]
    packed = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if packed.returncode != 0:
        skip_or_fail("HISTORY", f"the history of this clone does not reach back to {before}")
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed.stdout, check=True)  # noqa: S607
    run = "import sys; from webhook.cli import main; sys.exit(main())"
    return ["/usr/bin/env", f"PYTHONPATH={tree}", sys.executable, "-c", run]


# Run by the previous version.
ITS_MANIFESTS = """
import json, sys
from webhook.kube.install.policies import Installation, dra, webhooks, while_down
namespace, port, bundle = sys.argv[1:]
installation = Installation(namespace, port=int(port), ca_bundle=open(bundle, "rb").read())
print(json.dumps([*while_down(installation), *dra(installation), *webhooks(installation)]))
"""


def manifests_before(here: Site, old: list[str]) -> list[Raw]:
    *run, _ = old
    command = [*run, ITS_MANIFESTS, here.own_namespace, str(here.balancer.port), str(here.directory / "ca.crt")]
    found: list[Raw] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return without_classes(found)


def manifests_now(here: Site) -> list[Raw]:
    bundle = (here.directory / "ca.crt").read_bytes()
    installation = Installation(here.own_namespace, port=here.balancer.port, ca_bundle=bundle)
    return without_classes([*while_down(installation), *dra(installation), *webhooks(installation)])


def without_classes(found: Iterable[Raw]) -> list[Raw]:
    return [one for one in found if one["kind"] != "DeviceClass"]


async def apply(kube: Kube, wanted: Iterable[Raw], gone: Iterable[Raw] = ()) -> None:
    """Applies manifests as helm does: existing objects are changed, and objects of the other version only are
    deleted."""
    names = set()
    for manifest in wanted:
        of, name = KINDS[manifest["kind"]], manifest["metadata"]["name"]
        names.add((manifest["kind"], name))
        there = await kube.find(of, name)
        if there is None:
            await kube.create(of, manifest)
        else:
            meta = {**manifest["metadata"], "resourceVersion": there["metadata"]["resourceVersion"]}
            await kube.replace(of, {**manifest, "metadata": meta})
    for manifest in gone:
        if (manifest["kind"], manifest["metadata"]["name"]) not in names:
            with suppress(ApiError):
                await kube.delete(KINDS[manifest["kind"]], manifest["metadata"]["name"])


async def stop_gracefully(worker: Worker) -> None:
    """Stops a replica as in a rolling update: it finishes what is in flight."""
    worker.process.terminate()
    await asyncio.wait_for(worker.process.wait(), PATIENCE)


async def replace_replica(here: Site, leaving: Worker, program: list[str] | None) -> Worker:
    """Starts a replica of the other version, then stops this one."""
    coming = await (here.replica() if program is None else here.replica(program=program))
    here.balancer.servers.remove(leaving)
    await stop_gracefully(leaving)
    return coming


@asynccontextmanager
async def mixed_site(cluster: Cluster, kube: Kube, directory: Path, rollout: Rollout) -> AsyncIterator[Site]:
    """A node of each injection, without a process yet."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(device_classes(kube, GPU_DRIVER, DRIVER))
        here = await stack.enter_async_context(
            site(cluster, kube, directory, nodes=len(NODE_OF), gpus=GPUS, name="roll", flags=rollout.flags)
        )
        stack.push_async_callback(cleared, kube, here.nodes)
        for injection, node in NODE_OF.items():
            if injection != rollout.default:
                await kube.patch(NODES, node, {"metadata": {"labels": {INJECTION: injection}}})
        await kube.create(RESOURCE_SLICES, slice_of_gpus(WITH_CLAIMS, gpus_of(WITH_CLAIMS)))
        yield here


def gpus_of(node: str) -> list[str]:
    return [f"GPU-{node}-{number}" for number in range(GPUS)]


@define(eq=False)
class Tenants:
    """The pods of each injection, in a namespace of its own."""

    here: Site
    workloads: dict[str, Workload]
    plugins: DevicePlugins

    async def create_lasting(self, name: str) -> None:
        await asyncio.gather(*(one.create_lasting(name) for one in self.workloads.values()))

    async def stage(self, count: int) -> None:
        """Pods of all injections are created, bound and end."""
        await asyncio.gather(
            *(action for one in self.workloads.values() for action in (one.create(count), one.more_are_bound(count)))
        )

    def faults(self) -> list[str]:
        own = (fault for one in self.workloads.values() for fault in one.faults())
        return [*own, *self.plugins.faults, *self._given_others()]

    def _given_others(self) -> Iterator[str]:
        for name, uuids in self.plugins.given.items():
            recorded = self.workloads["plugin"].seen.pods[name].gpus
            if recorded and recorded != frozenset(uuids):
                yield f"{name} was given {uuids}, and {recorded} are recorded"

    async def hold_what_runs(self) -> bool:
        """Whether exactly the GPUs of live pods are reserved or claimed, and those that were given are recorded."""
        held = {slot.rpartition("/")[0] for slot in await self.here.held()}
        live = {name: set(await self._live(name)) for name in self.workloads}
        claims = await self.here.kube.list(RESOURCE_CLAIMS, self.workloads["dra"].namespace)
        owners = [owner["name"] for one in claims if is_allocated(one) for owner in one["metadata"]["ownerReferences"]]
        given = {uuid for name in live.get("plugin", ()) for uuid in self.plugins.given.get(name, ("none",))}
        gpus = self.here.checker.gpus
        return held == gpus and sorted(owners) == sorted(live["dra"]) and given <= gpus

    async def _live(self, injection: str) -> list[str]:
        pods = await self.here.kube.list(PODS, self.workloads[injection].namespace)
        return [one["metadata"]["name"] for one in pods if one["status"].get("phase") not in ENDED]


def is_allocated(claim: Raw) -> bool:
    return "allocation" in claim.get("status", {})


@asynccontextmanager
async def tenants(here: Site, rollout: Rollout) -> AsyncIterator[Tenants]:
    async with AsyncExitStack() as stack:
        workloads = {}
        for seed, injection in enumerate(rollout.injections):
            namespace = await stack.enter_async_context(emptied_namespace(here.kube, OPT_IN))
            is_reserved = rollout.is_reserved(injection)
            one = await stack.enter_async_context(workload(here, namespace, seed, is_reserved=is_reserved))
            if injection != rollout.default:
                await one.change_injection(injection)
            workloads[injection] = one
        plugin = workloads.get("plugin")
        gpus = {node: gpus_of(node) for node in here.nodes}
        plugins = DevicePlugins(here.kube, plugin.namespace if plugin is not None else here.namespace, gpus)
        await stack.enter_async_context(running_tasks(plugins.run()))
        yield Tenants(here, workloads, plugins)


async def cleared(kube: Kube, nodes: Iterable[str]) -> None:
    await remove_slices(kube, *nodes)
    for node in nodes:
        with suppress(ApiError):
            await kube.delete(NODE_EVIDENCES, node)


@pytest.mark.parametrize("rollout", [*SHORT, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)], ids=named)
async def test_upgrade_and_rollback_assign_no_gpu_twice_and_lose_no_reservation(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest, rollout: Rollout
) -> None:
    old = unpacked(rollout.before, tmp_path)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(mixed_site(cluster, kube, tmp_path, rollout))
        before, now = manifests_before(here, old), manifests_now(here)
        stack.push_async_callback(apply, kube, (), gone=guards_of([*before, *now]))
        await apply(kube, before, gone=now)
        account = await stack.enter_async_context(reconciler_account(here, cluster))
        first, second, leader = await asyncio.gather(
            here.replica(program=old), here.replica(program=old), here.reconciler(account, program=old)
        )
        await here.wait_until_reviewed()
        await wait_until(lambda: proof_devices(kube, WITH_CLAIMS), lambda found: len(found) == GPUS)
        pods = await stack.enter_async_context(tenants(here, rollout))
        await pods.create_lasting("before")
        await pods.stage(rollout.pods)
        await apply(kube, now)
        first = await replace_replica(here, first, None)  # one of each version serves, the old one reconciles
        await pods.stage(rollout.pods)
        await stop_gracefully(leader)
        leader = await here.reconciler(account)
        await pods.create_lasting("between")
        await pods.stage(rollout.pods)
        second = await replace_replica(here, second, None)  # upgraded
        await pods.stage(rollout.pods)
        await apply(kube, before, gone=now)
        first = await replace_replica(here, first, old)  # and back
        await stop_gracefully(leader)
        leader = await here.reconciler(account, program=old)
        await pods.stage(rollout.pods)
        await replace_replica(here, second, old)
        await pods.stage(rollout.pods)
        await wait_until(pods.hold_what_runs, seconds=PATIENCE)
        here.checker.assert_no_violations()
        assert pods.faults() == []
        tallies = [one.storm.tally for one in pods.workloads.values()]
        report_figures(
            request,
            **{f"pods_{name}": len(one.bound) for name, one in pods.workloads.items()},
            refused=dict(sum((tally.why for tally in tallies), Counter())),
            unclear=[words for tally in tallies for words in tally.unclear][:3],
        )
        await apply(kube, now)  # deleted when the site ends


def guards_of(manifests: Iterable[Raw]) -> list[Raw]:
    """The manifests that the end of the site does not delete."""
    known = {one["metadata"]["name"] for one in (*while_down(Installation()), *webhooks(Installation()))}
    return [one for one in manifests if one["metadata"]["name"] not in known]
