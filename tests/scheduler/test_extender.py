"""How a replica in a cluster answers for existing pods, and how it binds them."""

from typing import Any

import pytest

from tests import builders
from tests.admission.test_evidence_loss import FakeNamespaces
from tests.builders import HASH, NOW, OTHER_HASH, POD_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.scheduler.bindings import FakeBindings
from tests.web.harness import Harness
from tests.web.replica import Shared, binding, sharing
from webhook.core.claim_keys import ClaimRecord
from webhook.core.extender_wire import BindArgs, ExtenderArgs, OfferedNodes, PreemptArgs, Victims
from webhook.core.injection import Injection
from webhook.core.pod import Pod
from webhook.core.reservation import PodIdentity
from webhook.core.reserve import Reserve
from webhook.scheduler.extender import Extender, count_rejections

NODES = ("node-a", "node-b", "node-c")
HASH_KEY = "gpuwarden.io/required-hash"


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def bindings(shared: Shared) -> FakeBindings:
    return FakeBindings(shared)


@pytest.fixture
async def harness(build: Build, shared: Shared) -> Harness:
    """The replica that reviewed the pod's creation."""
    return await build(assemble=sharing(shared))


@pytest.fixture
def extender(harness: Harness, bindings: FakeBindings) -> Extender:
    return Extender(harness.parts, bindings)


@pytest.fixture
async def other(build: Build, shared: Shared, bindings: FakeBindings) -> Extender:
    """A replica that saw nothing of it."""
    return Extender((await build(assemble=sharing(shared))).parts, bindings)


def attested(*hashes: str) -> dict[str, str]:
    return {"attestation-hash.my-company.com/required-hash": ",".join(hashes)}


async def created(harness: Harness, shared: Shared, raw: Raw) -> Raw:
    """Passes both webhooks and is stored in the cluster."""
    final = await harness.create(raw)
    shared.has(final)
    return final


def gpu_pod(**members: Any) -> Raw:
    return raw_pod(raw_container(gpus=1), annotations=attested(HASH), **members)


def about(raw: Raw) -> ExtenderArgs:
    return ExtenderArgs(Pod.parse(raw), OfferedNodes(NODES))


def onto(node: str, uid: str = POD_UID) -> BindArgs:
    return BindArgs(PodIdentity("ml", "train-0", uid), node)


async def unproven(harness: Harness) -> None:
    for name in NODES:
        harness.parts.fleet.set_evidence(name, None, NOW)


async def test_every_replica_passes_a_reserved_pod_on_its_node(
    harness: Harness, extender: Extender, other: Extender, shared: Shared
) -> None:
    final = await created(harness, shared, gpu_pod())
    for one in (extender, other):
        found = await one.filter(about(final))
        assert found.passed == {"node-a"}
        assert set(found.unresolvable) == {"node-b", "node-c"}
        assert dict(await one.scores(about(final))) == {"node-a": 10, "node-b": 0, "node-c": 0}


@pytest.mark.parametrize(
    "members", [{}, {"uid": "uid-of-another"}, {"phase": "releasing"}, {"digest": "of-another-claim"}], ids=str
)
async def test_pod_with_another_pods_reservation_fits_no_node(
    harness: Harness, other: Extender, shared: Shared, members: Raw
) -> None:
    final = await created(harness, shared, gpu_pod())
    shared.change("node-a", **members)
    found = await other.filter(about(final))
    message = "the pod's GPU reservation is gone (gpuwarden: NotReserved)"
    assert {name: one.message for name, one in found.unresolvable.items()} == dict.fromkeys(NODES, message)
    assert dict(await other.scores(about(final))) == dict.fromkeys(NODES, 0)


async def test_pod_past_its_bind_deadline_fits_no_node(harness: Harness, extender: Extender, shared: Shared) -> None:
    final = await created(harness, shared, gpu_pod())
    final["metadata"]["creationTimestamp"] = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    harness.wait(299)
    assert (await extender.filter(about(final))).passed == {"node-a"}
    harness.wait(1)
    assert len((await extender.filter(about(final))).unresolvable) == 3


@pytest.mark.parametrize(
    ("annotations", "mistake"),
    [
        ({"gpuwarden.io/claim": "[]"}, "annotation gpuwarden.io/claim was not written by gpuwarden"),
        (attested(HASH + ","), f"annotation {HASH_KEY} has an empty hash: add a value or remove it"),
        (attested(" " + HASH), f"annotation {HASH_KEY}: ' {HASH}' contains white space"),
        (attested(""), f"annotation {HASH_KEY} has an empty hash: add a value or remove it"),
        (
            {"attestation-hash.my-company.com/required-hash": ""},
            f"annotation {HASH_KEY} has an empty hash: add a value or remove it",
        ),
        ({"gpuwarden.io/gpu-count": ""}, "gpuwarden.io/gpu-count is empty"),
        (
            {**attested(HASH), "gpuwarden.io/claim": f'{{"hashes":["{OTHER_HASH}"]}}'},
            "annotation gpuwarden.io/claim contains none of the hashes that the pod asks for",
        ),
    ],
)
async def test_unreadable_claim_fits_no_node_and_is_not_bound(
    extender: Extender, shared: Shared, bindings: FakeBindings, annotations: dict[str, str], mistake: str
) -> None:
    raw = builders.created(raw_pod(annotations=annotations))
    shared.has(raw)
    found = await extender.filter(about(raw))
    message = f"the pod's claim cannot be read: InvalidPod: {mistake} (gpuwarden: InvalidPod)"
    assert {name: one.message for name, one in found.unresolvable.items()} == dict.fromkeys(NODES, message)
    assert count_rejections(found) == {"the pod's claim cannot be read": 3}
    assert dict(await extender.scores(about(raw))) == dict.fromkeys(NODES, 0)
    victims = dict.fromkeys(NODES, Victims(("uid-1",), 0))
    assert await extender.filter_victims(PreemptArgs(Pod.parse(raw), victims)) == {}
    assert await extender.bind(onto("node-a"))
    assert bindings.asked == []


async def test_text_about_an_unreadable_claim_is_bounded(extender: Extender) -> None:
    raw = builders.created(raw_pod(annotations=attested("\n," * 1000)))
    (refusal,) = set((await extender.filter(about(raw))).unresolvable.values())
    assert len(refusal.detail) == 200
    assert refusal.message.isprintable()


@pytest.mark.parametrize(
    ("record", "passed"),
    [
        ("{}", {"node-a"}),
        (f'{{"hashes":["{HASH}"]}}', {"node-a"}),
        (f'{{"hashes":["{HASH}","{OTHER_HASH}"]}}', {"node-a"}),
        (f'{{"hashes":["{OTHER_HASH}"]}}', set()),
    ],
)
async def test_forged_record_does_not_waive_the_pods_request(extender: Extender, record: str, passed: set[str]) -> None:
    """Without a webhook in front, the pod's author writes its record."""
    raw = raw_pod(raw_container(gpus=1), annotations={**attested(HASH), "gpuwarden.io/claim": record})
    assert (await extender.filter(about(builders.created(raw)))).passed == passed


async def test_namespaces_hashes_apply_to_a_request_that_a_review_has_removed(build: Build, shared: Shared) -> None:
    """kube-scheduler chooses its GPUs."""
    namespaces = FakeNamespaces()
    namespaces.hashes["ml"] = OTHER_HASH
    extender = Extender((await build(assemble=sharing(shared, namespaces))).parts, None)
    record = ClaimRecord(gpus=1, asked={"main": 1}, injection=Injection.DRA, reserve=Reserve.BIND)
    raw = builders.created(raw_pod(annotations={"gpuwarden.io/claim": record.text()}))
    assert (await extender.filter(about(raw))).passed == {"node-b"}


async def test_pod_with_a_hash_fits_nodes_with_that_evidence(
    harness: Harness, extender: Extender, shared: Shared
) -> None:
    final = await created(harness, shared, raw_pod(annotations=attested(HASH)))
    assert (await extender.filter(about(final))).passed == {"node-a"}
    final["metadata"]["annotations"].pop("attestation-hash.my-company.com/required-hash")
    assert (await extender.filter(about(final))).passed == {"node-a"}


async def test_the_annotation_may_have_another_name_too(build: Build, shared: Shared) -> None:
    harness = await build(assemble=sharing(shared), required_hash_alias="mine.example/hash")
    raw = raw_pod(annotations={"mine.example/hash": OTHER_HASH})
    assert (await Extender(harness.parts, None).filter(about(raw))).passed == {"node-b"}


# Binding.


@pytest.mark.parametrize("who", ["extender", "other"])
async def test_pod_is_bound_once_and_a_second_bind_succeeds(
    request: pytest.FixtureRequest,
    harness: Harness,
    extender: Extender,
    other: Extender,
    shared: Shared,
    bindings: FakeBindings,
    who: str,
) -> None:
    await created(harness, shared, gpu_pod())
    one = {"extender": extender, "other": other}[who]
    assert await one.bind(onto("node-a")) == ""
    assert shared.pods["ml", "train-0"]["spec"]["nodeName"] == "node-a"
    assert bindings.asked == [(PodIdentity("ml", "train-0", POD_UID), "node-a")]
    assert await one.bind(onto("node-a")) == ""
    assert len(bindings.asked) == 1
    assert await one.bind(onto("node-b")) == "the pod is on node-a already"


@pytest.mark.defect("extender-6")
async def test_evidence_lost_between_filter_and_bind_refuses_the_binding(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    final = await created(harness, shared, gpu_pod())
    assert (await extender.filter(about(final))).passed == {"node-a"}
    await unproven(harness)
    assert "node node-a: no evidence" in await extender.bind(onto("node-a"))
    assert bindings.asked == []


@pytest.mark.defect("extender-6")
@pytest.mark.parametrize(
    ("raw", "settings", "problem"),
    [
        (raw_pod(annotations=attested(HASH)), {}, "no evidence"),
        (gpu_pod(), {}, "no evidence"),
        (raw_pod(raw_container(gpus=1)), {"require_evidence": "all"}, "no evidence"),
        (raw_pod(raw_container(gpus=1)), {}, ""),
        (raw_pod(), {"require_evidence": "all"}, ""),
    ],
    ids=["a hash", "a hash and a GPU", "evidence demanded of all", "a GPU alone", "nothing"],
)
async def test_unreviewed_pod_is_checked_at_bind_too(
    build: Build, shared: Shared, bindings: FakeBindings, raw: Raw, settings: Raw, problem: str
) -> None:
    harness = await build(assemble=sharing(shared), **settings)
    extender = Extender(harness.parts, bindings)
    shared.has(builders.created(raw))
    await unproven(harness)
    assert problem in await extender.bind(onto("node-a"))
    assert len(bindings.asked) == (0 if problem else 1)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ("{}", "no evidence"),
        (f'{{"hashes":["{HASH}","{OTHER_HASH}"]}}', "no evidence"),
        (f'{{"hashes":["{OTHER_HASH}"]}}', "contains none of the hashes"),
    ],
)
async def test_forged_record_does_not_allow_binding_without_evidence(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings, record: str, problem: str
) -> None:
    raw = raw_pod(raw_container(gpus=1), annotations={**attested(HASH), "gpuwarden.io/claim": record})
    shared.has(builders.created(raw))
    await unproven(harness)
    assert problem in await extender.bind(onto("node-a"))
    assert bindings.asked == []


async def test_pod_is_bound_to_its_reserved_node_only(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    await created(harness, shared, gpu_pod())
    assert "reserved on node-a, not on node-b" in await extender.bind(onto("node-b"))
    assert bindings.asked == []


async def test_bind_refuses_another_pod_of_the_same_name(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    await created(harness, shared, gpu_pod())
    assert "pod ml/train-0 with uid other does not exist" in await extender.bind(onto("node-a", uid="other"))
    shared.pods.clear()
    assert f"pod ml/train-0 with uid {builders.POD_UID} does not exist" in await extender.bind(onto("node-a"))
    assert bindings.asked == []


async def test_binding_without_a_uid_refers_to_the_current_pod(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    await created(harness, shared, gpu_pod())
    assert await extender.bind(onto("node-a", uid="")) == ""
    assert bindings.asked == [(PodIdentity("ml", "train-0", POD_UID), "node-a")]


@pytest.mark.parametrize(("lost", "problem"), [("answer", ""), ("question", "the API server cannot be reached")])
async def test_pod_is_read_after_a_lost_answer(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings, lost: str, problem: str
) -> None:
    await created(harness, shared, gpu_pod())
    bindings.loses = lost
    assert await extender.bind(onto("node-a")) == problem


async def test_refusal_of_the_api_server_is_returned(
    harness: Harness, extender: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    await created(harness, shared, gpu_pod())
    bindings.refuses = "pod train-0 has non-empty .spec.schedulingGates"
    assert await extender.bind(onto("node-a")) == bindings.refuses


async def test_binding_binds_the_reservation_to_the_pod(
    harness: Harness, other: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    shared.has(builders.created(await harness.dress(gpu_pod())))
    assert await other.bind(onto("node-a")) == ""
    (entry,) = shared.held.values()
    assert (entry["phase"], entry["uid"]) == ("finalized", POD_UID)


async def test_nothing_is_bound_while_lookups_fail(
    harness: Harness, extender: Extender, other: Extender, shared: Shared, bindings: FakeBindings
) -> None:
    final = await created(harness, shared, gpu_pod())
    shared.is_away = True
    assert "cannot be looked up" in await extender.bind(onto("node-a"))
    shared.is_away = False
    with shared.store.away():
        assert "cannot be looked up" in await other.bind(onto("node-a"))
    shared.has({**final, "metadata": {**final["metadata"], "annotations": {"gpuwarden.io/claim": "[]"}}})
    assert "gpuwarden.io/claim" in await extender.bind(onto("node-a"))
    assert bindings.asked == []


async def test_bind_fails_without_a_cluster(build: Build) -> None:
    harness = await build()
    await harness.create(gpu_pod())
    for one in (Extender(harness.parts, None), Extender(harness.parts, FakeBindings(Shared()))):
        assert (await one.bind(onto("node-a"))).startswith("gpuwarden runs without a cluster")


async def test_pod_reserved_at_its_binding_fits_nodes_with_free_gpus_only(
    build: Build, shared: Shared, bindings: FakeBindings
) -> None:
    harness = await build(assemble=sharing(shared), reserve="bind")
    extender = Extender(harness.parts, bindings)
    final = await created(harness, shared, raw_pod(raw_container(gpus=1)))
    assert (await extender.filter(about(final))).passed == {"node-a", "node-b"}
    assert (await harness.ask("/mutate-binding", binding("node-b")))["allowed"]
    found = await extender.filter(about(await harness.create(raw_pod(raw_container(gpus=1), name="other"), "other")))
    assert found.passed == {"node-a"}
    assert found.failed["node-b"].message == "too few free GPUs (gpuwarden: NoFreeDevice)"


async def test_extender_leaves_the_reservation_to_the_review_of_its_binding(
    build: Build, shared: Shared, bindings: FakeBindings
) -> None:
    harness = await build(assemble=sharing(shared), reserve="bind")
    extender = Extender(harness.parts, bindings)
    await created(harness, shared, raw_pod(raw_container(gpus=2)))
    assert "node node-b: not selected by the pod" in await extender.bind(onto("node-b"))
    assert bindings.asked == []
    assert await extender.bind(onto("node-a")) == ""
    assert shared.held == {}
