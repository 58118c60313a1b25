"""Round-robin by namespace: later members do not overtake, and many pods get no more turns."""

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW
from webhook.core.round_robin import Arrival, RoundRobin


class Members:
    """Members are named by namespace and number. Each arrives later than those before it."""

    def __init__(self) -> None:
        self.rounds = RoundRobin()
        self.by_uid: dict[str, tuple[str, Arrival]] = {}
        self._added = 0

    def add(self, namespace: str, times: int = 1) -> None:
        for _ in range(times):
            self._added += 1
            uid = f"{namespace}{self._added}"
            self.by_uid[uid] = namespace, (NOW + timedelta(seconds=self._added), uid)
            self.rounds.put(*self.by_uid[uid])

    def remove(self, uid: str, *, was_served: bool) -> None:
        namespace, arrival = self.by_uid.pop(uid)
        self.rounds.drop(namespace, arrival, was_served=was_served)

    def serve(self, times: int = 1) -> list[str]:
        """The namespaces of the next members."""
        served = []
        for _ in range(min(times, len(self.by_uid))):
            uid = self.rounds.order()[0]
            served.append(self.by_uid[uid][0])
            self.remove(uid, was_served=True)
        return served

    def firsts(self) -> list[str]:
        """The first member of each namespace, in serving order."""
        seen: dict[str, str] = {}
        for uid in self.rounds.order():
            seen.setdefault(self.by_uid[uid][0], uid)
        return list(seen.values())


def test_namespace_with_many_members_has_one_turn_in_a_round() -> None:
    members = Members()
    members.add("a", 4)
    members.add("b", 2)
    members.add("c")
    assert members.serve(7) == ["a", "b", "c", "a", "b", "a", "a"]


def test_late_member_is_after_the_first_of_each_namespace_and_before_the_rest() -> None:
    members = Members()
    members.add("a", 300)
    assert members.serve(100) == ["a"] * 100
    members.add("b", 3)
    assert members.serve(7) == ["a", "b", "a", "b", "a", "b", "a"]


def test_served_namespace_gets_no_extra_turn() -> None:
    members = Members()
    members.add("a", 10)
    members.add("b")
    turns = []
    for _ in range(4):
        turns += members.serve(2)
        members.add("b")
    assert turns == ["a", "b"] * 4


def test_unserved_namespace_does_not_accumulate_turns() -> None:
    """The first member cannot be served; later members of its namespace are not older than it."""
    members = Members()
    members.add("a")
    members.add("b", 50)
    stuck = members.rounds.order()[0]
    for _ in range(20):
        members.remove(members.rounds.order()[1], was_served=True)
    members.add("a", 10)
    order = [members.by_uid[uid][0] for uid in members.rounds.order() if uid != stuck]
    assert order[:6] == ["b", "a", "b", "a", "b", "a"]


def test_member_served_before_the_first_of_its_namespace_uses_a_turn() -> None:
    members = Members()
    members.add("a", 10)
    members.add("b", 10)
    stuck = members.rounds.order()[0]
    served = []
    for _ in range(6):
        uid = next(one for one in members.rounds.order() if one != stuck)
        served.append(members.by_uid[uid][0])
        members.remove(uid, was_served=True)
    assert served == ["b", "a"] * 3


@pytest.mark.parametrize("was_served", [True, False])
def test_members_move_up_when_one_leaves(*, was_served: bool) -> None:
    members = Members()
    members.add("a", 3)
    members.add("b", 3)
    members.remove("a1", was_served=was_served)
    expected = {True: ["b", "a", "b", "a", "b"], False: ["a", "b", "a", "b", "b"]}
    assert members.serve(5) == expected[was_served]


NAMESPACES = st.sampled_from("abcd")
STEPS = st.one_of(
    st.tuples(st.just("add"), NAMESPACES, st.integers(1, 4)),
    st.tuples(st.just("serve"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 20), st.integers(0, 20)),
)


def apply(members: Members, step: tuple[str, str | int, int]) -> None:
    """`serve`: one of the first few is served, as if the first waits for devices."""
    what, which, times = step
    if what == "add":
        members.add(str(which), times)
    elif members.by_uid:
        order = members.rounds.order()
        members.remove(order[int(which) % len(order)], was_served=what == "serve")


@given(st.lists(STEPS, max_size=60), NAMESPACES)
def test_new_member_never_goes_before_the_first_of_a_namespace(
    steps: list[tuple[str, str | int, int]], namespace: str
) -> None:
    members = Members()
    for step in steps:
        apply(members, step)
    before = members.firsts()
    members.add(namespace)
    assert members.firsts()[: len(before)] == before


STEPS_IN_ORDER = STEPS.map(lambda step: ("serve", 0, 0) if step[0] == "serve" else step)


@given(st.lists(STEPS_IN_ORDER, max_size=60), st.lists(NAMESPACES, max_size=60))
def test_waiting_namespace_gets_as_many_turns_as_any_other(
    steps: list[tuple[str, str | int, int]], added: list[str]
) -> None:
    members = Members()
    for step in steps:
        apply(members, step)
    members.add("z", 100)
    turns = Counter[str]()
    for namespace in added:
        members.add(namespace, 3)
        (served,) = members.serve()
        turns[served] += 1
        assert all(number <= turns["z"] + 2 for number in turns.values())


@given(st.lists(st.tuples(NAMESPACES, st.integers(1, 5)), max_size=20))
def test_the_first_of_each_namespace_is_served_within_one_round(added: list[tuple[str, int]]) -> None:
    members = Members()
    for namespace, times in added:
        members.add(namespace, times)
    namespaces = {namespace for namespace, _ in members.by_uid.values()}
    while namespaces:
        served = members.serve(len(namespaces))
        assert set(served) == namespaces
        namespaces = {namespace for namespace, _ in members.by_uid.values()}


@given(st.lists(STEPS, max_size=60))
def test_rebuilt_order_keeps_the_order_within_each_namespace(steps: list[tuple[str, str | int, int]]) -> None:
    """After a change of the leader."""
    members, again = Members(), RoundRobin()
    for step in steps:
        apply(members, step)
    for namespace, arrival in members.by_uid.values():
        again.put(namespace, arrival)
    for namespace in "abcd":
        own = [[uid for uid in one.order() if uid.startswith(namespace)] for one in (members.rounds, again)]
        assert own[0] == own[1]
