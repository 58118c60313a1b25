"""TokenReviews and SubjectAccessReviews."""

from kubernetes.aio import client

from webhook.core.caller import Caller, CallersUnavailableError, Right
from webhook.kube.client import REQUEST_TIMEOUT
from webhook.kube.requests import REQUEST_ERRORS

# What the client library raises for an unexpected answer.
UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError)


class ApiCallers:
    """Authenticates and authorizes callers through the API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self._reviews = client.AuthenticationV1Api(api)
        self._permissions = client.AuthorizationV1Api(api)

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        """The token's user, or None. With an audience, only if the token was issued for it."""
        user = await self._user_of(token, audience)
        if user is None:
            return None
        extra = {name: tuple(values) for name, values in (user.extra or {}).items()}
        return Caller(user.username or "", user.uid or "", tuple(user.groups or ()), extra)

    async def may(self, caller: Caller, right: Right) -> bool:
        asked = client.V1ResourceAttributes(
            namespace=right.namespace or None,
            verb=right.verb,
            group=right.group or None,
            resource=right.resource,
            subresource=right.subresource or None,
        )
        spec = client.V1SubjectAccessReviewSpec(
            user=caller.user or None,
            groups=list(caller.groups) or None,
            uid=caller.uid or None,
            extra={name: list(values) for name, values in caller.extra.items()} or None,
            resource_attributes=asked,
        )
        review = client.V1SubjectAccessReview(spec=spec)
        try:
            answer = await self._permissions.create_subject_access_review(review, _request_timeout=REQUEST_TIMEOUT)
        except (*REQUEST_ERRORS, *UNREADABLE) as exc:
            raise CallersUnavailableError("the API server is unavailable") from exc
        return bool(answer.status and answer.status.allowed)

    async def _user_of(self, token: str, audience: str | None = None) -> client.V1UserInfo | None:
        """The token's user. An authenticator that does not support audiences leaves them out of its answer. Such a
        token is meant for the API server and could be replayed from there, so it is rejected if an audience is
        required."""
        audiences = None if audience is None else [audience]
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token, audiences=audiences))
        try:
            answer = await self._reviews.create_token_review(review, _request_timeout=REQUEST_TIMEOUT)
        except (*REQUEST_ERRORS, *UNREADABLE) as exc:
            raise CallersUnavailableError("the API server is unavailable") from exc
        status = answer.status
        if not (status and status.authenticated):
            return None
        if audience is not None and audience not in (status.audiences or ()):
            return None
        return status.user or client.V1UserInfo()
