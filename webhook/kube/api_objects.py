"""Our cluster-scoped custom resources. Writes are conditional on the resource version that was read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.kube.client import REQUEST_TIMEOUT, as_raw, translated_errors
from webhook.kube.json_objects import object_in, status_message
from webhook.kube.requests import NODE_PATH, request_json
from webhook.kube.store import RefusedError, StoreUnavailableError

# Enough text to identify the field.
MAX_MESSAGE = 400


class ObjectClient(Protocol):
    """Reads and writes objects of one kind. A refused write was not carried out; one without an answer may have been.

    All methods raise StaleError, RefusedError or StoreUnavailableError.
    """

    async def get(self, name: str) -> Raw | None:
        """The object by a consistent read, not from a cache; None if it does not exist."""

    async def create(self, raw: Raw) -> Raw: ...

    async def replace(self, raw: Raw) -> Raw:
        """Replaces everything but the status."""

    async def replace_status(self, raw: Raw) -> Raw:
        """Replaces only the status."""

    async def delete(self, raw: Raw) -> None:
        """Deletes the object if it is still at this version. No error if it is already gone."""


class NodeExistence(Protocol):
    """Knows which Nodes exist, by consistent reads."""

    async def is_gone(self, name: str) -> bool:
        """Raises StoreUnavailableError."""


class ApiObjects:
    """Objects of one cluster-scoped custom resource."""

    def __init__(self, api: client.ApiClient, kind: tuple[str, str, str]) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._kind = kind

    async def get(self, name: str) -> Raw | None:
        if not is_object_name(name):  # it may come from an annotation; `..` would lead to another path
            return None
        get = self._objects.get_cluster_custom_object
        try:
            async with translated_errors():
                return as_raw(await get(*self._kind, name, _request_timeout=REQUEST_TIMEOUT), name)
        except StoreUnavailableError as exc:
            if is_not_found(exc):
                return None
            raise

    async def create(self, raw: Raw) -> Raw:
        return as_raw(await self._write(self._objects.create_cluster_custom_object, raw))

    async def replace(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        return as_raw(await self._write(self._objects.replace_cluster_custom_object, name, raw))

    async def replace_status(self, raw: Raw) -> Raw:
        name = raw["metadata"]["name"]
        return as_raw(await self._write(self._objects.replace_cluster_custom_object_status, name, raw))

    async def delete(self, raw: Raw) -> None:
        meta = raw["metadata"]
        only = client.V1Preconditions(uid=meta["uid"], resource_version=meta["resourceVersion"])
        try:
            options = client.V1DeleteOptions(preconditions=only)
            await self._write(self._objects.delete_cluster_custom_object, meta["name"], body=options)
        except StoreUnavailableError as exc:
            if not is_not_found(exc):
                raise

    async def _write(self, call: Callable[..., Awaitable[object]], *content: object, **options: object) -> object:
        async with self._write_errors():
            return await call(*self._kind, *content, **options, _request_timeout=REQUEST_TIMEOUT)

    def _write_errors(self) -> AbstractAsyncContextManager[None]:
        return errors_with_message()


class ApiNodes:
    """Checks Nodes in the API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api

    async def is_gone(self, name: str) -> bool:
        return await get_node(self._api, name) is None


async def get_node(api: client.ApiClient, name: str) -> Raw | None:
    """The Node by a consistent read; None if it does not exist. Raises StoreUnavailableError."""
    async with translated_errors():
        status, body = await request_json(api, "GET", NODE_PATH, {"name": name}, seconds=REQUEST_TIMEOUT)
    if status == 404:
        return None
    try:
        return checked_object(status, body, "Node", name)
    except UnexpectedObjectError as exc:
        raise StoreUnavailableError(str(exc)) from exc


class UnexpectedObjectError(GpuwardenError):
    """The answer is not the requested object."""


def checked_object(status: int, body: bytes, kind: str, name: str) -> Raw:
    """The decoded object, if it is the requested one. Names come from webhook callers: `..` would lead to another
    path."""
    try:
        raw = object_in(body)
        is_the_one = (status, raw["kind"], raw["metadata"]["name"]) == (200, kind, name)
    except (msgspec.DecodeError, KeyError, TypeError) as exc:
        raise UnexpectedObjectError(f"the API server answered {status} without a {kind}") from exc
    if not is_the_one:
        raise UnexpectedObjectError(f"the API server answered {status} with another object than that {kind}")
    return raw


def is_not_found(exc: StoreUnavailableError) -> bool:
    return isinstance(exc.__cause__, ApiException) and exc.__cause__.status == 404


@asynccontextmanager
async def errors_with_message() -> AsyncIterator[None]:
    """Adds the API server's message to RefusedError, so that an operator can find the field."""
    try:
        async with translated_errors():
            yield
    except RefusedError as exc:
        if isinstance(exc.__cause__, ApiException):
            raise RefusedError(error_message(exc.__cause__)) from exc
        raise


def error_message(exc: ApiException) -> str:
    body: bytes | str = exc.body or b""
    content = body if isinstance(body, bytes) else str(body).encode()
    return status_message(content, MAX_MESSAGE) or str(exc.reason)
