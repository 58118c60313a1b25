"""A tenant with the role `edit` in an opted-in namespace tries to reach GPUs without variables: by privileges, host
paths, volumes. No gpuwarden server runs here. `gpuwarden audit` agrees with the policy on each pod."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from attrs import frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_gpu_variables import GUARDED, OLDER, Harness, container, new_harness
from tests.e2e.cluster_users import grant, resource_of
from tests.e2e.kube import (
    CLAIMS,
    NAMESPACES,
    PODS,
    VOLUMES,
    ApiError,
    Kube,
    Raw,
    delete_without_finalizers,
    gone,
    pod,
    wait_until,
)
from tests.e2e.test_ledger import installed
from tests.running import GPUWARDEN
from webhook.admission.audit import AuditRules, Facts, FindingKind, findings
from webhook.admission.placement_maps import opted_in
from webhook.core import keys
from webhook.core.claim import ClaimRules
from webhook.core.dress import DressRules
from webhook.core.injection import Injection
from webhook.core.isolation import is_isolated
from webhook.kube.install.policies import NAMESPACE, Installation, policies
from webhook.runtime.clock import utc_now

EXEMPT = {"gpuwarden.io/isolation": "none"}
ALLOWED = ("/data", "/mnt/datasets")


def reading(*host_paths: str) -> AuditRules:
    return AuditRules(ClaimRules(), DressRules(Injection.NVIDIA, "nvidia.com/gpu"), host_paths)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(Kube(cluster.kubeconfig))
        for manifest in policies(Installation(host_paths=ALLOWED)):
            await kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        rule: Raw = {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["*"]}
        await grant(kube, stack, "provisioner", [rule], {"kind": "User", "name": "provisioner"})
        async with new_harness(cluster, kube, GUARDED) as harness, Kube(cluster.as_user("provisioner")) as provisioner:
            await wait_until(lambda: acts(harness, provisioner), seconds=20)
        yield kube


async def acts(harness: Harness, provisioner: Kube) -> bool:
    """Each policy starts to act about a second after it is written."""
    named = await harness.made(pod("probe"), dryRun="All")
    is_blinded = named["spec"]["containers"][0].get("env") is not None
    is_isolated = await is_refused(harness.made(with_host_path("/dev"), dryRun="All"))
    is_guarded = await is_refused(provisioner.create(VOLUMES, local_volume("/dev"), dryRun="All"))
    return is_blinded and is_isolated and is_guarded


async def is_refused(what: Awaitable[Raw]) -> bool:
    try:
        await what
    except ApiError as exc:
        return exc.status == 403
    return False


@frozen
class PolicyAndAuditHarness(Harness):
    """Checks each pod with the policy and with the audit, which must agree."""

    reading: AuditRules

    async def made(self, content: Raw, **options: str) -> Raw:
        return await self._compare_with_audit(super().made(content, **options), content)

    async def debugged(self, name: str, *debuggers: Raw) -> Raw:
        stored = await self.kube.get(PODS, name, self.namespace)
        wanted = {**stored, "spec": {**stored["spec"], "ephemeralContainers": list(debuggers)}}
        return await self._compare_with_audit(super().debugged(name, *debuggers), wanted)

    async def _compare_with_audit(self, request: Awaitable[Raw], content: Raw) -> Raw:
        refusal = None
        try:
            stored = await request
        except ApiError as exc:
            refusal = exc
        if refusal is None:
            assert await self._audit_denies(stored) == ()
            return stored
        # Policies do not see pods that the API server finds invalid.
        if refusal.status == 403:
            found = await self._audit_denies(content)
            assert found, refusal.message
            assert found[0] in refusal.message
        raise refusal

    async def _audit_denies(self, content: Raw) -> tuple[str, ...]:
        namespace = await self.kube.get(NAMESPACES, self.namespace)
        pod = self.reading.pod({**content, "metadata": {**content["metadata"], "namespace": self.namespace}})
        ours = {self.namespace} if opted_in(namespace, keys.OPT_IN.name) else set()
        isolated = ours if is_isolated(namespace, NAMESPACE) else set()
        facts = Facts([pod] if pod else [], (), ours, isolated)
        found = [
            one for one in findings(facts, utc_now(), needs_evidence=False) if one.kind is FindingKind.POD_NOT_ISOLATED
        ]
        return pod.exposed if pod and found else ()


def with_audit(harness: Harness, host_paths: tuple[str, ...] = ALLOWED) -> Harness:
    return PolicyAndAuditHarness(harness.kube, harness.tenant, harness.namespace, reading(*host_paths))


async def refused(what: Awaitable[Raw], *words: str) -> None:
    with pytest.raises(ApiError) as caught:
        await what
    assert caught.value.status == 403, caught.value.message
    assert "denied request: " in caught.value.message, caught.value.message
    for word in words:
        assert word in caught.value.message


@pytest_asyncio.fixture(loop_scope="module", params=[GUARDED, OLDER, GUARDED | OLDER], ids=["new", "older", "both"])
async def any_harness(request: pytest.FixtureRequest, cluster: Cluster, kube: Kube) -> AsyncIterator[Harness]:
    async with new_harness(cluster, kube, request.param) as harness:
        yield with_audit(harness)


@pytest_asyncio.fixture(loop_scope="module")
async def harness(cluster: Cluster, kube: Kube) -> AsyncIterator[Harness]:
    async with new_harness(cluster, kube, GUARDED) as harness:
        yield with_audit(harness)


def of_container(members: Raw, group: str = "containers", **spec: Any) -> Raw:
    made = pod("a", **spec)
    made["spec"][group] = [*made["spec"].get(group, ()), container("hostile", **members)]
    return made


def with_host_path(path: str, *, read_only: bool = True, **source: Any) -> Raw:
    mounts = [{"name": "host", "mountPath": "/host", "readOnly": read_only}]
    volumes = [{"name": "host", "hostPath": {"path": path, **source}}]
    return of_container({"volumeMounts": mounts}, volumes=volumes)


def local_volume(path: str, kind: str = "local") -> Raw:
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node-0"]}]}
    spec: Raw = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        kind: {"path": path},
    }
    if kind == "local":
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [term]}}
    return {"metadata": {"name": "hostile"}, "spec": spec}


def adding(*names: str) -> Raw:
    return {"securityContext": {"capabilities": {"add": list(names)}}}


STRONG: dict[str, Raw] = {
    "privileged": {"securityContext": {"privileged": True}},
    "SYS_ADMIN": adding("SYS_ADMIN"),
    "SYS_ADMIN among others": adding("NET_ADMIN", "SYS_ADMIN"),
    "in lower case": adding("sys_admin"),
    "with its prefix": adding("CAP_SYS_ADMIN"),
    "both": adding("cap_sys_admin"),
    "ALL": adding("ALL"),
    "all": adding("all"),
    **{name: adding(name) for name in ("SYS_MODULE", "SYS_BOOT", "SYS_RAWIO", "BPF", "DAC_READ_SEARCH")},
}


@pytest.mark.parametrize("group", ["containers", "initContainers"])
@pytest.mark.parametrize("members", STRONG.values(), ids=STRONG)
async def test_container_that_could_open_devices_is_refused(harness: Harness, members: Raw, group: str) -> None:
    await refused(harness.made(of_container(members, group)), f"spec.{group}[hostile].securityContext")


async def test_namespace_opts_in_by_either_label(any_harness: Harness) -> None:
    for content in (of_container(STRONG["SYS_ADMIN"]), with_host_path("/dev/nvidia0"), pod("a", hostPID=True)):
        await refused(any_harness.made(content))


@pytest.mark.parametrize("members", STRONG.values(), ids=STRONG)
async def test_debug_container_that_could_open_devices_is_refused(harness: Harness, members: Raw) -> None:
    await harness.made(pod("a", schedulerName="nobody"))
    await refused(harness.debugged("a", container("hostile", **members)), "spec.ephemeralContainers[hostile]")


async def test_pod_that_sees_the_processes_of_its_node_is_refused(harness: Harness) -> None:
    await refused(harness.made(pod("a", hostPID=True)), "spec.hostPID")


# Paths of devices, sockets, programs and secrets of the node.
PLACES = (
    "/",
    "//",
    "/.",
    "/dev",
    "/dev/",
    "//dev",
    "/./dev",
    "/dev/.",
    "/dev/nvidia0",
    "/dev/null",
    "/proc",
    "/proc/driver/nvidia",
    "/sys",
    "/sys/fs/cgroup",
    "/run",
    "/run/containerd/containerd.sock",
    "/run/nvidia/driver",
    "/var",
    "/var/run",
    "/var/run/nvidia-container-devices/all",
    "/var/lib",
    "/var/lib/kubelet",
    "/var/lib/kubelet/device-plugins/kubelet.sock",
    "/var/lib/containerd",
    "/var/lib/crio",
    "/var/lib/etcd",
    "/var/lib/minikube/certs",
    "/var/lib/rancher",
    "/var/lib/rancher/k3s/server",
    "/var/lib/rancher/rke2/server",
    "/var/snap/microk8s/current/credentials",
    "/var/snap/microk8s/7234/credentials",
    "/etc",
    "/etc/cdi",
    "/etc/kubernetes/manifests",
    "/usr",
    "/usr/lib/x86_64-linux-gnu",
    "/home",
    "/opt",
    "/opt/cni/bin",
    "/opt/nri/plugins",
    "/srv/kubernetes",
    "/sysroot/ostree/deploy/fedora/var/lib/kubelet",
)
# Tenants can write here through PersistentVolumes, so each path below could be a link to `/run`.
WRITABLE = ("/opt/local-path-provisioner/pvc-1/link", "/var/lib/rancher/k3s/storage/pvc-1/link", "/var/openebs/a/link")


OUTSIDE = (*PLACES, *WRITABLE, "/devices", "/mnt", "/mnt/datasets2", "/data2", "//data")


@pytest.mark.parametrize("path", OUTSIDE)
async def test_host_path_that_is_not_allowed_is_refused(harness: Harness, path: str) -> None:
    await refused(harness.made(with_host_path(path)), "spec.volumes[host].hostPath")
    # Refused also if no container mounts it: a debug container could.
    await refused(harness.made(pod("b", volumes=[{"name": "host", "hostPath": {"path": path}}])))


async def test_host_path_with_parent_references_is_refused(cluster: Cluster, kube: Kube, harness: Harness) -> None:
    """The API server refuses these itself, and the policies rely on it."""
    for tried in (
        harness.made(with_host_path("/data/../dev")),
        kube.create(VOLUMES, local_volume("/var/lib/rancher/k3s/storage/../server", "hostPath"), dryRun="All"),
        kube.create(VOLUMES, local_volume("/var/lib/rancher/k3s/storage/../server"), dryRun="All"),
    ):
        with pytest.raises(ApiError, match=r"must not contain '\.\.'"):
            await tried


DEVICE_TYPES = ("Socket", "CharDevice", "BlockDevice")


@pytest.mark.parametrize("kind", DEVICE_TYPES)
async def test_host_path_to_a_socket_or_device_is_refused(harness: Harness, kind: str) -> None:
    await refused(harness.made(with_host_path("/data/x", type=kind)))


async def test_allowed_host_path_cannot_be_mounted_for_writing(harness: Harness) -> None:
    """The runtime follows links when it mounts: a tenant who may write a directory could link from there to `/run`."""
    await refused(harness.made(with_host_path("/data", read_only=False)), "not readOnly")
    # A second container or a debug container cannot write it either.
    content = with_host_path("/data")
    await harness.made({**content, "spec": {**content["spec"], "schedulerName": "nobody"}})
    writer = container("writer", volumeMounts=[{"name": "host", "mountPath": "/host"}])
    await refused(harness.debugged("a", writer), "spec.ephemeralContainers[writer]", "not readOnly")


INSIDE = ("/data", "/data/", "/data//a", "/data/./a", "/mnt/datasets", "/mnt/datasets/a")


@pytest.mark.parametrize("path", INSIDE)
async def test_allowed_host_path_can_be_mounted_for_reading(harness: Harness, path: str) -> None:
    await harness.made(with_host_path(path), dryRun="All")


async def test_no_host_path_is_allowed_by_default(cluster: Cluster, kube: Kube) -> None:
    async with new_harness(cluster, kube, GUARDED) as harness:
        async with replaced(kube, Installation()):
            await wait_until(lambda: is_refused(harness.made(with_host_path("/data"), dryRun="All")))
            await refused(with_audit(harness, ()).made(with_host_path("/mnt/datasets")), "spec.volumes[host].hostPath")
        await wait_until(lambda: is_let_in(harness, with_host_path("/data")))


@asynccontextmanager
async def replaced(kube: Kube, installation: Installation) -> AsyncIterator[None]:
    """Replaces the policy for pods by that of another installation."""

    async def write(installation: Installation) -> None:
        found = next(one for one in policies(installation) if one["metadata"]["name"] == "gpuwarden-isolation")
        await kube.patch(resource_of(found), "gpuwarden-isolation", {"spec": found["spec"]})

    await write(installation)
    try:
        yield
    finally:
        await write(Installation(host_paths=ALLOWED))


HARMLESS: tuple[Raw, ...] = (
    adding("NET_ADMIN", "SYS_PTRACE", "MKNOD", "SYS_NICE", "IPC_LOCK"),
    {"securityContext": {"privileged": False, "capabilities": {"drop": ["ALL"]}}},
    {"volumeMounts": [{"name": "own", "mountPath": "/own"}]},
)


async def test_harmless_pods_are_allowed(harness: Harness) -> None:
    for members in HARMLESS:
        await harness.made(of_container(members, volumes=[{"name": "own", "emptyDir": {}}]), dryRun="All")


# Annotations with which runtimes and their plugins inject devices and host paths.

INJECTING = (
    "devices.nri.io",
    "devices.nri.io/pod",
    "devices.nri.io/container.hostile",
    "mounts.nri.io",
    "mounts.nri.io/container.hostile",
    "cdi-devices.nri.io",
    "cdi-devices.nri.io/pod",
    "cdi-devices.nri.io/container.hostile",
    "cdi.nri.io/container.hostile",
    "devices.noderesource.dev",
    "devices.noderesource.dev/pod",
    "devices.noderesource.dev/container.hostile",
    "mounts.noderesource.dev/container.hostile",
    "cdi-devices.noderesource.dev",
    "cdi-devices.noderesource.dev/container.hostile",
    "devices.gke.io/container.hostile",
    "io.kubernetes.cri-o.Devices",
    "devices.crio.io",
    "org.systemd.property.DeviceAllow",
    "org.systemd.property.DevicePolicy",
)


def annotated(name: str, value: str = "- nvidia.com/gpu=all") -> Raw:
    made = pod("a", schedulerName="nobody")
    made["metadata"]["annotations"] = {name: value}
    return made


@pytest.mark.parametrize("name", INJECTING)
async def test_annotation_that_injects_devices_is_refused(harness: Harness, name: str) -> None:
    await refused(harness.made(annotated(name)), f"metadata.annotations[{name}]")
    await harness.made(pod("a", schedulerName="nobody"))
    later = {"metadata": {"annotations": {name: "- nvidia.com/gpu=all"}}}
    await refused(harness.tenant.patch(PODS, "a", later, harness.namespace), f"metadata.annotations[{name}]")
    await refused(harness.kube.patch(PODS, "a", later, harness.namespace, "status"), f"metadata.annotations[{name}]")


OTHER_ANNOTATIONS = (
    "example.test/devices.nri.io",
    "netdevices.nri.io/pod",
    "devices.nri.iox",
    "cpu-quota.crio.io",
    "org.systemd.property.CollectMode",
)


@pytest.mark.parametrize("name", OTHER_ANNOTATIONS)
async def test_other_runtime_annotations_are_allowed(harness: Harness, name: str) -> None:
    await harness.made(annotated(name), dryRun="All")


async def test_existing_annotation_can_stay_and_cannot_be_changed(cluster: Cluster, kube: Kube) -> None:
    name = "devices.nri.io/pod"
    async with new_harness(cluster, kube, {}) as harness:
        await harness.made(annotated(name))
        await kube.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": GUARDED}})
        await wait_until(lambda: is_refused(harness.made(annotated(name), dryRun="All")))
        await harness.tenant.patch(PODS, "a", {"metadata": {"labels": {"a": "b"}}}, harness.namespace)
        changed = {"metadata": {"annotations": {name: "- path: /dev/nvidia1"}}}
        await refused(harness.tenant.patch(PODS, "a", changed, harness.namespace), name)
        await harness.tenant.patch(PODS, "a", {"metadata": {"annotations": {name: None}}}, harness.namespace)


# PersistentVolumes.


PROVISIONED = (
    "/mnt/disks/a",
    "/opt/local-path-provisioner/pvc-1",
    "/var/lib/rancher/k3s/storage/pvc-1",
    "/var/local-path-provisioner/pvc-1",
    "/var/openebs/local",
    "/var/snap/microk8s/common/default-storage/pvc-1",
    "/tmp/hostpath-provisioner/pvc-1",  # noqa: S108 - of nodes
)


@pytest.mark.parametrize("kind", ["hostPath", "local"])
@pytest.mark.parametrize("path", [*PLACES, "/var/lib/kubelet/pods"])
async def test_volume_with_a_sensitive_path_needs_manage_permission(
    cluster: Cluster, kube: Kube, path: str, kind: str
) -> None:
    async with Kube(cluster.as_user("provisioner")) as provisioner:
        await refused(provisioner.create(VOLUMES, local_volume(path, kind), dryRun="All"), "provisioner")
    await kube.create(VOLUMES, local_volume(path, kind), dryRun="All")


@pytest.mark.parametrize("path", PROVISIONED)
async def test_provisioners_can_create_volumes(cluster: Cluster, kube: Kube, path: str) -> None:
    async with Kube(cluster.as_user("provisioner")) as provisioner:
        for kind in ("hostPath", "local"):
            await provisioner.create(VOLUMES, local_volume(path, kind), dryRun="All")


# Exempt namespaces, and existing pods.


async def test_only_administrators_can_exempt_a_namespace(cluster: Cluster, kube: Kube) -> None:
    async with new_harness(cluster, kube, GUARDED) as harness:
        with pytest.raises(ApiError) as caught:
            await harness.tenant.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": EXEMPT}})
        assert caught.value.status == 403
        await kube.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": EXEMPT}})
        privileged = of_container(STRONG["privileged"])
        await wait_until(lambda: is_let_in(harness, privileged))
        exposed = (pod("b", hostPID=True), with_host_path("/dev", read_only=False), annotated("devices.nri.io/pod"))
        for content in (privileged, *exposed):
            await with_audit(harness).made(content, dryRun="All")


async def is_let_in(harness: Harness, content: Raw) -> bool:
    return not await is_refused(harness.made(content, dryRun="All"))


async def test_other_namespaces_are_not_affected(cluster: Cluster, kube: Kube) -> None:
    async with new_harness(cluster, kube, {}) as harness:
        for content in (of_container(STRONG["privileged"]), with_host_path("/dev", read_only=False)):
            await with_audit(harness).made(content, dryRun="All")


async def test_existing_pod_can_run_change_status_and_be_deleted(cluster: Cluster, kube: Kube) -> None:
    async with new_harness(cluster, kube, {}) as harness:
        before = with_host_path("/dev", read_only=False)
        before["spec"] |= {"hostPID": True, "schedulerName": "nobody"}
        before["spec"]["containers"][0] |= STRONG["privileged"]
        await harness.made(before)
        await kube.patch(NAMESPACES, harness.namespace, {"metadata": {"labels": GUARDED}})
        await wait_until(lambda: is_refused(harness.made(pod("b", hostPID=True), dryRun="All")))
        held = {"metadata": {"labels": {"a": "b"}, "finalizers": ["example.test/hold"]}}
        await kube.patch(PODS, "a", held, harness.namespace)
        ready = {"status": {"conditions": [{"type": "Mine", "status": "True"}]}}
        await kube.patch(PODS, "a", ready, harness.namespace, "status")
        debugged = await harness.debugged("a", container("harmless"))
        mount = container("d", volumeMounts=[{"name": "host", "mountPath": "/host", "readOnly": True}])
        await refused(
            harness.debugged("a", *debugged["spec"]["ephemeralContainers"], mount),
            "spec.ephemeralContainers[d].volumeMounts",
        )
        await kube.delete(PODS, "a", harness.namespace, grace=0)
        await kube.patch(PODS, "a", {"metadata": {"finalizers": None}}, harness.namespace)
        await gone(kube, PODS, "a", harness.namespace)


# The audit of stored pods.


def tried() -> Iterator[Raw]:
    """The pods of this module that the API server can store."""
    for members in STRONG.values():
        yield from (of_container(members, group) for group in ("containers", "initContainers"))
    yield pod("a", hostPID=True)
    for path in OUTSIDE:
        yield with_host_path(path)
        yield pod("a", volumes=[{"name": "host", "hostPath": {"path": path}}])
    yield from (with_host_path("/data/x", type=kind) for kind in DEVICE_TYPES)
    yield with_host_path("/data", read_only=False)
    yield from (with_host_path(path) for path in INSIDE)
    yield from (annotated(name) for name in (*INJECTING, *OTHER_ANNOTATIONS))
    for members in HARMLESS:
        yield of_container(members, volumes=[{"name": "own", "emptyDir": {}}])


# Only some of the paths, because each volume waits until it is bound.
VOLUME_PLACES = ("/", "/dev", "//dev/", "/var/run", "/var/lib/rancher/k3s/server", "/var/lib/kubelet/pods")


def stored_as(name: str, content: Raw) -> Raw:
    meta = {**content["metadata"], "name": name}
    return {**content, "metadata": meta, "spec": {**content["spec"], "schedulerName": "nobody"}}


async def bound_volume(kube: Kube, stack: AsyncExitStack, namespace: str, name: str, volume: Raw) -> None:
    """Creates the volume and its claim, both with the pod's name."""
    reference = {"namespace": namespace, "name": name}
    meta, spec = {"name": f"{namespace}-{name}"}, {**volume["spec"], "claimRef": reference}
    await kube.create(VOLUMES, {"metadata": meta, "spec": spec})
    stack.push_async_callback(delete_without_finalizers, kube, VOLUMES, meta["name"])
    asked = {"storageClassName": "local", "volumeName": meta["name"], "accessModes": ["ReadWriteOnce"]}
    claim = {"metadata": {"name": name}, "spec": {**asked, "resources": {"requests": {"storage": "1Gi"}}}}
    await kube.create(CLAIMS, claim, namespace)
    await wait_until(lambda: kube.get(VOLUMES, meta["name"]), lambda one: one["status"].get("phase") == "Bound")


async def not_isolated(cluster: Cluster, *namespaces: str) -> set[str]:
    """The pods that `gpuwarden audit` reports."""
    command = [GPUWARDEN, "audit", "-o", "json", "--kubeconfig", str(cluster.kubeconfig)]
    command += ["--host-paths", ",".join(ALLOWED)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    found = [one for one in json.loads(out)["findings"] if one["kind"] == "PodNotIsolated"]
    assert process.returncode == (1 if found else 0)
    return {one["object"].rpartition("/")[2] for one in found if one["namespace"] in namespaces}


async def test_audit_finds_stored_pods_that_the_policies_would_refuse(cluster: Cluster, kube: Kube) -> None:
    await installed(kube)
    async with (
        new_harness(cluster, kube, {}) as before,
        new_harness(cluster, kube, GUARDED) as harness,
        new_harness(cluster, kube, GUARDED | EXEMPT) as exempt,
        Kube(cluster.as_user("provisioner")) as provisioner,
        AsyncExitStack() as stack,
    ):
        expected, numbers = set(), count()
        for content in tried():
            name = f"p{next(numbers)}"
            await before.made(stored_as(name, content))
            if await is_refused(harness.made(stored_as(name, content), dryRun="All")):
                expected.add(name)
        await before.made(stored_as("debugged", pod("a")))
        await before.debugged("debugged", container("hostile", **STRONG["SYS_ADMIN"]))
        expected.add("debugged")
        for path in (*VOLUME_PLACES, *PROVISIONED):
            for kind in ("hostPath", "local"):
                name, volume = f"v{next(numbers)}", local_volume(path, kind)
                await bound_volume(kube, stack, before.namespace, name, volume)
                source = {"name": "data", "persistentVolumeClaim": {"claimName": name}}
                await before.made(stored_as(name, pod("a", volumes=[source])))
                if await is_refused(provisioner.create(VOLUMES, volume, dryRun="All")):
                    expected.add(name)
        await exempt.made(stored_as("exempt", of_container(STRONG["privileged"])))
        assert await not_isolated(cluster, before.namespace, exempt.namespace) == set()
        await kube.patch(NAMESPACES, before.namespace, {"metadata": {"labels": GUARDED}})
        assert await not_isolated(cluster, before.namespace, exempt.namespace) == expected
    assert len(expected) > 2 * len(OUTSIDE) + len(STRONG) + len(VOLUME_PLACES)
