"""What both webhooks share: the object under review, and which reviews are answered."""

from webhook.core.dress import (
    RawPod,
)
from webhook.core.errors import (
    InvalidPodError,
)
from webhook.core.names import is_object_name
from webhook.core.pod import Pod
from webhook.core.reasons import Reason
from webhook.core.reservation import LONGEST_PREFIX
from webhook.core.review import Operation, Review
from webhook.core.verdict import Admit, Deny

NOT_ASKED = Admit(reason=Reason.NOT_ASKED)


def not_reviewed(review: Review) -> Deny | None:
    if review.is_of_pods and review.operation in set(Operation):
        return None
    return Deny(
        Reason.NOT_REVIEWED,
        f"gpuwarden reviews pods, not {review.subject}",
        hint="remove it from the rules of the webhook configuration",
    )


def required_object(review: Review) -> RawPod:
    if review.raw is None:
        raise InvalidPodError("the review has no object")
    mistakes = [f"{field}: {name[:80]!r} is not a valid object name" for field, name in names_in(review).items()]
    if mistakes:
        raise InvalidPodError(*mistakes)
    return review.raw


def names_in(review: Review) -> dict[str, str]:
    """Names in the review that are invalid for an object. The end of a pod with such a name could never be
    confirmed."""
    meta = (review.raw or {}).get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    prefix = meta.get("generateName") if isinstance(meta, dict) and not name else None
    names = {
        "request.namespace": review.namespace,
        "request.name": review.name,
        "metadata.name": name,
        "metadata.generateName": f"{prefix}x" if prefix else None,
    }
    return {field: str(one) for field, one in names.items() if one and not is_object_name(str(one))}


def prefix_of(pod: Pod) -> str | None:
    """The beginning of the name that the API server will generate; None if the pod has a name."""
    return None if pod.meta.name else (pod.meta.generate_name or "")[:LONGEST_PREFIX] or None
