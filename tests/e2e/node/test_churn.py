"""No GPU is used by two containers at a time on a node with failures, and each container sees the GPUs that its pod has
by every account. The containers' own heartbeats prove it."""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest
from attrs import define, field, frozen

from scripts.controlplane.cluster import Cluster
from scripts.node.real import DEVICE_PLUGIN, DRA_DRIVER, RealNode
from tests.e2e.conftest import emptied_namespace
from tests.e2e.gpu_checker import InvariantViolatedError
from tests.e2e.kube import EVENTS, NAMESPACES, NODES, PODS, ApiError, Kube, NotInTimeError, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import Seen, is_ready, real_pod
from tests.e2e.node.deliveries import ANNOTATION, CLAIM, LEDGER, PAGE, Deliveries, disagreements
from tests.e2e.node.front import HASH, WRITES_TO_HOST, installed_on
from tests.e2e.node.heartbeats import (
    Life,
    Overlap,
    beats_in,
    heartbeat_container,
    lives_in,
    overlaps,
    seen_in_containers,
    volume_of,
)
from tests.e2e.node.plugins import AttestPlugin
from tests.e2e.node.proven_site import label_injection, prove, proven_site, templates_are_there
from tests.e2e.processes import OPT_IN, Site

CHURNED: Final = tuple(f"GPU-11111111-0000-4000-8000-{number:012}" for number in range(8))
WORKERS: Final = 8
ASKS_AGAIN_AFTER: Final = 0.5
DOWN_FOR: Final = 2.0
# Longer than kubelet is down and needs to end containers afterwards.
FLAGS: Final = ("--max-grace", "30s", "--orphan-margin", "20s")
SEEN_WITHIN: Final = 10.0
# `serve` may have to start first.
SHOWN_WITHIN: Final = 60.0
FREE_WITHIN: Final = 120.0
ENDED: Final = ("Succeeded", "Failed")
REPORTS: Final = ("GPUMismatched", "GPUCollision")


class Mode(StrEnum):
    """How the pods of a run get their GPUs."""

    NVIDIA = "nvidia"
    DRA = "dra"
    NATIVE = "native"
    # The kubelet and NVIDIA's device plugin choose the GPUs.
    PLUGIN = "plugin"
    # `dra` with `--reserve bind`: kube-scheduler chooses the GPUs.
    BIND = "bind"
    # `nvidia` with `--reserve bind`.
    AT_BINDING = "binding"
    # The label of the node changes from `nvidia` to `dra` and back; there are pods of both.
    CHANGING = "changing"


SETTINGS: Final[Mapping[Mode, Sequence[str]]] = {
    Mode.NVIDIA: (),
    Mode.DRA: ("--injection", "dra"),
    Mode.NATIVE: (),
    Mode.PLUGIN: ("--injection", "plugin"),
    Mode.BIND: ("--injection", "dra", "--reserve", "bind", "--native-templates", "true"),
    Mode.AT_BINDING: ("--reserve", "bind"),
    Mode.CHANGING: ("--injection", "nvidia"),
}
# The modes without a DRA driver and `attest`.
WITHOUT_PROOFS: Final = (Mode.NVIDIA, Mode.PLUGIN, Mode.AT_BINDING)
# kube-scheduler or the kubelet may give away a GPU as soon as its pod is gone.
REFUSING_GRACE_0: Final = (Mode.BIND, Mode.PLUGIN)
# The failures of a run.
OF_NODE: Final = ("kubelet", "containerd", "reboot")
OF_PLUGINS: Final = ("driver", "attest")
OURS: Final = ("serve", "reconcile")
FAILURES: Final = {
    Mode.NVIDIA: OF_NODE,
    Mode.DRA: (*OF_PLUGINS, *OURS, *OF_NODE),
    Mode.NATIVE: (*OF_PLUGINS, *OURS, *OF_NODE),
    Mode.PLUGIN: ("plugin", *OURS, *OF_NODE),
    Mode.BIND: (*OF_PLUGINS, *OURS, *OF_NODE),
    # While no replica of `serve` answers, a new pod may be bound without a review, and sees no GPU (decision 36).
    Mode.AT_BINDING: ("reconcile", *OF_NODE),
    Mode.CHANGING: ("label", *OF_PLUGINS, "label", *OURS, "label", *OF_NODE),
}
# The places that know the GPUs of a pod, by the injection in its name.
PLACES: Final = {
    "nvidia": (ANNOTATION, LEDGER),
    "dra": (ANNOTATION, LEDGER, CLAIM),
    "native": (CLAIM,),
    "bind": (CLAIM,),
    "binding": (ANNOTATION, LEDGER),
    "plugin": (ANNOTATION, LEDGER),
}
# The modes in which kube-scheduler chooses the GPUs.
BY_SCHEDULER: Final = (Mode.NATIVE, Mode.BIND)


@frozen
class PodScenario:
    """How a pod runs and how it is deleted."""

    name: str
    grace: int = 1
    deleted_with: int | None = None
    """The grace period of the deletion; None uses the pod's, 0 is `kubectl delete --force`."""
    beats: int | None = None
    restart: str = "Never"


WAYS: Final = (
    PodScenario("plain"),
    PodScenario("grace-0", grace=0),
    PodScenario("forced", grace=4, deleted_with=0),
    PodScenario("ends", beats=20),
    PodScenario("crashes", beats=10, restart="Always"),
    PodScenario("crashes-forced", beats=10, restart="Always", deleted_with=0),
)


def is_forced(way: PodScenario) -> bool:
    """Whether the pod is gone before its containers end."""
    return way.deleted_with == 0 or way.grace == 0


# The containers of a pod.


def one_gpu(name: str, beats: int | None) -> Raw:
    return {"containers": [heartbeat_container(name, 1, beats=beats)]}


def two_gpus(name: str, beats: int | None) -> Raw:
    return {"containers": [heartbeat_container(name, 2, beats=beats)]}


def two_containers(name: str, beats: int | None) -> Raw:
    return {"containers": [heartbeat_container(name, 1, name=one, beats=beats) for one in ("main", "side")]}


def init_container(name: str, beats: int | None) -> Raw:
    first = heartbeat_container(name, 1, name="first", beats=5, status=0)
    return {"initContainers": [first], **one_gpu(name, beats)}


Shape = Callable[[str, int | None], Raw]
SHAPES: Final[Sequence[Shape]] = (one_gpu, one_gpu, two_gpus, two_containers, init_container)
# The kubelet does not report the GPUs of init containers, so pods with these are refused.
SHAPES_FOR_PLUGIN: Final[Sequence[Shape]] = SHAPES[:-1]


@define(eq=False)
class Churn:
    """Pods that are created and deleted on one node, while failures of the node and of gpuwarden are caused."""

    here: Site
    cluster: Cluster
    node: RealNode
    beats: Path
    rng: random.Random
    mode: Mode
    deliveries: Deliveries
    # The injections of the pods, and their namespaces.
    namespaces: dict[str, str]
    attest: AttestPlugin | None = None
    created: Counter[str] = field(factory=Counter)
    caused: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)
    shown: set[str] = field(factory=set)
    """The pods that `/devices` has to show."""
    _injections: "itertools.cycle[str]" = field(factory=lambda: itertools.cycle(("dra", "nvidia")))
    _ways: "itertools.cycle[PodScenario]" = field(init=False)
    _numbers: "itertools.count[int]" = field(factory=itertools.count)
    _is_over: bool = False

    def __attrs_post_init__(self) -> None:
        self._ways = itertools.cycle(self.ways)

    @property
    def ways(self) -> Sequence[PodScenario]:
        """Those that are not refused. With `plugin`, the node gets no pods for a while after a deletion by force."""
        found = [one for one in WAYS if one.grace or self.mode not in REFUSING_GRACE_0]
        usual = [one for one in found if not is_forced(one)]
        return [*usual * 4, *(one for one in found if is_forced(one))] if self.mode is Mode.PLUGIN else found

    async def run(self, failures: Iterable[str], pause: float, pods: float = math.inf) -> None:
        """Creates and deletes pods while there is one failure after the other, with a pause before and after each. It
        ends after the last failure, or when so many pods have started."""
        async with self.deliveries.recording(), asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())
            for what in failures:
                await asyncio.sleep(pause)
                if len(seen_in_containers(self.beats)) >= pods:
                    break
                await self.cause_failure(what)
                self.caused[what] += 1
            await asyncio.sleep(pause)
            self._is_over = True

    async def cause_failure(self, what: str) -> None:
        node, here = self.node, self.here
        match what:
            case "reboot":
                await self._reboot()
            case "kubelet":
                await self._down(node.kill_kubelet, node.start_kubelet)
            case "containerd":
                await self._down(node.kill_containerd, node.start_containerd)
            case "driver":
                await self._down(lambda: node.kill(DRA_DRIVER), node.start_dra_driver)
            case "plugin":
                await self._down(lambda: node.kill(DEVICE_PLUGIN), node.start_device_plugin)
            case "attest":
                assert self.attest is not None
                await self.attest.kill()
                await asyncio.sleep(DOWN_FOR)
                await self.attest.start()
            case "serve":
                worker = here.replicas.pop()
                here.balancer.servers.remove(worker)
                await worker.kill()
                await asyncio.sleep(DOWN_FOR)
                await here.replica()
            case "reconcile":
                await here.reconcilers.pop().kill()
                await asyncio.sleep(DOWN_FOR)
                await here.reconciler(leads=False)
            case _:
                await label_injection(here.kube, node.name, next(self._injections))

    async def _down(self, kill: Callable[[], None], start: Callable[[], None]) -> None:
        await asyncio.to_thread(kill)
        await asyncio.sleep(DOWN_FOR)
        await asyncio.to_thread(start)

    async def _reboot(self) -> None:
        since = datetime.now(UTC)  # noqa: TID251 - kubelet's heartbeats are by the machine's clock
        await asyncio.to_thread(self.node.reboot)
        if self.attest is not None:
            await asyncio.to_thread(self.node.start_dra_driver)
            await self.attest.start()
        elif self.mode is Mode.PLUGIN:
            await asyncio.to_thread(self.node.start_device_plugin)
        await asyncio.to_thread(self.cluster.wait_for_node, self.node.name, since)

    async def _work(self) -> None:
        scenario = next(self._ways)
        while not self._is_over:
            injection = self.rng.choice(list(self.namespaces))
            made = await self._create(injection, f"{injection}-{scenario.name}-{next(self._numbers)}", scenario)
            if made is None:
                await asyncio.sleep(ASKS_AGAIN_AFTER)
                continue
            await self._seen(made, scenario)
            await asyncio.sleep(self.rng.uniform(0.2, 2))
            meta = made["metadata"]
            await self.here.kube.delete(PODS, meta["name"], meta["namespace"], grace=scenario.deleted_with)
            scenario = next(self._ways)

    async def _create(self, injection: str, name: str, scenario: PodScenario) -> Raw | None:
        shapes = SHAPES_FOR_PLUGIN if self.mode is Mode.PLUGIN else SHAPES
        containers = self.rng.choice(shapes)(name, scenario.beats)
        volumes = [volume_of(self.beats)]
        content = real_pod(name, grace=scenario.grace, restartPolicy=scenario.restart, volumes=volumes)
        content["spec"] |= containers
        content["metadata"]["annotations"] = {"gpuwarden.io/required-hash": HASH}
        try:
            made = await self.here.kube.create(PODS, content, self.namespaces[injection])
        except ApiError as exc:
            self.refused[exc.reason] += 1
            return None
        self.created[scenario.name] += 1
        self.deliveries.created(made)
        return made

    async def _seen(self, made: Raw, scenario: PodScenario) -> None:
        """Waits until the pod runs or has run, and until its annotation or claim and `/devices` show its GPUs, or until
        a timeout."""
        meta = made["metadata"]

        async def found() -> Raw:
            return await self.here.kube.get(PODS, meta["name"], meta["namespace"])

        async def is_shown() -> bool:
            return self.deliveries.agree(meta["uid"], (PLACES[meta["name"].partition("-")[0]][0], PAGE))

        with suppress(NotInTimeError):
            pod = await wait_until(found, lambda pod: is_ready(pod) or pod["status"]["phase"] != "Pending", SEEN_WITHIN)
            if pod["status"]["phase"] not in ENDED and scenario.name != "ends":
                self.shown.add(meta["name"])
                await wait_until(is_shown, seconds=SHOWN_WITHIN)

    async def free_all(self) -> None:
        for namespace in self.namespaces.values():
            await self.here.kube.call("DELETE", PODS.path(namespace))
        for namespace in self.namespaces.values():
            await wait_until(lambda of=namespace: self.here.kube.list(PODS, of), lambda pods: not pods, FREE_WITHIN)  # type: ignore[misc]  # bound now, not later

    def places(self, name: str) -> Iterator[str]:
        """The places that have to know the pod. What the kubelet has chosen is recorded later."""
        if self.mode is not Mode.PLUGIN or name in self.shown:
            yield from PLACES[name.partition("-")[0]]
        if name in self.shown:
            yield PAGE

    async def reported(self) -> set[str]:
        """The pods with an Event that the kubelet has given them the GPU of another pod."""
        events = [one for namespace in self.namespaces.values() for one in await self.here.kube.list(EVENTS, namespace)]
        return {one["involvedObject"]["name"] for one in events if one["reason"] in REPORTS}

    def is_known(self, overlap: Overlap, reported: Container[str]) -> bool:
        """Whether it is a limit of the injection `plugin`: the kubelet gives away the GPU of a pod that was deleted by
        force, and it is reported."""
        was_forced = any(is_forced(way) and f"-{way.name}-" in overlap.earlier.pod for way in WAYS)
        return self.mode is Mode.PLUGIN and was_forced and overlap.later.pod in reported

    def check(self, found: Iterable[Overlap]) -> None:
        """Raises an error that a rerun does not excuse."""
        violations = [*map(str, found), *self.deliveries.violations(seen_in_containers(self.beats), self.places)]
        if violations:
            raise InvariantViolatedError("\n".join(violations[:10]))


# The checks.


@pytest.mark.parametrize(
    ("lives", "count"),
    [
        pytest.param([Life("a", 1, 2, "x"), Life("a", 2.01, 3, "y")], 0, id="one after the other"),
        pytest.param([Life("a", 1, 3, "x"), Life("b", 2, 4, "y")], 0, id="different GPUs"),
        pytest.param([Life("a", 1, 3, "x"), Life("a", 2, 4, "y")], 1, id="the second starts before the first ends"),
        pytest.param([Life("a", 1, 9, "x"), Life("a", 2, 3, "y"), Life("a", 4, 5, "z")], 2, id="two within one"),
        pytest.param([Life("a", 1, 2, "x"), Life("a", 1.5, 3, "x")], 1, id="a container that is started again"),
        pytest.param([Life("a", 1, 2, "x"), Life("a", 1.5, 3, "x", "side")], 0, id="two containers of one pod"),
        pytest.param([Life("a", 1, 9, "x"), Life("a", 1, 2, "x", "side"), Life("a", 3, 4, "y")], 1, id="beside a pod"),
        pytest.param([Life("a", 1, 2, "x"), Life("a", 2, 3, "y")], 1, id="same hundredth of a second"),
    ],
)
def test_overlapping_gpu_use_is_detected(lives: list[Life], count: int) -> None:
    assert len(overlaps(lives)) == count


def test_containers_of_a_pod_with_gpus_of_their_own_share_none() -> None:
    lives = [Life("a", 1, 2, "x"), Life("a", 1.5, 3, "x", "side"), Life("b", 1, 2, "x")]
    assert [(one.earlier, one.later) for one in overlaps(lives, are_shared=False)] == [(lives[0], lives[1])]


A, B = "GPU-a", "GPU-b"


@pytest.mark.parametrize(
    ("seen", "said", "count"),
    [
        pytest.param([Seen((A,), ("nvidia0", "nvidiactl"))], {"ledger": {(A,)}, "claim": {(A,)}}, 0, id="the same"),
        pytest.param([Seen((B, A), ("nvidia0", "nvidia1", "nvidiactl"))], {"ledger": {(A, B)}}, 0, id="another order"),
        pytest.param([Seen((A,), ("nvidia0", "nvidiactl"))], {"ledger": {(B,)}}, 1, id="another GPU"),
        pytest.param([Seen((A,), ("nvidia0", "nvidiactl"))], {"ledger": set()}, 1, id="not in the ledger"),
        pytest.param([Seen((A,), ("nvidia0", "nvidiactl"))], {"ledger": {(A,), (A, B)}}, 1, id="one more for a time"),
        pytest.param([Seen((A,), ("nvidia0", "nvidia1", "nvidiactl"))], {}, 1, id="one more device node"),
        pytest.param([Seen((), ())], {}, 1, id="no GPU"),
        pytest.param(
            [Seen((A,), ("nvidia0", "nvidiactl")), Seen((B,), ("nvidia1", "nvidiactl"))], {}, 1, id="two containers"
        ),
    ],
)
def test_difference_of_what_is_said_of_a_pod_is_detected(
    seen: list[Seen], said: dict[str, set[tuple[str, ...]]], count: int
) -> None:
    assert len(list(disagreements(seen, said, (A, B)))) == count


SEES_A, SEES_B = Seen((A,), ("nvidia0", "nvidiactl")), Seen((B,), ("nvidia1", "nvidiactl"))


@pytest.mark.parametrize(
    ("seen", "said", "count"),
    [
        pytest.param([SEES_A, SEES_B], {(A, B)}, 0, id="the same"),
        pytest.param([SEES_A, SEES_A, SEES_B], {(A, B)}, 0, id="restarted"),
        pytest.param([SEES_A], {(A, B)}, 0, id="the other container has not started"),
        pytest.param([SEES_A], {(B,)}, 1, id="another GPU"),
        pytest.param([SEES_A, SEES_B], {(A,)}, 1, id="one GPU more"),
        pytest.param([SEES_A, SEES_B], {(A,), (A, B)}, 1, id="one less for a time"),
        pytest.param([SEES_A, SEES_B], set(), 1, id="not recorded"),
    ],
)
def test_difference_is_detected_if_each_container_has_gpus_of_its_own(
    seen: list[Seen], said: set[tuple[str, ...]], count: int
) -> None:
    assert len(list(disagreements(seen, {LEDGER: said}, (A, B), containers=2))) == count


# The test.


@pytest.fixture
async def churned(real_cluster: Cluster, real_kube: Kube) -> AsyncIterator[RealNode]:
    """A node of its own, so that the failures affect no other test."""
    node = await asyncio.to_thread(real_cluster.add_real_node, "churned", CHURNED)
    try:
        yield node
    finally:
        await asyncio.to_thread(node.remove)
        await real_kube.delete(NODES, node.name)


@asynccontextmanager
async def churn(
    request: pytest.FixtureRequest, cluster: Cluster, kube: Kube, node: RealNode, directory: Path, mode: Mode
) -> AsyncIterator[Churn]:
    seed = random.SystemRandom().randrange(1 << 32)
    report_figures(request, seed=seed)
    async with AsyncExitStack() as stack:
        attest = None
        flags = (*FLAGS, *SETTINGS[mode])
        if mode is Mode.PLUGIN:
            await asyncio.to_thread(node.start_device_plugin)
        if mode in WITHOUT_PROOFS:
            standing = installed_on(cluster, kube, directory, [node], flags=flags, has_account=mode is Mode.PLUGIN)
            here = await stack.enter_async_context(standing)
            namespaces = {mode.value: here.namespace}
        else:
            proven = await stack.enter_async_context(
                proven_site(cluster, kube, directory, [node], flags=flags, is_native=mode is Mode.NATIVE)
            )
            here, attest = proven.here, proven.attests[node.name]
            await prove(kube, node.name, len(CHURNED))
            namespaces = {"nvidia" if mode is Mode.CHANGING else mode.value: here.namespace}
            if mode in BY_SCHEDULER:
                await templates_are_there(kube, here.namespace)
            if mode is not Mode.NATIVE:
                await here.wait_until_offered()
            if mode is Mode.CHANGING:
                namespaces["dra"] = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
                notes = {"annotations": {"gpuwarden.io/injection": "dra"}}
                await kube.patch(NAMESPACES, namespaces["dra"], {"metadata": {**WRITES_TO_HOST["metadata"], **notes}})
        rng = random.Random(seed)  # noqa: S311 - to be repeated
        deliveries = Deliveries(here, cluster, CHURNED, is_by_kubelet=mode is Mode.PLUGIN)
        yield Churn(here, cluster, node, beats_in(directory), rng, mode, deliveries, namespaces, attest)


@pytest.mark.parametrize(
    ("mode", "failures", "pause"),
    [
        pytest.param(Mode.NVIDIA, OF_NODE, 10, id="nvidia"),
        pytest.param(Mode.PLUGIN, ("plugin", "serve", "kubelet"), 2, id="plugin", marks=pytest.mark.long),
        pytest.param(Mode.BIND, ("serve", "reconcile", "attest"), 1, id="bind", marks=pytest.mark.long),
        pytest.param(Mode.AT_BINDING, ("containerd", "reconcile", "kubelet"), 1, id="binding", marks=pytest.mark.long),
        pytest.param(Mode.CHANGING, ("label", "driver", "attest", "label", "serve"), 1, id="changing"),
    ],
)
async def test_no_gpu_is_used_by_two_containers_at_a_time(
    request: pytest.FixtureRequest,
    real_cluster: Cluster,
    real_kube: Kube,
    churned: RealNode,
    tmp_path: Path,
    mode: Mode,
    failures: Sequence[str],
    pause: float,
) -> None:
    async with churn(request, real_cluster, real_kube, churned, tmp_path, mode) as under_test:
        await under_test.run(failures, pause)
        await assert_sound(under_test, request)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "pods"), [*((mode, 300) for mode in Mode if mode is not Mode.CHANGING), (Mode.CHANGING, 100)]
)
async def test_many_pods_and_failures_at_random(
    request: pytest.FixtureRequest,
    real_cluster: Cluster,
    real_kube: Kube,
    churned: RealNode,
    tmp_path: Path,
    mode: Mode,
    pods: int,
) -> None:
    async with churn(request, real_cluster, real_kube, churned, tmp_path, mode) as under_test:
        failures = (under_test.rng.choice(FAILURES[mode]) for _ in itertools.count())
        await under_test.run(failures, 12, pods)
        await assert_sound(under_test, request)
        await wait_until(under_test.here.held, lambda held: not held, FREE_WITHIN)
        assert {one.gpu for one in lives_in(under_test.beats)} == set(CHURNED)
        assert under_test.created.keys() == {scenario.name for scenario in under_test.ways}


async def assert_sound(churn: Churn, request: pytest.FixtureRequest) -> None:
    """After the end of all pods: no GPU was used twice, and every started pod got its GPUs."""
    await churn.free_all()
    found = overlaps(lives_in(churn.beats), are_shared=churn.mode is not Mode.PLUGIN)
    reported = await churn.reported()
    known = [one for one in found if churn.is_known(one, reported)]
    started = seen_in_containers(churn.beats)
    report_figures(
        request,
        created=sum(churn.created.values()),
        started=len(started),
        containers=sum(map(len, started.values())),
        shown_by_the_page=len(churn.shown & started.keys()),
        refusals=dict(churn.refused),
        failures=dict(churn.caused),
        known_overlaps=[str(one) for one in known],
    )
    churn.check(one for one in found if one not in known)
    churn.here.checker.assert_no_violations()
    assert started
