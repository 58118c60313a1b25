"""Why, or why not: the same decision as a review's, node by node, with nothing reserved."""

import asyncio
import sys
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
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import Placement
from webhook.core.verdict import Deny
from webhook.holding import Holder
from webhook.settings import Settings
from webhook.wiring import Parts, embedded

Json = dict[str, Any]
PLURALS = {"List", "PodList"}


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
    for result in results:
        sys.stdout.write(as_json(result) if output == "json" else as_text(result))
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
    for document in documents:
        for item in (document.get("items") or []) if is_list(document) else [document]:
            template = template_of(item)
            if template is not None:
                pods.append(template)
    return pods


def pod_in(item: Json) -> Json | None:
    """The pod itself, which need not say that it is one, or the one that its controller would make."""
    if "kind" not in item and mapping(item, "spec"):
        return item
    return template_of(item)


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


def as_json(result: Json) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def as_text(result: Json) -> str:
    lines = [f"{result['verdict']}: {result['message']} ({result['reason']})"]
    for node in result["nodes"]:
        found = ", ".join(node["devices"]) if node["fits"] else ", ".join(node["reasons"])
        lines.append(f"  {'+' if node['fits'] else '-'} {node['name']}: {found or 'fits'}")
    return "\n".join(lines) + "\n"
