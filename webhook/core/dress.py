"""How a pod looks once GPUs are set aside for it. Dressing a dressed pod changes nothing: so forgeries show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import jsonpatch
from attrs import frozen

from webhook.core import keys
from webhook.core.claim import Claim
from webhook.core.keys import Key
from webhook.core.pod import EnvVar, Pod

Json = Any
RawPod = Mapping[str, Json]
RawTerm = dict[str, Json]

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# Values that show a container no GPU at all: nobody has to be kept from those.
SHOWING_NOTHING = {keys.NVIDIA_ENV: {"", "void", "none"}, keys.CUDA_ENV: {"", "-1", "NoDevFiles"}}


class Injection(StrEnum):
    """How the GPU gets into the container."""

    NVIDIA = "nvidia"
    CUDA = "cuda"


@frozen
class DressRules:
    """How pods are dressed in this installation."""

    injection: Injection = Injection.NVIDIA
    resource: str = "nvidia.com/gpu"
    writes_aliases: bool = True

    @property
    def env_names(self) -> tuple[str, ...]:
        """The variables that are ours to set."""
        return keys.GPU_ENV if self.injection is Injection.NVIDIA else (keys.CUDA_ENV,)

    @property
    def takes_request_off(self) -> bool:
        """A device plugin that sees the request would hand out another GPU than ours."""
        return self.injection is Injection.NVIDIA


@frozen
class Outfit:
    """What one pod is given: nodes to run on and, unless it only asked for a proven node, GPUs of one of them."""

    claim: Claim
    nodes: tuple[str, ...]
    reservation_id: str | None = None
    uuids: tuple[str, ...] = ()

    @property
    def visible(self) -> str:
        return ",".join(self.uuids)


def dressed(raw: RawPod, outfit: Outfit, rules: DressRules) -> dict[str, Json]:
    """The pod as it has to be; what is not ours to change is shared with `raw`."""
    meta = dict(raw.get("metadata") or {})
    meta["annotations"] = {**(meta.get("annotations") or {}), **annotations(outfit, rules)}
    spec = dict(raw.get("spec") or {})
    spec["affinity"] = pinned(spec.get("affinity") or {}, outfit.nodes)
    if outfit.uuids:
        for group in ("initContainers", "containers"):
            if spec.get(group):
                spec[group] = [dressed_container(one, outfit, rules) for one in spec[group]]
    return {**raw, "metadata": meta, "spec": spec}


def undressed(raw: RawPod) -> dict[str, Json]:
    """The pod without annotations that only we may write."""
    meta = dict(raw.get("metadata") or {})
    found = meta.get("annotations") or {}
    meta["annotations"] = {key: value for key, value in found.items() if key not in keys.OUTPUT_NAMES}
    return {**raw, "metadata": meta}


def annotations(outfit: Outfit, rules: DressRules) -> dict[str, str]:
    written = {keys.CLAIM.name: outfit.claim.record.text()}
    if outfit.reservation_id is not None:
        values: tuple[tuple[Key, str], ...] = (
            (keys.RESERVATION_ID, outfit.reservation_id),
            (keys.GPU_UUID, outfit.visible),
            (keys.NODE, outfit.nodes[0]),
        )
        for key, value in values:
            written.update(dict.fromkeys(key.names if rules.writes_aliases else (key.name,), value))
    return written


# Affinity: the terms are ORed by Kubernetes, so the node is ANDed into each. A term without expressions matches
# nothing; ours in it would make it match, so it is left alone.


def pinned(affinity: Mapping[str, Json], nodes: Sequence[str]) -> dict[str, Json]:
    node_affinity = affinity.get("nodeAffinity") or {}
    required = node_affinity.get(REQUIRED)
    terms = (required or {}).get("nodeSelectorTerms") or []
    placed = list(pinned_terms(terms, nodes)) if required is not None else [on_node({}, name) for name in nodes]
    return {**affinity, "nodeAffinity": {**node_affinity, REQUIRED: {**(required or {}), "nodeSelectorTerms": placed}}}


def pinned_terms(terms: Iterable[RawTerm], nodes: Sequence[str]) -> Iterator[RawTerm]:
    for term in terms:
        if is_empty(term) or node_of(term) in nodes:
            yield term
        else:
            yield from (on_node(term, name) for name in nodes)


def is_empty(term: RawTerm) -> bool:
    return not term.get("matchExpressions") and not term.get("matchFields")


def on_node(term: RawTerm, name: str) -> RawTerm:
    fields = term.get("matchFields") or []
    return {**term, "matchFields": [*fields, {"key": "metadata.name", "operator": "In", "values": [name]}]}


def node_of(term: RawTerm) -> str | None:
    """The one node that a term is held to."""
    for field in term.get("matchFields") or ():
        if field.get("key") == "metadata.name" and field.get("operator") == "In":
            values = field.get("values") or []
            return str(values[0]) if len(values) == 1 else None
    return None


def nodes_pinned_to(raw: RawPod) -> set[str | None]:
    """The nodes that the pod's required affinity allows; None among them if some term leaves it open."""
    affinity = ((raw.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(REQUIRED) or {}).get("nodeSelectorTerms") or []
    return {node_of(term) for term in terms if not is_empty(term)} or {None}


# Containers.


def dressed_container(raw: dict[str, Json], outfit: Outfit, rules: DressRules) -> dict[str, Json]:
    container = dict(raw)
    asked = outfit.claim.record.asked
    if not asked or raw.get("name") in asked or shows_gpus(raw.get("env") or (), rules):
        container["env"] = dressed_env(raw.get("env") or [], outfit, rules)
    if rules.takes_request_off and raw.get("resources"):
        container["resources"] = without_request(raw["resources"], rules.resource)
    return container


def shows_gpus(env: Iterable[Mapping[str, Json]], rules: DressRules) -> bool:
    return any(one.get("name") in rules.env_names and not hides_all(one) for one in env)


def hides_all(env: Mapping[str, Json]) -> bool:
    return not env.get("valueFrom") and (env.get("value") or "") in SHOWING_NOTHING.get(env.get("name", ""), ())


def dressed_env(env: Sequence[dict[str, Json]], outfit: Outfit, rules: DressRules) -> list[dict[str, Json]]:
    """Ours stand where the user's stood, so that later variables may refer to them; each stands once."""
    missing = list(rules.env_names)
    result = []
    for one in env:
        name = one.get("name")
        if name in rules.env_names:
            if name not in missing:
                continue
            missing.remove(name)
            one = {"name": name, "value": outfit.visible}
        result.append(one)
    return result + [{"name": name, "value": outfit.visible} for name in missing]


def without_request(resources: Mapping[str, Json], resource: str) -> dict[str, Json]:
    return {
        part: {name: amount for name, amount in amounts.items() if name != resource}
        if part in ("limits", "requests") and amounts
        else amounts
        for part, amounts in resources.items()
    }


def replaced_env(pod: Pod, outfit: Outfit, rules: DressRules) -> Iterator[str]:
    """The containers whose own GPU variables give way to ours, as warnings."""
    for path, container in pod.containers():
        for one in container.env or ():
            if one.name in rules.env_names and one.shown != outfit.visible and not is_harmless(one):
                yield f"{path}: {one.name} of container {container.name} is set by gpuwarden; yours is replaced"


def is_harmless(one: EnvVar) -> bool:
    return one.shown is not None and one.shown in SHOWING_NOTHING.get(one.name, ())


# Differences.


def difference(old: RawPod, new: RawPod) -> list[dict[str, Any]]:
    """The JSON patch that makes `new` of `old`; only what dressing can touch is compared."""
    patch: list[dict[str, Any]] = jsonpatch.make_patch(touched(old), touched(new)).patch
    return patch


def touched(raw: RawPod) -> dict[str, Json]:
    """The parts that dressing can touch."""
    parts: dict[str, Json] = {}
    for part, members in (("metadata", ("annotations",)), ("spec", ("affinity", "initContainers", "containers"))):
        if part in raw:
            whole = raw[part]
            parts[part] = {m: whole[m] for m in members if m in whole} if isinstance(whole, dict) else whole
    return parts
