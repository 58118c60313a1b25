"""The names and labels that the API server accepts: Kubernetes' own rules (apimachinery, util/validation).

Any other text in the path of a request addresses no object, or another path.
"""

import re
from typing import Final

MAX_SUBDOMAIN: Final = 253
MAX_LABEL: Final = 63
SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def is_object_name(name: str) -> bool:
    """The name of a pod, namespace, node or custom resource: a DNS subdomain."""
    return len(name) <= MAX_SUBDOMAIN and SUBDOMAIN.fullmatch(name) is not None


def is_label_key(key: str) -> bool:
    """The key of a label, annotation or extended resource: a name, with a DNS subdomain before a slash or without."""
    prefix, slash, name = key.rpartition("/")
    return is_label_name(name) and (not slash or is_object_name(prefix))


def is_label_value(value: str) -> bool:
    return not value or is_label_name(value)


def is_label_name(name: str) -> bool:
    return len(name) <= MAX_LABEL and LABEL.fullmatch(name) is not None
