"""The checks of the churn and of the workloads find each fault in events of the API server."""

from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders import NOW
from tests.e2e.dra.proof_churn import Period, ProofChurn
from tests.e2e.dra.seen import SeenObjects
from tests.e2e.kube import Raw
from tests.e2e.workload import Workload

HASH = "aa11"
UUIDS = {("gpu.nvidia.com", "node-a", f"gpu-{k}"): f"GPU-{k}" for k in range(2)}


def pod_raw(version: int, node: str = "node-a", phase: str = "Running", gpu: str = "GPU-0", **meta: str) -> Raw:
    notes = {"gpuwarden.io/required-hash": HASH, "gpuwarden.io/gpu-uuid": gpu}
    metadata = {"name": "train", "resourceVersion": str(version), "annotations": notes, **meta}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


def claim_raw(version: int, name: str = "one", gpu: str = "gpu-0", proof: str = "gpu-0-aa11") -> Raw:
    pairs = {"gpu0": ("gpu.nvidia.com", gpu), "proof0": ("attested.gpuwarden.io", proof)}
    results = [
        {"request": request, "driver": driver, "pool": "node-a", "device": device}
        for request, (driver, device) in pairs.items()
    ]
    meta = {"name": name, "resourceVersion": str(version), "ownerReferences": [{"name": "train"}]}
    return {"metadata": meta, "status": {"allocation": {"devices": {"results": results}}}}


def slice_raw(version: int, end: str = "2999-01-01T00:00:00Z") -> Raw:
    devices = [
        {
            "name": f"gpu-{number}-{hash}",
            "attributes": {"gpu.nvidia.com/uuid": {"string": f"GPU-{number}"}, "hash": {"string": hash}},
            "taints": [{"key": "gpuwarden.io/evidence-ends", "timeAdded": end}],
        }
        for number in range(2)
        for hash in (HASH, "bb22")
    ]
    spec = {"driver": "attested.gpuwarden.io", "pool": {"name": "node-a"}, "devices": devices}
    return {"metadata": {"resourceVersion": str(version)}, "spec": spec}


def seen(*pods: Raw, claims: tuple[Raw, ...] = (), end: str = "2999-01-01T00:00:00Z") -> SeenObjects:
    objects = SeenObjects(None, "ml")  # type: ignore[arg-type]
    objects.see_slice(slice_raw(1, end), is_deleted=False)
    for raw in pods:
        objects.see_pod(raw, is_deleted=False)
    for raw in claims:
        objects.see_claim(raw, is_deleted=False)
    return objects


def churn(objects: SeenObjects, proven_for: timedelta = timedelta(hours=1)) -> ProofChurn:
    """Version n is written n seconds after the start of the evidence."""
    proofs: Any = SimpleNamespace(kube=None, namespace="ml", cluster=SimpleNamespace(etcd=""))
    made = ProofChurn(proofs, UUIDS, (HASH,), 1, lambda *_: {})
    made.seen, made.over = objects, NOW + timedelta(hours=1)
    made.periods = defaultdict(list, {"node-a": [Period(HASH, NOW, NOW + proven_for)]})

    def moment(version: int) -> Any:
        return NOW + timedelta(seconds=version)

    made.clock = SimpleNamespace(earliest=moment, latest=moment)  # type: ignore[assignment]
    return made


def workload_of(objects: SeenObjects) -> Workload:
    return Workload(None, objects, UUIDS)  # type: ignore[arg-type]


FAULTS: dict[str, tuple[Callable[[], list[str]], str]] = {
    "sound": (lambda: churn(seen(pod_raw(2), claims=(claim_raw(2),))).faults(), ""),
    "device of two claims": (
        lambda: seen(pod_raw(2), claims=(claim_raw(2), claim_raw(3, "two"))).faults,
        "is of one and of two",
    ),
    "pair of two GPUs": (
        lambda: churn(seen(pod_raw(2), claims=(claim_raw(2, proof="gpu-1-aa11"),))).faults(),
        "with ('attested.gpuwarden.io', 'node-a', 'gpu-1-aa11')",
    ),
    "proof for another hash": (
        lambda: churn(seen(pod_raw(2), claims=(claim_raw(2, proof="gpu-0-bb22"),))).faults(),
        "asks for aa11",
    ),
    "another node": (
        lambda: churn(seen(pod_raw(2, "node-b"), claims=(claim_raw(2),))).faults(),
        "is on node-b",
    ),
    "claim of a pod that was not seen": (
        lambda: list(churn(seen(claims=(claim_raw(2),))).unseen()),
        "train has a claim",
    ),
    "bound without a claim": (lambda: list(churn(seen(pod_raw(2))).unseen()), "train is bound without a claim"),
    "sound workload": (lambda: workload_of(seen(pod_raw(2), claims=(claim_raw(2),))).faults(), ""),
    "pod that was ended": (
        lambda: workload_of(seen(pod_raw(2), pod_raw(3, deletionTimestamp="now"))).faults(),
        "train was ended",
    ),
    "pod that has failed": (lambda: workload_of(seen(pod_raw(2, phase="Failed"))).faults(), "train was ended"),
    "other GPU than reserved": (
        lambda: workload_of(seen(pod_raw(2), claims=(claim_raw(2, gpu="gpu-1"),))).faults(),
        "is allocated {'GPU-1'}",
    ),
}


@pytest.mark.parametrize(("found", "words"), FAULTS.values(), ids=FAULTS)
def test_fault_is_found(found: Callable[[], list[str]], words: str) -> None:
    assert (words in "; ".join(found())) if words else found() == []


def test_lateness_is_counted_from_the_end_of_the_evidence() -> None:
    late = churn(seen(pod_raw(20), claims=(claim_raw(20),)), proven_for=timedelta(seconds=15))
    assert late.seconds_bound_late() == [5]
    in_time = churn(seen(pod_raw(10), claims=(claim_raw(10),)), proven_for=timedelta(seconds=15))
    assert in_time.seconds_bound_late() == [0]
    never_proven = churn(seen(pod_raw(10, "node-b"), claims=(claim_raw(10),)))
    assert never_proven.seconds_bound_late() == [float("inf")]


def test_eviction_is_counted_from_the_end_of_the_device() -> None:
    end = (NOW + timedelta(seconds=10)).isoformat()
    marked = seen(pod_raw(2), pod_raw(13, deletionTimestamp="now"), claims=(claim_raw(2),), end=end)
    assert churn(marked).seconds_until_marked() == [3]
    assert churn(seen(pod_raw(2), claims=(claim_raw(2),), end=end)).seconds_until_marked() == [float("inf")]
    assert churn(seen(pod_raw(2), claims=(claim_raw(2),))).seconds_until_marked() == []
