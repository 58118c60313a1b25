"""The metrics of `gpuwarden export`. Pod names are not labels: their number is unbounded."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Final

from attrs import define
from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from webhook.export.delivery import ExporterState
from webhook.runtime.clock import Clock
from webhook.runtime.telemetry import Metrics

# Values of the label `reason`.
REASONS: Final = (
    "bug",
    "cut_off",
    "exit_code",
    "forbidden",
    "gone",
    "label_refused",
    "outbox",
    "refused",
    "replaced",
    "store",
    "timeout",
    "too_large",
    "unavailable",
    "unreadable",
    "uses",
)


class ExportMetrics(Metrics):
    """Counts node readings stored, by exporter, and failures."""

    def __init__(self) -> None:
        super().__init__()
        self._success = Counter("gpuid_export_success", "Node readings stored.", ["exporter"], registry=self.registry)
        self._failure = Counter(
            "gpuid_export_failure",
            "Readings that failed, and failed attempts to store readings.",
            ["exporter", "reason"],
            registry=self.registry,
        )

    def initialize_counters(self, exporters: list[str]) -> None:
        """Lets these series start at 0."""
        for name in exporters:
            self._success.labels(name)
            self._failure.labels(name, "store")
        for reason in REASONS:
            if reason not in ("store", "refused"):
                self._failure.labels("", reason)

    def count_stored(self, exporter: str) -> None:
        self._success.labels(exporter).inc()

    def count_not_stored(self, exporter: str, reason: str) -> None:
        self._failure.labels(exporter, reason).inc()

    def count_not_read(self, reason: str) -> None:
        self._failure.labels("", reason).inc()

    def show(self, collector: Collector) -> None:
        self.registry.register(collector)


@define(eq=False, repr=False)
class ExportCollector(Collector):
    """Gauges computed at scrape time."""

    _waiting: Callable[[], int]
    _last_reads: Callable[[], Mapping[str, datetime]]
    _states: Callable[[], Mapping[str, ExporterState]]
    _clock: Clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._clock()
        yield GaugeMetricFamily("gpuwarden_export_queue_depth", "Pods waiting to be read.", value=self._waiting())
        ages = GaugeMetricFamily(
            "gpuwarden_export_read_age_seconds", "Seconds since the node was last read.", labels=["node"]
        )
        for node, time in sorted(self._last_reads().items()):
            ages.add_metric([node], max(0.0, (now - time).total_seconds()))
        yield ages
        batches = GaugeMetricFamily(
            "gpuwarden_export_outbox_batches", "Batches waiting to be stored.", labels=["exporter"]
        )
        for name, state in self._states().items():
            batches.add_metric([name], state.waiting.batches)
        yield batches
