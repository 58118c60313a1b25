"""The pods of a manifest, and those that its controllers would create."""

from collections.abc import Iterator
from typing import Any

import yaml

from webhook.core.errors import GpuwardenError
from webhook.core.keys import POD_INDEX_LABEL
from webhook.core.raw import Raw

PLURALS = ("List", "PodList")
# More pods of one StatefulSet add nothing to an explanation.
MOST_ORDINALS = 100


class UnreadableManifestError(GpuwardenError):
    """The text contains nothing that could be explained."""


def namespace_of(raw: Raw) -> str:
    """The namespace of the object; empty if it names none."""
    found = mapping(raw, "metadata").get("namespace")
    return found if isinstance(found, str) else ""


def pods_of(text: str) -> list[Raw]:
    """The pods of a manifest, and those that its controllers would create."""
    pods: list[Raw] = []
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError) as exc:  # an invalid date raises ValueError
        raise UnreadableManifestError(f"not YAML: {exc}") from exc
    except RecursionError as exc:
        raise UnreadableManifestError("nested too deeply") from exc
    for document in documents:
        for item in items_of(document):
            pods += pods_made_by(item)
    return pods


def pods_in(item: Raw) -> list[Raw]:
    """The pod itself, even without `kind`, or the pods that its controller would create."""
    return [item] if "kind" not in item and mapping(item, "spec") else pods_made_by(item)


def pods_made_by(item: Any) -> list[Raw]:
    """One pod for a controller whose pods are all alike; each pod of a StatefulSet, because a map differs by
    ordinal."""
    template = template_of(item)
    if template is None:
        return []
    if template is item:
        return [item]
    template = in_namespace_of(item, template)
    return list(pods_of_set(item, template)) if item.get("kind") == "StatefulSet" else [named_after(item, template)]


def in_namespace_of(item: Raw, template: Raw) -> Raw:
    own = mapping(template, "metadata")
    namespace = namespace_of(item)
    return {**template, "metadata": {**own, "namespace": namespace}} if namespace else template


def named_after(item: Raw, template: Raw) -> Raw:
    own, name = mapping(template, "metadata"), mapping(item, "metadata").get("name")
    if not isinstance(name, str) or not name or own.get("name") or own.get("generateName"):
        return template
    return {**template, "metadata": {**own, "generateName": f"{name}-"}}


def pods_of_set(item: Raw, template: Raw) -> Iterator[Raw]:
    """The pods of a StatefulSet. One that is scaled to zero yields its first pod."""
    spec, meta = mapping(item, "spec"), mapping(item, "metadata")
    name, uid = meta.get("name") or "", meta.get("uid") or ""
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": uid, "controller": True}
    start, replicas = counted(mapping(spec, "ordinals").get("start"), 0), counted(spec.get("replicas"), 1)
    for ordinal in range(start, start + min(max(replicas, 1), MOST_ORDINALS)):
        own = mapping(template, "metadata")
        labels = {**mapping(own, "labels"), POD_INDEX_LABEL: str(ordinal)}
        own = {**own, "name": f"{name}-{ordinal}", "labels": labels, "ownerReferences": [owner]}
        yield {**template, "metadata": own}


def counted(found: Any, default: int) -> int:
    return found if type(found) is int and found >= 0 else default


def name_of(raw: Raw) -> str:
    meta = mapping(raw, "metadata")
    return str(meta.get("name") or meta.get("generateName") or "")


def items_of(document: Any) -> list[Any]:
    """The objects of a list, or the one object."""
    if not isinstance(document, dict) or document.get("kind") not in PLURALS:
        return [document]
    items = document.get("items")
    return items if isinstance(items, list) else []


def template_of(item: Any) -> Raw | None:
    if not isinstance(item, dict):
        return None
    if item.get("kind") == "Pod":
        return item
    spec = mapping(item, "spec")
    job = mapping(spec, "jobTemplate", "spec")
    return mapping(job or spec, "template") or None


def mapping(whole: Raw, *steps: str) -> Raw:
    """The mapping at this path; empty if there is none."""
    found: Any = whole
    for step in steps:
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
