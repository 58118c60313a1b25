"""The members of pods and nodes, as the API server shows them, that decide where a pod is put."""

from datetime import datetime
from typing import Any

from webhook.core.neighbours import AffinityWire
from webhook.core.node_fit import SpecWire
from webhook.core.pod import Metadata, WireStruct
from webhook.ledger.reserved_pod import ENDED
from webhook.scheduler.binder_volumes import VolumeWire


class GateWire(WireStruct, frozen=True):
    name: str = ""


class ConstraintWire(WireStruct, frozen=True):
    when_unsatisfiable: str | None = None


class BoundSpecWire(SpecWire, frozen=True):
    node_name: str | None = None
    scheduler_name: str | None = None
    scheduling_gates: list[GateWire] | None = None
    priority: int | None = None
    affinity: AffinityWire | None = None
    topology_spread_constraints: list[ConstraintWire] | None = None
    resource_claims: list[dict[str, Any]] | None = None
    volumes: list[VolumeWire] | None = None


class PhaseWire(WireStruct, frozen=True):
    phase: str | None = None


class PodMetaWire(Metadata, frozen=True):
    deletion_timestamp: datetime | None = None
    resource_version: str = ""


class PodWire(WireStruct, frozen=True):
    metadata: PodMetaWire
    spec: BoundSpecWire
    status: PhaseWire | None = None

    @property
    def has_ended(self) -> bool:
        return self.status is not None and self.status.phase in ENDED


class AllocatableWire(WireStruct, frozen=True):
    allocatable: dict[str, str | int | float | None] | None = None


class NodeRoomWire(WireStruct, frozen=True):
    status: AllocatableWire | None = None


def beyond_us(spec: BoundSpecWire) -> str:
    """The field by which a pod demands what we do not look at: to place it all the same would break its word."""
    if any(one.when_unsatisfiable != "ScheduleAnyway" for one in spec.topology_spread_constraints or ()):
        return "spec.topologySpreadConstraints"
    return "spec.resourceClaims" if spec.resource_claims else ""
