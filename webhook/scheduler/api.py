"""Writes to pods that wait for a node: Bindings, and the annotation that wakes them."""

from webhook.core import keys
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.kube.client import ApiClient
from webhook.kube.pods import REQUEST_TIMEOUT, error_message, path_names
from webhook.kube.requests import MERGE_PATCH, POD_PATH, REQUEST_ERRORS, request_json
from webhook.scheduler.extender import BindingLostError, BindingRefusedError
from webhook.scheduler.wakeups import NotWokenError, WakerUnavailableError


class ApiBindings:
    """Creates Bindings in the API server, with the pod's uid as a condition."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def bind(self, pod: PodIdentity, node: str) -> None:
        meta = {**path_names(pod), **({"uid": pod.uid} if pod.uid else {})}
        binding = {"metadata": meta, "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
        try:
            status, body = await request_json(
                self._api, "POST", f"{POD_PATH}/binding", path_names(pod), binding, seconds=REQUEST_TIMEOUT
            )
        except REQUEST_ERRORS as exc:
            raise BindingLostError("the API server cannot be reached") from exc
        if status >= 400:
            raise BindingRefusedError(error_message(status, body))


class ApiPodWaker:
    """Wakes pods through the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def wake(self, pod: PodIdentity, at: str) -> None:
        await self._patch(pod, POD_PATH, {"metadata": {"uid": pod.uid, "annotations": {keys.WOKEN_AT: at}}})

    async def nominate(self, pod: PodIdentity, node: str) -> None:
        patch = {"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}}
        await self._patch(pod, f"{POD_PATH}/status", patch)

    async def _patch(self, pod: PodIdentity, path: str, patch: Raw) -> None:
        try:
            status, body = await request_json(
                self._api, "PATCH", path, path_names(pod), patch, seconds=REQUEST_TIMEOUT, kind=MERGE_PATCH
            )
        except REQUEST_ERRORS as exc:
            raise WakerUnavailableError("the API server cannot be reached") from exc
        if status >= 400 and status not in (404, 409):  # the pod is gone or has another uid
            is_away = status == 429 or status >= 500
            raise (WakerUnavailableError if is_away else NotWokenError)(error_message(status, body))
