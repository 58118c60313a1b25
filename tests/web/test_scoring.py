"""Hints at the doors: a scorer that answers helps a pod, and one that does not keeps nothing from it."""

import asyncio
import ssl
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme
from attrs import evolve

from tests import builders
from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.running import serving
from tests.scoring.doubles import BAD, GOOD, FakeScorer, good, scoring
from tests.web.house import House, patched
from tests.web.test_admission import pinned_nodes, refusal
from webhook.admission.parts import Parts
from webhook.assembly.parts import embedded
from webhook.runtime.clock import Clock
from webhook.runtime.settings import Settings
from webhook.scoring.candidates import WatchedPriorityClasses

CLASS = "gpu.nvidia.com/class"


def node(name: str, model: str, gpus: int, evidence: str = HASH, **members: Any) -> Raw:
    devices = [{"uuid": f"GPU-{name}-{k}"} for k in range(gpus)]
    return {"name": name, "labels": {CLASS: model}, "evidence": {"hash": evidence}, "devices": devices, **members}


FLEET: Raw = {"nodes": [node("big", "A100-80GB", 2), node("small", "L4-24GB", 4, OTHER_HASH)]}
BARE: Raw = {"nodes": [{"name": "bare", "devices": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}]}]}


def job(job_type: str = "train-bert", gpus: int | None = 1, **members: Any) -> Raw:
    annotations = {"app.kubernetes.io/job-type": job_type, **members.pop("annotations", {})}
    container = members.pop("container", raw_container(gpus=gpus))
    return raw_pod(container, annotations=annotations, priority=0, preemptionPolicy="PreemptLowerPriority", **members)


@asynccontextmanager
async def scored(build: Build, inventory: Raw = FLEET, **members: Any) -> AsyncIterator[tuple[House, FakeScorer]]:
    settings = {
        name: members.pop(name)
        for name in (
            "hint_pods",
            "write_aliases",
            "assemble",
            "when_unavailable",
            "priority_buckets",
            "scorer_timeout",
        )
        if name in members
    }
    async with scoring(**members) as double:
        house = await build(inventory, scorer=double.url, **settings)
        yield house, double
        await house.close()


def warnings(response: Raw) -> str:
    assert response["allowed"], response
    return "; ".join(response.get("warnings", ()))


def notes(raw: Raw) -> Mapping[str, str]:
    found: Mapping[str, str] = raw["metadata"]["annotations"]
    return found


# A scorer that answers.


async def test_a_pod_with_a_claim_is_reserved_where_the_hint_is_and_passes_the_last_door(build: Build) -> None:
    async with scored(build) as (house, double):
        final = await house.create(job())
        assert pinned_nodes(final) == ["big"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert not {"priority", "preemptionPolicy"} & final["spec"].keys()
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert final["spec"]["tolerations"] == GOOD["gpu_selector"]["tolerations"]
        assert final["metadata"]["labels"] == {"app.kubernetes.io/job-type": "train-bert"}
        assert notes(final)["scheduler.radix.ai/priority-score"] == "85"
        assert notes(final)["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        assert notes(final)["gpuwarden.io/gpu-uuid"] == house.held[0]
    assert double.asked[0]["candidate_gpu_types"] == ["A100-80GB", "L4-24GB"]
    assert double.asked[0]["features"]["gpu_mem_gb"] == 40.0


@pytest.mark.defect("S3-9")
async def test_the_time_of_the_decision_is_the_clocks(build: Build) -> None:
    async with scored(build) as (house, _):
        final = await house.dress(job())
        assert abs(int(notes(final)["scheduler.radix.ai/decision-timestamp"]) - house.now.timestamp()) < 5


async def test_older_names_are_written_where_that_is_set(build: Build) -> None:
    async with scored(build, write_aliases=False) as (house, _):
        assert not [key for key in notes(await house.dress(job())) if key.startswith("scheduler.radix.ai/")]


@pytest.mark.defect("S3-12")
async def test_buckets_of_ones_own_are_gone_by(build: Build) -> None:
    buckets = ({"minScore": 85, "priorityClassName": "urgent"}, {"minScore": 0, "priorityClassName": "later"})
    async with scored(build, priority_buckets=buckets) as (house, double):
        assert (await house.dress(job("one"), "one"))["spec"]["priorityClassName"] == "urgent"
        double.body = good(priority_score=84.9)
        assert (await house.dress(job("two"), "two"))["spec"]["priorityClassName"] == "later"


@pytest.mark.defect("S3-6")
async def test_where_only_the_product_is_known_the_product_is_selected(build: Build) -> None:
    product = "nvidia.com/gpu.product"
    inventory = {"nodes": [{**node("big", "unread", 2), "labels": {product: "A100-80GB"}}]}
    async with scored(build, inventory) as (house, double):
        final = await house.create(job())
        assert final["spec"]["nodeSelector"] == {product: "A100-80GB"}
        assert notes(final)["scheduler.radix.ai/chosen-gpu"] == "A100-80GB"
    assert double.asked[0]["candidate_gpu_types"] == ["A100-80GB"]


@pytest.mark.defect("S3-11")
@pytest.mark.parametrize("text", ["nan", "-1", "40Gi", "1e400"])
async def test_a_feature_that_is_no_number_is_left_out_and_its_author_is_told(build: Build, text: str) -> None:
    said = {"gpu.mem.gi": text, "ml.batch_size": text}
    # As nobody asks for a GPU by name, there is nothing to be taken for the usual.
    raw = job(gpus=None, annotations={**said, "gpuwarden.io/gpu-count": "1"})
    async with scored(build) as (house, double):
        response = await house.mutate(raw)
        assert len(house.held) == 1
    assert double.asked[0]["features"] == {"job_type": "train-bert", "tenant": "default"}
    assert "annotation gpu.mem.gi: " in warnings(response)
    assert "annotation ml.batch_size: " in warnings(response)


async def test_the_hint_ranks_only_while_something_fits_there(build: Build) -> None:
    async with scored(build) as (house, _):
        for number in range(2):
            assert pinned_nodes(await house.dress(job(), f"first-{number}")) == ["big"]
        response = await house.mutate(job(), "third")
        final = patched(job(), response)
        assert pinned_nodes(final) == ["small"]
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert "no node with gpu.nvidia.com/class=A100-80GB can serve the pod" in warnings(response)


async def test_evidence_is_harder_than_any_hint(build: Build) -> None:
    asked = {"gpuwarden.io/required-hash": OTHER_HASH}
    async with scored(build) as (house, _):
        assert pinned_nodes(await house.create(job(annotations=asked))) == ["small"]


async def test_nobody_is_asked_about_a_pod_that_no_proven_node_can_have(build: Build) -> None:
    async with scored(build) as (house, double):
        refused = await house.mutate(job(annotations={"gpuwarden.io/required-hash": "sha256:none"}))
        assert refusal(refused) == (403, "NoProvenNode")
    assert double.asked == []


@pytest.mark.parametrize(
    ("text", "reason"), [("0=big:0", "NotInMap"), ("1=nowhere:0", "NoSuitableNode")], ids=["no-line", "no-such-node"]
)
async def test_nobody_is_asked_about_a_pod_whose_map_leads_nowhere(build: Build, text: str, reason: str) -> None:
    async with scored(build) as (house, double):
        refused = await house.mutate(mapped("bert-1", text))
        assert refusal(refused) == (403, reason)
    assert double.asked == []


async def test_a_map_is_harder_than_any_hint(build: Build) -> None:
    async with scored(build) as (house, double):
        raw = mapped("bert-1", "1=small:GPU-small-2")
        response = await house.mutate(raw)
        final = patched(raw, response)
        assert (pinned_nodes(final), house.held) == (["small"], ["GPU-small-2"])
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert "the hint is ignored" in warnings(response)
    assert len(double.asked) == 1


def mapped(name: str, text: str) -> Raw:
    owners = [builders.stateful_set("bert")]
    return job(gpus=None, annotations={"gpuwarden.io/gpu-map": text}, name=name, owners=owners)


async def test_a_toleration_that_a_hint_adds_opens_the_node_it_is_for(build: Build) -> None:
    tainted = node("big", "A100-80GB", 2, taints=[{"key": "nvidia.com/gpu"}])
    async with scored(build, {"nodes": [tainted]}) as (house, _):
        assert pinned_nodes(await house.create(job())) == ["big"]


async def test_a_pod_that_waits_is_hinted_and_does_not_wait_for_the_hint(build: Build) -> None:
    full = {"nodes": [node("big", "A100-80GB", 0)]}
    async with scored(build, full, when_unavailable="queue") as (house, _):
        final = await house.dress(job())
        assert final["spec"]["schedulingGates"] == [{"name": "gpuwarden.io/queue"}]
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert notes(final)["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        last = await house.validate(builders.validating_create(final))
        assert last["allowed"], last


async def test_another_round_of_the_same_creation_asks_nobody_and_changes_nothing(build: Build) -> None:
    other = raw_container(resources={"requests": {"amd.com/gpu": "1"}, "limits": {"amd.com/gpu": "1"}})
    async with scored(build) as (house, double):
        for raw in (job(), job(container=other)):
            once = await house.dress(raw, "first")
            assert "scheduler.radix.ai/priority-score" in notes(once)
            double.asked.clear()
            assert await house.dress(once, "again") == once
            assert double.asked == []


async def test_a_dry_run_shows_the_hints_and_holds_nothing(build: Build) -> None:
    async with scored(build) as (house, _):
        final = patched(job(), await house.mutate(job(), dry_run=True))
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert house.held == []


async def test_what_runs_is_told(build: Build) -> None:
    async with scored(build) as (house, double):
        await house.create(job("train-llama"))
        await house.dress(job("infer"), "second")
        assert double.asked[-1]["colocated_job_types"] == ["train-llama"]


@pytest.mark.defect("S3-5")
async def test_pods_that_avoid_each_other_can_see_each_other(build: Build) -> None:
    async with scored(build, body=good(avoid_co_locate_with=["infer"])) as (house, _):
        one, other = await house.dress(job("train"), "one"), await house.dress(job("infer"), "other")
        (term,) = one["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        (wanted,) = term["podAffinityTerm"]["labelSelector"]["matchExpressions"]
        assert other["metadata"]["labels"][wanted["key"]] in wanted["values"]


async def test_a_pod_with_gpus_of_others_is_hinted_and_not_reserved(build: Build) -> None:
    other = raw_container(resources={"requests": {"amd.com/gpu": "1"}})
    async with scored(build) as (house, _):
        final = await house.dress(job(container=other))
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert house.held == []
        last = await house.validate(builders.validating_create(final))
        assert last["allowed"]


NOWHERE: dict[str, tuple[Raw, Raw]] = {
    "no-node-has-it": ({"pool": "made-up"}, {}),
    "not-where-the-pod-may-be": (
        {CLASS: "A100-80GB"},
        {"affinity": builders.required_affinity(builders.term(builders.expression(CLASS, "In", "L4-24GB")))},
    ),
}


@pytest.mark.parametrize(("selected", "own"), NOWHERE.values(), ids=NOWHERE)
async def test_a_pod_that_no_place_is_looked_for_is_not_sent_where_it_cannot_be(
    build: Build, selected: Raw, own: Raw
) -> None:
    raw = job(container=raw_container(resources={"requests": {"amd.com/gpu": "1"}}), **own)
    async with scored(build, body=good(gpu_selector={"nodeSelector": selected})) as (house, _):
        response = await house.mutate(raw)
    final = patched(raw, response)
    assert "nodeSelector" not in final["spec"]
    assert final["spec"]["priorityClassName"] == "gpu-high"
    assert "the hint is ignored" in warnings(response)


@pytest.mark.defect("S3-17")
async def test_a_pod_without_gpus_is_not_touched(build: Build) -> None:
    async with scored(build) as (house, double):
        for raw in (job(gpus=None), raw_pod()):
            made = patched(raw, await house.mutate(raw))
            assert made["metadata"] == raw["metadata"]
            assert made["spec"].keys() == raw["spec"].keys()
        assert double.asked == []


@pytest.mark.defect("S3-2")
async def test_a_pod_that_exists_is_never_patched(build: Build) -> None:
    async with scored(build) as (house, double):
        final = await house.create(job())
        double.asked.clear()
        touched = {**final, "metadata": {**final["metadata"], "labels": {"touched": "yes"}}}
        for path in ("/mutate", "/validate"):
            response = await house.ask(path, builders.update(touched, final))
            assert (response["allowed"], "patch" in response) == (True, False)
        assert double.asked == []


@pytest.mark.defect("S3-14")
async def test_a_class_that_does_not_exist_is_left_out_and_said(build: Build) -> None:
    def in_a_cluster(settings: Settings, clock: Clock) -> Parts:
        parts = embedded(settings, clock)
        assert parts.hinting is not None
        return evolve(parts, hinting=evolve(parts.hinting, classes=WatchedPriorityClasses()))

    async with scored(build, assemble=in_a_cluster) as (house, _):
        response = await house.mutate(job())
        final = patched(job(), response)
        assert ("priorityClassName" in final["spec"], final["spec"]["priority"]) == (False, 0)
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert "PriorityClass gpu-high does not exist" in warnings(response)


# A scorer that does not.


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_a_bad_answer_costs_the_pod_nothing_but_hints(build: Build, body: bytes) -> None:
    async with scored(build, body=body) as (house, _):
        response = await house.mutate(job())
        assert "is malformed: the pod is admitted without hints" in warnings(response) or "too long" in warnings(
            response
        )
        final = patched(job(), response)
        assert len(house.held) == 1
        assert "priorityClassName" not in final["spec"]
        assert "gpuwarden.io/priority-score" not in notes(final)
        text = house.parts.metrics.render()[0].decode()
        assert 'gpuwarden_scoring_total{outcome="malformed"} 1.0' in text


@pytest.mark.defect("S3-8")
async def test_where_no_node_names_its_gpus_nobody_is_asked_and_nothing_made_up(build: Build) -> None:
    async with scored(build, BARE) as (house, double):
        response = await house.mutate(job())
        assert "with its GPU type, so the scorer was not asked" in warnings(response)
        assert "nodeSelector" not in patched(job(), response)["spec"]
        text = house.parts.metrics.render()[0].decode()
        assert 'gpuwarden_scoring_total{outcome="no-candidates"} 1.0' in text
    assert double.asked == []


async def test_a_dead_scorer_is_said_in_the_words_people_search_for(build: Build) -> None:
    async with scored(build) as (house, double):
        with structlog.testing.capture_logs() as lines:
            await house.create(job(), "answered")
            double.hangs_up = True
            response = await house.mutate(job("other"), "unanswered")
        assert "cannot be reached: the pod is admitted without hints" in warnings(response)
        events = [line["event"] for line in lines]
        assert "Mutated pod" in events
        assert "Scheduler unavailable" in events
        assert (await house.tls.get("/readyz")).status_code == 200


async def test_only_a_pod_that_is_answered_with_hints_is_said_to_have_them(build: Build) -> None:
    async with scored(build) as (house, double):
        with structlog.testing.capture_logs() as lines:
            refused = await house.mutate(job(gpus=9, name="refused"), "refused")
            assert not refused["allowed"]
            await house.dress(job(name="dressed"), "dressed")
        assert double.asked
        told = [(line["uid"], line["name"], line["job_type"]) for line in lines if line["event"] == "Mutated pod"]
        assert told == [("dressed", "dressed", "train-bert")]


async def test_an_https_scorer_is_known_by_the_cas_of_the_setting(build: Build, tmp_path: Path) -> None:
    ca, roots = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(roots)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with scoring(tls) as double:
        house = await build(FLEET, scorer=double.url, scorer_ca=roots)
        assert notes(await house.dress(job()))["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        await house.close()


async def test_hints_can_be_switched_off(build: Build) -> None:
    async with scored(build, hint_pods=False) as (house, double):
        final = await house.create(job())
        assert "priorityClassName" not in final["spec"]
        assert double.asked == []


@pytest.mark.defect("S3-15")
async def test_a_slow_scorer_does_not_take_the_reviews_time(build: Build) -> None:
    async with scored(build, delay=60) as (house, _):
        started = time.monotonic()
        response = await house.ask("/mutate", builders.mutating_create(job()), timeout="2s")
        assert "has not answered within 0.6 s" in warnings(response)
        assert len(house.held) == 1
        assert time.monotonic() - started < 20


@pytest.mark.defect("S3-12")
async def test_the_time_that_a_scorer_has_is_what_was_set(build: Build) -> None:
    async with scored(build, delay=60, scorer_timeout=timedelta(milliseconds=200)) as (house, _):
        assert "has not answered within 0.2 s" in warnings(await house.mutate(job()))


# Jobs.


def of_job(annotations: Raw, template: Raw | None = None, operation: str = "CREATE") -> Raw:
    raw = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "bert", "namespace": "ml", "annotations": annotations},
        "spec": {"template": {"metadata": template or {}, "spec": job()["spec"]}},
    }
    review = builders.review(operation, new=raw, old=raw if operation == "UPDATE" else None)
    review["request"]["kind"] = {"group": "batch", "version": "v1", "kind": "Job"}
    return review


@pytest.mark.defect("S3-3")
async def test_what_a_job_says_reaches_its_pods_and_nothing_else_of_it_is_touched(build: Build) -> None:
    said = {"app.kubernetes.io/job-type": "train-bert", "scheduler.radix.ai/tenant": "team-a"}
    async with scored(build) as (house, double):
        review = of_job(said)
        raw = review["request"]["object"]
        final = patched(raw, await house.ask("/mutate", review))
        assert final["spec"]["template"]["metadata"] == {"annotations": said}
        assert final["spec"]["template"]["spec"] == raw["spec"]["template"]["spec"]
        assert final["metadata"] == raw["metadata"]
        again = await house.ask("/mutate", of_job(said, {"annotations": said}))
        assert (again["allowed"], "patch" in again) == (True, False)
    assert double.asked == []


@pytest.mark.defect("S3-2")
async def test_a_job_that_exists_is_not_patched(build: Build) -> None:
    async with scored(build) as (house, _):
        response = await house.ask("/mutate", of_job({"app.kubernetes.io/job-type": "a"}, operation="UPDATE"))
        assert (response["allowed"], "patch" in response) == (True, False)


async def test_without_a_scorer_jobs_are_left_alone(house: House) -> None:
    response = await house.ask("/mutate", of_job({"app.kubernetes.io/job-type": "a"}))
    assert (response["allowed"], "patch" in response) == (True, False)


@pytest.mark.defect("S3-16")
async def test_what_is_no_review_is_answered_400_and_never_with_an_empty_uid(build: Build) -> None:
    async with scored(build) as (house, _):
        review = of_job({})
        del review["request"]["uid"]
        for body in ({}, {"kind": "AdmissionReview"}, review):
            reply = await house.tls.post("/mutate", json=body)
            assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")


# All at once, through a real server.


@pytest.mark.defect("S3-7")
async def test_fifty_pods_at_once_wait_for_a_slow_scorer_once(tmp_path: Path) -> None:
    inventory = {"nodes": [node(f"n-{k}", "A100-80GB", 8) for k in range(8)]}
    async with scoring(delay=2.0, crowd=50) as double:
        flags = ("--scorer", double.url, "--scorer-timeout", "14s", "--log-level", "warn")
        with serving(tmp_path, inventory, flags) as server:
            async with server.client(timeout=60.0, trust_env=False) as client:
                await client.get("/healthz")
                asked = [
                    client.post(
                        "/mutate?timeout=30s", json=builders.mutating_create(job(f"job-{k}"), uid=f"review-{k}")
                    )
                    for k in range(50)
                ]
                answering = asyncio.gather(*asked)
                crowded = asyncio.ensure_future(double.crowded.wait())
                futures: list[asyncio.Future[Any]] = [answering, crowded]
                await asyncio.wait(futures, return_when=FIRST_COMPLETED)
                started = time.monotonic()
                answers = [reply.json()["response"] for reply in await answering]
                took = time.monotonic() - started
    assert all(one["allowed"] and not one.get("warnings") for one in answers)
    assert len(double.asked) == 50
    assert 1.5 <= took < 8.0, took
