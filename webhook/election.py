"""One of several processes is elected by a Lease and acts; the others stand by."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from webhook.settings import Settings
from webhook.watch import TROUBLE

log = structlog.get_logger(__name__)

LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD = 15, 10, 2  # seconds, and whole ones: the client's Lease takes no others

Lead = Callable[[], Awaitable[None]]


async def lead_again_and_again(settings: Settings, api: client.ApiClient, lease: str, lead: Lead) -> None:
    """Be elected, lead until the Lease is lost, and stand again. An API server that is away ends a leadership too.

    `lead` runs for ever and is cancelled when the Lease is lost.
    """
    while True:
        leading: list[asyncio.Task[Any]] = []
        try:
            await make_lease(settings, api, lease)
            await election(settings, api, lease, lead, leading).run()
        except TROUBLE as exc:
            log.warning("election interrupted", error=type(exc).__name__)
            await asyncio.sleep(RETRY_PERIOD)
        finally:
            for task in leading:
                task.cancel()


async def make_lease(settings: Settings, api: client.ApiClient, lease: str) -> None:
    """An empty Lease to be held. The client library cannot create one: it sends a parameter that it refuses itself."""
    leases = client.CoordinationV1Api(api)
    body = client.V1Lease(metadata=client.V1ObjectMeta(name=lease), spec=client.V1LeaseSpec())
    try:
        await leases.create_namespaced_lease(settings.lease_namespace, body)
    except ApiException as exc:
        if exc.status != 409:
            raise


def election(
    settings: Settings, api: client.ApiClient, lease: str, lead: Lead, leading: list[asyncio.Task[Any]]
) -> LeaderElection:
    async def begin() -> None:
        task = asyncio.current_task()
        if task is not None:
            leading.append(task)  # the library leaves it running when the API server goes away
        log.info("leading")
        await lead()

    async def follow() -> None:
        log.warning("no longer leading")

    identity = f"{socket.gethostname()}-{os.getpid()}"
    lock: Any = LeaseLock(lease, settings.lease_namespace, identity, api)
    return LeaderElection(Config(lock, LEASE_DURATION, RENEW_DEADLINE, RETRY_PERIOD, begin, follow))
