"""The query and the rendering of results. `tests/e2e` runs queries with a database."""

import json
from typing import Any

import pytest

from tests.export.records import NOW, later
from webhook.core.errors import GpuwardenError
from webhook.export.history import PastUse, UseQuery, rendered, use_query
from webhook.export.tables import Tables


def past_use(**changes: Any) -> PastUse:
    known: dict[str, Any] = {
        "since": NOW,
        "until": later(3600),
        "cluster": "prod",
        "node": "gpu-a",
        "serial": "1760000000011",
        "chassis": "1820000000042",
        "gpu_uuid": "GPU-0",
        "index": 0,
        "minor": 0,
        "model": "NVIDIA H100",
        "machine": "i-0",
        "namespace": "train",
        "pod": "job-0",
        "pod_uid": "uid-0",
        "owner": "Job/train",
        "evidence_hash": "sha256:abc",
        "reservation": "reservation-0",
    }
    return PastUse(**known | changes)


def test_pod_flag_is_namespace_and_name() -> None:
    assert UseQuery.from_flags(pod="train/job-0") == UseQuery(namespace="train", pod="job-0")


@pytest.mark.parametrize("pod", ["job-0", "/job-0", "train/"])
def test_a_pod_without_either_is_refused(pod: str) -> None:
    with pytest.raises(GpuwardenError, match="allowed: NAMESPACE/NAME"):
        UseQuery.from_flags(pod=pod)


def test_query_without_conditions_is_refused() -> None:
    with pytest.raises(GpuwardenError, match="set at least one of --serial, --pod, --hash and --uuid"):
        UseQuery.from_flags()


def test_values_are_parameters_and_identifiers_are_quoted() -> None:
    text = use_query(Tables.named('a"b'), UseQuery.from_flags(serial="'; DROP", hash="x")).as_string()
    assert 'FROM "a""b_history" WHERE gpu_uuid IN' in text
    assert "DROP" not in text
    assert "AND evidence_hash = %(hash)s ORDER BY" in text


def test_text_form_is_a_table_with_the_main_columns() -> None:
    assert rendered([past_use(), past_use(until=None, owner=None, pod=None)], "text").splitlines() == [
        "SINCE                        UNTIL                        CLUSTER  NODE   SERIAL         GPU_UUID"
        "  POD          OWNER      EVIDENCE_HASH",
        "2026-01-01T00:00:00.123456Z  2026-01-01T01:00:00.123456Z  prod     gpu-a  1760000000011  GPU-0   "
        "  train/job-0  Job/train  sha256:abc",
        "2026-01-01T00:00:00.123456Z  still                        prod     gpu-a  1760000000011  GPU-0   "
        "  -            -          sha256:abc",
    ]


def test_control_characters_are_escaped_in_text_form() -> None:
    said = rendered([past_use(node="\x1b]0;owned\x07", serial="1\r2", pod="\u202ea", owner="Job/\x9b2J")], "text")
    assert all(line.isprintable() for line in said.splitlines())
    assert r"\x1b]0;owned\x07" in said
    assert r"train/\u202ea" in said


def test_empty_result_is_a_sentence() -> None:
    assert rendered([], "text") == "No uses found."
    assert json.loads(rendered([], "json")) == []


def test_json_form_has_all_columns() -> None:
    (one,) = json.loads(rendered([past_use(until=None)], "json"))
    assert one["until"] is None
    assert one["since"] == "2026-01-01T00:00:00.123456Z"
    assert one["chassis"] == "1820000000042"
