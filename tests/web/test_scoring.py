"""Hints in reviews: an answer of the scorer adds hints to the pod, a failure does not delay or deny it."""

import asyncio
import ssl
import time
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
from tests.web.harness import Harness, patched
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
async def scored(build: Build, inventory: Raw = FLEET, **members: Any) -> AsyncIterator[tuple[Harness, FakeScorer]]:
    settings = {
        name: members.pop(name)
        for name in (
            "hint_pods",
            "write_aliases",
            "assemble",
            "when_unavailable",
            "priority_buckets",
            "scorer_timeout",
            "reserve",
        )
        if name in members
    }
    async with scoring(**members) as double:
        harness = await build(inventory, scorer=double.url, **settings)
        yield harness, double
        await harness.close()


def warnings(response: Raw) -> str:
    assert response["allowed"], response
    return "; ".join(response.get("warnings", ()))


def notes(raw: Raw) -> Mapping[str, str]:
    found: Mapping[str, str] = raw["metadata"]["annotations"]
    return found


# Answers of the scorer.


async def test_claim_is_reserved_on_the_hinted_node_and_validated(build: Build) -> None:
    async with scored(build) as (harness, double):
        final = await harness.create(job())
        assert pinned_nodes(final) == ["big"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert not {"priority", "preemptionPolicy"} & final["spec"].keys()
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert final["spec"]["tolerations"] == GOOD["gpu_selector"]["tolerations"]
        assert final["metadata"]["labels"] == {"app.kubernetes.io/job-type": "train-bert"}
        assert notes(final)["scheduler.radix.ai/priority-score"] == "85"
        assert notes(final)["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        assert notes(final)["gpuwarden.io/gpu-uuid"] == harness.held[0]
    assert double.asked[0]["candidate_gpu_types"] == ["A100-80GB", "L4-24GB"]
    assert double.asked[0]["features"]["gpu_mem_gb"] == 40.0


@pytest.mark.defect("scoring-9")
async def test_decision_timestamp_is_the_time_of_the_clock(build: Build) -> None:
    async with scored(build) as (harness, _):
        final = await harness.dress(job())
        assert abs(int(notes(final)["scheduler.radix.ai/decision-timestamp"]) - harness.now.timestamp()) < 5


async def test_older_annotation_names_follow_the_setting(build: Build) -> None:
    async with scored(build, write_aliases=False) as (harness, _):
        assert not [key for key in notes(await harness.dress(job())) if key.startswith("scheduler.radix.ai/")]


@pytest.mark.defect("scoring-12")
async def test_priority_class_follows_the_configured_buckets(build: Build) -> None:
    buckets = ({"minScore": 85, "priorityClassName": "urgent"}, {"minScore": 0, "priorityClassName": "later"})
    async with scored(build, priority_buckets=buckets) as (harness, double):
        assert (await harness.dress(job("one"), "one"))["spec"]["priorityClassName"] == "urgent"
        double.body = good(priority_score=84.9)
        assert (await harness.dress(job("two"), "two"))["spec"]["priorityClassName"] == "later"


@pytest.mark.defect("scoring-6")
async def test_product_label_is_selected_if_there_is_no_class_label(build: Build) -> None:
    product = "nvidia.com/gpu.product"
    inventory = {"nodes": [{**node("big", "unread", 2), "labels": {product: "A100-80GB"}}]}
    async with scored(build, inventory) as (harness, double):
        final = await harness.create(job())
        assert final["spec"]["nodeSelector"] == {product: "A100-80GB"}
        assert notes(final)["scheduler.radix.ai/chosen-gpu"] == "A100-80GB"
    assert double.asked[0]["candidate_gpu_types"] == ["A100-80GB"]


@pytest.mark.defect("scoring-11")
@pytest.mark.parametrize("text", ["nan", "-1", "40Gi", "1e400"])
async def test_feature_that_is_not_a_number_is_dropped_with_a_warning(build: Build, text: str) -> None:
    said = {"gpu.mem.gi": text, "ml.batch_size": text}
    # The pod requests no GPU by name, so the feature has no default value.
    raw = job(gpus=None, annotations={**said, "gpuwarden.io/gpu-count": "1"})
    async with scored(build) as (harness, double):
        response = await harness.mutate(raw)
        assert len(harness.held) == 1
    assert double.asked[0]["features"] == {"job_type": "train-bert", "tenant": "default"}
    assert "annotation gpu.mem.gi: " in warnings(response)
    assert "annotation ml.batch_size: " in warnings(response)


async def test_hint_is_dropped_if_no_hinted_node_fits(build: Build) -> None:
    async with scored(build) as (harness, _):
        for number in range(2):
            assert pinned_nodes(await harness.dress(job(), f"first-{number}")) == ["big"]
        response = await harness.mutate(job(), "third")
        final = patched(job(), response)
        assert pinned_nodes(final) == ["small"]
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert "no node with gpu.nvidia.com/class=A100-80GB can serve the pod" in warnings(response)


async def test_required_hash_takes_precedence_over_the_hint(build: Build) -> None:
    asked = {"gpuwarden.io/required-hash": OTHER_HASH}
    async with scored(build) as (harness, _):
        assert pinned_nodes(await harness.create(job(annotations=asked))) == ["small"]


async def test_scorer_is_not_called_for_a_pod_without_a_proven_node(build: Build) -> None:
    async with scored(build) as (harness, double):
        refused = await harness.mutate(job(annotations={"gpuwarden.io/required-hash": "sha256:none"}))
        assert refusal(refused) == (403, "NoProvenNode")
    assert double.asked == []


@pytest.mark.parametrize(
    ("text", "reason"), [("0=big:0", "NotInMap"), ("1=nowhere:0", "NoSuitableNode")], ids=["no-line", "no-such-node"]
)
async def test_scorer_is_not_called_for_a_pod_with_an_invalid_map(build: Build, text: str, reason: str) -> None:
    async with scored(build) as (harness, double):
        refused = await harness.mutate(mapped("bert-1", text))
        assert refusal(refused) == (403, reason)
    assert double.asked == []


async def test_map_takes_precedence_over_the_hint(build: Build) -> None:
    async with scored(build) as (harness, double):
        raw = mapped("bert-1", "1=small:GPU-small-2")
        response = await harness.mutate(raw)
        final = patched(raw, response)
        assert (pinned_nodes(final), harness.held) == (["small"], ["GPU-small-2"])
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert "the hint is ignored" in warnings(response)
    assert len(double.asked) == 1


def mapped(name: str, text: str) -> Raw:
    owners = [builders.stateful_set("bert")]
    return job(gpus=None, annotations={"gpuwarden.io/gpu-map": text}, name=name, owners=owners)


async def test_hinted_toleration_allows_the_tainted_node(build: Build) -> None:
    tainted = node("big", "A100-80GB", 2, taints=[{"key": "nvidia.com/gpu"}])
    async with scored(build, {"nodes": [tainted]}) as (harness, _):
        assert pinned_nodes(await harness.create(job())) == ["big"]


async def test_queued_pod_gets_hints_without_a_node_selector(build: Build) -> None:
    full = {"nodes": [node("big", "A100-80GB", 0)]}
    async with scored(build, full, when_unavailable="queue") as (harness, _):
        final = await harness.dress(job())
        assert final["spec"]["schedulingGates"] == [{"name": "gpuwarden.io/queue"}]
        assert "nodeSelector" not in final["spec"]
        assert final["spec"]["priorityClassName"] == "gpu-high"
        assert notes(final)["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        last = await harness.validate(builders.validating_create(final))
        assert last["allowed"], last


async def test_second_review_of_a_creation_calls_no_scorer_and_changes_nothing(build: Build) -> None:
    other = raw_container(resources={"requests": {"amd.com/gpu": "1"}, "limits": {"amd.com/gpu": "1"}})
    async with scored(build) as (harness, double):
        for raw in (job(), job(container=other)):
            once = await harness.dress(raw, "first")
            assert "scheduler.radix.ai/priority-score" in notes(once)
            double.asked.clear()
            assert await harness.dress(once, "again") == once
            assert double.asked == []


async def test_dry_run_applies_hints_and_reserves_nothing(build: Build) -> None:
    async with scored(build) as (harness, _):
        final = patched(job(), await harness.mutate(job(), dry_run=True))
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert harness.held == []


async def test_request_names_the_running_jobs(build: Build) -> None:
    async with scored(build) as (harness, double):
        await harness.create(job("train-llama"))
        await harness.dress(job("infer"), "second")
        assert double.asked[-1]["colocated_job_types"] == ["train-llama"]


@pytest.mark.defect("scoring-5")
async def test_anti_affinity_hint_matches_the_labels_of_the_other_pod(build: Build) -> None:
    async with scored(build, body=good(avoid_co_locate_with=["infer"])) as (harness, _):
        one, other = await harness.dress(job("train"), "one"), await harness.dress(job("infer"), "other")
        (term,) = one["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        (wanted,) = term["podAffinityTerm"]["labelSelector"]["matchExpressions"]
        assert other["metadata"]["labels"][wanted["key"]] in wanted["values"]


async def test_pod_with_foreign_gpus_gets_hints_and_no_reservation(build: Build) -> None:
    other = raw_container(resources={"requests": {"amd.com/gpu": "1"}})
    async with scored(build) as (harness, _):
        final = await harness.dress(job(container=other))
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert harness.held == []
        last = await harness.validate(builders.validating_create(final))
        assert last["allowed"]


async def test_node_selector_hint_does_not_exclude_the_node_that_a_pod_names(build: Build) -> None:
    """With `--reserve bind` no node was chosen to which the hint could be compared."""
    named = builders.required_affinity(builders.on_node("small"))
    async with scored(build, FLEET, reserve="bind") as (harness, _):
        final = await harness.dress(job(affinity=named))
    assert pinned_nodes(final) == ["small"]
    assert "nodeSelector" not in final["spec"]
    assert final["spec"]["priorityClassName"] == "gpu-high"


NOWHERE: dict[str, tuple[Raw, Raw]] = {
    "no-node-has-it": ({"pool": "made-up"}, {}),
    "not-where-the-pod-may-be": (
        {CLASS: "A100-80GB"},
        {"affinity": builders.required_affinity(builders.term(builders.expression(CLASS, "In", "L4-24GB")))},
    ),
}


@pytest.mark.parametrize(("selected", "own"), NOWHERE.values(), ids=NOWHERE)
async def test_node_selector_hint_is_dropped_if_no_node_matches(build: Build, selected: Raw, own: Raw) -> None:
    raw = job(container=raw_container(resources={"requests": {"amd.com/gpu": "1"}}), **own)
    async with scored(build, body=good(gpu_selector={"nodeSelector": selected})) as (harness, _):
        response = await harness.mutate(raw)
    final = patched(raw, response)
    assert "nodeSelector" not in final["spec"]
    assert final["spec"]["priorityClassName"] == "gpu-high"
    assert "the hint is ignored" in warnings(response)


@pytest.mark.defect("scoring-17")
async def test_pod_without_gpus_gets_no_hints(build: Build) -> None:
    async with scored(build) as (harness, double):
        for raw in (job(gpus=None), raw_pod()):
            made = patched(raw, await harness.mutate(raw))
            assert made["metadata"] == raw["metadata"]
            assert made["spec"].keys() == raw["spec"].keys()
        assert double.asked == []


@pytest.mark.defect("scoring-2")
async def test_existing_pod_is_not_patched(build: Build) -> None:
    async with scored(build) as (harness, double):
        final = await harness.create(job())
        double.asked.clear()
        touched = {**final, "metadata": {**final["metadata"], "labels": {"touched": "yes"}}}
        for path in ("/mutate", "/validate"):
            response = await harness.ask(path, builders.update(touched, final))
            assert (response["allowed"], "patch" in response) == (True, False)
        assert double.asked == []


@pytest.mark.defect("scoring-14")
async def test_missing_priority_class_is_dropped_with_a_warning(build: Build) -> None:
    def in_a_cluster(settings: Settings, clock: Clock) -> Parts:
        parts = embedded(settings, clock)
        assert parts.hinting is not None
        return evolve(parts, hinting=evolve(parts.hinting, classes=WatchedPriorityClasses()))

    async with scored(build, assemble=in_a_cluster) as (harness, _):
        response = await harness.mutate(job())
        final = patched(job(), response)
        assert ("priorityClassName" in final["spec"], final["spec"]["priority"]) == (False, 0)
        assert final["spec"]["nodeSelector"] == {CLASS: "A100-80GB"}
        assert "PriorityClass gpu-high does not exist" in warnings(response)


# Failures of the scorer.


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
async def test_malformed_answer_costs_only_the_hints(build: Build, body: bytes) -> None:
    async with scored(build, body=body) as (harness, _):
        response = await harness.mutate(job())
        assert "is malformed: the pod is admitted without hints" in warnings(response) or "too long" in warnings(
            response
        )
        final = patched(job(), response)
        assert len(harness.held) == 1
        assert "priorityClassName" not in final["spec"]
        assert "gpuwarden.io/priority-score" not in notes(final)
        text = harness.parts.metrics.render()[0].decode()
        assert 'gpuwarden_scoring_total{outcome="malformed"} 1.0' in text


@pytest.mark.defect("scoring-8")
async def test_scorer_is_not_called_if_no_node_has_a_gpu_label(build: Build) -> None:
    async with scored(build, BARE) as (harness, double):
        response = await harness.mutate(job())
        assert "with its GPU type, so the scorer was not asked" in warnings(response)
        assert "nodeSelector" not in patched(job(), response)["spec"]
        text = harness.parts.metrics.render()[0].decode()
        assert 'gpuwarden_scoring_total{outcome="no-candidates"} 1.0' in text
    assert double.asked == []


async def test_unreachable_scorer_is_logged_with_the_older_event(build: Build) -> None:
    async with scored(build) as (harness, double):
        with structlog.testing.capture_logs() as lines:
            await harness.create(job(), "answered")
            double.hangs_up = True
            response = await harness.mutate(job("other"), "unanswered")
        assert "cannot be reached: the pod is admitted without hints" in warnings(response)
        events = [line["event"] for line in lines]
        assert "Mutated pod" in events
        assert "Scheduler unavailable" in events
        assert (await harness.tls.get("/readyz")).status_code == 200


async def test_only_admitted_pods_are_logged_as_mutated(build: Build) -> None:
    async with scored(build) as (harness, double):
        with structlog.testing.capture_logs() as lines:
            refused = await harness.mutate(job(gpus=9, name="refused"), "refused")
            assert not refused["allowed"]
            await harness.dress(job(name="dressed"), "dressed")
        assert double.asked
        told = [(line["uid"], line["name"], line["job_type"]) for line in lines if line["event"] == "Mutated pod"]
        assert told == [("dressed", "dressed", "train-bert")]


async def test_https_scorer_is_verified_with_the_configured_ca(build: Build, tmp_path: Path) -> None:
    ca, roots = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(roots)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(tls)
    async with scoring(tls) as double:
        harness = await build(FLEET, scorer=double.url, scorer_ca=roots)
        assert notes(await harness.dress(job()))["gpuwarden.io/chosen-gpu"] == "A100-80GB"
        await harness.close()


async def test_hints_can_be_disabled(build: Build) -> None:
    async with scored(build, hint_pods=False) as (harness, double):
        final = await harness.create(job())
        assert "priorityClassName" not in final["spec"]
        assert double.asked == []


@pytest.mark.defect("scoring-15")
async def test_slow_scorer_does_not_use_up_the_deadline_of_the_review(build: Build) -> None:
    async with scored(build, delay=60) as (harness, _):
        started = time.monotonic()
        response = await harness.ask("/mutate", builders.mutating_create(job()), timeout="2s")
        assert "has not answered within 0.6 s" in warnings(response)
        assert len(harness.held) == 1
        assert time.monotonic() - started < 20


@pytest.mark.defect("scoring-12")
async def test_scorer_timeout_follows_the_setting(build: Build) -> None:
    async with scored(build, delay=60, scorer_timeout=timedelta(milliseconds=200)) as (harness, _):
        assert "has not answered within 0.2 s" in warnings(await harness.mutate(job()))


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


@pytest.mark.defect("scoring-3")
async def test_job_annotations_are_copied_to_its_pod_template_only(build: Build) -> None:
    said = {"app.kubernetes.io/job-type": "train-bert", "scheduler.radix.ai/tenant": "team-a"}
    async with scored(build) as (harness, double):
        review = of_job(said)
        raw = review["request"]["object"]
        final = patched(raw, await harness.ask("/mutate", review))
        assert final["spec"]["template"]["metadata"] == {"annotations": said}
        assert final["spec"]["template"]["spec"] == raw["spec"]["template"]["spec"]
        assert final["metadata"] == raw["metadata"]
        again = await harness.ask("/mutate", of_job(said, {"annotations": said}))
        assert (again["allowed"], "patch" in again) == (True, False)
    assert double.asked == []


@pytest.mark.defect("scoring-2")
async def test_existing_job_is_not_patched(build: Build) -> None:
    async with scored(build) as (harness, _):
        response = await harness.ask("/mutate", of_job({"app.kubernetes.io/job-type": "a"}, operation="UPDATE"))
        assert (response["allowed"], "patch" in response) == (True, False)


async def test_job_is_not_patched_without_a_scorer(harness: Harness) -> None:
    response = await harness.ask("/mutate", of_job({"app.kubernetes.io/job-type": "a"}))
    assert (response["allowed"], "patch" in response) == (True, False)


@pytest.mark.defect("scoring-16")
async def test_malformed_review_is_answered_400_without_a_uid(build: Build) -> None:
    async with scored(build) as (harness, _):
        review = of_job({})
        del review["request"]["uid"]
        for body in ({}, {"kind": "AdmissionReview"}, review):
            reply = await harness.tls.post("/mutate", json=body)
            assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")


# Concurrent reviews on a real server.


@pytest.mark.defect("scoring-7")
async def test_fifty_concurrent_pods_wait_for_a_slow_scorer_in_parallel(tmp_path: Path) -> None:
    """The scorer answers none of them before it has all requests."""
    inventory = {"nodes": [node(f"n-{k}", "A100-80GB", 8) for k in range(8)]}
    async with scoring(crowd=50) as double:
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
                answers = [reply.json()["response"] for reply in await asyncio.gather(*asked)]
    assert all(one["allowed"] and not one.get("warnings") for one in answers)
    assert len(double.asked) == 50
