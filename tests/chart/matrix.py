"""Value sets as installations have them, each different from the others in what it switches on."""

from tests.chart.rendering import Raw
from tests.chart.test_values import CHALLENGES, EXISTING, PEM

NONCE = {"nonceKey.existingSecret": "nonce"}
RECORDS = {"export.enabled": True, "export.settings.clusterName": "prod"}

MATRIX: dict[str, Raw] = {
    "default": {},
    "without-webhooks": {"webhooks.enabled": False},
    "ignore": {"webhooks.failurePolicy": "Ignore", "webhooks.excludedNamespaces": ["cni", "storage"]},
    "cert-manager": {"tls.mode": "certManager"},
    "cluster-issuer": {
        "tls.mode": "certManager",
        "tls.certManager.issuer.kind": "ClusterIssuer",
        "tls.certManager.issuer.name": "company",
    },
    "existing-secret": EXISTING,
    "spire-server": {
        "settings.evidence": "spire-server",
        "settings.spireServer": "spire-server.spire.svc:8081",
        "settings.spireTrustDomain": "example.org",
        "settings.spireWorkloadApi": "unix:/spiffe-workload-api/agent.sock",
    },
    "challenges": {**CHALLENGES, **NONCE, "attest.enabled": True},
    "challenges-by-csi": {**CHALLENGES, **NONCE, "attest.enabled": True, "spire.csiDriver": "csi.spiffe.io"},
    "both-providers": {
        **CHALLENGES,
        **NONCE,
        "settings.evidence": ["spire-server", "jwt-svid"],
        "settings.spireServer": "spire-server.spire.svc:8081",
        "attest.enabled": True,
        "attest.tolerations": [{"operator": "Exists"}],
    },
    "extender": {"extender.enabled": True, "extender.bind": True, "extender.clientCa": PEM},
    "binder": {"bind.enabled": True, "settings.schedulerName": ["gpu-scheduler", "second"]},
    "scores": {"score.enabled": True, "priorityClasses.create": True, "settings.tenantPriorities": {"a": 90}},
    "another-scorer": {"settings.scorer": "http://scheduler-agent.ml.svc:8080", "settings.scorerTimeout": "1s"},
    "records": RECORDS,
    "records-to-http": {
        **RECORDS,
        "export.settings.exporterType": "http",
        "export.settings.httpEndpoint": "https://store.example.org",
        "export.credentials.http": "http-credentials",
    },
    "records-to-postgres": {
        **RECORDS,
        "export.settings.exporterType": "postgres",
        "export.settings.postgresDb": "gpus",
        "export.credentials.postgres": "db-credentials",
    },
    "records-to-s3": {
        **RECORDS,
        "export.settings.exporterType": "stdout,s3",
        "export.settings.s3Bucket": "gpus",
        "export.credentials.s3": "s3-credentials",
    },
    "network-policies": {
        **CHALLENGES,
        **NONCE,
        "attest.enabled": True,
        "bind.enabled": True,
        "score.enabled": True,
        **RECORDS,
        "extender.enabled": True,
        "networkPolicy.enabled": True,
        "networkPolicy.apiServer.cidrs": ["10.1.0.0/24"],
        "networkPolicy.extraEgress": [{"ports": [{"port": 8081}], "to": [{"namespaceSelector": {}}]}],
    },
    "monitoring": {"serviceMonitor.enabled": True, "prometheusRule.enabled": True, "dashboard.enabled": True},
    "one-of-each": {"serve.replicas": 1, "reconcile.replicas": 1, "podDisruptionBudget.enabled": False},
    "memory": {
        "settings.ledger": "memory",
        "serve.replicas": 1,
        "reconcile.enabled": False,
        "inventory": {"nodes": []},
    },
    "inventory": {"inventory": {"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-1"}]}]}},
    "identity-of-the-api-server": {
        "settings.reviewTokenAudience": "gpuwarden",
        "settings.reviewCallers": ["system:serviceaccount:kube-system:apiserver-webhook"],
        "webhooks.clientCa": PEM,
    },
    "queue": {"settings.whenUnavailable": "queue", "settings.onEvidenceLost": "evict"},
    "everything-said": {
        "commonLabels": {"team": "ml"},
        "image.digest": "sha256:" + "a" * 64,
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount.annotations": {"example.org/role": "gpuwarden"},
        "podAnnotations": {"example.org/a": "b"},
        "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "",
        "serve.env": [{"name": "A", "value": "b"}],
        "serve.volumes": [{"name": "more", "emptyDir": {}}],
        "serve.volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "service.type": "LoadBalancer",
        "service.annotations": {"example.org/internal": "true"},
        "podDisruptionBudget.maxUnavailable": "50%",
    },
    "older-pods": {
        "policies.protect": False,
        "policies.strip": "false",
        "policies.blind": "webhook",
        "crds.install": False,
        "rbac.create": False,
    },
}
