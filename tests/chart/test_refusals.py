"""What cannot work is refused in one sentence, and says what to do."""

from typing import Any

import pytest

from tests.chart.rendering import APIS, CERT_MANAGER, OPERATOR, Raw, refusal, rendered
from tests.chart.test_values import CHALLENGES, EXISTING, PEM

SPIRE = {
    "settings.evidence": "spire-server",
    "settings.spireServer": "spire-server:8081",
    "settings.spireTrustDomain": "example.org",
    "settings.spireWorkloadApi": "unix:/spiffe-workload-api/agent.sock",
}


def without(values: Raw, *names: str, **more: Any) -> Raw:
    return {name: value for name, value in values.items() if name not in names}


REFUSED: dict[str, tuple[Raw, str]] = {
    "secret-without-a-name": (without(EXISTING, "tls.existingSecret"), "name the Secret with tls.crt and tls.key by"),
    "secret-without-a-bundle": (without(EXISTING, "tls.caBundle"), "give the CA of its certificate by tls.caBundle"),
    "a-bundle-that-is-none": (
        {**EXISTING, "tls.caBundle": "bm90IGEgY2VydA=="},
        "There is no certificate in tls.caBundle",
    ),
    "secret-in-another-mode": ({"tls.existingSecret": "ours"}, "tls.existingSecret is set and tls.mode is selfManaged"),
    "bundle-in-another-mode": ({"tls.caBundle": PEM}, "tls.caBundle is set and tls.mode is selfManaged"),
    "a-cluster-issuer-without-a-name": (
        {"tls.mode": "certManager", "tls.certManager.issuer.kind": "ClusterIssuer"},
        "name it by tls.certManager.issuer.name",
    ),
    "webhooks-that-nobody-answers": ({"serve.enabled": False}, "nobody would answer the API server"),
    "memory-in-two-replicas": (
        {"settings.ledger": "memory", "reconcile.enabled": False},
        "settings.ledger is memory, which each replica has for itself",
    ),
    "memory-and-a-reconciler": (
        {"settings.ledger": "memory", "serve.replicas": 1},
        "a reconciler sees no reservations there",
    ),
    "memory-of-no-nodes": (
        {"settings.ledger": "memory", "serve.replicas": 1, "reconcile.enabled": False},
        "name nodes and devices by inventory",
    ),
    "no-reconciler": ({"reconcile.enabled": False}, "nobody would confirm and release reservations"),
    "spire-without-an-address": (without(SPIRE, "settings.spireServer"), "set settings.spireServer and"),
    "spire-without-an-svid": (without(SPIRE, "settings.spireWorkloadApi"), "set settings.spireWorkloadApi"),
    "challenges-without-a-domain": (without(CHALLENGES, "settings.spireTrustDomain"), "set settings.spireTrustDomain"),
    "challenges-without-keys": (without(CHALLENGES, "settings.spireWorkloadApi"), "set one"),
    "challenges-behind-a-client-ca": ({**CHALLENGES, "webhooks.clientCa": PEM}, "use settings.reviewTokenAudience"),
    "attest-for-nobody": ({"attest.enabled": True}, "nobody would challenge the nodes"),
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
    "callers-without-an-audience": ({"settings.reviewCallers": "x"}, "set settings.reviewTokenAudience"),
    "a-binder-that-nobody-reaches": ({"extender.bind": True}, "extender.enabled is not"),
    "one-port-twice": ({"service.port": 8080}, "they have to differ"),
    "two-scorers": ({"score.enabled": True, "settings.scorer": "http://agent:8080"}, "choose one"),
    "records-of-no-cluster": ({"export.enabled": True}, "set export.settings.clusterName"),
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
        "by export.credentials.postgres",
    ),
    "a-store-without-a-bucket": (
        {"export.enabled": True, "export.settings.clusterName": "prod", "export.settings.exporterType": "s3"},
        "set export.settings.s3Bucket",
    ),
    "a-port-of-the-container": ({"service.uiPort": 8443}, "choose another"),
}


@pytest.mark.defect("S1-17")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(name: str) -> None:
    values, sentence = REFUSED[name]
    said = refusal(values)
    assert sentence in said
    assert said.endswith((".", ".)", "debug flag to render out invalid YAML"))


def test_a_namespace_that_is_never_reviewed_is_no_place_for_it() -> None:
    assert "install into a namespace of its own" in refusal({}, namespace="kube-system")


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"tls.mode": "certManager"}, CERT_MANAGER),
        ({"serviceMonitor.enabled": True}, OPERATOR[0]),
        ({"prometheusRule.enabled": True}, OPERATOR[1]),
    ],
    ids=["cert-manager", "service-monitor", "prometheus-rule"],
)
def test_what_the_cluster_does_not_have_is_said(values: Raw, missing: str) -> None:
    said = refusal(values, apis=[api for api in APIS if api != missing])
    assert "this cluster has no" in said
    assert f"--api-versions {missing}" in said
    assert rendered(values)


def test_an_older_kubernetes_has_no_policy_that_strips_and_is_asked_for_none() -> None:
    found = rendered({}, kubernetes="1.33.0")
    assert not [one for one in found if one["kind"].startswith("MutatingAdmissionPolicy")]
    assert "set policies.strip=auto" in refusal({"policies.strip": "true"}, kubernetes="1.33.0")
