"""The values of the chart, declared once. `make chart` writes chart/values.yaml,
chart/values.schema.json and docs/reference/configure.md from here; a test compares.

What gpuwarden itself takes as settings is not repeated: `settings` and `export.settings` follow the commands' tables.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import field, frozen

from scripts.chart_forms import BOOL, Schema, form_of, one_of
from webhook.core.host_paths import HOST_PATH
from webhook.export import settings as export_settings
from webhook.runtime import settings
from webhook.runtime.setting_kinds import FILE
from webhook.runtime.setting_table import Setting, in_words, plain

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "chart"

# Forms of values.
TEXT: Final[Schema] = {"type": "string"}
PATH_OR_EMPTY: Final[Schema] = {"type": "string", "pattern": "^(/.+)?$"}
NAME: Final[Schema] = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$", "maxLength": 253}
COUNTED: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 100}
MAYBE_COUNTED: Final[Schema] = {**COUNTED, "type": ["integer", "null"]}
SECONDS: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 3600}
PORT_NUMBER: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
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
    """One value: where it stands, what it is if nobody says, its form, and what it does."""

    path: str
    default: Any
    form: Schema
    about: str
    # Not in values.yaml but for a comment: a setting of a command, which has a default of its own.
    is_setting: bool = field(default=False, kw_only=True)
    # The default as people read it, where it is another's.
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
    """What is there to say of every process."""
    found = [Value(f"{name}.enabled", on, BOOL, about)]
    if replicas is not None:
        only = "of which one acts" if name in ("reconcile", "bind", "export", "certs") else "all of them at work"
        found.append(Value(f"{name}.replicas", replicas, COUNTED, f"Pods of it, {only}."))
    return [
        *found,
        Value(f"{name}.resources", dict(resources), OBJECT, "Requests and limits of its container."),
        Value(f"{name}.serviceAccountName", "", NAME, "Its service account, if not named by the chart."),
        Value(f"{name}.priorityClassName", "", NAME, "Instead of the common one."),
        Value(f"{name}.podAnnotations", {}, TEXTS, "Besides the common ones."),
        Value(f"{name}.podLabels", {}, TEXTS, "Besides the common ones."),
        Value(f"{name}.nodeSelector", {}, TEXTS, "Instead of the common one."),
        Value(f"{name}.tolerations", [*tolerations], OBJECTS, "Instead of the common ones."),
        Value(f"{name}.affinity", {}, OBJECT, "Instead of the common one."),
        Value(f"{name}.env", [], OBJECTS, "More variables of the container, as in a Pod."),
        Value(f"{name}.volumes", [], OBJECTS, "More volumes, as in a Pod."),
        Value(f"{name}.volumeMounts", [], OBJECTS, "Where they are mounted."),
    ]


# The chart says these itself, by other values.
OWN_SETTINGS: Final = frozenset(
    (
        *("config", "host", "port", "ui_port", "extender_port", "drain_timeout", "tls_cert", "tls_key", "client_ca"),
        *("extender_client_ca", "kubeconfig", "kubernetes_url", "access_token", "ca_certificate", "in_cluster"),
        *("inventory", "lease_namespace", "bundle_endpoint_ca", "nonce_key", "server", "server_ca", "node"),
        *("runtime_socket", "pod_resources_socket", "pod_uid"),
        "scorer_ca",
        *("certs_namespace", "certs_service", "certs_secret", "certs_configurations", "certs_dir"),
        *("extender_plain_address", "extender_plain_anywhere", "opt_in_label", "host_paths"),
    )
)
OWN_EXPORT_SETTINGS: Final = frozenset(
    (
        *("config", "kubeconfig", "host", "server_port", "leader_election", "lease_namespace", "lease_name"),
        *("pod_name", "pod_namespace", "outbox", "http_auth_token_file", "postgres_password_file"),
    )
)


# What processes of the chart do where a setting is absent.
IN_CLUSTER: Final = settings.Settings(in_cluster=True)


def default_in_cluster(one: Setting) -> object:
    return settings.in_effect(IN_CLUSTER, one.name)


def setting_values(
    prefix: str, table: Sequence[Setting], own: frozenset[str], default_of: Callable[[Setting], object]
) -> Iterator[Value]:
    for one in table:
        if one.name in own or not one.in_file:
            continue
        if one.kind is FILE:
            raise ValueError(f"{one.name} names a file: the chart has to say how it gets into the Pod")
        default = plain(default_of(one))
        shown = "" if default in (None, {}) else in_words(default)
        about = one.about[0].upper() + one.about[1:] + f" ({one.kind.allowed.replace('`', '')})."
        yield Value(f"{prefix}.{one.key}", None, form_of(one.kind), about, is_setting=True, shown=shown)


COMMON: Final = [
    Value("nameOverride", "", NAME, "Instead of the chart's name in the names of objects."),
    Value("fullnameOverride", "", NAME, "Instead of release and chart name in the names of objects."),
    Value("commonLabels", {}, TEXTS, "Labels of every object and every Pod."),
    Value("image.repository", "gpuwarden", {"type": "string", "minLength": 1}, "The image, with its registry."),
    Value("image.tag", "", TEXT, "Its tag; empty: the chart's appVersion."),
    Value("image.digest", "", {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}, "Instead of a tag."),
    Value("image.pullPolicy", "IfNotPresent", one_of("Always", "IfNotPresent", "Never"), "When it is pulled."),
    Value("imagePullSecrets", [], OBJECTS, "Secrets for its registry, as in a Pod: a list of `{name: …}`."),
    Value("serviceAccount.create", True, BOOL, "Whether the chart makes the service accounts."),
    Value("serviceAccount.annotations", {}, TEXTS, "Annotations of all of them."),
    Value("rbac.create", True, BOOL, "Whether it makes their roles. Without them nothing works."),
    Value("podAnnotations", {}, TEXTS, "Annotations of all Pods."),
    Value("podLabels", {}, TEXTS, "Labels of all Pods."),
    Value("podSecurityContext", UNPRIVILEGED, OBJECT, "Who the Pods run as."),
    Value("securityContext", HARDENED, OBJECT, "What their containers may do."),
    Value("nodeSelector", {}, TEXTS, "Nodes for all Deployments."),
    Value("tolerations", [], OBJECTS, "Taints that all Deployments tolerate."),
    Value("affinity", {}, OBJECT, "Instead of keeping a component's Pods on different nodes where that can be."),
    Value(
        "topologySpreadConstraints",
        [{"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        OBJECTS,
        "How a component's Pods are spread; the selector is the component's.",
    ),
    Value("priorityClassName", "system-cluster-critical", NAME, "Of all Pods, but of a component that names its own."),
    Value("drainSeconds", 25, SECONDS, "How long requests in flight may take once a Pod is to end."),
    Value(
        "preStopSeconds", 5, SECONDS, "How long `serve` goes on taking requests before that: until nobody sends any."
    ),
    Value("podDisruptionBudget.enabled", True, BOOL, "Whether evictions leave all but some Pods of a component alone."),
    Value("podDisruptionBudget.maxUnavailable", 1, {"type": ["integer", "string"]}, "How many may be evicted at once."),
]

SERVE: Final = [
    *component("serve", "Answers admission reviews.", on=True, replicas=2, resources=asking("100m", "128Mi", "512Mi")),
    Value("service.type", "ClusterIP", one_of("ClusterIP", "NodePort", "LoadBalancer"), "Of the Service of `serve`."),
    Value("service.port", 443, PORT_NUMBER, "Where the API server calls it."),
    Value("service.annotations", {}, TEXTS, "Annotations of that Service."),
    Value(
        "service.uiPort",
        8080,
        PORT_NUMBER,
        "Health, metrics and the number of devices there; every component has this port.",
    ),
    Value(
        "extender.enabled",
        False,
        BOOL,
        "Whether the Service leads schedulers to the extender, and Pods that wait are woken.",
    ),
    Value("extender.port", 8444, PORT_NUMBER, "Its port of the Service."),
    Value(
        "extender.plainPort",
        0,
        {"type": "integer", "minimum": 0, "maximum": 65535},
        "A port of the Service with /filter in plain HTTP, for a scheduler that speaks no TLS: whoever is between "
        "the two decides in its place. 0: none.",
    ),
    Value("extender.bind", False, BOOL, "Whether `serve` may bind, for schedulers with `bindVerb`."),
    Value("extender.clientCa", "", PEM, "CAs of the client certificates that schedulers show (PEM)."),
    Value(
        "inventory",
        {},
        OBJECT,
        "Nodes and devices, instead of the nodes' annotations; the form is that of examples/inventory.yaml.",
    ),
]

WEBHOOKS: Final = [
    Value("webhooks.enabled", True, BOOL, "Whether the API server sends pods. It may be switched on later."),
    Value(
        "webhooks.failurePolicy",
        "Fail",
        one_of("Fail", "Ignore"),
        "What becomes of pods that ask for GPUs while no replica answers. With Ignore they are created as they came, "
        "unproven and without a reservation; who is bound to a node does not depend on it.",
    ),
    Value(
        "webhooks.moreSchedulers",
        [],
        {"type": "array", "items": {"type": "string", "pattern": "^[A-Za-z0-9@:._/-]+$"}},
        "Users besides system:kube-scheduler and our own whose Bindings go on while no replica answers: schedulers "
        "that keep a pod's node affinity, and nobody else.",
    ),
    Value(
        "webhooks.timeoutSeconds", 10, {"type": "integer", "minimum": 1, "maximum": 30}, "The API server's patience."
    ),
    Value(
        "webhooks.optInLabel",
        "gpuwarden.io/enabled",
        {"type": "string", "minLength": 1},
        "The label whose value `true` opts a namespace in.",
    ),
    Value(
        "webhooks.excludedNamespaces", [], WORDS, "Never reviewed, besides kube-system and the release's own namespace."
    ),
    Value("webhooks.aksAdmissionsEnforcerDisabled", True, BOOL, "Tells AKS to leave the webhook configurations alone."),
    Value(
        "webhooks.clientCa",
        "",
        PEM,
        "CA of the API server's client certificate, which /mutate and /validate demand (PEM).",
    ),
    Value(
        "policies.protect", True, BOOL, "ValidatingAdmissionPolicies that keep what gpuwarden wrote from other hands."
    ),
    Value(
        "policies.strip",
        "auto",
        one_of("auto", "true", "false"),
        "A MutatingAdmissionPolicy that takes forged annotations off; auto: where Kubernetes is 1.36 or newer.",
    ),
    Value(
        "policies.isolate",
        True,
        BOOL,
        "ValidatingAdmissionPolicies that refuse pods of opted-in namespaces that could open devices by themselves: "
        "privileged, SYS_ADMIN and its like, hostPID, any hostPath that hostPaths does not allow, annotations by "
        "which runtimes inject devices. Namespaces labelled gpuwarden.io/isolation=none are exempt.",
    ),
    Value(
        "policies.hostPaths",
        [],
        {"type": "array", "items": {"type": "string", "pattern": f"^{HOST_PATH}$"}},
        "Directories of nodes that pods of opted-in namespaces may mount by hostPath, with all that is in them, "
        "read-only. Name none that a tenant can write to in another way: a link in it leads anywhere.",
    ),
    Value(
        "policies.blind",
        "auto",
        one_of("auto", "policy", "webhook", "nobody"),
        "Who writes NVIDIA_VISIBLE_DEVICES=void into containers of opted-in namespaces whose pods ask for nothing. "
        "policy: two MutatingAdmissionPolicies, which about halve the rate at which pods can be created there; "
        "webhook: every pod and debug container of these namespaces is sent to gpuwarden; auto: policy where "
        "Kubernetes is 1.36 or newer and settings.injection is nvidia, else nobody.",
    ),
    Value(
        "crds.install",
        True,
        BOOL,
        "Whether the CRDs come with the chart. `helm uninstall` leaves them, for they hold the reservations.",
    ),
]

TLS: Final = [
    Value(
        "tls.mode",
        "selfManaged",
        one_of("selfManaged", "certManager", "existingSecret"),
        "Who makes the serving certificate.",
    ),
    Value("tls.existingSecret", "", NAME, "For existingSecret: a Secret with tls.crt and tls.key."),
    Value("tls.caBundle", "", TEXT, "For existingSecret: the CA of that certificate, PEM or base64 of it."),
    Value(
        "tls.certManager.issuer.kind",
        "Issuer",
        one_of("Issuer", "ClusterIssuer"),
        "For certManager: the kind of the issuer.",
    ),
    Value("tls.certManager.issuer.name", "", NAME, "And its name; empty: a CA of the release's own."),
    Value("tls.duration", "2160h", GO_DURATION, "For certManager: how long a certificate is good."),
    Value("tls.renewBefore", "360h", GO_DURATION, "For certManager: when it is renewed."),
]

RECONCILE: Final = component(
    "reconcile",
    "Confirms, releases and expires reservations; writes inventory and evidence.",
    on=True,
    replicas=2,
    resources=asking("100m", "128Mi", "512Mi"),
)

ATTEST: Final = [
    *component(
        "attest",
        "Proves each node to `serve`, for settings.evidence jwt-svid.",
        on=False,
        replicas=None,
        resources=asking("10m", "64Mi", "128Mi"),
        # A node with a taint has to prove itself too, and above all one that bears ours for lack of evidence.
        tolerations=[{"operator": "Exists"}],
    ),
    Value(
        "attest.runtimeSocket",
        "",
        PATH_OR_EMPTY,
        "The container runtime's socket on the nodes, such as /run/containerd/containerd.sock: then it runs as root, "
        "and tells which orphaned pods have ended. Empty: off.",
    ),
    Value(
        "attest.podResourcesDirectory",
        "/var/lib/kubelet/pod-resources",
        TEXT,
        "Directory of the kubelet's PodResources socket on the nodes, for the same.",
    ),
    Value(
        "spire.socketDirectory", "/run/spire/agent-sockets", TEXT, "Directory of the SPIRE agent's socket on the nodes."
    ),
    Value("spire.csiDriver", "", NAME, "A CSI driver that mounts it instead, such as csi.spiffe.io."),
    Value(
        "spire.mountPath",
        "/spiffe-workload-api",
        TEXT,
        "Where it is in the Pods; settings.spireWorkloadApi is under it.",
    ),
    Value("nonceKey.existingSecret", "", NAME, "Secret with the key of the challenges; empty: one is made and kept."),
    Value("nonceKey.key", "nonce.key", TEXT, "Under which key of the Secret it is."),
    Value("bundleEndpointCa", "", PEM, "CAs of settings.bundleEndpoint (PEM)."),
    Value("scorerCa", "", PEM, "CAs of an https settings.scorer (PEM)."),
]

NETWORK: Final = [
    Value("networkPolicy.enabled", False, BOOL, "NetworkPolicies, for a network that enforces them."),
    Value(
        "networkPolicy.apiServer.cidrs",
        ["0.0.0.0/0", "::/0"],
        WORDS,
        "Where the API server is, and whence it calls: it is in no Pod that a selector could name. Until this is "
        "narrowed to it, nobody is kept from `serve`.",
    ),
    Value("networkPolicy.apiServer.ports", [443, 6443], PORTS, "And at which ports."),
    Value(
        "networkPolicy.scrapers",
        [{"namespaceSelector": {}}],
        OBJECTS,
        "Who may reach metrics: peers of a NetworkPolicy. A peer that is everybody does not reach `score`.",
    ),
    Value(
        "networkPolicy.extraEgress",
        [],
        OBJECTS,
        "More egress rules for all components. The ports that settings name (SPIRE Server, bundle endpoint, scorer, "
        "stores) are open already; where a Service leads to another port, or a bucket is not at 443, say it.",
    ),
]

MONITORING: Final = [
    Value("serviceMonitor.enabled", False, BOOL, "A ServiceMonitor for the Prometheus operator."),
    Value("serviceMonitor.labels", {}, TEXTS, "Labels by which Prometheus selects it."),
    Value("serviceMonitor.interval", "30s", TEXT, "How often it is scraped."),
    Value("prometheusRule.enabled", False, BOOL, "The alerts, as a PrometheusRule."),
    Value("prometheusRule.labels", {}, TEXTS, "Labels by which Prometheus selects it."),
    Value("dashboard.enabled", False, BOOL, "A Grafana dashboard in a ConfigMap."),
    Value("dashboard.labels", {"grafana_dashboard": "1"}, TEXTS, "Labels by which Grafana's sidecar finds it."),
    Value("priorityClasses.create", False, BOOL, "PriorityClasses for scored pods."),
    Value(
        "priorityClasses.classes",
        {"gpu-ultra": 1000, "gpu-high": 750, "gpu-medium": 500, "gpu-default": 250},
        {"type": "object", "additionalProperties": {"type": "integer", "maximum": 1000000000}},
        "Their names and values; yours are added to these, and null takes one of these away.",
    ),
]

BIND: Final = component(
    "bind",
    "The scheduler of the pods that name it by `schedulerName`: settings.schedulerName.",
    on=False,
    replicas=2,
    resources=asking("50m", "128Mi", "512Mi"),
)
SCORE: Final = component(
    "score",
    "A small scorer; `serve` asks it unless settings.scorer names another.",
    on=False,
    replicas=2,
    resources=asking("50m", "96Mi", "256Mi"),
)
EXPORT: Final = [
    *component(
        "export",
        "Brings serial numbers of GPUs, and who used which, to stores.",
        on=False,
        replicas=2,
        resources=asking("100m", "128Mi", "1Gi"),
    ),
    Value(
        "export.outbox",
        {"emptyDir": {}},
        {"type": "object", "minProperties": 1},
        "What holds records that are not stored yet: a volume's source, as in a Pod. An emptyDir ends with its Pod.",
    ),
    Value("export.credentials.http", "", NAME, "Secret whose `token` the store is shown, for exporterType http."),
    Value(
        "export.credentials.postgres",
        "",
        NAME,
        "Secret with `username` and `password` of the database, and `host` unless postgresHost says it.",
    ),
    Value(
        "export.credentials.s3",
        "",
        NAME,
        "Secret whose keys become variables, such as AWS_ACCESS_KEY_ID, for exporterType s3.",
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
        *BIND,
        *SCORE,
        *EXPORT,
        *CERTS,
        *NETWORK,
        *MONITORING,
    ]


PART: Final = "each component has its own: serve, reconcile, bind, export, score, attest, certs"

# Of the charts gpu-scheduler and scheduler-webhook. What is not here works under its name.
MOVED: Final = [
    Moved("replicaCount", "replicaCount is serve.replicas (and reconcile.replicas, bind.replicas, …)"),
    Moved("resources", "resources is serve.resources: " + PART),
    Moved("env", "env is serve.env: " + PART),
    Moved("volumes", "volumes is serve.volumes: " + PART),
    Moved("volumeMounts", "volumeMounts is serve.volumeMounts: " + PART),
    Moved(
        "livenessProbe",
        "livenessProbe is the chart's: /healthz at service.uiPort, of which only the times could differ",
    ),
    Moved(
        "readinessProbe",
        "readinessProbe is the chart's: /readyz at service.uiPort, of which only the times could differ",
    ),
    Moved(
        "autoscaling", "autoscaling is not the chart's: a HorizontalPodAutoscaler of your own may scale the Deployment"
    ),
    Moved("serviceAccount.name", "serviceAccount.name is serve.serviceAccountName: " + PART),
    Moved(
        "serviceAccount.automount",
        "serviceAccount.automount is fixed: a Pod that asks the API server mounts its token, another does not",
    ),
    Moved(
        "service.targetPort",
        "service.targetPort is fixed: the container listens where service.port, service.uiPort and extender.port lead",
    ),
    Moved("service.name", "service.name is fixed: the ports are called https, http and extender"),
    Moved("scheduler.name", "scheduler.name is settings.schedulerName"),
    Moved("webhook.enabled", "webhook.enabled is webhooks.enabled"),
    Moved("webhook.caBundle", "webhook.caBundle is tls.caBundle, with tls.mode=existingSecret and tls.existingSecret"),
    Moved("webhook.failurePolicy", "webhook.failurePolicy is webhooks.failurePolicy"),
    Moved("webhook.schedulerUrl", "webhook.schedulerUrl is settings.scorer"),
    Moved(
        "webhook.timeoutSeconds",
        "webhook.timeoutSeconds is settings.scorerTimeout, such as 5s; "
        "webhooks.timeoutSeconds is the API server's patience",
    ),
    Moved("webhook.enableMutation", "webhook.enableMutation is settings.hintPods"),
    Moved("webhook.priorityBuckets", "webhook.priorityBuckets is settings.priorityBuckets"),
    Moved("webhook.rules", "webhook.rules is fixed: what has to be seen for a promise to hold is seen"),
    Moved(
        "webhook.namespaceSelector",
        "webhook.namespaceSelector is webhooks.optInLabel; scheduler.radix.ai/enabled=true opts in too",
    ),
    Moved("webhook.sideEffects", "webhook.sideEffects is fixed: NoneOnDryRun"),
    Moved("webhook.admissionReviewVersions", "webhook.admissionReviewVersions is fixed: v1"),
    Moved("tls.certManager.enabled", "tls.certManager.enabled is tls.mode=certManager"),
    Moved(
        "cert-manager", "cert-manager is no part of this chart: install it by its own, then set tls.mode=certManager"
    ),
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


HEAD: Final = "# Written by `make chart` from scripts/chart_values.py, which is where a value is changed.\n"
GROUPS: Final = {
    "settings": "Settings of all processes: docs/reference/settings.md. A setting that is absent has its default.",
    "serve": "`gpuwarden serve`.",
    "reconcile": "`gpuwarden reconcile`.",
    "attest": "`gpuwarden attest`, on every node.",
    "bind": "`gpuwarden bind`.",
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
    # Helm gives a chart that is another's part this value.
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

Written by `make chart` from `scripts/chart_values.py`. Values that are not here are refused, and so are combinations
that cannot work: each with one sentence. What gpuwarden itself takes (`settings.*`) is explained in
[settings.md](settings.md); how to install is in [install.md](../how-to/install.md).

| value | default | what it does |
|---|---|---|
"""
MOVED_HEAD: Final = """
## Values of older charts

The charts `gpu-scheduler` and `scheduler-webhook` had these. Setting one stops the installation with this sentence; all
others of theirs have the same name here.

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


def moved_yaml() -> str:
    """Read by the chart's own templates."""
    return HEAD + yaml.safe_dump({one.path: one.sentence for one in MOVED}, sort_keys=False, width=1000)


def written() -> dict[Path, str]:
    """Every file that is made from here, and its text."""
    return {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        CHART / "files/moved.yaml": moved_yaml(),
        ROOT / "docs/reference/configure.md": reference(),
    }
