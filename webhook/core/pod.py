"""The parts of a pod that decisions read, parsed once. Patches are made from the raw object."""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from webhook.core import keys
from webhook.core.errors import InvalidPodError

# Kubernetes' default grace period in seconds.
DEFAULT_GRACE = 30


class WireStruct(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """A part of a Kubernetes object: only the members that are read. Each may be null."""


class EnvVar(WireStruct, frozen=True):
    name: str = ""
    value: str | None = None
    value_from: dict[str, Any] | None = None

    @property
    def literal(self) -> str | None:
        """The literal value; None if it has another source."""
        return None if self.value_from is not None else self.value or ""


class Resources(WireStruct, frozen=True):
    limits: dict[str, str | int | float | None] | None = None
    requests: dict[str, str | int | float | None] | None = None
    claims: list[dict[str, Any]] | None = None


class Probe(WireStruct, frozen=True):
    termination_grace_period_seconds: int | None = None


class Container(WireStruct, frozen=True):
    name: str = ""
    env: list[EnvVar] | None = None
    env_from: list[dict[str, Any]] | None = None
    resources: Resources | None = None
    restart_policy: str | None = None
    liveness_probe: Probe | None = None
    startup_probe: Probe | None = None

    def asked(self, resource: str) -> int:
        """The requested number of an extended resource."""
        if self.resources is None:
            return 0
        both = (self.resources.limits, self.resources.requests)
        return max((whole_number(part[resource]) for part in both if part and resource in part), default=0)

    def resource_names(self) -> Iterator[str]:
        for part in (self.resources.limits, self.resources.requests) if self.resources else ():
            for name, amount in (part or {}).items():
                if amount not in (None, 0, "0", ""):
                    yield name


class Requirement(WireStruct, frozen=True):
    """One expression of a node selector term."""

    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class Term(WireStruct, frozen=True):
    match_expressions: list[Requirement] | None = None
    match_fields: list[Requirement] | None = None


class RequiredNodes(WireStruct, frozen=True):
    node_selector_terms: list[Term] | None = None


class NodeAffinity(WireStruct, frozen=True):
    required: RequiredNodes | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class PodAntiAffinity(WireStruct, frozen=True):
    preferred: list[dict[str, Any]] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(WireStruct, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_anti_affinity: PodAntiAffinity | None = None


class Toleration(WireStruct, frozen=True):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    toleration_seconds: int | None = None


class OwnerReference(WireStruct, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Metadata(WireStruct, frozen=True):
    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str | None] | None = None
    annotations: dict[str, str | None] | None = None
    owner_references: list[OwnerReference] | None = None
    creation_timestamp: datetime | None = None


class SchedulingGate(WireStruct, frozen=True):
    name: str = ""


class Spec(WireStruct, frozen=True):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    ephemeral_containers: list[Container] | None = None
    node_name: str | None = None
    node_selector: dict[str, str | None] | None = None
    affinity: Affinity | None = None
    tolerations: list[Toleration] | None = None
    resource_claims: list[dict[str, Any]] | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    priority_class_name: str | None = None
    termination_grace_period_seconds: int | None = None

    @property
    def longest_grace(self) -> int:
        """The longest time in seconds that a kubelet gives a container to stop. A probe may define its own."""
        own = self.termination_grace_period_seconds
        containers = (*(self.containers or ()), *(self.init_containers or ()))
        probes = [one for each in containers for one in (each.liveness_probe, each.startup_probe) if one is not None]
        return max(
            DEFAULT_GRACE if own is None else own, *(one.termination_grace_period_seconds or 0 for one in probes), 1
        )


class Pod(WireStruct, frozen=True):
    """The members of a pod that define its node and its GPUs."""

    metadata: Metadata | None = None
    spec: Spec | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "Pod":
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as exc:
            raise InvalidPodError(f"the pod cannot be read: {exc}") from exc

    @property
    def meta(self) -> Metadata:
        return self.metadata or Metadata()

    @property
    def body(self) -> Spec:
        return self.spec or Spec()

    @property
    def labels(self) -> dict[str, str | None]:
        return self.meta.labels or {}

    @property
    def annotations(self) -> dict[str, str | None]:
        return self.meta.annotations or {}

    @property
    def is_gated(self) -> bool:
        """Whether it has our scheduling gate."""
        return any(gate.name == keys.QUEUE_GATE for gate in self.body.scheduling_gates or ())

    @property
    def display_name(self) -> str:
        return self.meta.name or self.meta.generate_name or "(no name)"

    def containers(self) -> Iterator[tuple[str, Container]]:
        """Every container with its field path."""
        spec = self.body
        groups = (
            ("initContainers", spec.init_containers),
            ("containers", spec.containers),
            ("ephemeralContainers", spec.ephemeral_containers),
        )
        for group, members in groups:
            for position, container in enumerate(members or ()):
                yield f"spec.{group}[{position}]", container

    def total(self, asked: Mapping[str, int]) -> int:
        """The GPUs that the pod needs if its containers request these numbers, by Kubernetes' own rule: all containers
        and sidecars together, or an init container with the sidecars before it, whichever is more."""
        sidecars = most = 0
        for container in self.body.init_containers or ():
            own = asked.get(container.name, 0)
            if container.restart_policy == "Always":
                sidecars += own
                most = max(most, sidecars)
            else:
                most = max(most, sidecars + own)
        together = sum(asked.get(container.name, 0) for container in self.body.containers or ())
        return max(together + sidecars, most)


MAX_AMOUNT = 10**12
SUFFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
QUANTITY = re.compile(r"\+?([0-9]{1,9})(?:\.0*)?(|k|M|G|Ki|Mi|Gi|[eE]\+?[0-9])")


def whole_number(amount: str | int | float | None) -> int:
    """The quantity of an extended resource, which must be a whole number."""
    if amount is None or amount == "":
        return 0
    if isinstance(amount, int) and abs(amount) >= MAX_AMOUNT:
        raise InvalidPodError("the number of GPUs is too large")
    text = str(int(amount)) if isinstance(amount, float) and amount.is_integer() else str(amount)
    read = QUANTITY.fullmatch(text)
    if read is None:
        raise InvalidPodError(f"{text[:40]!r} is not a whole number of GPUs")
    number, suffix = read.groups()
    return int(number) * (10 ** int(suffix.lstrip("eE+")) if suffix[:1] in ("e", "E") else SUFFIXES[suffix])
