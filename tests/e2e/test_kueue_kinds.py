"""The reconciler and Kueue's kinds, without Kueue: they are missing, they come, and what is written is stored."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.admission.kueue.workloads import admission_check, pod_set, raw_check, raw_workload
from tests.e2e.kube import PODS, Kube, Raw, Resource, gone, pod, pod_in_phase, wait_until
from tests.e2e.processes import site
from tests.e2e.test_ledger import CRDS, is_established

GROUP = "kueue.x-k8s.io"
KINDS = {"workloads": "Workload", "admissionchecks": "AdmissionCheck", "resourceflavors": "ResourceFlavor"}
WORKLOADS, CHECKS = (
    Resource(f"apis/{GROUP}/v1beta2", name, is_namespaced=name == "workloads")
    for name in ("workloads", "admissionchecks")
)
OTHER = raw_check("Ready", name="other")
# The pause between two lists of a missing kind grows to half a minute.
SLOW = 90.0


def crd(plural: str) -> Raw:
    """As much of the schema as server-side apply needs."""
    lists = {"admissionChecks": "name", "conditions": "type"}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    status = {
        **anything,
        "properties": {
            name: {
                "type": "array",
                "items": {**anything, "properties": {key: {"type": "string"}}, "required": [key]},
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": [key],
            }
            for name, key in lists.items()
        },
    }
    version = {
        "name": "v1beta2",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": status}}},
        "subresources": {"status": {}},
    }
    kind = KINDS[plural]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": GROUP,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "scope": "Namespaced" if plural == "workloads" else "Cluster",
            "versions": [version],
        },
    }


@asynccontextmanager
async def kinds_of_kueue(kube: Kube) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for plural in KINDS:
            manifest = crd(plural)
            name = manifest["metadata"]["name"]
            await kube.create(CRDS, manifest)
            stack.push_async_callback(gone, kube, CRDS, name)
            stack.push_async_callback(kube.delete, CRDS, name)
            await wait_until(lambda name=name: is_established(kube, name))  # type: ignore[misc]  # bound now, not later
        yield


async def test_missing_kinds_hold_nothing_up_and_checks_are_answered_once_they_come(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    # The reconciler refuses what a review refuses, so both need the same limit of grace periods.
    flags = ("--kueue", "true", "--kueue-wait", "10m", "--max-grace", "30s", "--orphan-margin", "1s")
    async with site(cluster, kube, tmp_path, nodes=1, gpus=2, name="kinds", replicas=1, flags=flags) as here:
        await here.reconciler()
        await here.wait_until_offered()
        await kube.create(PODS, pod("plain", 1), here.namespace)
        await pod_in_phase(kube, here.namespace, "plain", "Running")
        async with kinds_of_kueue(kube):
            await kube.create(CHECKS, {**admission_check(active=False), "metadata": {"name": "proven"}})
            active = await wait_until(
                lambda: kube.get(CHECKS, "proven"), lambda one: one.get("status", {}).get("conditions"), SLOW
            )
            assert [(one["type"], one["status"]) for one in active["status"]["conditions"]] == [("Active", "True")]
            for name, gpus in (("small", 1), ("large", 2)):
                await submit(kube, here.namespace, raw_workload(name, pod_set(1, gpus), checks=(raw_check(), OTHER)))
            small = await answered(kube, here.namespace, "small")
            assert small == [
                {**raw_check("Ready", "1 GPU can be had"), "lastTransitionTime": small[0]["lastTransitionTime"]},
                OTHER,
            ]
            large = await answered(kube, here.namespace, "large")
            assert large[0]["state"] == "Pending"
            assert large[0]["message"].startswith("2 GPUs: 0 of")
            assert large[1] == OTHER


async def submit(kube: Kube, namespace: str, raw: Raw) -> None:
    now = datetime.now(UTC)  # noqa: TID251 - Kueue's time
    meta = {"name": raw["metadata"]["name"], "ownerReferences": []}
    made = await kube.create(WORKLOADS, {**raw, "metadata": meta}, namespace)
    made["status"] = raw["status"]
    made["status"]["conditions"][0]["lastTransitionTime"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    await kube.replace(WORKLOADS, made, namespace, subresource="status")


async def answered(kube: Kube, namespace: str, name: str) -> list[Raw]:
    found = await wait_until(
        lambda: kube.get(WORKLOADS, name, namespace), lambda one: one["status"]["admissionChecks"][0]["message"], SLOW
    )
    checks: list[Raw] = found["status"]["admissionChecks"]
    return checks
