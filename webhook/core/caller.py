"""The caller of a route, and its permissions."""

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from webhook.core.errors import GpuwardenError

POD_UID: Final = "authentication.kubernetes.io/pod-uid"
SERVICE_ACCOUNT: Final = "system:serviceaccount:"


class CallersUnavailableError(GpuwardenError):
    """The API server cannot authenticate or authorise callers at this moment."""


@frozen
class Caller:
    """The owner of a token, from a TokenReview."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(factory=dict, hash=False)

    def is_pod(self, namespace: str, uid: str) -> bool:
        """Whether the token is bound to that pod."""
        is_in_namespace = self.user.startswith(f"{SERVICE_ACCOUNT}{namespace}:")
        return is_in_namespace and self.extra.get(POD_UID) == (uid,)


@frozen
class Right:
    """The resource attributes of a SubjectAccessReview."""

    verb: str
    resource: str
    namespace: str = ""
    group: str = ""
    subresource: str = ""
