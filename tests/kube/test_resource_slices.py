"""Slices of proof devices as they are written and read again."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.builders import NOW, Raw
from webhook.core.names import MAX_SUBDOMAIN
from webhook.core.proof_devices import ProofDevice
from webhook.kube.resource_slices import UnreadableSliceError, any_slice, proof_devices_of, slice_name, slices_of
from webhook.runtime.clock import LONG_AGO

DRIVER = "gpu.nvidia.com"


def proofs(number: int, end: datetime | None = NOW + timedelta(hours=1)) -> list[ProofDevice]:
    return [ProofDevice.of(f"GPU-{k:03}", "sha256:aa11", end) for k in range(number)]


def test_slice_selects_its_node_and_each_device_ends_with_the_evidence() -> None:
    (raw,) = slices_of("node-a", proofs(1), 3, DRIVER)
    assert raw["metadata"] == {
        "name": "gpuwarden-node-a-0",
        "labels": {"app.kubernetes.io/managed-by": "gpuwarden"},
    }
    field = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
    end = "2026-03-02T13:00:00Z"
    assert raw["spec"] == {
        "driver": "attested.gpuwarden.io",
        "pool": {"name": "node-a", "generation": 3, "resourceSliceCount": 1},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        "devices": [
            {
                "name": "gpu-000-aa11",
                "attributes": {
                    "gpu.nvidia.com/uuid": {"string": "GPU-000"},
                    "hash": {"string": "aa11"},
                    "index": {"int": 0},
                    "count": {"int": 1},
                    "mode": {"string": "native"},
                },
                "taints": [{"key": "gpuwarden.io/evidence-ends", "effect": "NoExecute", "timeAdded": end}],
            }
        ],
    }


def test_closed_device_has_a_taint_that_no_claim_tolerates() -> None:
    (closed,) = (one.closed_by(NOW) for one in proofs(1, NOW))
    (raw,) = slices_of("node-a", [closed], 1, DRIVER)
    ends, ended = raw["spec"]["devices"][0]["taints"]
    assert ended == {"key": "gpuwarden.io/evidence-ended", "effect": "NoSchedule", "timeAdded": ends["timeAdded"]}
    assert proof_devices_of(raw) == (closed,)


def test_replacement_keeps_the_metadata() -> None:
    first, second = (slices_of("node-a", proofs(number), 1, DRIVER)[0] for number in (1, 2))
    meta = {**first["metadata"], "resourceVersion": "7", "ownerReferences": [{"name": "x"}]}
    known = any_slice({**first, "metadata": meta})
    assert known.has_spec_of(first)
    assert not known.has_spec_of(second)
    assert known.replaced_by(second) == {**second, "metadata": meta}


def test_endless_proof_has_no_taint() -> None:
    (raw,) = slices_of("node-a", proofs(1, None), 1, DRIVER)
    assert "taints" not in raw["spec"]["devices"][0]


@pytest.mark.parametrize(("devices", "sizes"), [(0, []), (64, [64]), (65, [64, 1]), (130, [64, 64, 2])])
def test_slice_has_at_most_as_many_devices_as_the_api_server_accepts(devices: int, sizes: list[int]) -> None:
    raws = slices_of("node-a", proofs(devices), 1, DRIVER)
    assert [len(raw["spec"]["devices"]) for raw in raws] == sizes
    assert {raw["spec"]["pool"]["resourceSliceCount"] for raw in raws} <= {len(sizes)}
    places = [one["attributes"] for raw in raws for one in raw["spec"]["devices"]]
    assert [(one["index"]["int"], one["count"]["int"]) for one in places] == [(k, devices) for k in range(devices)]


def test_written_devices_are_read_again() -> None:
    mapped = evolve(ProofDevice.of("GPU-y", "sha256:bb22", None), kept_for="0a1b")
    devices = [*proofs(2), ProofDevice.of("GPU-x", "sha256:bb22", None), mapped]
    (raw,) = slices_of("node-a", devices, 7, DRIVER)
    found = any_slice(raw)
    assert (found.node, found.generation, list(found.devices)) == ("node-a", 7, devices)


@pytest.mark.parametrize(
    "moment", [None, "0001-01-01T00:00:00Z", "9999-01-01T00:00:00Z"], ids=["missing", "early", "late"]
)
def test_end_that_we_never_wrote_counts_as_past(moment: str | None) -> None:
    (raw,) = slices_of("node-a", proofs(1), 1, DRIVER)
    raw["spec"]["devices"][0]["taints"][0]["timeAdded"] = moment
    assert proof_devices_of(raw)[0].end == LONG_AGO


def without(raw: Raw, *path: str) -> Raw:
    inner: Any = raw
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return raw


@pytest.mark.parametrize("path", [("spec",), ("spec", "pool"), ("spec", "driver"), ("spec", "pool", "name")])
def test_object_that_is_no_slice_is_refused(path: tuple[str, ...]) -> None:
    (raw,) = slices_of("node-a", proofs(1), 1, DRIVER)
    with pytest.raises(UnreadableSliceError):
        proof_devices_of(without(raw, *path))


def test_slice_of_another_driver_is_refused() -> None:
    (raw,) = slices_of("node-a", proofs(1), 1, DRIVER)
    raw["spec"]["driver"] = DRIVER
    with pytest.raises(UnreadableSliceError, match="a slice of the driver"):
        proof_devices_of(raw)


def test_names_of_slices_are_valid_and_differ_by_node() -> None:
    long, other = "a" * 200 + "." + "b" * 52, "a" * 200 + "." + "c" * 52
    names = {slice_name(node, k) for node in ("node-a", long, other) for k in (0, 1)}
    assert len(names) == 6
    assert max(map(len, names)) <= MAX_SUBDOMAIN


def test_end_is_written_in_utc() -> None:
    end = datetime.fromisoformat("2026-03-02T14:00:00+02:00")
    (raw,) = slices_of("node-a", proofs(1, end), 1, DRIVER)
    assert raw["spec"]["devices"][0]["taints"][0]["timeAdded"] == "2026-03-02T12:00:00Z"
    assert proof_devices_of(raw)[0].end == end.astimezone(UTC)
