"""The parts of `gpuwarden reconcile` for ResourceClaims: proof devices, native pods, and which GPUs claims have."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from attrs import frozen

from webhook.admission.claimed_gpus import ClaimedGpus
from webhook.admission.evidence_loss import OnEvidenceLost
from webhook.admission.placement_maps import opted_in
from webhook.assembly.cluster import ClusterWriters, slices_of_driver, whole
from webhook.core.fleet import Fleet
from webhook.core.hashes import HashPolicy
from webhook.core.native import NativeClaim
from webhook.core.proof_claims import claim_spec
from webhook.core.proof_devices import DRIVER
from webhook.core.raw import Raw
from webhook.dra.bind_challenges import BindChallenges
from webhook.dra.claims import AllocatedClaims
from webhook.dra.injections import NodeInjections
from webhook.dra.slices import ProofSlices
from webhook.dra.templates import ClaimTemplates
from webhook.dra.unused_allocations import UnusedAllocations
from webhook.dra.written_slices import WrittenSlices
from webhook.inventory.published_gpus import PublishedGpus
from webhook.kube.api_objects import ApiObjects
from webhook.kube.claim_templates import TEMPLATES_PATH, ApiClaimTemplates
from webhook.kube.client import ApiClient
from webhook.kube.events import Events
from webhook.kube.paths import RESOURCE_CLAIMS_PATH, RESOURCE_SLICES
from webhook.kube.requests import REQUEST_TIMEOUT, RateLimit, RateLimitedClient
from webhook.kube.resource_claims import ResourceClaims
from webhook.kube.view import ListenerGroup
from webhook.kube.watch import Watch, WatchGroup
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import Metrics

# Claims or templates written per second, and at once.
WRITE_RATE, WRITE_BURST = 100.0, 100
# In seconds. The API server writes a template in milliseconds, but it waits for webhooks.
TEMPLATE_TIMEOUT = 3.0


def rate_limited(api: ApiClient, longest: float = REQUEST_TIMEOUT) -> RateLimitedClient:
    return RateLimitedClient(api, RateLimit(WRITE_RATE, WRITE_BURST, time.monotonic), longest)


@frozen
class ClaimedParts:
    """What knows the GPUs of claims and the written proof devices. Its watches are apart: other parts do not wait for
    them."""

    claims: AllocatedClaims
    published: PublishedGpus
    gpus: ClaimedGpus
    unused: UnusedAllocations
    slices: WrittenSlices
    injections: NodeInjections
    # None if claims with a fresh challenge are not served.
    challenges: BindChallenges | None
    watches: WatchGroup
    of_slices: WatchGroup


def claimed_parts(
    settings: Settings,
    api: ApiClient,
    fleet: Fleet,
    watches: WatchGroup,
    events: Events,
    policy_of: Callable[[str], HashPolicy | None],
) -> ClaimedParts | None:
    """None without proof devices. `policy_of` says what an opted-in namespace requires."""
    if not settings.proof_devices:
        return None
    claims, published, of_claims = AllocatedClaims(), PublishedGpus(utc_now), WatchGroup()
    slices, of_slices = WrittenSlices(), WatchGroup()
    of_slices.add(slices_of_driver(api, DRIVER, slices))

    def is_current() -> bool:
        return watches.are_current() and of_claims.are_current()

    gpus = ClaimedGpus(fleet, claims, published, settings.gpu_driver, utc_now, is_current)
    injections = NodeInjections(fleet, utc_now, slices, lambda: is_current() and of_slices.are_current())
    objects = ResourceClaims(rate_limited(api))
    unused = UnusedAllocations(objects, fleet, events, utc_now, is_current, policy_of)
    challenges = BindChallenges(objects, fleet, utc_now, is_current) if settings.challenge_at_bind else None
    listeners = (claims, unused) if challenges is None else (claims, unused, challenges)
    of_claims.add(Watch(api, RESOURCE_CLAIMS_PATH, ListenerGroup(*listeners), trimmed=whole))
    return ClaimedParts(claims, published, gpus, unused, slices, injections, challenges, of_claims, of_slices)


@frozen
class ProofParts:
    """What publishes proof devices. Its watches are apart: other parts do not wait for them."""

    slices: ProofSlices
    # Set when evidence is lost.
    loss: asyncio.Event
    watches: tuple[Watch, ...]


def proof_parts(
    settings: Settings,
    api: ApiClient,
    metrics: Metrics,
    fleet: Fleet,
    watches: WatchGroup,
    writers: ClusterWriters,
    claimed: ClaimedParts,
) -> ProofParts:
    slices = ProofSlices(
        ApiObjects(api, RESOURCE_SLICES),
        fleet,
        claimed.claims,
        utc_now,
        is_current=lambda: watches.are_current() and claimed.of_slices.have_listed(),
        are_claims_current=claimed.watches.are_current,
        gpu_driver=settings.gpu_driver,
        skew=settings.clock_skew,
        count_write=metrics.count_proof_write,
        awaits=writers.awaits,
        challenges=claimed.challenges,
        view=claimed.slices,
    )
    metrics.watch_proofs(slices.counts)
    return ProofParts(slices, asyncio.Event(), (*claimed.watches, *claimed.of_slices))


def tell_loss(slices: ProofSlices, loss: asyncio.Event, node: str) -> None:
    """Begins a pass when proof devices of the node have to end."""
    if slices.is_outlasting(node):
        slices.hurry()
        loss.set()


@frozen
class NativeParts:
    """What native pods need. Its watch is apart: other parts do not wait for it."""

    templates: ClaimTemplates
    # Set when a template is missing.
    asked: asyncio.Event
    watches: WatchGroup


def native_parts(settings: Settings, api: ApiClient, fleet: Fleet, watches: WatchGroup) -> NativeParts:
    def spec_of(claim: NativeClaim) -> Raw:
        return claim_spec(
            claim.count,
            claim.hash,
            gpu_driver=settings.gpu_driver,
            gpu_class=settings.gpu_device_class,
            evicts=settings.on_evidence_lost == OnEvidenceLost.EVICT,
            is_challenged=claim.is_challenged,
        )

    asked, of_templates = asyncio.Event(), WatchGroup()
    templates = ClaimTemplates(
        ApiClaimTemplates(rate_limited(api, TEMPLATE_TIMEOUT)),
        fleet,
        spec_of,
        utc_now,
        is_current=lambda: watches.are_current() and of_templates.are_current(),
        is_opted_in=partial(opted_in, opt_in=settings.opt_in_label),
        wake=asked.set,
        challenges=settings.challenge_at_bind,
    )
    of_templates.add(Watch(api, TEMPLATES_PATH, templates, trimmed=whole))
    return NativeParts(templates, asked, of_templates)
