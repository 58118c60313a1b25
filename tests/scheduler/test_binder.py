"""The binder with a real door and ledger: what it puts where, what it tells, and when it tries again."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve

from tests.builders import HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.recorded_events import RecordedEvents
from tests.web.house import House
from tests.web.replica import Shared, sharing
from webhook.admission.binding_check import BindingCheck
from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.nodes_asked import Expression, NodeTerm
from webhook.core.reasons import Reason
from webhook.core.reservation import PodIdentity
from webhook.scheduler.binder import Binder
from webhook.scheduler.binder_telling import Told
from webhook.scheduler.binder_view import NamespacesOfWorld, NodesOfWorld, PodsOfWorld, World
from webhook.scheduler.binder_volumes import (
    NOT_BOUND,
    Unmade,
    UnusableVolumeError,
    Volume,
    VolumesUnavailableError,
    Wanted,
)
from webhook.scheduler.binder_wish import Outcome
from webhook.scheduler.extender import BindingLostError, BindingRefusedError

NAMES = ("node-a", "node-b", "node-c")
OURS = "gpu-scheduler"


class Cluster:
    """Pods on an API server that minds uid and version, tells a watch of what it does, and fails when told to."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.listeners: list[PodsOfWorld] = []
        self.versions = 0
        self.bound: list[tuple[str, str]] = []
        self.loses: set[str] = set()
        """`question` or `answer`: which one gets lost on the way."""
        self.refuses: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.watch_lags = False
        self.most_at_once = self.at_once = 0
        self.conditions: list[tuple[str, str]] = []
        self.volumes: dict[str, Volume | Unmade | Exception] = {}
        """By claim."""
        self.volumes_asked = 0
        self.selected: list[tuple[str, str]] = []
        self.selecting: Exception | None = None
        """What comes of giving a claim a node."""

    def put(self, raw: Raw) -> None:
        self.versions += 1
        raw["metadata"]["resourceVersion"] = str(self.versions)
        self.shared.has(raw)
        self.tell(raw)

    def tell(self, raw: Raw) -> None:
        for one in self.listeners:
            one.changed(raw)

    def remove(self, name: str, namespace: str = "ml") -> None:
        raw = self.shared.pods.pop((namespace, name))
        for one in self.listeners:
            one.deleted(raw)

    async def bind(self, pod: PodIdentity, node: str, version: str = "") -> None:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self._bind(pod, node, version)
        finally:
            self.at_once -= 1

    async def _bind(self, pod: PodIdentity, node: str, version: str) -> None:
        await asyncio.sleep(0)
        if pod.name in self.hangs:
            await asyncio.Event().wait()
        if "question" in self.loses:
            raise BindingLostError("the API server cannot be reached")
        if pod.name in self.refuses:
            raise self.refuses[pod.name]
        raw = self.shared.pods.get((pod.namespace, pod.name))
        if raw is None:
            raise BindingRefusedError("not found", 404)
        if raw["metadata"]["uid"] != pod.uid or raw["metadata"]["resourceVersion"] != version:
            raise BindingRefusedError("Precondition failed", 409)
        if raw["spec"].get("nodeName"):
            raise BindingRefusedError("already assigned", 409)
        after = {**raw, "metadata": {**raw["metadata"]}, "spec": {**raw["spec"], "nodeName": node}}
        self.bound.append((pod.name, node))
        if self.watch_lags:
            self.shared.has(after)
        else:
            self.put(after)
        if "answer" in self.loses:
            raise BindingLostError("the API server cannot be reached")

    async def of(self, pod: PodIdentity, wanted: Wanted) -> Volume | Unmade:
        self.volumes_asked += 1
        found = self.volumes[wanted.claim]
        if isinstance(found, Exception):
            raise found
        return found

    async def select(self, pod: PodIdentity, unmade: Unmade, node: str) -> None:
        if self.selecting is not None:
            raise self.selecting
        assert not unmade.node
        self.selected.append((unmade.claim, node))
        self.volumes[unmade.claim] = evolve(unmade, node=node)

    async def unscheduled(self, pod: PodIdentity, version: str, message: str, at: str) -> bool:
        """As the API server does: by version."""
        await asyncio.sleep(0)
        if (
            "question" in self.loses
            or self.shared.pods[pod.namespace, pod.name]["metadata"]["resourceVersion"] != version
        ):
            return False
        self.conditions.append((pod.name, message))
        return True


class Scene:
    def __init__(self, house: House, shared: Shared, opt_in: str = keys.OPT_IN.name) -> None:
        self.house = house
        self.cluster = Cluster(shared)
        self.heard = RecordedEvents()
        self.counted: list[str] = []
        self.notified = 0
        self.time: Iterator[float] = itertools.repeat(0.0)
        parts = house.parts
        self.world = World([OURS, "second-name"], self._notify)
        self.nodes, self.pods = NodesOfWorld(self.world), PodsOfWorld(self.world)
        self.namespaces = NamespacesOfWorld(self.world)
        self.cluster.listeners.append(self.pods)
        self.told = Told(self.heard, self.cluster, self.counted.append, parts.clock)
        door = BindingCheck(parts.reserver, parts.pods, parts.rules.claims, parts.rules.bind_deadline, parts.clock)
        self.binder = Binder(
            self.world,
            parts.fleet,
            parts.reserver.policy,
            parts.rules.claims,
            door,
            self.cluster,
            shared,
            self.cluster,
            self.told,
            parts.clock,
            lambda: next(self.time),
            opt_in,
        )
        for name in NAMES:
            self.node(name)

    def _notify(self) -> None:
        self.notified += 1

    def node(self, name: str, *, labels: Raw | None = None, ready: bool = True, cpu: str = "4", **spec: Any) -> None:
        self.nodes.changed(raw_node(name, labels=labels, ready=ready, cpu=cpu, **spec))

    def plain(self, name: str, cpu: str = "", labels: Raw | None = None, **members: Any) -> Raw:
        container = raw_container(resources={"requests": {"cpu": cpu}} if cpu else {})
        raw = raw_pod(container, name=name, **{"schedulerName": OURS, "labels": labels or {}, **members})
        raw["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": "2026-03-02T12:00:00Z"}
        self.cluster.put(raw)
        return raw

    async def reserved(self, cpu: str = "0", **spec: Any) -> Raw:
        """A pod that came through both doors of the webhook."""
        container = raw_container(gpus=1)
        container["resources"]["requests"]["cpu"] = cpu
        asked = raw_pod(container, annotations={keys.REQUIRED_HASH.name: HASH}, schedulerName=OURS, **spec)
        final = await self.house.create(asked)
        self.cluster.put(final)
        return final

    async def bound_within(self, seconds: int) -> list[tuple[str, str]]:
        return [one for _ in range(seconds) for one in await self.passes(wait=1)]

    async def passes(self, wait: float = 0) -> list[tuple[str, str]]:
        """What a pass puts where, so many seconds later."""
        self.house.wait(wait)
        self.cluster.bound.clear()
        await self.binder.step()
        await self.binder.settle()
        return list(self.cluster.bound)

    @property
    def cpu_taken(self) -> int:
        return sum(room.used.get("cpu", 0) for room in self.world.rooms.values())

    @property
    def says(self) -> str:
        return self.heard.messages[-1] if self.heard.messages else ""


def raw_node(name: str, *, labels: Raw | None = None, ready: bool = True, cpu: str = "4", **spec: Any) -> Raw:
    status = {
        "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
    }
    meta = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    return {"metadata": meta, "spec": spec, "status": status}


@pytest.fixture
async def scene(build: Build) -> Scene:
    shared = Shared()
    return Scene(await build(assemble=sharing(shared)), shared)


async def turns() -> None:
    """All that can go on without time passing has gone on."""
    for _ in range(1000):
        await asyncio.sleep(0)


# Where pods go.


async def test_a_pod_with_gpus_goes_where_they_are(scene: Scene) -> None:
    await scene.reserved()
    assert await scene.passes() == [("train-0", "node-a")]
    assert scene.heard.recorded == [("train-0", Reason.SCHEDULED)]
    assert scene.counted == ["bound"]


async def test_pods_without_gpus_are_spread(scene: Scene) -> None:
    for number in range(6):
        scene.plain(f"p{number}", cpu="1")
    found = [node for _, node in await scene.passes()]
    assert {name: found.count(name) for name in NAMES} == dict.fromkeys(NAMES, 2)


async def test_room_is_taken_while_the_watch_has_not_told_yet(scene: Scene) -> None:
    scene.cluster.watch_lags = True
    for number in range(4):
        scene.plain(f"p{number}", cpu="3")
    assert len(await scene.passes()) == 3
    assert "0/3 nodes will do: 3 with too little cpu" in scene.heard.messages
    assert await scene.passes(wait=60) == []
    for raw in list(scene.cluster.shared.pods.values()):
        scene.cluster.tell(raw)
    assert [room.used["cpu"] for room in scene.world.rooms.values()] == [3000] * 3


async def test_those_whose_place_is_fixed_and_those_that_matter_more_come_first(scene: Scene) -> None:
    for name in NAMES[1:]:
        scene.node(name, unschedulable=True)
    scene.plain("low", cpu="3", priority=1)
    scene.plain("high", cpu="3", priority=1000)
    final = await scene.reserved(cpu="1")
    assert final["metadata"]["annotations"][keys.NODE.name] == "node-a"
    assert {name for name, _ in await scene.passes()} == {"train-0", "high"}


@pytest.mark.defect("S1-8")
@pytest.mark.parametrize(
    "members",
    [
        {"schedulingGates": [{"name": "example.test/wait"}]},
        {"schedulerName": "default-scheduler"},
        {"nodeName": "node-b"},
    ],
    ids=str,
)
async def test_pods_that_are_not_for_us_now_are_left_alone(scene: Scene, members: Raw) -> None:
    scene.plain("other", **members)
    assert await scene.passes() == []
    assert scene.heard.recorded == []


@pytest.mark.defect("S1-8")
@pytest.mark.parametrize(
    ("part", "member"),
    [("metadata", {"deletionTimestamp": "2026-03-02T12:00:00Z"}), ("status", {"phase": "Failed"})],
    ids=str,
)
async def test_leaving_and_ended_pods_are_left_alone(scene: Scene, part: str, member: Raw) -> None:
    raw = scene.plain("over")
    scene.cluster.put({**raw, part: {**raw.get(part, {}), **member}})
    assert await scene.passes() == []


async def test_every_name_that_is_ours_is_served(scene: Scene) -> None:
    scene.plain("p", schedulerName="second-name")
    assert len(await scene.passes()) == 1


# Why a pod waits, and until when.


UNFIT: dict[str, tuple[Raw, str]] = {
    "not-ready": ({"ready": False}, "not ready"),
    "cordoned": ({"unschedulable": True}, "cordoned"),
    "tainted": ({"taints": [{"key": "a", "effect": "NoSchedule"}]}, "with a taint that the pod does not tolerate"),
    "full": ({"cpu": "500m"}, "with too little cpu"),
    "not-selected": ({"labels": {"zone": "z"}}, "not selected by the pod"),
}


@pytest.mark.defect("S1-6")
@pytest.mark.defect("S1-20")
@pytest.mark.parametrize(("unfit", "words"), UNFIT.values(), ids=UNFIT)
async def test_a_pod_waits_for_a_node_that_is_fit_and_is_told_why(scene: Scene, unfit: Raw, words: str) -> None:
    for name in NAMES:
        scene.node(name, **{"labels": {"zone": "a"}, **unfit})
    scene.plain("p", cpu="1", nodeSelector={"zone": "a"})
    assert await scene.passes() == []
    assert scene.says == f"0/3 nodes will do: 3 {words}"
    assert scene.heard.recorded == [("p", Reason.FAILED_SCHEDULING)]
    assert scene.counted == ["no_node"]
    before = scene.notified
    scene.node("node-b", labels={"zone": "a"})
    assert scene.notified > before
    assert await scene.passes() == [("p", "node-b")]


@pytest.mark.defect("S1-8")
async def test_a_pod_with_gpus_waits_for_its_own_node(scene: Scene) -> None:
    scene.node("node-a", unschedulable=True)
    await scene.reserved()
    assert await scene.passes() == []
    assert scene.says == "the pod's GPUs are on node node-a, which is cordoned"
    scene.node("node-a")
    assert await scene.passes() == [("train-0", "node-a")]


async def test_the_end_of_a_pod_makes_room(scene: Scene) -> None:
    for name in NAMES[1:]:
        scene.node(name, unschedulable=True)
    scene.plain("first", cpu="3")
    assert len(await scene.passes()) == 1
    scene.plain("second", cpu="3")
    assert await scene.passes(wait=1) == []
    raw = scene.cluster.shared.pods["ml", "first"]
    scene.cluster.put({**raw, "metadata": {**raw["metadata"]}, "status": {"phase": "Succeeded"}})
    assert await scene.passes() + await scene.passes(wait=1) == [("second", "node-a")]


async def test_a_pod_whose_evidence_has_ended_waits_until_it_is_back(scene: Scene) -> None:
    await scene.reserved()
    fleet, now = scene.house.parts.fleet, scene.house.now
    word = fleet.indexed_nodes["node-a"].evidence
    fleet.set_evidence("node-a", None, now)
    assert await scene.passes() == []
    assert "node node-a: no evidence" in scene.says
    fleet.set_evidence("node-a", word, now)
    scene.world.touch("node-a")
    assert await scene.passes() == [("train-0", "node-a")]


async def test_a_reservation_that_was_taken_away_ends_it_at_the_door(scene: Scene) -> None:
    final = await scene.reserved()
    scene.cluster.shared.change("node-a")
    assert await scene.passes() == []
    assert scene.says.startswith("NotReserved: ")
    assert scene.counted == ["not_reserved"]
    assert final["metadata"]["uid"] in scene.world.waiters


async def test_a_namespace_is_to_be_labelled_as_the_webhook_configurations_have_it(build: Build) -> None:
    shared = Shared()
    scene = Scene(await build(assemble=sharing(shared)), shared, opt_in="acme.io/gpu")
    scene.plain("app", annotations={keys.GPU_COUNT.name: "1"})
    assert await scene.passes() == []
    assert "label its namespace acme.io/gpu=true" in scene.says


@pytest.mark.defect("S1-4")
@pytest.mark.defect("S1-5")
@pytest.mark.parametrize(
    ("name", "annotations", "words"),
    [
        ("app-7c9d-12345", {"gpu-scheduling-map": "12345=node-a:0"}, "the pod has no ordinal: no StatefulSet owns it"),
        ("app-0", {"gpu-scheduling-map": "# 0=node-a:0\n1=node-a"}, "line 2"),
        ("app", {keys.GPU_COUNT.name: "1"}, "gpuwarden.io/enabled=true"),
        ("app", {keys.CLAIM.name: '{"gpus":1}'}, "gpuwarden.io/enabled=true"),
        ("app", {keys.CLAIM.name: "[]"}, "was not written by gpuwarden"),
    ],
    ids=str,
)
async def test_a_claim_that_no_review_has_served_is_put_nowhere(
    scene: Scene, name: str, annotations: dict[str, str], words: str
) -> None:
    scene.plain(name, annotations=annotations)
    assert await scene.passes() == []
    assert words in scene.says
    assert scene.heard.recorded == [(name, Reason.FAILED_SCHEDULING)]


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}, "spec.topologySpreadConstraints"),
        ({"resourceClaims": [{"name": "gpu"}]}, "spec.resourceClaims"),
    ],
    ids=str,
)
async def test_what_we_do_not_look_at_is_said_and_not_ignored(scene: Scene, members: Raw, field: str) -> None:
    scene.plain("p", **members)
    assert await scene.passes() == []
    assert scene.says.startswith(f"{field}: ")


# Pods that keep away from each other, or join each other.


WEB, DB = {"app": "web"}, {"app": "db"}


def away_from(labels: Raw, topology: str = "kubernetes.io/hostname", **members: Any) -> Raw:
    return {"podAntiAffinity": {REQUIRED: [pod_term(labels, topology, **members)]}}


def joining(labels: Raw, topology: str = "kubernetes.io/hostname") -> Raw:
    return {"podAffinity": {REQUIRED: [pod_term(labels, topology)]}}


def pod_term(labels: Raw, topology: str, **members: Any) -> Raw:
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": topology, **members}


def in_zones(scene: Scene, zones: str) -> None:
    for name, zone in zip(NAMES, zones, strict=True):
        scene.node(name, labels={"zone": zone})


async def test_a_pod_is_put_nowhere_where_one_that_stands_keeps_it_away(scene: Scene) -> None:
    in_zones(scene, "aab")
    scene.plain("lone", schedulerName="theirs", nodeName="node-a", affinity=away_from(WEB, "zone"))
    for number in range(3):
        scene.plain(f"web-{number}", labels=WEB)
    scene.plain("other", labels=DB, nodeSelector={"zone": "a"})
    placed = dict(await scene.passes())
    assert placed.pop("other") in ("node-a", "node-b")
    assert placed == dict.fromkeys(("web-0", "web-1", "web-2"), "node-c")


async def test_it_is_told_what_keeps_it_away_and_goes_when_that_is_gone_and_not_while_it_leaves(scene: Scene) -> None:
    in_zones(scene, "aaa")
    lone = scene.plain("lone", schedulerName="theirs", nodeName="node-a", affinity=away_from(WEB, "zone"))
    scene.plain("web", labels=WEB)
    assert await scene.passes() == []
    assert scene.says == "0/3 nodes will do: 3 ruled out by the anti-affinity of a pod that is there"
    scene.cluster.put({**lone, "metadata": {**lone["metadata"], "deletionTimestamp": "2026-03-02T12:00:00Z"}})
    assert await scene.passes(wait=1) == []
    scene.cluster.remove("lone")
    assert [name for name, _ in await scene.passes(wait=1)] == ["web"]


async def test_pods_that_avoid_each_other_do_so_before_the_watch_has_told(scene: Scene) -> None:
    scene.cluster.watch_lags = True
    for number in range(4):
        scene.plain(f"web-{number}", labels=WEB, affinity=away_from(WEB))
    assert sorted(node for _, node in await scene.passes()) == list(NAMES)
    assert "0/3 nodes will do: 3 ruled out by the pod's own anti-affinity" in scene.heard.messages


async def test_labels_count_as_they_are_now(scene: Scene) -> None:
    for name in NAMES:
        scene.plain(f"db-{name}", labels=DB, schedulerName="theirs", nodeName=name)
    scene.plain("web", labels=WEB, affinity=away_from(DB))
    assert await scene.passes() == []
    before = scene.notified
    scene.plain("db-node-b", schedulerName="theirs", nodeName="node-b")
    assert scene.notified > before
    assert await scene.passes(wait=1) == [("web", "node-b")]


async def test_a_zone_that_is_written_into_pods_as_they_are_bound_costs_no_ranking(scene: Scene) -> None:
    scene.cluster.watch_lags = True
    scene.plain("p")
    assert len(await scene.passes()) == 1
    raw, freed = scene.cluster.shared.pods["ml", "p"], scene.world.freed
    scene.cluster.tell({**raw, "metadata": {**raw["metadata"], "labels": {"zone": "a"}}})
    assert scene.world.freed == freed


async def test_one_that_was_not_bound_after_all_keeps_nobody_away(scene: Scene) -> None:
    in_zones(scene, "aaa")
    scene.cluster.refuses["first"] = BindingRefusedError("denied", 403)
    scene.plain("first", labels=DB, affinity=away_from(WEB, "zone"))
    assert await scene.passes() == []
    scene.plain("web", labels=WEB)
    assert [name for name, _ in await scene.passes()] == ["web"]


async def test_a_pod_goes_where_those_come_that_it_joins(scene: Scene) -> None:
    in_zones(scene, "aab")
    scene.plain("web", labels=WEB, affinity=joining(DB, "zone"))
    assert await scene.passes() == []
    assert scene.says == "0/3 nodes will do: 3 ruled out by the pod's own affinity to pods"
    before = scene.notified
    scene.plain("db", labels=DB, schedulerName="theirs", nodeName="node-c")
    assert scene.notified > before
    assert await scene.passes() == [("web", "node-c")]


async def test_of_pods_that_join_each_other_one_begins(scene: Scene) -> None:
    for number in range(6):
        scene.plain(f"web-{number}", labels=WEB, affinity=joining(WEB))
    placed = await scene.passes()
    assert len(placed) == 6
    assert len({node for _, node in placed}) == 1


async def test_a_pod_with_gpus_waits_for_pods_that_keep_it_from_its_node(scene: Scene) -> None:
    in_zones(scene, "aab")
    everybody = away_from({}, "zone", namespaceSelector={"matchLabels": {"team": "blue"}})
    scene.plain("lone", schedulerName="theirs", nodeName="node-b", affinity=everybody)
    scene.namespaces.changed({"metadata": {"name": "ml", "labels": {"team": "blue"}}})
    await scene.reserved()
    assert await scene.passes() == []
    assert (
        scene.says
        == "the pod's GPUs are on node node-a, which is ruled out by the anti-affinity of a pod that is there"
    )
    scene.cluster.remove("lone")  # of another node
    assert await scene.passes() == [("train-0", "node-a")]


async def test_a_namespace_that_is_labelled_anew_frees_its_pods(scene: Scene) -> None:
    everybody = away_from({}, namespaceSelector={"matchLabels": {"team": "blue"}})
    for name in NAMES:
        scene.plain(f"lone-{name}", schedulerName="theirs", nodeName=name, affinity=everybody)
    blue = {"metadata": {"name": "ml", "labels": {"team": "blue"}}}
    scene.namespaces.replaced({"ml": blue, "away": {"metadata": {"name": "away"}}})
    scene.plain("p")
    assert await scene.passes() == []
    before = scene.notified
    scene.namespaces.replaced({"ml": {"metadata": {"name": "ml", "labels": {"team": "red"}}}})
    assert scene.notified > before
    assert [name for name, _ in await scene.passes()] == ["p"]
    scene.namespaces.changed(blue)
    scene.plain("q")
    assert await scene.passes() == []
    scene.namespaces.deleted(blue)
    assert [name for name, _ in await scene.passes()] == ["q"]


# When the API server says no, or nothing.


@pytest.mark.defect("S1-7")
async def test_a_pod_that_has_become_another_is_decided_anew(scene: Scene) -> None:
    old = scene.plain("p")
    new = {**old, "metadata": {**old["metadata"], "uid": "uid-of-the-next", "resourceVersion": "77"}}
    scene.cluster.shared.has(new)  # the watch has not told yet
    assert await scene.passes() == []
    assert scene.counted == ["conflict"]
    assert scene.heard.recorded == []
    scene.pods.deleted(old)
    scene.cluster.put(new)
    assert len(await scene.passes()) == 1
    assert [name for name, _ in scene.cluster.bound] == ["p"]


async def test_a_change_on_the_way_is_seen_before_the_next_try(scene: Scene) -> None:
    raw = scene.plain("p")
    scene.cluster.shared.has({**raw, "metadata": {**raw["metadata"], "resourceVersion": "2000"}})
    assert await scene.passes() == []
    scene.cluster.tell(scene.cluster.shared.pods["ml", "p"])
    assert await scene.passes() == []
    assert len(await scene.passes(wait=0.5)) == 1


async def test_a_refusal_is_told_and_tried_again_less_and_less_often(scene: Scene) -> None:
    scene.cluster.refuses["p"] = BindingRefusedError("denied by somebody", 403)
    scene.plain("p")
    tries = []
    for _ in range(240):
        await scene.passes(wait=0.5)
        tries.append(scene.counted.count("refused"))
    assert scene.says == "denied by somebody"
    assert tries[0] == 1
    assert 7 <= tries[-1] <= 12  # 0.5, 1, 2, 4, 8, 16, then every 30 s of 120
    assert len(scene.heard.recorded) == 1
    del scene.cluster.refuses["p"]
    scene.node("node-b", labels={"news": "yes"})
    assert len(await scene.passes(wait=1)) == 1


async def test_pods_that_are_refused_do_not_wake_each_other(scene: Scene) -> None:
    for number in range(5):
        scene.cluster.refuses[f"p{number}"] = BindingRefusedError("denied", 403)
        scene.plain(f"p{number}")
    for _ in range(60):
        await scene.passes(wait=0.5)
    assert len(scene.counted) <= 5 * 8


async def test_a_lost_answer_is_looked_up_and_a_lost_question_is_asked_again(scene: Scene) -> None:
    scene.cluster.loses = {"answer"}
    scene.plain("p")
    assert len(await scene.passes()) == 1
    assert scene.counted == ["bound"]
    scene.cluster.loses = {"question"}
    scene.plain("q")
    assert await scene.passes() == []
    assert scene.counted == ["bound", "lost"]
    scene.cluster.loses = set()
    assert len(await scene.passes(wait=1)) == 1


async def test_after_a_failure_the_room_is_there_again(scene: Scene) -> None:
    for name in NAMES[1:]:
        scene.node(name, unschedulable=True)
    scene.cluster.refuses["p"] = BindingRefusedError("denied", 403)
    scene.plain("p", cpu="4")
    assert await scene.passes() == []
    assert scene.world.rooms["node-a"].used["cpu"] == 0
    scene.plain("q", cpu="4")
    assert await scene.passes() == [("q", "node-a")]


@pytest.mark.defect("S1-20")
@pytest.mark.parametrize(
    ("refusal", "outcome", "told"),
    [
        (BindingRefusedError("denied", 403), Outcome.REFUSED, [Reason.FAILED_SCHEDULING]),
        (BindingRefusedError("another by now", 409), Outcome.CONFLICT, []),
        (BindingLostError("nobody answers"), Outcome.LOST, []),
        (RuntimeError("a bug"), Outcome.FAILED, []),
    ],
    ids=["refused", "conflict", "lost", "failed"],
)
async def test_every_try_is_counted_by_what_became_of_it_and_the_next_one_succeeds(
    scene: Scene, refusal: Exception, outcome: Outcome, told: list[Reason]
) -> None:
    scene.cluster.refuses["p"] = refusal
    scene.plain("p")
    assert await scene.passes() == []
    assert scene.counted == [outcome]
    assert [reason for _, reason in scene.heard.recorded] == told
    del scene.cluster.refuses["p"]
    assert len(await scene.passes(wait=1)) == 1
    assert scene.counted == [outcome, Outcome.BOUND]


@pytest.mark.defect("S1-9")
async def test_a_call_that_hangs_stops_nobody_else(scene: Scene) -> None:
    scene.cluster.hangs.add("p0")
    for number in range(20):
        scene.plain(f"p{number}")
    await scene.binder.step()
    await turns()
    assert len(scene.cluster.bound) == 19
    assert scene.cluster.most_at_once == 20
    scene.binder.stop()
    await scene.binder.settle()
    assert scene.world.waiters["uid-p0"].is_on_its_way is False


async def test_only_so_many_are_under_way_at_once(scene: Scene) -> None:
    for number in range(200):
        scene.plain(f"p{number}")
    done = 0
    while found := await scene.passes():
        done += len(found)
    assert done == 200
    assert scene.cluster.most_at_once == 64


async def test_a_pass_over_many_shapes_lets_others_work_and_ends_in_time(scene: Scene) -> None:
    for number in range(40):
        scene.plain(f"p{number}", nodeSelector={"zone": f"z{number}"})
    scene.time = itertools.count(0.0, 0.05)
    looked: set[str] = set()
    worked = 0

    async def others() -> None:
        nonlocal worked
        while True:
            worked += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    passes = 0
    while len(looked) < 40:
        scene.nodes.changed(raw_node("node-a", labels={"turn": str(passes)}))  # all are due again
        before = scene.notified
        await scene.binder.step()
        now = {name for name, reason in scene.heard.recorded}
        assert now > looked
        assert len(now - looked) < 15
        assert scene.notified > before or now == {f"p{number}" for number in range(40)}
        looked = now
        passes += 1
    task.cancel()
    assert passes > 2
    assert worked >= 40


@pytest.mark.parametrize("has_begun", [True, False])
async def test_who_is_stopped_leaves_the_pod_to_the_next(scene: Scene, *, has_begun: bool) -> None:
    scene.cluster.hangs.add("p")
    scene.plain("p")
    await scene.binder.step()
    for _ in range(3 * has_begun):
        await asyncio.sleep(0)
    scene.binder.stop()
    await scene.binder.settle()
    scene.cluster.hangs.clear()
    assert len(await scene.passes(wait=1)) == 1


async def test_a_namespace_whose_demand_cannot_be_read_keeps_its_pods_waiting(scene: Scene) -> None:
    """Which the door finds: by what was heard so far, the pod had no claim."""

    class Unreadable:
        async def refusal_of(self, *_: object) -> None:
            raise InvalidPodError("the namespace says nothing that can be read")

    scene.binder._binding_check = Unreadable()  # type: ignore[assignment]  # a door that is shut is enough here
    scene.plain("p")
    assert await scene.passes() == []
    assert scene.says == "the namespace says nothing that can be read"


# Volumes.


CLAIMS = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "tmp", "emptyDir": {}}]


def volume_in(*zones: str) -> Volume:
    terms = (NodeTerm((Expression("zone", "In", frozenset(zones)),), ()),)
    return Volume("data", "pv-1", terms if zones else None)


@pytest.mark.parametrize("volume", [volume_in(), volume_in("a")], ids=["anywhere", "its-zone"])
async def test_a_pod_with_gpus_is_bound_where_its_volume_can_be(scene: Scene, volume: Volume) -> None:
    scene.node("node-a", labels={"zone": "a"})
    scene.cluster.volumes["data"] = volume
    await scene.reserved(volumes=CLAIMS)
    assert await scene.passes() == [("train-0", "node-a")]
    assert scene.cluster.volumes_asked == 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (volume_in("b"), "the pod's GPUs are on node node-a, where volume pv-1 of its claim data is not"),
        (
            UnusableVolumeError(f"claim data {NOT_BOUND}"),
            "the pod's claim data is not bound to a volume, which is waited for",
        ),
    ],
    ids=["of-another-zone", "not-bound"],
)
async def test_a_pod_with_gpus_waits_for_its_volume(scene: Scene, found: Volume | Exception, words: str) -> None:
    scene.node("node-a", labels={"zone": "a"})
    scene.cluster.volumes["data"] = found
    await scene.reserved(volumes=CLAIMS)
    assert await scene.passes() == []
    assert words in scene.says
    assert scene.counted[0] == "no_node"
    scene.cluster.volumes["data"] = volume_in("a")
    assert await scene.bound_within(40) == [("train-0", "node-a")]


async def test_nothing_is_bound_while_nobody_can_say_what_volumes_there_are(scene: Scene) -> None:
    scene.cluster.volumes["data"] = VolumesUnavailableError("the API server cannot be reached")
    scene.plain("p", volumes=CLAIMS)
    assert await scene.passes() == []
    assert scene.counted == ["lost"]
    scene.cluster.volumes["data"] = volume_in()
    assert [name for name, _ in await scene.bound_within(40)] == ["p"]


async def test_a_pod_without_gpus_goes_to_a_node_that_can_have_its_volume(scene: Scene) -> None:
    for name, zone in zip(NAMES, "abc", strict=True):
        scene.node(name, labels={"zone": zone})
    scene.cluster.volumes["data"] = volume_in("b")
    for number in range(6):
        scene.plain(f"p{number}", volumes=CLAIMS)
    assert sorted(await scene.bound_within(10)) == [(f"p{number}", "node-b") for number in range(6)]
    assert Reason.FAILED_SCHEDULING not in [reason for _, reason in scene.heard.recorded]


async def test_where_no_node_can_have_a_volume_that_is_said_and_looked_at_again(scene: Scene) -> None:
    scene.cluster.volumes["data"] = volume_in("b")
    scene.plain("p", volumes=CLAIMS)
    for _ in range(40):
        await scene.passes(wait=1)
    said = (
        "0/3 nodes will do: 3 not selected by the pod; looked at are those that can have volume pv-1 of its claim data"
    )
    assert scene.heard.messages == [said]
    scene.cluster.volumes["data"] = volume_in()
    assert [name for name, _ in await scene.bound_within(60)] == ["p"]


UNMADE = Unmade("data", "uid-data", "7")


async def test_a_volume_is_made_for_the_chosen_node_and_the_pod_bound_there_with_its_room_kept(scene: Scene) -> None:
    in_zones(scene, "abb")
    scene.cluster.volumes["data"] = evolve(UNMADE, allowed=volume_in("a").terms)
    scene.plain("p", cpu="3", volumes=CLAIMS)
    assert await scene.bound_within(3) == []
    assert scene.cluster.selected == [("data", "node-a")]
    assert "provisioning" in scene.counted
    scene.plain("q", cpu="3", nodeSelector={"zone": "a"})
    assert await scene.passes() == []
    assert scene.says == "0/3 nodes will do: 2 not selected by the pod, 1 with too little cpu"
    scene.cluster.volumes["data"] = volume_in("a")
    assert await scene.bound_within(2) == [("p", "node-a")]
    assert [reason for name, reason in scene.heard.recorded if name == "p"] == [Reason.SCHEDULED]
    assert len(scene.cluster.selected) == 1


async def test_a_volume_for_a_pod_with_gpus_is_made_where_they_are(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    await scene.reserved(volumes=CLAIMS)
    assert await scene.bound_within(29) == []
    assert scene.cluster.selected == [("data", "node-a")]
    assert scene.heard.recorded == []  # it is not unschedulable: a volume takes its time
    await scene.bound_within(20)
    said = "the volume of the pod's claim data is still being made for node node-a: the claim's own events say more"
    assert scene.heard.messages == [said]
    scene.cluster.volumes["data"] = volume_in()
    assert await scene.bound_within(15) == [("train-0", "node-a")]


async def test_gpus_are_not_held_for_a_volume_beyond_the_bind_deadline(scene: Scene) -> None:
    """The reconciler gives them back; here, the pod lets go of its room."""
    scene.cluster.volumes["data"] = UNMADE
    await scene.reserved(cpu="3", volumes=CLAIMS)
    await scene.bound_within(250)
    assert scene.world.rooms["node-a"].used["cpu"] == 3000
    await scene.bound_within(90)
    assert scene.says.startswith("ReservationExpired: ")
    assert scene.world.rooms["node-a"].used["cpu"] == 0
    scene.cluster.volumes["data"] = volume_in()
    assert await scene.bound_within(60) == []


async def test_room_is_not_kept_for_ever(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    scene.plain("p", cpu="3", volumes=CLAIMS)
    await scene.bound_within(570)
    assert scene.cpu_taken == 3000
    before = scene.world.freed
    await scene.bound_within(60)
    assert scene.world.freed > before
    assert len(scene.cluster.selected) == 1  # the claim keeps its node, and the pod comes back to it


async def test_where_no_volume_can_be_made_another_node_is_chosen(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    scene.plain("p", volumes=CLAIMS)
    tried: list[str] = []
    for _ in NAMES:
        while len(scene.cluster.selected) == len(tried):
            await scene.passes(wait=1)
        tried.append(scene.cluster.selected[-1][1])
        scene.cluster.volumes["data"] = UNMADE  # as whoever makes volumes takes the node off the claim
    assert sorted(tried) == list(NAMES)
    assert scene.heard.recorded == []
    await scene.bound_within(10)
    said = "; looked at are those where the volume of its claim data was not refused yet"
    assert scene.says == "0/3 nodes will do: 3 not selected by the pod" + said
    await scene.bound_within(40)
    assert len(scene.cluster.selected) > 3  # from the beginning
    scene.cluster.volumes["data"] = volume_in()
    assert [name for name, _ in await scene.bound_within(20)] == ["p"]


async def test_a_pod_with_gpus_whose_node_can_have_no_volume_is_told_and_tried_again(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    await scene.reserved(volumes=CLAIMS)
    await scene.passes()
    scene.cluster.volumes["data"] = UNMADE
    await scene.passes(wait=1)
    cannot = "the pod's GPUs are on node node-a, where the volume of its claim data cannot be made"
    assert scene.says == f"{cannot}: the claim's own events say more"
    await scene.bound_within(40)
    assert set(scene.cluster.selected) == {("data", "node-a")}
    assert len(scene.cluster.selected) > 1


async def test_a_pod_goes_where_the_volume_is_made_that_a_pod_before_it_asked_for(scene: Scene) -> None:
    scene.cluster.volumes["data"] = evolve(UNMADE, node="node-c")
    scene.plain("p", volumes=CLAIMS)
    await scene.reserved(volumes=CLAIMS)
    assert await scene.bound_within(5) == []
    assert scene.heard.messages == [
        "the pod's GPUs are on node node-a, and the volume of its claim data is made for node node-c"
    ]
    assert scene.cluster.selected == []
    scene.cluster.volumes["data"] = volume_in()
    assert ("p", "node-c") in await scene.bound_within(5)


async def test_a_storage_class_that_does_not_allow_the_node_of_the_gpus_is_said(scene: Scene) -> None:
    in_zones(scene, "aab")
    scene.cluster.volumes["data"] = evolve(UNMADE, allowed=volume_in("b").terms)
    await scene.reserved(volumes=CLAIMS)
    assert await scene.passes() == []
    assert scene.says == (
        "the pod's GPUs are on node node-a, where the StorageClass of its claim data allows no volume"
    )
    assert scene.cluster.selected == []


async def test_no_volume_is_made_while_another_claim_keeps_the_pod_waiting(scene: Scene) -> None:
    both = [*CLAIMS, {"name": "more", "persistentVolumeClaim": {"claimName": "more"}}]
    scene.cluster.volumes = {"data": UNMADE, "more": UnusableVolumeError(f"claim more {NOT_BOUND}")}
    scene.plain("p", volumes=both)
    assert await scene.bound_within(3) == []
    assert scene.cluster.selected == []
    scene.cluster.volumes["more"] = evolve(UNMADE, claim="more")
    assert await scene.bound_within(30) == []
    assert len({node for _, node in scene.cluster.selected}) == 1
    assert [claim for claim, _ in scene.cluster.selected] == ["data", "more"]


async def test_pods_whose_volumes_are_being_made_block_nobody(scene: Scene) -> None:
    for number in range(100):
        scene.cluster.volumes[f"data-{number}"] = evolve(UNMADE, claim=f"data-{number}")
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": f"data-{number}"}}
        scene.plain(f"a-{number}", volumes=[volume])
    for _ in range(3):
        await scene.passes()
    assert len(scene.cluster.selected) == 100
    scene.plain("p")
    assert [name for name, _ in await scene.passes()] == ["p"]


@pytest.mark.parametrize("spec", [{"unschedulable": True}, None], ids=["cordoned", "gone"])
async def test_a_node_that_is_no_longer_fit_is_let_go(scene: Scene, spec: Raw | None) -> None:
    scene.cluster.volumes["data"] = UNMADE
    scene.plain("p", cpu="3", volumes=CLAIMS)
    await scene.passes()
    node = scene.cluster.selected[0][1]
    if spec is None:
        scene.nodes.deleted(raw_node(node))
    else:
        scene.node(node, **spec)
    await scene.bound_within(3)
    assert scene.cpu_taken == 0
    scene.cluster.volumes["data"] = UNMADE  # taken off, for the node is not there
    await scene.bound_within(20)
    assert scene.cluster.selected[-1][1] != node


async def test_room_is_kept_while_nobody_can_say_what_became_of_a_claim(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    scene.plain("p", cpu="3", volumes=CLAIMS)
    await scene.passes()
    node = scene.cluster.selected[0][1]
    scene.cluster.volumes["data"] = VolumesUnavailableError("the API server cannot be reached")
    await scene.passes(wait=1)
    assert scene.counted == ["provisioning", "lost"]
    assert scene.world.rooms[node].used["cpu"] == 3000
    scene.cluster.volumes["data"] = volume_in()
    assert await scene.bound_within(3) == [("p", node)]


async def test_a_pod_that_goes_away_meanwhile_leaves_its_room(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    scene.plain("p", cpu="3", volumes=CLAIMS)
    await scene.passes()
    scene.cluster.remove("p")
    assert scene.cpu_taken == 0
    assert await scene.bound_within(5) == []


async def test_a_pod_that_changes_meanwhile_keeps_its_room(scene: Scene) -> None:
    scene.cluster.volumes["data"] = UNMADE
    raw = scene.plain("p", cpu="3", volumes=CLAIMS)
    await scene.passes()
    node = scene.cluster.selected[0][1]
    scene.cluster.put({**raw, "metadata": {**raw["metadata"], "annotations": {"note": "x"}}})
    await scene.passes(wait=1)
    assert scene.world.rooms[node].used["cpu"] == 3000
    scene.cluster.volumes["data"] = volume_in()
    assert await scene.bound_within(3) == [("p", node)]


@pytest.mark.parametrize(
    ("problem", "outcome", "told"),
    [
        (VolumesUnavailableError("the API server answered 409"), "lost", []),
        (UnusableVolumeError("claim data cannot be given a node: no"), "no_node", [Reason.FAILED_SCHEDULING]),
    ],
    ids=["changed-meanwhile", "refused"],
)
async def test_a_claim_that_takes_no_node_is_tried_again(
    scene: Scene, problem: Exception, outcome: str, told: list[Reason]
) -> None:
    scene.cluster.volumes["data"], scene.cluster.selecting = UNMADE, problem
    scene.plain("p", volumes=CLAIMS)
    assert await scene.passes() == []
    assert scene.counted[0] == outcome
    assert [reason for _, reason in scene.heard.recorded] == told
    scene.cluster.selecting = None
    await scene.bound_within(20)
    assert len(scene.cluster.selected) == 1


async def test_pods_without_claims_cost_no_question(scene: Scene) -> None:
    scene.plain("p", volumes=CLAIMS[1:])
    assert [name for name, _ in await scene.passes()] == ["p"]
    assert scene.cluster.volumes_asked == 0


# What is told.


async def test_the_same_is_not_told_over_and_over(scene: Scene) -> None:
    scene.plain("p", nodeSelector={"zone": "nowhere"})
    for _ in range(100):
        await scene.passes(wait=1)
    assert scene.heard.messages == ["0/3 nodes will do: 3 not selected by the pod"]


async def test_news_is_told_after_a_while_and_never_lost(scene: Scene) -> None:
    scene.plain("p", nodeSelector={"zone": "nowhere"})
    await scene.passes()
    scene.node("node-d")
    await scene.passes(wait=1)
    assert len(scene.heard.messages) == 1
    await scene.passes(wait=2)
    assert scene.says == "0/4 nodes will do: 4 not selected by the pod"


async def test_the_pods_condition_says_so_too(scene: Scene) -> None:
    scene.plain("p", nodeSelector={"zone": "nowhere"})
    await scene.passes()
    writing = asyncio.create_task(scene.told.run())
    await turns()
    writing.cancel()
    assert scene.cluster.conditions == [("p", "0/3 nodes will do: 3 not selected by the pod")]


@pytest.mark.parametrize("by", ["a-lost-question", "another-version"])
async def test_a_condition_that_could_not_be_written_is_written_later_and_once(scene: Scene, by: str) -> None:
    raw = scene.plain("p", nodeSelector={"zone": "nowhere"})
    newer = {**raw, "metadata": {**raw["metadata"], "resourceVersion": "newer"}}
    if by == "a-lost-question":
        scene.cluster.loses = {"question"}
    else:
        scene.cluster.shared.has(newer)  # the watch has not told yet
    writing = asyncio.create_task(scene.told.run())
    await scene.passes()
    await turns()
    assert scene.cluster.conditions == []
    scene.cluster.loses = set()
    scene.cluster.tell(newer if by == "another-version" else raw)
    for _ in range(60):
        await scene.passes(wait=1)
        await turns()
    writing.cancel()
    assert scene.cluster.conditions == [("p", "0/3 nodes will do: 3 not selected by the pod")]
    assert len(scene.heard.messages) == 1


async def test_of_very_many_that_wait_each_has_its_condition_in_the_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webhook.scheduler.binder_telling.MAX_WAITING", 2)
    for number in range(5):
        scene.plain(f"p{number}", nodeSelector={"zone": "nowhere"})
    writing = asyncio.create_task(scene.told.run())
    for _ in range(60):
        await scene.passes(wait=1)
        await turns()
    writing.cancel()
    assert sorted(name for name, _ in scene.cluster.conditions) == ["p0", "p1", "p2", "p3", "p4"]


# What is known.


async def test_pods_count_wherever_they_come_from_and_whenever_their_node_does(scene: Scene) -> None:
    scene.plain("theirs", cpu="3", schedulerName="default-scheduler", nodeName="node-d")
    scene.node("node-d")
    assert scene.world.rooms["node-d"].used["cpu"] == 3000
    scene.cluster.remove("theirs")
    assert scene.world.rooms["node-d"].used["cpu"] == 0


async def test_a_list_is_right_whatever_was_missed(scene: Scene) -> None:
    gone = scene.plain("gone", cpu="3", nodeName="node-a")
    waits = scene.plain("waits", nodeSelector={"zone": "nowhere"})
    stays = scene.plain("stays", cpu="1", nodeName="node-b")
    scene.pods.replaced({"stays": stays})
    assert scene.world.rooms["node-a"].used["cpu"] == 0
    assert scene.world.rooms["node-b"].used["cpu"] == 1000
    assert not scene.world.waiters
    scene.nodes.replaced({"node-a": raw_node("node-a")})
    assert list(scene.world.rooms) == ["node-a"]
    assert gone != waits


async def test_nothing_is_kept_of_nodes_that_are_gone(scene: Scene) -> None:
    before = scene.world.touched("one-of-many")
    for number in range(20):
        scene.nodes.changed(raw_node(f"passing-{number}"))
        scene.nodes.deleted(raw_node(f"passing-{number}"))
        scene.world.touch(f"passing-{number}")  # what is named after a node may outlive it
    assert scene.world.remembered <= scene.world.rooms.keys()
    assert scene.world.touched("one-of-many") > before  # who waits for one that is gone hears of it


async def test_what_cannot_be_read_stays_as_it_was_known(scene: Scene) -> None:
    raw = scene.plain("p", cpu="1", nodeName="node-a")
    broken = {**raw, "spec": {**raw["spec"], "overhead": {"cpu": "lots"}}}
    scene.pods.changed(broken)
    scene.nodes.changed(raw_node("node-a", cpu="lots"))
    assert scene.world.rooms["node-a"].used["cpu"] == 1000
    assert scene.world.rooms["node-a"].allocatable["cpu"] == 4000


async def test_a_thousand_pods_look_at_a_thousand_nodes_once(scene: Scene) -> None:
    """Pods that are alike share a ranking; one that fits nowhere costs the others nothing."""
    for number in range(300):
        scene.node(f"n{number}", labels={"hall": "big"})
    for number in range(300):
        scene.plain(f"p{number}", cpu="3", nodeSelector={"hall": "big"})
    placed: list[tuple[str, str]] = []
    while found := await scene.passes():
        placed += found
    assert len({node for _, node in placed}) == len(placed) == 300
    assert len(scene.binder._choice._rankings) == 1


async def test_a_thousand_pods_that_avoid_each_other_look_at_a_thousand_nodes_twice(scene: Scene) -> None:
    """Each has labels of its own, as the pods of a StatefulSet have."""
    for number in range(300):
        scene.node(f"n{number}", labels={"hall": "big"})
    for number in range(300):
        labels = {**WEB, "statefulset.kubernetes.io/pod-name": f"p{number}"}
        scene.plain(f"p{number}", labels=labels, nodeSelector={"hall": "big"}, affinity=away_from(WEB))
    placed: list[tuple[str, str]] = []
    while found := await scene.passes():
        placed += found
    assert len({node for _, node in placed}) == len(placed) == 300
    assert len(scene.binder._choice._rankings) == 2
