"""Taints nodes and evicts pods in the API server when evidence has ended."""

from collections.abc import Mapping

import structlog

from webhook.admission.evidence_loss import EvictionError
from webhook.core import keys
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity
from webhook.kube.api_objects import UnexpectedObjectError, checked_object
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient
from webhook.kube.pods import error_message, path_names
from webhook.kube.requests import JSON, MERGE_PATCH, NODE_PATH, POD_PATH, REQUEST_ERRORS, request_json

log = structlog.get_logger(__name__)


GONE, CONFLICT = 404, 409


class ApiEvictor:
    """Uses the eviction API, so disruption budgets apply."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def taint(self, node: str, *, wanted: bool) -> None:
        """Writes the list of taints under the resourceVersion that it was read with."""
        ours = {"key": keys.EVIDENCE_LOST_TAINT, "effect": "NoSchedule"}
        found = await self._read(node)
        was = [] if found is None else found["spec"].get("taints") or []
        others = [one for one in was if (one["key"], one["effect"]) != (ours["key"], ours["effect"])]
        if found is None or (len(others) < len(was)) == wanted:
            return
        version = found["metadata"]["resourceVersion"]
        taints = [*others, *([ours] if wanted else [])]
        patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}
        await self._answered("PATCH", NODE_PATH, {"name": node}, patch, kind=MERGE_PATCH)
        log.info("taint added" if wanted else "taint removed", node=node, taint=keys.EVIDENCE_LOST_TAINT)

    async def _read(self, node: str) -> Raw | None:
        body = await self._answered("GET", NODE_PATH, {"name": node}, fine=(GONE,))
        try:
            return None if body is None else checked_object(200, body, "Node", node)
        except UnexpectedObjectError as exc:
            raise EvictionError(str(exc)) from exc

    async def _answered(
        self,
        method: str,
        path: str,
        names: Mapping[str, str],
        body: Raw | None = None,
        *,
        kind: str = JSON,
        fine: tuple[int, ...] = (),
    ) -> bytes | None:
        """The body of the answer; None for the statuses in `fine`. Raises EvictionError."""
        try:
            status, answer = await request_json(
                self._api, method, path, names, body, seconds=REQUEST_TIMEOUT, kind=kind
            )
        except REQUEST_ERRORS as exc:
            raise EvictionError("the API server cannot be reached") from exc
        if status in fine:
            return None
        if status >= 400:
            raise EvictionError(error_message(status, answer))
        return answer

    async def evict(self, pod: PodIdentity) -> None:
        """The uid is a precondition, so a newer pod of the same name is not evicted."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": path_names(pod),
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        await self._answered("POST", f"{POD_PATH}/eviction", path_names(pod), body, fine=(GONE, CONFLICT))
