"""The features of a pod, and the changes that a scorer may make to it."""

from datetime import timedelta
from typing import Any

import jsonpatch
import pytest

from tests.builders import NOW, Raw, raw_container, raw_pod
from webhook.core.claim import ClaimRules, claim_of
from webhook.core.dress import changes
from webhook.core.hints import (
    Advice,
    Bucket,
    Features,
    HintContext,
    Hints,
    class_for,
    features_of,
    hinted,
    hints_of,
    should_score,
    was_hinted,
    with_features_in_template,
)
from webhook.core.pod import Pod, Toleration

A100 = {"gpu.nvidia.com/class": {"A100-80GB": 2}, "nvidia.com/gpu.product": {}}
GPU_TAINT = Toleration(key="nvidia.com/gpu", operator="Exists", effect="NoSchedule")
RAW_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ADVICE = Advice(
    score=85.0, selector=(("gpu.nvidia.com/class", "A100-80GB"),), tolerations=(GPU_TAINT,), avoid=("train-llama",)
)
AROUND = HintContext(A100)


def scored(*containers: Raw, job_type: str = "train-bert", gpus: int = 1, **members: Any) -> Raw:
    annotations = {"app.kubernetes.io/job-type": job_type, **members.pop("annotations", {})}
    return raw_pod(*(containers or (raw_container(gpus=gpus),)), annotations=annotations, **members)


def features(**annotations: str) -> Features:
    found = features_of(Pod.parse(scored(annotations={k.replace("__", "."): v for k, v in annotations.items()})))
    assert found is not None
    return found


def advised(raw: Raw, advice: Advice = ADVICE, around: HintContext = AROUND) -> Hints:
    pod = Pod.parse(raw)
    found = features_of(pod)
    assert found is not None
    return hints_of(advice, found, pod, around, NOW)


def patched(raw: Raw, hints: Hints) -> Raw:
    """Through the patch, so that the test proves that it applies."""
    result: Raw = jsonpatch.apply_patch(raw, changes(raw, hinted(raw, hints)))
    assert result == hinted(raw, hints)
    return result


# Features.


def test_pod_without_a_job_type_has_no_features() -> None:
    assert features_of(Pod.parse(raw_pod(raw_container(gpus=1)))) is None
    assert features_of(Pod.parse(scored(job_type=""))) is None


def test_features_are_parsed_from_annotations() -> None:
    annotations = {"gpu.mem.gi": "40", "ml.batch_size": "16", "scheduler.radix.ai/tenant": "team-a"}
    found = features_of(Pod.parse(scored(annotations=annotations)))
    assert found == Features("train-bert", "team-a", 40.0, 16)


@pytest.mark.defect("scoring-11")
@pytest.mark.parametrize(
    "text", ["nan", "NaN", "inf", "-inf", "Infinity", "-1", "-0.0", "40Gi", "1e400", "", "0x10", "1_000", "٤٠", "4 0"]
)
def test_invalid_memory_is_ignored_with_a_warning(text: str) -> None:
    cpu = raw_pod(annotations={"app.kubernetes.io/job-type": "a", "gpu.mem.gi": text})
    found = features_of(Pod.parse(cpu))
    assert found is not None
    assert found.gpu_mem_gb is None
    (warning,) = found.warnings
    assert warning.startswith("annotation gpu.mem.gi: ")


@pytest.mark.parametrize(
    ("text", "number"), [("40", 40.0), ("39.5", 39.5), (" 8 ", 8.0), ("1e2", 100.0), ("0", 0.0), (".5", 0.5)]
)
def test_memory_is_a_decimal_number(text: str, number: float) -> None:
    assert features(gpu__mem__gi=text).gpu_mem_gb == number


@pytest.mark.defect("scoring-11")
@pytest.mark.parametrize("text", ["16.0", "many", "", "1e3", "9" * 40, "-1", "nan", "40Gi", "1e400"])
def test_invalid_batch_size_is_ignored_with_a_warning(text: str) -> None:
    found = features(ml__batch_size=text)
    assert found.batch_size is None
    assert len(found.warnings) == 1


def test_memory_of_a_gpu_pod_defaults_to_40_gb() -> None:
    assert features().gpu_mem_gb == 40.0
    assert features(gpu__mem__gi="nan").gpu_mem_gb == 40.0


@pytest.mark.parametrize(
    "container",
    [
        raw_container(resources={"limits": {"nvidia.com/gpu": "1"}}),
        raw_container(resources={"requests": {"cpu": "1"}}),
        raw_container(resources={"requests": {"nvidia.com/gpu": "0"}}),
    ],
    ids=["limits-only", "cpu", "none-of-it"],
)
@pytest.mark.defect("scoring-17")
def test_a_pod_that_requests_no_gpu_is_not_scored(container: Raw) -> None:
    pod = Pod.parse(scored(container))
    assert not should_score(pod, None)


def test_any_gpu_resource_or_claim_makes_a_pod_scored() -> None:
    assert should_score(Pod.parse(scored(raw_container(resources={"requests": {"amd.com/gpu": "1"}}))), None)
    counted = Pod.parse(scored(raw_container(), annotations={"gpuwarden.io/gpu-count": "1"}))
    assert should_score(counted, claim_of(counted, ClaimRules()))
    proven = Pod.parse(scored(raw_container(), annotations={"gpuwarden.io/required-hash": "sha256:aa"}))
    assert not should_score(proven, claim_of(proven, ClaimRules()))


# Priority.


@pytest.mark.parametrize(
    ("score", "name"),
    [
        (100, "gpu-ultra"),
        (90, "gpu-ultra"),
        (89.9, "gpu-high"),
        (70, "gpu-high"),
        (50, "gpu-medium"),
        (49, "gpu-default"),
        (0, "gpu-default"),
    ],
)
def test_score_gets_the_class_of_its_bucket(score: float, name: str) -> None:
    assert class_for(score, reversed(HintContext({}).buckets)) == name


def test_score_below_all_buckets_gets_the_default_class() -> None:
    assert class_for(10, [Bucket(50, "half")]) == "gpu-default"


@pytest.mark.defect("X-2")
def test_priority_class_replaces_priority_and_preemption_policy() -> None:
    raw = scored(priority=0, preemptionPolicy="PreemptLowerPriority")
    spec = patched(raw, advised(raw))["spec"]
    assert spec["priorityClassName"] == "gpu-high"
    assert not {"priority", "preemptionPolicy"} & spec.keys()


@pytest.mark.defect("scoring-14")
def test_a_pods_own_class_stays() -> None:
    raw = scored(priorityClassName="mine", priority=7)
    spec = patched(raw, advised(raw))["spec"]
    assert (spec["priorityClassName"], spec["priority"]) == ("mine", 7)


@pytest.mark.defect("scoring-14")
def test_missing_priority_class_is_not_written() -> None:
    raw = scored(priority=0)
    hints = advised(raw, around=HintContext(A100, classes=frozenset({"gpu-ultra"})))
    spec = patched(raw, hints)["spec"]
    assert "priorityClassName" not in spec
    assert spec["priority"] == 0
    assert hints.warnings == ("PriorityClass gpu-high does not exist: the pod gets none",)


def test_default_class_of_the_cluster_is_replaced() -> None:
    raw = scored(priorityClassName="usual", priority=5)
    around = HintContext(A100, classes=frozenset({"usual", "gpu-high"}), default_class="usual")
    assert patched(raw, advised(raw, around=around))["spec"]["priorityClassName"] == "gpu-high"


# Selector.


@pytest.mark.defect("scoring-1")
@pytest.mark.defect("X-1")
@pytest.mark.parametrize("own", [None, {}, {"pool": "gpu"}, {"a/b~c": "d"}], ids=repr)
def test_selector_with_special_characters_is_merged(own: Any) -> None:
    raw = scored() if own is None else scored(nodeSelector=own)
    assert patched(raw, advised(raw))["spec"]["nodeSelector"] == {**(own or {}), "gpu.nvidia.com/class": "A100-80GB"}


@pytest.mark.defect("X-1")
def test_a_pod_without_annotations_to_add_to_is_hinted_too() -> None:
    raw = raw_pod(raw_container(gpus=1))
    for bare in (raw, {**raw, "metadata": {**raw["metadata"], "annotations": None, "labels": None}}):
        assert patched(bare, Hints("a", "50", "unknown", 1))["metadata"]["labels"] == {
            "app.kubernetes.io/job-type": "a"
        }


def test_own_selector_of_the_pod_is_kept() -> None:
    raw = scored(nodeSelector={"gpu.nvidia.com/class": "L4-24GB"})
    hints = advised(raw)
    assert patched(raw, hints)["spec"]["nodeSelector"] == {"gpu.nvidia.com/class": "L4-24GB"}
    assert hints.warnings == ("nodeSelector gpu.nvidia.com/class=L4-24GB is kept; the scorer chose A100-80GB",)


@pytest.mark.defect("scoring-6")
def test_model_is_selected_by_the_label_that_nodes_have() -> None:
    by_product = {"gpu.nvidia.com/class": {"L4-24GB": 1}, "nvidia.com/gpu.product": {"A100-80GB": 3}}
    raw = scored()
    hints = advised(raw, around=HintContext(by_product))
    assert patched(raw, hints)["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "A100-80GB"}
    assert hints.chosen_gpu == "A100-80GB"


def test_a_model_that_no_node_has_is_not_selected() -> None:
    raw = scored()
    hints = advised(raw, around=HintContext({"gpu.nvidia.com/class": {"L4-24GB": 1}}))
    assert hints.selector == ()
    assert hints.warnings == (
        "no node has the label gpu.nvidia.com/class=A100-80GB that the scorer chose: it is ignored",
    )


@pytest.mark.parametrize(("key", "value"), [("bad key", "a"), ("/a", "b"), ("a", "no good"), ("a", "x" * 64)])
def test_invalid_label_is_not_selected(key: str, value: str) -> None:
    assert advised(scored(), Advice(selector=((key, value),))).selector == ()


def test_pod_with_a_node_name_gets_no_selector() -> None:
    assert advised(scored(nodeName="node-a")).selector == ()


# Tolerations and affinity.


def test_tolerations_are_appended_once() -> None:
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
    raw = scored(tolerations=[own])
    once = patched(raw, advised(raw))
    assert once["spec"]["tolerations"] == [own, RAW_TOLERATION]
    assert patched(once, advised(once))["spec"]["tolerations"] == [own, RAW_TOLERATION]


@pytest.mark.parametrize(
    "wrong",
    [
        Toleration(operator="Exists"),
        Toleration(key="a b", operator="Exists"),
        Toleration(key="a", operator="Sometimes"),
        Toleration(key="a", operator="Exists", value="b"),
        Toleration(key="a", operator="Exists", effect="Never"),
        Toleration(key="a", operator="Exists", effect="NoSchedule", toleration_seconds=3),
        Toleration(key="a", operator="Exists", effect="NoExecute", toleration_seconds=2**70),
    ],
    ids=["everything", "key", "operator", "value", "effect", "seconds", "beyond"],
)
def test_hints_that_make_the_pod_invalid_are_ignored(wrong: Toleration) -> None:
    hints = advised(scored(), Advice(tolerations=(wrong, GPU_TAINT)))
    assert hints.tolerations == (GPU_TAINT,)
    assert len(hints.warnings) == 1


@pytest.mark.defect("scoring-4")
def test_anti_affinity_is_appended_and_the_rest_stays() -> None:
    hard = [{"labelSelector": {"matchLabels": {"app": "bert"}}, "topologyKey": "kubernetes.io/hostname"}]
    soft = [{"weight": 1, "podAffinityTerm": hard[0]}]
    apart = {
        "requiredDuringSchedulingIgnoredDuringExecution": hard,
        "preferredDuringSchedulingIgnoredDuringExecution": soft,
    }
    raw = scored(affinity={"podAntiAffinity": apart, "podAffinity": {}})
    found = patched(raw, advised(raw))["spec"]["affinity"]
    assert found["podAffinity"] == {}
    assert found["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == hard
    ours = {
        "weight": 100,
        "podAffinityTerm": {
            "labelSelector": {
                "matchExpressions": [{"key": "app.kubernetes.io/job-type", "operator": "In", "values": ["train-llama"]}]
            },
            "topologyKey": "kubernetes.io/hostname",
        },
    }
    assert found["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == [*soft, ours]


@pytest.mark.defect("scoring-5")
def test_the_job_type_is_a_label_that_others_can_avoid() -> None:
    raw = scored(labels={"app": "bert"})
    assert patched(raw, advised(raw))["metadata"]["labels"] == {
        "app": "bert",
        "app.kubernetes.io/job-type": "train-bert",
    }
    own = scored(labels={"app.kubernetes.io/job-type": "mine"})
    assert patched(own, advised(own))["metadata"]["labels"] == {"app.kubernetes.io/job-type": "mine"}


def test_job_type_that_is_not_a_label_value_gives_a_warning() -> None:
    raw = scored(job_type="train bert!")
    hints = advised(raw, Advice(avoid=("no good", "")))
    assert "labels" not in patched(raw, hints)["metadata"]
    assert hints.avoid == ()
    assert len(hints.warnings) == 3


# Annotations.


@pytest.mark.defect("scoring-9")
@pytest.mark.defect("scoring-10")
def test_the_decision_is_written_under_both_names() -> None:
    raw = scored()
    found = patched(raw, advised(raw))["metadata"]["annotations"]
    for domain in ("gpuwarden.io", "scheduler.radix.ai"):
        assert found[f"{domain}/priority-score"] == "85"
        assert found[f"{domain}/chosen-gpu"] == "A100-80GB"
        assert found[f"{domain}/decision-timestamp"] == str(int(NOW.timestamp()))
    only_ours = hinted(raw, advised(raw), writes_aliases=False)["metadata"]["annotations"]
    assert not [key for key in only_ours if key.startswith("scheduler.radix.ai/")]


@pytest.mark.parametrize(
    ("score", "text"), [(85.0, "85"), (85, "85"), (89.9, "89.9"), (0.0, "0"), (1 / 3, repr(1 / 3))]
)
def test_a_score_is_written_as_it_was_received(score: float, text: str) -> None:
    assert Advice(score=score).score_text == text


def test_chosen_gpu_of_the_scorer_takes_precedence_over_its_selector() -> None:
    assert Advice(chosen="H100", selector=(("gpu.nvidia.com/class", "A100"),)).chosen_gpu == "H100"
    assert Advice(selector=(("pool", "x"),)).chosen_gpu == "unknown"


# Reinvocation.


def test_reinvoked_pod_keeps_its_hints_and_an_old_copy_does_not() -> None:
    raw = scored()
    again = Pod.parse(patched(raw, advised(raw)))
    assert was_hinted(again, NOW + timedelta(seconds=5))
    assert not was_hinted(again, NOW + timedelta(hours=1))
    assert not was_hinted(Pod.parse(raw), NOW)
    assert not was_hinted(Pod.parse(scored(annotations={"gpuwarden.io/decision-timestamp": "soon"})), NOW)


def test_selector_that_excludes_the_chosen_nodes_is_dropped_with_a_warning() -> None:
    hints = advised(scored())
    assert hints.fitted_to_nodes({"gpu.nvidia.com/class": "A100-80GB", "zone": "a"}) is hints
    assert hints.fitted_to_nodes() is hints
    elsewhere = hints.fitted_to_nodes({"gpu.nvidia.com/class": "L4-24GB"})
    assert elsewhere.selector == ()
    assert "no node with gpu.nvidia.com/class=A100-80GB can serve the pod" in elsewhere.warnings[-1]


# Jobs.


def job(said: dict[str, str] | None, template: Any = None) -> Raw:
    meta = {"name": "bert", "annotations": said}
    return {"metadata": meta, "spec": {"template": {"metadata": template, "spec": {"containers": []}}}}


@pytest.mark.defect("scoring-3")
@pytest.mark.parametrize("template", [None, {}, {"annotations": None}], ids=repr)
def test_features_of_a_job_are_copied_to_its_template(template: Any) -> None:
    said = {"app.kubernetes.io/job-type": "train-bert", "gpu.mem.gi": "40", "other": "not ours"}
    found = with_features_in_template(job(said, template))
    assert found["spec"]["template"]["metadata"]["annotations"] == {
        "app.kubernetes.io/job-type": "train-bert",
        "gpu.mem.gi": "40",
    }
    assert found["metadata"] == job(said)["metadata"]


def test_features_of_the_template_are_kept() -> None:
    own = {"annotations": {"app.kubernetes.io/job-type": "mine", "x": "y"}}
    found = with_features_in_template(job({"app.kubernetes.io/job-type": "its", "ml.batch_size": "1"}, own))
    assert found["spec"]["template"]["metadata"]["annotations"] == {
        "app.kubernetes.io/job-type": "mine",
        "x": "y",
        "ml.batch_size": "1",
    }


@pytest.mark.parametrize("raw", [job(None), job({}), job({"other": "x"}), {}, {"spec": {}}], ids=repr)
def test_job_without_features_is_unchanged(raw: Raw) -> None:
    assert with_features_in_template(raw) == raw
