"""The decision for pods that must all have their GPUs at once."""

from contextlib import suppress

import pytest

from tests.builders import HASH, NOW, OTHER_HASH, device, fleet, node, reservation, slot
from webhook.core.claim import Claim
from webhook.core.claim_keys import ClaimRecord
from webhook.core.decide import EvidencePolicy
from webhook.core.fleet import Fleet
from webhook.core.gang import GangDenial, GangPart, trial

LAX = EvidencePolicy()


def gpus(count: int, *requirements: str, hashes: tuple[str, ...] = (), shared: bool = False) -> Claim:
    return Claim(ClaimRecord(gpus=count, requirements=requirements, hashes=hashes, shared=shared))


def two_nodes(per_node: int = 2, **proven: str) -> Fleet:
    names = ("node-a", "node-b")
    nodes = (node(name, *(device(f"GPU-{name[-1]}{k}") for k in range(per_node))) for name in names)
    return fleet(*nodes, proven={name.replace("_", "-"): digest for name, digest in proven.items()})


def unplaced(there: Fleet, *gang: GangPart) -> GangDenial | None:
    with trial(there, LAX, NOW) as holds:
        return holds.place_all(gang)


@pytest.mark.parametrize(
    ("pods", "each", "is_possible"),
    [
        pytest.param(4, 1, True, id="all GPUs one by one"),
        pytest.param(5, 1, False, id="one GPU too many"),
        pytest.param(2, 2, True, id="two whole nodes"),
        pytest.param(3, 2, False, id="three whole nodes of two"),
    ],
)
def test_gang_is_placed_if_each_pod_has_devices_of_its_own(pods: int, each: int, is_possible: bool) -> None:
    found = unplaced(two_nodes(), GangPart(gpus(each), pods))
    assert (found is None) is is_possible


def test_denial_says_how_many_pods_have_a_place_and_why_the_next_one_has_none() -> None:
    found = unplaced(two_nodes(), GangPart(gpus(2), 3))
    assert found is not None
    assert (found.placed, found.pods) == (2, 3)
    assert found.message == (
        "2 of 3 pods can have their GPUs now; the next one: 2 GPUs: 0 of 2 nodes fit: 2 have fewer than 2 free GPUs; "
        "wait until GPUs are free, or ask for fewer"
    )


def test_denial_of_a_single_pod_reads_as_in_a_review() -> None:
    found = unplaced(two_nodes(), GangPart(gpus(1, hashes=(HASH,)), 1))
    assert found is not None
    assert found.message.startswith(f"1 GPU on a node attested as {HASH}: 0 of 2 nodes fit: 2 have no evidence")


def test_only_nodes_with_the_hash_count() -> None:
    there = two_nodes(node_a=HASH, node_b=OTHER_HASH)
    assert unplaced(there, GangPart(gpus(1, hashes=(HASH,)), 2)) is None
    assert unplaced(there, GangPart(gpus(1, hashes=(HASH,)), 3)) is not None


def test_parts_share_the_devices() -> None:
    there = two_nodes()
    assert unplaced(there, GangPart(gpus(1), 2), GangPart(gpus(2), 1)) is None
    assert unplaced(there, GangPart(gpus(1), 3), GangPart(gpus(2), 1)) is not None


def test_large_claims_are_placed_first() -> None:
    # The small pod alone would get a GPU of node-b, and one of the large pods would have no node left.
    there = fleet(
        node("node-a", *(device(f"GPU-a{k}") for k in range(3))), node("node-b", device("GPU-b0"), device("GPU-b1"))
    )
    assert unplaced(there, GangPart(gpus(1), 1), GangPart(gpus(2), 2)) is None


def test_claim_without_gpus_needs_one_node_for_all_pods() -> None:
    there = two_nodes(per_node=0, node_a=HASH)
    assert unplaced(there, GangPart(gpus(0, hashes=(HASH,)), 1000)) is None
    assert unplaced(there, GangPart(gpus(0, hashes=(OTHER_HASH,)), 1000)) is not None


def test_shares_of_a_device_count_one_by_one() -> None:
    there = fleet(node("node-a", device("GPU-a0", shares=3)))
    assert unplaced(there, GangPart(gpus(1, shared=True), 3)) is None
    assert unplaced(there, GangPart(gpus(1, shared=True), 4)) is not None


def test_refused_gang_holds_nothing_and_an_accepted_one_holds_its_devices_for_the_next() -> None:
    there = two_nodes()
    with trial(there, LAX, NOW) as holds:
        assert holds.place_all([GangPart(gpus(1), 5)]) is not None
        assert holds.place_all([GangPart(gpus(1), 3)]) is None
        assert holds.place_all([GangPart(gpus(2), 1)]) is not None
        assert holds.place_all([GangPart(gpus(1), 1)]) is None
        assert holds.place_all([GangPart(gpus(1), 1)]) is not None


def test_possible_pods_are_held_even_if_not_all_have_a_place() -> None:
    there = two_nodes()
    with trial(there, LAX, NOW) as holds:
        holds.place_possible([GangPart(gpus(2), 1), GangPart(gpus(3), 1), GangPart(gpus(1), 1)])
        assert holds.place_all([GangPart(gpus(1), 1)]) is None
        assert holds.place_all([GangPart(gpus(1), 1)]) is not None


def test_fleet_is_as_before_a_trial_even_after_an_error() -> None:
    there = two_nodes()
    there.hold(reservation(slot("GPU-a0")))
    changes, held = there.changes, set(there.held_devices)
    with suppress(ZeroDivisionError), trial(there, LAX, NOW) as holds:
        holds.place_all([GangPart(gpus(1), 3)])
        assert len(there.held_devices) == 4
        raise ZeroDivisionError
    assert (there.changes, set(there.held_devices)) == (changes, held)
    assert unplaced(there, GangPart(gpus(1), 3)) is None
