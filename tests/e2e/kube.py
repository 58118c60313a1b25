"""A thin client of the API server for tests, and the objects they create. JSON goes in and out as it is on the wire."""

import asyncio
import base64
import json
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from attrs import frozen

Raw = dict[str, Any]
Changes = list[dict[str, Any]]
Query = Mapping[str, str] | None
Found = TypeVar("Found")

# For a busy machine; usually the value is there much earlier.
PATIENCE = 30.0
PATCH_KINDS = {True: "application/merge-patch+json", False: "application/json-patch+json"}


@frozen
class Resource:
    """The API path of one kind of objects."""

    root: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        place = f"namespaces/{namespace}" if self.is_namespaced and namespace else ""
        return "/" + "/".join(part for part in (self.root, place, self.plural, name, subresource) if part)


NAMESPACES = Resource("api/v1", "namespaces", is_namespaced=False)
NODES = Resource("api/v1", "nodes", is_namespaced=False)
PODS = Resource("api/v1", "pods")
SERVICES = Resource("api/v1", "services")
EVENTS = Resource("api/v1", "events")
CONFIG_MAPS = Resource("api/v1", "configmaps")
SERVICE_ACCOUNTS = Resource("api/v1", "serviceaccounts")
CLAIMS = Resource("api/v1", "persistentvolumeclaims")
VOLUMES = Resource("api/v1", "persistentvolumes", is_namespaced=False)
STORAGE_CLASSES = Resource("apis/storage.k8s.io/v1", "storageclasses", is_namespaced=False)
RESOURCE_QUOTAS = Resource("api/v1", "resourcequotas")
DEPLOYMENTS = Resource("apis/apps/v1", "deployments")
STATEFUL_SETS = Resource("apis/apps/v1", "statefulsets")
JOBS = Resource("apis/batch/v1", "jobs")
ROLES = Resource("apis/rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDINGS = Resource("apis/rbac.authorization.k8s.io/v1", "rolebindings")
CLUSTER_ROLES = Resource("apis/rbac.authorization.k8s.io/v1", "clusterroles", is_namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource("apis/rbac.authorization.k8s.io/v1", "clusterrolebindings", is_namespaced=False)
MUTATING = Resource("apis/admissionregistration.k8s.io/v1", "mutatingwebhookconfigurations", is_namespaced=False)
VALIDATING = Resource("apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations", is_namespaced=False)
SUBJECT_REVIEWS = Resource("apis/authorization.k8s.io/v1", "subjectaccessreviews", is_namespaced=False)


class ApiError(Exception):
    """An error answer of the API server, with its Status."""

    def __init__(self, status: int, said: Raw) -> None:
        super().__init__(f"{status} {said.get('reason')}: {said.get('message')}")
        self.status = status
        self.said = said

    @property
    def reason(self) -> str:
        return str(self.said.get("reason", ""))

    @property
    def message(self) -> str:
        return str(self.said.get("message", ""))


class Kube:
    """A client of the API server with the user of a kubeconfig."""

    def __init__(self, kubeconfig: Path, *, timeout: float = PATIENCE) -> None:
        content = json.loads(kubeconfig.read_text())
        cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
        token = user.get("token")
        self.url: str = cluster["server"]
        self.http = httpx.AsyncClient(
            base_url=self.url,
            verify=trust_of(cluster, user),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout,
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=256),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def get(self, of: Resource, name: str, namespace: str | None = None) -> Raw:
        return await self.call("GET", of.path(namespace, name))

    async def find(self, of: Resource, name: str, namespace: str | None = None) -> Raw | None:
        """The object, or None if it does not exist."""
        try:
            return await self.get(of, name, namespace)
        except ApiError as exc:
            if exc.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def list(self, of: Resource, namespace: str | None = None, **selectors: str) -> list[Raw]:
        return list((await self.call("GET", of.path(namespace), query=selectors))["items"])

    async def create(self, of: Resource, content: Raw, namespace: str | None = None, **options: str) -> Raw:
        return await self.call("POST", of.path(namespace), content, options)

    async def post(self, of: Resource, name: str, subresource: str, content: Raw, namespace: str | None = None) -> Raw:
        """Creates at a subresource: binding, token, eviction."""
        return await self.call("POST", of.path(namespace, name, subresource), content)

    async def replace(self, of: Resource, content: Raw, namespace: str | None = None, subresource: str = "") -> Raw:
        return await self.call("PUT", of.path(namespace, content["metadata"]["name"], subresource), content)

    async def patch(
        self,
        of: Resource,
        name: str,
        content: Raw | Changes,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Raw:
        """A merge patch, where null removes a member; or a list of JSON patch operations."""
        return await self.call("PATCH", of.path(namespace, name, subresource), content)

    async def delete(self, of: Resource, name: str, namespace: str | None = None, grace: int | None = None) -> Raw:
        """Like `kubectl delete`: dependents are collected in the background."""
        options: Raw = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        return await self.call("DELETE", of.path(namespace, name), options)

    async def watch(self, of: Resource, namespace: str | None = None, **options: str) -> AsyncIterator[Raw]:
        """Events until the server ends the watch."""
        query = {"watch": "true", **options}
        async with self.http.stream(
            "GET", of.path(namespace), params=query, timeout=httpx.Timeout(10, read=None)
        ) as got:
            if got.is_error:
                raise ApiError(got.status_code, json.loads(await got.aread()))
            async for line in got.aiter_lines():
                yield json.loads(line)

    async def call(self, method: str, path: str, content: Raw | Changes | None = None, query: Query = None) -> Raw:
        kind = "application/json" if method != "PATCH" else PATCH_KINDS[isinstance(content, dict)]
        # Compact, as other clients write it: the API server keeps the parameters of a ResourceClaim's configuration as
        # they are written, and takes a later PATCH, which it writes compactly, for a change of the immutable spec.
        body = None if content is None else json.dumps(content, separators=(",", ":"))
        got = await self.http.request(method, path, content=body, params=query, headers={"Content-Type": kind})
        said: Raw = json.loads(got.content) if "json" in got.headers.get("content-type", "") else {"message": got.text}
        if got.is_error:
            raise ApiError(got.status_code, said)
        return said


def trust_of(cluster: Mapping[str, str], user: Mapping[str, str]) -> ssl.SSLContext:
    trust = ssl.create_default_context(cadata=decoded(cluster["certificate-authority-data"]).decode())
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as file:  # the ssl module reads keys from files only
            file.write(decoded(user["client-certificate-data"]) + decoded(user["client-key-data"]))
            file.flush()
            trust.load_cert_chain(file.name)
    return trust


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


class NotInTimeError(AssertionError):
    """A wait ran out of time: the one failure that an overloaded machine can cause by itself."""


async def wait_until(
    look: Callable[[], Awaitable[Found]], is_right: Callable[[Found], object] = bool, seconds: float = PATIENCE
) -> Found:
    """Polls until a value is right and returns it. The failure shows the last value."""
    until = time.monotonic() + seconds
    while not is_right(seen := await look()):
        if time.monotonic() > until:
            raise NotInTimeError(f"not within {seconds} s; last seen: {json.dumps(seen, default=str)[:3000]}")
        await asyncio.sleep(0.05)
    return seen


async def access_granted(kube: Kube, subject: Raw, rules: list[Raw], namespace: str | None = None) -> None:
    """Waits until new permissions apply: the API server reads roles by watch. Asks for the first verb and resource of
    each rule."""
    user = subject["name"]
    if subject["kind"] == "ServiceAccount":
        user = f"system:serviceaccount:{subject['namespace']}:{user}"
    for rule in rules:
        resource, _, subresource = rule["resources"][0].partition("/")
        asked = {"group": rule["apiGroups"][0], "verb": rule["verbs"][0], "resource": resource}
        asked |= {"subresource": subresource, "namespace": namespace or ""}
        review = {"spec": {"user": user, "resourceAttributes": asked}}
        await wait_until(partial(kube.create, SUBJECT_REVIEWS, review), lambda said: said["status"]["allowed"])


async def pod_in_phase(kube: Kube, namespace: str, name: str, phase: str, seconds: float = PATIENCE) -> Raw:
    return await wait_until(
        lambda: kube.get(PODS, name, namespace), lambda pod: pod["status"]["phase"] == phase, seconds
    )


async def pods_in_phase(kube: Kube, namespace: str, count: int, phase: str, **selectors: str) -> list[Raw]:
    """All pods of the namespace, once there are `count` and all are in the phase."""
    return await wait_until(
        lambda: kube.list(PODS, namespace, **selectors),
        lambda pods: len(pods) == count and all(pod["status"]["phase"] == phase for pod in pods),
    )


async def gone(kube: Kube, of: Resource, name: str, namespace: str | None = None, seconds: float = PATIENCE) -> None:
    await wait_until(lambda: kube.find(of, name, namespace), lambda found: found is None, seconds)


async def delete_without_finalizers(kube: Kube, of: Resource, name: str) -> None:
    """Deletes the object and removes its finalizers: no finalizer is added to an object that is being deleted."""
    await kube.delete(of, name)
    with suppress(ApiError):
        await kube.patch(of, name, {"metadata": {"finalizers": None}})
    await gone(kube, of, name)


# Builders of objects: a test gives only what it is about.


def pod_spec(gpus: int = 0, **spec: Any) -> Raw:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {}
    return {"containers": [{"name": "main", "image": "example.test/main:1", "resources": resources}], **spec}


def pod(name: str | None = None, gpus: int = 0, annotations: Mapping[str, str] | None = None, **spec: Any) -> Raw:
    """Without a name, the API server generates one."""
    meta: Raw = {"name": name} if name else {"generateName": "train-"}
    meta["annotations"] = dict(annotations or {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec(gpus, **spec)}


def template(app: str, gpus: int, annotations: Mapping[str, str] | None, **spec: Any) -> Raw:
    return {
        "metadata": {"labels": {"app": app}, "annotations": dict(annotations or {})},
        "spec": pod_spec(gpus, **spec),
    }


def deployment(name: str, replicas: int, gpus: int = 0, annotations: Mapping[str, str] | None = None) -> Raw:
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": template(name, gpus, annotations),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def stateful_set(name: str, replicas: int, gpus: int = 0, annotations: Mapping[str, str] | None = None) -> Raw:
    spec = {
        "replicas": replicas,
        "serviceName": name,
        "selector": {"matchLabels": {"app": name}},
        "template": template(name, gpus, annotations),
    }
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}


def job(name: str, pods: int = 1, gpus: int = 0, annotations: Mapping[str, str] | None = None, **spec: Any) -> Raw:
    content = template(name, gpus, annotations, restartPolicy="Never")
    whole = {"completions": pods, "parallelism": pods, "template": content, **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": whole}
