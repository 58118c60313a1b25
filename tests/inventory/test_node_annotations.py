"""The device labels annotation of a node: read completely or not at all, with every mistake reported."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from webhook.core.device import UUID, Device, DeviceUuid
from webhook.inventory.node_annotations import (
    MAX_DEVICES,
    MAX_LABEL,
    MAX_LABELS,
    AnnotatedDevices,
    UnreadableDevicesError,
    devices_in,
)

# Names that would show a container other GPUs than one, or none.
NO_UUIDS = [
    "all",
    "none",
    "void",
    "0",
    "",
    "GPU 1",
    "GPU-1,GPU-2",
    "GPU-",
    "gpu-1",
    "GPU-1\n",
    "nvidia.com/gpu=all",
    "GPU-" + "x" * 124,
]


def encoded(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    return base64.b64encode(text.encode()).decode()


def mistakes(text: str) -> tuple[str, ...]:
    with pytest.raises(UnreadableDevicesError) as refused:
        devices_in(text)
    return refused.value.mistakes


def test_annotated_devices_have_their_labels() -> None:
    said = {"GPU-1": ["fudo.org/gpu.memory-80g", "model=h100"], "GPU-2": []}
    assert devices_in(encoded(said)).devices == (
        Device(DeviceUuid("GPU-1"), labels=frozenset({"fudo.org/gpu.memory-80g", "model=h100"})),
        Device(DeviceUuid("GPU-2")),
    )


def test_annotation_may_list_no_devices() -> None:
    assert devices_in(encoded({})) == AnnotatedDevices()


def test_wrapped_base64_is_accepted() -> None:
    text = encoded({"GPU-1": ["a"], "GPU-2": ["b"]})
    assert devices_in("\n".join(text[at : at + 8] for at in range(0, len(text), 8)) + "\n") == devices_in(text)


def test_duplicate_labels_are_merged() -> None:
    assert devices_in(encoded({"GPU-1": ["a", "a"]})).devices == (Device(DeviceUuid("GPU-1"), labels=frozenset({"a"})),)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        pytest.param("", "the decoded content is not JSON", id="empty"),
        pytest.param("{}", "it is not base64", id="plain JSON"),
        pytest.param("e30", "it is not base64", id="cut off"),
        pytest.param("schön", "it is not base64", id="not ASCII"),
        pytest.param("/w==", "the decoded content is not JSON", id="not UTF-8"),
        pytest.param(encoded('{"GPU-1": ['), "the decoded content is not JSON", id="truncated JSON"),
        pytest.param(encoded("[" * 100_000), "the decoded content is not JSON", id="deeply nested"),
        pytest.param(encoded([]), "the JSON is not an object from GPU UUID to a list of labels", id="a list"),
        pytest.param(encoded("null"), "the JSON is not an object from GPU UUID to a list of labels", id="null"),
        pytest.param(encoded('{"GPU-1": [], "GPU-1": ["a"]}'), "'GPU-1' is listed twice", id="twice"),
        pytest.param(encoded({"GPU-1": {"a": 1}}), "'GPU-1': its labels are not a list", id="labels as an object"),
        pytest.param(encoded({"GPU-1": None}), "'GPU-1': its labels are not a list", id="null labels"),
        pytest.param(encoded({"GPU-1": [5]}), "'GPU-1': 5 is not a string", id="a number for a label"),
        pytest.param(
            encoded({"GPU-1": [""]}),
            "'GPU-1': label '' is empty, longer than 320 or not printable",
            id="empty label",
        ),
        pytest.param(
            encoded('{"GPU-1": ["\\ud800"]}'),
            r"'GPU-1': label '\ud800' is empty, longer than 320 or not printable",
            id="lone surrogate",
        ),
    ],
)
def test_mistake_in_the_annotation_is_reported(text: str, mistake: str) -> None:
    assert mistakes(text) == (mistake,)


@pytest.mark.parametrize("name", NO_UUIDS)
def test_name_that_is_not_a_gpu_uuid_is_ignored_and_reported(name: str) -> None:
    found = devices_in(encoded({"GPU-1": [], name: []}))
    assert found.devices == (Device(DeviceUuid("GPU-1")),)
    assert found.ignored == (name,)
    assert found.ignored_message.endswith(": not a GPU UUID")


def test_many_ignored_names_are_counted() -> None:
    found = devices_in(encoded({f"gpu-{k}": [] for k in range(100)}))
    assert found.devices == ()
    assert found.ignored_message.endswith("'gpu-9' and 90 more: not a GPU UUID")


def test_all_mistakes_in_the_annotation_are_reported_together() -> None:
    assert mistakes(encoded({"GPU-2": [5, "x" * 321], "GPU-3": 0})) == (
        "'GPU-2': 5 is not a string",
        f"'GPU-2': label '{'x' * 59}… is empty, longer than 320 or not printable",
        "'GPU-3': its labels are not a list",
    )


def test_many_mistakes_are_counted() -> None:
    named = mistakes(encoded({f"GPU-{k}": 0 for k in range(100)}))
    assert (len(named), named[-1]) == (11, "and 90 more")


def test_annotation_limits_match_the_api_server() -> None:
    labels = [f"{k:03}".ljust(MAX_LABEL, "x") for k in range(MAX_LABELS)]
    assert len(devices_in(encoded({"GPU-1": labels})).devices[0].labels) == MAX_LABELS
    assert mistakes(encoded({"GPU-1": [*labels, "one"]})) == ("'GPU-1': 65 labels are more than 64",)
    many: dict[str, list[str]] = {f"GPU-{k}": [] for k in range(MAX_DEVICES)}
    assert len(devices_in(encoded(many)).devices) == MAX_DEVICES
    assert mistakes(encoded({**many, "one": []})) == ("4097 devices are more than 4096",)


def test_annotation_limits_match_the_gpu_node_crd() -> None:
    crd = yaml.safe_load(Path("webhook/kube/install/manifests/gpunodes.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["devices"]
    uuid, labels = schema["items"]["properties"]["uuid"], schema["items"]["properties"]["labels"]
    assert schema["maxItems"] == MAX_DEVICES
    assert (labels["maxItems"], labels["items"]["maxLength"]) == (MAX_LABELS, MAX_LABEL)
    assert uuid["pattern"] == f"^{UUID.pattern}$"
