"""The connection to the API server. Nobody but this module and those built on it imports `kubernetes`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.reservation import PodIdentity
from webhook.ledger.cluster import WitnessAwayError
from webhook.ledger.store import Raw, RefusedError, StaleError, StoreAwayError
from webhook.pods import PodsUnavailableError
from webhook.settings import Settings
from webhook.web.callers import CallersUnavailableError

# Longer than a busy API server needs, shorter than the patience of whoever waits for us.
REQUEST_TIMEOUT = 5.0

GPU_NODES = ("gpuwarden.io", "v1alpha1", "gpunodes")

Load = Callable[..., Awaitable[None]]
RefreshKey = Callable[[client.Configuration], Awaitable[None]]


async def connected(settings: Settings) -> client.ApiClient:
    """A client by kubeconfig, or by the three flags of S4."""
    configuration = client.Configuration()
    if settings.kubeconfig is not None:
        load: Load = config.load_kube_config
        await load(str(settings.kubeconfig), client_configuration=configuration)
    elif settings.kubernetes_url is not None and settings.access_token is not None:
        configuration.host = settings.kubernetes_url
        configuration.ssl_ca_cert = str(settings.ca_certificate)
        refresh = token_reader(settings.access_token)
        await refresh(configuration)  # without a first token the client would not ask for the next
        vars(configuration)["refresh_api_key_hook"] = refresh
    return client.ApiClient(configuration)


def token_reader(path: Path) -> RefreshKey:
    """Service account tokens are replaced on disk about every hour, so the file is read for every request."""

    async def read(configuration: client.Configuration) -> None:
        token = await asyncio.to_thread(path.read_text)
        configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"

    return read


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """The API server's refusals in the ledger's words. A request without an answer may have been carried out."""
    try:
        yield
    except ApiException as exc:
        if exc.status == 409:
            raise StaleError(str(exc.reason)) from exc
        if exc.status == 422:
            raise RefusedError(str(exc.reason)) from exc
        raise StoreAwayError(f"the API server answered {exc.status}") from exc
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise StoreAwayError("the API server did not answer") from exc


class ApiGpuNodes:
    """GPUNode objects of the API server, which is the store, the lock and the second lock."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(api)

    async def get(self, name: str) -> Raw | None:
        try:
            async with translated():
                return as_raw(
                    await self._objects.get_cluster_custom_object(*GPU_NODES, name, _request_timeout=REQUEST_TIMEOUT)
                )
        except StoreAwayError as exc:
            if isinstance(exc.__cause__, ApiException) and exc.__cause__.status == 404:
                return None
            raise

    async def put_status(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        async with translated():
            return as_raw(
                await self._objects.replace_cluster_custom_object_status(
                    *GPU_NODES, name, raw, _request_timeout=REQUEST_TIMEOUT
                )
            )


def as_raw(answer: object) -> Raw:
    if not isinstance(answer, dict):
        raise StoreAwayError("the API server answered with something else than an object")
    return answer


class ApiCallers:
    """The API server's word on whose a token is."""

    def __init__(self, api: client.ApiClient) -> None:
        self._reviews = client.AuthenticationV1Api(api)

    async def is_authentic(self, token: str) -> bool:
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token))
        try:
            answer = await self._reviews.create_token_review(review, _request_timeout=REQUEST_TIMEOUT)
        except (ApiException, aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise CallersUnavailableError("the API server cannot be asked") from exc
        return bool(answer.status and answer.status.authenticated)


class ApiPods:
    """The pods that the API server has. A read without a version is a quorum read: no cache answers it."""

    believes_reviews = False

    def __init__(self, api: client.ApiClient) -> None:
        self._pods = client.CoreV1Api(api)

    async def contradicts(self, pod: PodIdentity) -> str | None:
        name = f"pod {pod.namespace}/{pod.name}"
        uid = await self.uid_of(pod.namespace, pod.name)
        if not uid:
            return f"there is no {name}"
        return None if uid == pod.uid else f"{name} has another uid"

    async def is_gone(self, pod: PodIdentity) -> bool:
        try:
            return await self.uid_of(pod.namespace, pod.name) != pod.uid
        except PodsUnavailableError as exc:
            raise WitnessAwayError(str(exc)) from exc

    def created(self, pod: PodIdentity) -> None:
        """Nothing: a review is no proof that the pod will exist, the watch is."""

    def ended(self, pod: PodIdentity) -> None:
        """Nothing: eviction sends no DELETE review, and a terminating pod still holds its devices."""

    async def uid_of(self, namespace: str, name: str) -> str:
        try:
            found = await self._pods.read_namespaced_pod(name, namespace, _request_timeout=REQUEST_TIMEOUT)
        except ApiException as exc:
            if exc.status == 404:
                return ""
            raise PodsUnavailableError(f"the API server answered {exc.status}") from exc
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise PodsUnavailableError("the API server cannot be reached") from exc
        return (found.metadata.uid if found.metadata else None) or ""
