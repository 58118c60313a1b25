"""Reads, creates and deletes ResourceClaims of pods."""

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.kube.api_objects import UnexpectedObjectError, checked_object
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient
from webhook.kube.pods import error_message
from webhook.kube.requests import REQUEST_ERRORS, request_json
from webhook.kube.resource_claims import RESOURCE_CLAIM_PATH

CLAIMS_PATH = "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
OK, GONE, EXISTS = 200, 404, 409


class ClaimRequestError(GpuwardenError):
    """The request failed; the text says why. It may have been carried out."""


class ApiClaims:
    """ResourceClaims in the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def create(self, raw: Raw) -> Raw | None:
        """The claim that has the name by now, created or found; None if it was deleted in between. Raises
        ClaimRequestError."""
        meta = raw["metadata"]
        status, body = await self._request("POST", CLAIMS_PATH, {"namespace": meta["namespace"]}, raw)
        if status == EXISTS:
            return await self.find(meta["namespace"], meta["name"])
        return claim_in(status, body, meta["name"])

    async def find(self, namespace: str, name: str) -> Raw | None:
        """The claim; None if there is none of that name. Raises ClaimRequestError."""
        status, body = await self._request("GET", RESOURCE_CLAIM_PATH, {"namespace": namespace, "name": name})
        return None if status == GONE else claim_in(status, body, name)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the claim if it has this uid. Raises ClaimRequestError."""
        only = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        status, body = await self._request("DELETE", RESOURCE_CLAIM_PATH, {"namespace": namespace, "name": name}, only)
        if status >= 400 and status not in (GONE, EXISTS):
            raise ClaimRequestError(error_message(status, body))

    async def _request(
        self, method: str, path: str, names: dict[str, str], body: Raw | None = None
    ) -> tuple[int, bytes]:
        try:
            return await request_json(self._api, method, path, names, body, seconds=REQUEST_TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise ClaimRequestError("the API server cannot be reached") from exc


def claim_in(status: int, body: bytes, name: str) -> Raw:
    """The claim in a successful answer."""
    if status >= 400:
        raise ClaimRequestError(error_message(status, body))
    try:
        return checked_object(OK, body, "ResourceClaim", name)
    except UnexpectedObjectError as exc:
        raise ClaimRequestError(str(exc)) from exc
