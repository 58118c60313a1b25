"""Every setting, declared once: its flag, its variable, its key in the YAML file, its rule and its default.

How a table is read is in `setting_table`; `gpuwarden export` has one of its own.
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
from webhook.runtime.setting_kinds import (
    ADDRESS,
    ANNOTATION_KEY,
    ATTESTORS,
    AUDIENCE,
    BUCKETS,
    BUNDLE_PROFILE,
    COUNT,
    DIRECTORY,
    DURATION,
    EVIDENCE,
    EVIDENCE_ID,
    FILE,
    HASH_NAMING,
    HASHES,
    HOST,
    HOST_PATHS,
    HOSTS,
    HTTPS_URL,
    INJECTION,
    INTERVAL,
    LABEL_KEY,
    LEDGER,
    LIFETIME,
    LOG_LEVEL,
    MAP_VISIBLE,
    NAME,
    NAMESPACE,
    NODE,
    NODE_NAMING,
    OBJECT_NAMES,
    ON_BIND_DEADLINE,
    ON_EVIDENCE_LOST,
    PERCENT,
    PORT,
    REQUIRE_EVIDENCE,
    RESOURCE,
    SCHEDULERS,
    SCORES,
    SOCKET,
    SPIFFE_ID,
    SPIRE_SERVER,
    TRUST_DOMAIN_NAME,
    TRUTH,
    URL,
    USERS,
    WHEN_UNAVAILABLE,
    host_and_port,
    is_loopback,
)
from webhook.runtime.setting_table import (
    EXPORT_PREFIX,
    Command,
    Retired,
    Setting,
    SettingsError,
    TableReader,
    add_retired,
    add_table,
    declared,
    flag_of,
    plain,
    process_environment,
    row,
    settings_of,
)

__all__ = [
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
BIND: Final = frozenset({Command.BIND})
ATTEST: Final = frozenset({Command.ATTEST})
SCORE: Final = frozenset({Command.SCORE})
EXPLAIN: Final = frozenset({Command.EXPLAIN})
AUDIT: Final = frozenset({Command.AUDIT})
RELEASE: Final = frozenset({Command.RELEASE})
CERTS_KEEP: Final = frozenset({Command.CERTS_KEEP})
CERTS: Final = CERTS_KEEP | {Command.CERTS_ENSURE}
# Talk to an API server.
CLUSTER: Final = ALL - ATTEST
# Have a listener.
LISTENING: Final = SERVE | RECONCILE | BIND | SCORE | CERTS_KEEP
# Ask evidence providers, or read an inventory file.
PROVIDERS: Final = SERVE | RECONCILE | SCORE | EXPLAIN
# Know which nodes are proven and which GPUs are free.
FLEET: Final = PROVIDERS | BIND
# Read the claims of pods, and know what a pod with GPUs looks like.
PODS: Final = SERVE | RECONCILE | BIND | EXPLAIN | AUDIT
SCORING: Final = SERVE | EXPLAIN

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Where nothing is said: the validating review of a pod comes within seconds, and takes an expired hold again.
CLUSTER_PENDING_DEADLINE: Final = timedelta(seconds=15)


@frozen
class Settings:
    """What somebody has set, or the default. Files are named, never held: nothing here is a secret."""

    config: Path | None = field(
        default=None, metadata=declared(FILE, ALL, "the YAML file with settings", in_file=False)
    )

    host: str = field(default="127.0.0.1", metadata=declared(HOST, LISTENING, "where all listeners listen"))
    port: int = field(
        default=8443,
        metadata=declared(PORT, SERVE, "TLS listener: admission, finalize, explain, UI, devices", short="p"),
    )
    ui_port: int = field(
        default=8080,
        metadata=declared(
            PORT,
            LISTENING,
            "plain listener: health, metrics, numbers of devices; where there is no cluster UI, devices, finalize",
            short="U",
        ),
    )
    extender_port: int = field(default=8444, metadata=declared(PORT, SERVE, "extender listener"))
    # Under the 30 s that Kubernetes gives a Pod to end.
    drain_timeout: timedelta = field(
        default=timedelta(seconds=25),
        metadata=declared(DURATION, LISTENING, "how long requests in flight may take once a stop is asked for"),
    )

    max_body_memory: int = field(
        default=0,
        metadata=declared(
            COUNT,
            SERVE,
            "MiB that bodies under way take together at most, parsed ones included; 0: a quarter of the container's "
            "limit, 64 to 128",
        ),
    )
    max_reviews: int = field(
        default=0,
        metadata=declared(
            COUNT, SERVE, "how many reviews are judged at once, those of Bindings come on top of it; 0: 512"
        ),
    )
    max_connections: int = field(
        default=0,
        metadata=declared(
            COUNT,
            SERVE,
            "how many connections there are at once, over all listeners, the last 16 for the plain one; 0: half of the "
            "files that the process may open, at most 768",
        ),
    )

    tls_cert: Path | None = field(
        default=None, metadata=declared(FILE, SERVE, "certificate chain of the TLS listeners (PEM); with --tls-key")
    )
    tls_key: Path | None = field(default=None, metadata=declared(FILE, SERVE, "its key (PEM); with --tls-cert"))
    client_ca: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            SERVE,
            "CAs of the client certificates that /mutate and /validate demand (PEM); they may sign nothing but the API "
            "server's",
        ),
    )
    extender_client_ca: Path | None = field(
        default=None,
        metadata=declared(
            FILE, SERVE, "CAs of the client certificates that the extender listener demands of every caller (PEM)"
        ),
    )
    extender_plain_address: str | None = field(
        default=None,
        metadata=declared(
            ADDRESS,
            SERVE,
            "where /filter and /healthz are in plain HTTP too; not set: nowhere",
            older_variable="BGS_LISTEN_ADDR",
        ),
    )
    extender_plain_anywhere: bool = field(
        default=False,
        metadata=declared(
            TRUTH,
            SERVE,
            "that listener may be elsewhere than on loopback: whoever reaches it may ask, and could forge answers",
        ),
    )
    review_token_audience: str | None = field(
        default=None,
        metadata=declared(
            AUDIENCE, SERVE, "/mutate and /validate are for callers with a bearer token of this audience"
        ),
    )
    review_callers: tuple[str, ...] = field(
        default=(),
        metadata=declared(USERS, SERVE, "whose tokens those may be; not set: anybody's. With --review-token-audience"),
    )
    pending_per_namespace: int = field(
        default=1000,
        metadata=declared(
            COUNT,
            SERVE,
            "how many GPUs of a namespace may be reserved at once for pods that do not exist yet; 0: any number, as "
            "where there is no cluster and nothing is set, and where callers of /mutate have to prove who they are",
        ),
    )
    pending_share: int = field(
        default=50,
        metadata=declared(
            PERCENT,
            SERVE,
            "how much of the fleet may be, in percent of its GPUs; each namespace may have a part of that. 0: any "
            "number, as without a cluster, and where callers of /mutate have to prove who they are",
        ),
    )

    kubeconfig: Path | None = field(
        default=None, metadata=declared(FILE, CLUSTER, "the cluster; instead of the next four")
    )
    kubernetes_url: str | None = field(
        default=None,
        metadata=declared(URL, CLUSTER, "the API server; with --access-token and --ca-certificate", short="k"),
    )
    access_token: Path | None = field(
        default=None, metadata=declared(FILE, CLUSTER, "bearer token for the API server", short="t")
    )
    ca_certificate: Path | None = field(
        default=None, metadata=declared(FILE, CLUSTER, "CA of the API server (PEM)", short="c")
    )
    in_cluster: bool = field(
        default=False,
        metadata=declared(
            TRUTH, CLUSTER, "the cluster whose Pod this is, by the service account that is mounted in it"
        ),
    )

    inventory: Path | None = field(
        default=None,
        metadata=declared(
            FILE, PROVIDERS, "nodes and devices (YAML, JSON); not set and no cluster: examples/inventory.yaml"
        ),
    )
    ledger: str = field(
        default="memory",
        metadata=declared(LEDGER, FLEET | AUDIT, "where reservations live; not set, in the cluster if one is named"),
    )
    lease_namespace: str = field(
        default="default",
        metadata=declared(
            NAMESPACE,
            RECONCILE | BIND | AUDIT,
            "where the Leases are that elect one of several reconcilers or binders; not set, with --in-cluster: "
            "the Pod's own",
        ),
    )
    scheduler_name: tuple[str, ...] = field(
        default=("gpu-scheduler",),
        metadata=declared(
            SCHEDULERS,
            BIND,
            "whose pods `bind` puts on nodes, by their `schedulerName`",
            older_variable="SCHEDULER_NAME",
        ),
    )
    pending_deadline: timedelta = field(
        default=timedelta(seconds=90),
        metadata=declared(
            INTERVAL,
            FLEET | RELEASE,
            "how long a reservation waits for its pod to exist, before the API server is asked whether it does; "
            "not set, in a cluster: 15s",
        ),
    )
    bind_deadline: timedelta = field(
        default=timedelta(minutes=5),
        metadata=declared(INTERVAL, PODS, "how long a pod that exists keeps its GPUs without being on their node"),
    )
    on_bind_deadline: str = field(
        default="remove",
        metadata=declared(
            ON_BIND_DEADLINE, RECONCILE, "what becomes of it then: removed, if a controller makes it anew, or kept"
        ),
    )
    max_grace: timedelta = field(
        default=timedelta(hours=1),
        metadata=declared(
            INTERVAL,
            PODS,
            "how long the containers of a pod with GPUs may take to stop; those of one that went unseen and has no "
            "grace period stored are waited for as long",
        ),
    )
    orphan_margin: timedelta = field(
        default=timedelta(seconds=90),
        metadata=declared(
            INTERVAL,
            RECONCILE,
            "how long beyond its grace period the GPUs of a pod that was not seen to end are kept from others; less "
            "than the control plane needs to notice a dead kubelet is not safe",
        ),
    )
    orphans_per_namespace: int = field(
        default=1000,
        metadata=declared(
            COUNT,
            SERVE | RECONCILE,
            "how many GPUs of a namespace may be held by pods that are not there and may still run, before it is given "
            "no more; 0: any number",
        ),
    )
    evidence: tuple[str, ...] = field(
        default=("static",),
        metadata=declared(
            EVIDENCE, FLEET, "who says what a node is; each of them has to vouch for it, all for one hash"
        ),
    )
    require_evidence: str = field(
        default="asked",
        metadata=declared(
            REQUIRE_EVIDENCE,
            FLEET | AUDIT,
            "which claims need a proven node: those that ask for a hash, or all; not set: all if there is a cluster",
        ),
    )
    on_evidence_lost: str = field(
        default="report",
        metadata=declared(
            ON_EVIDENCE_LOST,
            RECONCILE,
            "what is done when evidence ends under a pod: told, the node tainted, or the pod evicted",
        ),
    )
    node_hash_map: Mapping[str, str] = field(
        default=MappingProxyType({}),
        metadata=declared(HASHES, FLEET, "static evidence, development only", older_variable="BGS_NODE_HASH_MAP"),
    )
    bundle_endpoint: str | None = field(
        default=None,
        metadata=declared(HTTPS_URL, SERVE, "where the trust domain's keys are; not set: from the Workload API"),
    )
    bundle_endpoint_profile: str = field(
        default="https_web",
        metadata=declared(BUNDLE_PROFILE, SERVE, "how that endpoint is known: by its name, or by its SPIFFE ID"),
    )
    bundle_endpoint_ca: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            SERVE,
            "CAs of that endpoint (PEM): instead of the system's, or, for https_spiffe, the roots to begin with, "
            "which the Workload API has too",
        ),
    )
    bundle_endpoint_id: str | None = field(
        default=None,
        metadata=declared(SPIFFE_ID, SERVE, "its SPIFFE ID, for https_spiffe; not set: that of a SPIRE Server"),
    )
    max_bundle_age: timedelta = field(
        default=timedelta(hours=1),
        metadata=declared(
            INTERVAL, SERVE, "how long the trust domain's keys are good when nobody can be asked for them"
        ),
    )
    evidence_id: str = field(
        default=DEFAULT_TEMPLATE,
        metadata=declared(
            EVIDENCE_ID, SERVE | ATTEST, "the SPIFFE IDs that name node and hash, a dot for each colon of the hash"
        ),
    )
    nonce_key: Path | None = field(
        default=None,
        metadata=declared(
            FILE,
            SERVE,
            "key of the challenges, 32 random bytes or more, the same for all replicas; for jwt-svid in a cluster",
        ),
    )
    spire_server: str | None = field(
        default=None, metadata=declared(SPIRE_SERVER, PROVIDERS, "the SPIRE Server that is asked about its agents")
    )
    spire_trust_domain: str | None = field(
        default=None, metadata=declared(TRUST_DOMAIN_NAME, PROVIDERS | ATTEST, "the trust domain whose evidence counts")
    )
    spire_workload_api: str | None = field(
        default=None,
        metadata=declared(
            SOCKET, PROVIDERS | ATTEST, "the SPIFFE Workload API, where our own SVID and the trust bundle come from"
        ),
    )
    spire_own_id: str | None = field(
        default=None,
        metadata=declared(
            SPIFFE_ID, PROVIDERS, "which of our SVIDs SPIRE Server is shown; not set: the Workload API's first"
        ),
    )
    spire_attestors: tuple[str, ...] = field(
        default=("x509pop",),
        metadata=declared(ATTESTORS, PROVIDERS, "whose word on an agent counts; all others count for nothing"),
    )
    spire_node_selector: str = field(
        default="x509pop:san:node-name",
        metadata=declared(NODE_NAMING, PROVIDERS, "where an agent says which node it is on"),
    )
    spire_hash_selector: str = field(
        default="x509pop:san:attestation-hash",
        metadata=declared(HASH_NAMING, PROVIDERS, "where an agent says its hash"),
    )
    spire_agent_ttl: timedelta = field(
        default=timedelta(hours=1),
        metadata=declared(
            INTERVAL, PROVIDERS, "SPIRE Server's `agent_ttl`, exactly: the age of evidence is taken from it"
        ),
    )
    max_evidence_age: timedelta = field(
        default=timedelta(minutes=40),
        metadata=declared(INTERVAL, FLEET, "how long evidence is good after the attestation"),
    )
    evidence_poll: timedelta = field(
        default=timedelta(seconds=5),
        metadata=declared(INTERVAL, PROVIDERS, "how often providers are asked for news at most"),
    )
    clock_skew: timedelta = field(
        default=timedelta(seconds=5),
        metadata=declared(DURATION, FLEET | RELEASE, "how far the clocks of others may be off"),
    )
    reload_interval: timedelta = field(
        default=timedelta(seconds=1),
        metadata=declared(INTERVAL, SERVE | SCORE, "how often certificates and inventory are looked at for changes"),
    )

    when_unavailable: str = field(
        default="deny",
        metadata=declared(
            WHEN_UNAVAILABLE,
            PODS,
            "what becomes of a pod that no GPU is free for: refused, or created and kept waiting behind a gate that "
            "`reconcile` opens. In a cluster a pod with a placement map waits in any case",
        ),
    )
    map_visible: str = field(
        default="uuid",
        metadata=declared(
            MAP_VISIBLE,
            PODS,
            "how containers are told of the GPUs of a placement map: by UUID, or as the map has them; "
            "index with --injection cuda",
        ),
    )
    injection: str = field(default="nvidia", metadata=declared(INJECTION, PODS, "how a GPU gets into a container"))
    runtime_class: str | None = field(
        default=None,
        metadata=declared(
            NAME, PODS, "the RuntimeClass that is written into pods with GPUs that name none; not set: none is written"
        ),
    )
    opt_in_label: str = field(
        default=keys.OPT_IN.name,
        metadata=declared(
            LABEL_KEY,
            FLEET - EXPLAIN | AUDIT,
            "the label that opts a namespace in, as the webhook configurations have it; "
            f"{keys.OPT_IN.aliases[0]} counts too",
        ),
    )
    gpu_resource: str = field(
        default="nvidia.com/gpu", metadata=declared(RESOURCE, PODS, "the resource by which containers ask for GPUs")
    )
    host_paths: tuple[str, ...] = field(
        default=(),
        metadata=declared(
            HOST_PATHS,
            RECONCILE | AUDIT,
            "directories of nodes that pods of opted-in namespaces may mount read-only, as the policies have them; for "
            "`audit` and `reconcile`",
        ),
    )
    write_aliases: bool = field(
        default=True, metadata=declared(TRUTH, PODS, "write the older systems' annotations beside ours")
    )
    required_hash_alias: str = field(
        default=keys.REQUIRED_HASH.aliases[0],
        metadata=declared(
            ANNOTATION_KEY,
            PODS,
            f"other name of the annotation {keys.REQUIRED_HASH.name}",
            older_variable="BGS_REQUIRED_ANNOTATION",
        ),
    )

    scorer: str | None = field(
        default=None,
        metadata=declared(
            URL,
            SCORING,
            "who is asked for hints; `/v1/score` is appended. Not set: nobody",
            older_variable="SCHEDULER_URL",
        ),
    )
    scorer_ca: Path | None = field(
        default=None, metadata=declared(FILE, SCORING, "CAs of an https scorer (PEM), instead of the system's")
    )
    scorer_timeout: timedelta = field(
        default=timedelta(seconds=2),
        metadata=declared(
            INTERVAL,
            SCORING,
            "how long a pod waits for hints; half of what its review has left at most",
            older_variable="TIMEOUT_SECONDS",
            older_is_lenient=True,
        ),
    )
    hint_pods: bool = field(
        default=True,
        metadata=declared(TRUTH, SCORING, "whether hints are asked for at all", older_variable="ENABLE_MUTATION"),
    )
    priority_buckets: tuple[Mapping[str, object], ...] = field(
        default=(
            {"minScore": 90, "priorityClassName": "gpu-ultra"},
            {"minScore": 70, "priorityClassName": "gpu-high"},
            {"minScore": 50, "priorityClassName": "gpu-medium"},
            {"minScore": 0, "priorityClassName": "gpu-default"},
        ),
        metadata=declared(BUCKETS, SCORING, "which priority class a score means", older_variable="PRIORITY_BUCKETS"),
    )
    tenant_priorities: Mapping[str, float] = field(
        default=MappingProxyType({}),
        metadata=declared(SCORES, SCORE, "scores of tenants, for `score`; of all others: 50"),
    )

    server: str | None = field(
        default=None,
        metadata=declared(HTTPS_URL, ATTEST | EXPLAIN, "the TLS listener of `serve`, for `attest` and `explain`"),
    )
    server_ca: Path | None = field(
        default=None,
        metadata=declared(FILE, ATTEST | EXPLAIN, "its CAs (PEM); not set: the system's. For `attest` and `explain`"),
    )
    node: str | None = field(default=None, metadata=declared(NODE, ATTEST, "the node that this is, for `attest`"))
    runtime_socket: str | None = field(
        default=None,
        metadata=declared(
            SOCKET,
            ATTEST,
            "the node's container runtime (CRI), such as `unix:/run/containerd/containerd.sock`: with it `attest` "
            "tells which orphaned pods have ended",
        ),
    )
    pod_resources_socket: str = field(
        default="unix:/var/lib/kubelet/pod-resources/kubelet.sock",
        metadata=declared(SOCKET, ATTEST, "and its kubelet's PodResources API, which is asked as well"),
    )
    pod_uid: str | None = field(
        default=None,
        metadata=declared(AUDIENCE, ATTEST, "and the uid of the pod that `attest` runs in, which both have to know"),
    )

    certs_namespace: str = field(
        default="gpuwarden",
        metadata=declared(
            NAMESPACE,
            CERTS | RECONCILE | AUDIT,
            "where the Service of `serve` and the Secret are, for `certs ensure` and `keep`",
        ),
    )
    certs_service: str = field(
        default="gpuwarden", metadata=declared(NAMESPACE, CERTS, "the Service that the certificate is for")
    )
    certs_names: tuple[str, ...] = field(
        default=(), metadata=declared(HOSTS, CERTS, "what else it is for: where `serve` is called by another name")
    )
    certs_secret: str = field(
        default="gpuwarden-certs", metadata=declared(NAME, CERTS, "the Secret with CA and certificate")
    )
    certs_configurations: tuple[str, ...] = field(
        default=("gpuwarden",),
        metadata=declared(OBJECT_NAMES, CERTS, "the webhook configurations, of both kinds, that get the CA bundle"),
    )
    certs_dir: Path | None = field(
        default=None, metadata=declared(DIRECTORY, CERTS, "where the certificate is put as files too; not set: nowhere")
    )
    certs_leaf_life: timedelta = field(
        default=timedelta(hours=2160), metadata=declared(LIFETIME, CERTS, "how long a certificate lasts")
    )
    certs_renew_before: timedelta = field(
        default=timedelta(hours=360), metadata=declared(LIFETIME, CERTS, "how long before its end there is a new one")
    )
    certs_ca_life: timedelta = field(
        default=timedelta(hours=8760), metadata=declared(LIFETIME, CERTS, "how long a CA lasts, certificates included")
    )
    certs_settle: timedelta = field(
        default=timedelta(minutes=1),
        metadata=declared(DURATION, CERTS, "how long a new CA is in the configurations before it signs"),
    )
    certs_look_interval: timedelta = field(
        default=timedelta(seconds=10),
        metadata=declared(INTERVAL, CERTS_KEEP, "how often Secret and configurations are looked at"),
    )

    log_level: str = field(
        default="info", metadata=declared(LOG_LEVEL, ALL, "what is logged: this and what is graver", short="l")
    )

    # By setting: "flag --port", "variable GPUWARDEN_PORT", "key port in FILE" or "default".
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)
    # Sentences about what was accepted and does nothing.
    notes: tuple[str, ...] = ()
    # Where a Pod finds the API server: what Kubernetes tells every one.
    api_server_of_pod: str | None = field(default=None, eq=False)

    @property
    def is_embedded(self) -> bool:
        """Whether there is no cluster to talk to."""
        return self.kubeconfig is None and self.kubernetes_url is None and not self.in_cluster

    @property
    def plain_extender_at(self) -> tuple[str, int] | None:
        """Host and port of the extender's plain listener: on loopback unless something else is allowed."""
        if self.extender_plain_address is None:
            return None
        host, port = host_and_port(self.extender_plain_address)
        if not host:
            host = "0.0.0.0" if self.extender_plain_anywhere else "127.0.0.1"  # noqa: S104 - somebody has asked for it
        return host, port

    @property
    def queues(self) -> bool:
        """Whether pods wait where nothing can be had for them now."""
        return self.when_unavailable == "queue"

    @property
    def keeps_in_cluster(self) -> bool:
        """Whether reservations live in the cluster: if so said, or if there is one and nothing is said."""
        is_said = self.sources.get("ledger", "default") != "default"
        return self.ledger == "cluster" or not (self.is_embedded or is_said)

    @property
    def evidence_required_of(self) -> str:
        """Which claims need a proven node: those that is said of, or all of them if there is a cluster."""
        is_said = self.sources.get("require_evidence", "default") != "default"
        return self.require_evidence if self.is_embedded or is_said else "all"

    @property
    def pending_deadline_in_effect(self) -> timedelta:
        """Short where the API server names a pod within seconds; embedded, people name it by hand."""
        is_said = self.sources.get("pending_deadline", "default") != "default"
        return self.pending_deadline if self.is_embedded or is_said else CLUSTER_PENDING_DEADLINE

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
        """How much of a namespace reviews may have waiting that anybody could have posted; 0 is no limit."""
        is_said = self.sources.get("pending_per_namespace", "default") != "default"
        if self.proves_reviewers or (self.is_embedded and not is_said):
            return 0
        return self.pending_per_namespace

    @property
    def pending_percent(self) -> int:
        """The same, of the whole fleet."""
        is_said = self.sources.get("pending_share", "default") != "default"
        return 0 if self.proves_reviewers or (self.is_embedded and not is_said) else self.pending_share

    @property
    def own_namespace(self) -> str:
        """Where gpuwarden is installed: with its Leases where these are named, else with its Service."""
        is_said = self.sources.get("lease_namespace", "default") != "default"
        return self.lease_namespace if is_said or self.in_cluster else self.certs_namespace

    @property
    def inventory_file(self) -> Path | None:
        """The inventory to read: the one named, or the example that the embedded default lives on."""
        if self.inventory is None and self.is_embedded:
            return Path("examples/inventory.yaml")
        return self.inventory


SETTINGS: Final = settings_of(Settings)


RETIRED: Final = (
    Retired("claims_namespace", "C", "reservations are not Leases here; --ledger says where they live"),
    Retired(
        "renew_interval",
        "i",
        "reservations are not Leases here, so none is renewed: "
        "a pending one ends at --pending-deadline, a finalized one with its pod",
    ),
    Retired("renew_jitter", "j", "reservations are not Leases here, so there are no renewals to spread"),
)


def add_flags(parser: ArgumentParser, command: Command | None = None) -> None:
    """The flags of the settings that the command reads; without a command, of all."""
    add_table(parser, SETTINGS, command)
    if command in (None, Command.SERVE):
        add_retired(parser, RETIRED)


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
    command: Command | None = None,
) -> Settings:
    """The settings, or `SettingsError` with every mistake; `also` are mistakes that the caller has found.

    `flags` are argparse's values by setting name. An empty variable and an empty key count as not set. Values are
    checked whichever command reads them; rules between settings only as far as `command` can meet them.
    """
    return SettingsReader(flags, process_environment() if environ is None else environ, also, command).read()


class SettingsReader(TableReader):
    """Reads the settings of `serve` and its like, and looks at what does not go together."""

    table = SETTINGS
    elsewhere = (EXPORT_PREFIX,)

    def read(self) -> Settings:
        values = self.read_values()
        if values.get("in_cluster"):
            values.setdefault("lease_namespace", namespace_of_pod())
        chosen = Settings(**values, sources=self.sources(), api_server_of_pod=api_server_of_pod(self.environ))
        return evolve(
            chosen, notes=(*self.passed_over, *self._notes(), *notes_on_times(chosen), *notes_on_queue(chosen))
        )

    def check_together(self, values: Mapping[str, Any]) -> None:
        self.check_all_or_none("tls_cert", "tls_key")
        self.check_all_or_none("kubernetes_url", "access_token", "ca_certificate")
        self._check_cluster(values)
        self._check_spire(values)
        if values.get("review_callers") and "review_token_audience" not in self.given:
            where = self.where(["review_callers"])
            self.mistakes.append(f"{where}: nobody is asked for a token; allowed: with --review-token-audience")
        self._check_plain_extender(values)
        self._check_map_visible(values)
        self._check_jwt_svid(values)
        self._check_certs(values)
        ports: dict[object, list[str]] = {}
        for one in SETTINGS:
            is_bad = one.name in self.given and one.name not in values
            if one.kind is PORT and self.reads(one.name) and not is_bad:
                ports.setdefault(values.get(one.name, one.default), []).append(one.name)
        for port, names in ports.items():
            if port != 0 and len(names) > 1:
                self.mistakes.append(f"{self.where(names)}: more than one listener at port {port}; allowed: one each")

    def _check_map_visible(self, values: Mapping[str, Any]) -> None:
        if values.get("map_visible") == "index" and values.get("injection", "nvidia") != "cuda":
            self.mistakes.append(
                f"{self.where(['map_visible'])}: a container that is shown some of its node's GPUs counts them from 0; "
                "allowed: with --injection cuda"
            )

    def _check_plain_extender(self, values: Mapping[str, Any]) -> None:
        address = values.get("extender_plain_address")
        host = host_and_port(address)[0] if address else ""
        if host and not is_loopback(host) and not values.get("extender_plain_anywhere"):
            where = self.where(["extender_plain_address"])
            self.mistakes.append(
                f"{where}: {host} is not on loopback, and plain HTTP proves nobody; "
                "allowed: with --extender-plain-anywhere true"
            )

    def _check_cluster(self, values: Mapping[str, Any]) -> None:
        trio = [n for n in ("kubernetes_url", "access_token", "ca_certificate") if n in self.given]
        kubeconfig = ["kubeconfig"] if "kubeconfig" in self.given else []
        pod = ["in_cluster"] if values.get("in_cluster") else []
        ways = [way for way in (kubeconfig, trio, pod) if way]
        if len(ways) > 1:
            names = [name for way in ways for name in way]
            self.mistakes.append(f"{self.where(names)}: a cluster is named twice; choose one way")
        if ways:
            return
        if values.get("ledger") == "cluster":
            self.mistakes.append(f"{self.where(['ledger'])}: a ledger in a cluster needs one; name it by --kubeconfig")
        if "review_token_audience" in self.given:
            self.mistakes.append(
                f"{self.where(['review_token_audience'])}: only a cluster knows whose a token is; "
                "name it by --kubeconfig"
            )

    def _check_certs(self, values: Mapping[str, Any]) -> None:
        """A CA has to outlast what it signs, and a certificate its renewal."""
        names = ("certs_renew_before", "certs_leaf_life", "certs_ca_life")
        defaults = {one.name: one.default for one in SETTINGS}
        before, leaf, ca = (values.get(name, defaults[name]) for name in names)
        if before >= leaf:
            self.mistakes.append(f"{self.where(names[:2])}: a certificate would be renewed before it is made")
        elif ca <= leaf + before:
            self.mistakes.append(f"{self.where(names)}: a CA has to last longer than certificate and renewal together")

    def _check_jwt_svid(self, values: Mapping[str, Any]) -> None:
        """What it takes to challenge nodes, and what stands in the way."""
        if "jwt-svid" not in values.get("evidence", ()):
            return
        where = self.where(["evidence"])
        has_cluster = any(n in self.given for n in ("kubeconfig", "kubernetes_url")) or values.get("in_cluster")
        if "spire_trust_domain" not in self.given and self.reads("spire_trust_domain"):
            self.mistakes.append(f"{where}: jwt-svid needs --spire-trust-domain")
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
                f"{where}: an SVID is known by its roots; name them by --bundle-endpoint-ca, "
                "or who knows them by --spire-workload-api"
            )

    def _check_spire(self, values: Mapping[str, Any]) -> None:
        if "spire-server" not in values.get("evidence", ()):
            return
        needed = ["spire_server", "spire_trust_domain"]
        if not values.get("spire_server", "").startswith("unix:"):
            needed.append("spire_workload_api")
        if missing := [flag_of(name) for name in needed if name not in self.given and self.reads(name)]:
            self.mistakes.append(f"{self.where(['evidence'])}: spire-server needs {' and '.join(missing)}")

    def _notes(self) -> Iterator[str]:
        for flag in RETIRED:
            if self.flags.get(flag.name) is not None:
                yield f"{flag.flag} does nothing: {flag.sentence}"


def notes_on_queue(chosen: Settings) -> Iterator[str]:
    if chosen.queues and not chosen.keeps_in_cluster:
        yield "--when-unavailable queue: nobody opens gates here; that is the work of `reconcile` in a cluster"


def notes_on_times(chosen: Settings) -> Iterator[str]:
    """The slowest and the fastest clock are two skews apart, and a pod needs time to come between them."""
    if not chosen.is_embedded and chosen.pending_deadline_in_effect <= 2 * chosen.clock_skew:
        yield "--pending-deadline is not more than twice --clock-skew: pods may come too late for their GPUs"


def namespace_of_pod() -> str:
    """Where this Pod is, as its service account says."""
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or "default"
    except (OSError, ValueError):
        return "default"


def api_server_of_pod(environ: Mapping[str, str]) -> str | None:
    """What Kubernetes says to every Pod, IPv6 addresses without their brackets."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def in_effect(settings: Settings, name: str) -> object:
    """The value of a setting; if it is not set, the default, which can be another one in a cluster."""
    if settings.sources.get(name, "default") != "default":
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
    """The settings in effect, each with where it comes from. It can be read back as a settings file."""
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

Written by `gpuwarden config reference`; change `webhook/runtime/settings.py` instead.

A flag wins over a variable, a variable over the YAML file that `--config` or `GPUWARDEN_CONFIG` names, the file over
the default. An empty variable and a key without a value count as not set. Relative paths start at the working
directory. A name that is not in the table (variable or key) is a mistake, and so is a value that is not allowed; all
mistakes are named at once. `gpuwarden config check` looks without starting anything, `gpuwarden config show` says what
is in effect and where it comes from. Variables that Kubernetes sets for a Service called `gpuwarden` are passed over.

| flag | variable | YAML key | default | allowed | meaning | commands |
|---|---|---|---|---|---|---|
"""


def reference() -> str:
    """The table of all settings as Markdown."""
    return REFERENCE + "".join(map(row, SETTINGS)) + "".join(retired_rows())


def retired_rows() -> Iterator[str]:
    yield "\nFlags of older systems that are accepted, do nothing and say so in the log:\n\n| flag | why |\n|---|---|\n"
    for flag in RETIRED:
        yield f"| `{flag.flag}`, `-{flag.short}` | {flag.sentence} |\n"
