"""The sources of `gpuwarden explain`: a running server, a cluster's API server, or an inventory file."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec
from attrs import field, frozen

from webhook.admission.explanation import CannotExplainError, Explainer
from webhook.admission.parts import Parts
from webhook.admission.reviewer import Reviewer
from webhook.assembly.parts import embedded_dry_run
from webhook.core.errors import GpuwardenError
from webhook.core.raw import Raw
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import Settings
from webhook.runtime.tls.certificate_source import client_context

# A review may take 10 seconds; a scorer may use most of them.
SERVER_TIMEOUT: Final = httpx.Timeout(30.0)
MAX_PROBLEM: Final = 300


class NoAnswerError(GpuwardenError):
    """There is no answer: the source is unreachable, or refuses to answer."""


@frozen
class Credentials:
    """The caller's credentials for a server."""

    token: str | None = field(default=None, repr=False)
    cert: Path | None = None
    key: Path | None = None


class Source(Protocol):
    """Explains pods."""

    name: str

    async def explained(self, raw: Raw) -> Raw:
        """The answer in the format of `POST /explain`. Raises NoAnswerError."""


class ServerSource:
    """A running `gpuwarden serve`. Its answer is authoritative."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.name = f"server {url}"
        self._url = f"{url.rstrip('/')}/explain"
        self._client = client

    async def explained(self, raw: Raw) -> Raw:
        try:
            reply = await self._client.post(self._url, json=raw)
        except (httpx.HTTPError, ValueError) as exc:  # ValueError: a value that JSON does not have
            raise NoAnswerError(f"{self._url}: {str(exc) or type(exc).__name__}") from exc
        if reply.status_code != 200:
            raise NoAnswerError(f"{self._url} answered {reply.status_code}: {problem_in(reply)}")
        return answer_in(reply.content, self._url)


class LocalSource:
    """This process, with its own settings."""

    def __init__(self, name: str, explainer: Explainer) -> None:
        self.name = name
        self._explainer = explainer

    async def explained(self, raw: Raw) -> Raw:
        try:
            content = await self._explainer.explain(raw)
        except CannotExplainError as exc:
            raise NoAnswerError(str(exc)) from exc
        return {**content, "reason": str(content["reason"])}


def problem_in(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"])[:MAX_PROBLEM]
    except (ValueError, KeyError, TypeError):
        return reply.text[:MAX_PROBLEM]


def answer_in(content: bytes, url: str) -> Raw:
    """Every version has `verdict`, `reason`, `message` and `nodes`."""
    try:
        found = msgspec.json.decode(content, type=Raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise NoAnswerError(f"{url} gave an unreadable answer") from exc
    if found.get("verdict") not in ("admit", "deny") or not isinstance(found.get("nodes"), list):
        raise NoAnswerError(f"{url} gave an unreadable answer")
    return found


@asynccontextmanager
async def server_source(url: str, ca: Path | None, credentials: Credentials) -> AsyncIterator[Source]:
    headers = {} if credentials.token is None else {"Authorization": f"Bearer {credentials.token}"}
    context = presenting(client_context(ca), credentials)
    async with httpx.AsyncClient(verify=context, timeout=SERVER_TIMEOUT, trust_env=False, headers=headers) as client:
        yield ServerSource(url, client)


def presenting(context: ssl.SSLContext, credentials: Credentials) -> ssl.SSLContext:
    if credentials.cert is None:
        return context
    try:
        context.load_cert_chain(credentials.cert, credentials.key)
    except (ssl.SSLError, OSError) as exc:
        raise NoAnswerError(f"{credentials.cert}: not a certificate and a key in PEM") from exc
    return context


@asynccontextmanager
async def file_source(settings: Settings) -> AsyncIterator[Source]:
    parts = embedded_dry_run(settings, utc_now)
    await parts.fleet_source.load()
    async with explaining(f"inventory {settings.inventory_file}", parts) as source:
        yield source


@asynccontextmanager
async def explaining(name: str, parts: Parts) -> AsyncIterator[Source]:
    try:
        yield LocalSource(name, Explainer(parts, Reviewer.of(parts)))
    finally:
        if parts.hinting is not None:
            await parts.hinting.close()


# Credentials, and pods of a cluster.


async def kubeconfig_credentials(settings: Settings, context: str | None) -> Credentials:
    """The kubeconfig's credentials for its API server."""
    from webhook.kube.client import connect

    async with await connect(settings, context=context) as api:
        configuration = api.configuration
        token = configuration.api_key.get("BearerToken", "").removeprefix("Bearer ").strip()
        cert, key = configuration.cert_file, configuration.key_file
        return Credentials(token or None, Path(cert) if cert else None, Path(key) if key else None)


async def pod_in_cluster(settings: Settings, context: str | None, namespace: str, name: str) -> Raw:
    """The pod without the fields that were set after its creation. Raises NoAnswerError."""
    from webhook.kube.client import connect
    from webhook.kube.json_objects import object_in
    from webhook.kube.requests import POD_PATH, REQUEST_ERRORS, request_json

    where = f"pod {namespace}/{name}"
    async with await connect(settings, context=context) as api:
        try:
            names = {"namespace": namespace, "name": name}
            status, content = await request_json(api, "GET", POD_PATH, names, seconds=10.0)
        except REQUEST_ERRORS as exc:
            raise NoAnswerError(f"{where}: the API server did not answer: {str(exc) or type(exc).__name__}") from exc
    if status != 200:
        raise NoAnswerError(f"{where}: the API server answered {status}")
    try:
        return as_created(object_in(content))
    except msgspec.DecodeError as exc:
        raise NoAnswerError(f"{where}: the API server's answer cannot be read") from exc


def as_created(raw: Mapping[str, Any]) -> Raw:
    """Keeps the UID, with which the pod's reservation is found."""
    found = raw.get("metadata")
    meta = {key: value for key, value in (found if isinstance(found, dict) else {}).items() if key not in SET_BY_SERVER}
    body = raw.get("spec")
    spec = {key: value for key, value in (body if isinstance(body, dict) else {}).items() if key != "nodeName"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


# Fields of metadata that the API server sets.
SET_BY_SERVER: Final = frozenset({"creationTimestamp", "generation", "managedFields", "resourceVersion", "selfLink"})
