"""Gates of pods in the API server: opened by a JSON patch, looked at, and what a pod waits for."""

from typing import Any

import msgspec
from kubernetes.aio import client

from webhook.calls import LOST
from webhook.core import keys
from webhook.core.difference import Change
from webhook.core.reservation import PodIdentity
from webhook.ledger.queue import GateError
from webhook.scheduler.api_pods import MERGE_PATCH, REQUEST_TIMEOUT, said_in
from webhook.waiting_pods import is_waiting

JSON_PATCH = "application/json-patch+json"
GONE = 404


class ApiGates:
    """Every patch names the uid of its pod."""

    def __init__(self, api: client.ApiClient) -> None:
        self._pods = client.CoreV1Api(api)

    async def open(self, pod: PodIdentity, patch: list[Change]) -> bool:
        return await self._patch(pod, patch, JSON_PATCH)

    async def say(self, pod: PodIdentity, why: str) -> None:
        await self._patch(pod, {"metadata": {"uid": pod.uid, "annotations": {keys.WAITING: why}}}, MERGE_PATCH)

    async def is_shut(self, pod: PodIdentity) -> bool:
        try:
            async with await self._pods.read_namespaced_pod_without_preload_content(
                pod.name, pod.namespace, _request_timeout=REQUEST_TIMEOUT
            ) as response:
                status, body = response.status, await response.read()
        except LOST as exc:
            raise GateError("the API server cannot be reached") from exc
        if status == GONE:
            return False
        if status >= 400:
            raise GateError(said_in(status, body))
        raw = msgspec.json.decode(body)
        return bool(raw["metadata"]["uid"] == pod.uid and is_waiting(raw))

    async def _patch(self, pod: PodIdentity, patch: list[Change] | dict[str, Any], kind: str) -> bool:
        """Whether there was a pod of that name."""
        try:
            async with await self._pods.patch_namespaced_pod_without_preload_content(
                pod.name, pod.namespace, patch, _content_type=kind, _request_timeout=REQUEST_TIMEOUT
            ) as response:
                status, body = response.status, await response.read()
        except LOST as exc:
            raise GateError("the API server cannot be reached") from exc
        if status >= 400 and status != GONE:
            raise GateError(said_in(status, body))
        return status != GONE
