"""Builds the parts of a server from its settings, with a cluster or without."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import structlog
from attrs import frozen

from webhook.admission.parts import Parts
from webhook.assembly.parts import FleetParts, LocalFleet, embedded, policy_of, show_fleet
from webhook.ledger.pods import PodFacts
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings
from webhook.scheduler.extender import Bindings
from webhook.web.callers import Authority, CallerGate, Reviewers
from webhook.web.health import AtWork

log = structlog.get_logger(__name__)


@frozen
class Assembly:
    """The parts of a server, and the API server's part in authenticating callers and finding pods."""

    parts: Parts
    facts: PodFacts
    authority: Authority | None = None
    bindings: Bindings | None = None
    # Creates the objects that must exist before a pod may be bound.
    prepare: Callable[[], Awaitable[None]] | None = None
    # The Lease of a kube-scheduler in the same Pod.
    scheduler: AtWork | None = None

    def gate(self, settings: Settings) -> CallerGate:
        reviewers = Reviewers(
            settings.review_token_audience, settings.review_callers, with_certificate=settings.client_ca is not None
        )
        show_certificates = settings.extender_client_ca is not None
        return CallerGate(self.parts.clock, self.authority, reviewers, schedulers_use_certificates=show_certificates)


@asynccontextmanager
async def assembled(settings: Settings) -> AsyncIterator[Assembly]:
    """The server that the settings describe."""
    if settings.is_embedded:
        parts = embedded(settings, utc_now)
        yield Assembly(parts, parts.pods)
        return
    from webhook.admission.binding_ends import ensure_binding_ends
    from webhook.assembly.cluster import clustered
    from webhook.kube.api_callers import ApiCallers  # the client takes half a second to import
    from webhook.kube.api_objects import ApiObjects
    from webhook.kube.client import connect
    from webhook.kube.paths import BINDING_ENDS
    from webhook.ledger.api_pods import ApiPods
    from webhook.scheduler.api import ApiBindings
    from webhook.scheduler.profile_lease import scheduler_lease

    async with await connect(settings) as api:
        pods, callers = ApiPods(api), ApiCallers(api)
        lease = None if settings.scheduler_certs is None else scheduler_lease(settings, api)
        if settings.keeps_in_cluster:
            parts = clustered(settings, utc_now, api, pods)
        else:
            log.warning("reservations are in memory and lost at the end of the process: for development only")
            parts = embedded(settings, utc_now)
        if not settings.keeps_in_cluster:
            yield Assembly(parts, pods, callers, scheduler=lease)
            return
        prepare = partial(ensure_binding_ends, ApiObjects(api, BINDING_ENDS))
        yield Assembly(parts, pods, callers, ApiBindings(api), prepare, lease)


@asynccontextmanager
async def watched_fleet(settings: Settings) -> AsyncIterator[FleetParts]:
    """The fleet alone, for a process that decides nothing: of the cluster, or else of the inventory file."""
    if settings.is_embedded:
        parts: FleetParts = LocalFleet.of(settings, utc_now)
        show_fleet(parts, policy_of(settings), utc_now)
        yield parts
        return
    from webhook.assembly.cluster import ClusterParts
    from webhook.kube.client import connect
    from webhook.ledger.api_pods import ApiPods

    async with await connect(settings) as api:
        if settings.keeps_in_cluster:
            parts = ClusterParts.of(settings, utc_now, api, ApiPods(api))
        else:
            parts = LocalFleet.of(settings, utc_now)
        show_fleet(parts, policy_of(settings), utc_now)
        yield parts
