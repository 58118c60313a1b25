"""Parses Node objects."""

from datetime import datetime
from typing import Annotated

import msgspec

from webhook.core.device import Node, Taint
from webhook.core.pod import WireStruct
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


def creation_time_of(raw: Raw) -> datetime | None:
    return msgspec.convert(raw, NodeWire).metadata.creation_timestamp
