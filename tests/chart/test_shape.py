"""The rendered objects: webhooks, Pods, network policies, monitoring. The release never blocks its own pods."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.chart_values import CHART
from tests.chart.rendering import HELM, Raw, of_kind, one, pods, rendered, settings_of
from tests.chart.test_values import CHALLENGES, EXISTING, PEM, PLUGIN_ALONE
from webhook.export import settings as export_settings
from webhook.runtime.setting_table import SettingsError
from webhook.runtime.settings import load

EVERYTHING: Raw = {
    **CHALLENGES,
    "nonceKey.existingSecret": "nonce",
    "attest.enabled": True,
    "extender.enabled": True,
    "networkPolicy.enabled": True,
}

MONITORED: Raw = {"serviceMonitor.enabled": True, "prometheusRule.enabled": True}


def webhooks(found: list[Raw]) -> list[Raw]:
    kinds = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    return [hook for each in of_kind(found, *kinds) for hook in each["webhooks"]]


def test_helm_lints_it() -> None:
    done = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.defect("binder-16")
def test_own_namespace_and_kube_system_are_excluded_from_webhooks() -> None:
    for hook in webhooks(rendered({"webhooks.excludedNamespaces": ["cni"]}, namespace="guards")):
        expressions = hook["namespaceSelector"]["matchExpressions"]
        own = [each for each in expressions if each["key"] == "kubernetes.io/metadata.name"]
        assert own == [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "guards", "cni"]}
        ]


def test_names_of_digits_are_quoted() -> None:
    """`123` is a valid name of a namespace or class, and YAML would read a number."""
    classes = {"priorityClassName": "123", "priorityClasses.create": True, "priorityClasses.classes": {"123": 1000}}
    found = rendered({"webhooks.excludedNamespaces": ["123"], **classes})
    excluded = [one["values"][-1] for hook in webhooks(found) for one in hook["namespaceSelector"]["matchExpressions"]]
    assert "123" in excluded
    assert 123 not in excluded
    assert {pod["spec"]["priorityClassName"] for name, pod in pods(found) if name == "serve"} == {"123"}
    assert "123" in [one["metadata"]["name"] for one in of_kind(found, "PriorityClass")]


@pytest.mark.parametrize("digits", ["1999", "on", "null"])
def test_namespace_that_yaml_would_convert_is_quoted(digits: str) -> None:
    """YAML would read some names as numbers, booleans or null, so they are quoted."""
    for values in (
        {**EVERYTHING, **MONITORED},
        {**EXISTING, "webhooks.optInLabel": digits},
        {"tls.mode": "certManager"},
    ):
        assert list(wrong_kinds(rendered(values, namespace=digits))) == []


def wrong_kinds(found: Any, path: str = "") -> Iterator[str]:
    """Paths of values that are not strings where Kubernetes requires strings."""
    if isinstance(found, dict):
        for key, value in found.items():
            if not isinstance(key, str):
                yield f"{path}: {key!r}"
            elif key in ("name", "namespace") and not isinstance(value, str | dict):
                yield f"{path}.{key}: {value!r}"
            elif key in ("values", "matchNames", "dnsNames"):
                yield from (f"{path}.{key}: {one!r}" for one in value if not isinstance(one, str))
            else:
                yield from wrong_kinds(value, f"{path}.{key}")
    elif isinstance(found, list):
        for number, one in enumerate(found):
            yield from wrong_kinds(one, f"{path}[{number}]")


@pytest.mark.defect("binder-16")
def test_failure_policy_is_configurable_except_for_bindings() -> None:
    for said in ("Fail", "Ignore"):
        for hook in webhooks(rendered({"webhooks.failurePolicy": said})):
            operation = hook["name"].partition(".")[0]
            settled = {"validate-binding": "Fail", "review-binding": "Ignore", "hint": "Ignore", "hint-job": "Ignore"}
            expected = settled.get(operation, said)
            assert hook["failurePolicy"] == expected, hook["name"]


@pytest.mark.defect("binder-17")
@pytest.mark.parametrize("enabled", [True, False], ids=["webhooks", "no-webhooks"])
@pytest.mark.parametrize("mode", ["selfManaged", "certManager", "existingSecret"])
@pytest.mark.parametrize("release", ["gpuwarden", "other"])
def test_webhooks_are_rendered_only_if_enabled(enabled: bool, mode: str, release: str) -> None:
    values = {"webhooks.enabled": enabled, **(EXISTING if mode == "existingSecret" else {"tls.mode": mode})}
    found = rendered(values, release=release)
    service = "gpuwarden" if release == "gpuwarden" else "other-gpuwarden"
    hooks = webhooks(found)
    assert bool(hooks) is enabled
    for hook in hooks:
        client = hook["clientConfig"]
        assert client["service"]["name"] == one(found, "Service", service)["metadata"]["name"]
        # In the other modes the issuer of the certificate sets it, and an upgrade keeps it.
        assert ("caBundle" in client) is (mode == "existingSecret")
    secret = {"existingSecret": "ours", "certManager": f"{service}-tls", "selfManaged": f"{service}-certs"}[mode]
    mounted = {each["name"]: each for each in dict(pods(found))["serve"]["spec"]["volumes"]}
    assert mounted["tls"]["secret"]["secretName"] == secret
    for each in of_kind(found, "Service"):
        assert all(port["name"] for port in each["spec"]["ports"])


def test_self_managed_secret_is_rendered_empty() -> None:
    """Then an upgrade keeps the CA's key, and uninstalling deletes it. The other modes have other Secrets."""
    secret = one(rendered(), "Secret", "gpuwarden-certs")
    assert secret["type"] == "Opaque"
    assert not {"data", "stringData", "immutable"} & secret.keys()
    for values in (EXISTING, {"tls.mode": "certManager"}):
        assert of_kind(rendered(values), "Secret") == []


def test_a_bundle_may_be_pem_or_base64_of_it() -> None:
    encoded = base64.b64encode(PEM.encode()).decode()
    for given in (PEM, encoded):
        (bundle,) = {
            hook["clientConfig"]["caBundle"] for hook in webhooks(rendered({**EXISTING, "tls.caBundle": given}))
        }
        assert bundle == encoded


def test_webhooks_have_the_annotation_of_the_ca_injector() -> None:
    found = rendered({"tls.mode": "certManager"}, namespace="guards")
    certificate = one(found, "Certificate", "gpuwarden-tls")
    assert "gpuwarden.guards.svc" in certificate["spec"]["dnsNames"]
    for each in of_kind(found, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert each["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "guards/gpuwarden-tls"


def test_webhooks_have_the_annotation_of_the_aks_enforcer() -> None:
    for each in of_kind(rendered(), "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert each["metadata"]["annotations"]["admissions.enforcer/disabled"] == "true"


# The Pods.


def test_every_pod_is_unprivileged_and_has_resource_requests() -> None:
    for component, pod in pods(rendered(EVERYTHING)):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert spec["priorityClassName"]
        assert spec["automountServiceAccountToken"] is (component != "attest")


def test_no_pod_has_a_claim() -> None:
    """No label, annotation, resource or variable matches a webhook, in any namespace."""
    for _, pod in pods(rendered(EVERYTHING)):
        text = json.dumps(pod)
        assert "nvidia.com" not in text
        assert "VISIBLE_DEVICES" not in text
        keys = {*pod["metadata"]["labels"], *pod["metadata"].get("annotations", {})}
        assert not [key for key in keys if "gpuwarden.io/" in key or "fudo.org/" in key]


def test_termination_grace_period_covers_the_drain() -> None:
    for component, pod in pods(rendered({"drainSeconds": 40, "preStopSeconds": 7})):
        spec = pod["spec"]
        (container,) = spec["containers"]
        if component in ("serve", "reconcile"):
            assert "--drain-timeout=40s" in container["args"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert before == (7 if component == "serve" else 0)
        assert spec["terminationGracePeriodSeconds"] > before + 40


def test_rolling_update_keeps_all_replicas_available() -> None:
    for each in of_kind(rendered(), "Deployment"):
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_disruption_budget_exists_for_several_replicas() -> None:
    found = rendered({"reconcile.replicas": 1})
    assert [each["metadata"]["name"] for each in of_kind(found, "PodDisruptionBudget")] == ["gpuwarden"]
    assert one(found, "Deployment", "gpuwarden")["spec"]["replicas"] == 2


def test_pods_restart_when_their_settings_change() -> None:
    def stamp(**settings: Any) -> str:
        found = dict(pods(rendered({f"settings.{name}": value for name, value in settings.items()})))
        return str(found["serve"]["metadata"]["annotations"]["checksum/settings"])

    assert stamp(logLevel="debug") != stamp(logLevel="warn")


def test_component_values_override_common_values() -> None:
    values = {
        "nodeSelector": {"a": "b"},
        "podLabels": {"first": "1", "second": "1"},
        "serve.nodeSelector": {"c": "d"},
        "serve.podLabels": {"first": "2"},
    }
    found = dict(pods(rendered(values)))
    assert found["serve"]["spec"]["nodeSelector"] == {"c": "d"}
    assert found["reconcile"]["spec"]["nodeSelector"] == {"a": "b"}
    labels = found["serve"]["metadata"]["labels"]
    assert (labels["first"], labels["second"]) == ("2", "1")


def test_attest_tolerates_all_taints() -> None:
    """A node with our taint could otherwise never lose it, and GPU nodes often have taints of their own."""
    found = dict(pods(rendered(EVERYTHING)))
    assert found["attest"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "tolerations" not in found["serve"]["spec"]
    chosen = dict(pods(rendered({**EVERYTHING, "attest.tolerations": []})))
    assert "tolerations" not in chosen["attest"]["spec"]


def test_attest_does_not_mount_the_nonce_key() -> None:
    found = dict(pods(rendered(EVERYTHING)))
    mounted = {name: {each["name"] for each in pod["spec"]["volumes"]} for name, pod in found.items()}
    assert {name for name, volumes in mounted.items() if "nonce" in volumes} == {"serve", "reconcile"}
    assert mounted["attest"] == {"tmp", "ca", "spire"}
    (ca,) = (each for each in found["attest"]["spec"]["volumes"] if each["name"] == "ca")
    assert [item["key"] for item in ca["secret"]["items"]] == ["ca.crt"]


def test_only_attest_mounts_the_sockets_of_runtime_and_kubelet() -> None:
    off = dict(pods(rendered(EVERYTHING)))
    asked = {"attest.runtimeSocket": "/run/k3s/containerd/containerd.sock"}
    found = dict(pods(rendered({**EVERYTHING, **asked})))
    assert {name: pod for name, pod in found.items() if name != "attest"} == {
        name: pod for name, pod in off.items() if name != "attest"
    }
    spec = found["attest"]["spec"]
    (container,) = spec["containers"]
    assert "--runtime-socket=unix:/run/gpuwarden/runtime/containerd.sock" in container["args"]
    assert [one for one in spec["volumes"] if one["name"] in ("runtime", "kubelet")] == [
        {"name": "runtime", "hostPath": {"path": "/run/k3s/containerd", "type": "Directory"}},
        {"name": "kubelet", "hostPath": {"path": "/var/lib/kubelet/pod-resources", "type": "Directory"}},
    ]
    assert all(one["readOnly"] for one in container["volumeMounts"] if one["name"] in ("runtime", "kubelet"))
    uid = {"name": "GPUWARDEN_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    assert uid in container["env"]
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    before = off["attest"]["spec"]["containers"][0]["securityContext"]
    assert container["securityContext"] == {**before, **root}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_plugin_writes_cdi_specifications_only_where_the_directory_is_named() -> None:
    plugin = {**EVERYTHING, "attest.kubeletPlugins": "/var/lib/kubelet"}
    off, on = (
        dict(pods(rendered(one)))["attest"]["spec"] for one in (plugin, plugin | {"attest.cdiDirectory": "/cdi/"})
    )
    assert "--cdi-directory=/cdi" in on["containers"][0]["args"]
    assert {"name": "cdi", "mountPath": "/cdi"} in on["containers"][0]["volumeMounts"]
    assert {"name": "cdi", "hostPath": {"path": "/cdi", "type": "DirectoryOrCreate"}} in on["volumes"]
    assert not [one for one in off["volumes"] if one["name"] == "cdi"]


def test_only_attest_as_the_kubelets_plugin_reads_claims_and_has_its_directories() -> None:
    off, found = (
        rendered({**EVERYTHING, "networkPolicy.enabled": True, **asked})
        for asked in ({}, {"attest.kubeletPlugins": "/var/snap/kubelet/"})
    )
    before, spec = (dict(pods(one))["attest"]["spec"] for one in (off, found))
    assert (before["automountServiceAccountToken"], spec["automountServiceAccountToken"]) == (False, True)
    (container,) = spec["containers"]
    assert {"--kubelet-plugins=/var/snap/kubelet", "--in-cluster=true"} <= {*container["args"]}
    own, registry = "/var/snap/kubelet/plugins/attested.gpuwarden.io", "/var/snap/kubelet/plugins_registry"
    assert [one for one in spec["volumes"] if "plugin" in one["name"]] == [
        {"name": "plugin", "hostPath": {"path": own, "type": "DirectoryOrCreate"}},
        {"name": "plugins-registry", "hostPath": {"path": registry, "type": "Directory"}},
    ]
    assert [one for one in container["volumeMounts"] if "plugin" in one["name"]] == [
        {"name": "plugin", "mountPath": own},
        {"name": "plugins-registry", "mountPath": registry},
    ]
    root = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    assert container["securityContext"] == {**before["containers"][0]["securityContext"], **root}

    (update,) = (one["spec"] for one in found if one["kind"] == "DaemonSet")
    assert update["updateStrategy"] == {"rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}}
    assert update["minReadySeconds"] > 0

    def roles(objects: list[Raw]) -> list[list[Raw]]:
        names = (one for one in objects if one["kind"] == "ClusterRole")
        return [one["rules"] for one in names if one["metadata"]["name"].endswith("-attest")]

    of_dra = {"apiGroups": ["resource.k8s.io"]}
    rules: list[Raw] = [
        {**of_dra, "resources": ["resourceclaims"], "verbs": ["get"]},
        {**of_dra, "resources": ["resourceslices"], "verbs": ["get", "update"]},
    ]
    assert (roles(off), roles(found)) == ([], [rules])

    def ports(objects: list[Raw]) -> list[object]:
        (one,) = (
            one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-attest")
        )
        return [port["port"] for rule in one["spec"]["egress"] for port in rule["ports"]]

    assert len(ports(found)) > len(ports(off))
    assert 6443 in ports(found)
    assert 6443 not in ports(off)


def test_plugin_alone_needs_no_serve_and_no_ca() -> None:
    off = {"serve.enabled": False, "webhooks.enabled": False, "native": True, "networkPolicy.enabled": True}
    found = rendered({**PLUGIN_ALONE, **off})
    spec = dict(pods(found))["attest"]["spec"]
    (container,) = spec["containers"]
    assert not [one for one in container["args"] if one.startswith("--server")]
    assert {"--kubelet-plugins=/var/lib/kubelet", "--spire-trust-domain=example.org"} <= {*container["args"]}
    assert {one["name"] for one in spec["volumes"]} == {"tmp", "spire", "plugin", "plugins-registry"}
    (egress,) = (
        one["spec"]["egress"]
        for one in found
        if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-attest")
    )
    assert not [to for rule in egress for to in rule.get("to", ()) if "podSelector" in to]


# The settings as gpuwarden reads them.


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The Pod's mounted files."""
    for name in ("tls/tls.crt", "tls/tls.key", "ca/ca.crt", "nonce/nonce.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PEM)
    (tmp_path / "settings").mkdir()
    return tmp_path


SETS: dict[str, Raw] = {
    "default": {},
    "challenges": EVERYTHING,
    "client-certificates": {"webhooks.clientCa": PEM, "extender.enabled": True, "extender.clientCa": PEM},
    "inventory": {"inventory": {"nodes": []}, "settings.requireEvidence": "asked"},
    "map": {"settings.nodeHashMap": {"node-a": "sha256:aa"}, "settings.maxEvidenceAge": "10m"},
    "bundle-endpoint": {
        **CHALLENGES,
        "settings.bundleEndpoint": "https://bundle.example.org",
        "settings.bundleEndpointProfile": "https_spiffe",
        "bundleEndpointCa": PEM,
    },
    "bundle-endpoint-of-the-agent": {
        **CHALLENGES,
        "settings.bundleEndpoint": "https://bundle.example.org",
        "settings.bundleEndpointProfile": "https_spiffe",
    },
    "scorer": {"score.enabled": False, "settings.scorer": "https://scorer.example.org", "scorerCa": PEM},
}


# The command words before the options.
COMMANDS = {"certs": ["certs", "keep"]}


@pytest.mark.parametrize("name", SETS)
def test_commands_accept_the_rendered_settings(name: str, etc: Path) -> None:
    """Every process parses its rendered arguments and file."""
    found = rendered({"score.enabled": True, **SETS[name]})
    for key, text in one(found, "ConfigMap", "gpuwarden-settings")["data"].items():
        (etc / "settings" / key).write_text(text.replace("/etc/gpuwarden", str(etc)))
    for component, pod in pods(found):
        args = [each.replace("/etc/gpuwarden", str(etc)) for each in pod["spec"]["containers"][0]["args"]]
        words = COMMANDS.get(component, [component])
        assert args[: len(words)] == words
        flags = dict(each.removeprefix("--").split("=", 1) for each in args[len(words) :])
        environ = {"GPUWARDEN_NODE": "node-a", "GPUWARDEN_POD_UID": "uid-1"} if component == "attest" else {}
        try:
            chosen = load({name.replace("-", "_"): value for name, value in flags.items()}, environ)
        except SettingsError as exc:
            pytest.fail(f"{component}: {exc.mistakes}")
        assert chosen.is_embedded is (component == "attest")


STORES: dict[str, Raw] = {
    "stdout": {},
    "http": {"export.settings.httpEndpoint": "https://store.example.org", "export.credentials.http": "web"},
    "postgres": {"export.settings.postgresDb": "gpus", "export.credentials.postgres": "db"},
    "s3": {"export.settings.s3Bucket": "gpus", "export.credentials.s3": "bucket"},
}


@pytest.mark.parametrize("store", STORES)
def test_exporter_accepts_the_rendered_settings(store: str, tmp_path: Path) -> None:
    base = {"export.enabled": True, "export.settings.clusterName": "prod", "export.settings.exporterType": store}
    found = rendered({**base, **STORES[store]})
    file = tmp_path / "settings.yaml"
    file.write_text(one(found, "ConfigMap", "gpuwarden-export-settings")["data"]["settings.yaml"])
    (container,) = dict(pods(found))["export"]["spec"]["containers"]
    environ = {each["name"]: "from-elsewhere" for each in container.get("env", ())}
    args = [each.removeprefix("--").split("=", 1) for each in container["args"][1:]]
    flags = {name.replace("-", "_"): value for name, value in args} | {"config": str(file)}
    chosen = export_settings.load(flags, environ)
    assert (chosen.cluster_name, chosen.exporter_type, chosen.leader_election) == ("prod", (store,), True)


def test_outbox_volume_is_mounted_and_used_by_one_process() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "outbox"}}
    larger = {"emptyDir": {"sizeLimit": "1Gi"}}
    for said, source in ((None, {"emptyDir": {}}), (larger, larger), (claim, claim)):
        values = {"export.enabled": True, "export.settings.clusterName": "prod", "export.replicas": 1}
        found = rendered(values if said is None else {**values, "export.outbox": said})
        spec = dict(pods(found))["export"]["spec"]
        # Two processes cannot share an outbox: a rolling update would wait for the second one.
        strategy = one(found, "Deployment", "gpuwarden-export")["spec"]["strategy"]["type"]
        assert strategy == ("Recreate" if source == claim else "RollingUpdate")
        assert [each for each in spec["volumes"] if each["name"] == "outbox"] == [{"name": "outbox", **source}]
        paths = [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        assert "/var/lib/gpuwarden" in paths


def test_unset_values_have_the_default_of_the_command() -> None:
    """Except the opt-in label, which the webhook configurations also need."""
    assert settings_of(rendered()) == {"optInLabel": "gpuwarden.io/enabled"}


# Network policies.


RECORDED: Raw = {"export.enabled": True, "export.settings.clusterName": "prod"}
RECORDS_TO: Raw = {
    "export.settings.httpEndpoint": "https://store.example.org/gpus",
    "export.settings.postgresDb": "gpus",
    "export.credentials.postgres": "db",
    "export.settings.s3Bucket": "gpus",
}


def policy(component: str, **values: Any) -> Raw:
    found = rendered({**EVERYTHING, **values})
    return dict(one(found, "NetworkPolicy", "gpuwarden" if component == "serve" else f"gpuwarden-{component}")["spec"])


@pytest.mark.defect("scoring-18")
@pytest.mark.parametrize("component", ["serve", "reconcile"])
def test_network_policy_allows_dns_and_the_api_server(component: str) -> None:
    egress = policy(component)["egress"]
    names = [rule for rule in egress if {"port": 53, "protocol": "UDP"} in rule["ports"]]
    # To any address: a DNS cache on the node is not a Pod.
    assert [rule.get("to") for rule in names] == [None]
    to_api = [rule for rule in egress if {"port": 6443, "protocol": "TCP"} in rule["ports"]]
    assert [peer["ipBlock"]["cidr"] for rule in to_api for peer in rule["to"]] == ["0.0.0.0/0", "::/0"]


@pytest.mark.defect("scoring-18")
def test_network_policy_lets_the_api_server_reach_serve() -> None:
    (rule,) = [rule for rule in policy("serve")["ingress"] if rule["ports"] == [{"port": "https", "protocol": "TCP"}]]
    assert {"ipBlock": {"cidr": "0.0.0.0/0"}} in rule["from"]
    narrow = policy("serve", **{"networkPolicy.apiServer.cidrs": ["10.1.0.0/24"]})
    (rule,) = [rule for rule in narrow["ingress"] if rule["ports"] == [{"port": "https", "protocol": "TCP"}]]
    assert [peer["ipBlock"]["cidr"] for peer in rule["from"] if "ipBlock" in peer] == ["10.1.0.0/24"]


def ports_open_anywhere(component: str, **values: Any) -> set[int]:
    rules = policy(component, **values)["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]} - {53}


NAMED: Raw = {
    "settings.evidence": ["spire-server", "jwt-svid"],
    "settings.spireServer": "spire-server.spire.svc:8081",
    "settings.bundleEndpoint": "https://bundle.example.org/",
    "settings.scorer": "http://scheduler-agent.ml.svc:8080",
}


def test_network_policy_allows_the_addresses_in_settings() -> None:
    found = {name: ports_open_anywhere(name, **NAMED) for name in ("serve", "reconcile", "attest")}
    assert found == {"serve": {8081, 443, 8080}, "reconcile": {8081, 443}, "attest": set()}
    assert ports_open_anywhere("serve") == set()
    # A socket needs no network.
    assert ports_open_anywhere("serve", **{**NAMED, "settings.spireServer": "unix:/x"}) == {443, 8080}


@pytest.mark.parametrize(
    ("values", "ports"),
    [
        ({}, set()),
        ({**RECORDS_TO, "export.settings.exporterType": "stdout, http"}, {443}),
        (
            {
                **RECORDS_TO,
                "export.settings.exporterType": ["http"],
                "export.settings.httpEndpoint": "http://[fd00::1]/x:1",
            },
            {80},
        ),
        ({**RECORDS_TO, "export.settings.exporterType": "postgres", "export.settings.postgresPort": 6543}, {6543}),
        ({**RECORDS_TO, "export.settings.exporterType": "postgres,s3"}, {5432, 443}),
    ],
    ids=["stdout", "https", "http-by-address", "postgres", "postgres-and-s3"],
)
def test_network_policy_allows_the_stores(values: Raw, ports: set[int]) -> None:
    assert ports_open_anywhere("export", **{**RECORDED, **values}) == ports


def test_only_serve_may_reach_the_scorer_by_default() -> None:
    def askers(**values: Any) -> list[Raw]:
        rules = policy("score", **{"score.enabled": True, **values})["ingress"]
        return [peer for rule in rules for peer in rule["from"]]

    (only,) = askers()
    assert only["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "serve"
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert askers(**{"networkPolicy.scrapers": [{"namespaceSelector": {}}, prometheus]}) == [only, prometheus]


def test_every_enabled_component_has_a_network_policy() -> None:
    found = rendered(EVERYTHING)
    covered = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in of_kind(found, "NetworkPolicy")}
    assert covered == {component for component, _ in pods(found)}


# Labels and monitoring.


def test_every_object_has_the_common_labels() -> None:
    values = {**EVERYTHING, "nonceKey.existingSecret": "", "serviceMonitor.enabled": True, "dashboard.enabled": True}
    found = rendered(
        {**values, "tls.mode": "certManager", "prometheusRule.enabled": True, "priorityClasses.create": True}
    )
    for each in found:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "gpuwarden", each
        assert labels["app.kubernetes.io/instance"] == "gpuwarden"


def test_service_monitor_selects_the_metrics_service() -> None:
    found = rendered({"serviceMonitor.enabled": True, "serviceMonitor.labels": {"release": "prometheus"}})
    monitor, service = one(found, "ServiceMonitor", "gpuwarden"), one(found, "Service", "gpuwarden-metrics")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]


def test_priority_classes_of_scores_are_rendered() -> None:
    found = of_kind(rendered({"priorityClasses.create": True}), "PriorityClass")
    assert {each["metadata"]["name"]: each["value"] for each in found} == {
        "gpu-ultra": 1000,
        "gpu-high": 750,
        "gpu-medium": 500,
        "gpu-default": 250,
    }
    changed = {"priorityClasses.create": True, "priorityClasses.classes": {"mine": 7, "gpu-ultra": None}}
    names = {each["metadata"]["name"] for each in of_kind(rendered(changed), "PriorityClass")}
    assert names == {"mine", "gpu-high", "gpu-medium", "gpu-default"}
