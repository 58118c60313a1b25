"""The values of the chart, declared once. `make chart` writes chart/values.yaml, chart/values.schema.json, data for the
templates, and pages of docs/reference from here; a test compares.

`settings` and `export.settings` are generated from the commands' tables of settings.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import field, frozen

from webhook.core.host_paths import HOST_PATH
from webhook.core.names import MAX_SUBDOMAIN, SUBDOMAIN
from webhook.export import settings as export_settings
from webhook.export.targets import STORES, ExportStore
from webhook.runtime import settings
from webhook.runtime.setting_kinds import FILE, LABEL_KEY, PORT, SettingKind
from webhook.runtime.setting_schemas import BOOLEAN as BOOL
from webhook.runtime.setting_schemas import Schema, one_of, whole
from webhook.runtime.setting_table import Setting, in_words, key_of, plain

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "chart"

# Forms of values.
TEXT: Final[Schema] = {"type": "string"}
PATH_OR_EMPTY: Final[Schema] = {"type": "string", "pattern": "^(/.+)?$"}
NAME: Final[Schema] = {"type": "string", "pattern": f"^({SUBDOMAIN.pattern})?$", "maxLength": MAX_SUBDOMAIN}
COUNTED: Final = whole(0, 100)
MAYBE_COUNTED: Final[Schema] = {**COUNTED, "type": ["integer", "null"]}
SECONDS: Final = whole(0, 3600)
PORT_NUMBER: Final = whole(1, 65535)
PORTS: Final[Schema] = {"type": "array", "items": PORT_NUMBER}
WORDS: Final[Schema] = {"type": "array", "items": {"type": "string", "minLength": 1}}
OBJECT: Final[Schema] = {"type": "object"}
OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
TEXTS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
# Go's form, as cert-manager reads it.
GO_DURATION: Final[Schema] = {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(h|m|s))+$"}
PEM: Final[Schema] = {"type": "string", "pattern": r"^(\s*-----BEGIN CERTIFICATE-----[\s\S]*)?$"}


@frozen
class Value:
    """One value: its path, default, form and description."""

    path: str
    default: Any
    form: Schema
    about: str
    # A setting of a command, which has its own default: only a comment in values.yaml.
    is_setting: bool = field(default=False, kw_only=True)
    # The default of a setting, as the reference shows it.
    shown: str | None = field(default=None, kw_only=True)


@frozen
class Moved:
    """A value of an older chart, and the sentence that names the new one."""

    path: str
    sentence: str


HARDENED: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
UNPRIVILEGED: Final = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}


def asking(cpu: str, memory: str, limit: str) -> Mapping[str, Any]:
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": limit}}


def component(
    name: str,
    about: str,
    *,
    on: bool,
    replicas: int | None,
    resources: Mapping[str, Any],
    tolerations: Sequence[Mapping[str, Any]] = (),
) -> list[Value]:
    """The values that every process has."""
    found = [Value(f"{name}.enabled", on, BOOL, about)]
    if replicas is not None:
        only = "one is active" if name in ("reconcile", "export") else "all are active"
        found.append(Value(f"{name}.replicas", replicas, COUNTED, f"Number of Pods; {only}."))
    return [
        *found,
        Value(f"{name}.resources", dict(resources), OBJECT, "Requests and limits of the container."),
        Value(f"{name}.serviceAccountName", "", NAME, "Name of its service account; empty: the chart chooses it."),
        Value(f"{name}.priorityClassName", "", NAME, "Overrides the common priorityClassName."),
        Value(f"{name}.podAnnotations", {}, TEXTS, "Added to the common podAnnotations."),
        Value(f"{name}.podLabels", {}, TEXTS, "Added to the common podLabels."),
        Value(f"{name}.nodeSelector", {}, TEXTS, "Overrides the common nodeSelector."),
        Value(f"{name}.tolerations", [*tolerations], OBJECTS, "Overrides the common tolerations."),
        Value(f"{name}.affinity", {}, OBJECT, "Overrides the common affinity."),
        Value(f"{name}.env", [], OBJECTS, "Additional environment variables of the container, as in a Pod."),
        Value(f"{name}.volumes", [], OBJECTS, "Additional volumes, as in a Pod."),
        Value(f"{name}.volumeMounts", [], OBJECTS, "Additional volume mounts of the container."),
    ]


# The chart sets these through other values.
OWN_SETTINGS: Final = frozenset(
    (
        *("config", "host", "port", "ui_port", "extender_port", "drain_timeout", "tls_cert", "tls_key", "client_ca"),
        *("extender_client_ca", "kubeconfig", "kubernetes_url", "access_token", "ca_certificate", "in_cluster"),
        *("inventory", "lease_namespace", "bundle_endpoint_ca", "nonce_key", "server", "server_ca", "node"),
        *("runtime_socket", "pod_resources_socket", "pod_uid", "scheduler_certs", "scheduler_port", "scheduler_lease"),
        "scorer_ca",
        *("native_templates", "kubelet_plugins", "cdi_directory"),
        *("certs_namespace", "certs_service", "certs_secret", "certs_configurations", "certs_dir"),
        *("extender_plain_address", "extender_plain_anywhere", "opt_in_label", "host_paths"),
    )
)
OWN_EXPORT_SETTINGS: Final = frozenset(
    (
        *("config", "kubeconfig", "host", "server_port", "leader_election", "lease_namespace", "lease_name"),
        *("pod_name", "pod_namespace", "outbox"),
        *(f"{one.name}_file" for one in export_settings.TABLE if one.is_secret),
    )
)


# What processes of the chart do where a setting is absent.
IN_CLUSTER: Final = settings.Settings(in_cluster=True)


def default_in_cluster(one: Setting) -> object:
    return settings.in_effect(IN_CLUSTER, one.name)


def schema_of_kind(kind: SettingKind[Any]) -> Schema:
    """What the chart accepts for a setting of this kind."""
    if kind.schema is None:
        raise ValueError(f"declare the schema of this kind of setting: {kind.allowed}")
    return kind.schema


def setting_values(
    prefix: str, table: Sequence[Setting], own: frozenset[str], default_of: Callable[[Setting], object]
) -> Iterator[Value]:
    for one in table:
        if one.name in own or not one.in_file:
            continue
        if one.kind is FILE:
            raise ValueError(f"{one.name} names a file: the chart has to mount it into the Pod")
        default = plain(default_of(one))
        shown = "" if default in (None, {}) else in_words(default)
        about = one.about[0].upper() + one.about[1:] + f" ({one.kind.allowed.replace('`', '')})."
        yield Value(f"{prefix}.{one.key}", None, schema_of_kind(one.kind), about, is_setting=True, shown=shown)


COMMON: Final = [
    Value("nameOverride", "", NAME, "Replaces the chart's name in the names of objects."),
    Value("fullnameOverride", "", NAME, "Replaces the names of release and chart in the names of objects."),
    Value("commonLabels", {}, TEXTS, "Labels of all objects and Pods."),
    Value("image.repository", "gpuwarden", {"type": "string", "minLength": 1}, "Image repository, with its registry."),
    Value("image.tag", "", TEXT, "Image tag; empty: the chart's appVersion."),
    Value(
        "image.digest",
        "",
        {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        "Image digest; overrides the tag.",
    ),
    Value("image.pullPolicy", "IfNotPresent", one_of("Always", "IfNotPresent", "Never"), "Image pull policy."),
    Value("imagePullSecrets", [], OBJECTS, "Pull secrets for the registry, as in a Pod: a list of `{name: …}`."),
    Value("serviceAccount.create", True, BOOL, "Create the service accounts."),
    Value("serviceAccount.annotations", {}, TEXTS, "Annotations of all service accounts."),
    Value("rbac.create", True, BOOL, "Create the roles and bindings of the service accounts, which gpuwarden needs."),
    Value("podAnnotations", {}, TEXTS, "Annotations of all Pods."),
    Value("podLabels", {}, TEXTS, "Labels of all Pods."),
    Value("podSecurityContext", UNPRIVILEGED, OBJECT, "Security context of all Pods."),
    Value("securityContext", HARDENED, OBJECT, "Security context of all containers."),
    Value("nodeSelector", {}, TEXTS, "Node selector of all Deployments."),
    Value("tolerations", [], OBJECTS, "Tolerations of all Deployments."),
    Value(
        "affinity",
        {},
        OBJECT,
        "Affinity of all Deployments; replaces the preferred anti-affinity between Pods of a component.",
    ),
    Value(
        "topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        OBJECTS,
        "Topology spread constraints of all Deployments; the chart adds each component's selector.",
    ),
    Value(
        "priorityClassName",
        "system-cluster-critical",
        NAME,
        "Priority class of all Pods, unless a component overrides it.",
    ),
    Value("drainSeconds", 25, SECONDS, "Time that requests in progress may take when a Pod ends."),
    Value(
        "preStopSeconds",
        5,
        SECONDS,
        "Time that an ending `serve` still accepts requests, until clients use other replicas.",
    ),
    Value("podDisruptionBudget.enabled", True, BOOL, "Create a PodDisruptionBudget for each component."),
    Value(
        "podDisruptionBudget.maxUnavailable",
        1,
        {"type": ["integer", "string"]},
        "Number of Pods of a component that may be evicted at once.",
    ),
]

SERVE: Final = [
    *component(
        "serve",
        "Run `serve`, which answers admission reviews.",
        on=True,
        replicas=2,
        resources=asking("100m", "128Mi", "512Mi"),
    ),
    Value(
        "service.type", "ClusterIP", one_of("ClusterIP", "NodePort", "LoadBalancer"), "Type of the Service of `serve`."
    ),
    Value("service.port", 443, PORT_NUMBER, "Port of that Service, which the API server calls."),
    Value("service.annotations", {}, TEXTS, "Annotations of that Service."),
    Value(
        "service.uiPort",
        8080,
        PORT_NUMBER,
        "Port for health, metrics and the number of devices, in every component.",
    ),
    Value(
        "extender.enabled",
        False,
        BOOL,
        "Offer the scheduler extender in the Service, and wake waiting Pods.",
    ),
    Value("extender.port", 8444, PORT_NUMBER, "Port of the extender in the Service."),
    Value(
        "extender.plainPort",
        0,
        schema_of_kind(PORT),
        "Port of the Service with /filter in plain HTTP, for a scheduler without TLS. An attacker between the two can "
        "change the decision. 0: none.",
    ),
    Value("extender.bind", False, BOOL, "Allow `serve` to bind pods, for schedulers with `bindVerb`."),
    Value("extender.clientCa", "", PEM, "CAs of the schedulers' client certificates (PEM)."),
    Value(
        "inventory",
        {},
        OBJECT,
        "Nodes and devices; replaces the nodes' annotations. Same format as examples/inventory.yaml.",
    ),
]

WEBHOOKS: Final = [
    Value(
        "native",
        False,
        BOOL,
        "Native pods: policies of the API server replace requests for GPUs with ResourceClaims for GPUs of nodes that "
        "have proven the required hash. No webhook configurations are created, settings.proofDevices is true, and "
        "`serve` is needed only for evidence. Requires Kubernetes 1.36 or newer, a DRA driver for the GPUs, and "
        "attest.kubeletPlugins: docs/how-to/dra.md.",
    ),
    Value("webhooks.enabled", True, BOOL, "Create the webhook configurations. You may enable this later."),
    Value(
        "webhooks.failurePolicy",
        "Fail",
        one_of("Fail", "Ignore"),
        "Effect of an outage on pods that ask for GPUs. With Ignore they are created unchanged, without evidence and "
        "without a reservation. Does not affect Bindings.",
    ),
    Value(
        "webhooks.moreSchedulers",
        [],
        {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z0-9@:._/-]+$"}},
        "Additional users, besides system:kube-scheduler and gpuwarden's own, whose Bindings are allowed during an "
        "outage. Name only schedulers that respect a pod's node affinity.",
    ),
    Value("webhooks.timeoutSeconds", 10, whole(1, 30), "Timeout of the webhook calls."),
    Value(
        "webhooks.optInLabel",
        "gpuwarden.io/enabled",
        schema_of_kind(LABEL_KEY),
        "Label that opts a namespace in with the value `true`.",
    ),
    Value(
        "webhooks.excludedNamespaces",
        [],
        WORDS,
        "Namespaces that are never reviewed, besides kube-system and the release's own.",
    ),
    Value(
        "webhooks.aksAdmissionsEnforcerDisabled", True, BOOL, "Prevent AKS from changing the webhook configurations."
    ),
    Value(
        "webhooks.clientCa",
        "",
        PEM,
        "CA of the API server's client certificate, which /mutate, /mutate-binding and /validate then require (PEM).",
    ),
    Value(
        "webhooks.acceptUnverifiedCallers",
        False,
        BOOL,
        "Install although GPUs are reserved when pods are created (settings.reserve=create or "
        "settings.injection=plugin), and neither settings.reviewTokenAudience nor webhooks.clientCa is set: any client "
        "that reaches the webhooks can then reserve GPUs for seconds.",
    ),
    Value("policies.protect", True, BOOL, "Create ValidatingAdmissionPolicies that protect what gpuwarden writes."),
    Value(
        "policies.strip",
        "auto",
        one_of("auto", "true", "false"),
        "Create a MutatingAdmissionPolicy that removes forged annotations; auto: on Kubernetes 1.36 or newer.",
    ),
    Value(
        "policies.isolate",
        True,
        BOOL,
        "Create ValidatingAdmissionPolicies that refuse pods of opted-in namespaces that could open devices by "
        "themselves: privileged, SYS_ADMIN and similar capabilities, hostPID, any hostPath that hostPaths does not "
        "allow, annotations by which runtimes inject devices. Namespaces labelled gpuwarden.io/isolation=none are "
        "exempt.",
    ),
    Value(
        "policies.hostPaths",
        [],
        {"type": "array", "items": {"type": "string", "pattern": f"^{HOST_PATH}$"}},
        "Directories of nodes that pods of opted-in namespaces may mount by hostPath, with everything below them, "
        "read-only. Do not name one that a tenant can write to in another way: a symbolic link in it leads anywhere.",
    ),
    Value(
        "policies.blind",
        "auto",
        one_of("auto", "policy", "webhook", "nobody"),
        "What hides GPUs from the containers of pods without a claim in opted-in namespaces. policy: policies in the "
        "API server hide them, and pods are created there at about half the rate. webhook: gpuwarden's webhooks hide "
        "them, and review every pod and debug container there. `nobody`: gpuwarden's webhooks refuse or change a pod "
        "only if its manifest exposes GPUs; a container may see all GPUs by the variables of its image. auto: policy "
        "with Kubernetes 1.36 or newer and settings.injection other than cuda, else `nobody`.",
    ),
    Value(
        "dra.guard",
        "opted-in",
        one_of("opted-in", "all"),
        "Namespaces where only gpuwarden may write ResourceClaims and ResourceClaimTemplates, except for "
        "the classes in dra.deviceClasses. opted-in: those with the opt-in label; all: all besides kube-system, the "
        "release's own and webhooks.excludedNamespaces. In effect with native, settings.proofDevices or "
        "settings.injection dra.",
    ),
    Value(
        "dra.deviceClasses",
        [],
        {"type": "array", "items": {"type": "string", "pattern": f"^{SUBDOMAIN.pattern}$", "maxLength": MAX_SUBDOMAIN}},
        "DeviceClasses of other devices, such as network cards, whose claims all users may write in the namespaces of "
        "dra.guard.",
    ),
    Value(
        "crds.install",
        True,
        BOOL,
        "Install the CRDs. `helm uninstall` keeps them, because they contain the reservations.",
    ),
]

TLS: Final = [
    Value(
        "tls.mode",
        "selfManaged",
        one_of("selfManaged", "certManager", "existingSecret"),
        "Issuer of the serving certificate.",
    ),
    Value("tls.existingSecret", "", NAME, "For existingSecret: a Secret with tls.crt and tls.key."),
    Value("tls.caBundle", "", TEXT, "For existingSecret: the CA of that certificate, PEM or base64 of it."),
    Value(
        "tls.certManager.issuer.kind",
        "Issuer",
        one_of("Issuer", "ClusterIssuer"),
        "For certManager: the kind of the issuer.",
    ),
    Value(
        "tls.certManager.issuer.name",
        "",
        NAME,
        "For certManager: the name of the issuer; empty: the release has its own CA.",
    ),
    Value("tls.duration", "2160h", GO_DURATION, "For certManager: lifetime of a certificate."),
    Value(
        "tls.renewBefore",
        "360h",
        GO_DURATION,
        "For certManager: time before the end at which a certificate is renewed.",
    ),
]

RECONCILE: Final = component(
    "reconcile",
    "Run `reconcile`, which confirms, releases and expires reservations, and writes inventory and evidence.",
    on=True,
    replicas=2,
    resources=asking("100m", "128Mi", "512Mi"),
)

ATTEST: Final = [
    *component(
        "attest",
        "Run `attest`, which proves each node to `serve` (settings.evidence jwt-svid), or is the kubelet's plugin for "
        "proof devices (attest.kubeletPlugins), or both.",
        on=False,
        replicas=None,
        resources=asking("10m", "64Mi", "128Mi"),
        # A tainted node must prove itself too, especially one with our own taint for lost evidence.
        tolerations=[{"operator": "Exists"}],
    ),
    Value(
        "attest.runtimeSocket",
        "",
        PATH_OR_EMPTY,
        "The container runtime's socket on the nodes, such as /run/containerd/containerd.sock. `attest` then runs as "
        "root and reports which orphaned pods have ended, and which pods have other GPUs than those reserved for them. "
        "Empty: off.",
    ),
    Value(
        "attest.podResourcesDirectory",
        "/var/lib/kubelet/pod-resources",
        TEXT,
        "Directory of the kubelet's PodResources socket on the nodes, for the same purpose.",
    ),
    Value(
        "attest.kubeletPlugins",
        "",
        PATH_OR_EMPTY,
        "The kubelet's directory on the nodes, such as /var/lib/kubelet. `attest` then runs as root, is the kubelet's "
        "plugin for proof devices, reads ResourceClaims and closes the node's ended devices; that needs neither serve "
        "nor jwt-svid. Empty: off, and no pod with a proof device starts.",
    ),
    Value(
        "attest.cdiDirectory",
        "",
        PATH_OR_EMPTY,
        "The directory of CDI specifications on the nodes, such as /var/run/cdi. With it and attest.kubeletPlugins, "
        "containers with a proof device get a file with the evidence, signed by the node. Who can write there controls "
        "the node. Empty: off.",
    ),
    Value(
        "spire.socketDirectory", "/run/spire/agent-sockets", TEXT, "Directory of the SPIRE agent's socket on the nodes."
    ),
    Value("spire.csiDriver", "", NAME, "CSI driver that mounts that socket instead, such as csi.spiffe.io."),
    Value(
        "spire.mountPath",
        "/spiffe-workload-api",
        TEXT,
        "Mount path of that directory in the Pods; settings.spireWorkloadApi is below it.",
    ),
    Value(
        "nonceKey.existingSecret",
        "",
        NAME,
        "Secret with the key of the challenges; empty: the chart creates one and keeps it.",
    ),
    Value("nonceKey.key", "nonce.key", TEXT, "Key of that Secret."),
    Value("bundleEndpointCa", "", PEM, "CAs of settings.bundleEndpoint (PEM)."),
    Value("scorerCa", "", PEM, "CAs of an https settings.scorer (PEM)."),
]

NETWORK: Final = [
    Value("networkPolicy.enabled", False, BOOL, "Create NetworkPolicies, for a network that enforces them."),
    Value(
        "networkPolicy.apiServer.cidrs",
        ["0.0.0.0/0", "::/0"],
        WORDS,
        "Addresses of the API server, which is not a Pod that a selector could match. By default every client can "
        "reach `serve`: restrict it to the API server.",
    ),
    Value("networkPolicy.apiServer.ports", [443, 6443], PORTS, "Ports of the API server."),
    Value(
        "networkPolicy.scrapers",
        [{"namespaceSelector": {}}],
        OBJECTS,
        "Peers of a NetworkPolicy that may read metrics. A peer that matches every Pod does not reach `score`.",
    ),
    Value(
        "networkPolicy.extraEgress",
        [],
        OBJECTS,
        "Additional egress rules for all components. The ports in the settings (SPIRE Server, bundle endpoint, scorer, "
        "stores) are open already. Add a port if a Service forwards to another one, or a bucket is not at 443.",
    ),
]

MONITORING: Final = [
    Value("serviceMonitor.enabled", False, BOOL, "Create a ServiceMonitor for the Prometheus operator."),
    Value("serviceMonitor.labels", {}, TEXTS, "Labels by which Prometheus selects it."),
    Value("serviceMonitor.interval", "30s", TEXT, "Scrape interval."),
    Value("prometheusRule.enabled", False, BOOL, "Create a PrometheusRule with the alerts."),
    Value("prometheusRule.labels", {}, TEXTS, "Labels by which Prometheus selects it."),
    Value("dashboard.enabled", False, BOOL, "Create a ConfigMap with a Grafana dashboard."),
    Value("dashboard.labels", {"grafana_dashboard": "1"}, TEXTS, "Labels by which Grafana's sidecar finds it."),
    Value("priorityClasses.create", False, BOOL, "Create PriorityClasses for scored pods."),
    Value(
        "priorityClasses.classes",
        {"gpu-ultra": 1000, "gpu-high": 750, "gpu-medium": 500, "gpu-default": 250},
        {"type": "object", "additionalProperties": {"type": "integer", "maximum": 1000000000}},
        "Names and values of the PriorityClasses. Yours are added; null removes one.",
    ),
]

# Not a component: it runs in the Pods of `serve`.
SCHEDULER: Final = [
    Value(
        "scheduler.enabled",
        False,
        BOOL,
        "Whether each Pod of `serve` has a second container with kube-scheduler, whose profile places the pods that "
        "name it. One of them is the leader.",
    ),
    Value(
        "scheduler.name",
        "gpu-scheduler",
        {"type": "string", "pattern": f"^{SUBDOMAIN.pattern}$", "maxLength": MAX_SUBDOMAIN},
        "The profile's name, which pods have in schedulerName.",
    ),
    Value(
        "scheduler.image.repository",
        "registry.k8s.io/kube-scheduler",
        {"type": "string", "minLength": 1},
        "The image of kube-scheduler, with its registry.",
    ),
    Value("scheduler.image.tag", "", TEXT, "Its tag; empty: the version of the cluster."),
    Value("scheduler.image.digest", "", {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}, "Instead of a tag."),
    Value("scheduler.resources", asking("50m", "128Mi", "512Mi"), OBJECT, "Requests and limits of its container."),
    Value("scheduler.serviceAccountName", "", NAME, "Its service account, if not named by the chart."),
]
SCORE: Final = component(
    "score",
    "Run `score`, a small scorer. `serve` asks it unless settings.scorer names another.",
    on=False,
    replicas=2,
    resources=asking("50m", "96Mi", "256Mi"),
)
EXPORT: Final = [
    *component(
        "export",
        "Run `export`, which sends serial numbers and uses of GPUs to stores.",
        on=False,
        replicas=2,
        resources=asking("100m", "128Mi", "1Gi"),
    ),
    Value(
        "export.outbox",
        {"emptyDir": {}},
        {"type": "object", "minProperties": 1},
        "Volume for records that are not stored yet, as in a Pod. An emptyDir is deleted with its Pod.",
    ),
    *(
        Value(f"export.credentials.{one.name}", "", NAME, one.secret.about)
        for one in STORES.values()
        if one.secret is not None
    ),
    *setting_values("export.settings", export_settings.TABLE, OWN_EXPORT_SETTINGS, lambda one: one.default),
]
CERTS: Final = [
    one
    for one in component("certs", "", on=True, replicas=1, resources=asking("10m", "64Mi", "256Mi"))
    if one.path != "certs.enabled"
]


def values() -> list[Value]:
    return [
        *COMMON,
        *setting_values("settings", settings.SETTINGS, OWN_SETTINGS, default_in_cluster),
        *SERVE,
        *WEBHOOKS,
        *TLS,
        *RECONCILE,
        *ATTEST,
        *SCHEDULER,
        *SCORE,
        *EXPORT,
        *CERTS,
        *NETWORK,
        *MONITORING,
    ]


PART: Final = "each component has its own: serve, reconcile, export, score, attest, certs"

# Values of the charts gpu-scheduler and scheduler-webhook. All others work under the same name.
MOVED: Final = [
    Moved("replicaCount", "replicaCount is serve.replicas (and reconcile.replicas, score.replicas, …)"),
    Moved("resources", "resources is serve.resources: " + PART),
    Moved("env", "env is serve.env: " + PART),
    Moved("volumes", "volumes is serve.volumes: " + PART),
    Moved("volumeMounts", "volumeMounts is serve.volumeMounts: " + PART),
    Moved(
        "livenessProbe",
        "livenessProbe is fixed: /healthz at service.uiPort",
    ),
    Moved(
        "readinessProbe",
        "readinessProbe is fixed: /readyz at service.uiPort",
    ),
    Moved(
        "autoscaling",
        "autoscaling is not part of this chart: create your own HorizontalPodAutoscaler for the Deployment",
    ),
    Moved("serviceAccount.name", "serviceAccount.name is serve.serviceAccountName: " + PART),
    Moved(
        "serviceAccount.automount",
        "serviceAccount.automount is fixed: only Pods that use the API server mount a token",
    ),
    Moved(
        "service.targetPort",
        "service.targetPort is fixed: service.port, service.uiPort and extender.port lead to the container's ports",
    ),
    Moved("service.name", "service.name is fixed: the ports are called https, http and extender"),
    Moved("webhook.enabled", "webhook.enabled is webhooks.enabled"),
    Moved("webhook.caBundle", "webhook.caBundle is tls.caBundle, with tls.mode=existingSecret and tls.existingSecret"),
    Moved("webhook.failurePolicy", "webhook.failurePolicy is webhooks.failurePolicy"),
    Moved("webhook.schedulerUrl", "webhook.schedulerUrl is settings.scorer"),
    Moved(
        "webhook.timeoutSeconds",
        "webhook.timeoutSeconds is settings.scorerTimeout, such as 5s; "
        "webhooks.timeoutSeconds is the timeout of the webhook calls",
    ),
    Moved("webhook.enableMutation", "webhook.enableMutation is settings.hintPods"),
    Moved("webhook.priorityBuckets", "webhook.priorityBuckets is settings.priorityBuckets"),
    Moved("webhook.rules", "webhook.rules is fixed: gpuwarden needs to review these objects"),
    Moved(
        "webhook.namespaceSelector",
        "webhook.namespaceSelector is webhooks.optInLabel; scheduler.radix.ai/enabled=true opts in too",
    ),
    Moved("webhook.sideEffects", "webhook.sideEffects is fixed: NoneOnDryRun"),
    Moved("webhook.admissionReviewVersions", "webhook.admissionReviewVersions is fixed: v1"),
    Moved("tls.certManager.enabled", "tls.certManager.enabled is tls.mode=certManager"),
    Moved(
        "cert-manager", "cert-manager is not part of this chart: install it separately, then set tls.mode=certManager"
    ),
    # Of this chart before it ran kube-scheduler; for one release.
    Moved(
        "bind",
        "bind is gone, with its command: scheduler.enabled=true runs kube-scheduler with a profile instead",
    ),
    Moved("settings.schedulerName", "settings.schedulerName is scheduler.name"),
]


# What is written.


def nested(found: Iterable[Value]) -> dict[str, Any]:
    """A tree of dicts with values as leaves."""
    tree: dict[str, Any] = {}
    for one in found:
        place = tree
        *above, last = one.path.split(".")
        for name in above:
            place = place.setdefault(name, {})
        place[last] = one
    return tree


HEAD: Final = "# Written by `make chart` from scripts/chart_values.py. Change values there.\n"
GROUPS: Final = {
    "settings": "Settings of all processes: docs/reference/settings.md. A setting that is absent has its default.",
    "serve": "`gpuwarden serve`.",
    "reconcile": "`gpuwarden reconcile`.",
    "attest": "`gpuwarden attest`, on every node.",
    "scheduler": "kube-scheduler, in the Pods of `serve`: docs/how-to/scheduler.md.",
    "score": "`gpuwarden score`.",
    "export": "`gpuwarden export`.",
    "certs": "`gpuwarden certs`, for tls.mode selfManaged.",
}


def values_yaml() -> str:
    return HEAD + "".join(yaml_lines(nested(values()), ""))


def yaml_lines(tree: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, below in tree.items():
        if not indent:
            yield "\n"
        if isinstance(below, dict):
            if name in GROUPS and not indent:
                yield f"# {GROUPS[name]}\n"
            is_empty = all(isinstance(one, Value) and one.is_setting for one in below.values())
            yield f"{indent}{name}:{' {}' if is_empty else ''}\n"
            yield from yaml_lines(below, indent + "  ")
        elif below.is_setting:
            yield f"{indent}# {name}: {below.shown}".rstrip() + f"  # {below.about}\n"
        else:
            yield f"{indent}# {below.about}\n"
            text = yaml.safe_dump({name: below.default}, sort_keys=False, width=1000)
            yield "".join(f"{indent}{line}\n" for line in text.splitlines())


def schema() -> Schema:
    whole = schema_of(nested(values()))
    for one in MOVED:
        place = whole["properties"]
        *above, last = one.path.split(".")
        for name in above:
            place = place.setdefault(name, {"type": "object", "additionalProperties": False, "properties": {}})[
                "properties"
            ]
        place[last] = {"description": f"Moved: {one.sentence}."}
    # Helm passes this value to sub-charts.
    whole["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "gpuwarden", **whole}


def schema_of(tree: Mapping[str, Any]) -> Schema:
    properties = {}
    for name, below in tree.items():
        if isinstance(below, dict):
            properties[name] = schema_of(below)
        else:
            default = {} if below.is_setting else {"default": below.default}
            properties[name] = {**below.form, "description": below.about, **default}
    return {"type": "object", "additionalProperties": False, "properties": properties}


REFERENCE: Final = """\
# Values of the chart

`make chart` writes this page from `scripts/chart_values.py`. The chart refuses unknown values and combinations that
cannot work, with a message. [settings.md](settings.md) describes `settings.*`, [install.md](../how-to/install.md) the
installation.

| value | default | what it does |
|---|---|---|
"""
MOVED_HEAD: Final = """
## Values of older charts

The charts `gpu-scheduler` and `scheduler-webhook` had these values. If you set one, the installation stops with this
message. All other values of these charts have the same name here.

| value | now |
|---|---|
"""


def reference() -> str:
    rows = [f"| `{one.path}` | {shown(one)} | {one.about.replace('|', '/')} |\n" for one in values()]
    moved = [f"| `{one.path}` | {one.sentence} |\n" for one in MOVED]
    return REFERENCE + "".join(rows) + MOVED_HEAD + "".join(moved)


def shown(one: Value) -> str:
    if one.is_setting:
        return f"`{one.shown}`" if one.shown else ""
    return f"`{json.dumps(one.default)}`" if one.default not in ("", None) else ""


def stores_yaml() -> str:
    """What the chart's own templates read of each store."""
    return HEAD.replace("scripts/chart_values.py", "webhook/export/targets.py") + yaml.safe_dump(
        {one.name: store_facts(one) for one in STORES.values()}, sort_keys=False, width=1000
    )


def store_facts(store: ExportStore[Any]) -> Mapping[str, Any]:
    secret = store.secret
    keys = {} if secret is None else {store.prefix + name: key for name, key in secret.keys.items()}
    optional = set() if secret is None else {store.prefix + name for name in secret.optional}
    needed = [name for name in store.required if name not in keys]
    needed_keys = [keys[name] for name in store.required if name in keys and name not in optional]
    sentence = [f"export.settings.{key_of(name)}" for name in needed]
    if needed_keys:
        sentence.append(f"export.credentials.{store.name} to the Secret with {' and '.join(needed_keys)}")
    variables = [
        {"name": one.older_variable or one.variable, "key": keys[one.name]}
        | ({"unless": one.key} if one.name in optional else {})
        for one in store.settings
        if one.name in keys
    ]
    found = {
        "settings": [key_of(name) for name in needed],
        "needsSecret": bool(needed_keys),
        "sentence": ", and ".join(sentence),
        "variables": variables,
        "everyKey": secret is not None and not keys,
        "address": key_of(store.prefix + store.address) if store.address else None,
        "allowsPlain": key_of(store.prefix + store.allows_plain) if store.allows_plain else None,
        "port": store.port,
        "portSetting": key_of(store.prefix + store.port_setting) if store.port_setting else None,
    }
    return {name: value for name, value in found.items() if value}


def evidence_yaml() -> str:
    """What the chart's own templates read of each evidence provider."""
    return HEAD.replace("scripts/chart_values.py", "webhook/runtime/settings.py") + yaml.safe_dump(
        {name: provider_facts(one) for name, one in settings.EVIDENCE_PROVIDERS.items()}, sort_keys=False
    )


def provider_facts(provider: settings.ProviderDeclaration) -> Mapping[str, Any]:
    found = {
        "settings": [key_of(name) for name in provider.needs],
        "settingsOverTcp": [key_of(name) for name in provider.needs_over_tcp],
        "address": key_of(provider.address),
    }
    return {name: value for name, value in found.items() if value}


def moved_yaml() -> str:
    """Read by the chart's own templates."""
    return HEAD + yaml.safe_dump({one.path: one.sentence for one in MOVED}, sort_keys=False, width=1000)


def written() -> dict[Path, str]:
    """The text of each generated file."""
    return {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        CHART / "files/moved.yaml": moved_yaml(),
        CHART / "files/stores.yaml": stores_yaml(),
        CHART / "files/evidence.yaml": evidence_yaml(),
        ROOT / "docs/reference/configure.md": reference(),
        ROOT / "docs/reference/settings.md": settings.reference(),
        ROOT / "docs/reference/settings-export.md": export_settings.reference(),
    }
