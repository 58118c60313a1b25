"""The kube-scheduler beside `serve`: what is rendered of it."""

import pytest
import yaml

from tests.chart.rendering import Raw, of_kind, one, rendered
from tests.chart.test_values import PEM

ON: Raw = {"scheduler.enabled": True}
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"


def pod_of(found: list[Raw], name: str = "gpuwarden") -> Raw:
    spec: Raw = one(found, "Deployment", name)["spec"]["template"]["spec"]
    return spec


def containers(found: list[Raw], name: str = "gpuwarden") -> dict[str, Raw]:
    return {each["name"]: each for each in pod_of(found, name)["containers"]}


def configuration(found: list[Raw], name: str = "gpuwarden-scheduler") -> Raw:
    content: Raw = yaml.safe_load(one(found, "ConfigMap", name)["data"]["config.yaml"])
    return content


def test_without_it_the_pod_is_as_it_was() -> None:
    found = rendered()
    assert list(containers(found)) == ["serve"]
    assert "initContainers" not in pod_of(found)
    assert not [each for each in found if "scheduler" in each["metadata"]["name"]]


OLDER = {"release": "gpu-scheduler", "namespace": "gpu-scheduler-system"}
# The two installs of the older chart's README, with their values as docs/moving/binder.md translates them.
SCHEDULER_ONLY: Raw = {**ON, "nameOverride": "gpu-scheduler", "webhooks.enabled": False}
FULL: Raw = {
    **ON,
    "nameOverride": "gpu-scheduler",
    "tls.mode": "existingSecret",
    "tls.existingSecret": "gpu-scheduler-webhook-tls",
    "tls.caBundle": PEM,
}


@pytest.mark.parametrize("values", [SCHEDULER_ONLY, FULL], ids=["scheduler-only", "scheduler-and-webhook"])
def test_an_install_of_the_older_chart_has_its_pod_and_its_port(values: Raw) -> None:
    found = rendered(values, **OLDER)
    assert containers(found, "gpu-scheduler").keys() == {"scheduler", "webhook"}
    service = one(found, "Service", "gpu-scheduler")["spec"]
    assert 8080 in {port["port"] for port in service["ports"]}
    labels = one(found, "Deployment", "gpu-scheduler")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "gpu-scheduler"
    assert service["selector"].items() <= labels.items()
    hooks = of_kind(found, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    assert bool(hooks) == (values is FULL)
    assert configuration(found, "gpu-scheduler-scheduler")["profiles"] == [{"schedulerName": "gpu-scheduler"}]


def test_the_profile_asks_us_about_every_pod_that_names_it_and_waits_for_us() -> None:
    content = configuration(rendered({**ON, "scheduler.name": "mine"}, namespace="guard"))
    assert content["profiles"] == [{"schedulerName": "mine"}]
    lease = {"resourceName": "gpuwarden-scheduler", "resourceNamespace": "guard"}
    assert content["leaderElection"] == {"leaderElect": True, "resourceLock": "leases", **lease}
    (extender,) = content["extenders"]
    assert extender["urlPrefix"] == "https://127.0.0.1:8445"
    assert (extender["ignorable"], extender["enableHTTPS"], extender["nodeCacheCapable"]) == (False, True, True)
    assert extender.keys() & {"managedResources", "bindVerb"} == set()
    assert all(extender["tlsConfig"][name] for name in ("caFile", "certFile", "keyFile"))


@pytest.mark.parametrize(
    ("kubernetes", "values", "image"),
    [
        ("1.36.3", {}, "registry.k8s.io/kube-scheduler:v1.36.3"),
        ("v1.35.1+k3s1", {}, "registry.k8s.io/kube-scheduler:v1.35.1"),
        ("v1.34.2-gke.1000", {}, "registry.k8s.io/kube-scheduler:v1.34.2"),
        ("1.36.3", {"scheduler.image.tag": "v1.36.1"}, "registry.k8s.io/kube-scheduler:v1.36.1"),
        ("1.36.3", {"scheduler.image.repository": "mirror.example.org/k"}, "mirror.example.org/k:v1.36.3"),
        (
            "1.36.3",
            {"scheduler.image.digest": "sha256:" + "a" * 64},
            "registry.k8s.io/kube-scheduler@sha256:" + "a" * 64,
        ),
    ],
)
def test_its_version_is_the_clusters_unless_said(kubernetes: str, values: Raw, image: str) -> None:
    found = rendered({**ON, **values}, kubernetes=kubernetes)
    assert containers(found)["scheduler"]["image"] == image


def test_each_container_has_its_own_account() -> None:
    found = rendered(ON)
    spec, ours = pod_of(found), containers(found)
    token = one(found, "Secret", "gpuwarden-scheduler-token")
    assert token["type"] == "kubernetes.io/service-account-token"
    assert token["metadata"]["annotations"]["kubernetes.io/service-account.name"] == "gpuwarden-scheduler"
    (volume,) = (each for each in spec["volumes"] if each["name"] == "scheduler-token")
    assert volume["secret"]["secretName"] == "gpuwarden-scheduler-token"
    mounted = {name: {each["name"]: each["mountPath"] for each in one["volumeMounts"]} for name, one in ours.items()}
    assert mounted["scheduler"]["scheduler-token"] == TOKENS  # so the account of the Pod is not mounted there
    assert "scheduler-token" not in mounted["webhook"]
    assert spec["serviceAccountName"] == "gpuwarden"
    bound = {
        (each["kind"], each["roleRef"]["name"]): {subject["name"] for subject in each["subjects"]}
        for each in of_kind(found, "ClusterRoleBinding", "RoleBinding")
        if "scheduler" in each["metadata"]["name"]
    }
    assert bound == {
        ("ClusterRoleBinding", "system:kube-scheduler"): {"gpuwarden-scheduler"},
        ("ClusterRoleBinding", "system:volume-scheduler"): {"gpuwarden-scheduler"},
        ("RoleBinding", "gpuwarden-scheduler"): {"gpuwarden-scheduler"},
        ("RoleBinding", "gpuwarden-scheduler-health"): {"gpuwarden"},
    }


def test_a_scheduler_that_does_not_work_leaves_the_webhook_ready() -> None:
    """All containers of a Pod have to be ready for it to be called: this one has no probe that asks for a Lease."""
    beside = containers(rendered(ON))["scheduler"]
    assert beside.keys() & {"readinessProbe", "startupProbe"} == set()
    assert beside["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "scheduler", "scheme": "HTTPS"}


def test_a_pod_that_waits_for_the_scheduler_is_woken() -> None:
    rules = one(rendered(ON), "ClusterRole", "gpuwarden-reconcile")["rules"]
    assert any("patch" in rule["verbs"] and "pods" in rule["resources"] for rule in rules)
