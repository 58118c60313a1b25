"""The requests and responses of a kube-scheduler extender. No other module knows their member names.

Go encodes them without JSON tags: members begin with capital letters, and absent members are null. Requests are decoded
case-insensitively, as Go does. Whole Node objects are returned byte for byte.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from attrs import field, frozen

from webhook.core.errors import GpuwardenError
from webhook.core.pod import Pod, WireStruct
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.core.verdict import plain

Members = dict[str, msgspec.Raw]
T = TypeVar("T")

NULL = msgspec.Raw(b"null")
MAX_SCORE = 10
# Before the reason in the message of a refusal.
REFUSED_BY = "(gpuwarden: "


class MalformedArgsError(GpuwardenError):
    """The body is not a valid extender request."""


class NamedItemWire(WireStruct, frozen=True):
    name: str


class OfferedNodeWire(WireStruct, frozen=True):
    metadata: NamedItemWire


class VictimWire(WireStruct, frozen=True):
    uid: str


class BindingArgsWire(msgspec.Struct, frozen=True):
    podname: str | None = None
    podnamespace: str | None = None
    poduid: str | None = None
    node: str | None = None


MEMBERS = msgspec.json.Decoder(Members)
NAMES = msgspec.json.Decoder(list[str] | None)
ITEMS = msgspec.json.Decoder(list[msgspec.Raw] | None)
POD: "msgspec.json.Decoder[Pod | None]" = msgspec.json.Decoder(Pod | None)
NODE = msgspec.json.Decoder(OfferedNodeWire)
VICTIMS = msgspec.json.Decoder(dict[str, Members] | None)
VICTIM = msgspec.json.Decoder(VictimWire)
NUMBER = msgspec.json.Decoder(int | None)
NODE_LIST = msgspec.json.Decoder(Members | None)
ENCODER = msgspec.json.Encoder()


@frozen
class OfferedNodes:
    """The nodes that a scheduler offers: by name, or as whole objects."""

    names: tuple[str, ...]
    objects: tuple[msgspec.Raw, ...] | None = None
    # The members of the list other than its items.
    frame: Mapping[str, msgspec.Raw] = field(factory=dict)


@frozen
class ExtenderArgs:
    """A request to filter or score these nodes for this pod."""

    pod: Pod
    offer: OfferedNodes

    @classmethod
    def parse(cls, body: bytes) -> "ExtenderArgs":
        """Raises MalformedArgsError."""
        members = members_of(body)
        return cls(pod_of(members), count_devices(members))


@frozen
class BindArgs:
    """A request to bind this pod to that node."""

    pod: PodIdentity
    node: str

    @classmethod
    def parse(cls, body: bytes) -> "BindArgs":
        """Raises MalformedArgsError."""
        members = {name: raw for name, raw in members_of(body).items() if name in BindingArgsWire.__struct_fields__}
        wire = decoded(BINDING, ENCODER.encode(members), "ExtenderBindingArgs")
        absent = [
            name
            for name, value in (("PodName", wire.podname), ("PodNamespace", wire.podnamespace), ("Node", wire.node))
            if not value
        ]
        if absent:
            raise MalformedArgsError(f"the body has no {', no '.join(absent)}")
        return cls(PodIdentity(wire.podnamespace or "", wire.podname or "", wire.poduid or ""), wire.node or "")


@frozen
class Victims:
    """The pods of one node that a preemption would evict, by uid."""

    uids: tuple[str, ...]
    budget_violations: int


@frozen
class PreemptArgs:
    """A request to choose the nodes where evictions can help this pod."""

    pod: Pod
    victims: Mapping[str, Victims]

    @classmethod
    def parse(cls, body: bytes) -> "PreemptArgs":
        """Raises MalformedArgsError."""
        members = members_of(body)
        forms = ("nodenametometavictims", "nodenametovictims")
        by_uid, whole = (decoded(VICTIMS, members.get(form, NULL), "victims") for form in forms)
        found = by_uid or whole or {}
        return cls(pod_of(members), {name: victims_of(one) for name, one in found.items()})


BINDING = msgspec.json.Decoder(BindingArgsWire)


def members_of(body: bytes) -> Members:
    """The members of an object by their lower-case names. If two names differ in case only, Go's own case wins."""
    return folded(decoded(MEMBERS, body, "JSON object"))


def folded(members: Members) -> Members:
    exact_last = sorted(members.items(), key=lambda member: member[0][:1].isupper())
    return {name.lower(): raw for name, raw in exact_last}


def pod_of(members: Members) -> Pod:
    pod = decoded(POD, members.get("pod", NULL), "Pod")
    if pod is None:
        raise MalformedArgsError("the body has no Pod")
    return pod


def victims_of(raw: Members) -> Victims:
    members = folded(raw)
    pods = decoded(ITEMS, members.get("pods", NULL), "list of Pods") or ()
    number = decoded(NUMBER, members.get("numpdbviolations", NULL), "number")
    return Victims(tuple(map(uid_of, pods)), number or 0)


def uid_of(raw: msgspec.Raw) -> str:
    """The uid of a pod that is given by its uid alone, or as a whole object."""
    members = folded(decoded(MEMBERS, raw, "Pod"))
    return decoded(VICTIM, members["metadata"] if "metadata" in members else ENCODER.encode(members), "Pod").uid


def decoded(decoder: "msgspec.json.Decoder[T]", raw: msgspec.Raw | bytes, what: str) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise MalformedArgsError(f"the body has no valid {what}: {plain(str(exc))}") from exc


def count_devices(members: Members) -> OfferedNodes:
    """Names take precedence. A scheduler fills one of the two members."""
    names = decoded(NAMES, members.get("nodenames", NULL), "NodeNames")
    nodes = decoded(NODE_LIST, members.get("nodes", NULL), "Nodes")
    if names or nodes is None:
        return OfferedNodes(tuple(names or ()))
    frame = {name: raw for name, raw in nodes.items() if name.lower() != "items"}
    found = next((raw for name, raw in nodes.items() if name.lower() == "items"), NULL)
    objects = tuple(decoded(ITEMS, found, "Nodes") or ())
    return OfferedNodes(tuple(decoded(NODE, one, "Node").metadata.name for one in objects), objects, frame)


@frozen
class Refusal:
    """Why a node is refused."""

    reason: Reason
    text: str
    # What follows the text for one pod.
    detail: str = ""
    message: str = field(init=False, eq=False, repr=False)
    """For the scheduler, which counts nodes by message."""

    @message.default
    def _message(self) -> str:
        return f"{self.text}{self.detail} {REFUSED_BY}{self.reason})"


def is_from_us(message: str) -> bool:
    """Whether a scheduler's message contains the reason of a refusal. The texts are for people and differ between
    versions."""
    return REFUSED_BY in message


@frozen
class FilterResult:
    """Every offered node once: those that pass, and the reason for each other one.

    Evictions can change the reasons in `failed`, and not those in `unresolvable`.
    """

    passed: frozenset[str]
    failed: Mapping[str, Refusal] = field(factory=dict)
    unresolvable: Mapping[str, Refusal] = field(factory=dict)


def filter_result(offer: OfferedNodes, result: FilterResult) -> bytes:
    """In the form of the request: a scheduler that sent objects ignores names."""
    names = nodes = None
    if offer.objects is None:
        names = [name for name in offer.names if name in result.passed]
    else:
        pairs = zip(offer.names, offer.objects, strict=True)
        nodes = {"metadata": {}, **offer.frame, "items": [one for name, one in pairs if name in result.passed]}
    failed, unresolvable = (
        {name: refusal.message for name, refusal in some.items()} for some in (result.failed, result.unresolvable)
    )
    return filter_answer(nodes, names, failed, unresolvable, "")


def filter_error(text: str) -> bytes:
    """An error answer: the scheduler tries the pod again later."""
    return filter_answer(None, None, {}, {}, text)


def filter_answer(
    nodes: Any, names: list[str] | None, failed: Mapping[str, str], unresolvable: Mapping[str, str], text: str
) -> bytes:
    return ENCODER.encode(
        {
            "Nodes": nodes,
            "NodeNames": names,
            "FailedNodes": failed,
            "FailedAndUnresolvableNodes": unresolvable,
            "Error": text,
        }
    )


def priorities(scores: list[tuple[str, int]]) -> bytes:
    return ENCODER.encode([{"Host": name, "Score": score} for name, score in scores])


def preempt_result(victims: Mapping[str, Victims]) -> bytes:
    """The nodes where the preemption may proceed."""
    return ENCODER.encode(
        {
            "NodeNameToMetaVictims": {
                name: {"Pods": [{"UID": uid} for uid in one.uids], "NumPDBViolations": one.budget_violations}
                for name, one in victims.items()
            }
        }
    )


def error_answer(text: str) -> bytes:
    """An error; for a binding, an empty text means success."""
    return ENCODER.encode({"Error": text})
