"""What the API server is told of us: which pods it sends, what it refuses by itself when no replica is up, and what
we may do.

The files stand by themselves for an installation in the namespace `gpuwarden`, but for the CA bundle.
"""

import base64
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib import resources
from typing import Any

import yaml
from attrs import field, frozen

from webhook.core import keys
from webhook.core.host_paths import mistake_in
from webhook.core.names import is_label_key
from webhook.kube.install import crds

Manifest = dict[str, Any]

WEBHOOKS = ("mutating.yaml", "validating.yaml")
POLICIES = ("protect.yaml", "own.yaml", "grace.yaml", "strip.yaml", "blind.yaml", "isolation.yaml")
BLIND = "blind.yaml"
WHILE_DOWN = ("binding.yaml",)
RBAC = ("rbac.yaml",)
CERTS = ("certs.yaml",)
EXPORT = ("export.yaml",)
SCORE = ("score.yaml",)

# Debug containers come by a door of their own.
DEBUGGING: tuple[Manifest, ...] = (
    {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "operations": ["UPDATE"],
        "resources": ["pods/ephemeralcontainers"],
        "scope": "Namespaced",
    },
)

# As the files have them.
NAMESPACE = "gpuwarden"
SERVICE = "gpuwarden"
GPU_NAMESPACE = "gpu-operator"
OPT_IN = keys.OPT_IN.name
RESOURCE = "nvidia.com/gpu"
SCHEDULER = "system:kube-scheduler"
MAX_GRACE = 3600
HOST_PATHS = "dyn([])"
OWN_ACCOUNTS = "system:serviceaccount:{}:"
RECONCILER, BINDER, EXPORTER = "gpuwarden-reconcile", "gpuwarden-bind", "gpuwarden-export"

# Names of labels, annotations and resources; what else could stand in a quoted word of CEL has no place there.
# A user's name, where it can stand in a quoted word of CEL.
USER_NAME = re.compile(r"[A-Za-z0-9@:._/-]+")


class Blinds(StrEnum):
    """Who blinds containers whose pods ask for nothing."""

    # The API server by itself, from Kubernetes 1.36 on.
    POLICY = "policy"
    # Our webhook: every pod of the namespaces that have opted in is sent to it.
    WEBHOOK = "webhook"
    NOBODY = "nobody"


@frozen
class Installation:
    """What only an installer knows."""

    namespace: str = NAMESPACE
    service: str = SERVICE
    port: int = 443
    # Where the pods of the device plugin are, for `gpuwarden export`.
    gpu_namespace: str = GPU_NAMESPACE
    # Instead of the service, for a server outside of the cluster.
    url: str | None = None
    # The service accounts of those who write to pods and nodes.
    reconciler: str = RECONCILER
    binder: str = BINDER
    exporter: str = EXPORTER
    # In PEM; without it the API server goes by the roots of its own machine.
    ca_bundle: bytes = b""
    opt_in: str = OPT_IN
    # Beside the names that always count.
    hash_aliases: tuple[str, ...] = ()
    resource: str = RESOURCE
    # Users that bind pods where their node affinity leads: their Bindings go on while nobody answers. Without any, no
    # pod is bound meanwhile in a namespace that has opted in.
    schedulers: tuple[str, ...] = (SCHEDULER,)
    # A server that watches pods hears of their end by itself. A Binding is the last look before a pod is on its node.
    reviews_deletes: bool = False
    reviews_bindings: bool = True
    # Who sees to it that containers without a claim are shown no GPU.
    blinds: Blinds = Blinds.POLICY
    # In seconds: how long a deletion may let the containers of a pod with GPUs go on.
    max_grace: int = MAX_GRACE
    # Directories of nodes that pods of opted-in namespaces may mount for reading.
    host_paths: tuple[str, ...] = ()
    names: Mapping[str, str] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        wrong = [name for name in self._given() if not is_label_key(name)]
        if wrong:
            raise ValueError(f"{', '.join(map(repr, wrong))}: not the name of a label, an annotation or a resource")
        strange = [name for name in self.schedulers if not USER_NAME.fullmatch(name)]
        if strange:
            raise ValueError(f"{', '.join(map(repr, strange))}: not the name of a user")
        mistakes = [f"{path!r}: {mistake}" for path in self.host_paths if (mistake := mistake_in(path)) is not None]
        if mistakes:
            raise ValueError("; ".join(mistakes))

    @names.default
    def _names(self) -> dict[str, str]:
        """What the files say, and what is said here instead."""
        hashes = [f"'{name}'" for name in dict.fromkeys((*keys.REQUIRED_HASH.names, *self.hash_aliases))]
        return {
            OPT_IN: self.opt_in,
            ", ".join(f"'{name}'" for name in keys.REQUIRED_HASH.names): ", ".join(hashes),
            f"'{RESOURCE}'": f"'{self.resource}'",
            f"'{SCHEDULER}'": ", ".join(f"'{name}'" for name in self.schedulers),
            # Whole names first: they begin with what is filled in after them.
            **{self._account(NAMESPACE, ours): self._account(self.namespace, own) for ours, own in self._accounts()},
            OWN_ACCOUNTS.format(NAMESPACE): OWN_ACCOUNTS.format(self.namespace),
            GPU_NAMESPACE: self.gpu_namespace,
            f"int({MAX_GRACE})": f"int({self.max_grace})",
            HOST_PATHS: f"dyn([{', '.join(map(repr, self.host_paths))}])",
        }

    def _accounts(self) -> tuple[tuple[str, str], ...]:
        return ((RECONCILER, self.reconciler), (BINDER, self.binder), (EXPORTER, self.exporter))

    @staticmethod
    def _account(namespace: str, name: str) -> str:
        return f"'{OWN_ACCOUNTS.format(namespace)}{name}'"

    def _given(self) -> tuple[str, ...]:
        names = (self.namespace, self.service, self.gpu_namespace, self.opt_in, self.resource, *self.hash_aliases)
        return (*names, self.reconciler, self.binder, self.exporter)


def webhooks(installation: Installation) -> list[Manifest]:
    """The webhook configurations: after these the API server calls, so the server has to be up."""
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
    """What stands in for the review of schedulers' Bindings while no replica answers. It comes before the webhooks,
    which let those Bindings go on without us."""
    return [filled(one, installation) for one in manifests(*WHILE_DOWN)] if installation.schedulers else []


def policies(installation: Installation) -> list[Manifest]:
    """The policies and their bindings, which need no server."""
    files = [name for name in POLICIES if name != BLIND or installation.blinds is Blinds.POLICY]
    return [filled(one, installation) for one in manifests(*files)]


def rbac(installation: Installation) -> list[Manifest]:
    """Our service accounts and what they may do."""
    return [filled(one, installation) for one in manifests(*RBAC)]


def export(installation: Installation) -> list[Manifest]:
    """The service account of `gpuwarden export` and what it may do."""
    return [filled(one, installation) for one in manifests(*EXPORT)]


def certs(installation: Installation) -> list[Manifest]:
    """The account of whoever makes our certificates, where no other does."""
    return [filled(one, installation) for one in manifests(*CERTS)]


def score(installation: Installation) -> list[Manifest]:
    """The account of `gpuwarden score`, which only reads."""
    return [filled(one, installation) for one in manifests(*SCORE)]


# In the order in which they are applied. The webhooks come last: from then on pods wait for the server.
PRINTED: Mapping[str, Callable[[Installation], list[Manifest]]] = {
    "crds": lambda installation: crds.manifests(),
    "rbac": rbac,
    "policies": policies,
    "webhooks": lambda installation: [*while_down(installation), *webhooks(installation)],
}
# What not every cluster has a place for.
BY_NAME_ONLY: Mapping[str, Callable[[Installation], list[Manifest]]] = {
    "export": export,
    "certs": certs,
    "score": score,
}


def as_yaml(what: str, installation: Installation) -> str:
    """One of `PRINTED`, or `all` of them, or one of `BY_NAME_ONLY`, as YAML documents."""
    wanted = PRINTED if what == "all" else (what,)
    found = [one for name in wanted for one in {**PRINTED, **BY_NAME_ONLY}[name](installation)]
    return yaml.safe_dump_all(found, sort_keys=False, width=120, explicit_start=True)


def manifests(*files: str) -> list[Manifest]:
    """The objects as they are shipped."""
    return [one for name in files for one in yaml.safe_load_all(text(name))]


def text(name: str) -> str:
    return (resources.files("webhook.kube.install") / "policies" / name).read_text()


def is_wanted(name: str, installation: Installation) -> bool:
    if name.startswith("validate-delete."):
        return installation.reviews_deletes
    if name.startswith("review-binding."):
        return installation.reviews_bindings and bool(installation.schedulers)
    return installation.reviews_bindings or not name.startswith("validate-binding.")


def as_blinding(hook: Manifest, installation: Installation) -> Manifest:
    """The hook that dresses pods sees every pod and every debug container, where it blinds them."""
    if installation.blinds is not Blinds.WEBHOOK or not hook["name"].startswith("mutate."):
        return hook
    return {**hook, "rules": [*hook["rules"], *filled([*DEBUGGING], installation)], "matchConditions": []}


def as_binding(hook: Manifest, installation: Installation) -> Manifest:
    """Where no scheduler has a hook of its own, the last look is at everybody's Bindings."""
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
    """The same tree with the installation's names, in keys and values; it shares nothing with the old one."""
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
