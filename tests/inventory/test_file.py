"""The inventory file: read completely or not at all, with every mistake reported."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from webhook.core.device import Device, DeviceUuid, Node, Taint
from webhook.core.evidence import Evidence
from webhook.inventory import InventoryUnavailableError
from webhook.inventory.file import InventoryFile

FULL = """
nodes:
  - name: node-a
    labels: {zone: a}
    evidence: {hash: "sha256:aa11", since: 2026-01-01T00:00:00Z, until: "2026-02-01T00:00:00+01:00"}
    ready: false
    unschedulable: true
    taints: [{key: dedicated, value: ml, effect: NoExecute}]
    devices:
      - {uuid: GPU-0001, index: 0, model: H100, memory: 80Gi, serial: "16503", labels: [model=h100, fast], shares: 2}
      - {uuid: GPU-0002, serial: 16504, healthy: false}
  - {name: node-b}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "inventory.yaml"


def read(path: Path, text: str) -> InventoryFile:
    path.write_text(text)
    return InventoryFile(path)


async def test_all_fields_of_the_file_are_read(path: Path) -> None:
    file = read(path, FULL)
    assert await file.poll() == {
        "node-a": Node(
            name="node-a",
            labels={"kubernetes.io/hostname": "node-a", "zone": "a"},
            devices=(
                Device(DeviceUuid("GPU-0001"), 0, "H100", "80Gi", "16503", frozenset({"model=h100", "fast"}), 2),
                Device(DeviceUuid("GPU-0002"), serial="16504", is_healthy=False),
            ),
            is_ready=False,
            is_cordoned=True,
            taints=(Taint("dedicated", "ml", "NoExecute"),),
        ),
        "node-b": Node("node-b", {"kubernetes.io/hostname": "node-b"}),
    }
    assert file.evidence == {
        "node-a": Evidence(
            "node-a",
            "sha256:aa11",
            "static",
            datetime(2026, 1, 1, tzinfo=UTC),
            datetime(2026, 1, 31, 23, tzinfo=UTC),
        )
    }


async def test_json_is_accepted(path: Path) -> None:
    file = read(path, json.dumps({"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-0001"}]}]}))
    nodes = await file.poll()
    assert nodes is not None
    assert nodes["node-a"].devices == (Device(DeviceUuid("GPU-0001")),)


async def test_file_is_parsed_again_only_when_its_content_changes(path: Path) -> None:
    file = read(path, FULL)
    assert await file.poll() is not None
    assert await file.poll() is None
    path.write_text(FULL)  # touched, same content
    assert await file.poll() is None
    path.write_text("nodes: []")
    assert await file.poll() == {}


async def test_file_replaced_through_a_symlink_is_noticed(tmp_path: Path) -> None:
    for name, text in (("old", FULL), ("new", "nodes: []")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "inventory.yaml").write_text(text)
    (tmp_path / "data").symlink_to("old")
    file = InventoryFile(tmp_path / "data" / "inventory.yaml")
    assert await file.poll() is not None
    (tmp_path / "swap").symlink_to("new")
    (tmp_path / "swap").rename(tmp_path / "data")
    assert await file.poll() == {}


MISTAKES = """
nodes:
  - {name: ""}
  - {name: node-a, label: {}}
  - {name: node-b, devices: [{uuid: "GPU 1"}, {index: 0}, {uuid: GPU-2, shares: 0}, {uuid: GPU-3}, {uuid: GPU-3}]}
  - {name: node-c, evidence: {hash: [x]}}
  - {name: node-d}
  - {name: node-d}
  - just text
more: 1
"""


async def test_all_mistakes_of_the_file_are_reported_together(path: Path) -> None:
    with pytest.raises(InventoryUnavailableError) as refused:
        await read(path, MISTAKES).poll()
    assert refused.value.mistakes == (
        "unknown member 'more'",
        "nodes[0].name: a node name has 1 to 253 characters",
        "nodes[1]: Object contains unknown field `label`",
        "nodes[3]: Expected `str`, got `array` - at `$.evidence.hash`",
        "nodes[6]: Expected `object`, got `str`",
        "nodes: node-d is listed twice",
        "nodes[2].devices[0].uuid: 'GPU 1' is not a GPU UUID: GPU-… or MIG-…",
        "nodes[2].devices[1]: Object missing required field `uuid`",
        "nodes[2].devices[2].shares: 0 is not between 1 and 128",
        "nodes[2]: device GPU-3 is listed twice",
    )
    assert str(refused.value).startswith(f"{path}: unknown member 'more'; nodes[0].name: ")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nodes: {}", "{", "a: [", "nodes: 5", "{'nodes': ", "!!python/object/apply:os.system [true]", "\0"],
)
async def test_content_that_is_no_inventory_is_rejected(path: Path, text: str) -> None:
    with pytest.raises(InventoryUnavailableError):
        await read(path, text).poll()


async def test_missing_file_is_reported_in_a_sentence(path: Path) -> None:
    with pytest.raises(InventoryUnavailableError, match="No such file or directory"):
        await InventoryFile(path).poll()
