"""The queue order: by age and namespace among pods that want the same devices, whatever their number."""

import time
from collections.abc import Mapping
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tests import builders
from tests.builders import NOW, raw_container
from webhook.core.queue_order import OWN_IDS, KindPass, QueuedPod, QueueOrder, reservation_id_of
from webhook.core.reservation import PodIdentity


def waiter(
    number: int, gpus: int = 1, second: int = 0, asked: Mapping[str, str] | None = None, namespace: str = "ml"
) -> QueuedPod:
    claim = builders.claim(builders.raw_pod(raw_container(gpus=gpus), annotations=asked))
    return QueuedPod(PodIdentity(namespace, f"p{number}", f"uid-{number:03}"), NOW + timedelta(seconds=second), claim)


def of_hash(number: int, digest: int, namespace: str = "ml") -> QueuedPod:
    """Each number is a kind of its own."""
    return waiter(number, second=number, asked={"gpuwarden.io/required-hash": f"sha256:{digest}"}, namespace=namespace)


def test_kind_is_the_claim_without_its_count() -> None:
    assert waiter(1, 1).kind == waiter(2, 8).kind
    assert waiter(1).kind != waiter(2, asked={"gpuwarden.io/required-hash": "sha256:aa"}).kind
    assert waiter(1).kind != waiter(2, asked={"gpuwarden.io/shared": "true"}).kind


def test_heads_are_the_oldest_pods_of_each_count() -> None:
    queue = QueueOrder()
    for one in (waiter(3, 1, 5), waiter(1, 1, 7), waiter(2, 8, 6)):
        queue.put(one)
    (kind,) = queue.kinds()
    assert [head.pod.name for head in queue.heads(kind)] == ["p3", "p2"]
    assert [one.pod.name for one in queue.same_count_from(queue.heads(kind)[0])] == ["p3", "p1"]


def test_pod_with_a_changed_claim_moves_to_another_queue() -> None:
    queue = QueueOrder()
    queue.put(waiter(1))
    queue.put(waiter(1, asked={"gpuwarden.io/required-hash": "sha256:aa"}))
    assert len(queue) == 1
    assert queue.kinds() == [waiter(1, asked={"gpuwarden.io/required-hash": "sha256:aa"}).kind]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3), st.integers(0, 4), st.booleans()), max_size=40))
def test_queue_order_equals_a_sorted_list(moves: list[tuple[int, int, int, bool]]) -> None:
    queue, plain = QueueOrder(), dict[str, QueuedPod]()
    for number, gpus, second, stays in moves:
        one = waiter(number, gpus, second)
        if stays:
            queue.put(one)
            plain[one.pod.uid] = one
        else:
            queue.drop(one.pod.uid)
            plain.pop(one.pod.uid, None)
    assert queue.uids() == plain.keys()
    in_order = sorted(plain.values(), key=lambda one: one.arrival)
    firsts = {one.claim.count: one for one in reversed(in_order)}
    heads = [head for kind in queue.kinds() for head in queue.heads(kind)]
    assert heads == sorted(firsts.values(), key=lambda one: one.arrival)
    for head in heads:
        same = [one for one in in_order if one.claim.count == head.claim.count]
        assert list(queue.same_count_from(head)) == same


def test_pass_is_in_order_of_age_across_counts() -> None:
    queue = QueueOrder()
    for one in (waiter(1, 8, 1), waiter(2, 1, 2), waiter(3, 8, 3), waiter(4, 1, 4)):
        queue.put(one)
    (kind,) = queue.kinds()
    kind_pass, taken = KindPass(queue, queue.heads(kind)), []
    while kind_pass:
        taken.append(kind_pass.take())
        kind_pass.skip(taken[-1])
    assert [one.pod.name for one in taken] == ["p1", "p2", "p3", "p4"]


def test_pass_is_round_robin_by_namespace_across_counts() -> None:
    queue = QueueOrder()
    for one in (waiter(1, 8, 1), waiter(2, 1, 2), waiter(3, 8, 3), waiter(4, 1, 4, namespace="cv")):
        queue.put(one)
    (kind,) = queue.kinds()
    assert [head.pod.name for head in queue.heads(kind)] == ["p1", "p4"]
    assert queue.counts(kind) == [1, 8]
    kind_pass, taken = KindPass(queue, queue.heads(kind)), []
    while kind_pass:
        taken.append(kind_pass.take())
        kind_pass.skip(taken[-1])
    assert [one.pod.name for one in taken] == ["p1", "p4", "p2", "p3"]
    queue.drop("uid-001", was_served=True)
    assert [head.pod.name for head in queue.heads(kind)] == ["p4", "p3"]
    queue.drop("uid-004", was_served=True)
    queue.put(waiter(5, 1, 5, namespace="cv"))
    assert [one.pod.name for head in queue.heads(kind) for one in queue.same_count_from(head)] == ["p2", "p5", "p3"]


def test_kinds_are_round_robin_by_namespace() -> None:
    """Pods of many different kinds get no more turns."""
    queue = QueueOrder()
    for number in range(1, 5):
        queue.put(of_hash(number, number))
    queue.put(of_hash(5, 5, "cv"))
    queue.put(of_hash(6, 6, "cv"))
    served = []
    while queue.kinds():
        head = queue.heads(queue.kinds()[0])[0]
        served.append(head.pod.name)
        queue.drop(head.pod.uid, was_served=True)
    assert served == ["p1", "p5", "p2", "p6", "p3", "p4"]


def test_kind_that_cannot_be_served_takes_at_most_one_turn_of_its_namespace() -> None:
    queue = QueueOrder()
    for number in range(1, 51):
        queue.put(of_hash(number, 1))
    queue.put(of_hash(51, 2))
    for number in range(52, 60):
        queue.put(of_hash(number, 3, "cv"))
    heads = [queue.heads(kind)[0] for kind in queue.kinds()]
    assert [one.claim.record.hashes for one in heads] == [("sha256:1",), ("sha256:3",), ("sha256:2",)]


def test_ten_thousand_queued_pods_are_ordered_quickly() -> None:
    queue = QueueOrder()
    for number in range(10_000):
        queue.put(waiter(number, 1 + number % 8, number, namespace=f"ns-{number % 100}"))
    (kind,) = queue.kinds()
    began = time.process_time()
    for _ in range(10):
        queue.drop(queue.heads(kind)[0].pod.uid, was_served=True)
    assert time.process_time() - began < 5.0
    assert len(queue) == 9_990


def test_pod_with_a_held_node_is_first_and_only_once() -> None:
    queue = QueueOrder()
    for one in (waiter(1, 1, 1), waiter(2, 8, 2), waiter(3, 8, 3), waiter(4, 1, 4)):
        queue.put(one)
    (kind,) = queue.kinds()
    kind_pass, taken = KindPass(queue, queue.heads(kind), queue.get("uid-003")), []
    while kind_pass:
        taken.append(kind_pass.take())
        kind_pass.skip(taken[-1])
    assert [one.pod.name for one in taken] == ["p3", "p1", "p2", "p4"]


def test_waiting_pod_blocks_only_pods_with_the_same_count_or_more() -> None:
    queue = QueueOrder()
    for one in (waiter(1, 4, 1), waiter(2, 8, 2), waiter(3, 1, 3), waiter(4, 4, 4), waiter(5, 2, 5)):
        queue.put(one)
    (kind,) = queue.kinds()
    kind_pass = KindPass(queue, queue.heads(kind))
    first = kind_pass.take()
    assert [one.pod.name for one in kind_pass.block(first)] == ["p2"]
    assert [kind_pass.take().pod.name for _ in range(len(kind_pass))] == ["p3", "p5"]


def test_reservation_id_of_a_queued_pod_is_derived_from_its_uid() -> None:
    first, second = waiter(1), waiter(2)
    assert reservation_id_of(first.pod) == "pod-uid-001"
    assert reservation_id_of(first.pod) != reservation_id_of(second.pod)
    assert not builders.REVIEW_UID.startswith(OWN_IDS)
