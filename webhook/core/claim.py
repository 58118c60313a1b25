"""What a pod asks for, parsed once and recorded in an annotation for later reviews."""

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import evolve, field, frozen
from msgspec import structs

from webhook.core import claim_keys, keys
from webhook.core.claim_keys import FIELDS, ClaimField, ClaimKey, ClaimRecord
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_map import ORDINAL, MapEntry, SetId, parse_map
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy, hashes_in
from webhook.core.injection import Injection, may_choose_late, recorded_injection
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod, whole_number
from webhook.core.reservation import GpuDelivery
from webhook.core.reserve import Reserve, recorded_reserve

# No node has as many GPUs: a larger number is a typing error.
MAX_GPUS = 1024
# A kubelet cannot run a pod with more, and its record would not fit into an annotation.
MAX_CONTAINERS = 512
# More than people and tools write. Each is evaluated for nodes while other reviews wait.
MAX_TERMS = 32
MAX_EXPRESSIONS = 128
# A pod whose node is not chosen at its creation is pinned to at most this many nodes. Its affinity then has one term
# for each node and each term of the pod, and this bounds their number.
MAX_PROVEN_NODES = 64


@frozen
class ClaimRules:
    """How claims are parsed in this installation and one namespace."""

    resource: str = "nvidia.com/gpu"
    hash_aliases: tuple[str, ...] = claim_keys.REQUIRED_HASH.aliases
    hash_policy: HashPolicy = NO_HASH_POLICY
    # The installation's injection, which namespaces may override.
    default_injection: Injection = Injection.NVIDIA
    # When GPUs are chosen.
    default_reserve: Reserve = Reserve.CREATE

    @property
    def injection(self) -> str | None:
        """The injection of new pods with GPUs, for the record of their claims."""
        return recorded_injection(self.hash_policy.injection, self.default_injection)

    @property
    def reserve(self) -> str | None:
        """When the GPUs of new pods are chosen, for the record of their claims."""
        injection = self.hash_policy.injection or self.default_injection
        is_late = may_choose_late(injection, self.default_injection)
        return recorded_reserve(self.default_reserve) if is_late else None

    @property
    def required_hash(self) -> ClaimKey:
        return evolve(claim_keys.REQUIRED_HASH, aliases=self.hash_aliases)


@frozen
class Claim:
    """What one pod asks for."""

    record: ClaimRecord
    nodes: NodesAsked = field(factory=NodesAsked)
    warnings: tuple[str, ...] = field(default=(), eq=False)
    # Nodes that a hint prefers. They are used if the claim fits there.
    preferred: NodesAsked | None = field(default=None, eq=False)
    # The StatefulSet that owns the pod.
    stateful_set: SetId | None = field(default=None, eq=False)
    hashes: frozenset[str] = field(init=False, eq=False, repr=False)
    requirements: frozenset[str] = field(init=False, eq=False, repr=False)

    @hashes.default
    def _hashes(self) -> frozenset[str]:
        return frozenset(self.record.hashes)

    @requirements.default
    def _requirements(self) -> frozenset[str]:
        return frozenset(self.record.requirements)

    @property
    def count(self) -> int:
        return self.record.gpus

    def with_named(self, *, named: bool) -> "Claim":
        """The claim with `named` as it was first recorded: since then the pod was pinned."""
        return self if named == self.record.named else evolve(self, record=structs.replace(self.record, named=named))

    @property
    def is_shared(self) -> bool:
        return self.record.shared

    @property
    def delivery(self) -> GpuDelivery | None:
        return self.record.delivery

    @property
    def is_reserved_at_binding(self) -> bool:
        """Whether its GPUs are reserved in the review of the pod's Binding. Those of ResourceClaims are allocated by
        kube-scheduler."""
        return (
            bool(self.count)
            and self.record.reserve == Reserve.BIND
            and self.record.injection not in (Injection.PLUGIN, Injection.DRA)
        )

    @property
    def is_left_to_scheduler(self) -> bool:
        return self.record.is_left_to_scheduler

    def without_gpus(self) -> "Claim":
        """What the claim asks of nodes."""
        return Claim(ClaimRecord(hashes=self.record.hashes), self.nodes)

    @property
    def map_entry(self) -> MapEntry | None:
        """The node and GPUs that a placement map gives the pod."""
        return MapEntry(self.record.node, self.record.devices) if self.record.node else None

    @property
    def is_mapped(self) -> bool:
        """Whether the pod has a placement map, with a line for its ordinal or without."""
        return self.record.node is not None or self.record.unmapped is not None

    @property
    def digest(self) -> str:
        return self.record.digest()

    @property
    def sentence(self) -> str:
        """What the pod asks for, as the beginning of a message."""
        parts = [f"{self.count} GPU{'' if self.count == 1 else 's'}" if self.count else "a node"]
        if self.record.unmapped is not None:
            parts = [f"the map entry of ordinal {self.record.unmapped}"]
        elif self.map_entry:
            parts = [f"GPU {','.join(self.map_entry.gpus)} of node {self.map_entry.node}"]
        if self.record.requirements:
            parts.append("with " + " and ".join(self.record.requirements))
        values = ((one, getattr(self.record, one.name)) for _, one in FIELDS)
        parts += [one.words(value) for one, value in values if value != getattr(ClaimRecord(), one.name)]
        if self.record.hashes:
            parts.append(("on a node " if self.count else "") + "attested as " + " or ".join(self.record.hashes))
        return " ".join(parts)


def claim_of(pod: Pod, rules: ClaimRules, removed: Mapping[str, int] | None = None) -> Claim | None:
    """The pod's claim, or None if it asks for nothing that gpuwarden manages.

    `removed` are the requests of its containers that an earlier review removed. They count if no container requests
    GPUs now. Raises `InvalidPodError` with all mistakes.
    """
    parser = ClaimParser(pod, rules, removed or {})
    claim = parser.parse()
    if parser.mistakes:
        raise InvalidPodError(*parser.mistakes)
    return claim


def recorded_claim(pod: Pod) -> Claim | None:
    """The claim that an earlier review recorded in the pod. It is not trusted until a ledger knows its digest."""
    text = pod.annotations.get(keys.CLAIM.name)
    if text is None:
        return None
    return Claim(ClaimRecord.parse(text), NodesAsked.of(pod), stateful_set=stateful_set_of(pod))


def recorded_claim_or_none(pod: Pod) -> Claim | None:
    """The recorded claim of a pod, None if it cannot be read. The pod may be a copy, or a user may have written it."""
    try:
        return recorded_claim(pod)
    except InvalidPodError:
        return None


def strictest_claim(recorded: Claim, asked: Claim | None) -> Claim | None:
    """The recorded claim, restricted to the hashes of the claim that the pod asks for now. None if they have no hash in
    common.

    For records without GPUs: no ledger knows them, and where no webhook reviews pods, their author may have written
    them.
    """
    hashes = [one.hashes for one in (recorded, asked) if one is not None and one.hashes]
    if not hashes:
        return recorded
    common = frozenset.intersection(*hashes)
    if not common:
        return None
    return Claim(msgspec.structs.replace(recorded.record, hashes=tuple(sorted(common))), recorded.nodes)


class ClaimParser:
    """Parses one pod; collects all mistakes and warnings."""

    def __init__(self, pod: Pod, rules: ClaimRules, removed: Mapping[str, int]) -> None:
        self.pod = pod
        self.rules = rules
        self.removed = removed
        self.mistakes: list[str] = []
        self.warnings: list[str] = []
        self.unmapped: int | None = None

    def parse(self) -> Claim | None:
        asked = self._resources()
        hashes = self._hashes()
        requirements = self._requirements()
        entry = self._map_entry()
        assign = is_set(self.pod.labels.get(claim_keys.ASSIGNER_ASSIGN, "false"))
        counted = self._count(asked)
        values = {one.name: value for key, one in FIELDS if (value := self._value(key, one)) is not None}
        wants_one = bool(requirements) or assign or self.unmapped is not None
        wants_one |= any(key.makes_claim and one.name in values for key, one in FIELDS)
        gpus = self._gpus(counted, entry, wants_one=wants_one)
        if not (gpus or hashes or entry or wants_one):
            return None
        hashes = self._restricted(hashes)
        if keys.CHALLENGE in self.pod.annotations:
            self.mistakes.append(f"{keys.CHALLENGE}: only native pods wait for the answer to a challenge")
        nodes = NodesAsked.of(self.pod)
        self._check_size(asked, nodes)
        record = ClaimRecord(
            gpus=gpus,
            hashes=hashes,
            requirements=tuple(sorted(requirements)),
            node=entry.node if entry else None,
            devices=entry.gpus if entry else (),
            unmapped=self.unmapped,
            asked=asked,
            containers=() if asked or not gpus else tuple(c.name for _, c in self.pod.containers()),
            named=bool(gpus) and any(term.is_one_node for term in nodes.terms or ()),
            injection=self.rules.injection if gpus else None,
            reserve=self.rules.reserve if gpus else None,
            **values,
        )
        self._warn_of_unknown_keys()
        return Claim(record, nodes, tuple(self.warnings), stateful_set=stateful_set_of(self.pod))

    def _text(self, key: ClaimKey) -> str | None:
        """The annotation under the canonical name or an alias, else the label. Different values are a mistake."""
        found = {n: v for n in key.names if (v := self.pod.annotations.get(n)) is not None}
        if len(set(found.values())) > 1:
            self.mistakes.append(f"annotations {' and '.join(found)} have different values")
        return next(iter(found.values()), self.pod.labels.get(key.name) if key.is_label else None)

    def _resources(self) -> dict[str, int]:
        asked: dict[str, int] = {}
        for path, container in self.pod.containers():
            try:
                number = container.asked(self.rules.resource)
            except InvalidPodError as exc:
                self.mistakes.append(f"{path}.resources: {self.rules.resource}: {exc}")
                continue
            if number:
                asked[container.name] = number
        names = {container.name for _, container in self.pod.containers()}
        return asked or {name: number for name, number in self.removed.items() if name in names}

    def _count(self, asked: Mapping[str, int]) -> int | None:
        """The number in the resource requests, else in the annotation or label, else None."""
        by_resource = self.pod.total(asked)
        text = self._text(claim_keys.GPU_COUNT)
        if text is None:
            return by_resource or None
        if not text:
            self.mistakes.append(f"{claim_keys.GPU_COUNT.name} is empty")
            return None
        try:
            by_key = whole_number(text)
        except InvalidPodError as exc:
            self.mistakes.append(f"{claim_keys.GPU_COUNT.name}: {exc}")
            return None
        if by_resource and by_key != by_resource:
            name = claim_keys.GPU_COUNT.name
            self.warnings.append(f"{name}={by_key} is ignored: the containers request {by_resource}")
        return by_resource or by_key

    def _gpus(self, counted: int | None, entry: MapEntry | None, *, wants_one: bool) -> int:
        if entry is not None:
            listed = len(entry.gpus)
            if counted not in (None, listed):
                self.mistakes.append(f"the map lists {listed} GPUs, the pod asks for {counted}")
            return listed
        if counted == 0 and wants_one:
            self.mistakes.append(f"{claim_keys.GPU_COUNT.name} is 0, but labels require GPUs")
        gpus = int(wants_one) if counted is None else counted
        if gpus > MAX_GPUS:
            self.mistakes.append(f"the pod asks for {gpus} GPUs; the maximum is {MAX_GPUS}")
        return gpus

    def _hashes(self) -> tuple[str, ...]:
        key = self.rules.required_hash
        text = self._text(key)
        if text is None:
            return ()
        hashes, mistakes = hashes_in(text, f"annotation {key.name}")
        self.mistakes += mistakes
        return hashes

    def _restricted(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """The pod's hashes that its namespace allows; all hashes of the namespace if the pod names none."""
        policy = self.rules.hash_policy
        self.mistakes += policy.mistakes
        hashes = policy.restrict(own)
        if own and not hashes:
            self.mistakes.append(policy.refusal(own))
        return hashes

    def _requirements(self) -> set[str]:
        found: set[str] = set()
        for label, value in self.pod.labels.items():
            if label.startswith(claim_keys.REQUIREMENT_PREFIX):
                found.add(f"{label.removeprefix(claim_keys.REQUIREMENT_PREFIX)}={value or ''}")
            elif label != claim_keys.ASSIGNER_ASSIGN and is_assigner_requirement(label) and is_set(value):
                found.add(label)
        return found

    def _value(self, key: ClaimKey, of: ClaimField) -> Any:
        """The value for the record; None if the pod does not have the key."""
        text = self._text(key)
        try:
            return None if text is None else of.read(text)
        except InvalidPodError as exc:
            self.mistakes.extend(f"{key.name}{mistake}" for mistake in exc.mistakes)
            return None

    def _map_entry(self) -> MapEntry | None:
        text = self._text(claim_keys.GPU_MAP)
        if text is None:
            return None
        try:
            entries = parse_map(text)
        except InvalidPodError as exc:
            self.mistakes.extend(f"{claim_keys.GPU_MAP.name}: {mistake}" for mistake in exc.mistakes)
            return None
        ordinal = ordinal_of(self.pod)
        if ordinal is None:
            self.mistakes.append(f"{claim_keys.GPU_MAP.name}: the pod has no ordinal: no StatefulSet owns it")
        elif ordinal not in entries:
            self.unmapped = ordinal
        else:
            return entries[ordinal]
        return None

    def _check_size(self, asked: Mapping[str, int], nodes: NodesAsked) -> None:
        own = nodes.without_pins
        terms, pinned = len(own.terms or ()), len(nodes.terms or ())
        if terms > MAX_TERMS or own.expressions > MAX_EXPRESSIONS or pinned > max(terms, MAX_PROVEN_NODES):
            self.mistakes.append(
                f"the node affinity has {pinned} terms with {nodes.expressions} expressions; "
                f"the maximum is {MAX_TERMS} with {MAX_EXPRESSIONS}"
            )
        containers = sum(1 for _ in self.pod.containers())
        if containers > MAX_CONTAINERS:
            self.mistakes.append(f"the pod has {containers} containers; the maximum is {MAX_CONTAINERS}")
        if "" in asked:
            self.mistakes.append("a container that requests GPUs has no name")

    def _warn_of_unknown_keys(self) -> None:
        """Without the warning, a misspelt key would have no effect and no message."""
        for key in (*self.pod.annotations, *self.pod.labels):
            ours = key.startswith(f"{keys.DOMAIN}/") and not key.startswith(claim_keys.REQUIREMENT_PREFIX)
            if ours and key not in claim_keys.KNOWN_NAMES:
                self.warnings.append(f"gpuwarden does not know the key {key}: is it misspelt?")


def ordinal_of(pod: Pod) -> int | None:
    """The pod's number in its StatefulSet."""
    label = pod.labels.get(keys.POD_INDEX_LABEL)
    if label is not None and ORDINAL.fullmatch(label):
        return int(label)
    if not any(owner.kind == "StatefulSet" for owner in pod.meta.owner_references or ()):
        return None
    suffix = (pod.meta.name or "").rpartition("-")[2]
    return int(suffix) if ORDINAL.fullmatch(suffix) else None


def stateful_set_of(pod: Pod) -> SetId | None:
    """The StatefulSet that owns the pod. It is in the pod's namespace."""
    owners = pod.meta.owner_references or ()
    uid = next((one.uid for one in owners if one.controller and one.kind == "StatefulSet"), None)
    return None if uid is None else SetId(uid, pod.meta.namespace or "")


def is_assigner_requirement(label: str) -> bool:
    return label == claim_keys.ASSIGNER_REQUIREMENT or label.startswith(f"{claim_keys.ASSIGNER_REQUIREMENT}.")


def is_set(value: str | None) -> bool:
    return (value or "").lower() != "false"
