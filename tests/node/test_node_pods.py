"""The pods of a node: known only if the runtime and the kubelet are those of this node, and both respond."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.node_double import (
    CREATED,
    EXITED,
    NOT_READY,
    OWN,
    READY,
    RUNNING,
    UNKNOWN,
    NodeDouble,
)
from webhook.node.node_pods import NodePods, NodeUnknownError, RemainingContainers
from webhook.node.pod_ends import MAX_PODS, MAX_SYNC_DURATION, MIN_INTERVAL, RETENTION, PodEndDetector

OLD = "uid-old"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[NodeDouble]:
    double = NodeDouble(tmp_path)
    await double.start()
    yield double
    await double.stop()


def pods_of(node: NodeDouble) -> NodePods:
    return NodePods(node.runtime, node.kubelet, OWN)


async def remaining(node: NodeDouble, uid: str = OLD) -> RemainingContainers | None:
    return (await pods_of(node).snapshot()).remains.get(uid)


@pytest.mark.parametrize(
    ("sandboxes", "containers", "left"),
    [
        ([], [], False),
        ([NOT_READY], [EXITED], False),
        ([NOT_READY, NOT_READY], [EXITED, EXITED], False),
        ([READY], [EXITED], True),
        ([READY], [], True),
        ([NOT_READY, READY], [EXITED], True),
        ([NOT_READY], [RUNNING], True),
        ([], [RUNNING], True),
        ([NOT_READY], [CREATED], True),
        ([NOT_READY], [EXITED, UNKNOWN], True),
        ([NOT_READY], [7], True),
        ([7], [EXITED], True),
    ],
    ids=[
        "nothing",
        "all ended",
        "two sandboxes that ended",
        "between two restarts",
        "nothing started yet",
        "a new sandbox",
        "a container runs",
        "a container runs without a sandbox",
        "a container is about to start",
        "the runtime does not know of one",
        "a state of a container that is new",
        "a state of a sandbox that is new",
    ],
)
async def test_remaining_containers_of_a_pod(
    node: NodeDouble, sandboxes: Sequence[int], containers: Sequence[int], left: bool
) -> None:
    node.sandboxes[OLD], node.containers[OLD] = list(sandboxes), list(containers)
    found = await remaining(node)
    assert (found is not None and found.is_alive) is left


async def test_ready_sandboxes_are_counted(node: NodeDouble) -> None:
    node.sandboxes[OLD], node.containers[OLD] = [NOT_READY, READY, 7, READY], [RUNNING]
    assert await remaining(node) == RemainingContainers(OLD, ("ml", "old"), is_alive=True, ready_sandboxes=2)


async def test_kubelet_is_asked_before_the_runtime(node: NodeDouble) -> None:
    await pods_of(node).snapshot()
    assert node.calls == ["List", "ListPodSandbox", "ListContainers"]


@pytest.mark.parametrize("call", ["List", "ListPodSandbox", "ListContainers"])
async def test_error_of_a_socket_is_raised(node: NodeDouble, call: str) -> None:
    node.failing_calls.add(call)
    with pytest.raises(NodeUnknownError, match="not ready"):
        await pods_of(node).snapshot()


async def test_dead_kubelet_is_an_error(node: NodeDouble) -> None:
    await node.kill_kubelet()
    with pytest.raises(NodeUnknownError, match="kubelet"):
        await pods_of(node).snapshot()


async def test_runtime_of_another_node_is_an_error(node: NodeDouble) -> None:
    node.clear(OWN)
    with pytest.raises(NodeUnknownError, match="does not run this pod"):
        await pods_of(node).snapshot()


async def test_kubelet_that_does_not_know_its_pods_yet_is_an_error(node: NodeDouble) -> None:
    node.kubelet_pods.clear()
    with pytest.raises(NodeUnknownError, match="does not list this pod, ml/own"):
        await pods_of(node).snapshot()


# From snapshots to ends.


class Snapshots:
    """Snapshots of one node over time."""

    def __init__(self, node: NodeDouble) -> None:
        self.node, self.ends, self.now = node, PodEndDetector(), 100.0

    async def see(self, after: float = MIN_INTERVAL.total_seconds(), *, lasting: float = 0.0) -> list[str]:
        began = self.now + after
        self.now = began + lasting
        return sorted(self.ends.observe(await pods_of(self.node).snapshot(), began, self.now))

    async def see_deleted(self, uid: str) -> None:
        """Its sandbox is ready for some time after the kubelet has observed its deletion."""
        self.node.delete(uid)
        for _ in range(2):
            assert await self.see() == []


@pytest.fixture
def snapshots(node: NodeDouble) -> Snapshots:
    return Snapshots(node)


async def test_pod_has_ended_when_two_spaced_snapshots_show_nothing(node: NodeDouble, snapshots: Snapshots) -> None:
    node.run(OLD)
    assert await snapshots.see() == []
    await snapshots.see_deleted(OLD)
    node.clear(OLD)
    assert await snapshots.see() == []
    assert await snapshots.see(4.9) == []
    assert await snapshots.see(0.1) == [OLD]


async def test_sandbox_that_the_kubelet_may_be_creating_is_waited_for(node: NodeDouble, snapshots: Snapshots) -> None:
    """A container has killed the sandbox, and the network of the next one takes minutes. The runtime does not list the
    sandbox before it is ready, and a deletion does not stop the kubelet from starting containers in it."""
    node.run(OLD)
    await snapshots.see()
    node.end(OLD)
    await snapshots.see()
    node.delete(OLD)
    for _ in range(48):
        assert await snapshots.see() == [], "four minutes without a trace of the next sandbox"
    node.sandboxes[OLD], node.containers[OLD] = [NOT_READY, READY], [EXITED, RUNNING]
    assert await snapshots.see() == []
    assert await snapshots.see() == []
    node.end(OLD)
    assert await snapshots.see() == []
    assert await snapshots.see() == [OLD], "one sync makes one sandbox"


async def test_pod_without_a_ready_sandbox_ends_after_the_longest_sync(node: NodeDouble, snapshots: Snapshots) -> None:
    node.run(OLD)
    await snapshots.see()
    node.delete(OLD)
    node.end(OLD)
    assert await snapshots.see() == []
    assert await snapshots.see(MAX_SYNC_DURATION.total_seconds() - 0.1) == []
    assert await snapshots.see(0.1) == [OLD]


async def test_longest_sync_counts_from_the_end_of_the_last_container(node: NodeDouble, snapshots: Snapshots) -> None:
    """A sync that creates a new sandbox first ends the containers of the old one, with their grace period."""
    node.run(OLD)
    node.delete(OLD)
    node.sandboxes[OLD] = [NOT_READY]
    for _ in range(2):
        assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == []
    node.end(OLD)
    assert await snapshots.see() == []
    assert await snapshots.see() == []
    assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == [OLD]


async def test_sandbox_ready_only_while_the_kubelet_named_the_pod_proves_nothing(
    node: NodeDouble, snapshots: Snapshots
) -> None:
    node.run(OLD)
    for _ in range(3):
        await snapshots.see()
    node.delete(OLD)
    node.end(OLD)
    for _ in range(3):
        assert await snapshots.see() == []


async def test_sandbox_ready_only_during_the_deletion_proves_nothing(node: NodeDouble, snapshots: Snapshots) -> None:
    """A sync that has begun checks the sandbox a moment later, and may find it dead."""
    node.run(OLD)
    node.delete(OLD)
    await snapshots.see()
    await snapshots.see(4.9)
    node.end(OLD)
    for _ in range(3):
        assert await snapshots.see() == []


async def test_snapshot_counts_from_its_beginning(node: NodeDouble, snapshots: Snapshots) -> None:
    """The kubelet and the runtime may respond slowly, with data as old as the request."""
    node.run(OLD)
    node.delete(OLD)
    await snapshots.see()
    await snapshots.see(1, lasting=10)
    node.end(OLD)
    for _ in range(3):
        assert await snapshots.see() == []


async def test_two_ready_sandboxes_prove_nothing(node: NodeDouble, snapshots: Snapshots) -> None:
    """The kubelet ends both and creates a new one."""
    node.run(OLD)
    node.sandboxes[OLD] = [READY, READY]
    await snapshots.see_deleted(OLD)
    node.end(OLD)
    for _ in range(3):
        assert await snapshots.see() == []


async def test_sandbox_proof_is_reset_when_the_kubelet_names_the_pod_again(
    node: NodeDouble, snapshots: Snapshots
) -> None:
    node.run(OLD)
    await snapshots.see_deleted(OLD)
    node.kubelet_pods.add("old")
    await snapshots.see()
    node.delete(OLD)
    node.end(OLD)
    for _ in range(3):
        assert await snapshots.see() == []


async def test_pod_that_the_kubelet_names_has_not_ended(node: NodeDouble, snapshots: Snapshots) -> None:
    """It may wait for a volume, or for the time to restart a container."""
    node.end(OLD)
    node.kubelet_pods.add("old")
    for _ in range(3):
        assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == []


async def test_pod_that_was_never_observed_has_not_ended(node: NodeDouble, snapshots: Snapshots) -> None:
    """The kubelet may not know the pod yet."""
    for _ in range(3):
        assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == []


async def test_pod_that_returns_between_two_snapshots_has_not_ended(node: NodeDouble, snapshots: Snapshots) -> None:
    node.run(OLD)
    await snapshots.see_deleted(OLD)
    node.end(OLD)
    await snapshots.see()
    node.sandboxes[OLD] = [NOT_READY, READY]
    assert await snapshots.see() == []
    node.clear(OLD)
    assert await snapshots.see() == []
    assert await snapshots.see() == [OLD]


async def test_pod_ended_before_the_first_snapshot_is_known_by_its_remains(
    node: NodeDouble, snapshots: Snapshots
) -> None:
    node.end(OLD)
    await snapshots.see()
    assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == [OLD]


async def test_new_pod_with_the_same_name_delays_the_end_of_the_old_one(node: NodeDouble, snapshots: Snapshots) -> None:
    node.end(OLD)
    await snapshots.see()
    node.kubelet_pods.add("old")
    assert await snapshots.see(MAX_SYNC_DURATION.total_seconds()) == []


async def test_ended_pods_are_forgotten_after_a_time_and_above_a_limit(node: NodeDouble, snapshots: Snapshots) -> None:
    for number in range(MAX_PODS + 3):
        node.end(f"uid-{number}")
    await snapshots.see()
    ended = await snapshots.see(MAX_SYNC_DURATION.total_seconds())
    assert len(ended) == MAX_PODS + 3, "the runtime has something of them all the same"
    for number in range(MAX_PODS + 3):
        node.clear(f"uid-{number}")
    assert len(await snapshots.see()) == MAX_PODS
    assert await snapshots.see(RETENTION.total_seconds()) == []
    assert await snapshots.see() == []
