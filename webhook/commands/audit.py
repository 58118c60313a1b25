"""`gpuwarden audit`: reads the cluster with the caller's rights, and prints the findings."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import structlog
from attrs import frozen

from webhook.admission.audit import AuditedPod, AuditRules, Facts, Finding, findings
from webhook.admission.namespaces import NoDemands
from webhook.admission.placement_maps import map_of, may_reserve_by_map, opted_in
from webhook.assembly.parts import rules_of
from webhook.core.device import DeviceUuid
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import Evidence
from webhook.core.injection import Injection, injection_of_node
from webhook.core.isolation import ClaimName, is_isolated, refused_volume
from webhook.core.raw import Raw
from webhook.core.reservation import Reservation, ReservationId
from webhook.evidence.node_evidence import NodeEvidence, UnreadableEvidenceError
from webhook.kube.client import ApiClient, ApiException, connect
from webhook.kube.gpu_node import GpuNode, UnreadableGpuNodeError, object_name
from webhook.kube.node import plugin_gpus
from webhook.kube.paths import (
    GPU_NODES_PATH,
    NAMESPACES_PATH,
    NODE_EVIDENCES_PATH,
    NODES_PATH,
    PODS_PATH,
    STATEFUL_SETS_PATH,
    VOLUMES_PATH,
)
from webhook.kube.watch import WATCH_ERRORS, pages
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings

log = structlog.get_logger(__name__)

Kept = TypeVar("Kept")
Volumes = dict[ClaimName, str]
"""Paths of PersistentVolumes that no tenant could create, by the claims that are bound to the volumes."""

NOTHING, FOUND = 0, 1
FORBIDDEN = 403
# The seconds in which gpuwarden releases a pod that has ended, and sees a pod that was just created.
UNDER_WAY = 3.0
COLUMNS = ("KIND", "OBJECT", "NODE", "FOUND")


class CannotReadError(GpuwardenError):
    """Objects that the audit needs cannot be listed."""


class MayNotReadError(CannotReadError):
    """The caller has no right to list the objects."""


@frozen
class LedgerSnapshot:
    """What GPUNodes hold at one moment."""

    held: dict[tuple[ReservationId, str], Reservation]
    unreadable: tuple[str, ...]
    # The devices of each node.
    devices: frozenset[tuple[str, DeviceUuid]]


def run(settings: Settings, context: str | None, output: str) -> int:
    """Raises CannotReadError."""
    found = asyncio.run(audited(settings, context))
    sys.stdout.write(as_json(found) if output == "json" else as_table(found))
    return FOUND if found else NOTHING


async def audited(settings: Settings, context: str | None) -> list[Finding]:
    """What two audits find. Lists are not from one moment, so a single audit also finds changes in progress."""
    async with await connect(settings, context=context) as api:
        volumes = await refused_volumes_in(api)
        first = await findings_now(api, settings, volumes)
        if not first:
            return []
        await asyncio.sleep(UNDER_WAY)
        again = {(one.kind, one.object) for one in await findings_now(api, settings, volumes)}
    return [one for one in first if (one.kind, one.object) in again]


async def findings_now(api: ApiClient, settings: Settings, volumes: Volumes) -> list[Finding]:
    facts = await facts_of(api, settings, volumes)
    return findings(facts, utc_now(), needs_evidence=settings.evidence_required_of == "all")


async def facts_of(api: ApiClient, settings: Settings, volumes: Volumes) -> Facts:
    """Reads the ledger before the pods and after them. Reservations that change in between are not judged."""
    rules = rules_of(settings, NoDemands())
    reading = AuditRules(rules.claims.rules, rules.dress, settings.host_paths, volumes)
    before = await ledger_in(api)
    pods: list[AuditedPod] = [one async for one in listed(api, PODS_PATH, reading.pod)]
    after = await ledger_in(api)
    namespaces = [raw async for raw in listed(api, NAMESPACES_PATH, lambda raw: raw)]
    keeping = {object_name(raw) for raw in namespaces if may_reserve_by_map(raw, settings.opt_in_label)}
    ours = {object_name(raw) for raw in namespaces if opted_in(raw, settings.opt_in_label)}
    isolated = {object_name(raw) for raw in namespaces if is_isolated(raw, settings.own_namespace)}
    mapped = [one async for one in listed(api, STATEFUL_SETS_PATH, mapped_set)]
    offering = await nodes_with_plugin(api, settings.gpu_resource, Injection(settings.injection))
    return Facts(
        pods=pods,
        held=[one for key, one in after.held.items() if key in before.held],
        opted_in=ours,
        isolated=ours & isolated,
        unsettled={id for id, _ in before.held.keys() ^ after.held.keys()},
        evidence={name: word async for name, word in listed(api, NODE_EVIDENCES_PATH, evidence_in)},
        maps_without_label=[one for one in mapped if one[0] in ours - keeping],
        unreadable=after.unreadable,
        is_listed=lambda node, uuid: (node, uuid) in after.devices,
        plugin_nodes=offering & {node for node, _ in after.devices},
    )


async def listed(api: ApiClient, path: str, read: Callable[[Raw], Kept | None]) -> AsyncIterator[Kept]:
    """What `read` returns for each object, without None. Raises CannotReadError."""
    try:
        async for page, _ in pages(api, path):
            for raw in page:
                found = read(raw)
                if found is not None:
                    yield found
    except WATCH_ERRORS as exc:
        status = exc.status if isinstance(exc, ApiException) else None
        problem = f"answered {status}" if status is not None else type(exc).__name__
        error = MayNotReadError if status == FORBIDDEN else CannotReadError
        raise error(f"{path} cannot be listed: the API server {problem}") from exc


async def refused_volumes_in(api: ApiClient) -> Volumes:
    """Empty, with a warning, if the caller may not list PersistentVolumes. Raises CannotReadError."""
    try:
        return dict([one async for one in listed(api, VOLUMES_PATH, refused_volume)])
    except MayNotReadError as exc:
        log.warning("pods judged without their PersistentVolumes", error=str(exc))
        return {}


async def nodes_with_plugin(api: ApiClient, resource: str, default: Injection) -> set[str]:
    """The nodes on which a device plugin offers the resource beside gpuwarden. Empty, with a warning, if the caller may
    not list Nodes. Raises CannotReadError."""

    def read(raw: Raw) -> str | None:
        uses_plugin = injection_of_node(raw["metadata"].get("labels") or {}, default) is Injection.PLUGIN
        return object_name(raw) if plugin_gpus(raw, resource) and not uses_plugin else None

    try:
        return {one async for one in listed(api, NODES_PATH, read)}
    except MayNotReadError as exc:
        log.warning("device plugins not looked for", error=str(exc))
        return set()


async def ledger_in(api: ApiClient) -> LedgerSnapshot:
    held: dict[tuple[ReservationId, str], Reservation] = {}
    devices: set[tuple[str, DeviceUuid]] = set()
    unreadable = []
    async for raw in listed(api, GPU_NODES_PATH, lambda raw: raw):
        try:
            node = GpuNode.parse(raw)
        except UnreadableGpuNodeError:
            unreadable.append(f"gpunode {object_name(raw)}")
            continue
        held.update({(one.id, one.node): one for one in node.reservations.values()})
        devices.update((node.name, one.uuid) for one in node.devices)
    return LedgerSnapshot(held, tuple(unreadable), frozenset(devices))


def evidence_in(raw: Raw) -> tuple[str, Evidence | None] | None:
    """The combined evidence of all sources. An unreadable object proves nothing."""
    try:
        return object_name(raw), NodeEvidence.parse(raw).combined_evidence
    except UnreadableEvidenceError:
        return object_name(raw), None


def mapped_set(raw: Raw) -> tuple[str, str] | None:
    meta = raw["metadata"]
    return (meta.get("namespace") or "", meta["name"]) if map_of(raw) else None


# Output.


def as_json(found: Sequence[Finding]) -> str:
    entries = [
        {"kind": one.kind, "namespace": one.namespace, "object": one.object, "node": one.node, "message": one.message}
        for one in found
    ]
    return msgspec.json.format(msgspec.json.encode({"findings": entries}), indent=2).decode() + "\n"


def as_table(found: Sequence[Finding]) -> str:
    if not found:
        return "Nothing found.\n"
    rows = [COLUMNS, *((one.kind.value, one.object, one.node or "-", one.message) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    return "".join(line(row, widths) for row in rows)


def line(row: Iterable[str], widths: Sequence[int]) -> str:
    *cells, last = row
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([*padded, last]) + "\n"
