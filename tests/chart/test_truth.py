"""Generated parts of the chart equal their sources: manifests, alerts, metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import webhook
from scripts import chart_manifests, chart_values, routes
from scripts.chart_values import CHART
from tests.chart.rendering import Raw, identity, of_kind, one, rendered
from tests.chart.test_values import CHALLENGES
from tests.project.test_alerts import SERIES
from webhook.core import claim_keys
from webhook.kube.install import crds
from webhook.kube.install.policies import (
    DraGuard,
    Installation,
    certs,
    dra,
    export,
    is_guard,
    kueue,
    policies,
    rbac,
    score,
    webhooks,
    while_down,
)

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = {**chart_values.written(), **chart_manifests.written(), **routes.written()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_files_are_up_to_date(path: Path) -> None:
    assert path.read_text() == FILES[path], "run `make chart`"


def test_folder_of_generated_templates_has_no_other_files() -> None:
    assert {*chart_manifests.GENERATED.iterdir()} == {
        path for path in FILES if path.parent == chart_manifests.GENERATED
    }


def test_chart_has_the_version_of_the_package() -> None:
    content = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert content["appVersion"] == webhook.__version__


def bare(manifest: Raw) -> Raw:
    """The object without what only the chart adds."""
    meta = {key: value for key, value in manifest["metadata"].items() if key not in ("labels", "annotations")}
    return {**manifest, "metadata": meta}


def compared(found: list[Raw]) -> dict[tuple[str, str, str], Raw]:
    return {identity(each): bare(each) for each in found}


WEBHOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")


@pytest.mark.parametrize(
    "place",
    [("gpuwarden", "gpuwarden"), ("guard", "elsewhere")],
    ids=["as-shipped", "another-name-and-namespace"],
)
def test_rendered_webhooks_and_policies_equal_gpuwarden_manifests(place: tuple[str, str]) -> None:
    release, namespace = place
    found = rendered({"fullnameOverride": release}, release=release, namespace=namespace)
    installation = Installation(
        namespace=namespace,
        service=release,
        reconciler=f"{release}-reconcile",
        scheduler_account=f"{release}-scheduler",
        exporter=f"{release}-export",
        attester=f"{release}-attest",
    )
    expected = compared([*while_down(installation), *webhooks(installation), *policies(installation)])
    mine = [each for each in found if each["apiVersion"].startswith("admissionregistration.k8s.io/")]
    assert compared(mine) == expected


@pytest.mark.parametrize("names", [{}, {"settings.requiredHashAlias": "example.org/hash"}], ids=["as-shipped", "alias"])
def test_native_pods_are_installed_as_by_the_manifests(names: Raw) -> None:
    found = rendered({"native": True, **names})
    installation = Installation(native=True, hash_aliases=tuple(names.values()))
    expected = compared([*while_down(installation), *policies(installation)])
    mine = compared([each for each in found if each["apiVersion"].startswith("admissionregistration.k8s.io/")])
    assert {key: mine[key] for key in expected} == expected
    assert of_kind(found, *WEBHOOKS) == []
    assert "gpuwarden-binding-ends" not in {each["metadata"]["name"] for each in found}
    assert [each["metadata"]["name"] for each in of_kind(found, "DeviceClass")] == ["attested.gpuwarden.io"]
    content = yaml.safe_load(one(found, "ConfigMap", "gpuwarden-settings")["data"]["settings.yaml"])
    assert (content["proofDevices"], content["nativeTemplates"]) == (True, True)


def test_native_pods_work_without_serve() -> None:
    found = rendered({"native": True, "serve.enabled": False})
    assert [each["metadata"]["name"] for each in of_kind(found, "Deployment")] == ["gpuwarden-reconcile"]


def test_native_pods_are_off_by_default() -> None:
    found = rendered()
    assert "gpuwarden-native" not in {each["metadata"]["name"] for each in found}
    content = yaml.safe_load(one(found, "ConfigMap", "gpuwarden-settings")["data"]["settings.yaml"])
    assert content.keys().isdisjoint({"proofDevices", "nativeTemplates"})


def test_more_schedulers_are_added_to_the_manifests() -> None:
    found = rendered({"webhooks.moreSchedulers": ["system:serviceaccount:a:b"]})
    installation = Installation(schedulers=("system:kube-scheduler", "system:serviceaccount:a:b"))
    mine = [each for each in found if each["apiVersion"].startswith("admissionregistration.k8s.io/")]
    assert compared(mine) == compared([*while_down(installation), *webhooks(installation), *policies(installation)])


def test_host_paths_are_rendered_as_in_the_manifests() -> None:
    found = rendered({"policies.hostPaths": ["/data", "/mnt/datasets"]})
    expected = [one for one in policies(Installation(host_paths=("/data", "/mnt/datasets"))) if "isolation" in str(one)]
    mine = [each for each in found if each["apiVersion"].startswith("admissionregistration.k8s.io/")]
    assert compared(expected).items() <= compared(mine).items()
    content = yaml.safe_load(one(found, "ConfigMap", "gpuwarden-settings")["data"]["settings.yaml"])
    assert content["hostPaths"] == ["/data", "/mnt/datasets"], "an audit knows them too"


PROVEN: Raw = {"settings.proofDevices": True}


def of_dra(values: Raw) -> dict[tuple[str, str, str], Raw]:
    """What the chart renders in addition with proof devices."""
    plain, more = ({identity(each): bare(each) for each in rendered(said)} for said in (values, {**values, **PROVEN}))
    kinds = ("DeviceClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    return {name: each for name, each in more.items() if name[0] in kinds and name not in plain}


@pytest.mark.parametrize("guard", DraGuard)
def test_class_and_policies_of_proof_devices_are_rendered_with_the_setting(guard: DraGuard) -> None:
    classes = ("nic.example.org", "fpga.example.org")
    found = of_dra(
        {"dra.guard": str(guard), "dra.deviceClasses": list(classes), "settings.gpuDriver": "gpu.example.org"}
    )
    assert found == compared(dra(Installation(dra_guard=guard, device_classes=classes, gpu_driver="gpu.example.org")))


def test_policies_of_proof_devices_have_the_names_of_the_release() -> None:
    label = {"webhooks.optInLabel": "example.org/guarded", "webhooks.moreSchedulers": ["system:second"]}
    schedulers = ("system:kube-scheduler", "system:second")
    assert of_dra(label) == compared(dra(Installation(opt_in="example.org/guarded", schedulers=schedulers)))


def test_guards_leave_out_excluded_namespaces() -> None:
    for guard in DraGuard:
        found = of_dra({"dra.guard": str(guard), "webhooks.excludedNamespaces": ["storage"]})
        selectors = [one["spec"]["matchResources"]["namespaceSelector"] for one in found.values() if is_guard(one)]
        assert selectors
        for selector in selectors:
            assert ["kube-system", "gpuwarden", "storage"] in [each["values"] for each in selector["matchExpressions"]]


@pytest.mark.parametrize(
    "values",
    [
        {"policies.protect": True, "webhooks.enabled": False},
        {"policies.protect": False, "webhooks.enabled": True},
        {"policies.protect": False, "webhooks.enabled": False, **PROVEN},
    ],
    ids=["policies", "webhooks", "proof-devices"],
)
@pytest.mark.parametrize("name", ["gpuwarden-bindingends", "gpuwarden-forced-deletions"])
def test_policies_that_others_rely_on_are_installed_without_the_protection(values: Raw, name: str) -> None:
    assert one(rendered(values), "ValidatingAdmissionPolicy", name)


def test_configured_names_are_rendered_in_webhooks_and_policies() -> None:
    found = rendered(
        {
            "settings.requiredHashAlias": "example.org/hash",
            "settings.gpuResource": "example.org/gpu",
            "webhooks.optInLabel": "example.org/guarded",
        }
    )
    installation = Installation(
        opt_in="example.org/guarded", hash_aliases=("example.org/hash",), resource="example.org/gpu"
    )
    mine = [each for each in found if each["apiVersion"].startswith("admissionregistration.k8s.io/")]
    assert compared(mine) == compared([*while_down(installation), *webhooks(installation), *policies(installation)])
    # The process also reads the built-in names, so the hooks match these too.
    assert all(name in json.dumps(mine) for name in (*claim_keys.REQUIRED_HASH.names, "example.org/hash"))


@pytest.mark.parametrize("label", ["gpuwarden.io/enabled", "example.org/guarded"])
def test_opt_in_label_is_equal_in_webhooks_and_settings(label: str) -> None:
    found = rendered({**EVERY_COMPONENT, "webhooks.optInLabel": label})
    (container,) = one(found, "Deployment", "gpuwarden-score")["spec"]["template"]["spec"]["containers"]
    assert f"--opt-in-label={label}" in container["args"]
    content = yaml.safe_load(one(found, "ConfigMap", "gpuwarden-settings")["data"]["settings.yaml"])
    assert content["optInLabel"] == label


def test_configured_accounts_are_limited_by_policies() -> None:
    found = rendered({"reconcile.serviceAccountName": "one", "export.serviceAccountName": "two"})
    by = "'system:serviceaccount:gpuwarden:{}'".format
    limited = {"gpuwarden-own-pods": by("one"), "gpuwarden-own-nodes": f"{by('one')}, {by('two')}"}
    for name, accounts in limited.items():
        assert bare(one(found, "ValidatingAdmissionPolicy", name))["spec"]["matchConditions"] == [
            {"name": "by-us", "expression": f"request.userInfo.username in [{accounts}]"}
        ]
    found = rendered({"scheduler.enabled": True, "scheduler.serviceAccountName": "three"})
    decides = one(found, "ValidatingAdmissionPolicy", "gpuwarden-binding-ends")["spec"]["matchConditions"][0]
    assert decides["expression"] == f"request.userInfo.username in ['system:kube-scheduler', {by('three')}]"


def test_rendered_crds_equal_gpuwarden_crds_and_are_kept_on_uninstall() -> None:
    found = of_kind(rendered(), "CustomResourceDefinition")
    assert compared(found) == compared(crds.manifests())
    assert all(each["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for each in found)


ROLES = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


def shipped(installation: Installation) -> list[Raw]:
    found = [*rbac(installation), *export(installation), *certs(installation), *score(installation)]
    return [each for each in found if each["kind"] in ROLES]


# With values that need every rule of the roles.
EVERY_USE: Raw = {
    **CHALLENGES,
    "attest.enabled": True,
    "attest.kubeletPlugins": "/var/lib/kubelet",
    "settings.bundleEndpoint": "https://bundle.example.org",
    "settings.onEvidenceLost": "evict",
    "settings.proofDevices": True,
    "settings.challengeAtBind": True,
    "settings.reserve": "bind",
    "nonceKey.existingSecret": "nonce",
    "native": True,
}


@pytest.mark.defect("binder-19")
def test_rendered_roles_equal_gpuwarden_manifests() -> None:
    assert compared(of_kind(rendered({**EVERY_COMPONENT, **EVERY_USE}), *ROLES)) == compared(shipped(Installation()))


Use = tuple[str, str]


def may(component: str, values: Raw) -> set[Use]:
    """Resource and verb of every rule in its ClusterRole."""
    role = one(rendered(values), "ClusterRole", "gpuwarden" if component == "serve" else f"gpuwarden-{component}")
    return {(name, verb) for rule in role["rules"] for name in rule["resources"] for verb in rule["verbs"]}


PROOFS: set[Use] = {("nodeevidences", "get"), ("nodeevidences", "create"), ("nodeevidences/status", "update")}
BUNDLES: set[Use] = {("trustbundles", "get"), ("trustbundles", "create"), ("trustbundles/status", "update")}
ALONE: Raw = {
    "settings.ledger": "memory",
    "serve.replicas": 1,
    "reconcile.enabled": False,
    "webhooks.enabled": False,
    "inventory": {"nodes": []},
}


def test_conditional_permissions_are_rendered_only_if_needed() -> None:
    plain = may("serve", {})
    assert ("gpunodes/status", "update") in plain
    assert ("reservations", "manage") in plain
    assert not plain & (PROOFS | BUNDLES)
    assert may("serve", CHALLENGES) - plain == PROOFS
    endpoint = {**CHALLENGES, "settings.bundleEndpoint": "https://bundle.example.org"}
    assert may("serve", endpoint) - plain == PROOFS | BUNDLES
    assert {name for name, _ in may("serve", {"score.enabled": True}) - plain} == {"priorityclasses"}
    evicting = may("reconcile", {"settings.onEvidenceLost": "evict"})
    assert evicting - may("reconcile", {"settings.onEvidenceLost": "taint"}) == {("pods/eviction", "create")}
    assert may("reconcile", {"settings.reserve": "bind"}) - may("reconcile", {}) == {("pods/status", "patch")}
    proving = may("reconcile", {"settings.proofDevices": True}) - may("reconcile", {})
    slices = {("resourceslices", verb) for verb in ("get", "list", "watch", "create", "update", "delete")}
    statuses = {("resourceclaims/status", "patch"), ("resourceclaims/binding", "patch")}
    assert proving == slices | statuses | {("resourceclaims", "list"), ("resourceclaims", "watch")}
    native = {"native": True, **CHALLENGES, "attest.enabled": True, "attest.kubeletPlugins": "/var/lib/kubelet"}
    at_bind = {**native, "settings.challengeAtBind": True}
    assert may("reconcile", at_bind) - may("reconcile", native) == {("resourceclaims/driver", "arbitrary-node:patch")}
    watching = {("resourceslices", "list"), ("resourceslices", "watch")}
    assert may("attest", at_bind) - may("attest", native) == watching
    assert may("reconcile", {"settings.onMismatch": "evict"}) == evicting
    # The memory ledger writes nothing to the cluster.
    assert {name for name, _ in may("serve", ALONE)} == {"pods", "tokenreviews", "subjectaccessreviews"}


def test_class_of_proof_devices_is_rendered_with_them() -> None:
    assert of_kind(rendered({}), "DeviceClass") == []
    (made,) = of_kind(rendered({"settings.proofDevices": True}), "DeviceClass")
    assert compared([made]).items() <= compared(dra(Installation())).items()


@pytest.mark.defect("gpuid-20")
def test_exporter_may_exec_only_in_the_device_plugins_namespace() -> None:
    found = rendered({**EVERY_COMPONENT, "export.settings.namespace": "gpus"})
    may = [
        (each["kind"], each["metadata"].get("namespace"))
        for each in of_kind(found, "ClusterRole", "Role")
        for rule in each["rules"]
        if "pods/exec" in rule["resources"] or "*" in (*rule["resources"], *rule["verbs"])
    ]
    assert may == [("Role", "gpus")]


def test_only_the_certs_account_may_access_its_secret() -> None:
    """No other account may read or write Secrets, and this one only its own."""
    found = rendered(EVERY_COMPONENT, release="guard")
    may = [
        (each["metadata"]["name"], rule.get("resourceNames"), rule["verbs"])
        for each in of_kind(found, "ClusterRole", "Role")
        for rule in each["rules"]
        if "secrets" in rule["resources"]
    ]
    assert may == [
        ("guard-gpuwarden-certs", None, ["create"]),
        ("guard-gpuwarden-certs", ["guard-gpuwarden-certs"], ["get", "patch"]),
    ]


# With the values that each needs to be rendered.
EVERY_COMPONENT: Raw = {
    "score.enabled": True,
    "export.enabled": True,
    "export.settings.clusterName": "prod",
}


def test_every_bound_account_is_created_and_used() -> None:
    values = {**EVERY_COMPONENT, "extender.enabled": True, "extender.bind": True, "scheduler.enabled": True}
    found = rendered(values)
    bound = {
        (subject["namespace"], subject["name"])
        for each in of_kind(found, "ClusterRoleBinding", "RoleBinding")
        for subject in each["subjects"]
    }
    made = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in of_kind(found, "ServiceAccount")}
    used = {
        (each["metadata"]["namespace"], each["spec"]["template"]["spec"]["serviceAccountName"])
        for each in of_kind(found, "Deployment", "DaemonSet")
    } | {
        (each["metadata"]["namespace"], each["metadata"]["annotations"]["kubernetes.io/service-account.name"])
        for each in of_kind(found, "Secret")
        if each["type"] == "kubernetes.io/service-account-token"
    }
    assert bound <= made == used


def test_scheduler_permissions_equal_the_example() -> None:
    found = rendered({"extender.enabled": True, "extender.bind": True})
    example = list(yaml.safe_load_all((ROOT / "examples/scheduler/rbac.yaml").read_text()))
    called = "gpuwarden-extender-bind"
    assert one(found, "ClusterRole", called)["rules"] == one(example, "ClusterRole", called)["rules"]
    binding = one(found, "ClusterRoleBinding", called)
    assert binding["subjects"] == one(example, "ClusterRoleBinding", called)["subjects"]
    assert binding["roleRef"]["name"] == called


@pytest.mark.parametrize(
    ("values", "is_made"),
    [
        pytest.param({"settings.kueue": True}, True, id="on"),
        pytest.param({"settings.kueue": False}, False, id="off"),
        pytest.param({}, False, id="not set"),
        pytest.param({"settings.kueue": True, "rbac.create": False}, False, id="roles of the user's own"),
    ],
)
def test_reconciler_may_answer_kueue_only_if_it_does(values: dict[str, Any], is_made: bool) -> None:
    found = rendered(values)
    called = "gpuwarden-kueue"
    made = [each for each in of_kind(found, "ClusterRoleBinding") if each["metadata"]["name"] == called]
    assert bool(made) is is_made
    if is_made:
        assert [each["name"] for each in made[0]["subjects"]] == ["gpuwarden-reconcile"]
        assert one(found, "ClusterRole", called)["rules"] == one(kueue(Installation()), "ClusterRole", called)["rules"]


def test_cert_manager_certificate_equals_that_of_certs() -> None:
    found = of_kind(rendered({"tls.mode": "certManager"}), "Issuer", "Certificate")
    files = ("issuer.yaml", "certificate.yaml")
    shipped = [each for name in files for each in yaml.safe_load_all((ROOT / "certs" / name).read_text())]
    assert compared(found) == compared(shipped)


def test_alerts_equal_the_example() -> None:
    found = rendered({"prometheusRule.enabled": True})
    example = yaml.safe_load((ROOT / "examples/alerts/gpuwarden.rules.yaml").read_text())
    assert one(found, "PrometheusRule", "gpuwarden")["spec"] == example


def panels() -> list[Any]:
    found = rendered({"dashboard.enabled": True})
    content = json.loads(one(found, "ConfigMap", "gpuwarden-dashboard")["data"]["gpuwarden.json"])
    return list(content["panels"])


def test_dashboard_queries_existing_metrics() -> None:
    queries = [target["expr"] for each in panels() for target in each["targets"]]
    assert queries
    for query in queries:
        names = re.findall(r"gpu(?:warden|id)_\w+", query)
        assert names
        for name in names:
            assert name in SERIES, query
        for label in re.findall(r"by \(([^)]*)\)", query):
            assert {word.strip() for word in label.split(",")} <= SERIES[names[0]], query


def test_dashboard_panels_do_not_overlap() -> None:
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels()]
    assert len(set(places)) == len(places)
