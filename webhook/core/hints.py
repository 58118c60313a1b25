"""Hints: the features of a pod's workload, the advice of a scorer, and the changes that both make to the pod. Hints are
best effort: a hint that would make the pod invalid, or exclude every node, is dropped with a warning.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from attrs import evolve, field, frozen

from webhook.core import keys
from webhook.core.claim import Claim
from webhook.core.dress import RawPod
from webhook.core.errors import InvalidPodError
from webhook.core.keys import Key
from webhook.core.names import is_label_key, is_label_value
from webhook.core.nodes_asked import Labels
from webhook.core.pod import Metadata, Pod, Toleration, WireStruct
from webhook.core.raw import Raw

# The memory of a pod that asks for a GPU and names no amount.
DEFAULT_MEMORY_GB = 40.0
DEFAULT_TENANT = "default"
DECIMAL = re.compile(r"[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?", re.ASCII)
INTEGER = re.compile(r"\+?\d{1,9}", re.ASCII)
# The longest feature. A longer text is not the name of a job or a team.
MAX_FEATURE = 253

MAX_SECONDS = 2**31
EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")

# A reinvocation after another webhook's change comes within the same request. Older hints are those of another pod.
SAME_CREATION = timedelta(seconds=60)


# Features of a pod.


@frozen
class Features:
    """The input of a scorer for one pod."""

    job_type: str
    tenant: str = DEFAULT_TENANT
    gpu_mem_gb: float | None = None
    batch_size: int | None = None
    warnings: tuple[str, ...] = field(default=(), eq=False)


def features_of(pod: Pod) -> Features | None:
    """None if the pod names no job type. Invalid features are left out, with a warning."""
    job_type = pod.annotations.get(keys.JOB_TYPE)
    if not job_type or len(job_type) > MAX_FEATURE:
        return None
    memory, batch = pod.annotations.get(keys.GPU_MEMORY), pod.annotations.get(keys.BATCH_SIZE)
    tenant = pod.annotations.get(keys.TENANT) or DEFAULT_TENANT
    gigabytes, size = parse_amount(memory), parse_integer(batch)
    warnings = []
    if memory is not None and gigabytes is None:
        warnings.append(f"annotation {keys.GPU_MEMORY}: {memory[:40]!r} is not a number of gigabytes; it is ignored")
    if batch is not None and size is None:
        warnings.append(f"annotation {keys.BATCH_SIZE}: {batch[:40]!r} is not a whole number; it is ignored")
    if len(tenant) > MAX_FEATURE:
        warnings.append(f"annotation {keys.TENANT} is too long; it is ignored")
        tenant = DEFAULT_TENANT
    if gigabytes is None and requests_gpus(pod):
        gigabytes = DEFAULT_MEMORY_GB
    return Features(job_type, tenant, gigabytes, size, tuple(warnings))


def parse_amount(text: str | None) -> float | None:
    """A finite number that is not negative."""
    if text is None or not DECIMAL.fullmatch(text.strip()):
        return None
    number = float(text)
    return number if math.isfinite(number) and not math.copysign(1, number) < 0 else None


def parse_integer(text: str | None) -> int | None:
    return int(text) if text is not None and INTEGER.fullmatch(text.strip()) else None


def requests_gpus(pod: Pod) -> bool:
    """Whether a container requests a resource with `gpu` in its name. Limits alone and init containers do not count."""
    for container in pod.body.containers or ():
        requests = container.resources.requests if container.resources else None
        if any("gpu" in name.lower() and amount not in (None, 0, "0", "") for name, amount in (requests or {}).items()):
            return True
    return False


def should_score(pod: Pod, claim: Claim | None) -> bool:
    """Only pods that get a GPU are scored: a hint could exclude every node that another pod may run on."""
    return requests_gpus(pod) or bool(claim and claim.count)


def was_hinted(pod: Pod, now: datetime) -> bool:
    """Whether this is a reinvocation for the same pod, after another webhook's change. Its hints stay as they are."""
    text = pod.annotations.get(keys.DECISION_TIMESTAMP.name) or ""
    return text.isdecimal() and len(text) < 12 and abs(now.timestamp() - int(text)) < SAME_CREATION.total_seconds()


# Advice of a scorer.


@frozen
class Bucket:
    """Scores from `min_score` on get this priority class."""

    min_score: float
    priority_class: str


DEFAULT_CLASS = "gpu-default"
DEFAULT_BUCKETS = (
    Bucket(90, "gpu-ultra"),
    Bucket(70, "gpu-high"),
    Bucket(50, "gpu-medium"),
    Bucket(0, DEFAULT_CLASS),
)


def class_for(score: float, buckets: Iterable[Bucket]) -> str:
    best = sorted((one for one in buckets if one.min_score <= score), key=lambda one: -one.min_score)
    return best[0].priority_class if best else DEFAULT_CLASS


@frozen
class Advice:
    """A scorer's answer: well formed, not checked against the pod and the cluster."""

    score: float = 50
    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    avoid: tuple[str, ...] = ()
    chosen: str | None = None

    @property
    def chosen_gpu(self) -> str:
        """The chosen model. Some scorers name it in their selector only."""
        by_label = (value for key in keys.GPU_TYPE_LABELS for name, value in self.selector if name == key)
        return self.chosen or next(by_label, "unknown")

    @property
    def score_text(self) -> str:
        return str(int(self.score)) if float(self.score).is_integer() else repr(self.score)


@frozen
class Hints:
    """The changes to one pod that follow from advice; `warnings` name what was left out."""

    job_type: str
    score: str
    chosen_gpu: str
    decided: int
    priority_class: str | None = None
    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    avoid: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), eq=False)

    def applied_to(self, claim: Claim) -> Claim:
        """The claim with the tolerations of the hints. It prefers the nodes that they select."""
        own = dict(claim.nodes.selector)
        selector = (*claim.nodes.selector, *((key, value) for key, value in self.selector if key not in own))
        nodes = evolve(claim.nodes, tolerations=(*claim.nodes.tolerations, *self.tolerations))
        return evolve(claim, nodes=nodes, preferred=evolve(nodes, selector=selector) if self.selector else None)

    def fitted_to_nodes(self, *nodes: Labels) -> "Hints":
        """The hints without the selector, if it would exclude a node that was chosen for the pod."""
        if all(labels.get(key) == value for labels in nodes for key, value in self.selector):
            return self
        wanted = ", ".join(f"{key}={value}" for key, value in self.selector)
        return self._without_selector(f"no node with {wanted} can serve the pod: the hint is ignored")

    def for_queued_pod(self) -> "Hints":
        """The hints without the selector: the pod must not wait for a preferred node."""
        return evolve(self, selector=())

    def _without_selector(self, why: str) -> "Hints":
        return evolve(self, selector=(), warnings=(*self.warnings, why))


# From advice to hints.


@frozen
class HintContext:
    """The objects of the cluster to which a hint may refer."""

    gpu_types: Mapping[str, Mapping[str, int]]
    buckets: Sequence[Bucket] = DEFAULT_BUCKETS
    # The existing priority classes; None: not known, so every name is accepted.
    classes: frozenset[str] | None = None
    # Pods that name no class get this one, so a pod with it has not chosen a class.
    default_class: str | None = None


def hints_of(advice: Advice, features: Features, pod: Pod, context: HintContext, now: datetime) -> Hints:
    reading = AdviceReader(advice, features, pod, context)
    selector, tolerations = tuple(reading.selector()), tuple(reading.tolerations())
    return Hints(
        job_type=features.job_type,
        score=advice.score_text,
        chosen_gpu=advice.chosen_gpu,
        decided=int(now.timestamp()),
        priority_class=reading.priority_class(),
        selector=selector,
        tolerations=tolerations,
        avoid=tuple(reading.avoid()),
        warnings=tuple(reading.warnings),
    )


class AdviceReader:
    """Checks a scorer's advice against the pod and the cluster."""

    def __init__(self, advice: Advice, features: Features, pod: Pod, context: HintContext) -> None:
        self.advice = advice
        self.pod = pod
        self.context = context
        self.warnings: list[str] = list(features.warnings)
        if not is_label_value(features.job_type):
            self.warnings.append(
                f"{keys.JOB_TYPE}: {features.job_type[:63]!r} is not a valid label value, so other pods cannot avoid "
                "this one"
            )

    def priority_class(self) -> str | None:
        if self.pod.body.priority_class_name not in (None, "", self.context.default_class):
            return None
        name = class_for(self.advice.score, self.context.buckets)
        if self.context.classes is None or name in self.context.classes:
            return name
        self.warnings.append(f"PriorityClass {name} does not exist: the pod gets none")
        return None

    def selector(self) -> Iterator[tuple[str, str]]:
        if self.pod.body.node_name:
            return  # the node is fixed, and the kubelet would reject the pod
        own = self.pod.body.node_selector or {}
        for asked, value in self.advice.selector:
            key = self._key_for(asked, value)
            if key is None:
                self.warnings.append(f"no node has the label {asked}={value} that the scorer chose: it is ignored")
            elif own.get(key, value) != value:
                self.warnings.append(f"nodeSelector {key}={own[key]} is kept; the scorer chose {value}")
            elif not is_label_key(key) or not is_label_value(value):
                self.warnings.append(f"{key}={value} is not a valid label: it is ignored")
            else:
                yield key, value

    def _key_for(self, asked: str, value: str) -> str | None:
        """The label that nodes use for the model, which may not be the one that the scorer uses."""
        if asked not in keys.GPU_TYPE_LABELS:
            return asked
        known = {key: types.get(value, 0) for key, types in self.context.gpu_types.items()}
        best = max(known, key=lambda key: known[key], default=None)
        return best if best is not None and known[best] else None

    def tolerations(self) -> Iterator[Toleration]:
        own = self.pod.body.tolerations or []
        for one in dict.fromkeys(self.advice.tolerations):
            if not is_valid(one):
                self.warnings.append(f"a toleration of {(one.key or 'everything')[:63]} is not valid: it is ignored")
            elif one not in own:
                yield one

    def avoid(self) -> Iterator[str]:
        for job_type in dict.fromkeys(self.advice.avoid):
            if job_type and is_label_value(job_type):
                yield job_type
            else:
                self.warnings.append(
                    f"{job_type[:63]!r} is not a valid label value, so pods of that job type cannot be avoided"
                )


def is_valid(one: Toleration) -> bool:
    """By Kubernetes' rules. A toleration without a key tolerates every taint; a scorer may not add it."""
    if not one.key or not is_label_key(one.key) or (one.effect or "") not in EFFECTS:
        return False
    seconds = one.toleration_seconds
    if seconds is not None and (one.effect != "NoExecute" or abs(seconds) > MAX_SECONDS):
        return False
    if one.operator == "Exists":
        return not one.value
    return one.operator in (None, "", "Equal") and is_label_value(one.value or "")


# The pod with its hints.


def hinted(raw: RawPod, hints: Hints, *, writes_aliases: bool = True) -> Raw:
    """The pod with the hints merged in. The pod's own fields stay."""
    return {
        **raw,
        "metadata": hinted_metadata(raw.get("metadata") or {}, hints, writes_aliases=writes_aliases),
        "spec": hinted_spec(raw.get("spec") or {}, hints),
    }


def hinted_metadata(meta: Raw, hints: Hints, *, writes_aliases: bool) -> Raw:
    written: tuple[tuple[Key, str], ...] = (
        (keys.PRIORITY_SCORE, hints.score),
        (keys.CHOSEN_GPU, hints.chosen_gpu),
        (keys.DECISION_TIMESTAMP, str(hints.decided)),
    )
    annotations = dict(meta.get("annotations") or {})
    for key, value in written:
        annotations.update(dict.fromkeys(key.names if writes_aliases else (key.name,), value))
    labels = meta.get("labels") or {}
    if is_label_value(hints.job_type) and keys.JOB_TYPE not in labels:
        return {**meta, "annotations": annotations, "labels": {**labels, keys.JOB_TYPE: hints.job_type}}
    return {**meta, "annotations": annotations}


def hinted_spec(raw: Raw, hints: Hints) -> Raw:
    spec = dict(raw)
    if hints.priority_class is not None:
        # The Priority plugin set these before the class was known. It rejects values that are not those of the class.
        spec.pop("priority", None)
        spec.pop("preemptionPolicy", None)
        spec["priorityClassName"] = hints.priority_class
    if hints.selector:
        spec["nodeSelector"] = {**dict(hints.selector), **(raw.get("nodeSelector") or {})}
    if hints.tolerations:
        spec["tolerations"] = [*(raw.get("tolerations") or ()), *map(raw_toleration, hints.tolerations)]
    if hints.avoid:
        spec["affinity"] = avoiding(raw.get("affinity") or {}, hints.avoid)
    return spec


def raw_toleration(one: Toleration) -> Raw:
    members = {
        "key": one.key,
        "operator": one.operator,
        "value": one.value,
        "effect": one.effect,
        "tolerationSeconds": one.toleration_seconds,
    }
    return {name: value for name, value in members.items() if value not in (None, "")}


PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def avoiding(affinity: Raw, job_types: Iterable[str]) -> Raw:
    """Preferred anti-affinity to these job types, in addition to the pod's own terms."""
    anti_affinity = affinity.get("podAntiAffinity") or {}
    own = anti_affinity.get(PREFERRED) or []
    added = [term for term in map(avoidance_term, job_types) if term not in own]
    return {**affinity, "podAntiAffinity": {**anti_affinity, PREFERRED: [*own, *added]}}


def avoidance_term(job_type: str) -> Raw:
    selector = {"matchExpressions": [{"key": keys.JOB_TYPE, "operator": "In", "values": [job_type]}]}
    term = {"labelSelector": selector, "topologyKey": keys.HOSTNAME_LABEL}
    return {"weight": 100, "podAffinityTerm": term}


# Jobs.


class TemplateWire(WireStruct, frozen=True):
    metadata: Metadata | None = None


class JobSpecWire(WireStruct, frozen=True):
    template: TemplateWire | None = None


class JobWire(WireStruct, frozen=True):
    metadata: Metadata | None = None
    spec: JobSpecWire | None = None


def with_features_in_template(raw: Mapping[str, Any]) -> Raw:
    """The Job with its feature annotations copied to its pod template. Annotations of the template stay."""
    try:
        job = msgspec.convert(raw, JobWire)
    except msgspec.ValidationError as exc:
        raise InvalidPodError(f"the Job cannot be read: {exc}") from exc
    template = job.spec.template if job.spec else None
    own = (template.metadata.annotations if template and template.metadata else None) or {}
    of_job = (job.metadata.annotations if job.metadata else None) or {}
    missing = {key: of_job[key] for key in keys.FEATURES if of_job.get(key) is not None and key not in own}
    if template is None or not missing:
        return dict(raw)
    raw_template = raw["spec"]["template"]
    meta = raw_template.get("metadata") or {}
    annotations = {**(meta.get("annotations") or {}), **missing}
    return {
        **raw,
        "spec": {**raw["spec"], "template": {**raw_template, "metadata": {**meta, "annotations": annotations}}},
    }
