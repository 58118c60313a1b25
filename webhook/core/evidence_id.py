"""The SPIFFE ID of a node's evidence. A template defines which parts are the node and the hash."""

import re
from typing import Final

from attrs import frozen

DEFAULT_TEMPLATE: Final = "spiffe://{trust_domain}/evidence/{node}/{hash}"

MAX_SPIFFE_ID: Final = 2048
TRUST_DOMAIN: Final = re.compile(r"[a-z0-9._-]{1,255}")
SPIFFE_ID: Final = re.compile(r"spiffe://([a-z0-9._-]{1,255})((?:/[A-Za-z0-9._-]+)+)")
PLACEHOLDER: Final = re.compile(r"\{([a-z_]*)\}")


@frozen
class EvidenceIdParts:
    """The node and the hash in an ID."""

    node: str
    hash: str


def trust_domain_of(spiffe_id: str) -> str | None:
    """None if it is not the SPIFFE ID of a workload. The ID is compared as it is: no decoding, no change of case."""
    if len(spiffe_id) > MAX_SPIFFE_ID or (found := SPIFFE_ID.fullmatch(spiffe_id)) is None:
        return None
    return None if {".", ".."} & set(found[2].split("/")) else found[1]


class EvidenceId:
    """Reads node and hash from IDs of one trust domain. Raises ValueError for an ambiguous template.

    A path cannot contain a colon, so a hash has a dot instead: `sha256.aa11` is `sha256:aa11`.
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
        """None for an ID of another trust domain, or one that does not match the template."""
        if trust_domain_of(spiffe_id) != self.trust_domain or (found := self._form.fullmatch(spiffe_id)) is None:
            return None
        return EvidenceIdParts(found["node"], found["hash"].replace(".", ":"))


def check_template(template: str) -> None:
    """Node and hash occur once each, in segments of their own: one segment with both could be split in two ways."""
    found = PLACEHOLDER.findall(template)
    if sorted(set(found) - {"trust_domain"}) != ["hash", "node"] or len(found) != len(set(found)):
        raise ValueError("it must contain {node} and {hash}, once each")
    if trust_domain_of(PLACEHOLDER.sub("x", template)) is None:
        raise ValueError("it is not a SPIFFE ID")
    authority, *segments = template.removeprefix("spiffe://").split("/")
    if PLACEHOLDER.search(authority) and authority != "{trust_domain}":
        raise ValueError("its trust domain must be {trust_domain} or a literal")
    if any(len(PLACEHOLDER.findall(segment)) > 1 or "{trust_domain}" in segment for segment in segments):
        raise ValueError("{node} and {hash} must be in separate path segments")
