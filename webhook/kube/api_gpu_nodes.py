"""GPUNode objects in the API server."""

from contextlib import AbstractAsyncContextManager

from webhook.core.raw import Raw
from webhook.kube.api_objects import ApiObjects
from webhook.kube.client import ApiClient, translated_write_errors
from webhook.kube.paths import GPU_NODES


class ApiGpuNodes(ApiObjects):
    """Reads and writes GPUNodes. Their resource version serializes writes, and the CRD's rules guard held slots."""

    def __init__(self, api: ApiClient) -> None:
        super().__init__(api, GPU_NODES)

    async def put(self, raw: Raw) -> Raw:
        return await self.replace(raw)

    async def put_status(self, raw: Raw) -> Raw:
        return await self.replace_status(only_status(raw))

    def _write_errors(self) -> AbstractAsyncContextManager[None]:
        return translated_write_errors()


def only_status(raw: Raw) -> Raw:
    """The part of the object that a status write needs. The rest is larger on a node with thousands of GPUs."""
    meta = {name: raw["metadata"][name] for name in ("name", "uid", "resourceVersion") if name in raw["metadata"]}
    return {**{name: raw[name] for name in ("apiVersion", "kind", "status") if name in raw}, "metadata": meta}
