"""GPUNode objects in the API server."""

from kubernetes.aio import client

from webhook.core.raw import Raw
from webhook.kube.api_objects import ApiObjects
from webhook.kube.client import translated_write_errors
from webhook.kube.paths import GPU_NODES


class ApiGpuNodes:
    """Reads and writes GPUNodes. Their resource version serializes writes, and the CRD's rules guard held slots."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = ApiObjects(api, GPU_NODES, translated_write_errors)

    async def get(self, name: str) -> Raw | None:
        return await self._objects.get(name)

    async def put(self, raw: Raw) -> Raw:
        return await self._objects.replace(raw)

    async def put_status(self, raw: Raw) -> Raw:
        return await self._objects.replace_status(only_status(raw))


def only_status(raw: Raw) -> Raw:
    """The part of the object that a status write needs. The rest is larger on a node with thousands of GPUs."""
    meta = {name: raw["metadata"][name] for name in ("name", "uid", "resourceVersion") if name in raw["metadata"]}
    return {**{name: raw[name] for name in ("apiVersion", "kind", "status") if name in raw}, "metadata": meta}
