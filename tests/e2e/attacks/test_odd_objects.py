"""Objects that any user can store: nested deeper than a reader can follow, or longer than a line. The module has its
own cluster: the tests' own readers would fail on them, too."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.kube import PODS, Kube, Raw, pod, template, wait_until
from tests.e2e.test_ledger import installed
from tests.running import Running, reconciling, serving

LEVELS = 1_500
OURS = "gpu-scheduler"
PODS_PATH = "/api/v1/namespaces/default/pods"
SETS_PATH = "/apis/apps/v1/namespaces/default/statefulsets"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as running:
        running.add_nodes([gpu_node("node-0", 1)])
        yield running


def nested(raw: Raw) -> bytes:
    """An object with deeply nested `managedFields`, built as text because encoders have a depth limit, too."""
    deep = '{"f:a":' * LEVELS + "{}" + "}" * LEVELS
    kept = {"manager": "x", "operation": "Update", "apiVersion": raw["apiVersion"], "fieldsType": "FieldsV1"}
    raw["metadata"]["managedFields"] = [{**kept, "time": "2026-01-01T00:00:00Z", "fieldsV1": "@@@"}]
    return json.dumps(raw).replace('"@@@"', deep).encode()


def deep_set() -> Raw:
    named = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "deep"}}
    labels = {"matchLabels": {"app": "x"}}
    return {
        **named,
        "spec": {"replicas": 0, "serviceName": "x", "selector": labels, "template": template("x", 0, None)},
    }


def long_pod() -> bytes:
    """In the store it has a sixth of its size in a watch: Go escapes these characters."""
    made = pod("long", schedulerName=OURS)
    made["spec"]["containers"][0]["env"] = [{"name": "X", "value": "<" * 1_000_000}]
    return json.dumps(made).encode()


async def created(kube: Kube, path: str, body: bytes) -> None:
    answer = await kube.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 201, answer.text[:1000]


@contextmanager
def all_processes(directory: Path, kubeconfig: Path, name: str) -> Iterator[list[Running]]:
    """Starts all processes; each is ready after its first lists."""
    where = ["--kubeconfig", str(kubeconfig), "--lease-namespace", "default"]
    with ExitStack() as stack:
        processes = []
        for command in ("serve", "reconcile"):
            place = directory / f"{name}-{command}"
            place.mkdir()
            process = serving(place, None, where) if command == "serve" else reconciling(place, where)
            processes.append(stack.enter_context(process))
        yield processes


async def bound(kube: Kube, name: str) -> None:
    await kube.create(PODS, pod(name), "default")
    await wait_until(lambda: kube.get(PODS, name, "default"), lambda seen: seen["spec"].get("nodeName") == "node-0")


async def works(running: Running) -> None:
    assert running.process.poll() is None, running.log.read_text()[-3000:]
    async with httpx.AsyncClient(base_url=running.urls["http"], trust_env=False) as client:
        assert (await client.get("/readyz")).status_code == 200


async def test_malformed_objects_do_not_stop_a_process_or_its_start(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    await installed(kube)
    with all_processes(tmp_path, cluster.kubeconfig, "first") as processes:
        await created(kube, PODS_PATH, nested(pod("deep", schedulerName=OURS)))
        await created(kube, SETS_PATH, nested(deep_set()))
        await created(kube, PODS_PATH, long_pod())
        assert len((await kube.http.get(f"{PODS_PATH}/long")).content) > 2**22  # aiohttp's limit for a line
        await bound(kube, "later")
        for one in processes:
            await works(one)
            one.process.kill()
            one.process.wait()
    with all_processes(tmp_path, cluster.kubeconfig, "second") as processes:
        await bound(kube, "last")
        for one in processes:
            await works(one)
