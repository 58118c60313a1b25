"""The connection to the API server. Only the package `kube` imports `kubernetes`."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config import kube_config

from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.core.verdict import plain
from webhook.kube.store import RefusedError, StaleError, StoreUnavailableError
from webhook.runtime.settings import Settings

# Kubernetes mounts a Pod's service account here.
MOUNTED = Path("/var/run/secrets/kubernetes.io/serviceaccount")

# Longer than a busy API server needs, shorter than the timeouts of our callers.
REQUEST_TIMEOUT = 5.0

# kubectl's default.
DEFAULT_KUBECONFIG = Path(kube_config.KUBE_CONFIG_DEFAULT_LOCATION)


# The client library's types, for code outside this package: no other package imports `kubernetes`.
ApiClient = client.ApiClient
__all__ = ["ApiClient", "ApiException"]

Load = Callable[..., Awaitable[None]]
RefreshKey = Callable[[client.Configuration], Awaitable[None]]


class BadCaError(GpuwardenError):
    """The file has no usable CA certificate."""


class BadKubeconfigError(GpuwardenError):
    """The kubeconfig cannot be used."""


class NotInAPodError(GpuwardenError):
    """There is no service account."""


async def connect(settings: Settings, mounted: Path = MOUNTED, *, context: str | None = None) -> client.ApiClient:
    """A client configured by kubeconfig, by the three flags of gpu-device-assigner, or by this Pod's service account.

    `context` selects a context of the kubeconfig; the default is the current one."""
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
    """Raises BadKubeconfigError. On bad files the client library raises various errors of its own code."""
    load: Load = config.load_kube_config
    try:
        await load(str(path), context=context, client_configuration=configuration)
    except (config.ConfigException, yaml.YAMLError, AttributeError, LookupError, OSError, TypeError, ValueError) as exc:
        text = plain(" ".join(str(exc).split()) or repr(exc))
        raise BadKubeconfigError(f"{path} is not a usable kubeconfig: {text}") from exc


def namespace_of_context(path: Path, context: str | None) -> str | None:
    """The context's namespace, which kubectl uses for objects without one."""
    listed: Callable[[str], tuple[list[dict[str, Any]], dict[str, Any]]] = config.list_kube_config_contexts
    contexts, current = listed(str(path))
    found = current if context is None else next((one for one in contexts if one["name"] == context), None)
    text = (found or {}).get("context", {}).get("namespace")
    return text if isinstance(text, str) else None


async def use_service_account(configuration: client.Configuration, host: str | None, mounted: Path) -> None:
    token, ca = mounted / "token", mounted / "ca.crt"
    if host is None:
        raise NotInAPodError("--in-cluster: KUBERNETES_SERVICE_HOST and _PORT are not set, so this is not a Pod")
    missing = [str(path) for path in (token, ca) if not path.is_file()]
    if missing:
        raise NotInAPodError(f"--in-cluster: no service account is mounted here, {' and '.join(missing)} not found")
    await use_token(configuration, host, token, ca)


async def use_token(configuration: client.Configuration, host: str, token: Path, ca: Path | None) -> None:
    configuration.host = host
    configuration.ssl_ca_cert = str(ca)
    refresh = token_reader(token)
    await refresh(configuration)  # the client calls the hook only if there is a token
    vars(configuration)["refresh_api_key_hook"] = refresh


def token_reader(path: Path) -> RefreshKey:
    """Service account tokens are replaced on disk about every hour, so the file is read for every request."""

    async def read(configuration: client.Configuration) -> None:
        token = await asyncio.to_thread(path.read_text)
        configuration.api_key["BearerToken"] = f"Bearer {token.strip()}"

    return read


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Raises StaleError for 409, RefusedError for 422, StoreUnavailableError otherwise. A request without an answer may
    have been carried out."""
    try:
        yield
    except ApiException as exc:
        if exc.status == 409:
            raise StaleError(str(exc.reason)) from exc
        if exc.status == 422:
            raise RefusedError(str(exc.reason)) from exc
        raise StoreUnavailableError(f"the API server answered {exc.status}") from exc
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise StoreUnavailableError("the API server did not answer") from exc


@asynccontextmanager
async def translated_write_errors() -> AsyncIterator[None]:
    """Also raises RefusedError where a retry would be refused again (403, 413, object too large), so that the caller
    tries another node at once."""
    try:
        async with translated_errors():
            yield
    except StoreUnavailableError as exc:
        cause = exc.__cause__
        if isinstance(cause, ApiException) and (cause.status in (403, 413) or is_too_large(cause)):
            raise RefusedError(f"the API server answered {cause.status}: {cause.body or cause.reason}"[:400]) from cause
        raise


def is_too_large(exc: ApiException) -> bool:
    """Whether etcd rejected the object as too large. The API server then answers 500 without a reason or causes: only
    the texts of etcd and its client show it."""
    return exc.status == 500 and any(words in str(exc.body) for words in ("request is too large", "larger than max"))


def as_raw(answer: object, name: str | None = None) -> Raw:
    """The answer, if it is an object (of this name). Raises StoreUnavailableError otherwise."""
    if not isinstance(answer, dict) or not isinstance(answer.get("metadata"), dict):
        raise StoreUnavailableError("the API server answered with something other than an object")
    if name is not None and answer["metadata"].get("name") != name:
        raise StoreUnavailableError("the API server answered with another object")
    return answer
