"""Pods that could open devices of their node. tests/e2e/attacks/test_isolation.py compares the results with the
policies."""

from typing import Any

import pytest

from webhook.core.isolation import is_isolated, is_protected_path, refusals, refused_volume, without_prefix

Raw = dict[str, Any]


STORAGE = "/var/lib/rancher/k3s/storage"


@pytest.mark.parametrize(
    "path",
    ["/", "", "//dev", "/./dev/", "/dev/nvidia0", "/var", "/var/run/x", "/var/lib/rancher/k3s", f"{STORAGE}2"],
)
def test_volume_path_that_overlaps_a_protected_path_is_denied(path: str) -> None:
    assert is_protected_path(path)


@pytest.mark.parametrize(
    "path", ["/devices", "/data", "/mnt/dev", "/var/lib/datasets", "/optional", STORAGE, f"{STORAGE}/a"]
)
def test_volume_path_outside_of_protected_paths_is_allowed(path: str) -> None:
    assert not is_protected_path(path)


@pytest.mark.parametrize(
    ("source", "is_outside"),
    [
        ({"path": "/data"}, False),
        ({"path": "/data/"}, False),
        ({"path": "/data//a"}, False),
        ({"path": "/data/x", "type": "Directory"}, False),
        ({"path": "/data/x", "type": "Socket"}, True),
        ({"path": "//data"}, True),
        ({"path": "/data2"}, True),
        ({"path": "/"}, True),
        ({"path": "/mnt"}, True),
    ],
    ids=lambda one: one["path"] if isinstance(one, dict) else "",
)
def test_host_path_is_allowed_inside_of_a_directory_that_an_administrator_allows(source: Raw, is_outside: bool) -> None:
    raw = a_pod(volumes=[{"name": "host", "hostPath": source}])
    said = ["spec.volumes[host].hostPath: not in a directory that an administrator allows"]
    assert refusals(raw, ("/data", "/mnt/a"), {}) == (said if is_outside else [])
    assert refusals(raw, (), {}) == said


@pytest.mark.parametrize(
    ("written", "read"),
    [("sys_admin", "SYS_ADMIN"), ("CAP_BPF", "BPF"), ("cap_all", "ALL"), ("sys_adm\u0131n", "SYS_ADM\u0131N")],
    ids=["lower", "prefix", "both", "not-ascii"],
)
def test_capability_is_parsed_as_the_policy_does(written: str, read: str) -> None:
    assert without_prefix(written) == read


def a_pod(**spec: Any) -> Raw:
    return {"metadata": {"name": "a", "namespace": "ml"}, "spec": spec}


def test_refusals_have_the_texts_and_order_of_the_policy() -> None:
    strong = {"privileged": True, "capabilities": {"add": ["NET_ADMIN", "cap_bpf", "ALL"]}}
    mounts = [{"name": "host", "mountPath": "/host", "readOnly": True}]
    writes = [{"name": "data", "mountPath": "/data"}]
    raw = a_pod(
        hostPID=True,
        containers=[{"name": "c", "volumeMounts": mounts}, {"name": "d", "volumeMounts": writes}],
        initContainers=[{"name": "i", "securityContext": strong}],
        ephemeralContainers=[{"name": "e", "securityContext": {"privileged": True}}],
        volumes=[{"name": "host", "hostPath": {"path": "/dev"}}, {"name": "data", "hostPath": {"path": "/data"}}],
    )
    assert refusals(raw, ("/data",), {}) == [
        "spec.hostPID",
        "spec.initContainers[i].securityContext.privileged",
        "spec.ephemeralContainers[e].securityContext.privileged",
        "spec.initContainers[i].securityContext.capabilities.add: cap_bpf",
        "spec.volumes[host].hostPath: not in a directory that an administrator allows",
        "spec.containers[c].volumeMounts: a hostPath that is not readOnly, or that no administrator allows",
        "spec.containers[d].volumeMounts: a hostPath that is not readOnly, or that no administrator allows",
    ]


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("devices.nri.io", True),
        ("devices.nri.io/container.c", True),
        ("io.kubernetes.cri-o.Devices", True),
        ("devices.nri.iox", False),
        ("example.test/devices.nri.io", False),
    ],
)
def test_annotation_that_injects_devices_is_refused(name: str, is_refused: bool) -> None:
    raw = {"metadata": {"annotations": {name: "x", "other": None}}}
    said = f"metadata.annotations[{name}]: a runtime may inject devices or paths of the node by it"
    assert refusals(raw, (), {}) == ([said] if is_refused else [])


def test_plain_pod_has_no_refusals() -> None:
    for raw in ({}, a_pod(), a_pod(containers=None, volumes=[{"name": "x", "emptyDir": {}}])):
        assert refusals(raw, (), {("ml", ""): "/dev"} if raw == {} else {}) == []


@pytest.mark.parametrize(
    ("source", "claim"),
    [({"persistentVolumeClaim": {"claimName": "c"}}, "c"), ({"ephemeral": {"volumeClaimTemplate": {}}}, "a-data")],
    ids=["claim", "ephemeral"],
)
def test_claim_bound_to_a_protected_path_is_denied_in_its_namespace(source: Raw, claim: str) -> None:
    raw = a_pod(volumes=[{"name": "data", **source}])
    said = [f"spec.volumes[data]: the PersistentVolume of claim {claim} leads to /dev"]
    assert refusals(raw, (), {("ml", claim): "/dev"}) == said
    assert refusals(raw, (), {("other", claim): "/dev"}) == []


def volume(phase: str = "Bound", **spec: Any) -> Raw:
    return {"spec": {"claimRef": {"namespace": "ml", "name": "c"}, **spec}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (volume(hostPath={"path": "/dev"}), (("ml", "c"), "/dev")),
        (volume(local={"path": "/var/run"}), (("ml", "c"), "/var/run")),
        (volume(local={"path": "/mnt/disks/a"}), None),
        (volume(csi={"driver": "x"}), None),
        (volume("Released", hostPath={"path": "/dev"}), None),
        (volume("Available", hostPath={"path": "/dev"}, claimRef=None), None),
        ({"spec": 7}, None),
    ],
    ids=["hostPath", "local", "elsewhere", "csi", "released", "no-claim", "odd"],
)
def test_protected_volume_is_found_by_its_bound_claim(raw: Raw, found: Any) -> None:
    assert refused_volume(raw) == found


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("ml", {}, True),
        ("ml", {"gpuwarden.io/isolation": "none"}, False),
        ("ml", {"gpuwarden.io/isolation": "None"}, True),
        ("kube-system", {}, False),
        ("gpuwarden", {}, False),
    ],
    ids=["tenant", "exempt", "another-value", "system", "our-own"],
)
def test_all_namespaces_are_isolated_except_exempt_system_and_own(
    name: str, labels: dict[str, str], expected: bool
) -> None:
    assert is_isolated({"metadata": {"name": name, "labels": labels}}, "gpuwarden") is expected
