"""Logs on stderr, and metrics in a separate registry.

Bodies, tokens and the environment are never logged. Libraries that log them at debug level start at info.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
import prometheus_client
import structlog
from attrs import field, frozen
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from structlog.typing import EventDict, Processor, WrappedLogger

from webhook.core.device_state import DeviceState
from webhook.core.evidence import EvidenceState
from webhook.core.reasons import EVENTS_ONLY, Reason
from webhook.core.reservation import Phase
from webhook.runtime.clock import Clock, utc_now
from webhook.runtime.setting_kinds import LOG_LEVELS

# Disables the second series of every counter, which none of our queries reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # no annotations in the library

K = TypeVar("K")
M = TypeVar("M", bound=MetricWrapperBase)

# At debug level these libraries log headers (with bearer tokens) and bodies.
SECRET_LOGGERS: Final = ("hpack", "httpcore", "kubernetes", "urllib3")

# A decision takes well under 1 ms. The API server closes the connection after timeoutSeconds, which is 10 in the chart.
ADMISSION_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# The operations of the admission API. Other values become OTHER_OPERATION, because each value is a series.
OPERATIONS: Final = frozenset({"CREATE", "UPDATE", "DELETE", "CONNECT"})
OTHER_OPERATION: Final = "OTHER"

# The outcomes of a request to a scorer; the first three provide hints.
SCORING_OUTCOMES: Final = (
    "answered",
    "cached",
    "shared",
    "timeout",
    "late",
    "unreachable",
    "refused",
    "broken",
    "malformed",
    "resting",
    "no-candidates",
)

# The outcome of reloading a changed file. If it is refused, the old content stays in use.
Outcome = Literal["reloaded", "refused"]

ENCODER: Final = msgspec.json.Encoder(enc_hook=repr)


def configure_logging(level: str, clock: Clock = utc_now) -> None:
    """Write log lines of `level` (a key of `LOG_LEVELS`) or above to stderr, each a JSON object; also for libraries."""
    number = LOG_LEVELS[level]
    stamp = OrderedEvent(clock)
    render = structlog.processors.JSONRenderer(serializer=encode_event)
    own: list[Processor] = [structlog.processors.add_log_level, structlog.processors.format_exc_info, stamp]
    structlog.configure(
        processors=[*own, render],
        # structlog has no level below debug.
        wrapper_class=structlog.make_filtering_bound_logger(max(number, logging.DEBUG)),
        logger_factory=structlog.WriteLoggerFactory(file=Stderr()),  # type: ignore[arg-type]  # only `write` and `flush` are used
        # A cached logger would ignore a later change of the level. Code on the hot path binds a logger once instead.
        cache_logger_on_first_use=False,
    )
    foreign = [structlog.stdlib.add_logger_name, *own]
    install_handler(number, structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=foreign))


def install_handler(number: int, formatter: logging.Formatter) -> None:
    """Make `logging` write the same lines as structlog. Other handlers stay."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, BridgeHandler)]:
        root.removeHandler(old)
    handler = BridgeHandler(Stderr())
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(number)
    for name in SECRET_LOGGERS:
        logging.getLogger(name).setLevel(max(number, logging.INFO))
    logging.captureWarnings(capture=True)


class Stderr:
    """The current `sys.stderr`, which pytest replaces during a test run."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class BridgeHandler(logging.StreamHandler[Stderr]):
    """Our handler of the root logger, which `install_handler` replaces."""


@frozen
class OrderedEvent:
    """Adds the timestamp and orders the keys: timestamp, level, event, then the others in their order."""

    clock: Clock

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        now = self.clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"timestamp": now, "level": event.pop("level"), "event": event.pop("event"), **event}


def encode_event(event: object, **_: object) -> str:
    """The event as JSON. A value without a JSON form is written as its repr, so that logging never fails."""
    try:
        return ENCODER.encode(event).decode()
    except (TypeError, ValueError):  # a lone surrogate, as in a file name that is not UTF-8
        return json.dumps(event, default=repr)


@frozen
class FleetCounts:
    """Counts by state at one moment. A missing state stands for 0."""

    devices: Mapping[str, int] = field(factory=dict)
    reservations: Mapping[str, int] = field(factory=dict)
    evidence_nodes: Mapping[str, int] = field(factory=dict)
    # Devices that are available to pods, by the evidence state of their nodes.
    available: Mapping[str, int] = field(factory=dict)


CountsSource = Callable[[], FleetCounts]


# The age in seconds of the oldest evidence, by its state and by the class of its nodes.
Ages = Mapping[tuple[str, str], float]


class ScrapedCollector(Collector, Generic[K]):
    """Counts at each scrape, so that no gauge must be updated with each change. Registering it counts nothing, because
    `nothing` is enough for the names."""

    def __init__(
        self, families: Callable[[K], Iterable[GaugeMetricFamily]], count: Callable[[], K], nothing: K
    ) -> None:
        self.families = families
        self.count = count
        self.nothing = nothing

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return self.families(self.nothing)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return self.families(self.count())


def evidence_families(pods_without: int) -> Iterator[GaugeMetricFamily]:
    about = "Running pods whose node's evidence no longer satisfies them"
    yield GaugeMetricFamily("gpuwarden_pods_without_evidence", about, pods_without)


def audit_families(counts: Mapping[str, int]) -> Iterator[GaugeMetricFamily]:
    about = "Findings of `gpuwarden audit`, by kind"
    yield family("gpuwarden_audit_findings", about, "kind", tuple(counts), counts)


def proof_families(counts: Mapping[str, int]) -> Iterator[GaugeMetricFamily]:
    about = "Proof devices in ResourceSlices, by state"
    yield family("gpuwarden_proof_devices", about, "state", ("published", "ended"), counts)


def delivery_families(counts: Mapping[str, int]) -> Iterator[GaugeMetricFamily]:
    about = "Running pods to which the kubelet gave GPUs that they have not reserved, by fault"
    yield family("gpuwarden_pods_with_wrong_gpus", about, "fault", tuple(counts), counts)


def plugin_families(nodes: int) -> Iterator[GaugeMetricFamily]:
    about = "Nodes on which a device plugin offers the GPUs of the inventory, too"
    yield GaugeMetricFamily("gpuwarden_nodes_with_device_plugin", about, nodes)


def age_families(ages: Ages) -> Iterator[GaugeMetricFamily]:
    about = "Age of the oldest evidence, by state and class of nodes; evidence without a start time is not counted"
    gauge = GaugeMetricFamily("gpuwarden_evidence_age_seconds", about, labels=["state", "node_class"])
    for node_class in sorted({one for _, one in ages}) or [""]:
        for state in EvidenceState:
            gauge.add_metric([state, node_class], ages.get((state, node_class), 0))
    yield gauge


def fleet_families(counts: FleetCounts) -> Iterator[GaugeMetricFamily]:
    yield family("gpuwarden_devices", "GPUs by state", "state", tuple(DeviceState), counts.devices)
    yield family(
        "gpuwarden_devices_available",
        "GPUs that are available to pods, by the evidence state of their node",
        "evidence",
        tuple(EvidenceState),
        counts.available,
    )
    yield family("gpuwarden_reservations", "Reservations by phase", "phase", tuple(Phase), counts.reservations)
    yield family(
        "gpuwarden_evidence_nodes",
        "Nodes by evidence state",
        "state",
        tuple(EvidenceState),
        counts.evidence_nodes,
    )


def family(name: str, about: str, label: str, states: Sequence[str], counts: Mapping[str, float]) -> GaugeMetricFamily:
    """A gauge with all states, also those with 0: an alert needs a series that always exists."""
    gauge = GaugeMetricFamily(name, about, labels=[label])
    for state in states:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge


class BoundLabels(dict[Any, M], Generic[M]):
    """The children of a metric by their label value, or by the tuple of several, each created once: `labels()` costs
    more than counting."""

    def __init__(self, metric: M) -> None:
        super().__init__()
        self.metric = metric

    def __missing__(self, key: object) -> M:
        self[key] = self.metric.labels(*key) if isinstance(key, tuple) else self.metric.labels(key)
        return self[key]


class Metrics:
    """All metrics of one process. Label values never come from a request, because each value is a new series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = self._histogram(
            "gpuwarden_admission_duration_seconds",
            "Time from the arrival of a review to its answer",
            "operation",
            "verdict",
        )
        self._verdicts = self._counter("gpuwarden_verdicts_total", "Answered reviews by reason", "reason")
        self._certificates = self._counter(
            "gpuwarden_certificate_reloads_total", "Reloads of changed certificates", "listener", "outcome"
        )
        self._files = self._counter("gpuwarden_file_reloads_total", "Reloads of changed files", "file", "outcome")
        self._requests = self._counter("gpuwarden_http_requests_total", "Answered HTTP requests", "route", "status")
        self._not_after = self._gauge(
            "gpuwarden_certificate_not_after_seconds",
            "Unix time at which the certificate in use expires",
            "listener",
        )
        self._review_callers = self._gauge(
            "gpuwarden_review_callers",
            "1 for the method that authenticates callers of the review routes",
            "proof",
        )
        self._extender = self._histogram(
            "gpuwarden_extender_duration_seconds", "Time from a scheduler's request to its answer", "verb", "outcome"
        )
        self._proofs = self._counter("gpuwarden_evidence_proofs_total", "Answers of nodes to challenges", "outcome")
        self._bundles = self._counter("gpuwarden_trust_bundle_looks_total", "Fetches of the trust bundle", "outcome")
        self._nodes = self._counter(
            "gpuwarden_extender_nodes_total", "Nodes offered by the scheduler, by answer", "answer"
        )
        self._events = self._counter("gpuwarden_events_total", "Events about pods and nodes", "reason")
        self._scorings = self._counter("gpuwarden_scoring_total", "Scoring requests for pods, by outcome", "outcome")
        self._scoring_seconds = self._histogram(
            "gpuwarden_scoring_duration_seconds", "Time from a request to a scorer to its outcome", "outcome"
        )
        self._conflicts = Counter(
            "gpuwarden_ledger_conflicts_total",
            "Placements lost to a concurrent reservation",
            registry=self.registry,
        )
        self._changes = self._counter(
            "gpuwarden_evidence_changes_total", "Changes of the evidence of nodes, by new state", "state"
        )
        self._provider_errors = self._counter(
            "gpuwarden_evidence_provider_errors_total", "Failed requests to evidence providers", "provider"
        )
        self._proof_writes = self._counter(
            "gpuwarden_proof_slice_writes_total", "Writes of ResourceSlices with proof devices", "outcome"
        )
        self._begin_at_0()

    def _begin_at_0(self) -> None:
        """Creates the series that alerts need from the start."""
        wanted: list[tuple[BoundLabels[Counter], Iterable[str]]] = [
            (self._proofs, ("accepted", "replayed")),
            (self._bundles, ("refused", "away")),
            (self._scorings, SCORING_OUTCOMES),
            (self._changes, EvidenceState),
            (self._events, (reason for reason in Reason if reason in EVENTS_ONLY)),
            (self._verdicts, (reason for reason in Reason if reason not in EVENTS_ONLY)),
        ]
        for metric, values in wanted:
            for value in values:
                metric[value]

    def _counter(self, name: str, about: str, *labels: str) -> BoundLabels[Counter]:
        return BoundLabels(Counter(name, about, labels, registry=self.registry))

    def _gauge(self, name: str, about: str, *labels: str) -> BoundLabels[Gauge]:
        return BoundLabels(Gauge(name, about, labels, registry=self.registry))

    def _histogram(self, name: str, about: str, *labels: str) -> BoundLabels[Histogram]:
        return BoundLabels(Histogram(name, about, labels, registry=self.registry, buckets=ADMISSION_BUCKETS))

    def show_review_callers(self, proof: str) -> None:
        """Set the authentication of review callers in a cluster: `none`, `token` or `certificate`."""
        self._review_callers[proof].set(1)

    def observe_verdict(self, operation: str, verdict: str, reason: str, seconds: float) -> None:
        known = operation if operation in OPERATIONS else OTHER_OPERATION
        self._seconds[known, verdict].observe(seconds)
        self._verdicts[reason].inc()

    def observe_extender(self, verb: str, outcome: str, seconds: float) -> None:
        self._extender[verb, outcome].observe(seconds)

    def count_extender_nodes(self, passed: int, refused: Mapping[str, int]) -> None:
        """Count the nodes that passed, and the refused ones by reason. The reasons are a small fixed set."""
        self._nodes["passed"].inc(passed)
        for reason, number in refused.items():
            self._nodes[reason].inc(number)

    def count_ledger_conflict(self) -> None:
        self._conflicts.inc()

    def count_proof(self, outcome: str) -> None:
        """Count one answer to a challenge: accepted, or the fault."""
        self._proofs[outcome].inc()

    def count_scoring(self, outcome: str) -> None:
        """Count one scoring of a pod. `outcome` is one of `SCORING_OUTCOMES`."""
        self._scorings[outcome].inc()

    def observe_scoring(self, outcome: str, seconds: float) -> None:
        self._scoring_seconds[outcome].observe(seconds)

    def count_evidence_change(self, state: str) -> None:
        self._changes[state].inc()

    def count_provider_error(self, provider: str) -> None:
        self._provider_errors[provider].inc()

    def count_proof_write(self, outcome: str) -> None:
        """Count one write of a ResourceSlice: written, deleted, refused or failed."""
        self._proof_writes[outcome].inc()

    def count_bundle(self, outcome: str) -> None:
        self._bundles[outcome].inc()

    def count_event(self, reason: str) -> None:
        self._events[reason].inc()

    def count_certificate_reload(self, listener: str, outcome: Outcome) -> None:
        self._certificates[listener, outcome].inc()

    def show_certificate(self, listener: str, not_after: datetime) -> None:
        self._not_after[listener].set(not_after.timestamp())

    def count_file_reload(self, file: str, outcome: Outcome) -> None:
        self._files[file, outcome].inc()

    def count_http_request(self, route: str, status: int) -> None:
        """`route` is the declared path, or one value for all undeclared paths."""
        self._requests[route, status].inc()

    # From these calls on, `count` is called at each scrape.

    def watch_fleet(self, count: CountsSource) -> None:
        self.registry.register(ScrapedCollector(fleet_families, count, FleetCounts()))

    def watch_evidence(self, count: Callable[[], int]) -> None:
        """`count` returns the number of pods on nodes whose evidence does not satisfy them."""
        self.registry.register(ScrapedCollector(evidence_families, count, 0))

    def watch_audit(self, count: Callable[[], Mapping[str, int]]) -> None:
        """`count` returns the findings of all kinds."""
        self.registry.register(ScrapedCollector[Mapping[str, int]](audit_families, count, {}))

    def watch_proofs(self, count: Callable[[], Mapping[str, int]]) -> None:
        """`count` returns the proof devices by state."""
        self.registry.register(ScrapedCollector[Mapping[str, int]](proof_families, count, {}))

    def watch_deliveries(self, count: Callable[[], Mapping[str, int]]) -> None:
        """`count` returns the number of pods of all faults."""
        self.registry.register(ScrapedCollector[Mapping[str, int]](delivery_families, count, {}))

    def watch_plugins(self, count: Callable[[], int]) -> None:
        """`count` returns the number of nodes on which a device plugin offers GPUs of the inventory."""
        self.registry.register(ScrapedCollector(plugin_families, count, 0))

    def watch_ages(self, ages: Callable[[], Ages]) -> None:
        self.registry.register(ScrapedCollector[Ages](age_families, ages, {}))

    def render(self) -> tuple[bytes, str]:
        """The metrics as text, and its content type."""
        return prometheus_client.generate_latest(self.registry), prometheus_client.CONTENT_TYPE_LATEST
