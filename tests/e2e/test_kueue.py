"""Kueue starts a Job once all its pods can have proven GPUs. With the real Kueue, whose build takes minutes."""

import base64
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from scripts import kueue as rig
from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import free_ports
from tests.e2e.kube import (
    JOBS,
    PODS,
    Kube,
    NotInTimeError,
    Raw,
    Resource,
    gone,
    job,
    pods_in_phase,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import RBAC, Site, Worker, site
from webhook.kube.install.policies import Installation, kueue, rbac

pytestmark = pytest.mark.long

GROUP = "apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = Resource(GROUP, "workloads")
LOCAL_QUEUES = Resource(GROUP, "localqueues")
CLUSTER_QUEUES = Resource(GROUP, "clusterqueues", is_namespaced=False)
FLAVORS = Resource(GROUP, "resourceflavors", is_namespaced=False)
CHECKS = Resource(GROUP, "admissionchecks", is_namespaced=False)
CONTROLLER = "gpuwarden.io/proven-gpus"
NAME = "proven"
HASH = "sha256:aa11"
PROVEN = {"gpuwarden.io/required-hash": HASH}
GPU = "gpuwarden.io/gpu-uuid"
LASTS = {"kubelet.test/runs-for": "10m"}
# For a busy machine.
SLOW = 90.0


# Kueue.


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster in which Kueue runs, as its installer leaves it."""
    directory = tmp_path_factory.mktemp("kueue")
    with Cluster(directory / "cluster") as running:
        (port,) = free_ports(1)
        kubectl(running, "create", "namespace", rig.NAMESPACE)
        for one in (service(port), secret(), *rig.webhooks(port), *rig.crds(port)):
            kubectl(running, "create", "-f", "-", content=one)
        process = rig.started(running.kubeconfig, rig.configuration(directory, port), directory / "kueue.log")
        try:
            mount_secret(running, directory / "certificates")
            wait_until_reviewed(running)
            yield running
        finally:
            process.terminate()
            process.wait(30)


def kubectl(cluster: Cluster, *arguments: str, content: Raw | None = None) -> str:
    text = None if content is None else json.dumps(content)
    done = subprocess.run([*cluster.kubectl, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def service(port: int) -> Raw:
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    meta = {"name": rig.SERVICE, "namespace": rig.NAMESPACE}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def secret() -> Raw:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": rig.SECRET, "namespace": rig.NAMESPACE}}


def mount_secret(cluster: Cluster, directory: Path) -> None:
    """Writes the Secret to files, as the kubelet does for a volume, once Kueue has filled it."""
    directory.mkdir()
    until = time.monotonic() + SLOW
    while time.monotonic() < until:
        found = json.loads(kubectl(cluster, "get", "secret", rig.SECRET, "-n", rig.NAMESPACE, "-o", "json"))
        if "tls.crt" in found.get("data", {}):
            for name, content in found["data"].items():
                (directory / name).write_bytes(base64.b64decode(content))
            return
        time.sleep(0.2)
    raise NotInTimeError("Kueue has issued no certificate")


def wait_until_reviewed(cluster: Cluster) -> None:
    """Waits until Kueue's webhooks answer."""
    probe = json.dumps(of_kueue("ResourceFlavor", "probe"))
    until = time.monotonic() + SLOW
    command = [*cluster.kubectl, "create", "--dry-run=server", "-f", "-"]
    while (done := subprocess.run(command, input=probe, capture_output=True, text=True)).returncode:
        if time.monotonic() > until:
            raise NotInTimeError(done.stderr)
        time.sleep(0.5)


def of_kueue(kind: str, name: str, **spec: Any) -> Raw:
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": {"name": name}, "spec": spec}


# The installation.


@define
class KueueSite:
    """Nodes with GPUs, a queue whose quota is larger than what they have, and a check of it."""

    here: Site
    kube: Kube
    account: Path

    @property
    def namespace(self) -> str:
        return self.here.namespace

    async def reconciler(self, *flags: str, proves: bool = True) -> Worker:
        """Starts a reconciler with the shipped rights. With `proves`, it knows evidence of each node."""
        before, proven = self.here.flags, json.dumps(dict.fromkeys(self.here.nodes, HASH))
        self.here.flags = (*before, *(("--node-hash-map", proven) if proves else ()), *flags)
        started = await self.here.reconciler(self.account)
        self.here.flags = before
        return started

    async def submit(self, name: str, pods: int, gpus: int, *, is_queued: bool = True, **members: Any) -> None:
        """Creates a Job in the queue. Its pods run for ten minutes."""
        annotations = {**LASTS, **PROVEN, **members.pop("annotations", {})}
        content = job(name, pods, gpus, annotations, **members)
        content["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": NAME} if is_queued else {}
        await self.kube.create(JOBS, content, self.namespace)

    async def end(self, name: str) -> None:
        await self.kube.delete(JOBS, name, self.namespace)
        await gone(self.kube, JOBS, name, self.namespace)

    async def runs(self, name: str, pods: int) -> list[Raw]:
        return await pods_in_phase(self.kube, self.namespace, pods, "Running", labelSelector=f"job-name={name}")

    async def workload(self, name: str) -> Raw:
        """The Workload of the Job."""
        found = await self.kube.list(WORKLOADS, self.namespace)
        return next((one for one in found if one["metadata"]["ownerReferences"][0]["name"] == name), {})

    async def check(self, name: str) -> Raw:
        status = (await self.workload(name)).get("status", {})
        return next(iter(status.get("admissionChecks", ())), {})

    async def is_suspended(self, name: str) -> bool:
        found = await self.kube.get(JOBS, name, self.namespace)
        return bool(found["spec"]["suspend"]) and not found["status"].get("active")

    async def wait_for_check(self, name: str, state: str, words: str = "") -> Raw:
        return await wait_until(
            lambda: self.check(name),
            lambda found: found.get("state") == state and words in found.get("message", ""),
            SLOW,
        )

    async def wait_for_eviction(self, name: str, words: str) -> Raw:
        """Waits until Kueue has taken the quota back because of the check."""
        found = await wait_until(
            lambda: self.workload(name),
            lambda one: any(words in each["message"] for each in evictions_in(one)),
            SLOW,
        )
        return evictions_in(found)[0]


def evictions_in(workload: Raw) -> list[Raw]:
    found = workload.get("status", {}).get("conditions", ())
    return [one for one in found if one["type"] == "Evicted" and one["reason"] == "AdmissionCheck"]


@asynccontextmanager
async def kueue_site(cluster: Cluster, kube: Kube, directory: Path, *, quota: int = 100) -> AsyncIterator[KueueSite]:
    """Two nodes with two GPUs each."""
    # The reconciler refuses what a review refuses, so both need the same limit of grace periods.
    flags = ("--when-unavailable", "queue", "--kueue", "true", "--max-grace", "30s", "--orphan-margin", "1s")
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(
            site(cluster, kube, directory, nodes=2, gpus=2, name="kueue", replicas=1, flags=flags)
        )
        rights = [
            one
            for one in (*rbac(Installation(here.own_namespace)), *kueue(Installation(here.own_namespace)))
            if one["kind"] in RBAC and one["metadata"]["name"] in ("gpuwarden-reconcile", "gpuwarden-kueue")
        ]
        for one in rights:
            of, meta = RBAC[one["kind"]], one["metadata"]
            await kube.create(of, one, meta.get("namespace"))
            stack.push_async_callback(kube.delete, of, meta["name"], meta.get("namespace"))
        account = cluster.service_account_kubeconfig(here.own_namespace, "gpuwarden-reconcile")
        made = KueueSite(here, kube, account)
        await stack.enter_async_context(kueue_objects(made, quota))
        yield made
        here.checker.assert_no_violations()


@asynccontextmanager
async def kueue_objects(there: KueueSite, quota: int) -> AsyncIterator[None]:
    kube, namespace = there.kube, there.namespace
    resources = [{"name": "nvidia.com/gpu", "nominalQuota": quota}]
    queue: Raw = {
        "namespaceSelector": {},
        "resourceGroups": [
            {"coveredResources": ["nvidia.com/gpu"], "flavors": [{"name": NAME, "resources": resources}]}
        ],
        "admissionChecksStrategy": {"admissionChecks": [{"name": NAME}]},
    }
    objects = (
        (FLAVORS, of_kueue("ResourceFlavor", NAME)),
        (CHECKS, of_kueue("AdmissionCheck", NAME, controllerName=CONTROLLER)),
        (CLUSTER_QUEUES, of_kueue("ClusterQueue", NAME, **queue)),
    )
    async with AsyncExitStack() as stack:
        for of, content in objects:
            await kube.create(of, content)
            stack.push_async_callback(gone, kube, of, NAME)
            stack.push_async_callback(kube.delete, of, NAME)
        await kube.create(LOCAL_QUEUES, of_kueue("LocalQueue", NAME, clusterQueue=NAME), namespace)
        stack.push_async_callback(gone, kube, LOCAL_QUEUES, NAME, namespace)
        stack.push_async_callback(kube.delete, LOCAL_QUEUES, NAME, namespace)
        stack.push_async_callback(remove_jobs, there)
        yield


async def remove_jobs(there: KueueSite) -> None:
    for one in await there.kube.list(JOBS, there.namespace):
        await there.end(one["metadata"]["name"])
    await wait_until(lambda: there.kube.list(WORKLOADS, there.namespace), lambda left: left == [], SLOW)


# The tests.


async def test_job_runs_on_proven_gpus_at_once(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with kueue_site(cluster, kube, tmp_path) as there:
        await there.reconciler()
        took: dict[bool, list[float]] = {True: [], False: []}
        for number in range(10):
            name, is_queued = f"train-{number}", number % 2 == 0
            took[is_queued].append(await seconds_until_bound(there, name, is_queued=is_queued))
            pods = await there.runs(name, 2)
            assert {uuid for one in pods for uuid in one["metadata"]["annotations"][GPU].split(",")} == there.here.gpus
            assert all("schedulingGates" not in one["spec"] for one in pods)
            if is_queued:
                assert (await there.check(name))["message"] == f"4 GPUs proven for {HASH} can be had"
            await there.end(name)
            await wait_until(there.here.held, lambda held: not held)
        with_kueue, without = sorted(took[True]), sorted(took[False])
        report_figures(request, with_kueue=with_kueue[2], longest=with_kueue[-1], without=without[2])
        assert with_kueue[0] < 2.0


async def seconds_until_bound(there: KueueSite, name: str, *, is_queued: bool) -> float:
    """From the creation of a Job to the last Binding of its two Pods."""
    begin = time.monotonic()
    await there.submit(name, pods=2, gpus=2, is_queued=is_queued)
    await wait_until(lambda: bound(there, name), lambda found: found == 2, SLOW)
    return time.monotonic() - begin


async def bound(there: KueueSite, name: str) -> int:
    pods = await there.kube.list(PODS, there.namespace, labelSelector=f"job-name={name}")
    return sum("nodeName" in one["spec"] for one in pods)


async def test_job_stays_suspended_without_evidence_and_runs_after_it_comes(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with kueue_site(cluster, kube, tmp_path) as there:
        first = await there.reconciler("--kueue-wait", "10m", proves=False)
        await there.submit("train", pods=2, gpus=1)
        found = await there.wait_for_check("train", "Pending", "0 of 2 pods can have their GPUs now")
        assert f"1 GPU on a node attested as {HASH}: 0 of 2 nodes fit: 2 have no evidence" in found["message"]
        assert await there.is_suspended("train")
        await first.kill()
        await there.reconciler("--kueue-wait", "10m")
        await there.runs("train", 2)


async def test_of_two_jobs_that_need_all_gpus_one_runs_after_the_other(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with kueue_site(cluster, kube, tmp_path) as there:
        await there.reconciler("--kueue-wait", "10m")
        for name in ("a", "b"):
            await there.submit(name, pods=4, gpus=1)
        states = await wait_until(
            lambda: states_of(there, "a", "b"), lambda seen: sorted(seen.values()) == ["Pending", "Ready"], SLOW
        )
        (first,) = (name for name, state in states.items() if state == "Ready")
        (second,) = (name for name, state in states.items() if state == "Pending")
        await there.runs(first, 4)
        await there.wait_for_check(second, "Pending", "0 of 4 pods can have their GPUs now")
        assert await there.is_suspended(second)
        await there.end(first)
        await there.runs(second, 4)


async def states_of(there: KueueSite, *names: str) -> dict[str, str]:
    return {name: (await there.check(name)).get("state", "") for name in names}


async def test_job_that_cannot_be_served_gives_its_quota_to_another_one(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """The quota is large enough for one of the two only."""
    async with kueue_site(cluster, kube, tmp_path, quota=4) as there:
        await there.reconciler("--kueue-wait", "2s")
        await there.submit("impossible", pods=4, gpus=1, annotations={"gpuwarden.io/required-hash": "sha256:other"})
        await there.wait_for_check("impossible", "Pending", "2 have a different hash")
        await there.submit("possible", pods=4, gpus=1)
        await there.wait_for_eviction("impossible", "2 have a different hash")
        await there.runs("possible", 4)
        await there.end("possible")
        retried = await wait_until(
            lambda: there.check("impossible"), lambda found: found.get("retryCount", 0) >= 2, SLOW
        )
        assert retried["state"] == "Pending"
        assert await there.is_suspended("impossible")


async def test_job_with_an_invalid_claim_is_rejected_with_its_mistakes(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with kueue_site(cluster, kube, tmp_path) as there:
        await there.reconciler()
        await there.submit("typo", pods=1, gpus=1, annotations={"gpuwarden.io/gpu-count": "many"})
        found = await wait_until(
            lambda: there.workload("typo"), lambda one: one.get("spec", {}).get("active") is False, SLOW
        )
        assert "'many' is not a whole number" in json.dumps(found["status"])
