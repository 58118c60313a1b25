"""Namespaces in the API server."""

from webhook.admission.namespaces import NamespacesUnavailableError
from webhook.core.raw import Raw
from webhook.kube.api_objects import NotTheOneError, the_one
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient
from webhook.kube.requests import LOST, answered


class ApiNamespaces:
    """Reads namespaces from the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def get(self, name: str) -> Raw | None:
        path = "/api/v1/namespaces/{name}"
        try:
            status, body = await answered(self._api, "GET", path, {"name": name}, seconds=REQUEST_TIMEOUT)
        except LOST as exc:
            raise NamespacesUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        try:
            return the_one(status, body, "Namespace", name)
        except NotTheOneError as exc:
            raise NamespacesUnavailableError(str(exc)) from exc
