"""The SPIFFE ID of a node's evidence: a template says which parts of it name the node and the hash."""

import re
from typing import Final

from attrs import frozen

DEFAULT_TEMPLATE: Final = "spiffe://{trust_domain}/evidence/{node}/{hash}"

MAX_SPIFFE_ID: Final = 2048
TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
SPIFFE_ID: Final = re.compile(r"spiffe://([a-z0-9._-]{1,255})((?:/[A-Za-z0-9._-]+)+)")
PLACE: Final = re.compile(r"\{([a-z_]*)\}")


@frozen
class EvidenceIdParts:
    """What an ID says."""

    node: str
    hash: str


def trust_domain_of(spiffe_id: str) -> str | None:
    """None if it is no SPIFFE ID of a workload. Nothing is decoded, folded or trimmed."""
    if len(spiffe_id) > MAX_SPIFFE_ID or (found := SPIFFE_ID.fullmatch(spiffe_id)) is None:
        return None
    return None if {".", ".."} & set(found[2].split("/")) else found[1]


class EvidenceId:
    """Reads node and hash from IDs of one trust domain; raises ValueError for a template that could be read two ways.

    A path cannot hold a colon, so a hash has a dot where its colon was: `sha256.aa11` says `sha256:aa11`.
    """

    def __init__(self, template: str, trust_domain: str) -> None:
        check_template(template)
        self._form = re.compile(
            re.escape(template)
            .replace(re.escape("{trust_domain}"), re.escape(trust_domain))
            .replace(re.escape("{node}"), "(?P<node>[A-Za-z0-9._-]+)")
            .replace(re.escape("{hash}"), "(?P<hash>[A-Za-z0-9._-]+)")
        )
        self.trust_domain = trust_domain

    def read(self, spiffe_id: str) -> EvidenceIdParts | None:
        """None for an ID that is not this trust domain's or has not the form of the template."""
        if trust_domain_of(spiffe_id) != self.trust_domain or (found := self._form.fullmatch(spiffe_id)) is None:
            return None
        return EvidenceIdParts(found["node"], found["hash"].replace(".", ":"))


def check_template(template: str) -> None:
    """Node and hash once each, in segments of their own: together in one they could be split in two ways."""
    places = PLACE.findall(template)
    if sorted(set(places) - {"trust_domain"}) != ["hash", "node"] or len(places) != len(set(places)):
        raise ValueError("it has to name {node} and {hash}, once each")
    if trust_domain_of(PLACE.sub("x", template)) is None:
        raise ValueError("it is no SPIFFE ID")
    authority, *segments = template.removeprefix("spiffe://").split("/")
    if PLACE.search(authority) and authority != "{trust_domain}":
        raise ValueError("its trust domain is {trust_domain}, or written out")
    if any(len(PLACE.findall(segment)) > 1 or "{trust_domain}" in segment for segment in segments):
        raise ValueError("{node} and {hash} have to be in segments of their own")
