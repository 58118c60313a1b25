"""Writes to pods that wait for a node: Bindings, the condition PodScheduled, and the annotation that wakes them."""

import structlog

from webhook.core import keys
from webhook.core.reservation import PodIdentity
from webhook.kube.client import ApiClient
from webhook.kube.pods import REQUEST_TIMEOUT, error_message, path_names
from webhook.kube.requests import MERGE_PATCH, POD_PATH, REQUEST_ERRORS, request_json
from webhook.scheduler.extender import BindingLostError, BindingRefusedError
from webhook.scheduler.wakeups import NotWokenError, WakerUnavailableError

log = structlog.get_logger(__name__)

STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


class ApiBindings:
    """Creates Bindings in the API server, with the pod's uid as a condition."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def bind(self, pod: PodIdentity, node: str, version: str = "") -> None:
        conditions = {"uid": pod.uid, "resourceVersion": version}
        meta = {**path_names(pod), **{what: value for what, value in conditions.items() if value}}
        binding = {"metadata": meta, "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
        try:
            status, body = await request_json(
                self._api, "POST", f"{POD_PATH}/binding", path_names(pod), binding, seconds=REQUEST_TIMEOUT
            )
        except REQUEST_ERRORS as exc:
            raise BindingLostError("the API server cannot be reached") from exc
        if status >= 400:
            raise BindingRefusedError(error_message(status, body), status)


class ApiConditions:
    """Writes the condition PodScheduled of pods in the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def unscheduled(self, pod: PodIdentity, version: str, message: str, at: str) -> bool:
        """Sets the condition to False if the pod still has this resourceVersion: it may be on a node by now."""
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
            "lastTransitionTime": at,
        }
        patch = {"metadata": {"uid": pod.uid, "resourceVersion": version}, "status": {"conditions": [condition]}}
        try:
            status, body = await request_json(
                self._api,
                "PATCH",
                f"{POD_PATH}/status",
                path_names(pod),
                patch,
                seconds=REQUEST_TIMEOUT,
                kind=STRATEGIC_MERGE_PATCH,
            )
        except REQUEST_ERRORS as exc:
            log.warning("condition lost", namespace=pod.namespace, name=pod.name, error=type(exc).__name__)
            return False
        if status >= 400 and status not in (404, 409):  # the pod is gone or has changed
            log.warning(
                "condition refused", namespace=pod.namespace, name=pod.name, problem=error_message(status, body)
            )
        return status < 400


class ApiPodWaker:
    """Wakes pods through the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def wake(self, pod: PodIdentity, at: str) -> None:
        patch = {"metadata": {"uid": pod.uid, "annotations": {keys.WOKEN_AT: at}}}
        try:
            status, body = await request_json(
                self._api, "PATCH", POD_PATH, path_names(pod), patch, seconds=REQUEST_TIMEOUT, kind=MERGE_PATCH
            )
        except REQUEST_ERRORS as exc:
            raise WakerUnavailableError("the API server cannot be reached") from exc
        if status >= 400 and status not in (404, 409):  # the pod is gone or has another uid
            is_away = status == 429 or status >= 500
            raise (WakerUnavailableError if is_away else NotWokenError)(error_message(status, body))
