"""No GPU is used by two containers at a time on a node with failures, and each container sees the GPUs that its pod has
by every account. The containers' own heartbeats prove it."""

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import pytest
from attrs import define, field, frozen

from scripts.controlplane.cluster import Cluster
from scripts.node.real import DRA_DRIVER, RealNode
from tests.e2e.conftest import emptied_namespace
from tests.e2e.gpu_checker import InvariantViolatedError
from tests.e2e.kube import NAMESPACES, NODES, PODS, ApiError, Kube, NotInTimeError, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import Seen, is_ready, real_pod
from tests.e2e.node.deliveries import ANNOTATION, CLAIM, LEDGER, PAGE, Deliveries, disagreements
from tests.e2e.node.front import HASH, WRITES_TO_HOST, installed_on
from tests.e2e.node.heartbeats import (
    Life,
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


class Mode(StrEnum):
    """How the pods of a run get their GPUs."""

    NVIDIA = "nvidia"
    DRA = "dra"
    NATIVE = "native"
    # The label of the node changes from `nvidia` to `dra` and back; there are pods of both.
    CHANGING = "changing"


# The failures of a run.
OF_NODE: Final = ("kubelet", "containerd", "reboot")
OF_PLUGINS: Final = ("driver", "attest")
OURS: Final = ("serve", "reconcile")
FAILURES: Final = {
    Mode.NVIDIA: OF_NODE,
    Mode.DRA: (*OF_PLUGINS, *OURS, *OF_NODE),
    Mode.NATIVE: (*OF_PLUGINS, *OURS, *OF_NODE),
    Mode.CHANGING: ("label", *OF_PLUGINS, "label", *OURS, "label", *OF_NODE),
}
# The places that know the GPUs of a pod, by the injection in its name.
PLACES: Final = {
    "nvidia": (ANNOTATION, LEDGER),
    "dra": (ANNOTATION, LEDGER, CLAIM),
    "native": (CLAIM,),
}


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


SHAPES: Final[Sequence[Callable[[str, int | None], Raw]]] = (one_gpu, one_gpu, two_gpus, two_containers, init_container)


@define(eq=False)
class Churn:
    """Pods that are created and deleted on one node, while failures of the node and of gpuwarden are caused."""

    here: Site
    cluster: Cluster
    node: RealNode
    beats: Path
    rng: random.Random
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
    _ways: "itertools.cycle[PodScenario]" = field(factory=lambda: itertools.cycle(WAYS))
    _numbers: "itertools.count[int]" = field(factory=itertools.count)
    _is_over: bool = False

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
        containers = self.rng.choice(SHAPES)(name, scenario.beats)
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
        """Waits until the pod runs or has run, and until `/devices` shows it, or until a timeout."""
        meta = made["metadata"]

        async def found() -> Raw:
            return await self.here.kube.get(PODS, meta["name"], meta["namespace"])

        async def is_shown() -> bool:
            return self.deliveries.says(meta["uid"], PAGE)

        with suppress(NotInTimeError):
            pod = await wait_until(found, lambda pod: is_ready(pod) or pod["status"]["phase"] != "Pending", SEEN_WITHIN)
            if pod["status"]["phase"] not in ENDED and scenario.name != "ends" and Mode.NATIVE not in self.namespaces:
                self.shown.add(meta["name"])
                await wait_until(is_shown, seconds=SHOWN_WITHIN)

    async def free_all(self) -> None:
        for namespace in self.namespaces.values():
            await self.here.kube.call("DELETE", PODS.path(namespace))
        for namespace in self.namespaces.values():
            await wait_until(lambda of=namespace: self.here.kube.list(PODS, of), lambda pods: not pods, FREE_WITHIN)  # type: ignore[misc]  # bound now, not later

    def places(self, name: str) -> Iterator[str]:
        yield from PLACES[name.partition("-")[0]]
        if name in self.shown:
            yield PAGE

    def check(self, lives: Sequence[Life]) -> None:
        """Raises an error that a rerun does not excuse."""
        violations = [*overlaps(lives), *self.deliveries.violations(seen_in_containers(self.beats), self.places)]
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
        if mode is Mode.NVIDIA:
            here = await stack.enter_async_context(installed_on(cluster, kube, directory, [node], flags=FLAGS))
            namespaces = {"nvidia": here.namespace}
        else:
            injection = "dra" if mode is Mode.DRA else "nvidia"
            flags = (*FLAGS, "--injection", injection)
            standing = proven_site(cluster, kube, directory, [node], flags=flags, is_native=mode is Mode.NATIVE)
            proven = await stack.enter_async_context(standing)
            here, attest = proven.here, proven.attests[node.name]
            await prove(kube, node.name, len(CHURNED))
            namespaces = {Mode.NATIVE.value if mode is Mode.NATIVE else injection: here.namespace}
            if mode is Mode.NATIVE:
                await templates_are_there(kube, here.namespace)
            else:
                await here.wait_until_offered()
            if mode is Mode.CHANGING:
                namespaces["dra"] = await stack.enter_async_context(emptied_namespace(kube, OPT_IN))
                notes = {"annotations": {"gpuwarden.io/injection": "dra"}}
                await kube.patch(NAMESPACES, namespaces["dra"], {"metadata": {**WRITES_TO_HOST["metadata"], **notes}})
        rng = random.Random(seed)  # noqa: S311 - to be repeated
        deliveries = Deliveries(here, cluster, CHURNED)
        yield Churn(here, cluster, node, beats_in(directory), rng, deliveries, namespaces, attest)


@pytest.mark.parametrize(
    ("mode", "failures", "pause"),
    [
        pytest.param(Mode.NVIDIA, OF_NODE, 10, id="nvidia"),
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
    ("mode", "pods"), [(Mode.NVIDIA, 300), (Mode.DRA, 300), (Mode.NATIVE, 300), (Mode.CHANGING, 100)]
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
        assert under_test.created.keys() == {scenario.name for scenario in WAYS}


async def assert_sound(churn: Churn, request: pytest.FixtureRequest) -> None:
    """After the end of all pods: no GPU was used twice, and every started pod got its GPUs."""
    await churn.free_all()
    lives = lives_in(churn.beats)
    started = seen_in_containers(churn.beats)
    report_figures(
        request,
        created=sum(churn.created.values()),
        started=len(started),
        containers=sum(map(len, started.values())),
        shown_by_the_page=len(churn.shown & started.keys()),
        refusals=dict(churn.refused),
        failures=dict(churn.caused),
    )
    churn.check(lives)
    churn.here.checker.assert_no_violations()
    assert started
