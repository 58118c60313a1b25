"""Why, or why not: the same decision as a review's, node by node, with nothing reserved."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from webhook.clock import utc_now
from webhook.core.check import no_markers, refused_at_once
from webhook.core.claim import Claim, ClaimRules
from webhook.core.decide import NodeFit, explain
from webhook.core.dress import asked_anew
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.keys import POD_INDEX_LABEL
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny
from webhook.holding import Holder
from webhook.settings import Settings
from webhook.wiring import Parts, embedded

Json = dict[str, Any]
PLURALS = {"List", "PodList"}
# More pods of one StatefulSet tell nobody anything new.
MOST_ORDINALS = 100


class UnreadableManifestError(GpuwardenError):
    """There is nothing in the file that could be explained."""


def explained(raw: Json, parts: Parts, claims: ClaimRules) -> Json:
    """The verdict on a pod, and every node's part in it."""
    try:
        pod = Pod.parse(raw)
        _, claim = asked_anew(raw, pod, claims)
    except InvalidPodError as exc:
        return verdict(Deny(Reason.INVALID_POD, "; ".join(exc.mistakes)))
    if claim is None:
        refused = no_markers(pod, parts.rules.dress)
        return verdict(refused) if refused else verdict(None, Reason.NOT_ASKED, "the pod asks for nothing of gpuwarden")
    refused = refused_at_once(pod, claim, parts.rules.dress)
    return verdict(refused) if refused else decided(claim, parts.holder)


def namespace_of(raw: Json) -> str:
    """Where the pod would be created."""
    found = mapping(raw, "metadata").get("namespace")
    return found if isinstance(found, str) and found else "default"


def decided(claim: Claim, holder: Holder) -> Json:
    places = holder.places(claim)
    nodes = [node_fit(fit, claim) for fit in explain(claim, holder.fleet, holder.policy)]
    if isinstance(places, Deny):
        return verdict(places, nodes=nodes)
    return verdict(None, Reason.ADMITTED, said(claim, places[0]), nodes)


def said(claim: Claim, place: Placement) -> str:
    gpus = ", ".join(slot.uuid for slot in place.slots)
    return f"{claim.sentence}: {gpus + ' on ' if gpus else ''}node {place.node}"


def verdict(
    denial: Deny | None, reason: Reason = Reason.ADMITTED, message: str = "", nodes: list[Json] | None = None
) -> Json:
    return {
        "verdict": "deny" if denial else "admit",
        "reason": denial.reason if denial else reason,
        "message": denial.sentence if denial else message,
        "nodes": nodes or [],
    }


def node_fit(fit: NodeFit, claim: Claim) -> Json:
    return {
        "name": fit.name,
        "fits": fit.fits,
        "reasons": [] if fit.objection is None else [fit.objection.said_of(claim)],
        "devices": [slot.uuid for slot in fit.slots],
    }


# For a shell.


def run(path: str, settings: Settings, output: str) -> int:
    """Explain every pod of a manifest; `-` is standard input.

    A denial is an answer too: the exit code says only whether there is one.
    """
    parts = asyncio.run(loaded(settings))
    pods = list(pods_of(read(path)))
    if not pods:
        raise UnreadableManifestError(f"{path}: no pod, and nothing that makes pods")
    results = [explained(raw, parts, parts.rules.claims.rules) for raw in pods]
    if len(results) > 1:
        results = [{"pod": name_of(raw), **result} for raw, result in zip(pods, results, strict=True)]
    if output == "json":
        sys.stdout.write(as_json(results if len(results) > 1 else results[0]))
    else:
        sys.stdout.writelines(map(as_text, results))
    return 0


def read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except UnicodeDecodeError as exc:
        raise UnreadableManifestError(f"{path}: not text") from exc


async def loaded(settings: Settings) -> Parts:
    parts = embedded(settings, utc_now)
    await parts.feed.load()
    return parts


def pods_of(text: str) -> list[Json]:
    """The pods of a manifest, and those that its controllers would make."""
    pods: list[Json] = []
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as exc:
        raise UnreadableManifestError(f"not YAML: {exc}") from exc
    except RecursionError as exc:
        raise UnreadableManifestError("nested too deeply") from exc
    for document in documents:
        for item in (document.get("items") or []) if is_list(document) else [document]:
            pods += pods_made_by(item)
    return pods


def pods_in(item: Json) -> list[Json]:
    """The pod itself, which need not say that it is one, or those that its controller would make."""
    return [item] if "kind" not in item and mapping(item, "spec") else pods_made_by(item)


def pods_made_by(item: Any) -> list[Json]:
    """One where all are alike; of a StatefulSet each, for a map says something else of each."""
    template = template_of(item)
    if template is None:
        return []
    return list(pods_of_set(item, template)) if item.get("kind") == "StatefulSet" else [template]


def pods_of_set(item: Json, template: Json) -> Iterator[Json]:
    """A set that is scaled to none is asked about its first pod."""
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


def name_of(raw: Json) -> str:
    meta = mapping(raw, "metadata")
    return str(meta.get("name") or meta.get("generateName") or "")


def is_list(document: Any) -> bool:
    return isinstance(document, dict) and document.get("kind") in PLURALS


def template_of(item: Any) -> Json | None:
    if not isinstance(item, dict):
        return None
    if item.get("kind") == "Pod":
        return item
    spec = mapping(item, "spec")
    job = mapping(spec, "jobTemplate", "spec")
    return mapping(job or spec, "template") or None


def mapping(whole: Json, *steps: str) -> Json:
    """What stands there if it is a mapping."""
    found: Any = whole
    for step in steps:
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def as_json(result: Json | list[Json]) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def as_text(result: Json) -> str:
    name = f"{result['pod']}: " if result.get("pod") else ""
    lines = [f"{name}{result['verdict']}: {result['message']} ({result['reason']})"]
    for node in result["nodes"]:
        found = ", ".join(node["devices"]) if node["fits"] else ", ".join(node["reasons"])
        lines.append(f"  {'+' if node['fits'] else '-'} {node['name']}: {found or 'fits'}")
    return "\n".join(lines) + "\n"
