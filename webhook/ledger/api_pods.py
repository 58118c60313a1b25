"""Pods and nodes in the API server."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reservation import PodIdentity, Reservation
from webhook.kube.client import REQUEST_TIMEOUT, ApiClient
from webhook.kube.json_objects import object_in
from webhook.kube.paths import PODS_PATH
from webhook.kube.requests import MERGE_PATCH, NODE_PATH, POD_PATH, REQUEST_ERRORS, request_json
from webhook.kube.watch import WATCH_ERRORS, whole_list
from webhook.ledger.cluster import PodReaderUnavailableError
from webhook.ledger.end_of_use import NodeSnapshot
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod, reservation_mismatch


def pod_in(body: bytes, namespace: str, name: str) -> Raw:
    """The requested pod. The names come from review senders, and a name such as `..` addresses another resource."""
    try:
        raw = object_in(body)
        meta = raw["metadata"]
        if (raw["kind"], meta["namespace"], meta["name"]) == ("Pod", namespace, name) and meta["uid"]:
            return raw
    except (msgspec.DecodeError, KeyError, TypeError) as exc:
        raise PodsUnavailableError("the API server answered with something other than a pod") from exc
    raise PodsUnavailableError("the API server answered with another object than the requested pod")


class ApiPods:
    """Pods in the API server. A read without a resource version is a quorum read, never answered from a cache."""

    trusts_reviews = False

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        name = f"pod {pod.namespace}/{pod.name}"
        raw = await self.read(pod.namespace, pod.name)
        if raw is None:
            return f"there is no {name}"
        if raw["metadata"]["uid"] != pod.uid:
            return f"{name} has another uid"
        other = reservation_mismatch(raw, held)
        return None if other is None else f"{name} {other}"

    def created(self, pod: PodIdentity) -> None:
        """Does nothing: only the watch proves that the pod exists, a review does not."""

    def ended(self, pod: PodIdentity) -> None:
        """Does nothing: an eviction sends no DELETE review, and a terminating pod still uses its devices."""

    async def uid_of(self, namespace: str, name: str) -> str:
        raw = await self.read(namespace, name)
        return "" if raw is None else str(raw["metadata"]["uid"])

    async def find(self, namespace: str, name: str) -> Pod | None:
        raw = await self.read(namespace, name)
        return None if raw is None else Pod.parse(raw)

    async def read(self, namespace: str, name: str) -> Raw | None:
        try:
            status, body = await request_json(
                self._api, "GET", POD_PATH, {"namespace": namespace, "name": name}, seconds=REQUEST_TIMEOUT
            )
        except REQUEST_ERRORS as exc:
            raise PodsUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        if status != 200:
            raise PodsUnavailableError(f"the API server answered {status}")
        return pod_in(body, namespace, name)

    async def reserved_pods(self) -> Sequence[ReservedPod]:
        return [one for one in map(ReservedPod.of, await self._all()) if one is not None]

    async def _all(self) -> Collection[Raw]:
        try:
            raws, _ = await whole_list(self._api, PODS_PATH)
        except WATCH_ERRORS as exc:
            raise PodReaderUnavailableError("pods cannot be listed") from exc
        return raws.values()

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        try:
            if pod.name:
                raw = await self.read(pod.namespace, pod.name)
            else:  # a reservation written by hand: only the full list can answer
                raw = next((one for one in await self._all() if one["metadata"].get("uid") == pod.uid), None)
            is_gone = raw is None or raw["metadata"]["uid"] != pod.uid
            return None if raw is None or is_gone else PodSnapshot.of(raw)
        except (PodsUnavailableError, msgspec.ValidationError) as exc:
            raise PodReaderUnavailableError(str(exc)) from exc

    async def read_node(self, name: str) -> NodeSnapshot | None:
        try:
            status, body = await request_json(self._api, "GET", NODE_PATH, {"name": name}, seconds=REQUEST_TIMEOUT)
            if status == 404:
                return None
            raw = object_in(body) if status == 200 else {}
            if (raw.get("kind"), raw.get("metadata", {}).get("name")) != ("Node", name):
                raise PodReaderUnavailableError(f"the API server answered {status} with another object than that node")
            return NodeSnapshot.of(raw)
        except (*REQUEST_ERRORS, msgspec.MsgspecError, AttributeError) as exc:
            raise PodReaderUnavailableError("the node cannot be read") from exc

    async def annotate(self, pod: PodIdentity, annotations: Mapping[str, str]) -> None:
        names = {"namespace": pod.namespace, "name": pod.name}
        body = {"metadata": {"uid": pod.uid, "annotations": dict(annotations)}}
        try:
            status, _ = await request_json(
                self._api, "PATCH", POD_PATH, names, body, seconds=REQUEST_TIMEOUT, kind=MERGE_PATCH
            )
        except REQUEST_ERRORS as exc:
            raise PodReaderUnavailableError("the pod cannot be annotated") from exc
        if status >= 400 and status not in (404, 409):  # gone, or replaced
            raise PodReaderUnavailableError("the pod cannot be annotated")

    async def remove(self, pod: PodIdentity, version: str) -> None:
        names = {"namespace": pod.namespace, "name": pod.name}
        body = {"preconditions": {"uid": pod.uid, "resourceVersion": version}}
        try:
            status, _ = await request_json(self._api, "DELETE", POD_PATH, names, body, seconds=REQUEST_TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise PodReaderUnavailableError("the pod cannot be deleted") from exc
        if status >= 400 and status not in (404, 409):  # gone, or replaced or changed since
            raise PodReaderUnavailableError("the pod cannot be deleted")
