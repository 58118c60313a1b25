"""Parses Node objects."""

from datetime import datetime
from typing import Annotated

import msgspec

from webhook.core.device import Node, Taint
from webhook.core.errors import InvalidPodError
from webhook.core.pod import WireStruct, whole_number
from webhook.core.raw import Raw


class TaintWire(WireStruct, frozen=True):
    key: str = ""
    value: str | None = None
    effect: str = ""


class NodeSpecWire(WireStruct, frozen=True):
    unschedulable: bool | None = None
    taints: list[TaintWire] | None = None


class NodeConditionWire(WireStruct, frozen=True):
    type: str = ""
    status: str = ""


class NodeStatusWire(WireStruct, frozen=True):
    conditions: list[NodeConditionWire] | None = None


class NodeMetaWire(WireStruct, frozen=True):
    name: str
    labels: dict[str, str] | None = None
    creation_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class NodeWire(WireStruct, frozen=True):
    metadata: NodeMetaWire
    spec: NodeSpecWire | None = None
    status: NodeStatusWire | None = None


def node_of(raw: Raw) -> Node:
    """The Node, without its devices."""
    wire = msgspec.convert(raw, NodeWire)
    spec, status = wire.spec or NodeSpecWire(), wire.status or NodeStatusWire()
    return Node(
        name=wire.metadata.name,
        labels=wire.metadata.labels or {},
        is_ready=any(one.type == "Ready" and one.status == "True" for one in status.conditions or ()),
        is_cordoned=bool(spec.unschedulable),
        taints=tuple(Taint(one.key, one.value or "", one.effect) for one in spec.taints or ()),
    )


class NodeCapacityWire(WireStruct, frozen=True):
    allocatable: dict[str, str] | None = None


class NodeWithCapacityWire(WireStruct, frozen=True):
    status: NodeCapacityWire | None = None


def plugin_gpus(raw: Raw, resource: str) -> int:
    """How many units of the resource a device plugin offers on the node. The kubelet sets 0 when its plugin is gone."""
    try:
        wire = msgspec.convert(raw, NodeWithCapacityWire)
        allocatable = (wire.status and wire.status.allocatable) or {}
        return whole_number(allocatable.get(resource, "0"))
    except (msgspec.ValidationError, InvalidPodError):
        return 0


def creation_time_of(raw: Raw) -> datetime | None:
    return msgspec.convert(raw, NodeWire).metadata.creation_timestamp
