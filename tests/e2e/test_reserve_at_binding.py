"""With `--reserve bind` GPUs are reserved when a pod is bound: nothing is held before, and the pod's annotations, its
containers and the ledger agree afterwards."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.forger import forging
from tests.e2e.attacks.test_bound_while_down import ASKING, GATE, Harness, running_harness
from tests.e2e.attacks.test_gpu_variables import tenant_of
from tests.e2e.kube import (
    JOBS,
    PATIENCE,
    PODS,
    STATEFUL_SETS,
    ApiError,
    Kube,
    Raw,
    job,
    pod,
    pods_in_phase,
    stateful_set,
    wait_until,
)
from tests.e2e.measurements import report_figures
from tests.e2e.processes import OPT_IN, bindings_refused
from tests.e2e.webhook_configurations import is_reviewed

pytestmark = pytest.mark.asyncio(loop_scope="module")

UUID, ID = "gpuwarden.io/gpu-uuid", "gpuwarden.io/reservation-id"
HOST = "kubernetes.io/hostname"
BIND = ("--reserve", "bind")
# kube-scheduler tries a refused Binding again after 1, 2, 4, 8 and then every 10 s.
RETRIED = 4 * PATIENCE
# A reservation whose Binding was lost: 15 s until the last review, 60 s for the API server, two clock skews of 5 s, and
# a pass of the reconciler every 10 s.
LOST = 15 + 60 + 2 * 5 + 10 + PATIENCE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    async with (
        Kube(cluster.kubeconfig) as kube,
        running_harness(cluster, kube, tmp_path_factory.mktemp("late"), *BIND, gpus=2, replicas=2) as found,
    ):
        await wait_until(partial(is_possible, found))
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def harness(standing: Harness) -> AsyncIterator[Harness]:
    yield standing
    await standing.site.free_all()
    await wait_until(partial(standing.kube.list, PODS, standing.namespace), lambda pods: not pods)
    await wait_until(standing.site.held, lambda held: not held, LOST)
    standing.site.checker.assert_no_violations()


async def is_possible(here: Harness) -> bool:
    try:
        await here.kube.create(PODS, pod("probe", 2, ASKING), here.namespace, dryRun="All")
    except ApiError:
        return False
    return True


async def create(here: Harness, name: str, gpus: int = 1, node: str = "", **spec: object) -> Raw:
    at = {"nodeSelector": {HOST: node}} if node else {}
    content = pod(name, gpus, ASKING, terminationGracePeriodSeconds=1, **at, **spec)
    return await here.kube.create(PODS, content, here.namespace)


async def bind(here: Harness, name: str, node: str, **options: str) -> ApiError | None:
    """Binds the pod as an administrator does; returns the refusal."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    content = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    try:
        await here.kube.call("POST", PODS.path(here.namespace, name, "binding"), content, options)
    except ApiError as exc:
        return exc
    return None


async def agrees(here: Harness, raw: Raw) -> bool:
    """Whether the pod's annotations are the reservation of the ledger."""
    held = await here.site.held_on(raw["spec"]["nodeName"])
    own = [slot.partition("/")[0] for slot, entry in held.items() if entry.get("uid") == raw["metadata"]["uid"]]
    written = raw["metadata"]["annotations"]
    ids = {entry["reservation"] for entry in held.values() if entry.get("uid") == raw["metadata"]["uid"]}
    return sorted(written[UUID].split(",")) == sorted(own) and ids == {written[ID]}


async def holders(here: Harness, raw: Raw) -> list[str]:
    """The nodes on which GPUs are reserved for the pod."""
    found = [
        node
        for node in here.site.nodes
        for entry in (await here.site.held_on(node)).values()
        if entry.get("uid") == raw["metadata"]["uid"]
    ]
    return sorted(set(found))


async def test_abandoned_and_forged_creations_hold_nothing(harness: Harness) -> None:
    async with forging(harness.site) as forger:
        for _ in range(20):
            await forger.mutate(harness.namespace)
        assert forger.answers["admitted"] == 20
    await harness.kube.create(PODS, pod("only-asked", 2, ASKING), harness.namespace, dryRun="All")
    assert await harness.site.held() == {}


async def test_bound_pods_have_the_gpus_of_the_ledger(harness: Harness, request: pytest.FixtureRequest) -> None:
    took = []
    for number in range(4):
        began = time.monotonic()
        await create(harness, f"one-{number}")
        await harness.wait_until_bound(f"one-{number}")
        took.append(time.monotonic() - began)
    report_figures(request, median_ms_create_to_bound=statistics.median(took) * 1000)
    pods = await pods_in_phase(harness.kube, harness.namespace, 4, "Running")
    assert all([await agrees(harness, raw) for raw in pods])
    assert len({raw["metadata"]["annotations"][UUID] for raw in pods}) == 4
    with pytest.raises(ApiError, match="no free GPU"):
        await create(harness, "one-too-many")


async def test_concurrent_bindings_never_share_a_gpu(harness: Harness) -> None:
    """All pods were created while the GPUs were free. Two replicas review their Bindings."""
    node = harness.proven[0]
    names = [f"rival-{number}" for number in range(12)]
    for name in names:
        await create(harness, name, node=node, schedulerName="nobody")
    refused = await asyncio.gather(*(bind(harness, name, node) for name in names))
    assert sum(one is None for one in refused) == 2
    assert {one.reason for one in refused if one is not None} <= {"NoFreeDevice", "NoMatchingDevice", "LedgerAway"}
    pods = await harness.kube.list(PODS, harness.namespace)
    bound = [raw for raw in pods if raw["spec"].get("nodeName")]
    assert all([await agrees(harness, raw) for raw in bound])
    assert len(await harness.site.held_on(node)) == len(bound) == 2


async def test_binding_of_any_other_user_is_reviewed_too(harness: Harness) -> None:
    """It places the pod where the scheduler would not."""
    first, second = harness.proven
    raw = await create(harness, "chosen", node=first, schedulerName="nobody")
    refused = await bind(harness, "chosen", second)
    assert refused is not None
    assert refused.reason == "NoSuitableNode"
    assert await bind(harness, "chosen", first, dryRun="All") is None
    assert await harness.site.held() == {}
    assert await bind(harness, "chosen", first) is None
    assert await agrees(harness, await harness.kube.get(PODS, "chosen", harness.namespace))
    assert await holders(harness, raw) == [first]


async def test_evidence_that_ended_between_creation_and_binding_is_none(harness: Harness) -> None:
    node = harness.proven[0]
    await create(harness, "late", node=node, schedulerName="nobody")
    try:
        await harness.prove(node, banned=True)

        async def reason() -> str:
            refused = await bind(harness, "late", node, dryRun="All")
            return "" if refused is None else refused.reason

        await wait_until(reason, lambda found: found == "NoProvenNode")
        refused = await bind(harness, "late", node)
        assert refused is not None
        assert refused.reason == "NoProvenNode"
        assert await harness.site.held() == {}
    finally:
        await harness.prove(node)
    await wait_until(reason, lambda found: not found)


async def test_refused_binding_is_tried_again_and_leaves_one_reservation(harness: Harness) -> None:
    async with bindings_refused(harness.kube, harness.namespace, harness.proven[0]):
        raw = await create(harness, "retried", gpus=2)
        await wait_until(partial(holders, harness, raw))
        assert await harness.node_of("retried") is None
    began = time.monotonic()
    await wait_until(partial(harness.node_of, "retried"), seconds=RETRIED)
    node = await harness.node_of("retried")
    assert await agrees(harness, await harness.kube.get(PODS, "retried", harness.namespace))
    await wait_until(partial(holders, harness, raw), lambda nodes: nodes == [node], began + RETRIED - time.monotonic())


@pytest.mark.long
async def test_reservation_of_a_lost_binding_is_released(harness: Harness, request: pytest.FixtureRequest) -> None:
    node = harness.proven[0]
    raw = await create(harness, "lost", node=node, schedulerName="nobody")
    async with bindings_refused(harness.kube, harness.namespace, harness.proven[0]):
        began = time.monotonic()
        assert await bind(harness, "lost", node) is not None
        assert await holders(harness, raw) == [node]
        await wait_until(partial(holders, harness, raw), lambda nodes: not nodes, LOST)
    report_figures(request, seconds_until_released=time.monotonic() - began)


async def test_tenant_cannot_change_what_the_binding_has_written(harness: Harness, cluster: Cluster) -> None:
    """A restarted container would read the changed annotation."""
    async with tenant_of(cluster, harness.kube, OPT_IN) as (tenant, namespace):
        await wait_until(partial(is_reviewed, harness.kube, namespace))
        mine = pod("mine", 1, ASKING, terminationGracePeriodSeconds=1)
        made = await tenant.create(PODS, mine, namespace)
        (bound,) = await pods_in_phase(harness.kube, namespace, 1, "Running")
        own = bound["metadata"]["annotations"][UUID]
        other = next(gpu for gpu in harness.site.gpus if gpu != own)
        for change in ({UUID: other}, {UUID: None}, {ID: "another"}, {"gpuwarden.io/node": "elsewhere"}):
            with pytest.raises(ApiError, match="only gpuwarden may change it"):
                await tenant.patch(PODS, "mine", {"metadata": {"annotations": change}}, namespace)
        # Before the Binding as well.
        waiting = pod("waits", 1, ASKING, schedulingGates=[{"name": GATE}])
        await tenant.create(PODS, waiting, namespace)
        with pytest.raises(ApiError, match="only gpuwarden may change it"):
            await tenant.patch(PODS, "waits", {"metadata": {"annotations": {UUID: other}}}, namespace)
        assert made["metadata"]["annotations"].get(UUID) is None


async def test_restarted_stateful_set_and_job_get_gpus_again(harness: Harness) -> None:
    kube, namespace = harness.kube, harness.namespace
    await kube.create(STATEFUL_SETS, stateful_set("kept", 1, 1, ASKING), namespace)
    try:
        (before,) = await pods_in_phase(kube, namespace, 1, "Running")
        await kube.delete(PODS, "kept-0", namespace)

        async def again() -> Raw | None:
            raw = await kube.find(PODS, "kept-0", namespace)
            is_new = raw is not None and raw["metadata"]["uid"] != before["metadata"]["uid"]
            return raw if is_new and raw is not None and raw["spec"].get("nodeName") else None

        raw = await wait_until(again)
        assert raw is not None
        assert await agrees(harness, raw)
        await wait_until(harness.site.held, lambda held: len(held) == 1, LOST)
        # A simulated pod of a Job ends soon, and its GPU is freed.
        lasting = {**ASKING, "kubelet.test/runs-for": "1h"}
        await kube.create(JOBS, job("run", 2, 1, lasting), namespace)
        of_job = partial(kube.list, PODS, namespace, labelSelector="job-name=run")
        pods = await wait_until(of_job, lambda pods: sum("nodeName" in one["spec"] for one in pods) == 2, RETRIED)
        assert all([await agrees(harness, one) for one in pods])
    finally:
        await kube.delete(STATEFUL_SETS, "kept", namespace)
        if await kube.find(JOBS, "run", namespace) is not None:
            await kube.delete(JOBS, "run", namespace)


@pytest.mark.long
async def test_pods_wait_while_all_replicas_are_dead_and_are_bound_afterwards(harness: Harness) -> None:
    """SIGKILL after the creation. A pod that is bound without a review would see no GPU."""
    made = [await create(harness, f"gated-{k}", schedulingGates=[{"name": GATE}]) for k in range(2)]
    uids = {raw["metadata"]["uid"] for raw in made}
    await wait_until(harness.ends, lambda ends: uids <= ends.keys())
    for worker in harness.site.replicas:
        await worker.kill()
    harness.site.balancer.servers.clear()
    for raw in made:
        await harness.open_gate(raw["metadata"]["name"])
    await harness.wait_until_refused("gated-0", "may no longer be bound without a review")
    assert await harness.site.held() == {}
    for _ in range(2):
        await harness.site.replica()
    for raw in made:
        name = raw["metadata"]["name"]
        await wait_until(partial(harness.node_of, name), seconds=RETRIED)
        assert await agrees(harness, await harness.kube.get(PODS, name, harness.namespace))
