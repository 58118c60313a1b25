"""The webhook configurations, admission policies and roles.

In the files, `CLAIM_ANNOTATIONS` and `CLAIM_LABELS` stand for the keys that make a claim, `CLAIM_DETAILS` for those
that only refine one, and `INJECTING_ANNOTATIONS` for those by which runtimes inject devices. CEL does not know these
names, so the API server refuses a file as it is. All other names are those of an installation in the namespace
`gpuwarden`.

The API server converts the objects of a request once for the `matchConditions` of a policy, and three times more for
its validations, messages and audit annotations. It evaluates all messages, even if it allows the request. Therefore the
conditions leave out most requests that the validations allow, and no others. A condition that fails refuses the
request.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from importlib import resources
from typing import Any

import yaml
from attrs import field, frozen

from webhook.core import claim_keys, keys
from webhook.core.host_paths import mistake_in
from webhook.core.isolation import INJECTING
from webhook.core.names import is_label_key, is_object_name
from webhook.core.proof_devices import DRIVER
from webhook.kube.install import crds

Manifest = dict[str, Any]

WEBHOOKS = ("mutating.yaml", "validating.yaml")
POLICIES = ("protect.yaml", "own.yaml", "grace.yaml", "strip.yaml", "blind.yaml", "isolation.yaml")
BLIND = "blind.yaml"
NATIVE = "native.yaml"
WHILE_DOWN = ("binding.yaml",)
DRA = ("dra.yaml", "proofs.yaml", "claims.yaml", "evictions.yaml")
# The policies of `DRA` that act in opted-in namespaces, or in all.
GUARDS = frozenset(("gpuwarden-claims", "gpuwarden-consumers", "gpuwarden-claiming-pods", "gpuwarden-claim-evictions"))

# The names that stand in a list for a placeholder in the files.
LISTED_NAMES: Mapping[str, tuple[str, ...]] = {
    "CLAIM_ANNOTATIONS": tuple(name for key in claim_keys.CLAIM_KEYS if key.makes_claim for name in key.names),
    "CLAIM_LABELS": tuple(key.name for key in claim_keys.CLAIM_KEYS if key.makes_claim and key.is_label),
    "CLAIM_DETAILS": tuple(name for key in claim_keys.CLAIM_KEYS if not key.makes_claim for name in key.names),
    "INJECTING_ANNOTATIONS": INJECTING,
}

# Debug containers are added through a subresource.
DEBUGGING: tuple[Manifest, ...] = (
    {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["UPDATE"],
        "resources": ["pods/ephemeralcontainers"],
        "scope": "Namespaced",
    },
)

# Names in the shipped files.
NAMESPACE = "gpuwarden"
SERVICE = "gpuwarden"
GPU_NAMESPACE = "gpu-operator"
OPT_IN = keys.OPT_IN.name
RESOURCE = "nvidia.com/gpu"
SCHEDULER = "system:kube-scheduler"
MAX_GRACE = 3600
HOST_PATHS = "dyn([])"
# Whether webhooks review pods.
REVIEWED = "bool('true')"
GPU_DRIVER = "gpu.nvidia.com"
# No DeviceClass has an empty name.
DEVICE_CLASSES = "dyn([''])"
OWN_ACCOUNTS = "system:serviceaccount:{}:"
RECONCILER, SCHEDULER_ACCOUNT, EXPORTER = "gpuwarden-reconcile", "gpuwarden-scheduler", "gpuwarden-export"
ATTESTER = "gpuwarden-attest"

# Users' names that can be quoted in CEL without escapes; then names of labels, annotations and resources.
USER_NAME = re.compile(r"[A-Za-z0-9@:._/-]+")


class Blinds(StrEnum):
    """What hides GPUs from containers of pods without a claim."""

    # A MutatingAdmissionPolicy, from Kubernetes 1.36 on.
    POLICY = "policy"
    # The webhook: every pod of opted-in namespaces is sent to it.
    WEBHOOK = "webhook"
    NOBODY = "nobody"


class DraGuard(StrEnum):
    """The namespaces whose ResourceClaims and pods may take GPUs only by what gpuwarden writes."""

    OPTED_IN = "opted-in"
    ALL = "all"


@frozen
class Installation:
    """The values that differ between installations."""

    namespace: str = NAMESPACE
    service: str = SERVICE
    port: int = 443
    # The namespace of the device plugin's pods, for `gpuwarden export`.
    gpu_namespace: str = GPU_NAMESPACE
    # Used instead of the service, for a server outside the cluster.
    url: str | None = None
    # Service accounts that write pods and nodes.
    reconciler: str = RECONCILER
    # The account of the scheduler that the chart runs.
    scheduler_account: str = SCHEDULER_ACCOUNT
    exporter: str = EXPORTER
    # The account of `attest` as the kubelet's plugin.
    attester: str = ATTESTER
    # In PEM. If empty, the API server uses its system roots.
    ca_bundle: bytes = b""
    opt_in: str = OPT_IN
    # In addition to the built-in names.
    hash_aliases: tuple[str, ...] = ()
    resource: str = RESOURCE
    # Users that bind pods according to their node affinity. Their Bindings continue while no replica answers. If empty,
    # no pod is bound meanwhile in an opted-in namespace.
    schedulers: tuple[str, ...] = (SCHEDULER,)
    # Not needed if the server watches pods. Bindings are reviewed as the last check before a pod starts on its node.
    reviews_deletes: bool = False
    reviews_bindings: bool = True
    # What hides GPUs from containers of pods without a claim.
    blinds: Blinds = Blinds.POLICY
    # Native pods: the API server changes requests for GPUs into claims for proven GPUs, and calls no webhook.
    native: bool = False
    # Maximum grace period in seconds of a deletion of a pod with GPUs.
    max_grace: int = MAX_GRACE
    # Host directories that pods of opted-in namespaces may mount read-only.
    host_paths: tuple[str, ...] = ()
    # The DRA driver of the GPUs.
    gpu_driver: str = GPU_DRIVER
    dra_guard: DraGuard = DraGuard.OPTED_IN
    # Classes of other devices, which everyone's claims may use.
    device_classes: tuple[str, ...] = ()
    names: Mapping[str, str] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        wrong = [name for name in self._given() if not is_label_key(name)]
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))}: not the name of a label, an annotation or a resource")
        if self.native and self.blinds is not Blinds.POLICY:
            raise ValueError("native: no webhook hides the GPUs of other pods, so a policy has to")
        strange = [name for name in self.schedulers if not USER_NAME.fullmatch(name)]
        if strange:
            raise ValueError(f"{', '.join(map(repr, strange))}: not the name of a user")
        unfit = [name for name in (self.gpu_driver, *self.device_classes) if not is_object_name(name)]
        if unfit:
            raise ValueError(f"{', '.join(map(repr, unfit))}: not the name of a driver or a DeviceClass")
        if {DRIVER, self.gpu_driver} & {*self.device_classes}:
            raise ValueError(f"{', '.join(map(repr, self.device_classes))}: a claim of this class takes GPUs or proofs")
        mistakes = [f"{path!r}: {mistake}" for path in self.host_paths if (mistake := mistake_in(path)) is not None]
        if mistakes:
            raise ValueError("; ".join(mistakes))

    @names.default
    def _names(self) -> dict[str, str]:
        """Text in the files to text of this installation."""
        hashes = claim_keys.REQUIRED_HASH.names
        return {
            OPT_IN: self.opt_in,
            quoted(hashes): quoted(dict.fromkeys((*hashes, *self.hash_aliases))),
            f"'{RESOURCE}'": f"'{self.resource}'",
            f"'{SCHEDULER}'": quoted(self.schedulers),
            # Full account names first: the namespace alone, replaced below, is their prefix.
            **{self._account(NAMESPACE, ours): self._account(self.namespace, own) for ours, own in self._accounts()},
            OWN_ACCOUNTS.format(NAMESPACE): OWN_ACCOUNTS.format(self.namespace),
            GPU_NAMESPACE: self.gpu_namespace,
            f"int({MAX_GRACE})": f"int({self.max_grace})",
            REVIEWED: f"bool('{str(not self.native).lower()}')",
            HOST_PATHS: f"dyn([{', '.join(map(repr, self.host_paths))}])",
            f"'{GPU_DRIVER}'": f"'{self.gpu_driver}'",
            DEVICE_CLASSES: f"dyn([{quoted(('', *self.device_classes))}])",
        }

    def _accounts(self) -> tuple[tuple[str, str], ...]:
        return (
            (RECONCILER, self.reconciler),
            (SCHEDULER_ACCOUNT, self.scheduler_account),
            (EXPORTER, self.exporter),
            (ATTESTER, self.attester),
        )

    @staticmethod
    def _account(namespace: str, name: str) -> str:
        return f"'{OWN_ACCOUNTS.format(namespace)}{name}'"

    def _given(self) -> tuple[str, ...]:
        names = (self.namespace, self.service, self.gpu_namespace, self.opt_in, self.resource, *self.hash_aliases)
        return (*names, *(own for _, own in self._accounts()))


def webhooks(installation: Installation) -> list[Manifest]:
    """The webhook configurations. Apply them once the server runs: the API server calls it from then on. Native pods
    need none."""
    if installation.native:
        return []
    found = [filled(one, installation) for one in manifests(*WEBHOOKS)]
    for manifest in found:
        manifest["webhooks"] = [
            {
                **as_binding(as_blinding(hook, installation), installation),
                "clientConfig": client_config(installation, hook["clientConfig"]["service"]["path"]),
            }
            for hook in manifest["webhooks"]
            if is_wanted(hook["name"], installation)
        ]
    return found


def while_down(installation: Installation) -> list[Manifest]:
    """The policies that replace the review of schedulers' Bindings while no replica answers. Apply them before the
    webhooks, which ignore failures for these Bindings."""
    if installation.native or not installation.schedulers:  # there is no review to replace
        return []
    return [filled(one, installation) for one in manifests(*WHILE_DOWN)]


def policies(installation: Installation) -> list[Manifest]:
    """The policies and their bindings. They need no server."""
    files = [name for name in POLICIES if name != BLIND or installation.blinds is Blinds.POLICY]
    return [filled(one, installation) for one in manifests(*files)] + native(installation)


def native(installation: Installation) -> list[Manifest]:
    """The policies of native pods."""
    return [filled(one, installation) for one in manifests(NATIVE)] if installation.native else []


def dra(installation: Installation) -> list[Manifest]:
    """The class of proof devices, and the policies for them and for claims that take GPUs."""
    return [guarding(filled(one, installation), installation) for one in manifests(*DRA) if is_bound(one, installation)]


def is_bound(manifest: Manifest, installation: Installation) -> bool:
    """A guard of all namespaces needs no binding for the older label."""
    is_for_alias = is_guard(manifest) and manifest["metadata"]["name"].endswith("-alias")
    return installation.dra_guard is DraGuard.OPTED_IN or not is_for_alias


def guarding(manifest: Manifest, installation: Installation) -> Manifest:
    """A binding of a guard selects the namespaces that are guarded."""
    if not is_guard(manifest) or installation.dra_guard is DraGuard.OPTED_IN:
        return manifest
    matched = manifest["spec"]["matchResources"]
    anywhere = {key: value for key, value in matched["namespaceSelector"].items() if key != "matchLabels"}
    return {**manifest, "spec": {**manifest["spec"], "matchResources": {**matched, "namespaceSelector": anywhere}}}


def is_guard(manifest: Manifest) -> bool:
    """Whether it is the binding of a guard that selects namespaces."""
    return (
        manifest["kind"].endswith("Binding")
        and manifest["spec"]["policyName"] in GUARDS
        and "namespaceSelector" in manifest["spec"].get("matchResources", ())
    )


def shipped(file: str) -> Callable[[Installation], list[Manifest]]:
    """The objects of a shipped file, with an installation's names."""
    return lambda installation: [filled(one, installation) for one in manifests(file)]


# The service accounts of gpuwarden and their roles: of `serve` and `reconcile`, of `export`, of the one that issues
# certificates if cert-manager does not, of `score`, and of `reconcile` with `--kueue`.
rbac, export, certs, score, kueue = map(shipped, ("rbac.yaml", "export.yaml", "certs.yaml", "score.yaml", "kueue.yaml"))

# In the order to apply them. The webhooks come last: from then on pods wait for the server.
PRINTED: Mapping[str, Callable[[Installation], list[Manifest]]] = {
    "crds": lambda installation: crds.manifests(),
    "rbac": rbac,
    "policies": policies,
    "webhooks": lambda installation: [*while_down(installation), *webhooks(installation)],
}
# Optional, so only printed by name.
BY_NAME_ONLY: Mapping[str, Callable[[Installation], list[Manifest]]] = {
    "export": export,
    "certs": certs,
    "score": score,
    "dra": dra,
    "kueue": kueue,
}


def as_yaml(what: str, installation: Installation) -> str:
    """One of `PRINTED` or `BY_NAME_ONLY`, or `all` of `PRINTED`, as YAML documents. All for native pods includes their
    DeviceClass."""
    wanted = (*PRINTED, *(("dra",) if installation.native else ())) if what == "all" else (what,)
    found = [one for name in wanted for one in {**PRINTED, **BY_NAME_ONLY}[name](installation)]
    return yaml.safe_dump_all(found, sort_keys=False, width=120, explicit_start=True)


def manifests(*files: str) -> list[Manifest]:
    """The shipped objects."""
    return [one for name in files for one in yaml.safe_load_all(text(name))]


def text(name: str) -> str:
    found = (resources.files("webhook.kube.install") / "policies" / name).read_text()
    for placeholder, names in LISTED_NAMES.items():
        found = found.replace(placeholder, quoted(names))
    return found


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def is_wanted(name: str, installation: Installation) -> bool:
    if name.startswith("validate-delete."):
        return installation.reviews_deletes
    return installation.reviews_bindings or not name.startswith(("review-binding.", "validate-binding."))


def as_blinding(hook: Manifest, installation: Installation) -> Manifest:
    """With Blinds.WEBHOOK, the mutating hook matches every pod and debug container."""
    if installation.blinds is not Blinds.WEBHOOK or not hook["name"].startswith("mutate."):
        return hook
    return {**hook, "rules": [*hook["rules"], *filled([*DEBUGGING], installation)], "matchConditions": []}


def as_binding(hook: Manifest, installation: Installation) -> Manifest:
    """Without schedulers, the hook for other users' Bindings matches all Bindings."""
    if installation.schedulers or not hook["name"].startswith("validate-binding."):
        return hook
    return {**hook, "matchConditions": []}


def client_config(installation: Installation, path: str) -> Manifest:
    bundle = base64.b64encode(installation.ca_bundle).decode()
    trust = {"caBundle": bundle} if bundle else {}
    if installation.url is not None:
        return {"url": installation.url.rstrip("/") + path, **trust}
    place = {"namespace": installation.namespace, "name": installation.service, "port": installation.port}
    return {"service": {**place, "path": path}, **trust}


def filled(tree: Any, installation: Installation) -> Any:
    """A copy of the tree with this installation's names in keys and values."""
    match tree:
        case {"key": "kubernetes.io/metadata.name", "values": list(values), **rest}:
            own = [installation.namespace if name == NAMESPACE else name for name in values]
            return {"key": "kubernetes.io/metadata.name", **rest, "values": own}
        case {"namespace": str(name), **rest} if name == NAMESPACE:
            return {**filled(rest, installation), "namespace": installation.namespace}
        case dict():
            return {filled(k, installation): filled(v, installation) for k, v in tree.items()}
        case list():
            return [filled(one, installation) for one in tree]
        case str():
            return renamed(tree, installation)
        case _:
            return tree


def renamed(value: str, installation: Installation) -> str:
    for ours, theirs in installation.names.items():
        value = value.replace(ours, theirs)
    return value
