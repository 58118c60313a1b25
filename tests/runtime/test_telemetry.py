import json
import logging
import warnings
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from webhook.runtime.telemetry import FleetCounts, Metrics, configure_logging

NOON = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)
pytestmark = pytest.mark.usefixtures("restored_logging")


def noon() -> datetime:
    return NOON


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


def test_log_line_is_json_with_ordered_keys(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", noon)
    structlog.get_logger().info("admission decided", uid="u-1", verdict="admit", took_ms=0.7)
    assert capsys.readouterr() == (
        "",
        '{"timestamp":"2026-03-01T12:00:00.250Z","level":"info","event":"admission decided",'
        '"uid":"u-1","verdict":"admit","took_ms":0.7}\n',
    )


@pytest.mark.parametrize("source", ["own", "library"])
@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("trace", ["debug", "info", "warning", "error", "critical"]),
        ("debug", ["debug", "info", "warning", "error", "critical"]),
        ("info", ["info", "warning", "error", "critical"]),
        ("warn", ["warning", "error", "critical"]),
        ("error", ["error", "critical"]),
        ("fatal", ["critical"]),
        ("report", ["critical"]),
    ],
)
@pytest.mark.defect("assigner-21")
def test_level_filters_own_and_library_lines(
    level: str, seen: list[str], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(level, noon)
    log: Any = structlog.get_logger() if source == "own" else logging.getLogger("hypercorn.error")
    for word in ("debug", "info", "warning", "error", "critical"):
        getattr(log, word)("said")
    assert [line["level"] for line in lines(capsys)] == seen


def test_last_configured_level_applies(capsys: pytest.CaptureFixture[str]) -> None:
    log = structlog.get_logger()
    for level in ("info", "error", "info"):
        configure_logging(level, noon)
        log.info("seen at", level=level)
        logging.getLogger("asyncio").info("seen too")
    assert [line["event"] for line in lines(capsys)] == ["seen at", "seen too"] * 2


def test_library_lines_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", noon)
    logging.getLogger("hypercorn.error").info("Running on %s", "https://127.0.0.1:8443")
    assert capsys.readouterr().err == (
        '{"timestamp":"2026-03-01T12:00:00.250Z","level":"info","event":"Running on https://127.0.0.1:8443",'
        '"logger":"hypercorn.error"}\n'
    )


@pytest.mark.parametrize("name", ["hpack.hpack", "httpcore.http11", "kubernetes.client.rest", "urllib3.connection"])
def test_libraries_that_log_tokens_do_not_log_at_debug(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("trace", noon)
    logging.getLogger(name).debug("authorization: Bearer abc")
    logging.getLogger(name).info("harmless")
    assert [line["event"] for line in lines(capsys)] == ["harmless"]


def test_traceback_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", noon)
    empty: dict[str, str] = {}
    try:
        empty["gone"]
    except KeyError:
        structlog.get_logger().exception("own")
        logging.getLogger("asyncio").exception("theirs")
    own, theirs = lines(capsys)
    assert (own["event"], theirs["event"]) == ("own", "theirs")
    for line in (own, theirs):
        assert line["exception"].startswith("Traceback")
        assert line["exception"].endswith("KeyError: 'gone'")


def test_warnings_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        configure_logging("info", noon)
        warnings.warn("old ways", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    (line,) = lines(capsys)
    assert (line["level"], line["logger"]) == ("warning", "py.warnings")
    assert "DeprecationWarning: old ways" in line["event"]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        pytest.param("caf\udce9", "caf\udce9", id="file-name-that-is-not-utf-8"),
        pytest.param("a\nb", "a\nb", id="line-break"),
        pytest.param({1, 2} - {2}, [1], id="set"),
        pytest.param(ValueError("x"), "ValueError('x')", id="exception"),
        pytest.param({(1, 2): 3, "a": 4}, {"(1, 2)": 3, "a": 4}, id="key-that-is-not-a-string"),
        pytest.param(float("nan"), None, id="not-a-number"),
    ],
)
def test_any_value_can_be_logged(value: object, written: object, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", noon)
    structlog.get_logger().info("odd", value=value)
    (line,) = lines(capsys)
    assert line["value"] == written


def samples(metrics: Metrics) -> dict[str, float]:
    text = metrics.render()[0].decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def families(metrics: Metrics) -> dict[str, str]:
    kinds = (line.split(" ") for line in metrics.render()[0].decode().splitlines() if line.startswith("# TYPE "))
    return {name: kind for _, _, name, kind in kinds}


def test_metric_names_and_types() -> None:
    metrics = Metrics()
    metrics.watch_fleet(FleetCounts)
    metrics.watch_evidence(int)
    metrics.watch_ages(dict)
    metrics.watch_audit(dict)
    metrics.watch_proofs(dict)
    metrics.watch_deliveries(dict)
    metrics.watch_plugins(int)
    assert families(metrics) == {
        "gpuwarden_admission_duration_seconds": "histogram",
        "gpuwarden_verdicts_total": "counter",
        "gpuwarden_events_total": "counter",
        "gpuwarden_evidence_proofs_total": "counter",
        "gpuwarden_trust_bundle_looks_total": "counter",
        "gpuwarden_evidence_changes_total": "counter",
        "gpuwarden_evidence_provider_errors_total": "counter",
        "gpuwarden_evidence_age_seconds": "gauge",
        "gpuwarden_pods_without_evidence": "gauge",
        "gpuwarden_proof_devices": "gauge",
        "gpuwarden_proof_slice_writes_total": "counter",
        "gpuwarden_ledger_conflicts_total": "counter",
        "gpuwarden_certificate_reloads_total": "counter",
        "gpuwarden_certificate_not_after_seconds": "gauge",
        "gpuwarden_file_reloads_total": "counter",
        "gpuwarden_http_requests_total": "counter",
        "gpuwarden_review_callers": "gauge",
        "gpuwarden_devices": "gauge",
        "gpuwarden_devices_available": "gauge",
        "gpuwarden_reservations": "gauge",
        "gpuwarden_audit_findings": "gauge",
        "gpuwarden_pods_with_wrong_gpus": "gauge",
        "gpuwarden_nodes_with_device_plugin": "gauge",
        "gpuwarden_evidence_nodes": "gauge",
        "gpuwarden_extender_duration_seconds": "histogram",
        "gpuwarden_extender_nodes_total": "counter",
        "gpuwarden_scoring_total": "counter",
        "gpuwarden_scoring_duration_seconds": "histogram",
    }


def test_verdict_is_timed_and_counted() -> None:
    metrics = Metrics()
    metrics.observe_verdict("CREATE", "admit", "Admitted", 0.0004)
    metrics.observe_verdict("CREATE", "admit", "Admitted", 20)
    metrics.observe_verdict("CREATE", "deny", "NoFreeDevice", 0.003)
    found = samples(metrics)
    name, admit = "gpuwarden_admission_duration_seconds", 'operation="CREATE",verdict="admit"'
    assert found[f'{name}_bucket{{le="0.0005",{admit}}}'] == 1
    assert found[f'{name}_bucket{{le="10.0",{admit}}}'] == 1
    assert found[f'{name}_bucket{{le="+Inf",{admit}}}'] == 2
    assert found[f"{name}_sum{{{admit}}}"] == pytest.approx(20.0004)
    assert found[f'{name}_count{{operation="CREATE",verdict="deny"}}'] == 1
    assert found['gpuwarden_verdicts_total{reason="Admitted"}'] == 2
    assert found['gpuwarden_verdicts_total{reason="NoFreeDevice"}'] == 1


def test_unknown_operations_share_one_series() -> None:
    metrics = Metrics()
    for word in ("PATCH", "x" * 1000, "create"):
        metrics.observe_verdict(word, "deny", "InvalidPod", 0.001)
    counts = {series: value for series, value in samples(metrics).items() if "_seconds_count" in series}
    assert counts == {'gpuwarden_admission_duration_seconds_count{operation="OTHER",verdict="deny"}': 3}


def test_reasons_and_conflicts_start_at_zero() -> None:
    found = samples(Metrics())
    assert found['gpuwarden_verdicts_total{reason="NoProvenNode"}'] == 0
    assert found["gpuwarden_ledger_conflicts_total"] == 0


def test_counters_have_the_given_labels() -> None:
    metrics = Metrics()
    metrics.count_ledger_conflict()
    metrics.count_certificate_reload("https", "refused")
    metrics.count_file_reload("inventory", "reloaded")
    metrics.count_event("DeviceVanished")
    metrics.count_evidence_change("stale")
    metrics.count_provider_error("spire-server")
    metrics.count_proof_write("deleted")
    metrics.count_http_request("/mutate", 200)
    metrics.count_http_request("/mutate", 200)
    metrics.show_certificate("https", datetime(2026, 3, 1, tzinfo=UTC))
    counted = {series: value for series, value in samples(metrics).items() if value and "verdicts" not in series}
    assert counted == {
        "gpuwarden_ledger_conflicts_total": 1,
        'gpuwarden_events_total{reason="DeviceVanished"}': 1,
        'gpuwarden_evidence_changes_total{state="stale"}': 1,
        'gpuwarden_evidence_provider_errors_total{provider="spire-server"}': 1,
        'gpuwarden_proof_slice_writes_total{outcome="deleted"}': 1,
        'gpuwarden_certificate_reloads_total{listener="https",outcome="refused"}': 1,
        'gpuwarden_file_reloads_total{file="inventory",outcome="reloaded"}': 1,
        'gpuwarden_http_requests_total{route="/mutate",status="200"}': 2,
        'gpuwarden_certificate_not_after_seconds{listener="https"}': 1772323200,
    }


def test_fleet_is_counted_at_each_scrape() -> None:
    metrics, calls = Metrics(), []

    def count() -> FleetCounts:
        calls.append(1)
        devices = {"available": 7, "assigned": len(calls), "cordoned": 8, "not-ready": 1, "stale": 4, "unproven": 5}
        return FleetCounts(devices, {"pending": 2}, {"fresh": 3}, {"fresh": 6, "absent": 1})

    metrics.watch_fleet(count)
    assert calls == []
    samples(metrics)
    assert {series: value for series, value in samples(metrics).items() if "_total" not in series} == {
        'gpuwarden_devices{state="available"}': 7,
        'gpuwarden_devices{state="not-ready"}': 1,
        'gpuwarden_devices{state="cordoned"}': 8,
        'gpuwarden_devices{state="stale"}': 4,
        'gpuwarden_devices{state="unproven"}': 5,
        'gpuwarden_devices{state="kept"}': 0,
        'gpuwarden_devices_available{evidence="fresh"}': 6,
        'gpuwarden_devices_available{evidence="stale"}': 0,
        'gpuwarden_devices_available{evidence="absent"}': 1,
        'gpuwarden_devices_available{evidence="banned"}': 0,
        'gpuwarden_devices_available{evidence="conflict"}': 0,
        'gpuwarden_devices{state="pending"}': 0,
        'gpuwarden_devices{state="assigned"}': 2,
        'gpuwarden_devices{state="expired"}': 0,
        'gpuwarden_devices{state="orphaned"}': 0,
        'gpuwarden_devices{state="quarantined"}': 0,
        'gpuwarden_devices{state="mismatched"}': 0,
        'gpuwarden_devices{state="claimed"}': 0,
        'gpuwarden_reservations{phase="pending"}': 2,
        'gpuwarden_reservations{phase="finalized"}': 0,
        'gpuwarden_reservations{phase="releasing"}': 0,
        'gpuwarden_evidence_nodes{state="fresh"}': 3,
        'gpuwarden_evidence_nodes{state="stale"}': 0,
        'gpuwarden_evidence_nodes{state="absent"}': 0,
        'gpuwarden_evidence_nodes{state="banned"}': 0,
        'gpuwarden_evidence_nodes{state="conflict"}': 0,
    }


def test_metrics_of_two_servers_are_separate() -> None:
    one, other = Metrics(), Metrics()
    one.count_ledger_conflict()
    assert samples(other)["gpuwarden_ledger_conflicts_total"] == 0


def test_content_type_is_the_text_format() -> None:
    assert Metrics().render()[1].startswith("text/plain; version=")
