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
    """How this installation reads, dresses and queues pods."""

    claims: ClaimReader
    dress: DressRules
    # An older pod is not bound: its GPUs may have been given to another pod.
    bind_deadline: timedelta = timedelta(minutes=5)
    # Whether a pod is created behind our gate when its claim cannot be served yet. Pods with a placement map have a
    # setting of their own.
    queues: bool = False
    queues_mapped: bool = False

    def waits(self, claim: Claim) -> bool:
        """A pod whose GPUs kube-scheduler chooses is created without our gate: kube-scheduler lets it wait."""
        return not claim.is_left_to_scheduler and (self.queues or (self.queues_mapped and claim.is_mapped))
