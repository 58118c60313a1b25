"""An explanation says of any pod what the webhooks would say."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests import builders
from tests.builders import HASH, OTHER_HASH, Raw, raw_container, raw_env, raw_pod
from tests.conftest import Build
from tests.generated_pods import generated_pods
from tests.web.harness import Harness, patched
from webhook.core.near_misses import MAX_KEYS, near_keys
from webhook.core.reservation import Orphan, PodIdentity, PodProof
from webhook.ledger.memory import MemoryLedger
from webhook.ledger.moves import MarkOrphaned, Times


async def explained(harness: Harness, raw: Raw) -> Raw:
    answer: Raw = (await harness.tls.post("/explain", json=raw)).json()
    return answer


async def creation(harness: Harness, raw: Raw) -> tuple[str, str]:
    """Verdict and reason of a dry run at both webhooks, in the API server's order."""
    response = await harness.mutate(raw, dry_run=True)
    if not response["allowed"]:
        return "deny", response["status"]["reason"]
    reason = response.get("auditAnnotations", {}).get("reason", "NotAsked")
    final = patched(raw, response)
    review = builders.review("CREATE", new=final, dry_run=True)
    validated = await harness.validate(review)
    return ("admit", reason) if validated["allowed"] else ("deny", validated["status"]["reason"])


SETTINGS: dict[str, dict[str, Any]] = {
    "as-they-are": {},
    "evidence-of-all": {"require_evidence": "all"},
    "queue": {"when_unavailable": "queue"},
    "cuda": {"injection": "cuda"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
async def test_explanation_of_generated_pods_equals_a_dry_run(build: Build, settings: dict[str, Any]) -> None:
    harness = await build(**settings)
    found = set()
    for raw in generated_pods(400):
        answer = await explained(harness, raw)
        assert (answer["verdict"], answer["reason"]) == await creation(harness, raw), raw
        found.add(answer["reason"])
    assert len(found) >= 7, "the pods are of many kinds"
    assert harness.held == []


async def test_explanation_denies_a_namespace_with_too_many_orphans(build: Build) -> None:
    harness = await build(orphans_per_namespace=1)
    await harness.mutate(raw_pod(raw_container(gpus=1)))
    (held,) = harness.parts.ledger.reservations()
    pod = PodIdentity(held.namespace, "train-0", "uid-0")
    await harness.parts.ledger.bind_to_pod(PodProof.REPORTED, held.id, pod)
    orphan = Orphan(builders.NOW, timedelta(hours=1))
    mark_orphaned = MarkOrphaned(held.id, pod, held.since, orphan)
    assert isinstance(harness.parts.ledger, MemoryLedger)
    harness.parts.ledger._index.make(held.node, mark_orphaned, builders.NOW, Times(timedelta(0), timedelta(0)))
    answer = await explained(harness, raw_pod(raw_container(gpus=1)))
    assert (answer["verdict"], answer["reason"]) == ("deny", "NamespaceFull")
    assert answer["message"].startswith("namespace 'ml' has 1 GPU held by pods that are gone and may still run")
    assert await creation(harness, raw_pod(raw_container(gpus=1))) == ("deny", "NamespaceFull")


async def test_explanation_is_not_counted_as_a_review(harness: Harness) -> None:
    await explained(harness, raw_pod(raw_container(gpus=1)))
    assert 'gpuwarden_verdicts_total{reason="Admitted"} 0.0' in harness.parts.metrics.render()[0].decode()


async def test_explanation_contains_the_webhooks_warnings(harness: Harness) -> None:
    answer = await explained(harness, raw_pod(raw_container(gpus=1), annotations={"gpuwarden.io/required-hsh": HASH}))
    assert answer["warnings"] == ["gpuwarden does not know the key gpuwarden.io/required-hsh: is it misspelt?"]


NEAR: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "case-of-a-hash": (
        {"gpuwarden.io/required-hash": "SHA256:AA11"},
        {},
        [
            "no node has proven SHA256:AA11: did you mean sha256:aa11?",
            f"proven now: {HASH} by 1 node, {OTHER_HASH} by 1 node",
        ],
    ),
    "no-prefix": (
        {"gpuwarden.io/required-hash": "aa11"},
        {},
        [
            "no node has proven aa11: did you mean sha256:aa11?",
            f"proven now: {HASH} by 1 node, {OTHER_HASH} by 1 node",
        ],
    ),
    "another-hash": (
        {"gpuwarden.io/required-hash": "sha512:77"},
        {},
        [f"proven now: {HASH} by 1 node, {OTHER_HASH} by 1 node"],
    ),
    "case-of-a-label": (
        {},
        {"gpuwarden.io/gpu.model": "H100"},
        ["no GPU has the label model=H100: did you mean model=h100?"],
    ),
    "misspelt-label": (
        {},
        {"gpuwarden.io/gpu.modle": "h100"},
        ["no GPU has the label modle=h100: did you mean model=h100?"],
    ),
    "nothing-like-it": ({}, {"gpuwarden.io/gpu.colour": "red"}, ["no GPU has the label colour=red"]),
    "misspelt-key": (
        {"gpuwarden.io/required-hsh": HASH},
        {},
        ["gpuwarden does not know the key gpuwarden.io/required-hsh: did you mean gpuwarden.io/required-hash?"],
    ),
    "misspelt-domain": (
        {"gpuwarden/required-hash": HASH},
        {},
        ["gpuwarden does not know the key gpuwarden/required-hash: did you mean gpuwarden.io/required-hash?"],
    ),
    "all-right": ({"gpuwarden.io/required-hash": HASH}, {"gpuwarden.io/gpu.model": "h100", "app": "x"}, []),
}


@pytest.mark.parametrize(("annotations", "labels", "said"), NEAR.values(), ids=NEAR.keys())
async def test_explanation_hints_at_near_misses(
    harness: Harness, annotations: dict[str, str], labels: dict[str, str], said: list[str]
) -> None:
    answer = await explained(harness, raw_pod(annotations=annotations, labels=labels))
    assert answer["hints"] == said


async def test_explanation_hints_at_missing_evidence(build: Build) -> None:
    harness = await build({"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-a0"}]}]})
    answer = await explained(harness, raw_pod(annotations={"gpuwarden.io/required-hash": HASH}))
    assert answer["hints"] == ["no node has fresh evidence now"]


async def test_explanation_of_a_running_pod_names_its_gpus(harness: Harness) -> None:
    final = await harness.create(raw_pod(raw_container(gpus=2)))
    answer = await explained(harness, final)
    assert (answer["verdict"], answer["message"]) == ("admit", "the pod has GPU-a0, GPU-a1 on node node-a (finalized)")
    elsewhere = {**final, "metadata": {**final["metadata"], "namespace": "other"}}
    assert "the pod has" not in (await explained(harness, elsewhere))["message"]


async def test_explanation_includes_denials_of_the_validating_webhook(harness: Harness) -> None:
    raw = raw_pod(raw_container(env=raw_env(NVIDIA_VISIBLE_DEVICES="all")))
    answer = await explained(harness, raw)
    assert (answer["verdict"], answer["reason"], answer["patch"]) == ("deny", "GpuWithoutClaim", [])


async def test_stateful_set_is_explained_in_its_own_namespace(harness: Harness) -> None:
    """The template of a Deployment names no namespace. Its pods are created in the Deployment's."""
    raw = {
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": "not_a_name"},
        "spec": {"template": {"spec": raw_pod(raw_container(gpus=1))["spec"]}},
    }
    answer = await explained(harness, raw)
    assert (answer["reason"], "not_a_name" in answer["message"]) == ("InvalidPod", True)


def test_near_miss_search_compares_a_limited_number_of_keys() -> None:
    looked = []

    def written() -> Iterator[str]:
        for number in range(100_000):
            looked.append(number)
            yield f"gpuwardens.example/{number}-{'x' * 60}"

    assert list(near_keys(written())) == []
    assert len(looked) <= MAX_KEYS + 1
