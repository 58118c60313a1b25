"""The Nodes as the exporter reads and labels them."""

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Final

import msgspec
from attrs import frozen

from webhook.core import keys
from webhook.core.raw import Raw
from webhook.export.labels import label_patch
from webhook.kube.requests import NODE_PATH, POD_PATH, ApiRefusesError, ApiUnavailableError, RateLimitedClient
from webhook.runtime.backoff import Backoff

# gpuid's retries and pauses, within the timeout of one reading.
TRIES: Final = 5
BACKOFF: Final = Backoff(timedelta(seconds=2), timedelta(seconds=45))


class ExportNodeMetadataWire(msgspec.Struct, frozen=True):
    uid: str = ""
    created: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(name="creationTimestamp", default=None)
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ExportNodeSpecWire(msgspec.Struct, frozen=True, rename="camel"):
    provider_id: str | None = msgspec.field(name="providerID", default=None)


class ExportNodeInfoWire(msgspec.Struct, frozen=True):
    boot_id: str | None = msgspec.field(name="bootID", default=None)


class ExportNodeStatusWire(msgspec.Struct, frozen=True, rename="camel"):
    node_info: ExportNodeInfoWire | None = None


class ExportNodeWire(msgspec.Struct, frozen=True):
    metadata: ExportNodeMetadataWire
    spec: ExportNodeSpecWire | None = None
    status: ExportNodeStatusWire | None = None


@frozen
class ExportedNode:
    """One Node as it was read."""

    uid: str
    provider_id: str | None
    boot_id: str | None
    labels: Mapping[str, str]
    gpus: str | None  # the annotation gpuwarden.io/gpus
    created: datetime | None = None


def parse_node(raw: object) -> ExportedNode:
    wire = msgspec.convert(raw, ExportNodeWire)
    return ExportedNode(
        uid=wire.metadata.uid,
        provider_id=wire.spec.provider_id if wire.spec else None,
        boot_id=(wire.status.node_info.boot_id or None) if wire.status and wire.status.node_info else None,
        labels=wire.metadata.labels or {},
        gpus=(wire.metadata.annotations or {}).get(keys.NODE_GPUS),
        created=wire.metadata.created,
    )


def trim_node(raw: Raw) -> Raw:
    """The part of a Node that is needed between readings. A whole Node also lists its images."""
    meta, info = raw["metadata"], (raw.get("status") or {}).get("nodeInfo") or {}
    notes = {name: text for name, text in (meta.get("annotations") or {}).items() if name == keys.NODE_GPUS}
    return {
        "kind": raw.get("kind"),
        "metadata": {"name": meta["name"], "resourceVersion": meta["resourceVersion"], "annotations": notes},
        "status": {"nodeInfo": {"bootID": info.get("bootID")}},
    }


class ApiNode:
    """Reads and patches Nodes, and reads pods, one at a time."""

    def __init__(self, calls: RateLimitedClient) -> None:
        self._call = calls.call

    async def get(self, name: str) -> ExportedNode | None:
        raw = await self._call("GET", NODE_PATH, {"name": name})
        return None if raw is None else parse_node(raw)

    async def pod(self, namespace: str, name: str) -> Raw | None:
        return await self._call("GET", POD_PATH, {"namespace": namespace, "name": name})

    async def is_served(self, path: str) -> bool:
        """Whether the API server serves this kind of object. Raises ApiUnavailableError, ApiRefusesError."""
        return await self._call("GET", path + "?limit=1", {}) is not None

    async def write_metadata(self, name: str, node: ExportedNode, labels: Mapping[str, str], gpus: str) -> bool:
        """Sets these labels, removes others of our domain, and sets the annotation. Returns whether a patch was needed.

        Raises ApiRefusesError at once, ApiUnavailableError after the last attempt.
        """
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF.seconds(attempt))
            try:
                return await self._write_metadata(name, node, labels, gpus)
            except ApiUnavailableError:
                if attempt == TRIES - 1:
                    raise
        return False

    async def _write_metadata(self, name: str, node: ExportedNode, labels: Mapping[str, str], gpus: str) -> bool:
        metadata: Raw = {"uid": node.uid}  # a precondition: not another Node with the same name
        if changes := label_patch(labels, node.labels):
            metadata["labels"] = changes
        if node.gpus != gpus:
            metadata["annotations"] = {keys.NODE_GPUS: gpus}
        if len(metadata) == 1:
            return False
        if await self._call("PATCH", NODE_PATH, {"name": name}, {"metadata": metadata}) is None:
            raise ApiRefusesError(404, "the node is gone")
        return True
