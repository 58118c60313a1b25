"""Which pods have other GPUs than those reserved for them, by the sockets of the node."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.node_double import EXITED, NOT_READY, OWN, NodeDouble
from webhook.core.proof_devices import device_name
from webhook.node.given_gpus import AGAIN_AFTER, LASTING, DifferenceDetector, different_gpus
from webhook.node.node_pods import NodePods

TRAIN = "uid-train"
A = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
B = "GPU-bbbbbbbb-0000-4000-8000-000000000000"
PROOF_A, PROOF_B = device_name(A, "aa11"), device_name(B, "aa11")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeDouble]:
    double = NodeDouble(tmp_path)
    double.run(TRAIN)
    await double.start()
    yield double
    await double.stop()


async def different(node: NodeDouble) -> dict[str, tuple[str, ...]]:
    return dict(different_gpus(await NodePods(node.runtime, node.kubelet, OWN).snapshot()))


@pytest.mark.parametrize(
    ("reserved", "given", "proofs", "found"),
    [
        (A, [], [], None),
        (A, [A], [], None),
        (A, [B], [], (B,)),
        (A, [f"{B}::2"], [], (B,)),
        (A, [A, B], [], (A, B)),
        (f"{A},{B}", [B], [], None),
        (A, ["nic-0", "0"], [], None),
        (A, [], [PROOF_A], None),
        (A, [], [PROOF_B], (B,)),
        (f"{B},{A}", [], [PROOF_A, PROOF_B], None),
        ("GPU-odd/Name", [], [device_name("GPU-odd/Name", "aa11")], None),
        ("", [B], [PROOF_B], None),
    ],
    ids=[
        "nothing is given",
        "the reserved GPU",
        "another GPU",
        "a share of another GPU",
        "one more",
        "one of two",
        "devices that are no GPUs",
        "the proof of the reserved GPU",
        "the proof of another GPU",
        "two proofs in another order",
        "a UUID that is no DNS label",
        "nothing is reserved",
    ],
)
async def test_gpus_of_a_pod_that_its_annotation_does_not_name(
    node: NodeDouble, reserved: str, given: list[str], proofs: list[str], found: Sequence[str] | None
) -> None:
    node.reserved[TRAIN], node.given[TRAIN], node.proofs[TRAIN] = reserved, given, proofs
    assert await different(node) == ({} if found is None else {TRAIN: found})


async def test_pod_whose_containers_have_ended_is_not_compared(node: NodeDouble) -> None:
    node.reserved[TRAIN], node.given[TRAIN] = A, [B]
    assert await different(node)
    node.sandboxes[TRAIN], node.containers[TRAIN] = [NOT_READY], [EXITED]
    assert await different(node) == {}


async def test_pod_that_the_kubelet_does_not_name_is_not_compared(node: NodeDouble) -> None:
    node.reserved[TRAIN], node.given[TRAIN] = A, [B]
    node.delete(TRAIN)
    assert await different(node) == {}


async def test_pod_is_not_compared_while_two_pods_of_its_name_are_on_the_node(node: NodeDouble) -> None:
    """The kubelet names pods without their uids."""
    node.reserved[TRAIN], node.given[TRAIN] = A, [B]
    node.run("train")  # the uid of another pod `train`
    assert await different(node) == {}
    node.end("train")
    assert await different(node) == {TRAIN: (B,)}


class Rounds:
    """Successive observations."""

    def __init__(self, node: NodeDouble) -> None:
        self.node, self.detector, self.now = node, DifferenceDetector(), 0.0

    async def after(self, seconds: float) -> Mapping[str, tuple[str, ...]]:
        self.now += seconds
        snapshot = await NodePods(self.node.runtime, self.node.kubelet, OWN).snapshot()
        return self.detector.observe(snapshot, self.now)


async def test_difference_is_reported_when_it_lasts_and_again_after_a_minute(node: NodeDouble) -> None:
    node.reserved[TRAIN], node.given[TRAIN] = A, [B]
    rounds, lasting = Rounds(node), LASTING.total_seconds()
    assert await rounds.after(0) == {}
    assert await rounds.after(lasting - 1) == {}
    assert await rounds.after(1) == {TRAIN: (B,)}
    assert await rounds.after(1) == {TRAIN: (B,)}, "it was not reported"
    rounds.detector.reported(TRAIN, rounds.now)
    assert await rounds.after(AGAIN_AFTER.total_seconds() - 1) == {}
    assert await rounds.after(1) == {TRAIN: (B,)}


async def test_difference_that_goes_begins_anew(node: NodeDouble) -> None:
    """The successor of a pod that was deleted by force has its name."""
    node.reserved[TRAIN], node.given[TRAIN] = A, [B]
    rounds = Rounds(node)
    assert await rounds.after(0) == {}
    node.reserved[TRAIN] = B
    assert await rounds.after(5) == {}
    node.reserved[TRAIN] = A
    assert await rounds.after(LASTING.total_seconds()) == {}
    assert await rounds.after(LASTING.total_seconds()) == {TRAIN: (B,)}
