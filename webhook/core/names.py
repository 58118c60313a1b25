"""Which names objects of the API server can have: what else is given as one leads to no object, or to another path."""

import re
from typing import Final

MOST: Final = 253
SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def is_object_name(name: str) -> bool:
    """Of pods, namespaces, nodes and our own objects alike: a DNS subdomain."""
    return len(name) <= MOST and SUBDOMAIN.fullmatch(name) is not None
