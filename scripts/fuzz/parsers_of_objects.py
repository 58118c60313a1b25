"""Parsers of objects that the API server has validated: names, labels and annotations match its schema.

All other content may come from any user.
"""

from collections.abc import Callable
from typing import Any

from webhook.admission import binding_ends, namespaces, placement_maps
from webhook.admission.kueue.workload import AdmissionCheck, Workload, flavor_of
from webhook.core import keys
from webhook.core.claim import ClaimRules, claim_of
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.evidence.jwt import cluster_proofs as node_proofs
from webhook.evidence.jwt.jwt_bundle import BadBundleError, JwtBundle, check_succession
from webhook.kube.json_objects import object_in
from webhook.ledger import end_of_use

Raw = dict[str, Any]
NAMES = ("name", "namespace", "uid", "creationTimestamp", "resourceVersion")
WORDS = ("labels", "annotations")
PARTS = ("spec", "status")


def stored(read: Callable[[Raw], object]) -> Callable[[bytes], object]:
    """The parser, with metadata converted as the schema of every object requires."""
    return lambda text: read(as_stored(object_in(text)))


def as_stored(raw: Raw) -> Raw:
    found = raw.get("metadata")
    meta = dict(found) if isinstance(found, dict) else {}
    for name in NAMES:
        meta[name] = told if isinstance(told := meta.get(name), str) and told else "one"
    for name in WORDS:
        words = meta.pop(name, None)
        if isinstance(words, dict):
            meta[name] = {key: value for key, value in words.items() if isinstance(value, str)}
    kept = {key: value for key, value in raw.items() if key not in PARTS or isinstance(value, dict)}
    return {**kept, "metadata": meta}


def end_of_pod(raw: Raw) -> object:
    history = end_of_use.PodHistory.begun(raw).after(raw)
    histories = end_of_use.PodHistories()
    histories.seen("uid", raw)
    return history.is_over(raw), end_of_use.has_ended(raw), histories.is_over("uid", raw), histories.grace("uid")


def kept_ends(raw: Raw) -> object:
    return binding_ends.StoredEnds.of(raw).ends()


def of_kueue(raw: Raw) -> object:
    """Everything that is read of a Workload, and of the kinds that it refers to."""
    found = Workload.of(raw)
    pods = [] if found is None else [one.pod(found.namespace, [flavor_of(raw)]) for one in found.pod_sets]
    return AdmissionCheck.of(raw), [claim_of(Pod.parse(one), ClaimRules()) for one in pods]


def mapped_set(raw: Raw) -> object:
    """Everything that is done with a StatefulSet in a namespace that may keep GPUs."""
    sets, name = placement_maps.MappedStatefulSets(Fleet()), raw["metadata"]["namespace"]
    labels = {keys.OPT_IN.name: "true", keys.MAPS_LABEL: "true"}
    placement_maps.MapNamespaceListener(sets).changed({"metadata": {"name": name, "labels": labels}})
    raw = with_schema(raw)
    sets.changed(raw)
    sets.refresh()
    sets.changed({**raw, "spec": {}})
    sets.deleted(raw)
    return placement_maps.map_of(raw)


def with_schema(raw: Raw) -> Raw:
    """The API server validates template and ordinals of this kind."""
    spec = dict(found) if isinstance(found := raw.get("spec"), dict) else {}
    spec["template"] = as_stored(template if isinstance(template := spec.get("template"), dict) else {})
    if not isinstance(spec.get("ordinals"), dict):
        spec["ordinals"] = None
    return {**raw, "spec": spec}


def namespace(raw: Raw) -> object:
    return namespaces.hash_policy_of(raw), placement_maps.may_reserve_by_map(raw, keys.OPT_IN.name)


def trust_bundle(raw: Raw) -> object:
    """The CRD's schema has validated the status."""
    status = raw.get("status")
    is_whole = isinstance(status, dict) and type(status.get("sequence")) is int and isinstance(status.get("keys"), str)
    mark = node_proofs.version_in(raw if is_whole else {})
    try:
        check_succession(mark, JwtBundle({}, frozenset(), 1))
    except BadBundleError:
        return None
    return mark
