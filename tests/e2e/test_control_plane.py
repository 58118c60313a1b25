"""The test cluster itself: what the other tests of this directory rely on."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from scripts.controlplane.build import read_pins
from scripts.controlplane.cluster import ROOT, Cluster, gpu_node
from scripts.controlplane.components import COMPONENTS
from scripts.controlplane.processes import State
from tests.e2e.conftest import GPUS, NODES
from tests.e2e.kube import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    STATEFUL_SETS,
    ApiError,
    Kube,
    deployment,
    gone,
    job,
    pod,
    pod_in_phase,
    pods_in_phase,
    stateful_set,
    wait_until,
)
from tests.e2e.kube import NODES as NODE_OBJECTS

# Nodes and pods.


async def test_nodes_are_ready_with_their_gpus(kube: Kube) -> None:
    nodes = {node["metadata"]["name"]: node for node in await kube.list(NODE_OBJECTS)}
    assert set(NODES) <= set(nodes)
    for name in NODES:
        assert nodes[name]["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)
        assert "taints" not in nodes[name]["spec"]


async def test_version_is_the_pinned_one(kube: Kube) -> None:
    assert (await kube.call("GET", "/version"))["gitVersion"] in {one.version for one in read_pins().modules}


async def test_a_pod_is_scheduled_and_runs(kube: Kube, namespace: str) -> None:
    made = await kube.create(PODS, pod("a", gpus=2), namespace)
    assert made["status"]["phase"] == "Pending"
    running = await pod_in_phase(kube, namespace, "a", "Running")
    assert running["spec"]["nodeName"] in NODES
    assert running["status"]["containerStatuses"][0]["state"].keys() == {"running"}
    assert running["status"]["podIP"]


async def test_a_pod_that_fits_nowhere_waits(kube: Kube, namespace: str) -> None:
    await kube.create(PODS, pod("big", gpus=GPUS + 1), namespace)
    events = await wait_until(lambda: kube.list(EVENTS, namespace, fieldSelector="reason=FailedScheduling"))
    assert "Insufficient nvidia.com/gpu" in events[0]["message"]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_pod_ends_in_the_requested_phase(kube: Kube, namespace: str, phase: str) -> None:
    annotations = {"kubelet.test/ends": phase, "kubelet.test/runs-for": "1s"}
    await kube.create(PODS, pod("a", annotations=annotations, restartPolicy="Never"), namespace)
    await pod_in_phase(kube, namespace, "a", "Running")
    await pod_in_phase(kube, namespace, "a", phase)


async def test_pod_starts_after_the_requested_delay(kube: Kube, namespace: str) -> None:
    started = time.monotonic()
    await kube.create(PODS, pod("a", annotations={"kubelet.test/starts-after": "2s"}), namespace)
    await pod_in_phase(kube, namespace, "a", "Running")
    assert time.monotonic() - started > 1.9


async def test_a_terminating_pod_stays_as_long_as_its_containers_do(kube: Kube, namespace: str) -> None:
    await kube.create(PODS, pod("a", annotations={"kubelet.test/stops-after": "grace"}), namespace)
    await pod_in_phase(kube, namespace, "a", "Running")
    asked = time.monotonic()
    await kube.delete(PODS, "a", namespace, grace=4)
    await asyncio.sleep(1)
    terminating = await kube.get(PODS, "a", namespace)
    assert terminating["metadata"]["deletionTimestamp"]
    assert terminating["status"]["phase"] == "Running"
    await gone(kube, PODS, "a", namespace)
    assert time.monotonic() - asked > 2.9  # deletionTimestamp is in whole seconds


async def test_a_pod_of_a_node_that_is_not_ready_waits(kube: Kube, cluster: Cluster, namespace: str) -> None:
    cluster.add_nodes([gpu_node("node-flaky", 1)])
    try:
        await kube.patch(NODE_OBJECTS, "node-flaky", {"metadata": {"annotations": {"kubelet.test/ready": "false"}}})
        await wait_until(lambda: kube.get(NODE_OBJECTS, "node-flaky"), lambda node: node["spec"].get("taints"))
        chosen = {"kubernetes.io/hostname": "node-flaky"}
        await kube.create(PODS, pod("a", nodeSelector=chosen), namespace)
        await wait_until(lambda: kube.list(EVENTS, namespace, fieldSelector="reason=FailedScheduling"))
        await kube.patch(NODE_OBJECTS, "node-flaky", {"metadata": {"annotations": {"kubelet.test/ready": None}}})
        await pod_in_phase(kube, namespace, "a", "Running")
    finally:
        await kube.delete(NODE_OBJECTS, "node-flaky")


# Controllers.


async def test_a_job_completes_and_is_collected(kube: Kube, namespace: str) -> None:
    await kube.create(JOBS, job("train", pods=3, gpus=1), namespace)
    done = await wait_until(
        lambda: kube.get(JOBS, "train", namespace), lambda found: found["status"].get("succeeded") == 3
    )
    assert {one["type"] for one in done["status"]["conditions"]} >= {"Complete"}
    await kube.patch(JOBS, "train", {"spec": {"ttlSecondsAfterFinished": 0}}, namespace)
    await gone(kube, JOBS, "train", namespace)
    await pods_in_phase(kube, namespace, 0, "")


async def test_the_pods_of_a_deployment_are_collected_after_it(kube: Kube, namespace: str) -> None:
    await kube.create(DEPLOYMENTS, deployment("web", 3), namespace)
    await pods_in_phase(kube, namespace, 3, "Running")
    await kube.delete(DEPLOYMENTS, "web", namespace)
    await pods_in_phase(kube, namespace, 0, "")


async def test_a_stateful_set_replaces_its_pod_under_the_same_name(kube: Kube, namespace: str) -> None:
    await kube.create(STATEFUL_SETS, stateful_set("db", 2), namespace)
    first = await pods_in_phase(kube, namespace, 2, "Running")
    assert [one["metadata"]["name"] for one in first] == ["db-0", "db-1"]
    await kube.delete(PODS, "db-0", namespace)
    await wait_until(
        lambda: kube.find(PODS, "db-0", namespace),
        lambda found: found and found["metadata"]["uid"] != first[0]["metadata"]["uid"],
    )


async def test_a_watch_shows_the_life_of_a_pod(kube: Kube, namespace: str) -> None:
    annotations = {"kubelet.test/ends": "Succeeded"}
    phases: list[str] = []
    async with asyncio.timeout(30):
        await kube.create(PODS, pod("a", annotations=annotations, restartPolicy="Never"), namespace)
        async for event in kube.watch(PODS, namespace, fieldSelector="metadata.name=a"):
            phase = event["object"]["status"]["phase"]
            if event["type"] == "DELETED":
                break
            if phase not in phases:
                phases.append(phase)
                if phase == "Succeeded":
                    await kube.delete(PODS, "a", namespace)
    assert phases == ["Pending", "Running", "Succeeded"] or phases == ["Running", "Succeeded"]


# Authorization.


async def test_a_user_may_do_what_rbac_allows(cluster: Cluster, kube: Kube, namespace: str) -> None:
    async with Kube(cluster.as_user("alice", ["developers"])) as alice:
        with pytest.raises(ApiError, match='403 Forbidden: pods is forbidden: User "alice" cannot list') as refused:
            await alice.list(PODS, namespace)
        assert refused.value.reason == "Forbidden"
        await allow(kube, namespace, {"kind": "Group", "name": "developers"})
        assert await wait_until(lambda: may_list_pods(alice, namespace))


async def may_list_pods(user: Kube, namespace: str) -> bool:
    """The authorizer reads roles by watch, so it is a moment late."""
    with suppress(ApiError):
        return await user.list(PODS, namespace) == []
    return False


async def allow(kube: Kube, namespace: str, subject: dict[str, str]) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    await kube.create(ROLES, {"metadata": {"name": "reader"}, "rules": rules}, namespace)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    content = {"metadata": {"name": "reader"}, "roleRef": role, "subjects": [subject]}
    await kube.create(ROLE_BINDINGS, content, namespace)


async def test_a_service_account_may_do_what_rbac_allows(cluster: Cluster, kube: Kube, namespace: str) -> None:
    async with Kube(cluster.service_account_kubeconfig(namespace, "robot")) as robot:
        with pytest.raises(ApiError, match=f'User "system:serviceaccount:{namespace}:robot" cannot list'):
            await robot.list(PODS, namespace)
        await allow(kube, namespace, {"kind": "ServiceAccount", "name": "robot", "namespace": namespace})
        assert await wait_until(lambda: may_list_pods(robot, namespace))


async def test_token_for_another_audience_is_refused(cluster: Cluster, kube: Kube, namespace: str) -> None:
    kubeconfig = cluster.service_account_kubeconfig(namespace, "robot", audience="gpuwarden")
    async with Kube(kubeconfig) as robot:
        with pytest.raises(ApiError, match="401"):
            await robot.list(PODS, namespace)
    token = json.loads(kubeconfig.read_text())["users"][0]["user"]["token"]
    asked = {"spec": {"token": token, "audiences": ["gpuwarden"]}}
    seen = (await kube.call("POST", "/apis/authentication.k8s.io/v1/tokenreviews", asked))["status"]
    assert (seen["authenticated"], seen["user"]["username"]) == (True, f"system:serviceaccount:{namespace}:robot")


async def test_the_built_in_roles_are_aggregated(kube: Kube) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1/clusterroles/view"
    assert await wait_until(lambda: kube.call("GET", path), lambda role: role["rules"])


async def test_kubectl_sees_the_same_cluster(cluster: Cluster, kube: Kube, namespace: str) -> None:
    command = [*cluster.kubectl, f"--namespace={namespace}", "apply", "--dry-run=server", "-f", "-"]
    done = await asyncio.to_thread(run, command, json.dumps(pod("a")))
    assert (done.stdout, done.returncode) == ("pod/a created (server dry run)\n", 0), done.stderr
    assert await kube.list(PODS, namespace) == []


def run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False, timeout=120)


# Injected failures.


async def test_a_restarted_api_server_has_the_same_objects_at_the_same_address(
    cluster: Cluster, kube: Kube, namespace: str
) -> None:
    made = await kube.create(CONFIG_MAPS, {"metadata": {"name": "kept"}, "data": {"a": "b"}}, namespace)
    await asyncio.to_thread(cluster.restart, "kube-apiserver")
    async with Kube(cluster.kubeconfig) as again:
        assert again.url == kube.url
        assert await again.get(CONFIG_MAPS, "kept", namespace) == made
        await again.create(PODS, pod("a"), namespace)
        await pod_in_phase(again, namespace, "a", "Running")


async def test_a_paused_etcd_holds_writes_up_until_it_is_resumed(cluster: Cluster, kube: Kube, namespace: str) -> None:
    cluster.pause("etcd")
    try:
        assert cluster.status()["etcd"] is State.PAUSED
        async with Kube(cluster.kubeconfig, timeout=2) as hurried:
            with pytest.raises((httpx.TimeoutException, ApiError)):
                await hurried.create(CONFIG_MAPS, {"metadata": {"name": "lost"}}, namespace)
    finally:
        cluster.resume("etcd")
    made = await kube.create(CONFIG_MAPS, {"metadata": {"name": "kept"}}, namespace)
    assert made["metadata"]["uid"]


async def test_cluster_works_again_after_a_killed_component_is_restarted(
    cluster: Cluster, kube: Kube, namespace: str
) -> None:
    cluster.kill("kube-scheduler")
    assert cluster.status()["kube-scheduler"] is State.GONE
    await kube.create(PODS, pod("a"), namespace)
    await asyncio.sleep(1)
    assert "nodeName" not in (await kube.get(PODS, "a", namespace))["spec"]
    await asyncio.to_thread(cluster.restart, "kube-scheduler")
    await pod_in_phase(kube, namespace, "a", "Running")


# Start and end of the cluster.

OWNER = """
import sys, time
from pathlib import Path
from scripts.controlplane.cluster import Cluster
with Cluster(Path(sys.argv[1])) as cluster:
    cluster.api().post("/api/v1/namespaces", json={"metadata": {"name": "kept"}}).raise_for_status()
    print("up", flush=True)
    time.sleep(600)
"""


def listens(url: str) -> bool:
    port = int(url.rpartition(":")[2])
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_killed_owner_leaves_data_and_no_processes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        orphaned = Cluster(tmp_path)
        assert orphaned.status() == dict.fromkeys(COMPONENTS, State.RUNNING)
        records, url = list(orphaned.processes.records().values()), orphaned.url
        owner.send_signal(signal.SIGKILL)
    until = time.monotonic() + 30
    while orphaned.status():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [record.state for record in records] == [State.GONE] * len(COMPONENTS)
    assert not listens(url)

    assert command("up", tmp_path, "--nodes=1", "--gpus=2", "--flag=kube-apiserver=--event-ttl=10m").returncode == 0
    try:
        again = Cluster(tmp_path)
        assert "--event-ttl=10m" in again.processes.records()["kube-apiserver"].command
        with again.api() as api:
            assert api.get("/api/v1/namespaces/kept").status_code == 200
            assert api.get("/api/v1/nodes/node-0").json()["status"]["allocatable"]["nvidia.com/gpu"] == "2"
        refused = command("up", tmp_path)
        assert (refused.returncode, refused.stderr) == (1, f"{tmp_path} is already running\n")
        shown = command("status", tmp_path).stdout
        assert re.findall(r"^  (\S+) +running", shown, re.MULTILINE) == list(COMPONENTS)
        assert f"export KUBECONFIG={again.kubeconfig}\n" in shown
    finally:
        assert command("down", tmp_path).returncode == 0
    assert command("status", tmp_path).stdout == command("down", tmp_path).stdout == f"nothing runs in {tmp_path}\n"
    assert not listens(again.url)


def command(word: str, directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "scripts.controlplane", word, "--dir", str(directory), *more])
