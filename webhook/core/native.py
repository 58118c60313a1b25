"""Native pods: the API server changes their requests for GPUs into a ResourceClaim, and calls no webhook.

The claim is made from a template whose name says the number of GPUs and the hash (native.yaml).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from webhook.core.proof_claims import template_name

# The most GPUs of a native pod.
MAX_GPUS: Final = 8
TEMPLATE_NAME: Final = re.compile(r"gpuwarden-([1-8])-([a-z0-9]{1,64})(-bind)?")


@frozen
class NativeClaim:
    """What the claim of a native pod takes: GPUs that are proven for the attribute `hash`."""

    count: int
    hash: str
    # Whether the node answers a fresh challenge before the pod is bound.
    is_challenged: bool = False

    @classmethod
    def named(cls, template: str) -> "NativeClaim | None":
        """The claim that the template of this name makes; None for another name."""
        found = TEMPLATE_NAME.fullmatch(template)
        return None if found is None else cls(int(found[1]), found[2], found[3] is not None)

    @classmethod
    def of(cls, claims: Sequence[Mapping[str, Any]] | None) -> "NativeClaim | None":
        """The native claim among the claims of a pod; None if there is none."""
        names = (one.get("resourceClaimTemplateName") for one in claims or ())
        found = (cls.named(name) for name in names if isinstance(name, str))
        return next((one for one in found if one is not None), None)

    @property
    def template(self) -> str:
        return template_name(self.count, self.hash, is_challenged=self.is_challenged)
