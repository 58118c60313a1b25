"""Round-robin by namespace: later members do not overtake, and many pods get no more turns."""

from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW
from webhook.core.round_robin import Arrival, RoundRobin


class Line:
    """Members are named by namespace and number. Each arrives later than those before it."""

    def __init__(self) -> None:
        self.rounds = RoundRobin()
        self.members: dict[str, tuple[str, Arrival]] = {}
        self._came = 0

    def comes(self, namespace: str, times: int = 1) -> None:
        for _ in range(times):
            self._came += 1
            uid = f"{namespace}{self._came}"
            self.members[uid] = namespace, (NOW + timedelta(seconds=self._came), uid)
            self.rounds.put(*self.members[uid])

    def leaves(self, uid: str, *, was_served: bool) -> None:
        namespace, turn = self.members.pop(uid)
        self.rounds.drop(namespace, turn, was_served=was_served)

    def serve(self, times: int = 1) -> list[str]:
        """The namespaces of the next members."""
        served = []
        for _ in range(min(times, len(self.members))):
            uid = self.rounds.order()[0]
            served.append(self.members[uid][0])
            self.leaves(uid, was_served=True)
        return served

    def firsts(self) -> list[str]:
        """The first member of each namespace, in serving order."""
        seen: dict[str, str] = {}
        for uid in self.rounds.order():
            seen.setdefault(self.members[uid][0], uid)
        return list(seen.values())


def test_namespace_with_many_members_has_one_turn_in_a_round() -> None:
    line = Line()
    line.comes("a", 4)
    line.comes("b", 2)
    line.comes("c")
    assert line.serve(7) == ["a", "b", "c", "a", "b", "a", "a"]


def test_late_member_is_after_the_first_of_each_namespace_and_before_the_rest() -> None:
    line = Line()
    line.comes("a", 300)
    assert line.serve(100) == ["a"] * 100
    line.comes("b", 3)
    assert line.serve(7) == ["a", "b", "a", "b", "a", "b", "a"]


def test_served_namespace_gets_no_extra_turn() -> None:
    line = Line()
    line.comes("a", 10)
    line.comes("b")
    turns = []
    for _ in range(4):
        turns += line.serve(2)
        line.comes("b")
    assert turns == ["a", "b"] * 4


def test_unserved_namespace_does_not_accumulate_turns() -> None:
    """The first member cannot be served; later members of its namespace are not older than it."""
    line = Line()
    line.comes("a")
    line.comes("b", 50)
    stuck = line.rounds.order()[0]
    for _ in range(20):
        line.leaves(line.rounds.order()[1], was_served=True)
    line.comes("a", 10)
    order = [line.members[uid][0] for uid in line.rounds.order() if uid != stuck]
    assert order[:6] == ["b", "a", "b", "a", "b", "a"]


def test_member_served_before_the_first_of_its_namespace_uses_a_turn() -> None:
    line = Line()
    line.comes("a", 10)
    line.comes("b", 10)
    stuck = line.rounds.order()[0]
    served = []
    for _ in range(6):
        uid = next(one for one in line.rounds.order() if one != stuck)
        served.append(line.members[uid][0])
        line.leaves(uid, was_served=True)
    assert served == ["b", "a"] * 3


@pytest.mark.parametrize("was_served", [True, False])
def test_members_move_up_when_one_leaves(*, was_served: bool) -> None:
    line = Line()
    line.comes("a", 3)
    line.comes("b", 3)
    line.leaves("a1", was_served=was_served)
    expected = {True: ["b", "a", "b", "a", "b"], False: ["a", "b", "a", "b", "b"]}
    assert line.serve(5) == expected[was_served]


NAMESPACES = st.sampled_from("abcd")
STEPS = st.one_of(
    st.tuples(st.just("comes"), NAMESPACES, st.integers(1, 4)),
    st.tuples(st.just("serves"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("leaves"), st.integers(0, 20), st.integers(0, 20)),
)


def played(line: Line, step: tuple[str, str | int, int]) -> None:
    """`serves`: one of the first few is served, as if the first waits for devices."""
    what, which, times = step
    if what == "comes":
        line.comes(str(which), times)
    elif line.members:
        order = line.rounds.order()
        line.leaves(order[int(which) % len(order)], was_served=what == "serves")


@given(st.lists(STEPS, max_size=60), NAMESPACES)
def test_new_member_never_goes_before_the_first_of_a_namespace(
    steps: list[tuple[str, str | int, int]], who: str
) -> None:
    line = Line()
    for step in steps:
        played(line, step)
    before = line.firsts()
    line.comes(who)
    assert line.firsts()[: len(before)] == before


IN_TURN = STEPS.map(lambda step: ("serves", 0, 0) if step[0] == "serves" else step)


@given(st.lists(IN_TURN, max_size=60), st.lists(NAMESPACES, max_size=60))
def test_waiting_namespace_gets_as_many_turns_as_any_other(
    steps: list[tuple[str, str | int, int]], coming: list[str]
) -> None:
    line = Line()
    for step in steps:
        played(line, step)
    line.comes("z", 100)
    turns = Counter[str]()
    for namespace in coming:
        line.comes(namespace, 3)
        (served,) = line.serve()
        turns[served] += 1
        assert all(number <= turns["z"] + 2 for number in turns.values())


@given(st.lists(st.tuples(NAMESPACES, st.integers(1, 5)), max_size=20))
def test_the_first_of_each_namespace_is_served_within_one_round(came: list[tuple[str, int]]) -> None:
    line = Line()
    for namespace, times in came:
        line.comes(namespace, times)
    namespaces = {namespace for namespace, _ in line.members.values()}
    while namespaces:
        served = line.serve(len(namespaces))
        assert set(served) == namespaces
        namespaces = {namespace for namespace, _ in line.members.values()}


@given(st.lists(STEPS, max_size=60))
def test_rebuilt_order_keeps_the_order_within_each_namespace(steps: list[tuple[str, str | int, int]]) -> None:
    """After a change of the leader."""
    line, again = Line(), RoundRobin()
    for step in steps:
        played(line, step)
    for namespace, turn in line.members.values():
        again.put(namespace, turn)
    for namespace in "abcd":
        own = [[uid for uid in one.order() if uid.startswith(namespace)] for one in (line.rounds, again)]
        assert own[0] == own[1]
