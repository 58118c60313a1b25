"""What stands in the rendered objects: who is called, who may reach whom, and that we are never in our own way."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.chart_values import CHART
from tests.chart.rendering import HELM, Raw, of_kind, one, pods, rendered, settings_of
from tests.chart.test_values import CHALLENGES, EXISTING, PEM
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


@pytest.mark.defect("S1-16")
def test_our_own_namespace_and_that_of_the_cluster_are_never_reviewed() -> None:
    for hook in webhooks(rendered({"webhooks.excludedNamespaces": ["cni"]}, namespace="guards")):
        expressions = hook["namespaceSelector"]["matchExpressions"]
        own = [each for each in expressions if each["key"] == "kubernetes.io/metadata.name"]
        assert own == [
            {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "guards", "cni"]}
        ]


def test_a_name_of_digits_stays_a_name() -> None:
    """`123` may be a namespace and a class, and YAML would make a number of it."""
    classes = {"priorityClassName": "123", "priorityClasses.create": True, "priorityClasses.classes": {"123": 1000}}
    found = rendered({"webhooks.excludedNamespaces": ["123"], **classes})
    excluded = [one["values"][-1] for hook in webhooks(found) for one in hook["namespaceSelector"]["matchExpressions"]]
    assert "123" in excluded
    assert 123 not in excluded
    assert {pod["spec"]["priorityClassName"] for name, pod in pods(found) if name == "serve"} == {"123"}
    assert "123" in [one["metadata"]["name"] for one in of_kind(found, "PriorityClass")]


@pytest.mark.parametrize("digits", ["1999", "on", "null"])
def test_a_release_in_a_namespace_that_yaml_reads_as_something_else(digits: str) -> None:
    """Wherever it stands alone it is in quotes: a number, a truth or nothing is no namespace."""
    for values in (
        {**EVERYTHING, **MONITORED},
        {**EXISTING, "webhooks.optInLabel": digits},
        {"tls.mode": "certManager"},
    ):
        assert list(wrong_kinds(rendered(values, namespace=digits))) == []


def wrong_kinds(found: Any, path: str = "") -> Iterator[str]:
    """Where something stands that Kubernetes wants to be text."""
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


@pytest.mark.defect("S1-16")
def test_the_failure_policy_is_the_values_and_the_last_door_stays_shut() -> None:
    for said in ("Fail", "Ignore"):
        for hook in webhooks(rendered({"webhooks.failurePolicy": said})):
            door = hook["name"].partition(".")[0]
            settled = {"validate-binding": "Fail", "review-binding": "Ignore", "hint": "Ignore", "hint-job": "Ignore"}
            expected = settled.get(door, said)
            assert hook["failurePolicy"] == expected, hook["name"]


@pytest.mark.defect("S1-17")
@pytest.mark.parametrize("enabled", [True, False], ids=["webhooks", "no-webhooks"])
@pytest.mark.parametrize("mode", ["selfManaged", "certManager", "existingSecret"])
@pytest.mark.parametrize("release", ["gpuwarden", "other"])
def test_webhooks_are_there_if_and_only_if_they_are_enabled(enabled: bool, mode: str, release: str) -> None:
    values = {"webhooks.enabled": enabled, **(EXISTING if mode == "existingSecret" else {"tls.mode": mode})}
    found = rendered(values, release=release)
    service = "gpuwarden" if release == "gpuwarden" else "other-gpuwarden"
    hooks = webhooks(found)
    assert bool(hooks) is enabled
    for hook in hooks:
        client = hook["clientConfig"]
        assert client["service"]["name"] == one(found, "Service", service)["metadata"]["name"]
        # Otherwise it is put in where the certificate is made, and an upgrade leaves it there.
        assert ("caBundle" in client) is (mode == "existingSecret")
    secret = {"existingSecret": "ours", "certManager": f"{service}-tls", "selfManaged": f"{service}-certs"}[mode]
    mounted = {each["name"]: each for each in dict(pods(found))["serve"]["spec"]["volumes"]}
    assert mounted["tls"]["secret"]["secretName"] == secret
    for each in of_kind(found, "Service"):
        assert all(port["name"] for port in each["spec"]["ports"])


def test_the_secret_that_we_write_is_the_releases_own_and_empty() -> None:
    """So that uninstalling takes the CA's key away, and an upgrade leaves it. Nobody else's mode shares it."""
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


def test_cert_manager_is_told_which_bundle_goes_into_which_configuration() -> None:
    found = rendered({"tls.mode": "certManager"}, namespace="guards")
    certificate = one(found, "Certificate", "gpuwarden-tls")
    assert "gpuwarden.guards.svc" in certificate["spec"]["dnsNames"]
    for each in of_kind(found, "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert each["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "guards/gpuwarden-tls"


def test_aks_leaves_our_webhooks_alone() -> None:
    for each in of_kind(rendered(), "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        assert each["metadata"]["annotations"]["admissions.enforcer/disabled"] == "true"


# The Pods.


def test_every_pod_runs_as_nobody_in_particular_and_asks_for_what_it_needs() -> None:
    for component, pod in pods(rendered(EVERYTHING)):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert spec["priorityClassName"]
        assert spec["automountServiceAccountToken"] is (component != "attest")


def test_no_pod_asks_for_what_its_own_webhook_would_look_at() -> None:
    """In whatever namespace: no label, annotation, resource or variable of a claim."""
    for _, pod in pods(rendered(EVERYTHING)):
        text = json.dumps(pod)
        assert "nvidia.com" not in text
        assert "VISIBLE_DEVICES" not in text
        keys = {*pod["metadata"]["labels"], *pod["metadata"].get("annotations", {})}
        assert not [key for key in keys if "gpuwarden.io/" in key or "fudo.org/" in key]


def test_a_pod_has_time_to_end_before_it_is_killed() -> None:
    for component, pod in pods(rendered({"drainSeconds": 40, "preStopSeconds": 7})):
        spec = pod["spec"]
        (container,) = spec["containers"]
        if component in ("serve", "reconcile"):
            assert "--drain-timeout=40s" in container["args"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert before == (7 if component == "serve" else 0)
        assert spec["terminationGracePeriodSeconds"] > before + 40


def test_a_rolling_update_takes_nobody_away_before_another_is_ready() -> None:
    for each in of_kind(rendered(), "Deployment"):
        assert each["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_budget_is_there_where_there_is_more_than_one_pod() -> None:
    found = rendered({"reconcile.replicas": 1})
    assert [each["metadata"]["name"] for each in of_kind(found, "PodDisruptionBudget")] == ["gpuwarden"]
    assert one(found, "Deployment", "gpuwarden")["spec"]["replicas"] == 2


def test_pods_start_anew_when_their_settings_change() -> None:
    def stamp(**settings: Any) -> str:
        found = dict(pods(rendered({f"settings.{name}": value for name, value in settings.items()})))
        return str(found["serve"]["metadata"]["annotations"]["checksum/settings"])

    assert stamp(logLevel="debug") != stamp(logLevel="warn")


def test_a_component_s_own_values_win_over_the_common_ones() -> None:
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


def test_a_tainted_node_proves_itself_too() -> None:
    """One that bears our taint for lack of evidence would never lose it, and GPU nodes often have one of their own."""
    found = dict(pods(rendered(EVERYTHING)))
    assert found["attest"]["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert "tolerations" not in found["serve"]["spec"]
    chosen = dict(pods(rendered({**EVERYTHING, "attest.tolerations": []})))
    assert "tolerations" not in chosen["attest"]["spec"]


def test_a_node_is_not_told_the_key_of_the_challenges() -> None:
    found = dict(pods(rendered(EVERYTHING)))
    mounted = {name: {each["name"] for each in pod["spec"]["volumes"]} for name, pod in found.items()}
    assert {name for name, volumes in mounted.items() if "nonce" in volumes} == {"serve", "reconcile"}
    assert mounted["attest"] == {"tmp", "ca", "spire"}
    (ca,) = (each for each in found["attest"]["spec"]["volumes"] if each["name"] == "ca")
    assert [item["key"] for item in ca["secret"]["items"]] == ["ca.crt"]


def test_attest_has_the_sockets_of_runtime_and_kubelet_where_they_are_asked_for_and_nobody_else_has() -> None:
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


# What gpuwarden itself makes of it.


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """What a Pod would find mounted, with files that can be read."""
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


# Which words come before the options.
COMMANDS = {"certs": ["certs", "keep"]}


@pytest.mark.parametrize("name", SETS)
def test_gpuwarden_takes_the_settings_that_are_rendered(name: str, etc: Path) -> None:
    """The arguments and the file of every process that reads them, as it would."""
    found = rendered({"bind.enabled": True, "score.enabled": True, **SETS[name]})
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
def test_the_exporter_takes_its_settings(store: str, tmp_path: Path) -> None:
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


def test_what_is_not_stored_yet_is_where_it_is_said_to_be_and_there_once() -> None:
    claim = {"persistentVolumeClaim": {"claimName": "outbox"}}
    larger = {"emptyDir": {"sizeLimit": "1Gi"}}
    for said, source in ((None, {"emptyDir": {}}), (larger, larger), (claim, claim)):
        values = {"export.enabled": True, "export.settings.clusterName": "prod", "export.replicas": 1}
        found = rendered(values if said is None else {**values, "export.outbox": said})
        spec = dict(pods(found))["export"]["spec"]
        # Two processes never have one outbox: the second would not start, and the first not be replaced.
        strategy = one(found, "Deployment", "gpuwarden-export")["spec"]["strategy"]["type"]
        assert strategy == ("Recreate" if source == claim else "RollingUpdate")
        assert [each for each in spec["volumes"] if each["name"] == "outbox"] == [{"name": "outbox", **source}]
        paths = [each["mountPath"] for each in spec["containers"][0]["volumeMounts"]]
        assert len(set(paths)) == len(paths)
        assert "/var/lib/gpuwarden" in paths


def test_what_is_not_said_has_the_default_of_the_command() -> None:
    """But who has opted in, which the webhook configurations say too."""
    assert settings_of(rendered()) == {"optInLabel": "gpuwarden.io/enabled"}


# Who may reach whom.


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


@pytest.mark.defect("S3-18")
@pytest.mark.parametrize("component", ["serve", "reconcile"])
def test_names_and_the_api_server_can_be_reached(component: str) -> None:
    egress = policy(component)["egress"]
    names = [rule for rule in egress if {"port": 53, "protocol": "UDP"} in rule["ports"]]
    # Anywhere: a cache of names on the node is in no Pod.
    assert [rule.get("to") for rule in names] == [None]
    to_api = [rule for rule in egress if {"port": 6443, "protocol": "TCP"} in rule["ports"]]
    assert [peer["ipBlock"]["cidr"] for rule in to_api for peer in rule["to"]] == ["0.0.0.0/0", "::/0"]


@pytest.mark.defect("S3-18")
def test_the_api_server_reaches_the_webhook_though_no_selector_names_it() -> None:
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
    "bind.enabled": True,
}


def test_what_the_settings_name_can_be_reached() -> None:
    found = {name: ports_open_anywhere(name, **NAMED) for name in ("serve", "reconcile", "bind", "attest")}
    assert found == {"serve": {8081, 443, 8080}, "reconcile": {8081, 443}, "bind": {8081, 443}, "attest": set()}
    assert ports_open_anywhere("serve") == set()
    # By a socket nobody goes through the network.
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
def test_stores_can_be_reached(values: Raw, ports: set[int]) -> None:
    assert ports_open_anywhere("export", **{**RECORDED, **values}) == ports


def test_nobody_but_serve_asks_the_scorer_unless_it_is_said() -> None:
    def askers(**values: Any) -> list[Raw]:
        rules = policy("score", **{"score.enabled": True, **values})["ingress"]
        return [peer for rule in rules for peer in rule["from"]]

    (only,) = askers()
    assert only["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "serve"
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert askers(**{"networkPolicy.scrapers": [{"namespaceSelector": {}}, prometheus]}) == [only, prometheus]


def test_every_component_that_runs_has_a_policy() -> None:
    found = rendered(EVERYTHING)
    covered = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in of_kind(found, "NetworkPolicy")}
    assert covered == {component for component, _ in pods(found)}


# What is seen.


def test_every_object_says_whose_it_is() -> None:
    values = {**EVERYTHING, "nonceKey.existingSecret": "", "serviceMonitor.enabled": True, "dashboard.enabled": True}
    found = rendered(
        {**values, "tls.mode": "certManager", "prometheusRule.enabled": True, "priorityClasses.create": True}
    )
    for each in found:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "gpuwarden", each
        assert labels["app.kubernetes.io/instance"] == "gpuwarden"


def test_the_monitor_finds_the_service_of_metrics() -> None:
    found = rendered({"serviceMonitor.enabled": True, "serviceMonitor.labels": {"release": "prometheus"}})
    monitor, service = one(found, "ServiceMonitor", "gpuwarden"), one(found, "Service", "gpuwarden-metrics")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
        port["name"] for port in service["spec"]["ports"]
    ]


def test_the_classes_that_scores_lead_to_are_made() -> None:
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
