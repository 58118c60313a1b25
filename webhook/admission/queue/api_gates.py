"""Scheduling gates of pods in the API server: opens them, checks them, and writes what a pod waits for."""

from typing import Any

from webhook.admission.queue.gates import GateError
from webhook.admission.queue.waiting_pods import is_waiting
from webhook.core import keys
from webhook.core.difference import Change
from webhook.core.reservation import PodIdentity
from webhook.kube.client import ApiClient
from webhook.kube.pods import REQUEST_TIMEOUT, error_message, path_names
from webhook.kube.requests import JSON_PATCH, MERGE_PATCH, POD_PATH, REQUEST_ERRORS, request_json
from webhook.ledger.api_pods import pod_in
from webhook.ledger.pods import PodsUnavailableError

GONE = 404


class ApiGates:
    """Every patch names the uid of its pod."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        return await self._patch(pod, patch, JSON_PATCH)

    async def write_reason(self, pod: PodIdentity, why: str) -> None:
        await self._patch(pod, {"metadata": {"uid": pod.uid, "annotations": {keys.WAITING: why}}}, MERGE_PATCH)

    async def is_closed(self, pod: PodIdentity) -> bool:
        try:
            status, body = await request_json(self._api, "GET", POD_PATH, path_names(pod), seconds=REQUEST_TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise GateError("the API server cannot be reached") from exc
        if status == GONE:
            return False
        if status >= 400:
            raise GateError(error_message(status, body))
        try:
            raw = pod_in(body, pod.namespace, pod.name)
        except PodsUnavailableError as exc:
            raise GateError(str(exc)) from exc
        return bool(raw["metadata"]["uid"] == pod.uid and is_waiting(raw))

    async def _patch(self, pod: PodIdentity, patch: list[Change] | dict[str, Any], kind: str) -> bool:
        """Whether a pod of that name exists."""
        try:
            status, body = await request_json(
                self._api, "PATCH", POD_PATH, path_names(pod), patch, seconds=REQUEST_TIMEOUT, kind=kind
            )
        except REQUEST_ERRORS as exc:
            raise GateError("the API server cannot be reached") from exc
        if status >= 400 and status != GONE:
            raise GateError(error_message(status, body))
        return status != GONE
