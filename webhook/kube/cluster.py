"""The connection to the API server. Nobody but this module and those built on it imports `kubernetes`."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import kube_config

from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity, Reservation
from webhook.core.verdict import plain
from webhook.kube.api_paths import GPU_NODES, PODS_PATH
from webhook.kube.calls import LOST, NODE_PATH, POD_PATH, answered
from webhook.kube.objects import object_in
from webhook.kube.watch import TROUBLE, whole_list
from webhook.ledger.carrier import Carrier, Sight, carries_other
from webhook.ledger.cluster import WitnessAwayError
from webhook.ledger.end_of_use import NodeSight
from webhook.ledger.pods import PodsUnavailableError
from webhook.ledger.store import Raw, RefusedError, StaleError, StoreAwayError
from webhook.runtime.settings import Settings
from webhook.web.callers import Caller, CallersUnavailableError, Right

# Where Kubernetes puts a Pod's service account.
MOUNTED = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# Longer than a busy API server needs, shorter than the patience of whoever waits for us.
REQUEST_TIMEOUT = 5.0

# Where kubectl looks too.
DEFAULT_KUBECONFIG = Path(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)

# What the client library raises at an answer that is not what was asked for.
UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError)

Load = Callable[..., Awaitable[None]]
RefreshKey = Callable[[client.Configuration], Awaitable[None]]


class BadCaError(GpuwardenError):
    """Nobody could be trusted by this file."""


class BadKubeconfigError(GpuwardenError):
    """No cluster can be reached by this file."""


class NotInAPodError(GpuwardenError):
    """There is no service account to be used."""


async def connected(settings: Settings, mounted: Path = MOUNTED, *, context: str | None = None) -> client.ApiClient:
    """A client by kubeconfig, by the three flags of S4, or by the service account of the Pod that this is.

    `context` is of the kubeconfig; not named, it is the current one."""
    configuration = client.Configuration()
    if settings.kubeconfig is not None:
        await use_kubeconfig(configuration, settings.kubeconfig, context)
    elif settings.kubernetes_url is not None and settings.access_token is not None:
        await use_token(configuration, settings.kubernetes_url, settings.access_token, settings.ca_certificate)
    elif settings.in_cluster:
        await use_service_account(configuration, settings.api_server_of_pod, mounted)
    try:
        return client.ApiClient(configuration)
    except ssl.SSLError as exc:
        raise BadCaError(f"{configuration.ssl_ca_cert} holds no CA certificate in PEM") from exc
    except OSError as exc:
        raise BadCaError(f"{configuration.ssl_ca_cert} cannot be read: {exc.strerror}") from exc


async def use_kubeconfig(configuration: client.Configuration, path: Path, context: str | None = None) -> None:
    """Whatever is wrong with the file: the client library raises what its own code happens to trip over."""
    load: Load = config.load_kube_config
    try:
        await load(str(path), context=context, client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError, AttributeError, LookupError, OSError, TypeError, ValueError) as exc:
        said = plain(" ".join(str(exc).split()) or repr(exc))
        raise BadKubeconfigError(f"{path} is no kubeconfig that can be used: {said}") from exc


def namespace_of_context(path: Path, context: str | None) -> str | None:
    """Where kubectl would create what names no namespace."""
    listed: Callable[[str], tuple[list[dict[str, Any]], dict[str, Any]]] = config.list_kube_config_contexts
    contexts, current = listed(str(path))
    found = current if context is None else next((one for one in contexts if one["name"] == context), None)
    said = (found or {}).get("context", {}).get("namespace")
    return said if isinstance(said, str) else None


async def use_service_account(configuration: client.Configuration, host: str | None, mounted: Path) -> None:
    token, ca = mounted / "token", mounted / "ca.crt"
    if host is None:
        raise NotInAPodError("--in-cluster: KUBERNETES_SERVICE_HOST and _PORT are not set, so this is no Pod")
    missing = [str(path) for path in (token, ca) if not path.is_file()]
    if missing:
        raise NotInAPodError(f"--in-cluster: no service account is mounted here, {' and '.join(missing)} not found")
    await use_token(configuration, host, token, ca)


async def use_token(configuration: client.Configuration, host: str, token: Path, ca: Path | None) -> None:
    configuration.host = host
    configuration.ssl_ca_cert = str(ca)
    refresh = token_reader(token)
    await refresh(configuration)  # without a first token the client would not ask for the next
    vars(configuration)["refresh_api_key_hook"] = refresh


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


@asynccontextmanager
async def written() -> AsyncIterator[None]:
    """The same of writes that somebody waits for: what the API server would refuse again is refused, not lost, so that
    another node is tried at once."""
    try:
        async with translated():
            yield
    except StoreAwayError as exc:
        cause = exc.__cause__
        if isinstance(cause, ApiException) and (cause.status in (403, 413) or is_too_large(cause)):
            raise RefusedError(f"the API server answered {cause.status}: {cause.body or cause.reason}"[:400]) from cause
        raise


def is_too_large(exc: ApiException) -> bool:
    """What etcd does not take is an error of the API server's own."""
    return exc.status == 500 and any(words in str(exc.body) for words in ("request is too large", "larger than max"))


class ApiGpuNodes:
    """GPUNode objects of the API server, which is the store, the lock and the second lock."""

    def __init__(self, api: client.ApiClient) -> None:
        self._objects = client.CustomObjectsApi(api)

    async def get(self, name: str) -> Raw | None:
        if not is_object_name(name):  # it comes from an annotation, and `..` is the path of something else
            return None
        try:
            async with translated():
                return as_raw(
                    await self._objects.get_cluster_custom_object(*GPU_NODES, name, _request_timeout=REQUEST_TIMEOUT),
                    name,
                )
        except StoreAwayError as exc:
            if isinstance(exc.__cause__, ApiException) and exc.__cause__.status == 404:
                return None
            raise

    async def put(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        async with written():
            return as_raw(
                await self._objects.replace_cluster_custom_object(
                    *GPU_NODES, name, raw, _request_timeout=REQUEST_TIMEOUT
                )
            )

    async def put_status(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        async with written():
            return as_raw(
                await self._objects.replace_cluster_custom_object_status(
                    *GPU_NODES, name, only_status(raw), _request_timeout=REQUEST_TIMEOUT
                )
            )


def only_status(raw: Raw) -> Raw:
    """What such a write is read for. All else, of a node with thousands of GPUs, is more than that."""
    meta = {name: raw["metadata"][name] for name in ("name", "uid", "resourceVersion") if name in raw["metadata"]}
    return {**{name: raw[name] for name in ("apiVersion", "kind", "status") if name in raw}, "metadata": meta}


def as_raw(answer: object, name: str | None = None) -> Raw:
    """The object that was asked for; a list, a Status or another object is no answer."""
    if not isinstance(answer, dict) or not isinstance(answer.get("metadata"), dict):
        raise StoreAwayError("the API server answered with something else than an object")
    if name is not None and answer["metadata"].get("name") != name:
        raise StoreAwayError("the API server answered with something else than that object")
    return answer


class ApiCallers:
    """The API server's word on whose a token is."""

    def __init__(self, api: client.ApiClient) -> None:
        self._reviews = client.AuthenticationV1Api(api)
        self._permissions = client.AuthorizationV1Api(api)

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        """Whose it is; with an audience, only if it was made out for that."""
        user = await self._user_of(token, audience)
        if user is None:
            return None
        extra = {name: tuple(values) for name, values in (user.extra or {}).items()}
        return Caller(user.username or "", user.uid or "", tuple(user.groups or ()), extra)

    async def may(self, caller: Caller, right: Right) -> bool:
        asked = client.V1ResourceAttributes(
            namespace=right.namespace or None,
            verb=right.verb,
            group=right.group or None,
            resource=right.resource,
            subresource=right.subresource or None,
        )
        spec = client.V1SubjectAccessReviewSpec(
            user=caller.user or None,
            groups=list(caller.groups) or None,
            uid=caller.uid or None,
            extra={name: list(values) for name, values in caller.extra.items()} or None,
            resource_attributes=asked,
        )
        review = client.V1SubjectAccessReview(spec=spec)
        try:
            answer = await self._permissions.create_subject_access_review(review, _request_timeout=REQUEST_TIMEOUT)
        except (*LOST, *UNREADABLE) as exc:
            raise CallersUnavailableError("the API server cannot be asked") from exc
        return bool(answer.status and answer.status.allowed)

    async def _user_of(self, token: str, audience: str | None = None) -> client.V1UserInfo | None:
        """Whose it is. Who authenticates tokens and knows nothing of audiences leaves them out of the answer: such a
        token is for the API server, and whoever is shown it there could have sent it here."""
        audiences = None if audience is None else [audience]
        review = client.V1TokenReview(spec=client.V1TokenReviewSpec(token=token, audiences=audiences))
        try:
            answer = await self._reviews.create_token_review(review, _request_timeout=REQUEST_TIMEOUT)
        except (*LOST, *UNREADABLE) as exc:
            raise CallersUnavailableError("the API server cannot be asked") from exc
        status = answer.status
        if not (status and status.authenticated):
            return None
        if audience is not None and audience not in (status.audiences or ()):
            return None
        return status.user or client.V1UserInfo()


def pod_in(body: bytes, namespace: str, name: str) -> Raw:
    """The pod that was asked for: names come from whoever sends reviews, and `..` is the path of something else."""
    try:
        raw = object_in(body)
        meta = raw["metadata"]
        if (raw["kind"], meta["namespace"], meta["name"]) == ("Pod", namespace, name) and meta["uid"]:
            return raw
    except (msgspec.DecodeError, KeyError, TypeError) as exc:
        raise PodsUnavailableError("the API server answered with something else than a pod") from exc
    raise PodsUnavailableError("the API server answered with something else than that pod")


class ApiPods:
    """The pods that the API server has. A read without a version is a quorum read: no cache answers it."""

    believes_reviews = False

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def contradicts(self, pod: PodIdentity, held: Reservation) -> str | None:
        name = f"pod {pod.namespace}/{pod.name}"
        raw = await self._read(pod.namespace, pod.name)
        if raw is None:
            return f"there is no {name}"
        if raw["metadata"]["uid"] != pod.uid:
            return f"{name} has another uid"
        other = carries_other(raw, held)
        return None if other is None else f"{name} {other}"

    def created(self, pod: PodIdentity) -> None:
        """Nothing: a review is no proof that the pod will exist, the watch is."""

    def ended(self, pod: PodIdentity) -> None:
        """Nothing: eviction sends no DELETE review, and a terminating pod still holds its devices."""

    async def uid_of(self, namespace: str, name: str) -> str:
        raw = await self._read(namespace, name)
        return "" if raw is None else str(raw["metadata"]["uid"])

    async def find(self, namespace: str, name: str) -> Pod | None:
        raw = await self._read(namespace, name)
        return None if raw is None else Pod.parse(raw)

    async def _read(self, namespace: str, name: str) -> Raw | None:
        try:
            status, body = await answered(
                self._api, "GET", POD_PATH, {"namespace": namespace, "name": name}, seconds=REQUEST_TIMEOUT
            )
        except LOST as exc:
            raise PodsUnavailableError("the API server cannot be reached") from exc
        if status == 404:
            return None
        if status != 200:
            raise PodsUnavailableError(f"the API server answered {status}")
        return pod_in(body, namespace, name)

    async def carriers(self) -> Sequence[Carrier]:
        return [one for one in map(Carrier.of, await self._all()) if one is not None]

    async def _all(self) -> Collection[Raw]:
        try:
            raws, _ = await whole_list(self._api, PODS_PATH)
        except TROUBLE as exc:
            raise WitnessAwayError("pods cannot be listed") from exc
        return raws.values()

    async def look(self, pod: PodIdentity) -> Sight | None:
        try:
            if pod.name:
                raw = await self._read(pod.namespace, pod.name)
            else:  # written by hand: then only a whole list tells
                raw = next((one for one in await self._all() if one["metadata"].get("uid") == pod.uid), None)
            is_gone = raw is None or raw["metadata"]["uid"] != pod.uid
            return None if raw is None or is_gone else Sight.of(raw)
        except (PodsUnavailableError, msgspec.ValidationError) as exc:
            raise WitnessAwayError(str(exc)) from exc

    async def node(self, name: str) -> NodeSight | None:
        try:
            status, body = await answered(self._api, "GET", NODE_PATH, {"name": name}, seconds=REQUEST_TIMEOUT)
            if status == 404:
                return None
            raw = object_in(body) if status == 200 else {}
            if (raw.get("kind"), raw.get("metadata", {}).get("name")) != ("Node", name):
                raise WitnessAwayError(f"the API server answered {status} with something else than that node")
            return NodeSight.of(raw)
        except (*LOST, msgspec.MsgspecError, AttributeError) as exc:
            raise WitnessAwayError("the node cannot be read") from exc

    async def remove(self, pod: PodIdentity, version: str) -> None:
        names = {"namespace": pod.namespace, "name": pod.name}
        body = {"preconditions": {"uid": pod.uid, "resourceVersion": version}}
        try:
            status, _ = await answered(self._api, "DELETE", POD_PATH, names, body, seconds=REQUEST_TIMEOUT)
        except LOST as exc:
            raise WitnessAwayError("the pod cannot be removed") from exc
        if status >= 400 and status not in (404, 409):  # gone, or another by now
            raise WitnessAwayError("the pod cannot be removed")
