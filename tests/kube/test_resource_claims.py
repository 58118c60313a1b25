"""What a ResourceClaim has been allocated."""

from typing import Any

import msgspec
import pytest

from tests.builders import Raw
from webhook.kube.resource_claims import AllocatedDevice, allocated_claim


def claim(**status: Any) -> Raw:
    return {"metadata": {"name": "train-gpus", "namespace": "ml", "uid": "c1"}, "status": status}


RESULT = {"driver": "gpu.nvidia.com", "pool": "node-a", "device": "gpu-0", "request": "gpu0"}


def test_devices_and_pods_of_an_allocated_claim() -> None:
    pods = [{"resource": "pods", "name": "train", "uid": "p1"}, {"resource": "others", "name": "x", "uid": "x1"}]
    found = allocated_claim(claim(allocation={"devices": {"results": [RESULT]}}, reservedFor=pods))
    assert found is not None
    assert (found.uid, found.namespace, found.name, found.pods) == ("c1", "ml", "train-gpus", ("p1",))
    assert found.devices == (AllocatedDevice("gpu.nvidia.com", "node-a", "gpu-0", "gpu0"),)


@pytest.mark.parametrize(
    "raw",
    [
        claim(),
        claim(allocation={}),
        claim(allocation={"devices": {}}),
        claim(allocation={"devices": {"results": []}}),
        {"metadata": {"name": "train-gpus", "uid": "c1"}},
    ],
)
def test_claim_without_devices_is_not_allocated(raw: Raw) -> None:
    assert allocated_claim(raw) is None


def test_object_that_is_no_claim_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        allocated_claim(claim(allocation={"devices": {"results": [{"driver": "gpu.nvidia.com"}]}}))
