"""The strings that others read and write. A change breaks manifests, so each string is repeated here."""

import pytest

from webhook.core import claim_keys, keys
from webhook.core.keys import Key, is_protected_annotation


@pytest.mark.parametrize(
    ("key", "names"),
    [
        pytest.param(keys.OPT_IN, ("gpuwarden.io/enabled", "scheduler.radix.ai/enabled"), id="opt-in"),
        pytest.param(keys.GPU_UUID, ("gpuwarden.io/gpu-uuid", "fudo.org/gpu.uuid"), id="gpu-uuid"),
        pytest.param(
            keys.RESERVATION_ID, ("gpuwarden.io/reservation-id", "fudo.org/gpu.reservation-id"), id="reservation-id"
        ),
        pytest.param(keys.NODE, ("gpuwarden.io/node", "fudo.org/gpu.node"), id="node"),
        pytest.param(keys.CLAIM, ("gpuwarden.io/claim",), id="claim"),
        pytest.param(
            keys.PRIORITY_SCORE, ("gpuwarden.io/priority-score", "scheduler.radix.ai/priority-score"), id="score"
        ),
        pytest.param(keys.CHOSEN_GPU, ("gpuwarden.io/chosen-gpu", "scheduler.radix.ai/chosen-gpu"), id="chosen-gpu"),
        pytest.param(
            keys.DECISION_TIMESTAMP,
            ("gpuwarden.io/decision-timestamp", "scheduler.radix.ai/decision-timestamp"),
            id="decision-timestamp",
        ),
    ],
)
def test_key_names_do_not_change(key: Key, names: tuple[str, ...]) -> None:
    assert key.names == names
    assert key.name == names[0]


@pytest.mark.parametrize(
    ("constant", "text"),
    [
        pytest.param(keys.DOMAIN, "gpuwarden.io", id="domain"),
        pytest.param(keys.ASSIGNER_DOMAIN, "fudo.org", id="assigner-domain"),
        pytest.param(keys.CDI_DOMAIN, "cdi.k8s.io", id="cdi-domain"),
        pytest.param(claim_keys.REQUIREMENT_PREFIX, "gpuwarden.io/gpu.", id="requirement-prefix"),
        pytest.param(claim_keys.ASSIGNER_REQUIREMENT, "fudo.org/gpu", id="assigner-requirement"),
        pytest.param(claim_keys.ASSIGNER_ASSIGN, "fudo.org/gpu.assign", id="assigner-assign"),
        pytest.param(keys.ASSIGNER_DEVICE_LABELS, "fudo.org/gpu.device.labels", id="assigner-device-labels"),
        pytest.param(keys.MANAGED_BY, "app.kubernetes.io/managed-by", id="managed-by"),
        pytest.param(keys.NVIDIA_ENV, "NVIDIA_VISIBLE_DEVICES", id="nvidia-env"),
        pytest.param(keys.CUDA_ENV, "CUDA_VISIBLE_DEVICES", id="cuda-env"),
        pytest.param(keys.NVIDIA_RESOURCES, "nvidia.com/", id="nvidia-resources"),
        pytest.param(keys.HOSTNAME_LABEL, "kubernetes.io/hostname", id="hostname"),
        pytest.param(keys.POD_INDEX_LABEL, "apps.kubernetes.io/pod-index", id="pod-index"),
        pytest.param(keys.MAPS_LABEL, "gpuwarden.io/maps", id="maps"),
        pytest.param(keys.LOGICAL_NODE_LABEL, "gpu-node-name", id="logical-node"),
        pytest.param(keys.JOB_TYPE, "app.kubernetes.io/job-type", id="job-type"),
        pytest.param(keys.GPU_MEMORY, "gpu.mem.gi", id="gpu-memory"),
        pytest.param(keys.BATCH_SIZE, "ml.batch_size", id="batch-size"),
        pytest.param(keys.TENANT, "scheduler.radix.ai/tenant", id="tenant"),
    ],
)
def test_names_of_other_projects_do_not_change(constant: str, text: str) -> None:
    assert constant == text


def test_both_gpu_variables_are_set() -> None:
    assert keys.GPU_ENV == ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def test_list_of_written_keys_is_complete() -> None:
    assert {
        "gpuwarden.io/gpu-uuid",
        "gpuwarden.io/reservation-id",
        "gpuwarden.io/node",
        "gpuwarden.io/claim",
        "fudo.org/gpu.uuid",
        "fudo.org/gpu.reservation-id",
        "fudo.org/gpu.node",
    } == keys.OUTPUT_NAMES


@pytest.mark.parametrize(
    ("key", "is_protected"),
    [
        pytest.param("gpuwarden.io/gpu-uuid", True, id="ours"),
        pytest.param("fudo.org/gpu.node", True, id="alias"),
        pytest.param("gpuwarden.io/claim", True, id="claim"),
        pytest.param("cdi.k8s.io/gpu-assignment", True, id="cdi"),
        pytest.param("cdi.k8s.io/anything", True, id="cdi-of-another-name"),
        pytest.param("gpuwarden.io/required-hash", False, id="a-wish"),
        pytest.param("cdi.k8s.io", False, id="domain-alone"),
        pytest.param("mycdi.k8s.io/x", False, id="another-domain"),
        pytest.param("team", False, id="users-own"),
    ],
)
def test_only_outputs_and_cdi_annotations_are_protected(key: str, is_protected: bool) -> None:
    assert is_protected_annotation(key) is is_protected
