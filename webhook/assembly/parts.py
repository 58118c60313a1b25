"""Builds the parts of a process from its settings. Building starts no task."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from webhook.admission.evidence_loss import evidence_ages
from webhook.admission.fleet_updater import FleetUpdater
from webhook.admission.namespaces import ClaimReader, NamespaceDemands, NoDemands
from webhook.admission.parts import FleetSource, Parts
from webhook.admission.pending_limits import PendingLimits
from webhook.admission.reserving import Reserver
from webhook.admission.rules import Rules
from webhook.core.claim import ClaimRules
from webhook.core.decide import EvidencePolicy
from webhook.core.device_state import DeviceState, device_state
from webhook.core.dress import DressRules, MapVisible
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.hints import Bucket
from webhook.core.injection import Injection, default_of_nodes
from webhook.core.keys import REQUIRED_HASH
from webhook.core.offer import count_devices
from webhook.core.reserve import Reserve
from webhook.evidence.jwt.attestation import attestation_of
from webhook.evidence.jwt.proofs import MemoryProofs
from webhook.evidence.providers import providers_of
from webhook.evidence.static import NOTE as STATIC_NOTE
from webhook.evidence.static import StaticEvidence
from webhook.inventory.file import InventoryFile
from webhook.ledger import Ledger
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import Times
from webhook.ledger.pods import PodSource, ReviewedPods
from webhook.runtime.clock import Clock
from webhook.runtime.http import budgets
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import FleetCounts, Metrics
from webhook.scoring.candidates import EveryPriorityClass, PriorityClasses, RunningJobs
from webhook.scoring.client import ScorerClient
from webhook.scoring.hints import HintService


@frozen
class FleetParts:
    """What it takes to know the nodes, their GPUs and their evidence, and which GPUs are reserved."""

    fleet: Fleet
    metrics: Metrics
    ledger: Ledger
    fleet_source: FleetSource


@frozen
class LocalFleet(FleetParts):
    """The fleet of an inventory file, with reservations in the memory of this process."""

    ledger: MemoryLedger
    fleet_source: FleetUpdater
    proofs: MemoryProofs

    @classmethod
    def of(cls, settings: Settings, clock: Clock, injection: Injection | None = Injection.NVIDIA) -> "LocalFleet":
        """`injection` is the one of nodes without the label. It matters only for decisions."""
        fleet, metrics = Fleet(injection=injection), Metrics()
        proofs = MemoryProofs(fleet.indexed_nodes.keys, clock, settings.clock_skew)
        providers = providers_of(settings, clock, StaticEvidence(settings.node_hash_map), proofs)
        fleet_source = FleetUpdater(fleet, InventoryFile(inventory_path(settings)), providers, clock, metrics)
        proofs.notify(partial(fleet_source.prove, MemoryProofs.name))
        return cls(fleet, metrics, MemoryLedger(fleet, clock, times_of(settings)), fleet_source, proofs)


def embedded(settings: Settings, clock: Clock) -> Parts:
    """A server without a cluster."""
    local = LocalFleet.of(settings, clock, injection_of_nodes(settings))
    parts = assembled(settings, clock, local, ReviewedPods(), NoDemands(), limits_of(settings))
    return evolve(
        parts,
        attestation=attestation_of(settings, local.proofs, clock, local.metrics),
        hinting=hinting_of(settings, parts),
        lapses=local.ledger.lapses,
    )


def embedded_dry_run(settings: Settings, clock: Clock) -> Parts:
    """For dry runs on an inventory file. They reserve nothing, so no limit applies, and no node attests itself."""
    local = LocalFleet.of(settings, clock, injection_of_nodes(settings))
    parts = assembled(settings, clock, local, ReviewedPods(), NoDemands(), PendingLimits())
    return evolve(parts, hinting=hinting_of(settings, parts))


def assembled(
    settings: Settings,
    clock: Clock,
    known: FleetParts,
    pods: PodSource,
    namespaces: NamespaceDemands,
    limits: PendingLimits,
) -> Parts:
    """The parts that follow from the others, the same with a cluster and without."""
    policy = policy_of(settings)
    fleet, ledger, metrics = known.fleet, known.ledger, known.metrics
    show_fleet(known, policy, clock)
    return Parts(
        fleet=fleet,
        ledger=ledger,
        reserver=Reserver(
            fleet,
            ledger,
            policy,
            clock,
            metrics,
            limits=limits,
            is_known=lambda name: namespaces.known(name) is not None,
        ),
        fleet_source=known.fleet_source,
        pods=pods,
        rules=rules_of(settings, namespaces),
        clock=clock,
        metrics=metrics,
        notes=(*settings.notes, *([STATIC_NOTE] if "static" in settings.evidence else [])),
    )


def show_fleet(known: FleetParts, policy: EvidencePolicy, clock: Clock) -> None:
    """The process's metrics count the fleet from now on."""
    known.metrics.watch_fleet(lambda: fleet_counts(known.fleet, known.ledger, policy, clock()))
    known.metrics.watch_ages(lambda: evidence_ages(known.fleet, clock()))


def limits_of(settings: Settings) -> PendingLimits:
    return PendingLimits(
        settings.pending_limit,
        settings.pending_percent,
        settings.orphans_per_namespace,
        most_waiting=reviews_at_once(settings) // 2,
    )


def hinting_of(
    settings: Settings, parts: Parts, jobs: RunningJobs | None = None, classes: PriorityClasses | None = None
) -> HintService | None:
    """None without a scorer, or with --hint-pods false."""
    if settings.scorer is None or not settings.hint_pods:
        return None
    timeout = settings.scorer_timeout.total_seconds()
    return HintService(
        ScorerClient(settings.scorer, timeout, parts.metrics, roots=settings.scorer_ca),
        parts.fleet,
        parts.clock,
        parts.metrics,
        timeout=timeout,
        buckets=tuple(bucket_of(one) for one in settings.priority_buckets),
        jobs=jobs or RunningJobs(),
        classes=classes or EveryPriorityClass(),
    )


def bucket_of(found: Mapping[str, Any]) -> Bucket:
    return Bucket(found["minScore"], found["priorityClassName"])


def policy_of(settings: Settings) -> EvidencePolicy:
    return EvidencePolicy(is_always_required=settings.evidence_required_of == "all")


def times_of(settings: Settings) -> Times:
    return Times(settings.pending_deadline_in_effect, settings.clock_skew)


def reviews_at_once(settings: Settings) -> int:
    return settings.max_reviews or budgets.RequestLimits().reviews


def inventory_path(settings: Settings) -> Path:
    path = settings.inventory_file
    if path is None:
        raise GpuwardenError("no inventory: name one with --inventory")
    if settings.inventory is None and not path.exists():
        raise GpuwardenError(f"no inventory, and {path} is not here either: name one with --inventory")
    return path


def hash_aliases(settings: Settings) -> tuple[str, ...]:
    """The configured alias, and the built-in one: a pod's required hash must never be ignored."""
    return tuple(dict.fromkeys((settings.required_hash_alias, *REQUIRED_HASH.aliases)))


def injection_of_nodes(settings: Settings) -> Injection | None:
    """The injection of nodes without the label."""
    return default_of_nodes(Injection(settings.injection), Reserve(settings.reserve))


def rules_of(settings: Settings, namespaces: NamespaceDemands) -> Rules:
    return Rules(
        claims=ClaimReader(
            ClaimRules(
                settings.gpu_resource,
                hash_aliases(settings),
                default_injection=Injection(settings.injection),
                default_reserve=Reserve(settings.reserve),
            ),
            namespaces,
        ),
        dress=DressRules(
            Injection(settings.injection),
            settings.gpu_resource,
            settings.write_aliases,
            MapVisible(settings.map_visible),
            settings.runtime_class,
            max_grace=settings.max_grace if settings.keeps_in_cluster else None,
            reserve=Reserve(settings.reserve),
        ),
        bind_deadline=settings.bind_deadline,
        queues=settings.queues,
        queues_mapped=settings.keeps_in_cluster,
    )


def fleet_counts(fleet: Fleet, ledger: Ledger, policy: EvidencePolicy, now: datetime) -> FleetCounts:
    """Free devices are counted by the index; only held and quarantined devices are looked up one by one."""
    fleet.advance(now)
    held = fleet.held_devices
    mismatched, claimed = fleet.mismatched_devices, fleet.claimed_devices
    devices = Counter(
        device_state(
            ledger.of_device(uuid),
            now,
            is_quarantined=not fleet.may_be_proven(uuid),
            is_mismatched=uuid in mismatched,
        )
        for uuid in held
    )
    devices[DeviceState.QUARANTINED] += len(fleet.quarantined_devices - held - mismatched - claimed)
    devices[DeviceState.MISMATCHED] += len(mismatched - held)
    devices[DeviceState.CLAIMED] += len(claimed - held)
    offer = count_devices(fleet, needs_evidence=policy.is_always_required)
    for (state, _), number in offer.items():
        devices[state] += number
    return FleetCounts(
        available={evidence.value: offer[DeviceState.AVAILABLE, evidence] for evidence in EvidenceState},
        devices={state.value: number for state, number in devices.items()},
        reservations={**Counter(one.phase for one in ledger.reservations())},
        evidence_nodes={state.value: number for state, number in fleet.states.items()},
    )
