"""Validating reviews that come after their reservation has expired, and pods that the reservation was not made for."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import Raw
from tests.conftest import Build
from tests.web.harness import Harness
from tests.web.replica import Shared, sharing
from tests.web.test_admission import refusal

DEADLINE, SKEW = 15, 5
Open = Callable[..., Awaitable[Harness]]


def wanted(name: str | None = "train-0", *, node: str = "node-b", gpus: int = 1, **members: Any) -> Raw:
    affinity = builders.required_affinity(builders.on_node(node))
    return builders.raw_pod(builders.raw_container(gpus=gpus), name=name, affinity=affinity, **members)


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
def replica(build: Build, shared: Shared) -> Open:
    async def opened(**settings: Any) -> Harness:
        return await build(assemble=sharing(shared), pending_deadline=timedelta(seconds=DEADLINE), **settings)

    return opened


async def dressed(harness: Harness, raw: Raw | None = None, uid: str = "r1") -> Raw:
    """The validating review that is still to come."""
    final = builders.created(await harness.dress(raw or wanted(), uid))
    return builders.review("CREATE", new=final, uid=f"{uid}-validate")


async def cleared(harness: Harness) -> None:
    """Removes expired reservations, as the reconciler does."""
    ledger = harness.parts.ledger
    await ledger.collect(harness.now)
    for one in ledger.given_up(harness.now):  # type: ignore[attr-defined]  # a cluster's ledger
        await ledger.expire(one)  # type: ignore[attr-defined]


def slots(shared: Shared) -> dict[str, tuple[str, str | None]]:
    return {slot: (entry["reservation"], entry.get("uid")) for slot, entry in shared.held.items()}


ITS_OWN = {"GPU-b0/0": ("r1", builders.POD_UID)}


@pytest.mark.parametrize("seconds", [11, 16, 21], ids=["late for its holder", "past its deadline", "past the skew"])
async def test_pending_reservation_is_bound_by_a_late_review(replica: Open, shared: Shared, seconds: float) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(seconds)
    assert (await harness.validate(review))["allowed"]
    assert slots(shared) == ITS_OWN
    harness.wait(DEADLINE - 1)
    assert refusal(await harness.mutate(wanted("other"), "r2")) == (429, "NoFreeDevice")


async def test_expired_reservation_is_renewed_unchanged(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    assert slots(shared) == {}
    harness.wait(30)
    assert (await harness.validate(review))["allowed"]
    assert slots(shared) == ITS_OWN


async def test_expired_reservation_is_not_renewed_if_its_gpu_is_taken(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await harness.create(wanted("other"), "r2", "uid-2")
    answer = await harness.validate(review)
    assert refusal(answer) == (409, "ReservationExpired")
    assert "not all of its GPUs on node-b are free any more" in answer["status"]["message"]
    assert slots(shared) == {"GPU-b0/0": ("r2", "uid-2")}


async def test_expired_reservation_is_not_renewed_if_one_of_its_gpus_is_taken(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness, wanted(node="node-a", gpus=2))
    harness.wait(DEADLINE + SKEW)
    await harness.create(wanted("other", node="node-a"), "r2", "uid-2")
    assert refusal(await harness.validate(review)) == (409, "ReservationExpired")
    assert [one for one, _ in slots(shared).values()] == ["r2"]


async def test_expired_reservation_is_not_renewed_after_the_longest_review(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    harness.wait(60)
    assert refusal(await harness.validate(review)) == (403, "NotReserved")
    assert slots(shared) == {}


async def test_dry_run_renews_no_reservation(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    review["request"]["dryRun"] = True
    assert (await harness.validate(review))["allowed"]
    assert slots(shared) == {}


async def test_expired_reservation_is_not_renewed_on_an_unhealthy_gpu(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    fleet = harness.parts.fleet
    fleet.put(builders.node("node-b", builders.device("GPU-b0", is_healthy=False)), harness.now)
    assert refusal(await harness.validate(review)) == (409, "ReservationExpired")
    assert slots(shared) == {}


async def test_expired_reservation_is_not_renewed_without_evidence(replica: Open, shared: Shared) -> None:
    harness = await replica()
    review = await dressed(harness, wanted(annotations={"gpuwarden.io/required-hash": builders.OTHER_HASH}))
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    harness.parts.fleet.set_evidence("node-b", None, harness.now)
    assert refusal(await harness.validate(review)) == (403, "NoProvenNode")
    assert slots(shared) == {}


Change = Callable[[Raw], object]


def annotated(key: str, value: str) -> Change:
    return lambda raw: raw["metadata"]["annotations"].update({f"gpuwarden.io/{key}": value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (annotated("gpu-uuid", "GPU-a0"), "Forged"),
        (annotated("node", "node-a"), "Forged"),
        (annotated("reservation-id", "r2"), "NotReserved"),
        (annotated("claim", '{"v":1,"gpus":2}'), "Forged"),
        (lambda raw: raw["metadata"].update(name="stolen"), "ReservationConflict"),
        (lambda raw: raw["metadata"].update(namespace="other"), "ReservationConflict"),
    ],
    ids=["another GPU", "another node", "another id", "another claim", "another name", "another namespace"],
)
async def test_only_the_original_reservation_is_renewed(
    replica: Open, shared: Shared, change: Change, reason: str
) -> None:
    harness = await replica()
    review = await dressed(harness)
    harness.wait(DEADLINE + SKEW)
    await cleared(harness)
    raw = review["request"]["object"]
    change(raw)
    review["request"] |= {"namespace": raw["metadata"]["namespace"], "name": raw["metadata"]["name"]}
    assert refusal(await harness.validate(review))[1] == reason
    assert slots(shared) == {}


async def test_replica_that_never_saw_the_reservation_renews_none(replica: Open, shared: Shared) -> None:
    """An id in annotations alone proves nothing."""
    first, second = await replica(), await replica()
    review = await dressed(first)
    for one in (first, second):
        one.wait(DEADLINE + SKEW)
    await cleared(first)
    assert refusal(await second.validate(review)) == (403, "NotReserved")
    assert slots(shared) == {}


async def test_generated_name_must_start_with_the_reserved_prefix(replica: Open, shared: Shared) -> None:
    harness = await replica()
    raw = await harness.dress(wanted(None, generate_name="train-"), "r1")
    stolen = builders.created(raw, name="stolen", uid="uid-of-a-thief")
    assert refusal(await harness.validate(builders.review("CREATE", new=stolen))) == (409, "ReservationConflict")
    assert slots(shared) == {"GPU-b0/0": ("r1", None)}
    own = builders.created(raw, name="train-abcde")
    assert (await harness.validate(builders.review("CREATE", new=own)))["allowed"]
    assert slots(shared) == ITS_OWN


async def test_long_name_prefix_is_cut_like_the_api_server_does(replica: Open, shared: Shared) -> None:
    harness = await replica()
    prefix = "a" * 70 + "-"
    raw = await harness.dress(wanted(None, generate_name=prefix), "r1")
    final = builders.created(raw, name="a" * 58 + "xyz12")
    assert (await harness.validate(builders.review("CREATE", new=final)))["allowed"]
    assert slots(shared) == ITS_OWN


async def test_invalid_name_prefix_is_denied(replica: Open, shared: Shared) -> None:
    harness = await replica()
    answer = await harness.mutate(wanted(None, generate_name="\x1b[2J"), "r1")
    assert refusal(answer) == (403, "InvalidPod")
    assert slots(shared) == {}


async def test_the_pods_grace_period_is_stored_before_the_pod_exists(replica: Open, shared: Shared) -> None:
    harness = await replica()
    probed = builders.raw_container(gpus=1, livenessProbe={"terminationGracePeriodSeconds": 70})
    affinity = builders.required_affinity(builders.on_node("node-b"))
    await dressed_and_validated(harness, builders.raw_pod(probed, affinity=affinity, terminationGracePeriodSeconds=40))
    assert [entry["grace"] for entry in shared.held.values()] == [70]


async def dressed_and_validated(harness: Harness, raw: Raw) -> None:
    assert (await harness.validate(await dressed(harness, raw)))["allowed"]
