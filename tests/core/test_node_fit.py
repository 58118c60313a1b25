"""Whether a node has room for a pod, by the scheduler's own rules."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhook.core.device import Node, Taint
from webhook.core.node_fit import (
    CORDON,
    CORDONED,
    NOT_READY,
    NOT_SELECTED,
    PORT_TAKEN,
    TAINTED,
    Needs,
    Room,
    SpecWire,
    in_thousandths,
    sentence,
)
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Toleration

Raw = dict[str, Any]


FPGA: Any = {"example.test/fpga": "1"}


def container(ports: list[Raw] | None = None, restart: str | None = None, **requests: Any) -> Raw:
    return {"resources": {"requests": requests}, "ports": ports, "restartPolicy": restart}


def sidecar(**requests: Any) -> Raw:
    return container(restart="Always", **requests)


def needs(*containers: Raw, **members: Any) -> Needs:
    return Needs.of(msgspec.convert({"containers": list(containers), **members}, SpecWire))


def amounts(*containers: Raw, **members: Any) -> dict[str, int]:
    found = dict(needs(*containers, **members).amounts)
    assert found.pop("pods") == 1000
    return found


def room(node: Node | None = None, **allocatable: Any) -> Room:
    return Room(node or Node("n"), in_thousandths({"cpu": "4", "memory": "8Gi", "pods": "10", **allocatable}))


# What a pod uses.


def test_containers_and_sidecars_run_together() -> None:
    assert amounts(container(cpu="1"), container(cpu="500m"), initContainers=[sidecar(cpu="2")]) == {"cpu": 3500}


def test_an_init_container_runs_beside_the_sidecars_that_started_before_it() -> None:
    init = [sidecar(cpu="1"), container(cpu="3"), sidecar(cpu="1")]
    assert amounts(container(cpu="1"), initContainers=init) == {"cpu": 4000}
    init = [container(cpu="3"), sidecar(cpu="1"), sidecar(cpu="1")]
    assert amounts(container(cpu="1"), initContainers=init) == {"cpu": 3000}


def test_each_resource_is_counted_by_itself() -> None:
    init = [container(cpu="1", memory="4Gi")]
    assert amounts(container(cpu="2", memory="1Gi"), initContainers=init) == in_thousandths({"cpu": 2, "memory": "4Gi"})


def test_overhead_comes_on_top_and_a_pods_own_request_stands_for_its_containers() -> None:
    whole: Raw = {"resources": {"requests": {"cpu": "3"}}, "overhead": {"cpu": "250m", "memory": "1Ki"}}
    assert amounts(container(cpu="1", memory="1Ki"), **whole) == in_thousandths({"cpu": "3250m", "memory": "2Ki"})


def test_what_is_limited_and_not_requested_is_requested() -> None:
    limited = {"resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}}
    assert amounts(limited) == in_thousandths({"cpu": 1, "memory": "1Gi"})


def test_a_pod_that_asks_for_nothing_is_one_pod_all_the_same() -> None:
    assert needs({}).amounts == (("pods", 1000),)


# Room.


def test_a_node_is_full_to_the_last_thousandth() -> None:
    one = room()
    one.take(needs(container(cpu="3999m")))
    assert one.has_room(needs(container(cpu="1m")))
    assert not one.has_room(needs(container(cpu="2m")))
    assert one.shortages(needs(container(cpu="2m"))) == ["with too little cpu"]


def test_pods_are_counted() -> None:
    one = room(pods="1")
    one.take(needs({}))
    assert one.shortages(needs({})) == ["with too little pods"]


def test_a_resource_that_a_node_does_not_have_is_short_there() -> None:
    assert room().shortages(needs(container(**FPGA))) == ["with too little example.test/fpga"]
    assert room(**FPGA).has_room(needs(container(**FPGA)))


def test_every_shortage_is_named() -> None:
    found = room().shortages(needs(container(cpu="5", memory="9Gi")))
    assert found == ["with too little cpu", "with too little memory"]


@pytest.mark.parametrize(
    ("taken", "wanted", "is_free"),
    [
        ({"hostPort": 80}, {"hostPort": 80}, False),
        ({"hostPort": 80}, {"hostPort": 81}, True),
        ({"hostPort": 80}, {"hostPort": 80, "protocol": "UDP"}, True),
        ({"hostPort": 80}, {"hostPort": 80, "hostIP": "10.0.0.1"}, False),
        ({"hostPort": 80, "hostIP": "10.0.0.2"}, {"hostPort": 80, "hostIP": "10.0.0.1"}, True),
        ({"containerPort": 80}, {"containerPort": 80}, True),
    ],
    ids=str,
)
def test_host_ports(taken: Raw, wanted: Raw, is_free: bool) -> None:
    one = room()
    one.take(needs(container([taken])))
    asked = needs(container([wanted]))
    assert one.has_room(asked) is is_free
    assert one.shortages(asked) == ([] if is_free else [PORT_TAKEN])


PODS = st.builds(
    lambda cpu, port: needs(container([{"hostPort": port}] if port else [], cpu=f"{cpu}m")),
    st.integers(0, 900),
    st.integers(0, 3),
)


@given(st.lists(PODS, max_size=12), st.randoms(use_true_random=False))
def test_what_is_given_back_is_there_again(pods: list[Needs], order: Any) -> None:
    one = room()
    for each in pods:
        one.take(each)
    order.shuffle(pods)
    for each in pods:
        one.give_back(each)
    assert not any(one.used.values())
    assert not one.ports
    assert one.fullness() == 0


# The node itself.


@pytest.mark.defect("S1-8")
@pytest.mark.parametrize(
    ("node", "objection"),
    [
        (Node("n"), None),
        (Node("n", is_ready=False), NOT_READY),
        (Node("n", is_cordoned=True), CORDONED),
        (Node("n", taints=(Taint("a", "b"),)), TAINTED),
        (Node("n", taints=(Taint("a", "b", "NoExecute"),)), TAINTED),
        (Node("n", taints=(Taint("a", "b", "PreferNoSchedule"),)), None),
    ],
    ids=str,
)
def test_nodes_that_take_no_pods(node: Node, objection: str | None) -> None:
    assert room(node).objection(NodesAsked()) == objection


def test_what_is_tolerated_does_not_count() -> None:
    tolerant = NodesAsked(tolerations=(Toleration(operator="Exists"),))
    cordoned = Node("n", is_cordoned=True, taints=(CORDON, Taint("a")))
    assert room(cordoned).objection(tolerant) is None
    assert room(Node("n", is_ready=False)).objection(tolerant) == NOT_READY


def test_what_a_pod_selects_is_asked_first() -> None:
    asked = NodesAsked(selector=(("zone", "a"),))
    assert room(Node("n", {"zone": "b"}, is_ready=False)).objection(asked) == NOT_SELECTED
    assert room(Node("n", {"zone": "a"})).objection(asked) is None


def test_the_fullest_resource_says_how_full_a_node_is() -> None:
    one = room()
    one.take(needs(container(cpu="1", memory="6Gi")))
    assert one.fullness() == 0.75


def test_a_refusal_is_said_in_numbers() -> None:
    assert sentence({NOT_READY: 1, TAINTED: 3}, 5) == (
        "0/5 nodes will do: 3 with a taint that the pod does not tolerate, 1 not ready"
    )
    assert sentence({}, 0) == "0/0 nodes will do"
