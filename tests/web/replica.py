"""A replica in a cluster without sockets: replicas share a store of reservations, and read pods."""

from typing import Any

from tests import builders
from tests.builders import Raw
from tests.ledger.fake_store import FakeStore, gpu_node
from tests.web.harness import INVENTORY, Assemble
from webhook.admission.fleet_updater import FleetUpdater
from webhook.admission.namespaces import NamespaceDemands, NoDemands
from webhook.admission.parts import Parts
from webhook.assembly.parts import FleetParts, assembled, inventory_path, limits_of, times_of
from webhook.core.fleet import Fleet
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity, Reservation
from webhook.evidence.static import StaticEvidence
from webhook.inventory.file import InventoryFile
from webhook.ledger.cluster import ClusterLedger, PodReaderUnavailableError
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod, reservation_mismatch
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics


class Shared:
    """The objects in the API server, which all replicas share. A read is consistent, or fails."""

    def __init__(self, inventory: Raw = INVENTORY) -> None:
        self.store = FakeStore()
        for node in inventory["nodes"]:
            shares = {one["uuid"]: one.get("shares", 1) for one in node["devices"]}
            self.store.apply({**gpu_node(node["name"], *shares, shares=shares), "status": {"held": {}}})
        self.pods: dict[tuple[str, str], Raw] = {}
        self.pod_reads = 0
        self.is_away = False

    trusts_reviews = False

    def has(self, raw: Raw) -> None:
        """The pod exists."""
        self.pods[raw["metadata"]["namespace"], raw["metadata"]["name"]] = raw

    async def read(self, namespace: str, name: str) -> Raw | None:
        self.pod_reads += 1
        if self.is_away:
            raise PodsUnavailableError("away")
        return self.pods.get((namespace, name))

    async def find(self, namespace: str, name: str) -> Pod | None:
        raw = await self.read(namespace, name)
        return None if raw is None else Pod.parse(raw)

    async def uid_of(self, namespace: str, name: str) -> str:
        found = await self.find(namespace, name)
        return (found.meta.uid if found else None) or ""

    async def find_mismatch(self, pod: PodIdentity, held: Reservation) -> str | None:
        uid = await self.uid_of(pod.namespace, pod.name)
        if uid != pod.uid:
            return f"pod {pod.namespace}/{pod.name} has another uid"
        other = reservation_mismatch(self.pods[pod.namespace, pod.name], held)
        return None if other is None else f"pod {pod.namespace}/{pod.name} {other}"

    async def read_pod(self, pod: PodIdentity) -> PodSnapshot | None:
        if self.is_away:
            raise PodReaderUnavailableError("away")
        raw = self.pods.get((pod.namespace, pod.name))
        return None if raw is None or raw["metadata"]["uid"] != pod.uid else PodSnapshot.of(raw)

    async def reserved_pods(self) -> list[ReservedPod]:
        return [one for one in map(ReservedPod.of, self.pods.values()) if one is not None]

    def created(self, pod: PodIdentity) -> None:
        """Ignored: a review does not prove anything."""

    def ended(self, pod: PodIdentity) -> None:
        """Ignored: a review does not prove anything."""

    @property
    def held(self) -> dict[str, Raw]:
        """The entries of all GPUNodes, by slot."""
        return {slot: entry for raw in self.store.objects.values() for slot, entry in raw["status"]["held"].items()}

    def change(self, node: str, **members: Any) -> None:
        """Edit the GPUNode directly: change members of its entries, or without members remove all entries."""
        raw = self.store.objects[node]
        held = {slot: {**entry, **members} for slot, entry in raw["status"]["held"].items()} if members else {}
        self.store.apply({**raw, "status": {**raw["status"], "held": held}})


def sharing(shared: Shared, namespaces: NamespaceDemands | None = None) -> Assemble:
    """A replica without a watch: it knows only its own writes and what it reads."""

    def assemble(settings: Settings, clock: Clock) -> Parts:
        fleet, metrics = Fleet(), Metrics()
        ledger = ClusterLedger(fleet, shared.store, shared, clock, times_of(settings))
        evidence = StaticEvidence(settings.node_hash_map)
        fleet_source = FleetUpdater(fleet, InventoryFile(inventory_path(settings)), [evidence], clock, metrics)
        known = FleetParts(fleet, metrics, ledger, fleet_source)
        return assembled(settings, clock, known, shared, namespaces or NoDemands(), limits_of(settings))

    return assemble


def binding(
    node: str,
    *,
    uid: str | None = builders.POD_UID,
    annotations: dict[str, str] | None = None,
    dry_run: bool = False,
) -> Raw:
    """The review of a Binding. Without a uid the request names no subresource."""
    meta = {"name": "train-0", "namespace": "ml", "uid": uid, "annotations": annotations}
    content = {"kind": "Binding", "apiVersion": "v1", "metadata": meta, "target": {"kind": "Node", "name": node}}
    raw_review = builders.review("CREATE", new=content, dry_run=dry_run)
    raw_review["request"]["kind"] = {"group": "", "version": "v1", "kind": "Binding"}
    raw_review["request"]["subResource"] = "binding" if uid else None
    return raw_review
