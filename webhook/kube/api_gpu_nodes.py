"""GPUNode objects in the API server."""

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.kube.client import REQUEST_TIMEOUT, as_raw, translated_errors, translated_write_errors
from webhook.kube.paths import GPU_NODES
from webhook.kube.store import StoreUnavailableError


class ApiGpuNodes:
    """Reads and writes GPUNodes. Their resource version serializes writes, and the CRD's rules guard held slots."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(api)

    async def get(self, name: str) -> Raw | None:
        if not is_object_name(name):  # it comes from an annotation; `..` would lead to another path
            return None
        try:
            async with translated_errors():
                return as_raw(
                    await self._objects.get_cluster_custom_object(*GPU_NODES, name, _request_timeout=REQUEST_TIMEOUT),
                    name,
                )
        except StoreUnavailableError as exc:
            if isinstance(exc.__cause__, ApiException) and exc.__cause__.status == 404:
                return None
            raise

    async def put(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        async with translated_write_errors():
            return as_raw(
                await self._objects.replace_cluster_custom_object(
                    *GPU_NODES, name, raw, _request_timeout=REQUEST_TIMEOUT
                )
            )

    async def put_status(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        async with translated_write_errors():
            return as_raw(
                await self._objects.replace_cluster_custom_object_status(
                    *GPU_NODES, name, only_status(raw), _request_timeout=REQUEST_TIMEOUT
                )
            )


def only_status(raw: Raw) -> Raw:
    """The part of the object that a status write needs. The rest is larger on a node with thousands of GPUs."""
    meta = {name: raw["metadata"][name] for name in ("name", "uid", "resourceVersion") if name in raw["metadata"]}
    return {**{name: raw[name] for name in ("apiVersion", "kind", "status") if name in raw}, "metadata": meta}
