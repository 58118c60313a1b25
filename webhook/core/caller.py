"""Who calls, and what that caller may do."""

from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

from webhook.core.errors import GpuwardenError

POD_UID: Final = "authentication.kubernetes.io/pod-uid"


SERVICE_ACCOUNT: Final = "system:serviceaccount:"


class CallersUnavailableError(GpuwardenError):
    """Nobody can say at this moment who a caller is, or what it may do."""


@frozen
class Caller:
    """Whose a token is, as the API server says."""

    user: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(factory=dict, hash=False)

    def is_pod(self, namespace: str, uid: str) -> bool:
        """Whether the token is bound to that pod."""
        is_of_namespace = self.user.startswith(f"{SERVICE_ACCOUNT}{namespace}:")
        return is_of_namespace and self.extra.get(POD_UID) == (uid,)


@frozen
class Right:
    """What a SubjectAccessReview asks for."""

    verb: str
    resource: str
    namespace: str = ""
    group: str = ""
    subresource: str = ""
