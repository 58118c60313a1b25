"""Puts the parts together as the settings say. Nothing here runs by itself."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

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
from webhook.core.dress import DressRules, Injection, MapVisible
from webhook.core.errors import GpuwardenError
from webhook.core.evidence import EvidenceState
from webhook.core.fleet import Fleet
from webhook.core.hints import Bucket
from webhook.core.keys import REQUIRED_HASH
from webhook.core.offer import count_devices
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


def embedded(settings: Settings, clock: Clock) -> Parts:
    """Everything in this process: no cluster is asked."""
    fleet, metrics = Fleet(), Metrics()
    ledger = MemoryLedger(fleet, clock, times_of(settings))
    proofs = MemoryProofs(
        lambda: fleet.indexed_nodes.keys(),
        clock,
        settings.clock_skew,
        accepted=lambda node, said: fleet_source.prove(MemoryProofs.name, node, said),
    )
    providers = providers_of(settings, clock, StaticEvidence(settings.node_hash_map), proofs)
    fleet_source = FleetUpdater(fleet, InventoryFile(inventory_path(settings)), providers, clock, metrics)
    parts = assembled(settings, clock, fleet, metrics, ledger, fleet_source, ReviewedPods(), NoDemands())
    attestation = attestation_of(settings, proofs, clock, metrics)
    return evolve(parts, attestation=attestation, hinting=hinting_of(settings, parts), lapses=ledger.lapses)


def assembled(
    settings: Settings,
    clock: Clock,
    fleet: Fleet,
    metrics: Metrics,
    ledger: Ledger,
    fleet_source: FleetSource,
    pods: PodSource,
    namespaces: NamespaceDemands,
) -> Parts:
    """What follows from the parts that differ."""
    policy = policy_of(settings)
    parts = Parts(
        fleet=fleet,
        ledger=ledger,
        reserver=Reserver(
            fleet,
            ledger,
            policy,
            clock,
            metrics,
            limits=PendingLimits(
                settings.pending_limit,
                settings.pending_percent,
                settings.orphans_per_namespace,
                most_waiting=reviews_at_once(settings) // 2,
            ),
            is_known=lambda name: namespaces.known(name) is not None,
        ),
        fleet_source=fleet_source,
        pods=pods,
        rules=rules_of(settings, namespaces),
        clock=clock,
        metrics=metrics,
        notes=(*settings.notes, *([STATIC_NOTE] if "static" in settings.evidence else [])),
    )
    metrics.watch_fleet(lambda: counts(parts))
    metrics.watch_ages(lambda: evidence_ages(fleet, clock()))
    return parts


def hinting_of(
    settings: Settings, parts: Parts, jobs: RunningJobs | None = None, classes: PriorityClasses | None = None
) -> HintService | None:
    """None where nobody is to be asked."""
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
    """The alias that is set, and the one that always was: a hash that nobody reads would be asked for in vain."""
    return tuple(dict.fromkeys((settings.required_hash_alias, *REQUIRED_HASH.aliases)))


def rules_of(settings: Settings, namespaces: NamespaceDemands) -> Rules:
    return Rules(
        claims=ClaimReader(ClaimRules(settings.gpu_resource, hash_aliases(settings)), namespaces),
        dress=DressRules(
            Injection(settings.injection),
            settings.gpu_resource,
            settings.write_aliases,
            MapVisible(settings.map_visible),
            settings.runtime_class,
            max_grace=settings.max_grace if settings.keeps_in_cluster else None,
        ),
        bind_deadline=settings.bind_deadline,
        queues=settings.queues,
        queues_mapped=settings.keeps_in_cluster,
    )


def counts(parts: Parts) -> FleetCounts:
    """What the metrics show. What is free is known in numbers; only what is held is looked at one by one."""
    now = parts.clock()
    fleet, ledger = parts.fleet, parts.ledger
    fleet.advance(now)
    held = fleet.held_devices
    devices = Counter(
        device_state(ledger.of_device(uuid), now, is_quarantined=fleet.is_quarantined(uuid)) for uuid in held
    )
    devices[DeviceState.QUARANTINED] += len(fleet.quarantined_devices - held)
    offer = count_devices(fleet, needs_evidence=parts.reserver.policy.is_always_required)
    for (state, _), number in offer.items():
        devices[state] += number
    return FleetCounts(
        available={evidence.value: offer[DeviceState.AVAILABLE, evidence] for evidence in EvidenceState},
        devices={state.value: number for state, number in devices.items()},
        reservations={**Counter(one.phase for one in ledger.reservations())},
        evidence_nodes={state.value: number for state, number in fleet.states.items()},
    )
