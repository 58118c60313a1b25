"""How an installation reads, dresses and queues pods."""

from datetime import timedelta

from attrs import frozen

from webhook.admission.namespaces import ClaimReader
from webhook.core.claim import Claim
from webhook.core.dress import (
    DressRules,
)


@frozen
class Rules:
    """How this installation reads and dresses pods."""

    claims: ClaimReader
    dress: DressRules
    # Past this age a pod is put on no node any more: its GPUs may have been given up.
    bind_deadline: timedelta = timedelta(minutes=5)
    # Whether a pod that nothing can be had for now is created, and waits behind our gate; a mapped one in any case
    # where there is somebody to open it.
    queues: bool = False
    queues_mapped: bool = False

    def waits(self, claim: Claim) -> bool:
        return self.queues or (self.queues_mapped and claim.is_mapped)
