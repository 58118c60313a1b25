"""Pods as the API server sends them for review: realistic manifests with every kind of claim."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.inventory import HASHES, MODELS, NODES_PER_RACK, TEAM_TAINT, ZONES

Raw = dict[str, Any]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
RESOURCE = "nvidia.com/gpu"
HASH = "gpuwarden.io/required-hash"
# Percentage of pods by number of GPUs.
SIZES = {1: 60, 2: 20, 4: 12, 8: 8}
TEAM = {"key": TEAM_TAINT["key"], "operator": "Equal", "value": TEAM_TAINT["value"], "effect": TEAM_TAINT["effect"]}


def pod(name: str, gpus: int, *, hashes: Sequence[str] = (), labels: dict[str, str] | None = None, **spec: Any) -> Raw:
    """A training pod with the API server's defaults and the usual token volume."""
    annotations = {"team.example/cost-centre": "4711", "prometheus.io/scrape": "true"}
    if hashes:
        annotations[HASH] = ",".join(hashes)
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": "ml-training",
            "labels": {"app": "train", "job-name": "train", "batch.kubernetes.io/job-name": "train", **(labels or {})},
            "annotations": annotations,
            "ownerReferences": [owner()],
        },
        "spec": {
            "volumes": [token_volume(), {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "containers": [container(gpus)],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "serviceAccountName": "trainer",
            "schedulerName": "default-scheduler",
            "tolerations": [not_yet("not-ready"), not_yet("unreachable")],
            "priority": 0,
            "enableServiceLinks": True,
            "preemptionPolicy": "PreemptLowerPriority",
            **spec,
        },
        "status": {},
    }


def owner() -> Raw:
    uid = "6f0c1a52-6d0e-4c7b-9a53-0e7d4f0b2f11"
    kind = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": uid}
    return {**kind, "controller": True, "blockOwnerDeletion": True}


def container(gpus: int) -> Raw:
    amounts = {"cpu": "8", "memory": "64Gi"} | ({RESOURCE: str(gpus)} if gpus else {})
    return {
        "name": "train",
        "image": "registry.example/ml/train:2.4.1",
        "command": ["python", "-m", "train", "--config", "/etc/train/config.yaml"],
        "env": [
            {"name": "NCCL_DEBUG", "value": "WARN"},
            {"name": "EPOCHS", "value": "40"},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        ],
        "resources": {"limits": amounts, "requests": dict(amounts)},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "kube-api-access", "readOnly": True, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
        ],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }


def token_volume() -> Raw:
    token = {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}
    return {"name": "kube-api-access", "projected": {"sources": [token], "defaultMode": 420}}


def not_yet(condition: str) -> Raw:
    key = f"node.kubernetes.io/{condition}"
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}


def create_review(raw: Raw, uid: str) -> Raw:
    meta = raw["metadata"]
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    resource = {"group": "", "version": "v1", "resource": "pods"}
    user = "system:serviceaccount:kube-system:job-controller"
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": uid,
            "kind": kind,
            "resource": resource,
            "requestKind": kind,
            "requestResource": resource,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "operation": "CREATE",
            "userInfo": {"username": user, "groups": ["system:serviceaccounts", "system:authenticated"]},
            "object": raw,
            "oldObject": None,
            "dryRun": False,
            "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    }


# Claims.


def affinity(*expressions: Raw) -> Raw:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}}}


def expression(key: str, operator: str, *values: str) -> Raw:
    return {"key": key, "operator": operator, "values": list(values)} if values else {"key": key, "operator": operator}


class Asker:
    """Creates pods with each kind of claim, for a fleet with these nodes."""

    def __init__(self, node_names: Sequence[str], rng: random.Random, sizes: Mapping[int, int] = SIZES) -> None:
        self.nodes = node_names
        self.rng = rng
        self.sizes = sizes
        self.racks = -(-len(node_names) // NODES_PER_RACK)
        self.made = 0

    def make(self, way: "Way") -> Raw:
        self.made += 1
        return way(self)

    def _pod(self, gpus: int | None = None, **wishes: Any) -> Raw:
        count = self._gpus() if gpus is None else gpus
        return pod(f"train-{self.made}", count, **wishes)

    def _gpus(self) -> int:
        return self.rng.choices(list(self.sizes), list(self.sizes.values()))[0]

    def _hash(self) -> str:
        return self.rng.choice(HASHES)

    def _labels(self) -> dict[str, str]:
        model = self.rng.choice(MODELS)
        return {"gpuwarden.io/gpu.model": model.name, "gpuwarden.io/gpu.memory": model.memory}

    def plain(self) -> Raw:
        return self._pod()

    def hashed(self) -> Raw:
        return self._pod(hashes=[self._hash()])

    def several_hashes(self) -> Raw:
        return self._pod(hashes=sorted(set(self.rng.choices(HASHES, k=3))))

    def labelled(self) -> Raw:
        return self._pod(labels=self._labels())

    def labelled_and_hashed(self) -> Raw:
        return self._pod(hashes=[self._hash()], labels=self._labels())

    def selecting_zone(self) -> Raw:
        return self._pod(nodeSelector={"topology.kubernetes.io/zone": self.rng.choice(ZONES)}, hashes=[self._hash()])

    def with_affinity(self) -> Raw:
        wanted = (expression("pool", "In", "training"), expression("topology.kubernetes.io/zone", "NotIn", ZONES[0]))
        return self._pod(affinity=affinity(*wanted), labels=self._labels())

    def tolerating(self) -> Raw:
        return self._pod(tolerations=[TEAM])

    def on_host(self) -> Raw:
        return self._pod(1, nodeSelector={"kubernetes.io/hostname": self.rng.choice(self.nodes)})

    def in_rack(self) -> Raw:
        rack = f"rack-{self.rng.randrange(self.racks):04d}"
        return self._pod(1, affinity=affinity(expression("topology.example/rack", "In", rack)))

    def not_on_host(self) -> Raw:
        wanted = expression("kubernetes.io/hostname", "NotIn", self.rng.choice(self.nodes))
        return self._pod(affinity=affinity(wanted), hashes=[self._hash()])

    def of_unknown_hash(self) -> Raw:
        return self._pod(hashes=["sha256:unknown"])

    def of_unknown_model(self) -> Raw:
        return self._pod(labels={"gpuwarden.io/gpu.model": "none-such"})

    def too_many(self) -> Raw:
        return self._pod(16, hashes=[self._hash()])

    def too_many_not_on_host(self) -> Raw:
        wanted = expression("kubernetes.io/hostname", "NotIn", self.rng.choice(self.nodes))
        return self._pod(16, affinity=affinity(wanted))

    def too_many_on_any_host(self) -> Raw:
        return self._pod(16, affinity=affinity({"key": "kubernetes.io/hostname", "operator": "Exists"}))

    def without_claim(self) -> Raw:
        return self._pod(0)


Way = Callable[[Asker], Raw]

# Percentage of pods by kind of claim.
WAYS: dict[Way, int] = {
    Asker.plain: 14,
    Asker.hashed: 22,
    Asker.several_hashes: 5,
    Asker.labelled: 8,
    Asker.labelled_and_hashed: 14,
    Asker.selecting_zone: 7,
    Asker.with_affinity: 6,
    Asker.tolerating: 3,
    Asker.on_host: 3,
    Asker.in_rack: 2,
    Asker.not_on_host: 2,
    Asker.of_unknown_hash: 2,
    Asker.of_unknown_model: 2,
    Asker.too_many: 2,
    Asker.too_many_not_on_host: 1,
    Asker.without_claim: 7,
}
# Rare, and checked node by node. Measured separately.
RARE: tuple[Way, ...] = (Asker.too_many_on_any_host,)


def stream(asker: Asker, count: int) -> list[tuple[str, Raw]]:
    """This number of pods, each with the name of its kind of claim."""
    ways = asker.rng.choices(list(WAYS), list(WAYS.values()), k=count)
    return [(way.__name__, asker.make(way)) for way in ways]
