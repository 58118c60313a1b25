"""What a pod asks for, read once; and the record of it that later reviews go by."""

import hashlib
from collections.abc import Mapping

import msgspec
from attrs import evolve, field, frozen
from msgspec import structs

from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.gpu_map import ORDINAL, MapEntry, SetId, parse_map
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy, hashes_in
from webhook.core.keys import Key
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod, whole_number

# More than any node holds; a number above it is a slip of the keyboard.
MAX_GPUS = 1024
# A pod with more is not one that a kubelet can run, and its record would not fit an annotation.
MAX_CONTAINERS = 512
# More than people and tools write; each is asked of nodes while other reviews wait.
MAX_TERMS = 32
MAX_EXPRESSIONS = 128


@frozen
class ClaimRules:
    """How claims are read in this installation, and in one namespace of it."""

    resource: str = "nvidia.com/gpu"
    hash_aliases: tuple[str, ...] = keys.REQUIRED_HASH.aliases
    hash_policy: HashPolicy = NO_HASH_POLICY

    @property
    def required_hash(self) -> Key:
        return Key(keys.REQUIRED_HASH.name, self.hash_aliases)


class ClaimRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The claim as first read, as it stands in the pod's `gpuwarden.io/claim`."""

    gpus: int = 0
    hashes: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    shared: bool = False
    node: str | None = None
    devices: tuple[str, ...] = ()
    # The pod's ordinal, if its map has no line for it: nothing can be had then.
    unmapped: int | None = None
    # The containers that asked by resource, and how many; if none did, those that there were: all get the GPUs.
    asked: dict[str, int] = {}
    containers: tuple[str, ...] = ()
    # Whether the pod named the node of its GPUs itself: then nobody can tell its own pin from ours.
    named: bool = False

    @classmethod
    def parse(cls, text: str) -> "ClaimRecord":
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise InvalidPodError(f"annotation {keys.CLAIM.name} is not one of ours") from exc

    def text(self) -> str:
        return ENCODER.encode(self).decode()

    def digest(self) -> str:
        return hashlib.sha256(ENCODER.encode(self)).hexdigest()


ENCODER = msgspec.json.Encoder(order="sorted")


@frozen
class Claim:
    """What one pod asks for."""

    record: ClaimRecord
    nodes: NodesAsked = field(factory=NodesAsked)
    warnings: tuple[str, ...] = field(default=(), eq=False)
    # Where it had better be, while something fits there.
    preferred: NodesAsked | None = field(default=None, eq=False)
    # The StatefulSet whose map put the pod there.
    of_set: SetId | None = field(default=None, eq=False)
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
        """The claim of a pod that has been pinned since it was first read."""
        return self if named == self.record.named else evolve(self, record=structs.replace(self.record, named=named))

    @property
    def is_shared(self) -> bool:
        return self.record.shared

    @property
    def map_entry(self) -> MapEntry | None:
        """Where a placement map puts it."""
        return MapEntry(self.record.node, self.record.devices) if self.record.node else None

    @property
    def is_mapped(self) -> bool:
        """Whether it comes from a placement map, with a place in it or without."""
        return self.record.node is not None or self.record.unmapped is not None

    @property
    def digest(self) -> str:
        return self.record.digest()

    @property
    def sentence(self) -> str:
        """What is asked, as a person would say it."""
        parts = [f"{self.count} GPU{'' if self.count == 1 else 's'}" if self.count else "a node"]
        if self.record.unmapped is not None:
            parts = [f"the place that a map gives to ordinal {self.record.unmapped}"]
        elif self.map_entry:
            parts = [f"GPU {','.join(self.map_entry.gpus)} of node {self.map_entry.node}"]
        if self.record.requirements:
            parts.append("with " + " and ".join(self.record.requirements))
        if self.is_shared:
            parts.append("to share")
        if self.record.hashes:
            parts.append(("on a node " if self.count else "") + "attested as " + " or ".join(self.record.hashes))
        return " ".join(parts)


def claim_of(pod: Pod, rules: ClaimRules, taken_off: Mapping[str, int] | None = None) -> Claim | None:
    """What the pod asks for, or None if it asks for nothing of ours.

    `taken_off` is what its containers asked for before an earlier review took the request off: it counts
    where no container asks any more. Raises `InvalidPodError` with every mistake at once.
    """
    reader = ClaimParser(pod, rules, taken_off or {})
    claim = reader.read()
    if reader.mistakes:
        raise InvalidPodError(*reader.mistakes)
    return claim


def recorded_claim(pod: Pod) -> Claim | None:
    """The claim that an earlier review of ours wrote into the pod, unproven until a ledger knows its digest."""
    text = pod.annotations.get(keys.CLAIM.name)
    if text is None:
        return None
    return Claim(ClaimRecord.parse(text), NodesAsked.of(pod), of_set=set_of(pod))


def recorded_claim_or_none(pod: Pod) -> Claim | None:
    """The record in a pod that may be a copy, or somebody's invention."""
    try:
        return recorded_claim(pod)
    except InvalidPodError:
        return None


def strictest_claim(recorded: Claim, asked: Claim | None) -> Claim | None:
    """Of a record without GPUs, which no ledger vouches for: where no webhook stands in front, its author may have
    written it. So it may say no less than the pod asks, within its namespace; None if no hash would do for both."""
    hashes = [one.hashes for one in (recorded, asked) if one is not None and one.hashes]
    if not hashes:
        return recorded
    common = frozenset.intersection(*hashes)
    if not common:
        return None
    return Claim(msgspec.structs.replace(recorded.record, hashes=tuple(sorted(common))), recorded.nodes)


class ClaimParser:
    """One pass over a pod that collects what is asked and what is wrong."""

    def __init__(self, pod: Pod, rules: ClaimRules, taken_off: Mapping[str, int]) -> None:
        self.pod = pod
        self.rules = rules
        self.taken_off = taken_off
        self.mistakes: list[str] = []
        self.warnings: list[str] = []
        self.unmapped: int | None = None

    def read(self) -> Claim | None:
        asked = self._resources()
        hashes = self._hashes()
        requirements = self._requirements()
        place = self._place()
        assign = is_set(self.pod.labels.get(keys.S4_ASSIGN, "false"))
        counted = self._count(asked)
        gpus = self._gpus(counted, place, wants_one=bool(requirements) or assign or self.unmapped is not None)
        names_something = gpus or hashes or place or requirements or assign or self.unmapped is not None
        shared = self._shared()
        if not names_something:
            return None
        hashes = self._bound(hashes)
        nodes = NodesAsked.of(self.pod)
        self._check_size(asked, nodes)
        record = ClaimRecord(
            gpus=gpus,
            hashes=hashes,
            requirements=tuple(sorted(requirements)),
            shared=shared,
            node=place.node if place else None,
            devices=place.gpus if place else (),
            unmapped=self.unmapped,
            asked=asked,
            containers=() if asked or not gpus else tuple(c.name for _, c in self.pod.containers()),
            named=bool(gpus) and any(term.is_one_node for term in nodes.terms or ()),
        )
        self._warn_of_unknown_keys()
        return Claim(record, nodes, tuple(self.warnings), of_set=set_of(self.pod))

    def _annotation(self, key: Key) -> str | None:
        """The value under the canonical name or an alias; two that differ are a mistake."""
        found = {n: v for n in key.names if (v := self.pod.annotations.get(n)) is not None}
        if len(set(found.values())) > 1:
            self.mistakes.append(f"annotations {' and '.join(found)} say different things")
        return next(iter(found.values()), None)

    def _annotation_or_label(self, key: Key) -> str | None:
        value = self._annotation(key)
        return self.pod.labels.get(key.name) if value is None else value

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
        return asked or {name: number for name, number in self.taken_off.items() if name in names}

    def _count(self, asked: Mapping[str, int]) -> int | None:
        """What the resources say, else what the count annotation says, else None."""
        by_resource = self.pod.total(asked)
        text = self._annotation_or_label(keys.GPU_COUNT)
        if text is None:
            return by_resource or None
        if not text:
            self.mistakes.append(f"{keys.GPU_COUNT.name} is empty")
            return None
        try:
            by_key = whole_number(text)
        except InvalidPodError as exc:
            self.mistakes.append(f"{keys.GPU_COUNT.name}: {exc}")
            return None
        if by_resource and by_key != by_resource:
            self.warnings.append(
                f"{keys.GPU_COUNT.name}={by_key} is not looked at: the containers ask for {by_resource}"
            )
        return by_resource or by_key

    def _gpus(self, counted: int | None, place: MapEntry | None, *, wants_one: bool) -> int:
        if place is not None:
            listed = len(place.gpus)
            if counted not in (None, listed):
                self.mistakes.append(f"the map lists {listed} GPUs, the pod asks for {counted}")
            return listed
        if counted == 0 and wants_one:
            self.mistakes.append(f"{keys.GPU_COUNT.name} is 0, and labels say what the GPUs have to be")
        gpus = int(wants_one) if counted is None else counted
        if gpus > MAX_GPUS:
            self.mistakes.append(f"{gpus} GPUs are asked for; no node has more than {MAX_GPUS}")
        return gpus

    def _hashes(self) -> tuple[str, ...]:
        key = self.rules.required_hash
        text = self._annotation(key)
        if text is None:
            return ()
        hashes, mistakes = hashes_in(text, f"annotation {key.name}")
        self.mistakes += mistakes
        return hashes

    def _bound(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """What the pod is held to in its namespace, whatever it names itself."""
        policy = self.rules.hash_policy
        self.mistakes += policy.mistakes
        hashes = policy.restrict(own)
        if own and not hashes:
            self.mistakes.append(policy.refusal(own))
        return hashes

    def _requirements(self) -> set[str]:
        found: set[str] = set()
        for label, value in self.pod.labels.items():
            if label.startswith(keys.REQUIREMENT_PREFIX):
                found.add(f"{label.removeprefix(keys.REQUIREMENT_PREFIX)}={value or ''}")
            elif label != keys.S4_ASSIGN and is_s4_requirement(label) and is_set(value):
                found.add(label)
        return found

    def _shared(self) -> bool:
        value = self._annotation_or_label(keys.SHARED)
        if value not in (None, "true", "false"):
            self.mistakes.append(f"{keys.SHARED.name} is {value[:40]!r}, not true or false")
        return value == "true"

    def _place(self) -> MapEntry | None:
        text = self._annotation(keys.GPU_MAP)
        if text is None:
            return None
        try:
            entries = parse_map(text)
        except InvalidPodError as exc:
            self.mistakes.extend(f"{keys.GPU_MAP.name}: {mistake}" for mistake in exc.mistakes)
            return None
        ordinal = ordinal_of(self.pod)
        if ordinal is None:
            self.mistakes.append(f"{keys.GPU_MAP.name}: the pod is not one of a StatefulSet and has no ordinal")
        elif ordinal not in entries:
            self.unmapped = ordinal
        else:
            return entries[ordinal]
        return None

    def _check_size(self, asked: Mapping[str, int], nodes: NodesAsked) -> None:
        if len(nodes.terms or ()) > MAX_TERMS or nodes.expressions > MAX_EXPRESSIONS:
            self.mistakes.append(
                f"the node affinity has {len(nodes.terms or ())} terms with {nodes.expressions} expressions; "
                f"a claim may have {MAX_TERMS} with {MAX_EXPRESSIONS}"
            )
        containers = sum(1 for _ in self.pod.containers())
        if containers > MAX_CONTAINERS:
            self.mistakes.append(f"{containers} containers are more than the {MAX_CONTAINERS} a claim may have")
        if "" in asked:
            self.mistakes.append("a container that asks for GPUs has no name")

    def _warn_of_unknown_keys(self) -> None:
        """A misspelt wish would otherwise be a wish that nobody hears."""
        ours_too = {keys.WOKEN_AT, keys.WAITING, keys.QUEUED_LABEL}
        known = keys.INPUT_NAMES | keys.OUTPUT_NAMES | keys.HINT_NAMES | ours_too
        for key in (*self.pod.annotations, *self.pod.labels):
            ours = key.startswith(f"{keys.DOMAIN}/") and not key.startswith(keys.REQUIREMENT_PREFIX)
            if ours and key not in known:
                self.warnings.append(f"{key} means nothing to gpuwarden: is it misspelt?")


def ordinal_of(pod: Pod) -> int | None:
    """The pod's number in its StatefulSet."""
    label = pod.labels.get(keys.POD_INDEX_LABEL)
    if label is not None and ORDINAL.fullmatch(label):
        return int(label)
    if not any(owner.kind == "StatefulSet" for owner in pod.meta.owner_references or ()):
        return None
    suffix = (pod.meta.name or "").rpartition("-")[2]
    return int(suffix) if ORDINAL.fullmatch(suffix) else None


def set_of(pod: Pod) -> SetId | None:
    """The StatefulSet that the pod is of, which is in the pod's namespace."""
    owners = pod.meta.owner_references or ()
    uid = next((one.uid for one in owners if one.controller and one.kind == "StatefulSet"), None)
    return None if uid is None else SetId(uid, pod.meta.namespace or "")


def is_s4_requirement(label: str) -> bool:
    return label == keys.S4_REQUIREMENT or label.startswith(f"{keys.S4_REQUIREMENT}.")


def is_set(value: str | None) -> bool:
    return (value or "").lower() != "false"
