"""The Grafana dashboard, with one panel for each question of an operator."""

from collections.abc import Sequence
from typing import Any, Final

Panel = dict[str, Any]

WIDTH, HEIGHT, COLUMNS = 8, 8, 3

# Title, unit, and queries with their legends. Processes export the same series of nodes and devices, hence `max`.
QUESTIONS: Final[Sequence[tuple[str, str, Sequence[tuple[str, str]]]]] = [
    ("GPUs by state", "short", [("max by (state) (gpuwarden_devices)", "{{state}}")]),
    ("Reservations by phase", "short", [("max by (phase) (gpuwarden_reservations)", "{{phase}}")]),
    ("Nodes by evidence", "short", [("max by (state) (gpuwarden_evidence_nodes)", "{{state}}")]),
    (
        "Verdicts a second by reason",
        "reqps",
        [("sum by (reason) (rate(gpuwarden_verdicts_total[5m])) > 0", "{{reason}}")],
    ),
    (
        "Time to decide",
        "s",
        [
            (
                f"histogram_quantile({q}, sum by (le) (rate(gpuwarden_admission_duration_seconds_bucket[5m])))",
                f"p{int(q * 100)}",
            )
            for q in (0.5, 0.99)
        ],
    ),
    (
        "Time to answer a scheduler",
        "s",
        [
            (
                "histogram_quantile(0.99, sum by (le, verb) (rate(gpuwarden_extender_duration_seconds_bucket[5m])))",
                "{{verb}}",
            )
        ],
    ),
    ("Pods whose node lost its evidence", "short", [("max(gpuwarden_pods_without_evidence)", "pods")]),
    ("Age of the oldest evidence", "s", [("max by (state) (gpuwarden_evidence_age_seconds)", "{{state}}")]),
    (
        "Evidence in and out",
        "short",
        [
            ("sum by (state) (increase(gpuwarden_evidence_changes_total[15m]))", "{{state}}"),
            ("sum by (provider) (increase(gpuwarden_evidence_provider_errors_total[15m]))", "{{provider}} away"),
        ],
    ),
    (
        "Answers to challenges",
        "short",
        [("sum by (outcome) (increase(gpuwarden_evidence_proofs_total[15m]))", "{{outcome}}")],
    ),
    ("Placements lost to another replica", "short", [("sum(increase(gpuwarden_ledger_conflicts_total[5m]))", "lost")]),
    (
        "Certificates end in",
        "s",
        [("min by (listener) (gpuwarden_certificate_not_after_seconds) - time()", "{{listener}}")],
    ),
]


def panel(number: int, title: str, unit: str, queries: Sequence[tuple[str, str]]) -> Panel:
    row, column = divmod(number, COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": source}
        for at, (query, legend) in enumerate(queries)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": "gpuwarden",
        "title": "gpuwarden",
        "tags": ["gpuwarden"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [panel(number, *question) for number, question in enumerate(QUESTIONS)],
    }
