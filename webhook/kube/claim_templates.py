"""Writes ResourceClaimTemplates."""

from webhook.core.raw import Raw
from webhook.kube.requests import RateLimitedClient

API_VERSION = "resource.k8s.io/v1"
TEMPLATES_PATH = "/apis/resource.k8s.io/v1/resourceclaimtemplates"
IN_NAMESPACE = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"


class ApiClaimTemplates:
    """Creates and deletes templates in the API server."""

    def __init__(self, calls: RateLimitedClient) -> None:
        self._calls = calls

    async def create(self, namespace: str, raw: Raw) -> Raw | None:
        """The stored template; None if the namespace does not exist. Raises ApiUnavailableError, ApiRefusesError."""
        return await self._calls.create_compact(IN_NAMESPACE, {"namespace": namespace}, raw)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the template if it still has this uid. Raises ApiUnavailableError, ApiRefusesError."""
        only: Raw = {"preconditions": {"uid": uid}}
        await self._calls.call("DELETE", IN_NAMESPACE + "/{name}", {"namespace": namespace, "name": name}, only)
