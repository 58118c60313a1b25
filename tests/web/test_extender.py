"""The routes of the scheduler extender in embedded mode."""

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests import builders
from tests.builders import HASH, NOW, OTHER_HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.core.test_extender_wire import MALFORMED
from tests.web.harness import INVENTORY, Harness
from tests.web.replica import Shared, sharing
from tests.web.test_app import paths
from webhook.core.caller import Caller, CallersUnavailableError, Right
from webhook.scheduler.extender import Extender
from webhook.web.app import extender_app, plain_extender_app
from webhook.web.callers import Authority, CallerGate, bind_pods
from webhook.web.extender import MAX_BODY, ExtenderRoutes
from webhook.web.health import Stage

NAMES = ["node-a", "node-b", "node-c"]
DIFFERS = "attestation hash differs from the required one"
ABSENT = "no attestation evidence for this node"


def of_house(harness: Harness, *, plain: bool = False, authority: Authority | None = None) -> httpx.AsyncClient:
    parts = harness.parts
    gate = CallerGate(parts.clock, authority)
    routes = ExtenderRoutes(Extender(parts, None), parts.metrics, harness.health, gate)
    if plain:
        app = plain_extender_app(routes, harness.health, parts.metrics)
    else:
        app = extender_app(routes, harness.health, parts.metrics, gate)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://extender")


@pytest_asyncio.fixture
async def client(harness: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with of_house(harness) as made:
        yield made


def pod_requiring(*hashes: str, **members: Any) -> Raw:
    annotations = {"attestation-hash.my-company.com/required-hash": ",".join(hashes)} if hashes else {}
    return builders.created(raw_pod(annotations=annotations, **members))


def by_name(pod: Raw, *names: str) -> Raw:
    return {"Pod": pod, "Nodes": None, "NodeNames": list(names)}


def by_object(pod: Raw, *names: str) -> Raw:
    items = [{"metadata": {"name": name, "labels": {"host": name}}, "spec": {}, "status": {}} for name in names]
    return {"Pod": pod, "Nodes": {"metadata": {}, "items": items}, "NodeNames": None}


class Permissions:
    """An API server with the right to bind pods, by user and namespace. The token is the name of the user."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.pairs = pairs
        self.is_away = False

    async def caller_of(self, token: str, audience: str | None = None) -> Caller | None:
        return Caller(token)

    async def may(self, caller: Caller, right: Right) -> bool:
        if self.is_away:
            raise CallersUnavailableError("away")
        return (caller.user, right.namespace) in self.pairs and right == bind_pods(right.namespace)


async def post(client: httpx.AsyncClient, path: str, content: Any) -> Any:
    reply = await client.post(path, json=content)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json"), reply.text
    return reply.json()


@pytest.mark.defect("extender-3")
async def test_filter_answers_names_with_names_and_nodes_with_nodes(client: httpx.AsyncClient) -> None:
    refused = {"node-b": f"{DIFFERS} (gpuwarden: NoProvenNode)", "node-c": f"{ABSENT} (gpuwarden: NoProvenNode)"}
    assert await post(client, "/filter", by_name(pod_requiring(HASH), *NAMES)) == {
        "Nodes": None,
        "NodeNames": ["node-a"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": refused,
        "Error": "",
    }
    args = by_object(pod_requiring(HASH), *NAMES)
    assert await post(client, "/filter", args) == {
        "Nodes": {"metadata": {}, "items": args["Nodes"]["items"][:1]},
        "NodeNames": None,
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": refused,
        "Error": "",
    }


@pytest.mark.defect("extender-4")
async def test_pod_without_a_claim_passes_all_nodes(client: httpx.AsyncClient) -> None:
    names = ["node-c", "node-nowhere", "node-a"]
    for pod in (pod_requiring(), builders.created(raw_pod(raw_container(gpus=1)))):
        answer = await post(client, "/filter", by_name(pod, *names))
        assert (answer["NodeNames"], answer["FailedAndUnresolvableNodes"], answer["Error"]) == (names, {}, "")
        args = by_object(pod, *names)
        assert (await post(client, "/filter", args))["Nodes"]["items"] == args["Nodes"]["items"]


async def test_scores_have_the_order_of_the_request(client: httpx.AsyncClient) -> None:
    for form in (by_name, by_object):
        answer = await post(client, "/prioritize", form(pod_requiring(OTHER_HASH), *NAMES))
        assert answer == [
            {"Host": "node-a", "Score": 0},
            {"Host": "node-b", "Score": 10},
            {"Host": "node-c", "Score": 0},
        ]


@pytest.mark.defect("extender-5")
async def test_preempt_drops_nodes_that_cannot_fit_the_pod(harness: Harness, client: httpx.AsyncClient) -> None:
    victims = {name: {"Pods": [{"UID": f"uid-{name}"}], "NumPDBViolations": 0} for name in NAMES}
    pod = pod_requiring(HASH)
    args = {"Pod": pod, "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}
    only_a = {"NodeNameToMetaVictims": {"node-a": victims["node-a"]}}
    assert await post(client, "/preempt", args) == only_a
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    for n in range(2):
        await harness.create(raw_pod(raw_container(gpus=1), name=f"other-{n}", nodeName="node-a"), f"r{n}", f"u{n}")
    assert list((await post(client, "/filter", by_name(pod, *NAMES)))["FailedNodes"]) == ["node-a"]
    assert await post(client, "/preempt", args) == only_a
    pod["metadata"]["annotations"] = {"gpuwarden.io/claim": "[]"}
    assert await post(client, "/preempt", args) == {"NodeNameToMetaVictims": {}}
    assert (await post(client, "/preempt", {**args, "Pod": pod_requiring()}))["NodeNameToMetaVictims"] == victims


@pytest.mark.defect("extender-1")
async def test_filter_uses_changed_evidence(harness: Harness, client: httpx.AsyncClient) -> None:
    async def passed() -> list[str]:
        return list((await post(client, "/filter", by_name(pod_requiring(HASH), *NAMES)))["NodeNames"])

    assert await passed() == ["node-a"]
    nodes = [{**node, "evidence": {"hash": HASH}} for node in INVENTORY["nodes"]]
    harness.file.write_text(json.dumps({"nodes": nodes}))
    await harness.fleet_source.refresh()
    assert await passed() == NAMES
    harness.file.write_text(json.dumps({"nodes": [{**nodes[1], "evidence": {"hash": OTHER_HASH}}]}))
    await harness.fleet_source.refresh()
    assert await passed() == []


@pytest.mark.defect("extender-2")
async def test_filter_refuses_a_node_at_the_second_its_evidence_expires(build: Build) -> None:
    (first, *others) = INVENTORY["nodes"]
    until = (NOW + timedelta(seconds=60)).isoformat()
    harness = await build({"nodes": [{**first, "evidence": {"hash": HASH, "until": until}}, *others]})
    async with of_house(harness) as client:
        for wait, names in ((59, ["node-a"]), (1, [])):
            harness.wait(wait)
            assert (await post(client, "/filter", by_name(pod_requiring(HASH), "node-a")))["NodeNames"] == names


async def test_filter_knows_nodes_of_the_hash_map_without_an_inventory(build: Build) -> None:
    """The Blind GPU Scheduler is configured like this: with a hash map, but without an inventory of the nodes."""
    harness = await build(node_hash_map={"kind-worker": "abc123", "node-a": HASH})
    async with of_house(harness) as client:
        pod = pod_requiring("abc123")
        answer = await post(client, "/filter", by_name(pod, "kind-worker", "node-a", "kind-control-plane"))
        assert answer["NodeNames"] == ["kind-worker"]
        pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        assert (await post(client, "/filter", by_name(pod, "kind-worker")))["NodeNames"] == ["kind-worker"]


async def test_bind_is_refused_in_embedded_mode(client: httpx.AsyncClient) -> None:
    binding = {"PodName": "train-0", "PodNamespace": "ml", "PodUID": builders.POD_UID, "Node": "node-a"}
    assert (await post(client, "/bind", binding))["Error"].startswith("gpuwarden runs without a cluster")


@pytest.mark.defect("extender-8")
@pytest.mark.parametrize("body", MALFORMED)
async def test_malformed_args_are_refused_with_400_in_json(client: httpx.AsyncClient, body: bytes) -> None:
    for path in ("/filter", "/prioritize", "/bind"):
        reply = await client.post(path, content=body)
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        assert list(reply.json()) == ["Error"]
        assert reply.json()["Error"]


def full_args() -> Raw:
    """Arguments with a value in every field that the extender reads."""
    pod = pod_requiring(
        HASH,
        labels={"gpuwarden.io/gpu.model": "h100"},
        nodeSelector={"zone": "a"},
        tolerations=[{"key": "a", "operator": "Exists"}],
        affinity=builders.required_affinity(builders.term(builders.expression("zone", "In", "a"))),
    )
    return {**by_object(pod, "node-a"), "NodeNames": ["node-a"], "NodeNameToMetaVictims": {"node-a": {"Pods": []}}}


def with_value(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = with_value(value[path[0]], path[1:], junk)
    return copy


@pytest.mark.defect("extender-8")
@pytest.mark.parametrize("path", paths(full_args()), ids=str)
async def test_invalid_value_in_any_field_never_causes_an_internal_error(
    client: httpx.AsyncClient, path: tuple[Any, ...]
) -> None:
    junk: Any
    for junk in (None, 5, -1.5, "", "\ud800", True, [], {}, [None], {"": None}, [[]], {"a": {"b": 10**400}}):
        body = json.dumps(with_value(full_args(), path, junk))
        for verb in ("/filter", "/prioritize", "/preempt"):
            reply = await client.post(verb, content=body)
            assert reply.status_code in (200, 400), (verb, junk, reply.text)
            assert reply.headers["content-type"] == "application/json"
            assert reply.status_code == 200 or reply.json()["Error"]


@pytest.mark.defect("extender-8")
@pytest.mark.parametrize("size", [MAX_BODY + 1, 50_000_000])
async def test_body_over_the_limit_is_refused_and_the_next_request_is_answered(
    client: httpx.AsyncClient, size: int
) -> None:
    reply = await client.post("/filter", content=b" " * size)
    assert (reply.status_code, reply.headers["content-type"]) == (413, "application/json")
    assert reply.json() == {"Error": f"the body is larger than {MAX_BODY} bytes"}
    assert (await post(client, "/filter", by_name(pod_requiring(HASH), *NAMES)))["NodeNames"] == ["node-a"]


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.DRAINING])
async def test_extender_answers_503_while_the_server_is_not_serving(
    harness: Harness, client: httpx.AsyncClient, stage: Stage
) -> None:
    harness.health.stage = stage
    for path in ("/filter", "/prioritize", "/preempt", "/bind"):
        reply = await client.post(path, json=by_name(pod_requiring(), *NAMES))
        assert (reply.status_code, reply.json()) == (503, {"Error": f"the server is {stage}"})


async def test_filter_answers_an_error_while_reservations_cannot_be_read(build: Build) -> None:
    shared = Shared()
    first, second = await build(assemble=sharing(shared)), await build(assemble=sharing(shared))
    final = await first.create(raw_pod(raw_container(gpus=1)))
    async with of_house(second) as client:
        with shared.store.away():
            answer = await post(client, "/filter", by_name(final, *NAMES))
            assert answer["Error"] == "reservations cannot be looked up at this moment"
            assert (answer["NodeNames"], answer["Nodes"]) == (None, None)
            assert (await client.post("/prioritize", json=by_name(final, *NAMES))).status_code == 503
        assert len((await post(client, "/filter", by_name(final, *NAMES)))["NodeNames"]) == 1


@pytest.mark.defect("extender-8")
async def test_extender_answers_are_counted(harness: Harness, client: httpx.AsyncClient) -> None:
    await post(client, "/filter", by_name(pod_requiring(HASH), *NAMES))
    await post(client, "/filter", by_name(pod_requiring("nobody has it"[:6]), *NAMES))
    await post(client, "/prioritize", by_name(pod_requiring(HASH), *NAMES))
    text = (await harness.plain.get("/metrics")).text
    for line in (
        'gpuwarden_extender_duration_seconds_count{outcome="passed",verb="filter"} 1.0',
        'gpuwarden_extender_duration_seconds_count{outcome="refused",verb="filter"} 1.0',
        'gpuwarden_extender_duration_seconds_count{outcome="passed",verb="prioritize"} 1.0',
        'gpuwarden_extender_nodes_total{answer="passed"} 1.0',
        f'gpuwarden_extender_nodes_total{{answer="{DIFFERS}"}} 3.0',
        f'gpuwarden_extender_nodes_total{{answer="{ABSENT}"}} 2.0',
        'gpuwarden_http_requests_total{route="/filter",status="200"} 2.0',
    ):
        assert line in text


async def test_plain_listener_has_the_two_routes_of_the_extender(harness: Harness) -> None:
    async with of_house(harness, plain=True) as client:
        assert (await post(client, "/filter", by_name(pod_requiring(HASH), *NAMES)))["NodeNames"] == ["node-a"]
        health = await client.get("/healthz")
        assert (health.status_code, health.text) == (200, "ok")
        for path in ("/bind", "/prioritize"):
            assert (await client.post(path, json={})).status_code == 404
        assert (await client.get("/filter")).status_code == 405


@pytest.mark.parametrize(
    ("token", "namespace", "problem"),
    [
        pytest.param("jane", "ml", "gpuwarden runs without a cluster", id="allowed"),
        pytest.param("jane", "other", "the user of the token must", id="other-namespace"),
        pytest.param("joe", "ml", "the user of the token must", id="other-user"),
    ],
)
async def test_bind_needs_the_right_to_bind_in_the_pod_namespace(
    harness: Harness, token: str, namespace: str, problem: str
) -> None:
    permissions = Permissions(("jane", "ml"))
    binding = {"PodName": "p", "PodNamespace": namespace, "PodUID": "u", "Node": "node-a"}
    async with of_house(harness, authority=permissions) as client:
        client.headers["Authorization"] = f"Bearer {token}"
        assert (await post(client, "/bind", binding))["Error"].startswith(problem)
        permissions.is_away = True
        away = {**binding, "PodNamespace": "uncached"}
        assert (await client.post("/bind", json=away)).status_code == 503


async def test_large_requests_need_the_right_to_bind_all_pods(harness: Harness) -> None:
    args = by_name(pod_requiring(HASH), *NAMES, *(f"node-{number}" for number in range(10_000)))
    namespace = args["Pod"]["metadata"]["namespace"]
    permissions = Permissions(("jane", namespace), ("scheduler", namespace), ("scheduler", ""))
    async with of_house(harness, authority=permissions) as client:
        for token, code in (("jane", 413), ("scheduler", 200)):
            reply = await client.post("/filter", json=args, headers={"Authorization": f"Bearer {token}"})
            assert reply.status_code == code


@pytest.mark.parametrize("path", ["/filter", "/prioritize", "/preempt"])
async def test_requests_need_the_right_to_bind_the_pod(harness: Harness, path: str) -> None:
    args = {**by_name(pod_requiring(HASH), *NAMES), "NodeNameToMetaVictims": {}}
    namespace = args["Pod"]["metadata"]["namespace"]
    async with of_house(harness, authority=Permissions(("jane", namespace))) as client:
        assert (await client.post(path, json=args)).status_code == 401
        refused = await client.post(path, json=args, headers={"Authorization": "Bearer joe"})
        assert (refused.status_code, HASH in refused.text) == (403, False)
        answered = await client.post(path, json=args, headers={"Authorization": "Bearer jane"})
        assert answered.status_code == 200
