"""The chart refuses values that cannot work, with a message that says what to change."""

import inspect
from typing import Any

import pytest

from tests.chart.rendering import APIS, CERT_MANAGER, OPERATOR, Raw, refusal, rendered
from tests.chart.test_values import CHALLENGES, EXISTING, PEM, PLUGIN_ALONE
from webhook.export.settings import ExportReader
from webhook.runtime.settings import SettingsReader

SPIRE = {
    "settings.evidence": "spire-server",
    "settings.spireServer": "spire-server:8081",
    "settings.spireTrustDomain": "example.org",
    "settings.spireWorkloadApi": "unix:/spiffe-workload-api/agent.sock",
}


def without(values: Raw, *names: str, **more: Any) -> Raw:
    return {name: value for name, value in values.items() if name not in names}


EXPORT = {"export.enabled": True, "export.settings.clusterName": "prod"}
REFUSED: dict[str, tuple[Raw, str]] = {
    "secret-without-a-name": (
        without(EXISTING, "tls.existingSecret"),
        "set tls.existingSecret to the Secret with tls.crt and tls.key",
    ),
    "secret-without-a-bundle": (without(EXISTING, "tls.caBundle"), "set tls.caBundle to the CA of its certificate"),
    "invalid-bundle": (
        {**EXISTING, "tls.caBundle": "bm90IGEgY2VydA=="},
        "tls.caBundle contains no certificate",
    ),
    "secret-in-another-mode": ({"tls.existingSecret": "ours"}, "tls.existingSecret is set and tls.mode is selfManaged"),
    "bundle-in-another-mode": ({"tls.caBundle": PEM}, "tls.caBundle is set and tls.mode is selfManaged"),
    "an-issuer-in-another-mode": (
        {"tls.certManager.issuer.name": "company"},
        "tls.certManager.issuer.name is set and tls.mode is selfManaged",
    ),
    "a-cluster-issuer-without-a-name": (
        {"tls.mode": "certManager", "tls.certManager.issuer.kind": "ClusterIssuer"},
        "set tls.certManager.issuer.name",
    ),
    "native-without-a-reconciler": (
        {"native": True, "serve.enabled": False, "reconcile.enabled": False},
        "nothing would publish the proven GPUs",
    ),
    "native-without-proof-devices": (
        {"native": True, "settings.proofDevices": False},
        "Remove settings.proofDevices",
    ),
    "challenges-at-bind-without-answers": (
        {"native": True, "settings.challengeAtBind": True, "settings.evidence": "jwt-svid"},
        "native pods ask for challenges, and nodes have to answer them",
    ),
    "native-without-blinding": (
        {"native": True, "policies.blind": "webhook"},
        "native is true and no policy hides GPUs from pods without a claim: policies.blind is webhook and",
    ),
    "native-with-another-variable": (
        {"native": True, "settings.injection": "cuda"},
        "policies.blind is auto and settings.injection is cuda. No webhook does it for native pods. Set policies.blind",
    ),
    "native-on-nodes-of-a-device-plugin": (
        {"native": True, "settings.injection": "plugin"},
        "native is true and settings.injection is plugin: native pods would get no GPUs of nodes without the label",
    ),
    "native-on-nodes-for-reservations": (
        {"native": True, "settings.injection": "dra"},
        "native is true and settings.injection is dra: native pods would get no GPUs of nodes without the label",
    ),
    "webhooks-without-serve": ({"serve.enabled": False}, "nothing would answer the API server"),
    "alerts-without-serve": (
        {"serve.enabled": False, "webhooks.enabled": False, "prometheusRule.enabled": True},
        "the alerts are about serve",
    ),
    "memory-in-two-replicas": (
        {"settings.ledger": "memory", "reconcile.enabled": False},
        "settings.ledger is memory, which replicas do not share",
    ),
    "memory-and-a-reconciler": (
        {"settings.ledger": "memory", "serve.replicas": 1},
        "the reconciler sees no reservations",
    ),
    "memory-without-inventory": (
        {"settings.ledger": "memory", "serve.replicas": 1, "reconcile.enabled": False},
        "list nodes and devices in inventory",
    ),
    "memory-and-webhooks": (
        {"settings.ledger": "memory", "serve.replicas": 1, "reconcile.enabled": False, "inventory": {"nodes": []}},
        "Other pods would get GPUs that containers still use. Set webhooks.enabled=false",
    ),
    "no-reconciler": ({"reconcile.enabled": False}, "reservations would not be confirmed or released"),
    "spire-without-an-address": (without(SPIRE, "settings.spireServer"), "set settings.spireServer and"),
    "spire-without-an-svid": (without(SPIRE, "settings.spireWorkloadApi"), "set settings.spireWorkloadApi"),
    "challenges-without-a-domain": (without(CHALLENGES, "settings.spireTrustDomain"), "set settings.spireTrustDomain"),
    "challenges-without-keys": (without(CHALLENGES, "settings.spireWorkloadApi"), "set one"),
    "attest-without-challenges": ({"attest.enabled": True}, "the nodes would not be challenged"),
    "attest-with-ends-and-without-challenges": (
        {**PLUGIN_ALONE, "attest.runtimeSocket": "/run/containerd/containerd.sock"},
        "the ends of pods are reported with the proofs",
    ),
    "plugin-without-a-domain": (
        {**without(PLUGIN_ALONE, "settings.spireTrustDomain"), "settings.evidence": "static"},
        "set settings.spireTrustDomain",
    ),
    "plugin-without-an-agent": (
        {**without(PLUGIN_ALONE, "settings.spireWorkloadApi"), "settings.evidence": "static"},
        "set settings.spireWorkloadApi to the agent's socket",
    ),
    "attest-without-an-agent": (
        {
            **without(CHALLENGES, "settings.spireWorkloadApi"),
            "settings.bundleEndpoint": "https://bundle.example.org",
            "attest.enabled": True,
        },
        "set settings.spireWorkloadApi to the agent's socket",
    ),
    "a-socket-elsewhere": (
        {**SPIRE, "settings.spireWorkloadApi": "unix:/run/agent.sock"},
        "mounted under spire.mountPath",
    ),
    "bound-in-memory": (
        {
            "settings.reserve": "bind",
            "settings.ledger": "memory",
            "serve.replicas": 1,
            "reconcile.enabled": False,
            "inventory": {"nodes": []},
            "webhooks.enabled": False,
        },
        "set settings.ledger=cluster",
    ),
    "an-index-of-some-gpus": ({"settings.mapVisible": "index"}, "set settings.injection=cuda"),
    "an-endpoint-without-roots": (
        {
            **without(CHALLENGES, "settings.spireWorkloadApi"),
            "settings.bundleEndpoint": "https://bundle.example.org",
            "settings.bundleEndpointProfile": "https_spiffe",
        },
        "by bundleEndpointCa",
    ),
    "renewed-before-it-is-made": (
        {"settings.certsLeafLife": "15h", "settings.certsRenewBefore": 54000},
        "settings.certsRenewBefore is not shorter than settings.certsLeafLife",
    ),
    "a-ca-that-ends-too-soon": (
        {"settings.certsCaLife": "2520h"},
        "settings.certsCaLife is not longer than",
    ),
    "attest-without-serve": (
        {**CHALLENGES, "attest.enabled": True, "serve.enabled": False, "webhooks.enabled": False},
        "the nodes' proofs would not be accepted",
    ),
    "callers-without-an-audience": ({"settings.reviewCallers": "x"}, "set settings.reviewTokenAudience"),
    "binder-without-extender": ({"extender.bind": True}, "extender.enabled is false"),
    "one-port-twice": ({"service.port": 8080}, "have to differ"),
    "scheduler-without-serve": (
        {"scheduler.enabled": True, "serve.enabled": False, "webhooks.enabled": False},
        "kube-scheduler runs in the Pods of serve",
    ),
    "port-of-the-scheduler": (
        {"scheduler.enabled": True, "service.uiPort": 8445},
        "8443 and 8444 and 8445 and 10259",
    ),
    "two-scorers": ({"score.enabled": True, "settings.scorer": "http://agent:8080"}, "choose one"),
    "export-without-cluster-name": ({"export.enabled": True}, "set export.settings.clusterName"),
    "a-store-without-an-address": (
        {"export.enabled": True, "export.settings.clusterName": "prod", "export.settings.exporterType": "stdout,http"},
        "set export.settings.httpEndpoint",
    ),
    "a-database-without-a-secret": (
        {
            "export.enabled": True,
            "export.settings.clusterName": "prod",
            "export.settings.exporterType": ["postgres"],
            "export.settings.postgresDb": "gpus",
        },
        "export.credentials.postgres to the Secret",
    ),
    "a-store-without-a-bucket": (
        {"export.enabled": True, "export.settings.clusterName": "prod", "export.settings.exporterType": "s3"},
        "set export.settings.s3Bucket",
    ),
    "an-outbox-for-two": (
        {**EXPORT, "export.outbox": {"hostPath": {"path": "/var/lib/gpuwarden"}}},
        "export.replicas=1",
    ),
    "a-token-in-plain": (
        {
            **EXPORT,
            "export.settings.exporterType": "http",
            "export.settings.httpEndpoint": "http://store:8080/gpus",
            "export.credentials.http": "web",
        },
        "set export.settings.httpTokenInPlain=true",
    ),
    "fewer-at-once-than-in-a-second": ({**EXPORT, "export.settings.burst": 49}, "export.settings.burst is less than"),
    "a-lease-that-is-lost-before-it-is-renewed": (
        {**EXPORT, "export.settings.leaseRenewDeadline": "15s"},
        "each must be shorter than the previous one",
    ),
    "a-lease-that-is-looked-at-too-late": (
        {**EXPORT, "export.settings.leaseRetryPeriod": "9.5s500ms"},
        "each must be shorter than the previous one",
    ),
    "a-port-of-the-container": ({"service.uiPort": 8443}, "choose another"),
}


@pytest.mark.defect("binder-17")
@pytest.mark.parametrize("name", REFUSED)
def test_unusable_values_are_refused_with_a_message(name: str) -> None:
    values, sentence = REFUSED[name]
    said = refusal(values)
    assert sentence in said
    assert said.endswith((".", ".)", "debug flag to render out invalid YAML"))


# Valid values close to refused ones.
TAKEN: dict[str, Raw] = {
    "native-where-kube-scheduler-chooses": {
        "native": True,
        "settings.injection": "dra",
        "settings.reserve": "bind",
    },
    "bound": {"settings.reserve": "bind"},
    "an-index-of-all-gpus": {"settings.mapVisible": "index", "settings.injection": "cuda"},
    "renewed-just-after-it-is-made": {"settings.certsLeafLife": "15h", "settings.certsRenewBefore": "899m"},
    "a-ca-that-just-lasts": {"settings.certsCaLife": "2521h"},
    "a-token-to-this-machine": {
        **EXPORT,
        "export.settings.exporterType": "http",
        "export.settings.httpEndpoint": "http://127.0.0.1:8080/gpus",
        "export.credentials.http": "web",
    },
    "a-lease-renewed-in-time": {**EXPORT, "export.settings.leaseDuration": "1m30s"},
}


@pytest.mark.parametrize("name", TAKEN)
def test_usable_values_are_accepted(name: str) -> None:
    assert rendered(TAKEN[name])


# The rules between settings in the commands, and for each the test case above or why the chart cannot break it.
RULES: dict[str, str] = {
    "no token is required": "callers-without-an-audience",
    "more than one listener at port": "one-port-twice",
    "counts them from 0": "an-index-of-some-gpus",
    "only --ledger cluster can hold": "bound-in-memory",
    "kube-scheduler chooses GPUs by claims from templates": "the chart sets nativeTemplates",
    "claims of native pods are for proof devices": "the chart sets both by native",
    "native pods ask for challenges": "challenges-at-bind-without-answers",
    "plain HTTP authenticates no caller": "the chart says extenderPlainAnywhere with the port",
    "more than one cluster is named": "the chart names it, and leaves no other way",
    "no cluster is named": "the chart names it",
    "a kube-scheduler needs a cluster": "the chart names it",
    "claims are read from a cluster": "the chart names it",
    "only a cluster can check a token": "the chart names it",
    "a certificate must outlast its renewal": "renewed-before-it-is-made",
    "a CA must last longer": "a-ca-that-ends-too-soon",
    "jwt-svid needs keys": "challenges-without-keys",
    "a key that all replicas share": "the chart makes it, or mounts nonceKey.existingSecret",
    "an SVID is verified with its roots": "an-endpoint-without-roots",
    "{name} needs": "spire-without-an-address",
    "--burst must not be less than --qps": "fewer-at-once-than-in-a-second",
    "each must be shorter than the one before": "a-lease-that-is-lost-before-it-is-renewed",
    "both are set; set one": "the chart knows no files with secrets",
    "everyone on the way could read the token": "a-token-in-plain",
    "is below 1000": "the chart says the port as a flag",
}


def test_every_rule_between_settings_has_a_check_in_the_chart() -> None:
    """A new rule in a command needs a check in the chart too."""
    found = [
        inspect.getsource(method)
        for reader in (SettingsReader, ExportReader)
        for name, method in vars(reader).items()
        if name.startswith("check_") or name.startswith("_check_")
    ]
    said = sum(source.count("mistakes.append(") for source in found)
    whole = " ".join(" ".join(found).split())
    assert [rule for rule in RULES if rule not in whole] == []
    assert said == len(RULES)
    assert [name for name in RULES.values() if " " not in name and name not in REFUSED] == []


UNVERIFIED = "accept it by webhooks.acceptUnverifiedCallers=true"


def test_new_installation_with_unverified_callers_has_to_accept_them() -> None:
    assert UNVERIFIED in refusal({}, is_new=True)
    assert UNVERIFIED in refusal({"settings.injection": "dra"}, is_new=True)
    assert UNVERIFIED in refusal({"settings.injection": "plugin", "settings.reserve": "bind"}, is_new=True)
    assert rendered({})


@pytest.mark.parametrize(
    "values",
    [
        {"webhooks.acceptUnverifiedCallers": True},
        {"settings.reviewTokenAudience": "gpuwarden"},
        {"webhooks.clientCa": PEM},
        {"settings.reserve": "bind"},
        {"settings.injection": "dra", "settings.reserve": "bind"},
        {"webhooks.enabled": False},
        {"native": True},
    ],
    ids=str,
)
def test_new_installation_in_which_no_unknown_caller_reserves_is_allowed(values: Raw) -> None:
    assert rendered(values, is_new=True)


def test_installation_into_kube_system_is_refused() -> None:
    assert "Install into a namespace of its own" in refusal({}, namespace="kube-system")


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"tls.mode": "certManager"}, CERT_MANAGER),
        ({"serviceMonitor.enabled": True}, OPERATOR[0]),
        ({"prometheusRule.enabled": True}, OPERATOR[1]),
    ],
    ids=["cert-manager", "service-monitor", "prometheus-rule"],
)
def test_missing_api_of_the_cluster_is_named(values: Raw, missing: str) -> None:
    said = refusal(values, apis=[api for api in APIS if api != missing])
    assert "this cluster has no" in said
    assert f"--api-versions {missing}" in said
    assert rendered(values)


def test_strip_policy_requires_kubernetes_1_36() -> None:
    found = rendered({}, kubernetes="1.33.0")
    assert not [one for one in found if one["kind"].startswith("MutatingAdmissionPolicy")]
    assert "Set policies.strip=auto" in refusal({"policies.strip": "true"}, kubernetes="1.33.0")


def test_blind_policy_requires_kubernetes_1_36_and_the_webhook_does_not() -> None:
    assert "Set native=false" in refusal({"native": True}, kubernetes="1.35.2")
    assert "Set policies.blind=webhook" in refusal({"policies.blind": "policy"}, kubernetes="1.33.0")
    (mutating,) = [
        one
        for one in rendered({"policies.blind": "webhook"}, kubernetes="1.33.0")
        if one["kind"] == "MutatingWebhookConfiguration"
    ]
    hooks = {hook["name"]: hook for hook in mutating["webhooks"]}
    for name in ("mutate.gpuwarden.io", "mutate.alias.gpuwarden.io"):
        assert hooks[name]["matchConditions"] == []
        assert [rule["resources"] for rule in hooks[name]["rules"]] == [["pods"], ["pods/ephemeralcontainers"]]


@pytest.mark.parametrize("path", ["/var", "/var/lib/kubelet/pods", "/opt", "/var/openebs/local"])
def test_dangerous_host_path_is_refused(path: str) -> None:
    assert f"policies.hostPaths contains {path}, and " in refusal({"policies.hostPaths": ["/data", path]})


@pytest.mark.parametrize("path", ["/", "data", "/data/", "//data", "/data/../dev", "/./data", "/a'b", ""])
def test_host_path_that_is_not_absolute_and_clean_is_refused(path: str) -> None:
    assert "hostPaths" in refusal({"policies.hostPaths": [path]})


def test_proof_devices_need_kubernetes_1_34() -> None:
    assert "requires resource.k8s.io/v1" in refusal({"settings.proofDevices": True}, kubernetes="1.33.9")
    assert rendered({"settings.proofDevices": True}, kubernetes="1.34.0")


@pytest.mark.parametrize(
    "name", ["attested.gpuwarden.io", "gpu.nvidia.com", "gpu.example.org", "gpus.example.org", "mig.example.org"]
)
def test_classes_of_gpus_and_proofs_are_refused_for_all_users(name: str) -> None:
    theirs = {"settings.gpuDriver": "gpu.example.org", "settings.gpuDeviceClass": "gpus.example.org"}
    theirs["settings.migDeviceClass"] = "mig.example.org"
    values = {"dra.deviceClasses": ["nic.example.org", name], **({} if name.endswith(("io", "com")) else theirs)}
    assert f"dra.deviceClasses contains {name}" in refusal(values)


@pytest.mark.parametrize("blind", ["policy", "webhook"])
def test_blinding_is_refused_in_cuda_mode(blind: str) -> None:
    said = refusal({"settings.injection": "cuda", "policies.blind": blind})
    assert "set policies.blind=nobody" in said
    found = rendered({"settings.injection": "cuda"})
    assert not [one for one in found if one["metadata"]["name"].startswith("gpuwarden-blind")]
