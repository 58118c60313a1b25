"""`gpuwarden audit` on a real API server, with a read-only account."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.builders import HASH, Raw
from tests.e2e.cluster_users import grant
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import (
    NAMESPACES,
    PODS,
    SERVICE_ACCOUNTS,
    STATEFUL_SETS,
    Kube,
    pod,
    stateful_set,
    wait_until,
)
from tests.e2e.processes import OPT_IN, Site, site
from tests.e2e.test_ledger import GPU_NODES
from tests.running import GPUWARDEN, Running, reconciling

READS = [
    {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list"]},
    {"apiGroups": ["apps"], "resources": ["statefulsets"], "verbs": ["list"]},
    {"apiGroups": ["gpuwarden.io"], "resources": ["gpunodes", "nodeevidences"], "verbs": ["list"]},
]


@frozen
class Auditor:
    """An account that may list what an audit reads."""

    here: Site
    kubeconfig: Path

    async def audit(self, *flags: str) -> tuple[int, list[Raw], str]:
        """The exit status, the findings in the test's own namespaces and nodes, and stderr."""
        process = await asyncio.create_subprocess_exec(
            GPUWARDEN,
            "audit",
            "-o",
            "json",
            "--kubeconfig",
            str(self.kubeconfig),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        found = json.loads(out)["findings"] if out else []
        return process.returncode or 0, found, err.decode()


@pytest.fixture
async def auditor(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Auditor]:
    flags = ("--node-hash-map", json.dumps({"audit-0": HASH}))
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=3, name="audit", replicas=1, flags=flags) as here,
        AsyncExitStack() as stack,
    ):
        name = f"auditor-{here.own_namespace}"
        await kube.create(SERVICE_ACCOUNTS, {"metadata": {"name": "auditor"}}, here.own_namespace)
        subject = {"kind": "ServiceAccount", "name": "auditor", "namespace": here.own_namespace}
        await grant(kube, stack, name, READS, subject)
        content = json.loads(cluster.kubeconfig.read_text())
        token = await asyncio.to_thread(cluster.service_account_token, here.own_namespace, "auditor")
        content["users"][0]["user"] = {"token": token}
        kubeconfig = tmp_path / "auditor.kubeconfig"
        kubeconfig.write_text(json.dumps(content))
        yield Auditor(here, kubeconfig)


def ours(found: list[Raw], *namespaces: str) -> set[tuple[str, str]]:
    """Other tests leave objects in the same cluster."""
    return {(one["kind"], one["object"]) for one in found if one["namespace"] in namespaces}


async def gauge(running: Running, kind: str) -> float:
    """The value of a reconciler's gauge."""
    async with httpx.AsyncClient(base_url=running.urls["http"], trust_env=False) as client:
        text = (await client.get("/metrics")).text
    found = re.search(rf'^gpuwarden_audit_findings{{kind="{kind}"}} ([0-9.]+)$', text, re.MULTILINE)
    return float(found[1]) if found else -1


async def test_audit_finds_objects_that_bypassed_the_webhooks_and_changes_nothing(
    auditor: Auditor, kube: Kube, tmp_path: Path
) -> None:
    here = auditor.here
    good = await kube.create(
        PODS, pod("good", gpus=1, annotations={"gpuwarden.io/required-hash": HASH}), here.namespace
    )
    uuid = good["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
    await wait_until(lambda: kube.get(PODS, "good", here.namespace), lambda seen: seen["spec"].get("nodeName"))
    async with new_namespace(kube) as namespace:
        env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
        cheat = pod("variable")
        cheat["spec"]["containers"][0]["env"] = env
        image = pod("image")
        image["spec"]["containers"][0]["env"] = [{"name": "CUDA_VERSION", "value": "12.4"}]
        forged = pod(
            "forged",
            annotations={
                "gpuwarden.io/claim": '{"gpus":1,"containers":["main"]}',
                "gpuwarden.io/reservation-id": "nobodys",
                "gpuwarden.io/node": "audit-0",
                "gpuwarden.io/gpu-uuid": uuid,
            },
            nodeName="audit-0",
        )
        strong = pod("strong", hostPID=True)
        for one in (pod("resource", gpus=1), cheat, image, forged, strong, pod("plain")):
            await kube.create(PODS, one, namespace)
        mapped = stateful_set("mapped", 0, annotations={"gpu-scheduling-map": "0=audit-0:0"})
        await kube.create(STATEFUL_SETS, mapped, namespace)
        _, found, _ = await auditor.audit()
        apart = {"GpuTwice", "UnknownReservation", "NodeWithoutEvidence"}
        assert {kind for kind, _ in ours(found, namespace)} <= apart, "no finding before the namespace opts in"

        await kube.patch(NAMESPACES, namespace, {"metadata": {"labels": dict(OPT_IN)}})
        versions = await here.versions()
        status, found, said = await auditor.audit("--require-evidence", "asked")
        assert status == 1
        assert said.count("pods judged without their PersistentVolumes") == 1, "the auditor may not list them"
        assert ours(found, namespace) >= {
            ("GpuWithoutReservation", f"pod {namespace}/resource"),
            ("GpuWithoutReservation", f"pod {namespace}/variable"),
            ("ContainerNotBlinded", f"pod {namespace}/image"),
            ("PodNotIsolated", f"pod {namespace}/strong"),
            ("UnknownReservation", f"pod {namespace}/forged"),
            ("MapWithoutLabel", f"statefulset {namespace}/mapped"),
        }
        assert not any("plain" in name for _, name in ours(found, namespace))
        twice = next(one for one in found if one["kind"] == "GpuTwice" and uuid in one["message"])
        assert (twice["node"], f"{namespace}/forged" in json.dumps(twice)) == ("audit-0", True)
        # No reconciler runs here, so the evidence of the node is not stored.
        assert ours(found, here.namespace) >= {("NodeWithoutEvidence", f"pod {here.namespace}/good")}
        assert await here.versions() == versions
        (tmp_path / "reconcile").mkdir()
        flags = ["--kubeconfig", str(here.kubeconfig), "--lease-namespace", here.own_namespace]
        with reconciling(tmp_path / "reconcile", flags) as running:
            await wait_until(lambda: gauge(running, "GpuWithoutReservation"), lambda number: number >= 2)
            assert await gauge(running, "MapWithoutLabel") >= 1
            assert await gauge(running, "PodNotIsolated") >= 1


async def test_audit_finds_a_reservation_without_a_pod(auditor: Auditor, kube: Kube) -> None:
    held = {
        "GPU-audit-0-2/0": {
            "reservation": "left-behind",
            "phase": "finalized",
            "namespace": auditor.here.namespace,
            "digest": "d",
            "pod": "gone",
            "uid": "00000000-0000-4000-8000-000000000077",
            "since": "2026-01-01T00:00:00Z",
        }
    }
    node = await kube.get(GPU_NODES, "audit-0")
    before = node.get("status", {}).get("held") or {}
    await kube.patch(GPU_NODES, "audit-0", {"status": {"held": {**before, **held}}}, subresource="status")
    _, found, _ = await auditor.audit("--require-evidence", "asked")
    assert ours(found, auditor.here.namespace) == {("ReservationWithoutPod", "reservation left-behind")}


async def test_audit_without_read_permission_exits_with_another_status(auditor: Auditor, kube: Kube) -> None:
    content = json.loads(auditor.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": "nobodys"}
    auditor.kubeconfig.write_text(json.dumps(content))
    status, found, said = await auditor.audit()
    assert (status, found, "cannot be listed: the API server answered 401" in said) == (2, [], True), said
