"""The settings of all commands but `export` and `history`, which have a table of their own.

The name of a field gives its flag, its variable and its key in the YAML file. `setting_table` reads the table.
"""

from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml
from attrs import evolve, field, frozen

from webhook.core import keys
from webhook.core.evidence_id import DEFAULT_TEMPLATE
from webhook.runtime import setting_kinds as kinds
from webhook.runtime.setting_kinds import host_and_port, is_loopback, several_of
from webhook.runtime.setting_table import (
    EXPORT_PREFIX,
    Command,
    Retired,
    Setting,
    SettingsError,
    TableReader,
    add_replaced,
    add_retired,
    add_table,
    flag_of,
    plain,
    process_environment,
    row,
    setting,
    settings_of,
)

__all__ = [
    "REPLACED",
    "RETIRED",
    "SETTINGS",
    "Command",
    "Setting",
    "Settings",
    "SettingsError",
    "add_flags",
    "as_yaml",
    "load",
    "process_environment",
    "reference",
]


# The commands that read a setting. A test compares each declaration with the source of the commands.
ALL: Final = frozenset(Command) - {Command.EXPORT, Command.HISTORY}
SERVE: Final = frozenset({Command.SERVE})
RECONCILE: Final = frozenset({Command.RECONCILE})
ATTEST: Final = frozenset({Command.ATTEST})
SCORE: Final = frozenset({Command.SCORE})
EXPLAIN: Final = frozenset({Command.EXPLAIN})
AUDIT: Final = frozenset({Command.AUDIT})
RELEASE: Final = frozenset({Command.RELEASE})
CERTS_KEEP: Final = frozenset({Command.CERTS_KEEP})
CERTS: Final = CERTS_KEEP | {Command.CERTS_ENSURE}
# Talk to an API server: `attest` only as the kubelet's plugin.
CLUSTER: Final = ALL
# Have a listener.
LISTENING: Final = SERVE | RECONCILE | SCORE | CERTS_KEEP
# Ask evidence providers, or read an inventory file.
PROVIDERS: Final = SERVE | RECONCILE | SCORE | EXPLAIN
# Know which nodes are proven and which GPUs are free.
FLEET: Final = PROVIDERS
# Read the claims of pods, and know what a pod with GPUs looks like.
PODS: Final = SERVE | RECONCILE | EXPLAIN | AUDIT
SCORING: Final = SERVE | EXPLAIN

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The default in a cluster: the validating review of a pod follows within seconds, and renews an expired reservation.
CLUSTER_PENDING_DEADLINE: Final = timedelta(seconds=15)


@frozen(kw_only=True)
class ProviderDeclaration:
    """A value of `--evidence`. Its settings are fields of `Settings`."""

    # For the reference; links are relative to docs/reference.
    about: str
    # The function that builds the provider from settings and clock: a name, because it is in a package above this one.
    # Empty if nodes push the evidence, or a file contains it.
    built_by: str = ""
    is_pushed: bool = False
    # The setting with the address of a server.
    address: str = ""
    # The settings that it needs, and those that it needs if the address is no socket of this machine.
    needs: tuple[str, ...] = ()
    needs_over_tcp: tuple[str, ...] = ()


EVIDENCE_PROVIDERS: Final[Mapping[str, ProviderDeclaration]] = {
    "static": ProviderDeclaration(
        about="`--node-hash-map` and the inventory file. Nothing is attested: for development only.",
    ),
    "spire-server": ProviderDeclaration(
        about="The attested agents of a SPIRE Server: [spire.md](../how-to/spire.md).",
        built_by="webhook.evidence.spire.provider:spire_server_of",
        address="spire_server",
        needs=("spire_server", "spire_trust_domain"),
        needs_over_tcp=("spire_workload_api",),
    ),
    "jwt-svid": ProviderDeclaration(
        about="Tokens that `gpuwarden attest` sends from each node (in the chart `attest.enabled`): "
        "[attest.md](../how-to/attest.md). `serve` also needs `--bundle-endpoint` or `--spire-workload-api`, and in a "
        "cluster `--nonce-key` (the chart sets it).",
        is_pushed=True,
        address="bundle_endpoint",
        needs=("spire_trust_domain",),
    ),
}
EVIDENCE: Final = several_of(*EVIDENCE_PROVIDERS)


@frozen
class Settings:
    """The settings in effect. Settings name files and do not contain them, so none is a secret."""

    config: Path | None = setting(None, kinds.FILE, ALL, "YAML file with settings", in_file=False)

    host: str = setting("127.0.0.1", kinds.HOST, LISTENING, "address of all listeners")
    port: int = setting(
        8443, kinds.PORT, SERVE, "port of the TLS listener: admission, finalize, explain, UI, devices", short="p"
    )
    ui_port: int = setting(
        8080,
        kinds.PORT,
        LISTENING,
        "port of the plain HTTP listener: health, metrics, device counts; without a cluster also UI, devices and "
        "finalize",
        short="U",
    )
    extender_port: int = setting(8444, kinds.PORT, SERVE, "port of the extender listener")
    scheduler_port: int = setting(
        8445, kinds.PORT, SERVE, "port of the extender listener on loopback, with --scheduler-certs"
    )
    scheduler_certs: Path | None = setting(
        None,
        kinds.DIRECTORY,
        SERVE,
        "certificates of `gpuwarden certs scheduler`: `serve` is the extender of a kube-scheduler in the same Pod, "
        "and /health and /ready report whether one holds the Lease. Not set: no such scheduler",
    )
    scheduler_lease: str = setting(
        "gpuwarden-scheduler", kinds.NAME, SERVE, "the Lease of that kube-scheduler, in --lease-namespace"
    )
    # Less than the 30 s of a Pod's default grace period.
    drain_timeout: timedelta = setting(
        timedelta(seconds=25),
        kinds.DURATION,
        LISTENING,
        "how long requests in flight may take after the process is asked to stop",
    )

    max_body_memory: int = setting(
        0,
        kinds.COUNT,
        SERVE,
        "memory in MiB for the bodies of requests in flight, parsed bodies included; 0: a quarter of the container's "
        "limit, 64 to 128",
    )
    max_reviews: int = setting(
        0, kinds.COUNT, SERVE, "number of reviews that are judged concurrently, without reviews of Bindings; 0: 512"
    )
    max_connections: int = setting(
        0,
        kinds.COUNT,
        SERVE,
        "number of concurrent connections to all listeners, the last 16 reserved for the plain listener; 0: half of "
        "the process's limit of open files, at most 768",
    )

    tls_cert: Path | None = setting(
        None, kinds.FILE, SERVE, "certificate chain of the TLS listeners (PEM); requires --tls-key"
    )
    tls_key: Path | None = setting(
        None, kinds.FILE, SERVE, "private key of the TLS listeners (PEM); requires --tls-cert"
    )
    client_ca: Path | None = setting(
        None,
        kinds.FILE,
        SERVE,
        "CAs of the client certificates that /mutate, /mutate-binding and /validate require (PEM); they must sign "
        "only the API server's certificates",
    )
    extender_client_ca: Path | None = setting(
        None,
        kinds.FILE,
        SERVE,
        "CAs of the client certificates that the extender listener requires of every caller (PEM)",
    )
    extender_plain_address: str | None = setting(
        None,
        kinds.ADDRESS,
        SERVE,
        "address at which /filter and /healthz are also served in plain HTTP; not set: none",
        older_variable="BGS_LISTEN_ADDR",
    )
    extender_plain_anywhere: bool = setting(
        False,
        kinds.BOOLEAN,
        SERVE,
        "allow --extender-plain-address to be another address than loopback: everyone who reaches it may ask, and "
        "could forge answers",
    )
    review_token_audience: str | None = setting(
        None,
        kinds.AUDIENCE,
        SERVE,
        "audience of the bearer token that /mutate, /mutate-binding and /validate require; not set: they require no "
        "token",
    )
    review_callers: tuple[str, ...] = setting(
        (),
        kinds.USERS,
        SERVE,
        "users whose tokens /mutate, /mutate-binding and /validate accept; not set: all users; requires "
        "--review-token-audience",
    )
    pending_per_namespace: int = setting(
        1000,
        kinds.COUNT,
        SERVE,
        "GPUs of a namespace that may be reserved at once for pods that do not exist yet; 0: unlimited, as without a "
        "cluster if not set, and if callers of /mutate have to prove who they are",
    )
    pending_share: int = setting(
        50,
        kinds.PERCENT,
        SERVE,
        "percentage of the fleet's GPUs that may be reserved for pods that do not exist yet; each namespace may have "
        "a part of it; 0: unlimited, as without a cluster if not set, and if callers of /mutate have to prove who "
        "they are",
    )

    kubeconfig: Path | None = setting(
        None, kinds.FILE, CLUSTER, "kubeconfig of the cluster; replaces the next four settings"
    )
    kubernetes_url: str | None = setting(
        None, kinds.URL, CLUSTER, "URL of the API server; requires --access-token and --ca-certificate", short="k"
    )
    access_token: Path | None = setting(
        None, kinds.FILE, CLUSTER, "file with the bearer token for the API server", short="t"
    )
    ca_certificate: Path | None = setting(None, kinds.FILE, CLUSTER, "CA of the API server (PEM)", short="c")
    in_cluster: bool = setting(
        False,
        kinds.BOOLEAN,
        CLUSTER,
        "use the cluster of the Pod that this process runs in, with the mounted service account",
    )

    inventory: Path | None = setting(
        None, kinds.FILE, PROVIDERS, "nodes and devices (YAML or JSON); not set and no cluster: examples/inventory.yaml"
    )
    ledger: str = setting(
        "memory",
        kinds.LEDGER,
        FLEET | AUDIT,
        "where reservations are stored; not set: in the cluster if one is configured",
    )
    lease_namespace: str = setting(
        "default",
        kinds.NAMESPACE,
        SERVE | RECONCILE | AUDIT,
        "namespace of the Leases that elect one of several reconcilers; not set, with --in-cluster: the Pod's own",
    )
    pending_deadline: timedelta = setting(
        timedelta(seconds=90),
        kinds.INTERVAL,
        FLEET | RELEASE,
        "how long a reservation waits for its pod to exist before gpuwarden asks the API server for the pod; not set, "
        "in a cluster: 15s",
    )
    bind_deadline: timedelta = setting(
        timedelta(minutes=5),
        kinds.INTERVAL,
        PODS,
        "how long a pod that exists keeps its GPUs without being bound to their node",
    )
    on_bind_deadline: str = setting(
        "remove",
        kinds.ON_BIND_DEADLINE,
        RECONCILE,
        "what happens to a pod that is not bound in time: `remove` deletes it if a controller recreates it, `keep` "
        "keeps it",
    )
    max_grace: timedelta = setting(
        timedelta(hours=1),
        kinds.INTERVAL,
        PODS,
        "how long the containers of a pod with GPUs may take to stop; also how long gpuwarden waits for the "
        "containers of a pod whose end it did not see and whose grace period is not stored",
    )
    orphan_margin: timedelta = setting(
        timedelta(seconds=90),
        kinds.INTERVAL,
        RECONCILE,
        "how long after its grace period the GPUs of a pod whose end was not seen stay reserved; less than the "
        "control plane needs to notice a dead kubelet is not safe",
    )
    orphans_per_namespace: int = setting(
        1000,
        kinds.COUNT,
        SERVE | RECONCILE,
        "GPUs of a namespace that pods may hold which are gone but may still run, before the namespace gets no more; "
        "0: unlimited",
    )
    evidence: tuple[str, ...] = setting(
        ("static",), EVIDENCE, FLEET, "evidence providers; all of them have to prove a node, with the same hash"
    )
    require_evidence: str = setting(
        "asked",
        kinds.REQUIRE_EVIDENCE,
        FLEET | AUDIT,
        "which claims need a proven node: `asked`, those that ask for a hash, or `all`; not set: `all` in a cluster",
    )
    on_evidence_lost: str = setting(
        "report",
        kinds.ON_EVIDENCE_LOST,
        RECONCILE,
        "what happens when evidence ends under a pod: `report` it, `taint` the node, or `evict` the pod",
    )
    on_mismatch: str = setting(
        "report",
        kinds.ON_MISMATCH,
        RECONCILE,
        "what happens to a pod to which the kubelet gave other GPUs than those reserved for it: `report` it, or also "
        "`evict` it",
    )
    kueue: bool = setting(
        False,
        kinds.BOOLEAN,
        RECONCILE,
        "answer Kueue's admission checks of the controller gpuwarden.io/proven-gpus: whether all pods of a Workload "
        "can have their GPUs now",
    )
    kueue_wait: timedelta = setting(
        timedelta(seconds=30),
        kinds.DURATION,
        RECONCILE,
        "how long a Workload that cannot be served keeps its quota before it gives it back to Kueue",
    )
    node_hash_map: Mapping[str, str] = setting(
        MappingProxyType({}),
        kinds.HASHES,
        FLEET,
        "static evidence, for development only",
        older_variable="BGS_NODE_HASH_MAP",
    )
    bundle_endpoint: str | None = setting(
        None, kinds.HTTPS_URL, SERVE, "SPIFFE bundle endpoint with the trust domain's keys; not set: the Workload API"
    )
    bundle_endpoint_profile: str = setting(
        "https_web",
        kinds.BUNDLE_PROFILE,
        SERVE,
        "how the bundle endpoint is authenticated: by its host name (https_web) or by its SPIFFE ID (https_spiffe)",
    )
    bundle_endpoint_ca: Path | None = setting(
        None,
        kinds.FILE,
        SERVE,
        "CAs of the bundle endpoint (PEM); for https_web they replace the system's, for https_spiffe they are the "
        "initial roots, which the Workload API has too",
    )
    bundle_endpoint_id: str | None = setting(
        None,
        kinds.SPIFFE_ID,
        SERVE,
        "SPIFFE ID of the bundle endpoint, for https_spiffe; not set: the ID of a SPIRE Server",
    )
    max_bundle_age: timedelta = setting(
        timedelta(hours=1),
        kinds.INTERVAL,
        SERVE,
        "how long the trust domain's keys are valid while their source does not answer",
    )
    evidence_id: str = setting(
        DEFAULT_TEMPLATE,
        kinds.EVIDENCE_ID,
        SERVE | ATTEST,
        "SPIFFE IDs that name node and hash; a dot stands for each colon of the hash",
    )
    nonce_key: Path | None = setting(
        None,
        kinds.FILE,
        SERVE,
        "key of the challenges, 32 random bytes or more, the same for all replicas; required for jwt-svid in a cluster",
    )
    spire_server: str | None = setting(None, kinds.SERVER, PROVIDERS, "SPIRE Server that is asked about its agents")
    spire_trust_domain: str | None = setting(
        None, kinds.TRUST_DOMAIN_NAME, PROVIDERS | ATTEST, "trust domain whose evidence counts"
    )
    spire_workload_api: str | None = setting(
        None,
        kinds.SOCKET,
        PROVIDERS | ATTEST,
        "SPIFFE Workload API, the source of gpuwarden's SVID and of the trust bundle",
    )
    spire_own_id: str | None = setting(
        None,
        kinds.SPIFFE_ID,
        PROVIDERS,
        "SPIFFE ID of the SVID that is presented to SPIRE Server; not set: the first one of the Workload API",
    )
    spire_attestors: tuple[str, ...] = setting(
        ("x509pop",),
        kinds.ATTESTORS,
        PROVIDERS,
        "node attestors that are trusted; agents of other attestors prove nothing",
    )
    spire_node_selector: str = setting(
        "x509pop:san:node-name", kinds.NODE_NAMING, PROVIDERS, "where an agent names its node"
    )
    spire_hash_selector: str = setting(
        "x509pop:san:attestation-hash", kinds.HASH_NAMING, PROVIDERS, "where an agent names its hash"
    )
    spire_agent_ttl: timedelta = setting(
        timedelta(hours=1),
        kinds.INTERVAL,
        PROVIDERS,
        "SPIRE Server's `agent_ttl`, exactly: the age of evidence is computed from it",
    )
    max_evidence_age: timedelta = setting(
        timedelta(minutes=40), kinds.INTERVAL, FLEET, "how long evidence is valid after the attestation"
    )
    evidence_poll: timedelta = setting(
        timedelta(seconds=5), kinds.INTERVAL, PROVIDERS, "how often evidence providers are polled, at most"
    )
    clock_skew: timedelta = setting(
        timedelta(seconds=5),
        kinds.DURATION,
        FLEET | RELEASE | ATTEST,
        "how much the clocks of other machines may differ",
    )
    reload_interval: timedelta = setting(
        timedelta(seconds=1),
        kinds.INTERVAL,
        SERVE | SCORE,
        "how often certificates and the inventory file are checked for changes",
    )

    when_unavailable: str = setting(
        "deny",
        kinds.WHEN_UNAVAILABLE,
        PODS,
        "what happens to a pod if no GPU is free: `deny` refuses it, `queue` creates it with a scheduling gate that "
        "`reconcile` removes; in a cluster, pods with a placement map are always queued",
    )
    map_visible: str = setting(
        "uuid",
        kinds.MAP_VISIBLE,
        PODS,
        "how containers see the GPUs of a placement map: by UUID, or by the index in the map; index requires "
        "--injection cuda",
    )
    injection: str = setting(
        "nvidia",
        kinds.INJECTION,
        PODS,
        "what gives a container its GPUs: `nvidia` the variables NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES, "
        "`cuda` only the latter, `plugin` the device plugin, whose GPUs gpuwarden counts, `dra` a ResourceClaim; a "
        f"Namespace (annotation) and a Node (label) may have their own under {keys.INJECTION}",
    )
    reserve: str = setting(
        "create",
        kinds.RESERVE,
        PODS,
        "when the GPUs of a pod are chosen: when it is created (`create`), or when a scheduler binds it to a node "
        "(`bind`); with --injection dra and `bind` kube-scheduler chooses them, and with --injection plugin they are "
        "always reserved at creation",
    )
    runtime_class: str | None = setting(
        None, kinds.NAME, PODS, "RuntimeClass of pods with GPUs that name none; not set: unchanged"
    )
    opt_in_label: str = setting(
        keys.OPT_IN.name,
        kinds.LABEL_KEY,
        FLEET - EXPLAIN | AUDIT,
        "label that opts a namespace in, the same as in the webhook configurations; "
        f"{keys.OPT_IN.aliases[0]} opts in too",
    )
    gpu_resource: str = setting("nvidia.com/gpu", kinds.RESOURCE, PODS, "resource by which containers ask for GPUs")
    gpu_driver: str = setting(
        "gpu.nvidia.com",
        kinds.NAME,
        RECONCILE,
        "DRA driver whose ResourceSlices list the GPUs; its attribute `uuid` ties a GPU to its proof device",
    )
    gpu_device_class: str = setting(
        "gpu.nvidia.com", kinds.NAME, RECONCILE, "DeviceClass by which ResourceClaims get whole GPUs"
    )
    mig_device_class: str = setting(
        "mig.nvidia.com", kinds.NAME, RECONCILE, "DeviceClass by which ResourceClaims get reserved MIG devices"
    )
    proof_devices: bool = setting(
        False,
        kinds.BOOLEAN,
        RECONCILE,
        "publish a proof device for each GPU with fresh evidence, so that ResourceClaims can ask for proven GPUs",
    )
    native_templates: bool = setting(
        False,
        kinds.BOOLEAN,
        RECONCILE,
        "keep the ResourceClaimTemplates of native pods, and of pods with --reserve bind, in opted-in namespaces; "
        "requires --proof-devices",
    )
    challenge_at_bind: bool = setting(
        False,
        kinds.BOOLEAN,
        RECONCILE | ATTEST,
        "serve native pods with the annotation `gpuwarden.io/challenge: bind`: such a pod is bound after its node has "
        "answered a new challenge of `serve`; requires --native-templates, and in `attest` --kubelet-plugins and "
        "--server",
    )
    strict_devices: bool = setting(
        False,
        kinds.BOOLEAN,
        SERVE | RECONCILE,
        "place no claim for GPUs on nodes where a device plugin offers --gpu-resource, which may give reserved GPUs "
        "to any pod",
    )
    host_paths: tuple[str, ...] = setting(
        (),
        kinds.HOST_PATHS,
        RECONCILE | AUDIT,
        "directories of nodes that pods of opted-in namespaces may mount read-only; the same as in the policies",
    )
    write_aliases: bool = setting(True, kinds.BOOLEAN, PODS, "also write the annotations of the older systems")
    required_hash_alias: str = setting(
        keys.REQUIRED_HASH.aliases[0],
        kinds.ANNOTATION_KEY,
        PODS,
        f"additional name of the annotation {keys.REQUIRED_HASH.name}",
        older_variable="BGS_REQUIRED_ANNOTATION",
    )

    scorer: str | None = setting(
        None,
        kinds.URL,
        SCORING,
        "scorer that is asked for hints; `/v1/score` is appended; not set: none",
        older_variable="SCHEDULER_URL",
    )
    scorer_ca: Path | None = setting(None, kinds.FILE, SCORING, "CAs of an https scorer (PEM), instead of the system's")
    scorer_timeout: timedelta = setting(
        timedelta(seconds=2),
        kinds.INTERVAL,
        SCORING,
        "how long a pod waits for hints, at most half of the time that its review has left",
        older_variable="TIMEOUT_SECONDS",
        older_is_lenient=True,
    )
    hint_pods: bool = setting(
        True, kinds.BOOLEAN, SCORING, "ask the scorer for hints", older_variable="ENABLE_MUTATION"
    )
    priority_buckets: tuple[Mapping[str, object], ...] = setting(
        (
            {"minScore": 90, "priorityClassName": "gpu-ultra"},
            {"minScore": 70, "priorityClassName": "gpu-high"},
            {"minScore": 50, "priorityClassName": "gpu-medium"},
            {"minScore": 0, "priorityClassName": "gpu-default"},
        ),
        kinds.BUCKETS,
        SCORING,
        "PriorityClass for each minimum score",
        older_variable="PRIORITY_BUCKETS",
    )
    tenant_priorities: Mapping[str, float] = setting(
        MappingProxyType({}), kinds.SCORES, SCORE, "priority scores of tenants; all others have 50"
    )

    server: str | None = setting(None, kinds.HTTPS_URL, ATTEST | EXPLAIN, "TLS listener of `serve`")
    server_ca: Path | None = setting(None, kinds.FILE, ATTEST | EXPLAIN, "CAs of --server (PEM); not set: the system's")
    node: str | None = setting(None, kinds.NODE, ATTEST, "name of this node")
    runtime_socket: str | None = setting(
        None,
        kinds.SOCKET,
        ATTEST,
        "the node's container runtime (CRI), such as `unix:/run/containerd/containerd.sock`; with it `attest` reports "
        "which orphaned pods have ended, and which pods have other GPUs than those reserved for them",
    )
    kubelet_plugins: Path | None = setting(
        None,
        kinds.DIRECTORY,
        ATTEST,
        "kubelet's directory, `/var/lib/kubelet`, under the path that the kubelet has for it; with it `attest` is the "
        "kubelet's plugin for proof devices: no pod with one starts without fresh evidence; needs a cluster, and no "
        "--server",
    )
    cdi_directory: Path | None = setting(
        None,
        kinds.DIRECTORY,
        ATTEST,
        "directory of CDI specifications, `/var/run/cdi`; with it and --kubelet-plugins, containers with a proof "
        "device get a file with the evidence, signed by the node",
    )
    pod_resources_socket: str = setting(
        "unix:/var/lib/kubelet/pod-resources/kubelet.sock",
        kinds.SOCKET,
        ATTEST,
        "the kubelet's PodResources API, which `attest` asks as well",
    )
    pod_uid: str | None = setting(
        None,
        kinds.AUDIENCE,
        ATTEST,
        "UID of the pod that `attest` runs in, which container runtime and kubelet have to know",
    )

    certs_namespace: str = setting(
        "gpuwarden", kinds.NAMESPACE, CERTS | RECONCILE | AUDIT, "namespace of the Service of `serve` and of the Secret"
    )
    certs_service: str = setting("gpuwarden", kinds.NAMESPACE, CERTS, "Service that the certificate is for")
    certs_names: tuple[str, ...] = setting(
        (), kinds.HOSTS, CERTS, "additional subject alternative names of the certificate"
    )
    certs_secret: str = setting("gpuwarden-certs", kinds.NAME, CERTS, "Secret with CA and certificate")
    certs_configurations: tuple[str, ...] = setting(
        ("gpuwarden",),
        kinds.OBJECT_NAMES,
        CERTS,
        "mutating and validating webhook configurations that get the CA bundle",
    )
    certs_dir: Path | None = setting(
        None, kinds.DIRECTORY, CERTS, "directory in which the certificate is also written as files; not set: none"
    )
    certs_leaf_life: timedelta = setting(timedelta(hours=2160), kinds.LIFETIME, CERTS, "lifetime of a certificate")
    certs_renew_before: timedelta = setting(
        timedelta(hours=360), kinds.LIFETIME, CERTS, "how long before its end a certificate is renewed"
    )
    certs_ca_life: timedelta = setting(
        timedelta(hours=8760), kinds.LIFETIME, CERTS, "lifetime of a CA, including the certificates that it signs"
    )
    certs_settle: timedelta = setting(
        timedelta(minutes=1),
        kinds.DURATION,
        CERTS,
        "how long a new CA is in the webhook configurations before it signs",
    )
    certs_look_interval: timedelta = setting(
        timedelta(seconds=10), kinds.INTERVAL, CERTS_KEEP, "how often Secret and webhook configurations are checked"
    )

    log_level: str = setting("info", kinds.LOG_LEVEL, ALL, "minimum log level", short="l")

    # By setting: "flag --port", "variable GPUWARDEN_PORT", "key port in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Warnings about settings that are accepted and have no effect.
    notes: tuple[str, ...] = ()
    # The API server's URL from the variables that Kubernetes sets in every Pod.
    api_server_of_pod: str | None = field(default=None, eq=False)

    def is_set(self, name: str) -> bool:
        """Whether a flag, a variable or the file sets it."""
        return self.sources.get(name, "default") != "default"

    @property
    def is_embedded(self) -> bool:
        """Whether no cluster is configured."""
        return self.kubeconfig is None and self.kubernetes_url is None and not self.in_cluster

    @property
    def plain_extender_at(self) -> tuple[str, int] | None:
        """Host and port of the extender's plain listener: on loopback unless another address is allowed."""
        if self.extender_plain_address is None:
            return None
        host, port = host_and_port(self.extender_plain_address)
        if not host:
            host = "0.0.0.0" if self.extender_plain_anywhere else "127.0.0.1"  # noqa: S104 - explicitly allowed
        return host, port

    @property
    def queues(self) -> bool:
        """Whether a pod waits if no GPU is free for it."""
        return self.when_unavailable == "queue"

    @property
    def keeps_in_cluster(self) -> bool:
        """Whether reservations are stored in the cluster: the default if a cluster is configured."""
        return self.ledger == "cluster" or not (self.is_embedded or self.is_set("ledger"))

    @property
    def evidence_required_of(self) -> str:
        """Which claims need a proven node: by default all, if a cluster is configured."""
        return self.require_evidence if self.is_embedded or self.is_set("require_evidence") else "all"

    @property
    def pending_deadline_in_effect(self) -> timedelta:
        """Short in a cluster, where the API server names the pod within seconds. In embedded mode a person names it."""
        is_own = self.is_embedded or self.is_set("pending_deadline")
        return self.pending_deadline if is_own else CLUSTER_PENDING_DEADLINE

    @property
    def proves_reviewers(self) -> bool:
        """Whether only the API server can post a review."""
        return self.client_ca is not None or self.review_token_audience is not None

    @property
    def proof_of_reviewers(self) -> str:
        if self.client_ca is not None:
            return "certificate"
        return "token" if self.review_token_audience is not None else "none"

    @property
    def pending_limit(self) -> int:
        """How many GPUs of a namespace unauthenticated reviews may reserve; 0: unlimited."""
        return self.pending_per_namespace if self._limits_reviews("pending_per_namespace") else 0

    @property
    def pending_percent(self) -> int:
        """How much of the fleet unauthenticated reviews may reserve, in percent; 0: unlimited."""
        return self.pending_share if self._limits_reviews("pending_share") else 0

    def _limits_reviews(self, name: str) -> bool:
        return not self.proves_reviewers and (not self.is_embedded or self.is_set(name))

    @property
    def own_namespace(self) -> str:
        """The namespace of gpuwarden's installation."""
        return self.lease_namespace if self.is_set("lease_namespace") or self.in_cluster else self.certs_namespace

    @property
    def inventory_file(self) -> Path | None:
        """The inventory to read; the example if neither an inventory nor a cluster is configured."""
        if self.inventory is None and self.is_embedded:
            return Path("examples/inventory.yaml")
        return self.inventory


SETTINGS: Final = settings_of(Settings)


RETIRED: Final = (
    Retired("claims_namespace", "C", "reservations are not Leases; --ledger selects where they are stored"),
    Retired(
        "renew_interval",
        "i",
        "reservations are not Leases, so none is renewed: "
        "a pending one ends at --pending-deadline, a finalized one with its pod",
    ),
    Retired("renew_jitter", "j", "reservations are not Leases, so there are no renewals to spread"),
)


# Settings that are gone fail for one release, with the name of what replaces them.
REPLACED: Final = {
    "scheduler_name": "`gpuwarden bind` is gone; scheduler.name of the chart names the kube-scheduler profile that "
    "replaces it",
}


def add_flags(parser: ArgumentParser, command: Command | None = None) -> None:
    """The flags of the settings that the command reads; without a command, of all."""
    add_table(parser, SETTINGS, command)
    if command in (None, Command.SERVE):
        add_retired(parser, RETIRED)
    add_replaced(parser, REPLACED)


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
    command: Command | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> Settings:
    """The settings, or `SettingsError` with every mistake; `also` are mistakes that the caller has found.

    `flags` are argparse's values by setting name. An empty variable and an empty key count as not set. Values are
    checked whichever command reads them; rules between settings only as far as `command` can meet them.
    """
    environ = process_environment() if environ is None else environ
    return SettingsReader(flags, environ, also, command).read(service_account)


class SettingsReader(TableReader):
    """Reads the table and applies the rules between its settings."""

    table = SETTINGS
    replaced = REPLACED
    other_prefixes = (EXPORT_PREFIX,)

    def read(self, service_account: Path) -> Settings:
        values = self.read_values()
        if values.get("in_cluster"):
            values.setdefault("lease_namespace", namespace_of_pod(service_account))
        chosen = Settings(**values, sources=self.sources(), api_server_of_pod=api_server_of_pod(self.environ))
        return evolve(chosen, notes=(*self.ignored, *self._notes(), *notes_on_times(chosen), *notes_on_queue(chosen)))

    def check_together(self, values: Mapping[str, Any]) -> None:
        self.check_all_or_none("tls_cert", "tls_key")
        self.check_all_or_none("kubernetes_url", "access_token", "ca_certificate")
        self._check_cluster(values)
        self._check_evidence(values)
        if values.get("review_callers") and "review_token_audience" not in self.given:
            where = self.where(["review_callers"])
            self.mistakes.append(f"{where}: no token is required; allowed: with --review-token-audience")
        self._check_plain_extender(values)
        self._check_map_visible(values)
        self._check_claims_for_scheduler(values)
        self._check_native(values)
        self._check_jwt_svid(values)
        self._check_certs(values)
        ports: dict[object, list[str]] = {}
        for one in SETTINGS:
            is_bad = one.name in self.given and one.name not in values
            if one.kind is kinds.PORT and self.reads(one.name) and not is_bad:
                ports.setdefault(values.get(one.name, one.default), []).append(one.name)
        for port, names in ports.items():
            if port != 0 and len(names) > 1:
                self.mistakes.append(f"{self.where(names)}: more than one listener at port {port}; allowed: one each")

    def _check_map_visible(self, values: Mapping[str, Any]) -> None:
        if values.get("map_visible") == "index" and values.get("injection", "nvidia") != "cuda":
            self.mistakes.append(
                f"{self.where(['map_visible'])}: a container that sees some of its node's GPUs counts them from 0; "
                "allowed: with --injection cuda"
            )

    def _check_claims_for_scheduler(self, values: Mapping[str, Any]) -> None:
        is_chosen_by_scheduler = (values.get("reserve"), values.get("injection")) == ("bind", "dra")
        if is_chosen_by_scheduler and self.reads("native_templates") and not values.get("native_templates"):
            self.mistakes.append(
                f"{self.where(['reserve'])}: kube-scheduler chooses GPUs by claims from templates; "
                "allowed: with --native-templates true"
            )

    def _check_native(self, values: Mapping[str, Any]) -> None:
        if values.get("native_templates") and not values.get("proof_devices"):
            self.mistakes.append(
                f"{self.where(['native_templates'])}: claims of native pods are for proof devices; "
                "allowed: with --proof-devices true"
            )
        if values.get("challenge_at_bind") and self.reads("native_templates") and not values.get("native_templates"):
            self.mistakes.append(
                f"{self.where(['challenge_at_bind'])}: native pods ask for challenges; "
                "allowed: with --native-templates true"
            )

    def _check_plain_extender(self, values: Mapping[str, Any]) -> None:
        address = values.get("extender_plain_address")
        host = host_and_port(address)[0] if address else ""
        if host and not is_loopback(host) and not values.get("extender_plain_anywhere"):
            where = self.where(["extender_plain_address"])
            self.mistakes.append(
                f"{where}: {host} is not on loopback, and plain HTTP authenticates no caller; "
                "allowed: with --extender-plain-anywhere true"
            )

    def _check_cluster(self, values: Mapping[str, Any]) -> None:
        trio = [n for n in ("kubernetes_url", "access_token", "ca_certificate") if n in self.given]
        kubeconfig = ["kubeconfig"] if "kubeconfig" in self.given else []
        pod = ["in_cluster"] if values.get("in_cluster") else []
        ways = [way for way in (kubeconfig, trio, pod) if way]
        if len(ways) > 1:
            names = [name for way in ways for name in way]
            self.mistakes.append(f"{self.where(names)}: more than one cluster is named; name one")
        if values.get("reserve") == "bind" and values.get("ledger") == "memory":
            where = self.where(["reserve"])
            self.mistakes.append(f"{where}: only --ledger cluster can hold GPUs for a pod that exists")
        if ways:
            return
        needing = [name for name, value in (("ledger", "cluster"), ("reserve", "bind")) if values.get(name) == value]
        if needing:
            self.mistakes.append(f"{self.where(needing)}: no cluster is named; name one by --kubeconfig")
        if "scheduler_certs" in self.given:
            where = self.where(["scheduler_certs"])
            self.mistakes.append(f"{where}: a kube-scheduler needs a cluster; name it by --kubeconfig")
        if "kubelet_plugins" in self.given and self.reads("kubelet_plugins"):
            where = self.where(["kubelet_plugins"])
            self.mistakes.append(f"{where}: claims are read from a cluster; name it by --kubeconfig")
        if "review_token_audience" in self.given:
            self.mistakes.append(
                f"{self.where(['review_token_audience'])}: only a cluster can check a token; name one by --kubeconfig"
            )

    def _check_certs(self, values: Mapping[str, Any]) -> None:
        """A CA must outlast the certificates that it signs, and a certificate its renewal."""
        names = ("certs_renew_before", "certs_leaf_life", "certs_ca_life")
        defaults = {one.name: one.default for one in SETTINGS}
        before, leaf, ca = (values.get(name, defaults[name]) for name in names)
        if before >= leaf:
            self.mistakes.append(f"{self.where(names[:2])}: a certificate must outlast its renewal")
        elif ca <= leaf + before:
            self.mistakes.append(f"{self.where(names)}: a CA must last longer than certificate and renewal together")

    def _check_jwt_svid(self, values: Mapping[str, Any]) -> None:
        """What `serve` needs to challenge nodes."""
        if "jwt-svid" not in values.get("evidence", ()):
            return
        where = self.where(["evidence"])
        has_cluster = any(n in self.given for n in ("kubeconfig", "kubernetes_url")) or values.get("in_cluster")
        if not {"bundle_endpoint", "spire_workload_api"} & set(self.given) and self.reads("bundle_endpoint"):
            self.mistakes.append(f"{where}: jwt-svid needs keys from --bundle-endpoint or --spire-workload-api")
        is_shared = has_cluster and values.get("ledger") != "memory"
        if is_shared and "nonce_key" not in self.given and self.reads("nonce_key"):
            self.mistakes.append(f"{where}: jwt-svid in a cluster needs a key that all replicas share, by --nonce-key")
        profile = values.get("bundle_endpoint_profile")
        knows_roots = bool({"bundle_endpoint_ca", "spire_workload_api"} & set(self.given))
        if profile == "https_spiffe" and not knows_roots and self.reads("bundle_endpoint_ca"):
            where = self.where(["bundle_endpoint_profile"])
            self.mistakes.append(
                f"{where}: an SVID is verified with its roots; "
                "name them by --bundle-endpoint-ca or their source by --spire-workload-api"
            )

    def _check_evidence(self, values: Mapping[str, Any]) -> None:
        for name in values.get("evidence", ()):
            provider = EVIDENCE_PROVIDERS[name]
            is_socket = values.get(provider.address, "").startswith("unix:")
            needed = [*provider.needs, *(() if is_socket else provider.needs_over_tcp)]
            if missing := [flag_of(one) for one in needed if one not in self.given and self.reads(one)]:
                self.mistakes.append(f"{self.where(['evidence'])}: {name} needs {' and '.join(missing)}")

    def _notes(self) -> Iterator[str]:
        for flag in RETIRED:
            if self.flags.get(flag.name) is not None:
                yield f"{flag.flag} has no effect: {flag.sentence}"


def notes_on_queue(chosen: Settings) -> Iterator[str]:
    if chosen.queues and not chosen.keeps_in_cluster:
        yield "--when-unavailable queue: pods stay gated, because only `reconcile` in a cluster removes gates"


def notes_on_times(chosen: Settings) -> Iterator[str]:
    """The slowest and the fastest clock are two skews apart; the pod must be created in the rest of the time."""
    if not chosen.is_embedded and chosen.pending_deadline_in_effect <= 2 * chosen.clock_skew:
        yield "--pending-deadline is not more than twice --clock-skew: reservations may expire before their pods exist"


def namespace_of_pod(service_account: Path) -> str:
    """The namespace of this Pod, from its service account."""
    try:
        return (service_account / "namespace").read_text().strip() or "default"
    except (OSError, ValueError):
        return "default"


def api_server_of_pod(environ: Mapping[str, str]) -> str | None:
    """From the variables that Kubernetes sets in every Pod. An IPv6 address has no brackets there."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def in_effect(settings: Settings, name: str) -> object:
    """The value of a setting; if it is not set, the default, which can differ in a cluster."""
    if settings.is_set(name):
        return getattr(settings, name)
    match name:
        case "ledger":
            return "cluster" if settings.keeps_in_cluster else "memory"
        case "pending_per_namespace":
            return settings.pending_limit
        case "pending_share":
            return settings.pending_percent
        case "require_evidence":
            return settings.evidence_required_of
        case "pending_deadline":
            return settings.pending_deadline_in_effect
        case _:
            return getattr(settings, name)


def as_yaml(settings: Settings) -> str:
    """The settings in effect, each with its source. The text is a valid settings file."""
    lines = []
    for one in SETTINGS:
        value = plain(in_effect(settings, one.name))
        source = settings.sources.get(one.name, "default")
        text = yaml.safe_dump({one.key: value}, sort_keys=False, allow_unicode=True, width=float("inf"))
        first, newline, rest = text.partition("\n")
        lines.append(f"{'' if one.in_file else '# '}{first}  # {source}{newline}{rest}")
    return "".join(lines)


REFERENCE: Final = """\
# Settings

`make chart` writes this page from `webhook/runtime/settings.py`.

A flag wins over a variable, a variable over the YAML file that `--config` or `GPUWARDEN_CONFIG` names, the file over
the default. An empty variable and a key without a value count as not set. Relative paths start at the working
directory.

The commands of a setting are those that read it. Only they have its flag. Variables and file may contain every setting,
so that one file serves all commands. An unknown variable or key is a mistake, and so is a value that is not allowed;
gpuwarden reports all mistakes at once. `gpuwarden config check` checks the settings without starting anything.
`gpuwarden config show` prints the settings in effect with their sources. Both take the flags of all commands.
gpuwarden ignores the variables that Kubernetes sets for a Service called `gpuwarden`.

| flag | variable | YAML key | default | allowed | meaning | commands |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The table as Markdown."""
    return REFERENCE + "".join(map(row, SETTINGS)) + "".join(retired_rows()) + "".join(provider_rows())


def retired_rows() -> Iterator[str]:
    yield "\n`serve` accepts these flags of the older webhook. They have no effect, and `serve` logs a warning:\n\n"
    yield "| flag | why |\n|---|---|\n"
    for flag in RETIRED:
        yield f"| `{flag.flag}`, `-{flag.short}` | {flag.sentence} |\n"


def provider_rows() -> Iterator[str]:
    yield "\n## Evidence providers\n\n"
    yield "With several in `--evidence`, all of them have to prove a node.\n\n"
    yield "| provider | source | needs |\n|---|---|---|\n"
    for name, one in EVIDENCE_PROVIDERS.items():
        over_tcp = [f"`{flag_of(other)}` unless `{flag_of(one.address)}` is a socket" for other in one.needs_over_tcp]
        needs = [*(f"`{flag_of(other)}`" for other in one.needs), *over_tcp]
        yield f"| `{name}` | {one.about} | {', '.join(needs)} |\n"
