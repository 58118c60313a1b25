"""The alert rules use existing metrics, in a form that Prometheus reads."""

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.promtool import built
from tests.builders import NOW
from webhook.admission.delivered import DeliveryFault
from webhook.commands.serve import certificates
from webhook.core.evidence import EvidenceState
from webhook.core.reasons import EVENTS_ONLY, Reason
from webhook.runtime.settings import Settings
from webhook.runtime.telemetry import FleetCounts, Metrics

Raw = dict[str, Any]
FILE = Path(__file__).resolve().parents[2] / "examples/alerts/gpuwarden.rules.yaml"
DURATION = re.compile(r"([0-9]+(ms|[smhdwy]))+")


def content() -> Raw:
    found: Raw = msgspec.yaml.decode(FILE.read_bytes())
    return found


RULES: list[Raw] = [rule for group in content()["groups"] for rule in group["rules"]]
each_rule = pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])


def known_series() -> dict[str, frozenset[str]]:
    """Every series of a scrape, with its labels."""
    metrics = Metrics()
    metrics.watch_fleet(FleetCounts)
    metrics.watch_evidence(int)
    metrics.watch_ages(dict)
    metrics.watch_deliveries(lambda: {fault.value: 0 for fault in DeliveryFault})
    metrics.observe_verdict("CREATE", "admit", "Admitted", 0.001)
    metrics.observe_extender("filter", "passed", 0.001)
    metrics.count_provider_error("spire-server")
    metrics.show_certificate("tls", NOW)
    metrics.show_review_callers("none")
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name: frozenset(sample.labels) for sample in samples}


SERIES = known_series()


def test_file_is_a_valid_rule_file() -> None:
    found = content()
    assert found.keys() == {"groups"}
    assert all(group.keys() == {"name", "rules"} for group in found["groups"])
    names = [group["name"] for group in found["groups"]]
    alerts = [rule["alert"] for rule in RULES]
    assert (len(set(names)), len(set(alerts))) == (len(names), len(alerts))


@each_rule
def test_rule_has_the_required_fields(rule: Raw) -> None:
    assert (
        {"alert", "expr", "labels", "annotations"} <= rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    )
    assert DURATION.fullmatch(rule.get("for", "1m"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert all(rule["expr"].count(a) == rule["expr"].count(b) for a, b in ("()", "[]", "{}"))


@each_rule
def test_rule_uses_existing_metrics_and_labels(rule: Raw) -> None:
    asked = re.findall(r"(gpuwarden_\w+)(?:\{([^}]*)\})?", rule["expr"])
    assert asked
    for name, matchers in asked:
        assert name in SERIES
        for label, _, values in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers):
            assert label in SERIES[name]
            assert set(values.split("|")) <= WORDS[label, name], values


@pytest.mark.parametrize("outcome", ["refused", "away"])
def test_missing_bundle_alert_fires_before_evidence_expires(outcome: str) -> None:
    """Without an alert the evidence of every node would expire, after `--max-bundle-age` and the validity of a
    proof."""
    asked = f'gpuwarden_trust_bundle_looks_total{{outcome="{outcome}"}}'
    assert [rule["for"] for rule in RULES if asked in rule["expr"]] == ["5m"]
    assert Metrics().registry.get_sample_value("gpuwarden_trust_bundle_looks_total", {"outcome": outcome}) == 0


def test_absence_alert_uses_a_metric_that_only_serve_exposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`absent` matches a missing series, not a zero: so the metric must be one that `serve` always has and no other
    command has."""
    (rule,) = [rule for rule in RULES if "absent(" in rule["expr"]]
    assert rule["labels"]["severity"] == "critical"
    asked = re.search(r'absent\((\w+)\{listener="tls"\}\)', rule["expr"])
    assert asked is not None
    metrics = Metrics()
    assert metrics.registry.get_sample_value(asked[1], {"listener": "tls"}) is None
    metrics.show_certificate("issued", NOW)  # as `gpuwarden certs` does
    assert metrics.registry.get_sample_value(asked[1], {"listener": "tls"}) is None
    monkeypatch.chdir(tmp_path)  # the directory for the development certificate
    for name in certificates(Settings()):
        metrics.show_certificate(name, NOW)
    assert metrics.registry.get_sample_value(asked[1], {"listener": "tls"}) is not None


def test_prometheus_accepts_the_rules() -> None:
    promtool = built()
    if promtool is None:
        pytest.skip("promtool is not built: `make promtool` builds it, in some minutes, with Go")
    done = subprocess.run([promtool, "check", "rules", FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, f"{len(RULES)} rules found" in done.stdout) == (0, True), done.stdout + done.stderr


STATES = {state.value for state in EvidenceState}
DEVICES = {"available", "pending", "assigned", "expired", "orphaned", "quarantined"}
WORDS: dict[tuple[str, str], set[str]] = {
    ("state", "gpuwarden_evidence_nodes"): STATES,
    ("state", "gpuwarden_evidence_changes_total"): STATES,
    ("state", "gpuwarden_devices"): DEVICES,
    ("fault", "gpuwarden_pods_with_wrong_gpus"): {fault.value for fault in DeliveryFault},
    ("listener", "gpuwarden_certificate_not_after_seconds"): {"tls", "extender"},
    ("proof", "gpuwarden_review_callers"): {"none", "token", "certificate"},
    ("outcome", "gpuwarden_evidence_proofs_total"): {"accepted", "replayed"},
    ("outcome", "gpuwarden_trust_bundle_looks_total"): {"renewed", "confirmed", "refused", "away"},
    ("reason", "gpuwarden_verdicts_total"): {reason.value for reason in Reason if reason not in EVENTS_ONLY},
}
