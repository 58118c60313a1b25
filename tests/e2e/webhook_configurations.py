"""Webhook configurations that lead the API server to a test's own server."""

import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import trustme
from aiohttp import web

from tests.e2e.kube import MUTATING, PODS, VALIDATING, ApiError, Kube, Raw, pod, wait_until

ENABLED = {"gpuwarden.io/enabled": "true"}
POD_RULES = {"apiGroups": [""], "apiVersions": ["v1"], "scope": "Namespaced"}


def at_url(base: str) -> Raw:
    """By URL. The API server uses HTTP/2 on a loopback address."""
    return {"url": base}


def at_service(namespace: str, name: str, port: int) -> Raw:
    """By Service, as in a cluster. The API server uses HTTP/1.1."""
    return {"service": {"namespace": namespace, "name": name, "port": port}}


def client_config(client: Raw, path: str, ca: Path) -> Raw:
    bundle = base64.b64encode(ca.read_bytes()).decode()
    if "url" in client:
        return {"url": client["url"] + path, "caBundle": bundle}
    return {"service": {**client["service"], "path": path}, "caBundle": bundle}


def hook(name: str, client: Raw, path: str, ca: Path, selector: Raw, rules: list[Raw]) -> Raw:
    return {
        "name": name,
        "clientConfig": client_config(client, path, ca),
        "rules": [{**POD_RULES, **rule} for rule in rules],
        "namespaceSelector": {"matchLabels": selector},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "NoneOnDryRun",
        "failurePolicy": "Fail",
        "timeoutSeconds": 10,
    }


MUTATED: list[Raw] = [{"operations": ["CREATE"], "resources": ["pods"]}]
VALIDATED: list[Raw] = [
    {"operations": ["CREATE", "UPDATE", "DELETE"], "resources": ["pods"]},
    {"operations": ["UPDATE"], "resources": ["pods/status", "pods/ephemeralcontainers", "pods/resize"]},
]


@asynccontextmanager
async def reviewed(kube: Kube, namespace: str, client: Raw, ca: Path) -> AsyncIterator[None]:
    """Registers the server for the pods of one namespace while the block runs."""
    selector = {**ENABLED, "kubernetes.io/metadata.name": namespace}
    meta = {"name": f"gpuwarden-{namespace}"}
    mutate = hook("mutate.gpuwarden.io", client, "/mutate", ca, selector, MUTATED)
    validate = hook("validate.gpuwarden.io", client, "/validate", ca, selector, VALIDATED)
    await kube.create(MUTATING, {"metadata": meta, "webhooks": [{**mutate, "reinvocationPolicy": "IfNeeded"}]})
    await kube.create(VALIDATING, {"metadata": meta, "webhooks": [validate]})
    try:
        await wait_until(lambda: is_reviewed(kube, namespace))
        yield
    finally:
        await kube.delete(MUTATING, meta["name"])
        await kube.delete(VALIDATING, meta["name"])


@asynccontextmanager
async def reviewer(directory: Path, answer: Callable[[Raw], Awaitable[Raw]]) -> AsyncIterator[tuple[Raw, Path]]:
    """Runs a webhook at `/review`; yields its client configuration and its CA. `answer` gets the request of a review
    and returns the members of the response, except the UID."""
    ca = trustme.CA()
    trust = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(trust)
    ca.cert_pem.write_to_path(directory / "reviewer.crt")

    async def answered(request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        said = {"uid": asked["uid"], "allowed": True, **await answer(asked)}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": said})

    app = web.Application()
    app.router.add_post("/review", answered)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trust).start()
        yield at_url(f"https://127.0.0.1:{runner.addresses[0][1]}"), directory / "reviewer.crt"
    finally:
        await runner.cleanup()


async def is_reviewed(kube: Kube, namespace: str) -> bool:
    """Whether both webhooks act: the mutating one denies an impossible request, and the validating one a forged
    annotation that the mutating one allows. A new configuration takes effect some milliseconds after it is written."""
    refused = [
        pod("probe", annotations={"gpuwarden.io/gpu-count": "nobody-reads-this"}),
        pod("probe", annotations={"cdi.k8s.io/probe": "nvidia.com/gpu=all"}),
    ]
    for one in refused:
        try:
            await kube.create(PODS, one, namespace, dryRun="All")
        except ApiError as exc:
            if "denied the request" not in exc.message:
                return False
        else:
            return False
    return True


def show_all_gpus(one: Raw) -> list[Raw]:
    env = one["spec"]["containers"][0]["env"]
    number = next(k for k, entry in enumerate(env) if entry["name"] == "NVIDIA_VISIBLE_DEVICES")
    return [{"op": "replace", "path": f"/spec/containers/0/env/{number}/value", "value": "all"}]


@asynccontextmanager
async def another_webhook(
    kube: Kube, namespace: str, directory: Path, change: Callable[[Raw], list[Raw]], policy: str
) -> AsyncIterator[list[str]]:
    """Runs a mutating webhook that is called last; yields the UIDs of its reviews. Under `IfNeeded` it is called again
    if another webhook changes the pod."""
    asked: list[str] = []

    async def answer(review: Raw) -> Raw:
        asked.append(review["uid"])
        patch = base64.b64encode(json.dumps(change(review["object"])).encode()).decode()
        return {"patchType": "JSONPatch", "patch": patch}

    selector = {"kubernetes.io/metadata.name": namespace}
    name = f"zz-{namespace}"  # the API server calls them in the order of their configurations' names
    async with reviewer(directory, answer) as (client, ca):
        one = hook("change.example.test", client, "/review", ca, selector, MUTATED)
        await kube.create(MUTATING, {"metadata": {"name": name}, "webhooks": [{**one, "reinvocationPolicy": policy}]})
        try:
            await wait_until(lambda: is_called(kube, namespace, asked))
            asked.clear()
            yield asked
        finally:
            await kube.delete(MUTATING, name)


async def is_called(kube: Kube, namespace: str, asked: list[str]) -> bool:
    """Also tries a pod without a claim, because a pod with a claim may be denied earlier."""
    for gpus in (1, 0):
        with suppress(ApiError):
            await kube.create(PODS, pod("probe", gpus=gpus), namespace, dryRun="All")
    return bool(asked)
