"""The scorer's input comes from watches only."""

from typing import Any

import pytest

from tests.builders import NOW, Raw, raw_container, raw_pod
from webhook.core.device import Node
from webhook.core.fleet import Fleet
from webhook.scoring.candidates import (
    MAX_COLOCATED,
    EveryPriorityClass,
    RunningJobs,
    WatchedPriorityClasses,
    candidates,
)


def running(name: str, job_type: str | None = "train", phase: str = "Running", **members: Any) -> Raw:
    said = {} if job_type is None else {"app.kubernetes.io/job-type": job_type}
    annotations = {**said, **members.pop("annotations", {})}
    pod = raw_pod(raw_container(gpus=members.pop("gpus", 1)), name=name, annotations=annotations, **members)
    return {**pod, "status": {"phase": phase}}


@pytest.mark.defect("scoring-8")
def test_candidates_are_the_models_in_either_node_label() -> None:
    fleet = Fleet()
    assert candidates(fleet) == ()
    fleet.put(Node("a", {"gpu.nvidia.com/class": "A100"}), NOW)
    fleet.put(Node("b", {"gpu.nvidia.com/class": "A100", "nvidia.com/gpu.product": "NVIDIA-A100"}), NOW)
    fleet.put(Node("c", {"zone": "x", "gpu.nvidia.com/class": ""}), NOW)
    assert candidates(fleet) == ("A100", "NVIDIA-A100")
    fleet.put(Node("b", {"gpu.nvidia.com/class": "L4"}), NOW)
    assert candidates(fleet) == ("A100", "L4")
    fleet.remove("a")
    assert candidates(fleet) == ("L4",)
    assert fleet.gpu_types["nvidia.com/gpu.product"] == {}


def test_running_job_types_are_listed_as_often_as_they_run() -> None:
    jobs = RunningJobs()
    for raw in (
        running("a"),
        running("b"),
        running("c", "infer"),
        running("waits", phase="Pending"),
        running("silent", None),
        running("cpu", gpus=None),
        running("by-label", None, labels={"app.kubernetes.io/job-type": "label"}),
        running("dressed", "ours", gpus=None, annotations={"gpuwarden.io/claim": '{"gpus":2}'}),
        running("proven-only", "none", gpus=None, annotations={"gpuwarden.io/claim": '{"hashes":["a"]}'}),
    ):
        jobs.changed(raw)
    assert jobs.colocated() == ("infer", "label", "ours", "train", "train")
    jobs.changed(running("a", phase="Succeeded"))
    jobs.deleted(running("c", "infer"))
    assert jobs.colocated() == ("label", "ours", "train")
    jobs.replaced({"ml/b": running("b")})
    assert jobs.colocated() == ("train",)


def test_list_of_job_types_is_bounded_and_contains_every_type() -> None:
    jobs = RunningJobs()
    for number in range(3 * MAX_COLOCATED):
        jobs.changed(running(f"many-{number}"))
    jobs.changed(running("one", "rare"))
    told = jobs.colocated()
    assert len(told) <= MAX_COLOCATED
    assert set(told) == {"rare", "train"}


def test_priority_classes_follow_the_watch() -> None:
    classes = WatchedPriorityClasses()
    assert (classes.names, classes.default) == (frozenset(), None)
    usual = {"metadata": {"name": "usual", "resourceVersion": "2"}, "value": 5, "globalDefault": True}
    classes.view.replaced({"/usual": usual, "/high": {"metadata": {"name": "high", "resourceVersion": "1"}}})
    assert (classes.names, classes.default) == (frozenset({"usual", "high"}), "usual")
    classes.view.deleted(usual)
    assert (classes.names, classes.default) == (frozenset({"high"}), None)
    assert EveryPriorityClass().names is None
