"""The ResourceClaim by which a pod gets its GPUs: its entry in the pod, and in the containers that get GPUs.

`serve` names the claim or its template when the pod is created, because the entry cannot be added later. `reconcile`
creates it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from webhook.core.proof_claims import hash_of_template

Json = Any

CONTAINER_GROUPS: Final = ("initContainers", "containers")

# The name of the claim within the pod.
POD_CLAIM: Final = "gpuwarden"
CLAIM_NAME: Final = re.compile(r"gpuwarden-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def claim_name(uuid: str) -> str:
    return f"gpuwarden-{uuid}"


def pod_claim(name: str) -> dict[str, Json]:
    return {"name": POD_CLAIM, "resourceClaimName": name}


def pod_claim_from(template: str) -> dict[str, Json]:
    return {"name": POD_CLAIM, "resourceClaimTemplateName": template}


def own_claim_of(spec: Mapping[str, Json]) -> str:
    """The name of the claim in the pod's entry of our form; empty if there is none."""
    for one in spec.get("resourceClaims") or ():
        name = one.get("resourceClaimName")
        if isinstance(name, str) and CLAIM_NAME.fullmatch(name) and one == pod_claim(name):
            return name
    return ""


def own_template_of(spec: Mapping[str, Json]) -> str:
    """The same for the name of a template."""
    for one in spec.get("resourceClaims") or ():
        name = one.get("resourceClaimTemplateName")
        if isinstance(name, str) and hash_of_template(name) is not None and one == pod_claim_from(name):
            return name
    return ""


def with_entry(entries: Sequence[dict[str, Json]], entry: dict[str, Json]) -> list[dict[str, Json]]:
    """The list with the entry in the place of the one of its name, or at the end."""
    if not any(one.get("name") == entry["name"] for one in entries):
        return [*entries, entry]
    return [entry if one.get("name") == entry["name"] else one for one in entries]


def with_container_claim(container: Mapping[str, Json]) -> dict[str, Json]:
    resources = container.get("resources") or {}
    return {"resources": {**resources, "claims": with_entry(resources.get("claims") or (), {"name": POD_CLAIM})}}


def without_container_claim(container: Mapping[str, Json]) -> dict[str, Json]:
    """Empty if nothing changes."""
    resources = container.get("resources") or {}
    claims = resources.get("claims") or ()
    left = [one for one in claims if one.get("name") != POD_CLAIM]
    if len(left) == len(claims):
        return {}
    rest = {name: value for name, value in resources.items() if name != "claims"}
    return {"resources": {**rest, "claims": left} if left else rest}


def without_own_claim(spec: Mapping[str, Json]) -> dict[str, Json]:
    """The pod's spec without an entry of our form and its uses."""
    if not (own_claim_of(spec) or own_template_of(spec)):
        return dict(spec)
    left = [one for one in spec["resourceClaims"] if one.get("name") != POD_CLAIM]
    made = {name: value for name, value in spec.items() if name != "resourceClaims"}
    if left:
        made["resourceClaims"] = left
    for group in CONTAINER_GROUPS:
        if made.get(group):
            made[group] = [{**one, **without_container_claim(one)} for one in made[group]]
    return made
