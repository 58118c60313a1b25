"""A forced deletion removes a pod's object at once, while its containers run on. No other pod may get their GPUs
meanwhile. tests/e2e/node/test_force_delete.py observes this from inside the containers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, gone, pod, wait_until
from tests.e2e.processes import OPT_IN, Site, site
from webhook.kube.install.policies import Installation, policies

# The default grace period.
MARGIN, CAP = 4, 31
FLAGS = ("--orphan-margin", f"{MARGIN}s", "--max-grace", f"{CAP}s")
# A GPU that is free at once is assigned within this time, on a busy machine, too.
SOON = 15.0
# The interval of polls of a node.
LOOK = 10.0
FORCED = 0
# The grace period of pods that are deleted while no reconciler watches, and how long the next one waits for the Lease.
UNSEEN, ELECTION = 12, 20.0
# Until a reservation without an observed pod is checked.
HOLD = 20.0
STOPS_ON_SIGTERM = {"kubelet.test/stops-after": "1s"}

Attack = Callable[[Site, str], Coroutine[Any, Any, None]]


def victim(node: str, *, grace: int, **more: Any) -> Raw:
    """A pod whose containers ignore SIGTERM."""
    at, deaf = {"kubernetes.io/hostname": node}, {"kubelet.test/stops-after": "1h"}
    return pod(f"old-{node}", 1, deaf, nodeSelector=at, terminationGracePeriodSeconds=grace, **more)


async def run_victim(here: Site, node: str, *, grace: int) -> str:
    """Runs the pod with its own reservation; returns its GPU."""
    return await run_pod(here, node, victim(node, grace=grace))


async def run_pod(here: Site, node: str, content: Raw) -> str:
    made = await here.kube.create(PODS, content, here.namespace)

    async def is_running() -> bool:
        found = await here.kube.get(PODS, f"old-{node}", here.namespace)
        held = await here.held_on(node)
        return found["status"]["phase"] == "Running" and {one["phase"] for one in held.values()} == {"finalized"}

    await wait_until(is_running, seconds=60)
    return str(made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"])


async def delete(here: Site, node: str, grace: int | None = None) -> None:
    await here.kube.delete(PODS, f"old-{node}", here.namespace, grace=grace)


async def seconds_until_reassigned(here: Site, other: str, node: str, uuid: str, *, seconds: float) -> float:
    """How long another tenant, who retries, is denied the GPU."""
    begun = time.monotonic()
    content = pod(f"next-{node}", gpus=1, nodeSelector={"kubernetes.io/hostname": node})
    while time.monotonic() - begun < seconds:
        try:
            made = await here.kube.create(PODS, content, other)
        except ApiError as exc:
            if exc.status >= 500:
                raise
            await asyncio.sleep(0.1)
            continue
        assert made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == uuid
        return time.monotonic() - begun
    raise AssertionError(f"{uuid} on {node} was not offered again within {seconds} s")


async def forced(here: Site, node: str) -> None:
    await delete(here, node, FORCED)


async def with_grace_then_forced(here: Site, node: str) -> None:
    """The kubelet continues with the grace period that it has begun."""
    await delete(here, node, 12)
    await asyncio.sleep(0.5)
    await delete(here, node, FORCED)


async def with_grace_then_less_then_forced(here: Site, node: str) -> None:
    """A shorter grace period does not replace a longer one either."""
    await delete(here, node, 12)
    await asyncio.sleep(0.5)
    await delete(here, node, 1)
    await delete(here, node, FORCED)


async def as_usual(here: Site, node: str) -> None:
    """The kubelet reports ended containers before it removes the object."""
    await here.kube.patch(PODS, f"old-{node}", {"metadata": {"annotations": STOPS_ON_SIGTERM}}, here.namespace)
    await delete(here, node, 1)
    await gone(here.kube, PODS, f"old-{node}", here.namespace)


# The kind of deletion, the pod's grace period, and how long its GPU stays reserved after the last deletion.
ATTACKS: tuple[tuple[Attack, int, float], ...] = (
    (forced, 5, 5 + MARGIN),
    (forced, 0, 1 + MARGIN),
    (with_grace_then_forced, 2, 12 + MARGIN),
    (with_grace_then_less_then_forced, 2, 12 + MARGIN),
    (as_usual, 2, 0),
)


async def test_gpu_of_a_force_deleted_pod_stays_reserved_until_its_containers_must_have_ended(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with (
        site(cluster, kube, tmp_path, nodes=len(ATTACKS), gpus=1, name="forced", replicas=1, flags=FLAGS) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        await here.reconciler()
        await here.wait_until_offered()

        async def attacked(node: str, attack: Attack, grace: int) -> float:
            uuid = await run_victim(here, node, grace=grace)
            await attack(here, node)
            return await seconds_until_reassigned(here, other, node, uuid, seconds=CAP + MARGIN + LOOK + SOON)

        cases = [(attack, grace) for attack, grace, _ in ATTACKS]
        took = await asyncio.gather(*(attacked(node, *case) for node, case in zip(here.nodes, cases, strict=True)))
        messages = [
            f"{attack.__name__}, grace {grace}: {seconds:.2f} s"
            for (attack, grace), seconds in zip(cases, took, strict=True)
        ]
        for (_, _, least), seconds, text in zip(ATTACKS, took, messages, strict=True):
            assert least <= seconds <= least + LOOK + SOON, text


async def test_repeated_force_deletion_is_limited_per_namespace(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """Only this limit applies, as with authenticated callers."""
    unlimited = ("--pending-per-namespace", "0", "--pending-share", "0")
    flags = (*FLAGS, *unlimited, "--orphans-per-namespace", "2")
    async with (
        site(cluster, kube, tmp_path, nodes=4, gpus=1, name="again", replicas=1, flags=flags) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        first, second, third, _ = here.nodes
        for node in (first, second):
            await run_victim(here, node, grace=20)
            await forced(here, node)

        async def asked() -> str:
            try:
                await kube.create(PODS, pod("more", 1), here.namespace, dryRun="All")
            except ApiError as exc:
                return exc.message
            return "created"

        await wait_until(asked, lambda said: "held by pods that are gone and may still run" in said)
        await kube.create(PODS, pod("another", 1, nodeSelector={"kubernetes.io/hostname": third}), other)
        await wait_until(asked, lambda said: said == "created", 20 + MARGIN + LOOK + SOON)


async def test_pod_that_was_never_bound_frees_its_gpu_at_deletion(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=1, name="unbound", replicas=1, flags=FLAGS) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        (node,) = here.nodes
        made = await kube.create(PODS, victim(node, grace=30, schedulerName="nobody"), here.namespace)
        await delete(here, node, FORCED)
        uuid = made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        assert await seconds_until_reassigned(here, other, node, uuid, seconds=60) < SOON


async def test_unobserved_deletion_keeps_the_gpu_for_the_stored_grace_period(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """The reconciler is down when one pod is deleted by force, and restarts between two deletions of the other."""
    flags = ("--orphan-margin", f"{MARGIN}s", "--max-grace", "1h")
    async with (
        site(cluster, kube, tmp_path, nodes=2, gpus=1, name="unseen", replicas=1, flags=flags) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        first = await here.reconciler()
        await here.wait_until_offered()
        unseen, between = here.nodes
        uuids = [await run_victim(here, node, grace=UNSEEN) for node in here.nodes]
        assert {one["grace"] for node in here.nodes for one in (await here.held_on(node)).values()} == {UNSEEN}
        await delete(here, between, UNSEEN)
        await first.kill()
        await delete(here, unseen, FORCED)
        await here.reconciler()
        await delete(here, between, FORCED)
        least = UNSEEN + MARGIN
        took = await asyncio.gather(
            *(
                seconds_until_reassigned(here, other, node, uuid, seconds=ELECTION + least + LOOK + SOON)
                for node, uuid in zip(here.nodes, uuids, strict=True)
            )
        )
        assert min(took) >= least, took


async def test_unobserved_pod_keeps_its_gpu_as_if_it_had_run(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """The pod names its node, so no Binding is reviewed, and it exists only while no reconciler runs."""
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=1, name="unwatched", replicas=1, flags=FLAGS) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        first = await here.reconciler()
        await here.wait_until_offered()
        (node,) = here.nodes
        await first.kill()
        made = await kube.create(PODS, victim(node, grace=CAP, nodeName=node), here.namespace)
        uuid = str(made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"])

        async def is_running() -> bool:
            return bool((await kube.get(PODS, f"old-{node}", here.namespace))["status"]["phase"] == "Running")

        await wait_until(is_running, seconds=60)
        await delete(here, node, FORCED)
        gone_at = time.monotonic()
        await here.reconciler()
        await seconds_until_reassigned(here, other, node, uuid, seconds=HOLD + ELECTION + CAP + MARGIN + LOOK + SOON)
        assert time.monotonic() - gone_at >= CAP + MARGIN


async def test_gpus_of_a_node_stay_reserved_while_its_kubelet_is_down(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Nothing stops the containers. A restarted node has none."""
    async with (
        site(cluster, kube, tmp_path, nodes=2, gpus=1, name="down", replicas=1, flags=FLAGS) as here,
        new_namespace(kube, OPT_IN) as other,
    ):
        await here.reconciler()
        await here.wait_until_offered()
        back, rebooted = here.nodes
        await boot(kube, rebooted, "boot-1")
        uuids = {node: await run_victim(here, node, grace=1) for node in here.nodes}
        await is_ready(kube, back, "false")
        for node in here.nodes:
            await delete(here, node, FORCED)
        await asyncio.sleep(1 + MARGIN + LOOK)
        assert {one["phase"] for one in (await here.held_on(back)).values()} == {"finalized"}
        await boot(kube, rebooted, "boot-2")
        assert await seconds_until_reassigned(here, other, rebooted, uuids[rebooted], seconds=60) < LOOK + SOON
        await is_ready(kube, back, "true")
        assert await seconds_until_reassigned(here, other, back, uuids[back], seconds=60) >= 1 + MARGIN


EVICTION: Raw = {"apiVersion": "policy/v1", "kind": "Eviction"}


async def test_grace_period_above_the_limit_is_denied(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """Otherwise a pod whose deletion was not observed would run longer than its GPU is kept."""
    too_long = CAP + 1
    async with (
        site(cluster, kube, tmp_path, nodes=1, gpus=1, name="grace", replicas=1, flags=FLAGS) as here,
        with_policies(kube, CAP),
    ):
        await here.reconciler()
        await here.wait_until_offered()
        (node,) = here.nodes
        probe = {"livenessProbe": {"terminationGracePeriodSeconds": too_long, "tcpSocket": {"port": 80}}}
        with_probe = victim(node, grace=1)
        with_probe["spec"]["containers"][0] |= probe
        for refused in (victim(node, grace=too_long), with_probe):
            with pytest.raises(ApiError, match="terminationGracePeriodSeconds"):
                await kube.create(PODS, refused, here.namespace)
        await run_victim(here, node, grace=CAP)
        name = f"old-{node}"
        dry: Raw = {"gracePeriodSeconds": too_long, "dryRun": ["All"]}
        await wait_until(lambda: is_refused(kube.call("DELETE", PODS.path(here.namespace, name), dry)))
        assert await is_refused(kube.delete(PODS, name, here.namespace, grace=too_long))
        options = {"metadata": {"name": name}, "deleteOptions": {"gracePeriodSeconds": too_long}}
        assert await is_refused(kube.post(PODS, name, "eviction", {**EVICTION, **options}, here.namespace))
        everything = kube.call("DELETE", PODS.path(here.namespace), {"gracePeriodSeconds": too_long})
        assert await is_refused(everything)
        assert "deletionTimestamp" not in (await kube.get(PODS, name, here.namespace))["metadata"]

        # Pods within the limit can be deleted, and pods without GPUs always.
        await kube.create(PODS, pod("plain"), here.namespace)
        evicted = {"metadata": {"name": "plain"}, "deleteOptions": {"gracePeriodSeconds": too_long}}
        await kube.post(PODS, "plain", "eviction", {**EVICTION, **evicted}, here.namespace)
        options["deleteOptions"] = {"gracePeriodSeconds": CAP}
        await kube.post(PODS, name, "eviction", {**EVICTION, **options}, here.namespace)
        await kube.delete(PODS, name, here.namespace)
        await delete(here, node, FORCED)


async def test_deletion_with_a_longer_grace_period_than_the_pods_is_denied(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """Otherwise the grace period stored with the reservation would be too short for an unobserved deletion."""
    own, of_a_probe = 5, 9
    async with (
        site(cluster, kube, tmp_path, nodes=2, gpus=1, name="own-grace", replicas=1, flags=FLAGS) as here,
        with_policies(kube, CAP),
    ):
        await here.reconciler()
        await here.wait_until_offered()
        deleted, evicted = here.nodes
        probe = {"startupProbe": {"terminationGracePeriodSeconds": of_a_probe, "tcpSocket": {"port": 80}}}
        for node in here.nodes:
            one = victim(node, grace=own)
            one["spec"]["containers"][0] |= probe
            await run_pod(here, node, one)

        def deletion(node: str, grace: int) -> Coroutine[Any, Any, Raw]:
            return kube.delete(PODS, f"old-{node}", here.namespace, grace=grace)

        def eviction(node: str, grace: int) -> Coroutine[Any, Any, Raw]:
            name = f"old-{node}"
            options = {"metadata": {"name": name}, "deleteOptions": {"gracePeriodSeconds": grace}}
            return kube.post(PODS, name, "eviction", {**EVICTION, **options}, here.namespace)

        dry: Raw = {"gracePeriodSeconds": of_a_probe + 1, "dryRun": ["All"]}
        await wait_until(lambda: is_refused(kube.call("DELETE", PODS.path(here.namespace, f"old-{deleted}"), dry)))
        for asks, node in ((deletion, deleted), (eviction, evicted)):
            assert await is_refused(asks(node, of_a_probe + 1))
            assert "deletionTimestamp" not in (await kube.get(PODS, f"old-{node}", here.namespace))["metadata"]
            await asks(node, of_a_probe)
            assert "deletionTimestamp" in (await kube.get(PODS, f"old-{node}", here.namespace))["metadata"]
            await delete(here, node, FORCED)


async def test_pod_with_a_grace_period_above_a_lowered_limit_can_be_deleted_and_evicted(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """A deletion without a grace period uses the pod's own."""
    own = 7200
    flags = ("--orphan-margin", f"{MARGIN}s", "--max-grace", "3h")
    async with (
        site(cluster, kube, tmp_path, nodes=2, gpus=1, name="old-grace", replicas=1, flags=flags) as here,
        with_policies(kube, CAP),
    ):
        await here.reconciler()
        await here.wait_until_offered()
        deleted, evicted = here.nodes
        for node in here.nodes:
            await run_victim(here, node, grace=own)
            await kube.patch(PODS, f"old-{node}", {"metadata": {"annotations": STOPS_ON_SIGTERM}}, here.namespace)
        dry: Raw = {"gracePeriodSeconds": own + 1, "dryRun": ["All"]}
        await wait_until(lambda: is_refused(kube.call("DELETE", PODS.path(here.namespace, f"old-{deleted}"), dry)))
        await delete(here, deleted)
        name = f"old-{evicted}"

        def eviction(grace: int) -> Coroutine[Any, Any, Raw]:
            options = {"metadata": {"name": name}, "deleteOptions": {"gracePeriodSeconds": grace}}
            return kube.post(PODS, name, "eviction", {**EVICTION, **options}, here.namespace)

        assert await is_refused(eviction(own + 1))
        await eviction(own)
        for node in here.nodes:
            await gone(kube, PODS, f"old-{node}", here.namespace)

        async def is_free() -> bool:
            return not any([await here.held_on(node) for node in here.nodes])

        await wait_until(is_free, seconds=60)


@asynccontextmanager
async def with_policies(kube: Kube, longest: int) -> AsyncIterator[None]:
    """Installs only the policies on deletions and evictions."""
    every = policies(Installation(max_grace=longest))
    wanted = [one for one in every if one["metadata"]["name"].startswith("gpuwarden-grace")]
    assert len(wanted) == 4
    for one in wanted:
        await kube.create(resource_of(one), one)
    try:
        yield
    finally:
        for one in wanted:
            await kube.delete(resource_of(one), one["metadata"]["name"])


async def is_refused(request: Awaitable[Raw]) -> bool:
    try:
        await request
    except ApiError as exc:
        return "the maximum for this pod with GPUs is its own" in exc.message
    return False


async def is_ready(kube: Kube, node: str, word: str) -> None:
    await kube.patch(NODES, node, {"metadata": {"annotations": {"kubelet.test/ready": word}}})

    async def conditions() -> set[str]:
        found = await kube.get(NODES, node)
        return {one["status"] for one in found["status"]["conditions"] if one["type"] == "Ready"}

    await wait_until(conditions, lambda found: found == {"True" if word == "true" else "False"})


async def boot(kube: Kube, node: str, boot_id: str) -> None:
    await kube.patch(NODES, node, {"status": {"nodeInfo": {"bootID": boot_id}}}, subresource="status")
