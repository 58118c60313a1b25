"""The required hash of a namespace in all reviews: the requirement at the creation of a pod stays in force for it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from tests import builders
from tests.admission.test_namespaces import KEY, Api, namespace
from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.scheduler.bindings import FakeBindings
from tests.web.harness import INVENTORY, Assemble, Harness, patched
from tests.web.replica import Shared, binding, sharing
from tests.web.test_admission import pinned_nodes, refusal
from tests.web.test_extender import by_name, of_house
from webhook.admission.namespaces import ClaimReader, WatchedNamespaces
from webhook.admission.parts import Parts
from webhook.assembly.parts import embedded
from webhook.core.extender_wire import ExtenderArgs, OfferedNodes
from webhook.core.pod import Pod
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.scheduler.extender import NAMESPACE_AWAY, Extender

THIRD = "sha256:cc33"


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def namespaces(api: Api) -> WatchedNamespaces:
    return WatchedNamespaces(api)


def with_namespaces(namespaces: WatchedNamespaces, otherwise: Assemble = embedded) -> Assemble:
    def assemble(settings: Settings, clock: Clock) -> Parts:
        parts = otherwise(settings, clock)
        return evolve(parts, rules=evolve(parts.rules, claims=ClaimReader(parts.rules.claims.rules, namespaces)))

    return assemble


@pytest.fixture
async def harness(build: Build, namespaces: WatchedNamespaces) -> Harness:
    return await build(assemble=with_namespaces(namespaces))


def require(namespaces: WatchedNamespaces, required: str | None, version: int = 1) -> None:
    namespaces.view.changed(namespace("ml", required, version))


def pod_requiring(*hashes: str, gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container(gpus=gpus), annotations={KEY: ",".join(hashes)} if hashes else {}, **members)


def claim_record(raw: Raw) -> Raw:
    record: Raw = json.loads(raw["metadata"]["annotations"]["gpuwarden.io/claim"])
    return record


async def test_pod_without_a_hash_gets_a_node_with_the_hash_of_its_namespace(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    require(namespaces, OTHER_HASH)
    final = await harness.create(pod_requiring())
    assert pinned_nodes(final) == ["node-b"]
    assert claim_record(final)["hashes"] == [OTHER_HASH]
    assert refusal(await harness.mutate(pod_requiring(), "another")) == (429, "NoFreeDevice")


async def test_pod_may_narrow_the_hashes_of_its_namespace(harness: Harness, namespaces: WatchedNamespaces) -> None:
    require(namespaces, f"{HASH},{OTHER_HASH}")
    narrowed = await harness.create(pod_requiring(OTHER_HASH, THIRD))
    assert pinned_nodes(narrowed) == ["node-b"]
    assert claim_record(narrowed)["hashes"] == [OTHER_HASH]


async def test_pod_may_not_widen_the_hashes_of_its_namespace(harness: Harness, namespaces: WatchedNamespaces) -> None:
    require(namespaces, HASH)
    refused = await harness.mutate(pod_requiring(OTHER_HASH))
    assert refusal(refused) == (403, "InvalidPod")
    assert f"asks for {OTHER_HASH}, but namespace ml allows only {HASH}" in refused["status"]["message"]
    assert harness.held == []


async def test_malformed_namespace_annotation_denies_all_claims(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    require(namespaces, f"{HASH},,")
    for raw in (pod_requiring(), pod_requiring(HASH), pod_requiring(HASH, gpus=0)):
        refused = await harness.mutate(raw)
        assert refusal(refused) == (403, "InvalidPod")
        assert refused["status"]["message"].startswith(f"namespace ml: its annotation {KEY} has an empty hash")
    assert (await harness.mutate(raw_pod()))["allowed"]


async def test_unknown_namespace_is_read_from_the_api_server_or_the_pod_is_denied(harness: Harness, api: Api) -> None:
    api.there["ml"] = namespace("ml", OTHER_HASH)
    assert pinned_nodes(await harness.dress(pod_requiring())) == ["node-b"]
    api.is_away = True
    for path in (
        harness.mutate(pod_requiring(), "another"),
        harness.validate(builders.validating_create(pod_requiring())),
    ):
        refused = await path
        assert refusal(refused) == (503, "LedgerAway")
        assert "namespace ml" in refused["status"]["message"]


async def test_requirement_does_not_affect_other_namespaces(harness: Harness, namespaces: WatchedNamespaces) -> None:
    namespaces.view.replaced({"/ml": namespace("ml"), "/other": namespace("other", THIRD)})
    assert pinned_nodes(await harness.dress(pod_requiring())) != []


# Changes of the requirement between two reviews of a pod.


async def test_reservation_made_under_the_former_requirement_stays_valid(
    harness: Harness, namespaces: WatchedNamespaces
) -> None:
    require(namespaces, OTHER_HASH)
    dressed = await harness.dress(pod_requiring())
    require(namespaces, HASH, version=2)
    again = await harness.mutate(dressed, "another-review")
    assert patched(dressed, again) == dressed
    assert (await harness.validate(builders.validating_create(dressed)))["allowed"]


@pytest.mark.parametrize(
    ("former", "latter", "is_let_in"),
    [(HASH, None, True), (HASH, f"{HASH},{OTHER_HASH}", True), (None, HASH, False), (HASH, OTHER_HASH, False)],
    ids=["removed", "widened", "new", "changed"],
)
async def test_unknown_claim_record_is_valid_while_it_satisfies_the_namespace(
    harness: Harness, namespaces: WatchedNamespaces, former: str | None, latter: str | None, *, is_let_in: bool
) -> None:
    require(namespaces, former)
    own = (HASH, OTHER_HASH)
    dressed = await harness.dress(pod_requiring(*own, gpus=0))
    require(namespaces, latter, version=2)
    answer = await harness.validate(builders.validating_create(dressed))
    assert answer["allowed"] is is_let_in
    if not is_let_in:
        assert refusal(answer) == (403, "Forged")
        assert "the required hash of its namespace has changed" in answer["status"]["message"]


# Pods that no review has dressed.


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def replica(build: Build, shared: Shared, namespaces: WatchedNamespaces) -> Harness:
    return await build(assemble=with_namespaces(namespaces, sharing(shared)))


async def passed(replica: Harness, shared: Shared, raw: Raw) -> list[str]:
    offer = ExtenderArgs(Pod.parse(raw), OfferedNodes(("node-a", "node-b", "node-c")))
    return list((await Extender(replica.parts, FakeBindings(shared)).filter(offer)).passed)


@pytest.mark.parametrize(
    ("own", "record", "nodes"),
    [
        pytest.param((), None, ["node-a"], id="no-hash"),
        pytest.param((HASH, OTHER_HASH), None, ["node-a"], id="wider-than-the-namespace"),
        pytest.param((OTHER_HASH,), None, [], id="other-hash"),
        pytest.param((), "{}", ["node-a"], id="empty-claim-record"),
        pytest.param((), f'{{"hashes":["{OTHER_HASH}"]}}', [], id="claim-record-with-other-hash"),
    ],
)
async def test_filter_passes_nodes_with_a_hash_of_the_namespace(
    replica: Harness,
    shared: Shared,
    namespaces: WatchedNamespaces,
    own: tuple[str, ...],
    record: str | None,
    nodes: list[str],
) -> None:
    require(namespaces, HASH)
    raw = builders.created(pod_requiring(*own))
    if record is not None:
        raw["metadata"]["annotations"] = {**raw["metadata"]["annotations"], "gpuwarden.io/claim": record}
    assert await passed(replica, shared, raw) == nodes


async def test_undressed_pod_is_bound_only_to_nodes_with_a_hash_of_its_namespace(
    replica: Harness, shared: Shared, namespaces: WatchedNamespaces
) -> None:
    require(namespaces, HASH)
    shared.has(builders.created(pod_requiring()))
    assert refusal(await replica.validate(binding("node-b"))) == (403, "NoProvenNode")
    assert (await replica.validate(binding("node-a")))["allowed"]


async def test_undressed_pod_is_not_bound_while_the_namespace_cannot_be_read(
    replica: Harness, shared: Shared, api: Api
) -> None:
    api.is_away = True
    shared.has(builders.created(pod_requiring()))
    assert refusal(await replica.validate(binding("node-a"))) == (503, "LedgerAway")
    async with of_house(replica) as scheduler:
        asked = by_name(builders.created(pod_requiring()), "node-a")
        reply = (await scheduler.post("/filter", json=asked)).json()
        assert (reply["NodeNames"], reply["Error"]) == (None, NAMESPACE_AWAY)
        assert (await scheduler.post("/prioritize", json=asked)).status_code == 503


async def test_explain_uses_the_requirement_of_the_namespace(
    harness: Harness, namespaces: WatchedNamespaces, api: Api
) -> None:
    require(namespaces, OTHER_HASH)
    answer = (await harness.tls.post("/explain", json=pod_requiring())).json()
    assert [one["name"] for one in answer["nodes"] if one["fits"]] == ["node-b"]
    api.is_away = True
    assert (await harness.tls.post("/explain", json=pod_requiring(namespace="new"))).status_code == 503


# In a cluster all claims need a proven node.


async def test_pod_without_a_hash_needs_a_proven_node_in_a_cluster(build: Build, tmp_path: Path) -> None:
    bare: Raw = {"nodes": [{k: v for k, v in one.items() if k != "evidence"} for one in INVENTORY["nodes"]]}
    kubeconfig = tmp_path / "kubeconfig"
    refused = await (await build(bare, kubeconfig=kubeconfig)).mutate(pod_requiring())
    assert refusal(refused) == (403, "NoProvenNode")
    assert "3 have no evidence" in refused["status"]["message"]
    assert "have the nodes attested; or, with --require-evidence asked" in refused["status"]["message"]
    options = {"kubeconfig": kubeconfig, "sources": {"require_evidence": "flag --require-evidence"}}
    assert (await (await build(bare, **options)).mutate(pod_requiring()))["allowed"]
    assert (await (await build(bare)).mutate(pod_requiring()))["allowed"]


class SilentApi(Api):
    """An API server that never answers."""

    async def get(self, name: str) -> Raw | None:
        await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("path", ["/mutate", "/validate"])
async def test_review_is_answered_before_its_deadline_while_the_api_server_hangs(build: Build, path: str) -> None:
    harness = await build(assemble=with_namespaces(WatchedNamespaces(SilentApi())))
    review = builders.review(
        "CREATE", new=builders.created(pod_requiring()) if path == "/validate" else pod_requiring()
    )
    async with asyncio.timeout(10):
        refused = await harness.ask(path, review, timeout="1s")
    assert refused["status"]["reason"] == "DeadlinePassed"
