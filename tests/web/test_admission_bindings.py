"""Reviews of Bindings in a cluster, where another replica may have made the reservation."""

from typing import Any

import pytest

from tests import builders
from tests.builders import HASH, NOW, OTHER_HASH, POD_UID, REVIEW_UID, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import INVENTORY, Harness, patched
from tests.web.replica import Shared, binding, sharing


def gpu_pod(gpus: int = 1, **members: Any) -> Raw:
    return raw_pod(raw_container(gpus=gpus), **members)


def attested(*hashes: str) -> dict[str, str]:
    return {"gpuwarden.io/required-hash": ",".join(hashes)}


def refusal(response: Raw) -> tuple[int, str]:
    assert not response["allowed"]
    return response["status"]["code"], response["status"]["reason"]


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def first(build: Build, shared: Shared) -> Harness:
    """The replica that reviewed the pod's creation."""
    return await build(assemble=sharing(shared))


@pytest.fixture
async def second(build: Build, shared: Shared) -> Harness:
    """A replica that saw nothing of it and reviews the Binding."""
    return await build(assemble=sharing(shared))


async def reserved(harness: Harness, shared: Shared, raw: Raw) -> Raw:
    """Passes the mutating webhook only and is stored in the cluster: its reservation has no uid."""
    final = builders.created(await harness.dress(raw))
    shared.has(final)
    return final


async def created(harness: Harness, shared: Shared, raw: Raw) -> Raw:
    final = await harness.create(raw)
    shared.has(final)
    return final


@pytest.mark.parametrize("uid", [POD_UID, None], ids=["with-a-uid", "without"])
@pytest.mark.parametrize("who", ["first", "second"])
async def test_every_replica_denies_a_binding_to_another_node_than_reserved(
    first: Harness, second: Harness, shared: Shared, who: str, uid: str | None
) -> None:
    await created(first, shared, gpu_pod())
    harness = {"first": first, "second": second}[who]
    refused = await harness.validate(binding("node-a", uid=uid))
    assert refusal(refused) == (403, "NotReserved")
    assert "reserved on node-b, not on node-a" in refused["status"]["message"]
    assert (await harness.validate(binding("node-b", uid=uid)))["allowed"]


async def test_a_binding_costs_one_read_of_its_pod(first: Harness, second: Harness, shared: Shared) -> None:
    await created(first, shared, gpu_pod())
    for harness in (first, second):
        shared.pod_reads = 0
        assert (await harness.validate(binding("node-b")))["allowed"]
        assert shared.pod_reads == 1


@pytest.mark.parametrize("dry_run", [False, True], ids=["for real", "dry run"])
async def test_binding_of_another_pod_of_the_name_is_denied(
    first: Harness, second: Harness, shared: Shared, dry_run: bool
) -> None:
    await created(first, shared, gpu_pod())
    stale = binding("node-b", uid="uid-of-the-one-before", dry_run=dry_run)
    assert refusal(await second.validate(stale)) == (409, "ReservationConflict")


@pytest.mark.parametrize("uid", [POD_UID, None], ids=["with-a-uid", "without"])
async def test_binding_of_a_missing_pod_is_denied(second: Harness, uid: str | None) -> None:
    assert refusal(await second.validate(binding("node-b", uid=uid))) == (409, "ReservationConflict")


async def test_binding_is_denied_if_the_reservation_is_gone(first: Harness, second: Harness, shared: Shared) -> None:
    """Its containers could see GPUs that another pod may hold by now."""
    await created(first, shared, gpu_pod())
    shared.change("node-b")
    refused = await second.validate(binding("node-b"))
    assert refusal(refused) == (403, "NotReserved")
    assert REVIEW_UID in refused["status"]["message"]


@pytest.mark.parametrize(
    "members",
    [
        {"phase": "releasing"},
        {"uid": "uid-of-another"},
        {"namespace": "other"},
        {"digest": "of-another-claim"},
        {"reservation": "another"},
    ],
    ids=["being released", "another pod's", "another namespace's", "another claim's", "another reservation"],
)
@pytest.mark.parametrize("dry_run", [False, True], ids=["for real", "dry run"])
async def test_binding_is_denied_with_another_pods_reservation(
    first: Harness, second: Harness, shared: Shared, members: Raw, dry_run: bool
) -> None:
    await created(first, shared, gpu_pod())
    shared.change("node-b", **members)
    assert refusal(await second.validate(binding("node-b", dry_run=dry_run))) == (403, "NotReserved")


@pytest.mark.parametrize("beside", ["finalized", "pending"])
async def test_pod_is_not_bound_beside_one_that_is_gone_if_the_kubelet_chooses(
    build: Build, shared: Shared, beside: str
) -> None:
    """The kubelet takes the GPU of the other pod for free, and its containers may still run. A pending reservation is
    of a pod that never ran."""
    nodes = [{**node, "labels": {"gpuwarden.io/injection": "plugin"}} for node in INVENTORY["nodes"][:1]]
    first, second = [await build({"nodes": nodes}, assemble=sharing(shared), injection="plugin") for _ in range(2)]
    other = await first.create(gpu_pod(name="other"), uid="review-of-other", pod_uid="uid-of-other")
    shared.change("node-a", phase=beside)
    await created(first, shared, gpu_pod())
    if beside == "finalized":
        refused = await second.validate(binding("node-a"))
        assert refusal(refused) == (429, "NoFreeDevice")
        assert "a GPU in use that its device plugin considers free" in refused["status"]["message"]
        shared.has(other)
    assert (await second.validate(binding("node-a")))["allowed"]


async def test_binding_is_denied_for_a_record_without_a_reservation_id(
    first: Harness, second: Harness, shared: Shared
) -> None:
    final = await created(first, shared, gpu_pod())
    for name in ("gpuwarden.io/reservation-id", "fudo.org/gpu.reservation-id"):
        del final["metadata"]["annotations"][name]
    assert refusal(await second.validate(binding("node-b"))) == (403, "NotReserved")


async def test_binding_is_denied_for_a_malformed_record(second: Harness, shared: Shared) -> None:
    shared.has(builders.created(raw_pod(annotations={"gpuwarden.io/claim": "[]"})))
    assert refusal(await second.validate(binding("node-b"))) == (403, "InvalidPod")


@pytest.mark.parametrize(
    ("record", "reasons"),
    [
        ("{}", {"node-a": None, "node-b": "NoProvenNode", "node-c": "NoProvenNode"}),
        (f'{{"hashes":["{HASH}","{OTHER_HASH}"]}}', {"node-a": None, "node-b": "NoProvenNode"}),
        (f'{{"hashes":["{OTHER_HASH}"]}}', {"node-a": "Forged", "node-b": "Forged"}),
    ],
)
async def test_forged_record_does_not_waive_the_pods_request(
    second: Harness, shared: Shared, record: str, reasons: dict[str, str | None]
) -> None:
    """Admitted without a review: the pod's author wrote its record."""
    shared.has(builders.created(raw_pod(annotations={**attested(HASH), "gpuwarden.io/claim": record})))
    for node, reason in reasons.items():
        answer = await second.validate(binding(node))
        assert answer["allowed"] if reason is None else refusal(answer) == (403, reason)


async def test_emptied_record_does_not_free_the_pod_from_its_reserved_node(first: Harness, shared: Shared) -> None:
    final = await created(first, shared, gpu_pod())
    shared.has({**final, "metadata": {**final["metadata"], "annotations": {"gpuwarden.io/claim": "{}"}}})
    assert refusal(await first.validate(binding("node-a"))) == (403, "NotReserved")


async def test_binding_review_binds_a_pending_reservation_to_the_pod(
    first: Harness, second: Harness, shared: Shared
) -> None:
    await reserved(first, shared, gpu_pod())
    writes = shared.store.writes
    assert (await second.validate(binding("node-b", dry_run=True)))["allowed"]
    assert shared.store.writes == writes
    assert (await second.validate(binding("node-b")))["allowed"]
    entry = shared.held["GPU-b0/0"]
    assert (entry["phase"], entry["uid"]) == ("finalized", POD_UID)


async def test_denied_binding_leaves_the_reservation_unbound(first: Harness, second: Harness, shared: Shared) -> None:
    await reserved(first, shared, gpu_pod())
    assert refusal(await second.validate(binding("node-a"))) == (403, "NotReserved")
    assert "uid" not in shared.held["GPU-b0/0"]


async def test_binding_is_denied_if_the_reservation_vanishes_during_the_check(first: Harness, shared: Shared) -> None:
    """This replica knows it, but it is gone from the store: the replica lags behind."""
    await reserved(first, shared, gpu_pod())
    shared.change("node-b")
    assert refusal(await first.validate(binding("node-b"))) == (403, "NotReserved")


async def test_binding_uses_a_reservation_past_its_deadline_if_the_pod_exists(
    first: Harness, second: Harness, shared: Shared
) -> None:
    await reserved(first, shared, gpu_pod())
    second.wait(200)
    assert (await second.validate(binding("node-b")))["allowed"]
    assert shared.held["GPU-b0/0"]["uid"] == POD_UID


def unproven() -> Raw:
    """The inventory after every node has lost its evidence."""
    bare = [{key: value for key, value in node.items() if key != "evidence"} for node in INVENTORY["nodes"]]
    return {"nodes": bare}


@pytest.mark.parametrize(
    ("raw", "node", "settings"),
    [
        (gpu_pod(annotations=attested(OTHER_HASH)), "node-b", {}),
        (gpu_pod(), "node-b", {"require_evidence": "all"}),
        (raw_pod(annotations=attested(HASH)), "node-a", {}),
    ],
    ids=["a hash", "always required", "a hash and no GPU"],
)
@pytest.mark.parametrize("dry_run", [False, True], ids=["for real", "dry run"])
async def test_binding_is_denied_without_valid_evidence(
    build: Build, shared: Shared, raw: Raw, node: str, settings: Raw, dry_run: bool
) -> None:
    harness = await build(assemble=sharing(shared), **settings)
    await created(harness, shared, raw)
    assert (await harness.validate(binding(node, dry_run=dry_run)))["allowed"]
    harness.file.write_text(builders.body(unproven()).decode())
    await harness.fleet_source.refresh()
    refused = await harness.validate(binding(node, dry_run=dry_run))
    assert refusal(refused) == (403, "NoProvenNode")
    assert f"node {node}: no evidence" in refused["status"]["message"]


async def test_binding_needs_no_evidence_if_none_is_requested(first: Harness, shared: Shared) -> None:
    await created(first, shared, gpu_pod())
    first.file.write_text(builders.body(unproven()).decode())
    await first.fleet_source.refresh()
    assert (await first.validate(binding("node-b")))["allowed"]


@pytest.mark.parametrize(
    ("node", "reason"),
    [("node-b", "NoProvenNode"), ("node-c", "NoProvenNode"), ("node-nowhere", "NoSuitableNode")],
    ids=["another hash", "no evidence", "not known"],
)
async def test_pod_with_a_hash_is_not_bound_to_an_unproven_node(
    first: Harness, second: Harness, shared: Shared, node: str, reason: str
) -> None:
    await created(first, shared, raw_pod(annotations=attested(HASH)))
    assert refusal(await second.validate(binding(node))) == (403, reason)
    assert (await second.validate(binding("node-a")))["allowed"]


@pytest.mark.parametrize(
    "raw", [raw_pod(), raw_pod(annotations=attested(HASH)), gpu_pod()], ids=["none", "hash", "gpu"]
)
async def test_a_binding_plants_nothing_that_only_we_may_write(
    first: Harness, second: Harness, shared: Shared, raw: Raw
) -> None:
    final = await created(first, shared, raw)
    node = final["metadata"].get("annotations", {}).get("gpuwarden.io/node", "node-a")
    for key, value in {"gpuwarden.io/gpu-uuid": "GPU-c0", "cdi.k8s.io/gpu": "nvidia.com/gpu=all"}.items():
        planted = binding(node, annotations={key: value})
        assert refusal(await second.validate(planted)) == (403, "Forged")
    assert (await second.validate(binding(node, annotations={"team": "x"})))["allowed"]


async def test_pod_without_a_record_may_be_bound_to_any_node(second: Harness, shared: Shared) -> None:
    shared.has(builders.created(raw_pod()))
    assert (await second.validate(binding("node-c")))["allowed"]


async def test_removed_record_does_not_free_the_pod_from_its_reserved_node(first: Harness, shared: Shared) -> None:
    final = await created(first, shared, gpu_pod())
    shared.has({**final, "metadata": {**final["metadata"], "annotations": {}}})
    assert refusal(await first.validate(binding("node-a"))) == (403, "NotReserved")


async def test_bindings_are_denied_while_pods_cannot_be_read(first: Harness, second: Harness, shared: Shared) -> None:
    await created(first, shared, gpu_pod())
    shared.is_away = True
    assert refusal(await first.validate(binding("node-b"))) == (503, "LedgerAway")
    assert refusal(await second.validate(binding("node-b"))) == (503, "LedgerAway")
    shared.is_away = False
    with shared.store.away():
        assert refusal(await second.validate(binding("node-b"))) == (503, "LedgerAway")
    assert (await second.validate(binding("node-b")))["allowed"]


async def test_binding_is_denied_past_the_bind_deadline(first: Harness, second: Harness, shared: Shared) -> None:
    """Its GPUs are released a little later; no binding may be under way then."""
    final = await created(first, shared, gpu_pod())
    final["metadata"]["creationTimestamp"] = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    second.wait(299)
    assert (await second.validate(binding("node-b")))["allowed"]
    second.wait(1)
    assert refusal(await second.validate(binding("node-b"))) == (409, "ReservationExpired")


async def test_binding_is_denied_if_the_stored_reservation_was_deleted(first: Harness, shared: Shared) -> None:
    await created(first, shared, gpu_pod())
    shared.change("node-b")
    assert refusal(await first.validate(binding("node-b"))) == (403, "NotReserved")


# The mutating webhook for Bindings.


async def test_reviewed_binding_is_marked_with_its_node(first: Harness, shared: Shared) -> None:
    """The policy that decides without a review reads the mark."""
    await created(first, shared, gpu_pod())
    asked = binding("node-b")
    final = patched(asked["request"]["object"], await first.ask("/mutate-binding", asked))
    assert final["metadata"]["finalizers"] == ["gpuwarden.io/reviewed-for-node-b"]
    assert refusal(await first.ask("/mutate-binding", binding("node-a"))) == (403, "NotReserved")


async def test_existing_mark_on_a_binding_is_replaced(first: Harness, shared: Shared) -> None:
    await created(first, shared, gpu_pod())
    asked = binding("node-b")
    asked["request"]["object"]["metadata"]["finalizers"] = ["a", "gpuwarden.io/reviewed-for-node-a"]
    final = patched(asked["request"]["object"], await first.ask("/mutate-binding", asked))
    assert final["metadata"]["finalizers"] == ["a", "gpuwarden.io/reviewed-for-node-b"]
    asked["request"]["object"]["metadata"]["finalizers"] = [7]
    assert refusal(await first.ask("/mutate-binding", asked)) == (403, "InvalidPod")


async def test_binding_webhook_denies_other_kinds(first: Harness) -> None:
    assert refusal(await first.ask("/mutate-binding", builders.mutating_create(gpu_pod()))) == (403, "NotReviewed")
