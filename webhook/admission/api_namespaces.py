"""Namespaces in the API server."""

from webhook.admission.namespaces import NamespacesUnavailableError
from webhook.core.raw import Raw
from webhook.kube.api_objects import UnexpectedObjectError, checked_object
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient
from webhook.kube.requests import REQUEST_ERRORS, request_json


class ApiNamespaces:
    """Reads namespaces from the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def get(self, name: str) -> Raw | None:
        path = "/api/v1/namespaces/{name}"
        try:
            status, body = await request_json(self._api, "GET", path, {"name": name}, seconds=REQUEST_TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise NamespacesUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        try:
            return checked_object(status, body, "Namespace", name)
        except UnexpectedObjectError as exc:
            raise NamespacesUnavailableError(str(exc)) from exc
