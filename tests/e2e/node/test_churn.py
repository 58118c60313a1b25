"""No GPU is used by two containers at a time, on a node with failures. The containers' own heartbeats prove it."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from attrs import define, field, frozen

from scripts.controlplane.cluster import Cluster
from scripts.node.real import RealNode
from tests.e2e.gpu_checker import InvariantViolatedError
from tests.e2e.kube import NODES, PODS, ApiError, Kube, NotInTimeError, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import is_ready, real_pod
from tests.e2e.node.front import installed_on
from tests.e2e.node.heartbeats import Life, heartbeat_container, lives_in, overlaps, volume_of
from tests.e2e.processes import Site

CHURNED: Final = tuple(f"GPU-11111111-0000-4000-8000-{number:012}" for number in range(8))
WORKERS: Final = 8
ASKS_AGAIN_AFTER: Final = 0.3
DOWN_FOR: Final = 2.0
# Longer than kubelet is down and needs to end containers afterwards.
FLAGS: Final = ("--max-grace", "30s", "--orphan-margin", "20s")
SEEN_WITHIN: Final = 10.0
FREE_WITHIN: Final = 90.0


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


@define(eq=False)
class Churn:
    """Pods that are created and deleted on one node, while failures of the node are caused."""

    here: Site
    cluster: Cluster
    node: RealNode
    beats: Path
    rng: random.Random
    created: Counter[str] = field(factory=Counter)
    annotated: dict[str, str] = field(factory=dict)
    refused: int = 0
    _ways: "itertools.cycle[PodScenario]" = field(factory=lambda: itertools.cycle(WAYS))
    _numbers: "itertools.count[int]" = field(factory=itertools.count)
    _is_over: bool = False

    async def run(self, troubles: Sequence[str], pause: float) -> None:
        """Creates and deletes pods while the node has one failure after the other, with a pause before and after
        each."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work())
            for what in troubles:
                await asyncio.sleep(pause)
                await self.cause_failure(what)
            await asyncio.sleep(pause)
            self._is_over = True

    async def cause_failure(self, what: str) -> None:
        if what == "reboot":
            since = datetime.now(UTC)  # noqa: TID251 - kubelet's heartbeats are by the machine's clock
            await asyncio.to_thread(self.node.reboot)
            await asyncio.to_thread(self.cluster.wait_for_node, self.node.name, since)
        elif what == "kubelet":
            await asyncio.to_thread(self.node.kill_kubelet)
            await asyncio.sleep(DOWN_FOR)
            await asyncio.to_thread(self.node.start_kubelet)
        else:
            await asyncio.to_thread(self.node.kill_containerd)
            await asyncio.sleep(DOWN_FOR)
            await asyncio.to_thread(self.node.start_containerd)

    async def _work(self) -> None:
        scenario = next(self._ways)
        while not self._is_over:
            name = f"{scenario.name}-{next(self._numbers)}"
            if not await self._create(name, scenario):
                await asyncio.sleep(ASKS_AGAIN_AFTER)
                continue
            await self._seen(name)
            await asyncio.sleep(self.rng.uniform(0.2, 2))
            await self.here.kube.delete(PODS, name, self.here.namespace, grace=scenario.deleted_with)
            scenario = next(self._ways)

    async def _create(self, name: str, scenario: PodScenario) -> bool:
        gpus = 1 if self.rng.random() < 0.7 else 2
        beats = heartbeat_container(name, gpus, beats=scenario.beats)
        volumes = [volume_of(self.beats)]
        content = real_pod(name, beats, grace=scenario.grace, restartPolicy=scenario.restart, volumes=volumes)
        try:
            made = await self.here.kube.create(PODS, content, self.here.namespace)
        except ApiError:
            self.refused += 1
            return False
        self.created[scenario.name] += 1
        self.annotated[name] = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        return True

    async def _seen(self, name: str) -> None:
        """Waits until the pod runs or has run, or until a timeout."""

        async def found() -> Raw:
            return await self.here.kube.get(PODS, name, self.here.namespace)

        with suppress(NotInTimeError):
            await wait_until(found, lambda pod: is_ready(pod) or pod["status"]["phase"] != "Pending", SEEN_WITHIN)

    def check(self, lives: Sequence[Life]) -> None:
        """Raises an error that a rerun does not excuse."""
        violations = overlaps(lives)
        violations += [f"{one.pod} had {one.gpu}" for one in lives if one.gpu not in self.annotated[one.pod]]
        if violations:
            raise InvariantViolatedError("\n".join(violations[:10]))


# The check.


@pytest.mark.parametrize(
    ("lives", "count"),
    [
        pytest.param([Life("a", 1, 2, "x"), Life("a", 2.01, 3, "y")], 0, id="one after the other"),
        pytest.param([Life("a", 1, 3, "x"), Life("b", 2, 4, "y")], 0, id="different GPUs"),
        pytest.param([Life("a", 1, 3, "x"), Life("a", 2, 4, "y")], 1, id="the second starts before the first ends"),
        pytest.param([Life("a", 1, 9, "x"), Life("a", 2, 3, "y"), Life("a", 4, 5, "z")], 2, id="two within one"),
        pytest.param([Life("a", 1, 2, "x"), Life("a", 1.5, 3, "x")], 1, id="two containers of one pod"),
        pytest.param([Life("a", 1, 2, "x"), Life("a", 2, 3, "y")], 1, id="same hundredth of a second"),
    ],
)
def test_overlapping_gpu_use_is_detected(lives: list[Life], count: int) -> None:
    assert len(overlaps(lives)) == count


# The test.


@pytest.fixture
async def churn(
    request: pytest.FixtureRequest, real_cluster: Cluster, real_kube: Kube, tmp_path: Path
) -> AsyncIterator[Churn]:
    """On its own node, so that the failures affect no other test."""
    seed = random.SystemRandom().randrange(1 << 32)
    report_figures(request, seed=seed)
    beats = tmp_path / "beats"
    beats.mkdir()
    node = await asyncio.to_thread(real_cluster.add_real_node, "churned", CHURNED)
    try:
        async with installed_on(real_cluster, real_kube, tmp_path, [node], flags=FLAGS) as here:
            yield Churn(here, real_cluster, node, beats, random.Random(seed))  # noqa: S311 - to be repeated
    finally:
        await asyncio.to_thread(node.remove)
        await real_kube.delete(NODES, node.name)


@pytest.mark.parametrize(
    ("rounds", "pause"),
    [
        pytest.param(1, 10, id="one-round"),
        pytest.param(30, 15, marks=pytest.mark.long, id="thirty-rounds"),
    ],
)
async def test_no_gpu_is_used_by_two_containers_at_a_time(
    request: pytest.FixtureRequest, churn: Churn, rounds: int, pause: float
) -> None:
    await churn.run(rounds * ("kubelet", "containerd", "reboot"), pause)
    await churn.here.free_all()
    await wait_until(churn.here.held, lambda held: not held, FREE_WITHIN)
    lives = lives_in(churn.beats)
    report_figures(request, containers=len(lives), pods=dict(churn.created), refusals=churn.refused)
    churn.check(lives)
    churn.here.checker.assert_no_violations()
    assert {one.gpu for one in lives} == set(CHURNED)
    assert churn.created.keys() == {scenario.name for scenario in WAYS}
