"""Hints on a real API server: a pod with hints runs with the class's priority, and no scorer can prevent the creation
of a pod."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.controlplane.cluster import ROOT, Cluster
from tests.e2e.conftest import new_namespace
from tests.e2e.kube import JOBS, NODES, PODS, ApiError, Kube, Raw, Resource, gone, pod, pod_in_phase, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.processes import Site, site
from tests.running import GPUWARDEN, START_TIMEOUT
from tests.scoring.doubles import GOOD, HTML, FakeScorer, good, scoring

PRIORITY_CLASSES = Resource("apis/scheduling.k8s.io/v1", "priorityclasses", is_namespaced=False)
EXAMPLES = ROOT / "examples/scoring"
CLASS, MODEL = "gpu.nvidia.com/class", "A100-80GB"
SAYS = {"app.kubernetes.io/job-type": "train-bert", "gpu.mem.gi": "40", "scheduler.radix.ai/tenant": "team-a"}


def example(name: str) -> Raw:
    found: Raw = yaml.safe_load((EXAMPLES / name).read_text())
    return found


@asynccontextmanager
async def classes(kube: Kube) -> AsyncIterator[None]:
    found = list(yaml.safe_load_all((EXAMPLES / "priority-classes.yaml").read_text()))
    for one in found:
        await kube.create(PRIORITY_CLASSES, one)
    try:
        yield
    finally:
        for one in found:
            await kube.delete(PRIORITY_CLASSES, one["metadata"]["name"])


@asynccontextmanager
async def scored_site(cluster: Cluster, kube: Kube, directory: Path) -> AsyncIterator[Site]:
    """Two nodes with GPU annotations and no running server yet."""
    async with site(cluster, kube, directory, nodes=2, gpus=2, name="score") as here:
        for node in here.nodes:
            await kube.patch(NODES, node, {"metadata": {"labels": {CLASS: MODEL}}})
        yield here


async def serve(here: Site, url: str, timeout: str = "2s") -> None:
    here.flags = ("--scorer", url, "--scorer-timeout", timeout)
    await here.replica()
    await here.wait_until_reviewed()
    await here.reconciler()
    await here.wait_until_offered()


@asynccontextmanager
async def own_scorer(cluster: Cluster, directory: Path) -> AsyncIterator[str]:
    flags = ["--kubeconfig", str(cluster.kubeconfig), "--ui-port", "0", "--tenant-priorities", '{"team-a": 85}']
    process = await asyncio.create_subprocess_exec(
        GPUWARDEN, "score", *flags, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT)).decode()
        assert line.startswith("ready http="), line
        yield line.removeprefix("ready http=").strip()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def is_hinted(found: Raw) -> bool:
    notes, spec = found["metadata"]["annotations"], found["spec"]
    assert abs(int(notes["scheduler.radix.ai/decision-timestamp"]) - time.time()) < 60
    assert notes["scheduler.radix.ai/priority-score"] == notes["gpuwarden.io/priority-score"] == "85"
    assert notes["scheduler.radix.ai/chosen-gpu"] == MODEL
    assert (spec["priorityClassName"], spec["priority"]) == ("gpu-high", 750)
    assert spec["nodeSelector"] == {CLASS: MODEL}
    assert found["metadata"]["labels"]["app.kubernetes.io/job-type"] == "train-bert"
    return True


@pytest.mark.defect("scoring-2")
@pytest.mark.defect("scoring-3")
@pytest.mark.defect("scoring-9")
@pytest.mark.defect("X-2")
async def test_documented_pod_and_job_run_with_hints_of_the_own_scorer(
    cluster: Cluster, kube: Kube, tmp_path: Path
) -> None:
    async with classes(kube), scored_site(cluster, kube, tmp_path) as here, own_scorer(cluster, tmp_path) as url:
        await serve(here, url)
        await kube.create(PODS, example("pod.yaml"), here.namespace)
        assert is_hinted(await pod_in_phase(kube, here.namespace, "bert", "Running"))
        # Later changes are not scored again: a label is added, and the pod is deleted.
        touched = await kube.patch(PODS, "bert", {"metadata": {"labels": {"touched": "yes"}}}, here.namespace)
        assert touched["metadata"]["labels"]["touched"] == "yes"
        await kube.delete(PODS, "bert", here.namespace)
        await gone(kube, PODS, "bert", here.namespace)

        made = await kube.create(JOBS, example("job.yaml"), here.namespace)
        assert made["spec"]["template"]["metadata"]["annotations"] == made["metadata"]["annotations"]
        pods = await wait_until(lambda: kube.list(PODS, here.namespace), lambda found: len(found) == 2)
        assert all(is_hinted(one) for one in pods)
        await wait_until(
            lambda: kube.get(JOBS, "bert", here.namespace), lambda one: one["status"].get("succeeded") == 2
        )
        await kube.delete(JOBS, "bert", here.namespace)
        await gone(kube, JOBS, "bert", here.namespace)
        await wait_until(lambda: kube.list(PODS, here.namespace), lambda found: not found)

        async with new_namespace(kube, {"scheduler.radix.ai/enabled": "true"}) as older:
            assert is_hinted(await kube.create(PODS, example("pod.yaml"), older, dryRun="All"))
            made = await kube.create(JOBS, example("job.yaml"), older, dryRun="All")
            assert made["spec"]["template"]["metadata"]["annotations"] == made["metadata"]["annotations"]


# Scorers with any behaviour.


async def created(here: Site, content: Raw, *, dry_run: bool = True) -> tuple[Raw, str]:
    """The created pod and the warnings that its creator got."""
    path = PODS.path(here.namespace)
    query = {"dryRun": "All"} if dry_run else {}
    got = await here.kube.http.post(path, json=content, params=query)
    if got.is_error:
        raise ApiError(got.status_code, json.loads(got.content))
    return json.loads(got.content), "; ".join(got.headers.get_list("warning"))


def asking(job_type: str, **members: Any) -> Raw:
    return pod(None, gpus=1, annotations={**SAYS, "app.kubernetes.io/job-type": job_type}, **members)


OWN = {"key": "a/b", "operator": "Exists", "effect": "NoSchedule"}
SHAPES: dict[str, Raw] = {
    "bare": {},
    "selector": {"nodeSelector": {CLASS: MODEL}},
    "tolerations": {"tolerations": [OWN]},
    "affinity": {"affinity": {"podAntiAffinity": {}, "nodeAffinity": {}}},
    "class": {"priorityClassName": "system-node-critical"},
}
BAD_NOW: dict[str, Raw] = {
    "garbage": {"body": b"\x00\xff{"},
    "nan": {"body": b'{"priority_score": NaN}'},
    "html": {"body": HTML},
    "wrong-types": {"body": good(priority_score="85")},
    "hangs-up": {"hangs_up": True},
    "slow": {"delay": 30.0},
}


@pytest.mark.defect("scoring-7")
@pytest.mark.defect("scoring-14")
@pytest.mark.defect("scoring-15")
@pytest.mark.defect("X-1")
@pytest.mark.defect("X-2")
async def test_pods_are_created_whatever_a_scorer_answers(
    cluster: Cluster, kube: Kube, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async with scored_site(cluster, kube, tmp_path) as here:
        async with scoring() as double:
            await serve(here, double.url, timeout="30s")
            await a_class_is_named_only_where_there_is_one(here)
            await pods_of_every_shape_are_created(here, double)
            await nothing_is_listed_for_a_review(here, double)
            for name, members in BAD_NOW.items():
                await created(here, asking(f"before-{name}"))  # a good answer: the scorer is not skipped yet
                with behaving(double, members):
                    started = time.monotonic()
                    made, said = await created(here, asking(name))
                    took = time.monotonic() - started
                    assert took < 10, name  # the API server's timeout
                    assert "the pod is admitted without hints" in said, name
                    assert double.asked[-1]["job_type"] == name
                    assert "gpuwarden.io/gpu-uuid" in made["metadata"]["annotations"], name
                    assert made["spec"]["priority"] == 0
                    await the_documented_job_runs_without_hints(here, f"job-{name}")
            report_figures(request, slow_s=took)
            await running_pods_are_sent_to_the_scorer(here, double)
        _, said = await created(here, asking("dead"))
        assert "the scorer cannot be reached: the pod is admitted without hints" in said
        await the_documented_job_runs_without_hints(here, "job-dead")
        await kube.create(PODS, example("pod.yaml"), here.namespace)
        assert not traces(await pod_in_phase(kube, here.namespace, "bert", "Running"))


def traces(made: Raw) -> list[str]:
    """The traces of a scorer in a pod."""
    notes, spec = made["metadata"]["annotations"], made["spec"]
    written = [key for key in notes if key.partition("/")[2] in ("priority-score", "chosen-gpu", "decision-timestamp")]
    return [*written, *(key for key in ("nodeSelector", "priorityClassName") if key in spec)]


async def the_documented_job_runs_without_hints(here: Site, name: str) -> None:
    content = example("job.yaml")
    content["metadata"]["name"] = content["metadata"]["annotations"]["app.kubernetes.io/job-type"] = name
    await here.kube.create(JOBS, content, here.namespace)
    of_job = {"labelSelector": f"job-name={name}"}
    pods = await wait_until(lambda: here.kube.list(PODS, here.namespace, **of_job), lambda found: len(found) == 2)
    assert [traces(one) for one in pods] == [[], []], name
    assert all(one["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] in here.gpus for one in pods)
    await wait_until(lambda: here.kube.get(JOBS, name, here.namespace), lambda one: one["status"].get("succeeded") == 2)
    await here.kube.delete(JOBS, name, here.namespace)
    await gone(here.kube, JOBS, name, here.namespace)
    await wait_until(lambda: here.kube.list(PODS, here.namespace, **of_job), lambda found: not found)


REVIEWS = 30


async def nothing_is_listed_for_a_review(here: Site, double: FakeScorer) -> None:
    """Other clients list now and then, too."""
    before, asked = await list_requests(here.kube), len(double.asked)
    await asyncio.gather(*(created(here, asking(f"listed-{number}")) for number in range(REVIEWS)))
    assert len(double.asked) - asked == REVIEWS
    assert await list_requests(here.kube) - before < REVIEWS


async def list_requests(kube: Kube) -> float:
    """The number of list requests for the kinds that hints are made of."""
    text = (await kube.http.get("/metrics")).raise_for_status().text
    counted = re.findall(r"^apiserver_request_total{([^}]*)} (\S+)$", text, re.MULTILINE)
    of = ("nodes", "pods", "priorityclasses", "gpunodes")
    found = [
        float(count)
        for labels, count in counted
        if 'verb="LIST"' in labels and any(f'resource="{name}"' in labels for name in of)
    ]
    assert found
    return sum(found)


async def running_pods_are_sent_to_the_scorer(here: Site, double: FakeScorer) -> None:
    """Reported by watch: the one pod that was really created and still exists."""
    await created(here, asking("stays"), dry_run=False)
    number = 0

    async def colocated_job_types() -> list[str]:
        nonlocal number
        number += 1
        await created(here, asking(f"neighbour-{number}"))
        return list(double.asked[-1]["colocated_job_types"])

    await wait_until(colocated_job_types, lambda found: found == ["stays"])


async def a_class_is_named_only_where_there_is_one(here: Site) -> None:
    made, said = await created(here, asking("early"))
    assert (made["spec"]["priority"], "PriorityClass gpu-high does not exist" in said) == (0, True)
    async with classes(here.kube):
        number = 0

        async def priority() -> int:
            nonlocal number
            number += 1
            return int((await created(here, asking(f"later-{number}")))[0]["spec"]["priority"])

        await wait_until(priority, lambda found: found == 750)
        # The API server sets a default class before it calls webhooks: gpuwarden replaces its number, too.
        usual = {"metadata": {"name": "score-usual"}, "value": 5, "globalDefault": True}
        await here.kube.create(PRIORITY_CLASSES, usual)
        try:
            await wait_until(lambda: usual_priority(here), lambda found: found == 5)
            await wait_until(priority, lambda found: found == 750)
        finally:
            await here.kube.delete(PRIORITY_CLASSES, "score-usual")
        await wait_until(lambda: usual_priority(here), lambda found: found == 0)


async def usual_priority(here: Site) -> int | None:
    """The priority of a pod without a score. While a default class is created or deleted, the API server is
    inconsistent for a moment and refuses pods."""
    try:
        return int((await created(here, pod(None, gpus=1)))[0]["spec"]["priority"])
    except ApiError:
        return None


async def pods_of_every_shape_are_created(here: Site, double: FakeScorer) -> None:
    """With and without each member that a patch extends."""
    double.body = good(gpu_selector={**GOOD["gpu_selector"], "tolerations": [*GOOD["gpu_selector"]["tolerations"], {}]})
    for name, spec in SHAPES.items():
        made, _ = await created(here, asking(name, **spec))
        assert made["spec"]["nodeSelector"] == {CLASS: MODEL}, name
        keys = [one.get("key") for one in made["spec"]["tolerations"]]
        assert keys.count("nvidia.com/gpu") == 1, name
        assert made["metadata"]["annotations"]["scheduler.radix.ai/chosen-gpu"] == MODEL
    others = pod(None, annotations=SAYS)
    others["spec"]["containers"][0]["resources"] = {"limits": {"example.test/gpu": "1"}}
    made, _ = await created(here, others)
    assert made["spec"]["nodeSelector"] == {CLASS: MODEL}
    assert "gpuwarden.io/gpu-uuid" not in made["metadata"]["annotations"]
    double.body = good()


@contextmanager
def behaving(double: FakeScorer, members: Raw) -> Iterator[None]:
    before = {name: getattr(double, name) for name in members}
    for name, value in members.items():
        setattr(double, name, value)
    yield
    for name, value in before.items():
        setattr(double, name, value)
