"""Which pods are bound to which nodes while no replica of gpuwarden answers."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from scripts.controlplane.cluster import Cluster
from tests.e2e.attacks.test_gpu_variables import HOSTILE, hostile_pod, seen, tenant_of
from tests.e2e.cluster_users import CRDS
from tests.e2e.conftest import new_namespace
from tests.e2e.evidence import stamp
from tests.e2e.kube import (
    EVENTS,
    NAMESPACES,
    PODS,
    ApiError,
    Kube,
    Raw,
    Resource,
    delete_without_finalizers,
    gone,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.measurements import percentile, report_figures
from tests.e2e.processes import OPT_IN, Site, Worker, cancel_and_wait, site, with_policies
from tests.e2e.test_discovery import NODE_EVIDENCES
from tests.e2e.webhook_configurations import is_reviewed
from tests.running import GPUWARDEN, challenging
from webhook.admission.binding_ends import NAME
from webhook.evidence.node_evidence import new_node_evidence
from webhook.runtime.clock import utc_now

BINDING_ENDS = Resource("apis/gpuwarden.io/v1alpha1", "bindingends", is_namespaced=False)
HASH = "sha256:d0d0"
ASKING = {"gpuwarden.io/required-hash": HASH}
GATE = "example.test/wait"
# Its list has room for about forty pods. A real list has room for about twenty thousand, which take minutes to create
# on the test's machine.
WITH_A_SMALL_LIST = """
from functools import partial
from webhook.assembly import reconciler
from webhook.cli import main
reconciler.BindingEnds = partial(reconciler.BindingEnds, max_bytes=3_000)
raise SystemExit(main())
"""
MANY_PODS = 60
# kube-scheduler retries a pod after 1 to 10 s.
TRIES = 15.0
# Counted from when a replica is ready: the start of a process depends on the machine.
RECOVERY = 5.0


@frozen(eq=False)
class Harness:
    """Proven nodes, two of which tests name; replicas, and one reconciler."""

    site: Site
    kube: Kube
    proven: tuple[str, str]

    @property
    def namespace(self) -> str:
        return self.site.namespace

    async def prove(self, node: str, lasts: timedelta = timedelta(hours=1), **said: Any) -> None:
        """Writes evidence as a replica does that has an answer to its challenge."""
        now = utc_now()
        entry = {"hash": HASH, "banned": False, "conflict": False, "since": stamp(now), "until": stamp(now + lasts)}
        made = await self.kube.get(NODE_EVIDENCES, node)
        await self.kube.replace(
            NODE_EVIDENCES, {**made, "status": {"sources": {"jwt-svid": entry | said}}}, None, "status"
        )

    async def ends(self) -> dict[str, str]:
        """The stored end times for an outage."""
        found = await self.kube.find(BINDING_ENDS, NAME)
        spec = (found or {}).get("spec") or {}
        return {**spec.get("nodes", {}), **spec.get("namespaces", {}), **spec.get("pods", {})}

    async def wait_until_listed(self, *names: str) -> None:
        """Waits until each of these nodes, pods or namespaces has an end time after 1971."""
        await wait_until(self.ends, lambda data: all(data.get(name, "1970") > "1971" for name in names))

    async def create_gated_pod(self, name: str, node: str, gpus: int = 1) -> Raw:
        """A pod with GPUs on that node, held back by another scheduling gate."""
        content = pod(name, gpus, ASKING, schedulingGates=[{"name": GATE}])
        content["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}

        async def made() -> Raw | str:
            try:
                return await self.kube.create(PODS, content, self.namespace)
            except ApiError as exc:
                return exc.message

        found = await wait_until(made, lambda one: isinstance(one, dict))
        assert isinstance(found, dict)
        if gpus:
            await self.wait_until_listed(found["metadata"]["uid"])
        return found

    async def open_gate(self, name: str) -> None:
        await self.kube.patch(PODS, name, [{"op": "remove", "path": "/spec/schedulingGates/0"}], self.namespace)

    async def node_of(self, name: str) -> str | None:
        node: str | None = (await self.kube.get(PODS, name, self.namespace))["spec"].get("nodeName")
        return node

    async def wait_until_bound(self, name: str) -> str:
        """Waits until the pod is bound; returns its node. A timeout shows the scheduler's message."""

        async def seen() -> str:
            said = await self.scheduling_message(name)
            return await self.node_of(name) or f"unbound: {said}"

        return await wait_until(seen, lambda found: not found.startswith("unbound"))

    async def scheduling_message(self, name: str) -> list[str]:
        found = await self.kube.list(EVENTS, self.namespace, fieldSelector=f"involvedObject.name={name}")
        return [one["message"] for one in found]

    async def wait_until_refused(self, name: str, words: str) -> None:
        """Waits until the scheduler has reported the refusal; the pod stays unbound, also on retries."""

        async def said() -> list[str]:
            assert await self.node_of(name) is None
            return await self.scheduling_message(name)

        await wait_until(said, lambda found: any(words in one for one in found), TRIES)
        await asyncio.sleep(2)
        assert await self.node_of(name) is None


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, tmp_path: Path) -> AsyncIterator[Harness]:
    async with running_harness(cluster, kube, tmp_path) as found:
        yield found


@asynccontextmanager
async def running_harness(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    *flags: str,
    nodes: int = 2,
    gpus: int = 4,
    replicas: int = 1,
    program: Sequence[str] = (GPUWARDEN,),
) -> AsyncIterator[Harness]:
    shape: dict[str, Any] = {"nodes": nodes, "gpus": gpus, "replicas": replicas, "name": "down"}
    async with site(cluster, kube, directory, **shape, flags=(*challenging(directory), *flags)) as here:
        first, second, *_ = here.nodes
        found = Harness(here, kube, (first, second))
        try:
            for node in here.nodes:
                await kube.create(NODE_EVIDENCES, new_node_evidence(node))
                await found.prove(node)
            await here.reconciler(program=program)
            await found.wait_until_listed(*here.nodes)
            yield found
        finally:
            await here.stop()
            for node in here.nodes:
                await delete_without_finalizers(kube, NODE_EVIDENCES, node)
            await kube.delete(BINDING_ENDS, NAME)


@contextmanager
def frozen_process(worker: Worker) -> Iterator[None]:
    """The process keeps its connections and does not answer."""
    worker.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.process.send_signal(signal.SIGCONT)


async def test_pods_without_a_claim_are_bound_while_every_replica_is_down(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    await harness.site.stop()
    took = []
    for number in range(10):
        began = time.monotonic()
        await harness.kube.create(PODS, pod(f"plain-{number}"), harness.namespace)
        await harness.wait_until_bound(f"plain-{number}")
        took.append(time.monotonic() - began)
    report_figures(request, median_ms_create_to_bound=percentile(took, 0.5) * 1000, worst_ms=max(took) * 1000)
    with pytest.raises(ApiError, match="failed calling webhook"):
        await harness.kube.create(PODS, pod("asking", 1, ASKING), harness.namespace)


async def test_pod_with_a_sidecar_is_created_blinded_and_bound_while_gpuwarden_is_down(
    harness: Harness, cluster: Cluster
) -> None:
    """With everything that an installation creates in the API server."""
    async with with_policies(harness.site), tenant_of(cluster, harness.kube, OPT_IN) as (tenant, namespace):
        await wait_until(lambda: is_reviewed(harness.kube, namespace))
        await harness.site.stop()
        for number, members in enumerate(HOSTILE.values()):
            content = hostile_pod(members, name=f"plain-{number}")
            reply = await tenant.http.post(PODS.path(namespace), json=content)
            assert reply.status_code == 201, reply.text
            assert seen(reply.json()) == dict.fromkeys(("init", "side", "a", "b"), "void")
            made = await pod_in_phase(harness.kube, namespace, f"plain-{number}", "Running")
            assert made["spec"]["nodeName"]
            assert set(seen(made).values()) == {"void"}
        with pytest.raises(ApiError, match="failed calling webhook"):
            await tenant.create(PODS, pod("asking", 1), namespace)


async def test_pod_is_bound_during_an_outage_only_while_evidence_is_valid(
    harness: Harness, request: pytest.FixtureRequest
) -> None:
    ending, lasting = harness.proven
    await harness.create_gated_pod("late", ending)
    await harness.create_gated_pod("held-to-it", ending, gpus=0)
    made = await harness.create_gated_pod("lasting", lasting)
    await harness.prove(ending, timedelta(seconds=8))
    await wait_until(harness.ends, lambda data: ends_soon(data[ending]))
    await harness.site.stop()
    await wait_until(harness.ends, lambda data: data[ending] <= stamp(utc_now()))
    for name in ("late", "held-to-it", "lasting"):
        await harness.open_gate(name)
    assert await harness.wait_until_bound("lasting") == made["metadata"]["annotations"]["gpuwarden.io/node"] == lasting
    for name in ("late", "held-to-it"):
        await harness.wait_until_refused(name, f"the evidence of node {ending} ended")
    # gpuwarden is back, first without that evidence, then with it.
    began = time.monotonic()
    await harness.site.replica()
    ready = time.monotonic()
    await harness.kube.create(PODS, pod("asking", 1, ASKING), harness.namespace)
    back = time.monotonic() - ready
    report_figures(request, seconds_to_start=ready - began, seconds_to_the_next_claim=back)
    assert back < RECOVERY
    await harness.wait_until_bound("asking")
    assert await harness.node_of("late") is None
    await harness.prove(ending)
    for name in ("late", "held-to-it"):
        assert await harness.wait_until_bound(name) == ending
    assert len(await harness.site.held()) == 3


async def test_pods_without_a_claim_wait_when_evidence_of_every_node_has_expired(harness: Harness) -> None:
    """A policy that allowed them would also allow pods with a claim that are on no list."""
    await harness.site.reconcilers[0].kill()
    node = harness.proven[0]
    content = pod(
        "unlisted", 1, ASKING, schedulingGates=[{"name": GATE}], nodeSelector={"kubernetes.io/hostname": node}
    )
    made = await harness.kube.create(PODS, content, harness.namespace)
    assert made["metadata"]["annotations"]["gpuwarden.io/node"] == node
    await harness.create_gated_pod("unlisted-without-gpus", node, gpus=0)
    unlisted = ("unlisted", "unlisted-without-gpus")
    uids = {(await harness.kube.get(PODS, name, harness.namespace))["metadata"]["uid"] for name in unlisted}
    # The end times as they are after the longest validity of evidence.
    over = stamp(utc_now() - timedelta(minutes=2))
    await harness.kube.patch(BINDING_ENDS, NAME, {"spec": {"nodes": dict.fromkeys(harness.proven, over)}})
    assert not uids & (await harness.ends()).keys()
    await harness.site.stop()
    for name in unlisted:
        await harness.open_gate(name)
    attested = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(harness.proven)}
    held = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [attested]}]}}
    await harness.kube.create(PODS, pod("plain", affinity={"nodeAffinity": held}), harness.namespace)
    for name in (*unlisted, "plain"):
        await harness.wait_until_refused(name, "the evidence of node")
    # A node that never had evidence is open.
    await harness.kube.create(PODS, pod("elsewhere"), harness.namespace)
    assert await harness.wait_until_bound("elsewhere") not in harness.proven
    await harness.site.replica()
    await harness.wait_until_bound("plain")


def ends_soon(text: str) -> bool:
    return datetime.fromisoformat(text) < utc_now() + timedelta(seconds=30)


@contextmanager
def flood(here: Site, attack: str, number: int) -> Iterator[None]:
    """Runs attackers of the pod network in another process."""
    port, ca = str(here.replicas[0].port), str(here.directory / "ca.crt")
    command = [sys.executable, "-m", "tests.e2e.attacks.flood", port, ca, attack, str(number)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


async def slow_down(worker: Worker) -> None:
    """Lets the process run only for moments, as on an overloaded machine."""
    while True:
        with frozen_process(worker):
            await asyncio.sleep(12)
        await asyncio.sleep(0.5)


@pytest.mark.parametrize(
    ("attack", "is_starved"), [("deep", False), ("unfinished-small", False), ("deep", True)], ids=str
)
async def test_flood_does_not_let_a_pod_onto_a_node_with_expired_evidence(
    harness: Harness, attack: str, request: pytest.FixtureRequest, *, is_starved: bool
) -> None:
    """Under a flood Bindings are still reviewed. If a review fails nevertheless, the API server ignores it, and the
    policy judges that Binding."""
    ending, lasting = harness.proven
    late = [f"late-{number}" for number in range(4)]
    for name in late:
        await harness.create_gated_pod(name, ending)
    await harness.create_gated_pod("lasting", lasting)
    await harness.prove(ending, timedelta(seconds=8))
    await wait_until(harness.ends, lambda data: data[ending] <= stamp(utc_now()))
    with flood(harness.site, attack, 200):
        await asyncio.sleep(2)
        starving = asyncio.create_task(slow_down(harness.site.replicas[0])) if is_starved else None
        await asyncio.sleep(0.1)
        for name in late:
            await harness.open_gate(name)
        for name in late:
            await wait_until(lambda name=name: refusals(harness, name))  # type: ignore[misc]  # bound now, not later
        await asyncio.sleep(TRIES)
        assert [await harness.node_of(name) for name in late] == [None] * len(late)
        said = [one for name in late for one in await refusals(harness, name)]
        if starving is not None:
            await cancel_and_wait([starving])
    by_policy = sum(f"the evidence of node {ending} ended" in one for one in said)
    report_figures(request, refusals=len(said), by_policy=by_policy)
    assert (by_policy > 0) == is_starved
    await harness.open_gate("lasting")
    assert await harness.wait_until_bound("lasting") == lasting
    assert [await harness.node_of(name) for name in late] == [None] * len(late)


async def refusals(harness: Harness, name: str) -> list[str]:
    """The refusals that the scheduler got when it bound the pod."""
    return [one for one in await harness.scheduling_message(name) if "denied" in one or "evidence" in one]


async def test_ban_from_before_the_outage_applies(harness: Harness, request: pytest.FixtureRequest) -> None:
    banned, _ = harness.proven
    await harness.create_gated_pod("late", banned)
    began = time.monotonic()
    await harness.prove(banned, banned=True)
    await wait_until(harness.ends, lambda data: data[banned].startswith("1970"))
    report_figures(request, seconds_from_ban_to_list=time.monotonic() - began)
    await harness.site.stop()
    await harness.open_gate("late")
    await harness.wait_until_refused("late", f"the evidence of node {banned} ended")


async def test_node_with_another_hash_than_required_is_refused(harness: Harness) -> None:
    changed, _ = harness.proven
    uid = (await harness.create_gated_pod("late", changed))["metadata"]["uid"]
    await harness.prove(changed, hash="sha256:0ther")
    await wait_until(harness.ends, lambda data: data[uid].startswith("1970"))
    await harness.site.stop()
    await harness.open_gate("late")
    await harness.wait_until_refused("late", "the pod may no longer be bound without a review")


async def test_denied_binding_stays_denied_while_replicas_are_overloaded(harness: Harness) -> None:
    """A replica that answers too late is treated like one that is down; a denial stays a denial."""
    ending, lasting = harness.proven
    await harness.create_gated_pod("late", ending)
    await harness.create_gated_pod("lasting", lasting)
    await harness.prove(ending, timedelta(seconds=1))
    await wait_until(harness.ends, lambda data: data[ending] <= stamp(utc_now()))
    with frozen_process(harness.site.replicas[0]):
        for name in ("late", "lasting"):
            await harness.open_gate(name)
        assert await harness.wait_until_bound("lasting") == lasting
        await harness.wait_until_refused("late", f"the evidence of node {ending} ended")


async def test_only_schedulers_bind_during_an_outage(harness: Harness) -> None:
    """Any user who may bind could place a pod with GPUs on any node, so for others a review is required."""
    node, _ = harness.proven
    await harness.create_gated_pod("claim", node)
    await harness.kube.create(PODS, pod("plain", schedulerName="nobody"), harness.namespace)
    await harness.site.stop()
    await harness.open_gate("claim")
    await harness.wait_until_bound("claim")
    target: Raw = {"apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": node}}
    for path in (PODS.path(harness.namespace, "plain", "binding"), f"/api/v1/namespaces/{harness.namespace}/bindings"):
        for finalizers in ([], [f"gpuwarden.io/reviewed-for-{node}"]):
            content = {**target, "metadata": {"name": "plain", "finalizers": finalizers}}
            with pytest.raises(ApiError, match="failed calling webhook"):
                await harness.kube.call("POST", path, content)
    assert await harness.node_of("plain") is None


async def test_pod_is_not_bound_after_its_bind_deadline(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """Its GPUs may have been assigned to another pod when gpuwarden went down."""
    async with running_harness(
        cluster, kube, tmp_path, "--bind-deadline", "5s", "--on-bind-deadline", "keep"
    ) as harness:
        await harness.create_gated_pod("late", harness.proven[0])
        await harness.site.stop()
        await asyncio.sleep(6)
        await harness.open_gate("late")
        await harness.wait_until_refused("late", "the pod may no longer be bound without a review")


async def test_pod_bound_on_outdated_evidence_is_evicted_after_the_outage(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The remaining window: a ban during the outage cannot reach the API server."""
    async with running_harness(cluster, kube, tmp_path, "--on-evidence-lost", "evict") as harness:
        banned, _ = harness.proven
        await harness.create_gated_pod("meanwhile", banned)
        await harness.site.stop()
        await harness.prove(banned, banned=True)
        await harness.open_gate("meanwhile")
        assert await harness.wait_until_bound("meanwhile") == banned
        await harness.site.reconciler()
        leading = time.monotonic()
        await gone(kube, PODS, "meanwhile", harness.namespace)
        report_figures(request, seconds_from_leading_to_gone=time.monotonic() - leading)
        assert any("banned" in one for one in await harness.scheduling_message("meanwhile"))


async def test_too_many_pods_close_only_their_own_namespace(cluster: Cluster, kube: Kube, tmp_path: Path) -> None:
    """More pods with a claim than the list has room for: first in a namespace without opt-in, then in one with."""
    program = (sys.executable, "-c", WITH_A_SMALL_LIST)
    async with (
        new_namespace(kube) as crowded_namespace,
        running_harness(cluster, kube, tmp_path, program=program) as harness,
    ):
        banned, lasting = harness.proven
        await harness.create_gated_pod("late", banned)
        await harness.create_gated_pod("lasting", lasting)
        for number in range(MANY_PODS):
            await kube.create(PODS, asking(f"crowd-{number}"), crowded_namespace)
        await harness.prove(banned, banned=True)
        await wait_until(harness.ends, lambda data: data.get(banned, "").startswith("1970"))
        assert crowded_namespace not in await harness.ends()
        await kube.patch(NAMESPACES, crowded_namespace, {"metadata": {"labels": OPT_IN}})
        await wait_until(harness.ends, lambda data: data.get(crowded_namespace, "").startswith("1970"))
        await harness.site.stop()
        await kube.create(PODS, pod("plain"), harness.namespace)
        await harness.wait_until_bound("plain")
        for name in ("late", "lasting"):
            await harness.open_gate(name)
        assert await harness.wait_until_bound("lasting") == lasting
        await harness.wait_until_refused("late", f"the evidence of node {banned} ended")
        await kube.create(PODS, pod("plain"), crowded_namespace)
        await evolve(harness, site=evolve(harness.site, namespace=crowded_namespace)).wait_until_refused(
            "plain", f"more pods with a claim wait in namespace {crowded_namespace}"
        )


async def test_too_many_pods_are_not_bound_with_a_crd_without_closed_namespaces(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """The API server drops unknown fields and answers 200."""
    program = (sys.executable, "-c", WITH_A_SMALL_LIST)
    async with (
        new_namespace(kube) as crowded_namespace,
        running_harness(cluster, kube, tmp_path, program=program) as harness,
    ):
        for number in range(MANY_PODS):
            await kube.create(PODS, asking(f"crowd-{number}"), crowded_namespace)
        one = await kube.get(PODS, "crowd-0", crowded_namespace)
        async with without_closed_namespaces(kube), Kube(cluster.as_user("system:kube-scheduler")) as scheduler:
            await kube.patch(NAMESPACES, crowded_namespace, {"metadata": {"labels": OPT_IN}})
            await wait_until(lambda: kube.get(BINDING_ENDS, NAME), lambda found: "kept" not in found["spec"])
            await harness.site.stop()
            assert await is_refused(scheduler, one, "has not written yet when evidence ends")


@asynccontextmanager
async def without_closed_namespaces(kube: Kube) -> AsyncIterator[None]:
    name = "bindingends.gpuwarden.io"
    place = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/namespaces"
    versions = (await kube.get(CRDS, name))["spec"]["versions"]
    known = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["namespaces"]
    probe = {
        "apiVersion": "gpuwarden.io/v1alpha1",
        "kind": "BindingEnds",
        "metadata": {"name": "probe"},
        "spec": {"namespaces": {"probe": "1970-01-01T00:00:00Z"}},
    }

    async def is_stored() -> bool:
        return "namespaces" in (await kube.create(BINDING_ENDS, probe, dryRun="All"))["spec"]

    await kube.patch(CRDS, name, [{"op": "remove", "path": place}])
    try:
        await wait_until(is_stored, lambda stored: not stored)
        yield
    finally:
        await kube.patch(CRDS, name, [{"op": "add", "path": place, "value": known}])
        await wait_until(is_stored)


def asking(name: str) -> Raw:
    """In a namespace without opt-in no webhook reviews it."""
    return pod(name, annotations=ASKING, schedulerName="nobody")


async def test_nothing_is_bound_without_review_before_binding_ends_are_written(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    """The object exists, as each replica creates it: reviewed bindings work."""
    async with site(cluster, kube, tmp_path, nodes=1, gpus=1, name="down", replicas=1) as here:
        await kube.create(PODS, pod("reviewed"), here.namespace)
        await pod_in_phase(kube, here.namespace, "reviewed", "Running")
        left = await kube.create(PODS, pod("left", schedulerName="nobody"), here.namespace)
        await here.stop()
        words = "has not written yet when evidence ends"
        async with Kube(cluster.as_user("system:kube-scheduler")) as scheduler:
            await wait_until(lambda: is_refused(scheduler, left, words))
        await kube.create(PODS, pod("plain"), here.namespace)
        await Harness(here, kube, ("", "")).wait_until_refused("plain", words)
        await kube.delete(BINDING_ENDS, NAME)


async def test_binding_is_fast_with_binding_ends_of_five_thousand_nodes(
    harness: Harness, cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    """With a replica that has reviewed it, and with none."""
    left = await harness.kube.create(PODS, pod("left", schedulerName="nobody"), harness.namespace)
    reconciler = harness.site.reconcilers[0]
    await reconciler.kill()
    seen = {}
    async with Kube(cluster.as_user("system:kube-scheduler")) as scheduler:
        for entries in (2, 5_000):
            await harness.kube.patch(BINDING_ENDS, NAME, {"spec": {"nodes": write_long_list(entries)}})
            seen[f"ms_reviewed_{entries}"] = await binding_time(scheduler, left)
        await harness.site.stop()
        for entries in (2, 5_000):
            await harness.kube.patch(BINDING_ENDS, NAME, {"spec": {"nodes": write_long_list(entries)}})
            seen[f"ms_unreviewed_{entries}"] = await binding_time(scheduler, left)
    report_figures(request, **seen)
    assert max(seen.values()) < 1000


def write_long_list(entries: int) -> dict[str, str]:
    return {f"ip-10-0-{n // 256}-{n % 256}.example.internal": "2100-01-01T00:00:00Z" for n in range(entries)}


async def binding_time(scheduler: Kube, one: Raw, times: int = 100) -> float:
    """The median in milliseconds; all are dry runs."""
    took = []
    for _ in range(times):
        began = time.monotonic()
        assert not await is_refused(scheduler, one, "")
        took.append(time.monotonic() - began)
    return percentile(took, 0.5) * 1000


async def is_refused(scheduler: Kube, one: Raw, words: str) -> bool:
    """A policy starts to act about a second after it is written."""
    meta = {key: one["metadata"][key] for key in ("name", "namespace", "uid")}
    content = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": {"kind": "Node", "name": "node-0"}}
    try:
        await scheduler.call("POST", PODS.path(meta["namespace"], meta["name"], "binding"), content, {"dryRun": "All"})
    except ApiError as exc:
        return words in exc.message
    return False
