"""What is told of the running process: log lines on stderr, metrics in a registry of our own.

Bodies, tokens and the environment are never logged; libraries that would do so at debug level are held back.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, Generic, Literal, TypeVar

import msgspec
import prometheus_client
import structlog
from attrs import field, frozen
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from structlog.typing import EventDict, Processor, WrappedLogger

from webhook.core.device_state import DeviceState
from webhook.core.evidence import EvidenceState
from webhook.core.reasons import EVENTS_ONLY, Reason
from webhook.core.reservation import Phase
from webhook.runtime.clock import Clock, utc_now
from webhook.runtime.setting_kinds import LOG_LEVELS

# A second series beside every counter, which no query of ours reads.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # theirs to annotate

K = TypeVar("K")
V = TypeVar("V")

# At debug level these write down headers (bearer tokens among them) and bodies.
INDISCREET: Final = ("hpack", "httpcore", "kubernetes", "urllib3")

# A decision takes well under 1 ms; the API server hangs up after its timeoutSeconds, 10 in the chart.
ADMISSION_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

# What the API server may ask about. The word comes from outside, and each new one would be a new series.
OPERATIONS: Final = frozenset({"CREATE", "UPDATE", "DELETE", "CONNECT"})
OTHER_OPERATION: Final = "OTHER"

# What may become of a question to a scorer; the first three ended with hints.
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

# How taking in a changed file ended; refused: the old one is kept.
Outcome = Literal["reloaded", "refused"]

ENCODER: Final = msgspec.json.Encoder(enc_hook=repr)


def configure_logging(level: str, clock: Clock = utc_now) -> None:
    """One JSON object a line on stderr from `level` (a word of `LOG_LEVELS`) on, from us and from the libraries."""
    number = LOG_LEVELS[level]
    stamp = Stamp(clock)
    render = structlog.processors.JSONRenderer(serializer=as_line)
    own: list[Processor] = [structlog.processors.add_log_level, structlog.processors.format_exc_info, stamp]
    structlog.configure(
        processors=[*own, render],
        # structlog knows nothing below debug.
        wrapper_class=structlog.make_filtering_bound_logger(max(number, logging.DEBUG)),
        logger_factory=structlog.WriteLoggerFactory(file=Stderr()),  # type: ignore[arg-type]  # it writes and flushes only
        # The level must keep applying when it is set anew. Who logs on the hot path binds a logger once instead.
        cache_logger_on_first_use=False,
    )
    foreign = [structlog.stdlib.add_logger_name, *own]
    bridge(number, structlog.stdlib.ProcessorFormatter(processor=render, foreign_pre_chain=foreign))


def bridge(number: int, formatter: logging.Formatter) -> None:
    """Lets `logging` write as we do. Handlers that are not ours stay."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, BridgeHandler)]:
        root.removeHandler(old)
    handler = BridgeHandler(Stderr())
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(number)
    for name in INDISCREET:
        logging.getLogger(name).setLevel(max(number, logging.INFO))
    logging.captureWarnings(capture=True)


class Stderr:
    """Whatever stderr is at the moment of writing, which a test run changes under us."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


class BridgeHandler(logging.StreamHandler[Stderr]):
    """The handler on the root logger that is ours to replace."""


@frozen
class Stamp:
    """Puts timestamp, level and event first, and the rest behind them in the order it was given in."""

    clock: Clock

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        now = self.clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return {"timestamp": now, "level": event.pop("level"), "event": event.pop("event"), **event}


def as_line(event: object, **_: object) -> str:
    """The event as JSON; what JSON has no form for is written as its repr, since logging must not be what fails."""
    try:
        return ENCODER.encode(event).decode()
    except (TypeError, ValueError):  # a lone surrogate, as in a file name that is no UTF-8
        return json.dumps(event, default=repr)


@frozen
class FleetCounts:
    """How many there are, by state, at one moment; a state that is left out counts none."""

    devices: Mapping[str, int] = field(factory=dict)
    reservations: Mapping[str, int] = field(factory=dict)
    evidence_nodes: Mapping[str, int] = field(factory=dict)
    # Devices that a pod could be given now, by the evidence of their nodes.
    available: Mapping[str, int] = field(factory=dict)


CountsSource = Callable[[], FleetCounts]


@frozen
class EvidenceCounts:
    """Pods on nodes whose evidence does not suit them."""

    pods_without: int = 0


# In seconds, of the oldest evidence by its state and by the class of its nodes.
Ages = Mapping[tuple[str, str], float]


class EvidenceCollector(Collector):
    """Asks when somebody looks: what a process that is not elected shows is as true."""

    def __init__(self, count: Callable[[], EvidenceCounts]) -> None:
        self.count = count

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return evidence_families(EvidenceCounts())

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return evidence_families(self.count())


def evidence_families(counts: EvidenceCounts) -> Iterator[GaugeMetricFamily]:
    about = "Running pods whose node's evidence no longer suits them"
    yield GaugeMetricFamily("gpuwarden_pods_without_evidence", about, counts.pods_without)


class AuditCollector(Collector):
    """Asks when somebody looks."""

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self.count = count

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [audit_family({})]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return [audit_family(self.count())]


def audit_family(counts: Mapping[str, int]) -> GaugeMetricFamily:
    about = "What `gpuwarden audit` would find, by kind"
    return family("gpuwarden_audit_findings", about, "kind", tuple(counts), counts)


class AgesCollector(Collector):
    """Asks when somebody looks: ages never stand still."""

    def __init__(self, ages: Callable[[], Ages]) -> None:
        self.ages = ages

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return [age_family({})]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return [age_family(self.ages())]


def age_family(ages: Ages) -> GaugeMetricFamily:
    about = "Age of the oldest evidence by state and class of nodes; evidence without a beginning has none"
    gauge = GaugeMetricFamily("gpuwarden_evidence_age_seconds", about, labels=["state", "node_class"])
    for node_class in sorted({one for _, one in ages}) or [""]:
        for state in EvidenceState:
            gauge.add_metric([state, node_class], ages.get((state, node_class), 0))
    return gauge


class FleetCollector(Collector):
    """Asks for the counts when somebody looks, instead of keeping gauges in step with every move."""

    def __init__(self, count: CountsSource) -> None:
        self.count = count

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The names alone, so that registering does not ask for counts."""
        return families(FleetCounts())

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return families(self.count())


def families(counts: FleetCounts) -> Iterator[GaugeMetricFamily]:
    yield family("gpuwarden_devices", "GPUs by state", "state", tuple(DeviceState), counts.devices)
    yield family(
        "gpuwarden_devices_available",
        "GPUs that a pod could be given now, by what the evidence of their node is worth",
        "evidence",
        tuple(EvidenceState),
        counts.available,
    )
    yield family("gpuwarden_reservations", "Reservations by phase", "phase", tuple(Phase), counts.reservations)
    yield family(
        "gpuwarden_evidence_nodes",
        "Nodes by what their evidence is worth",
        "state",
        tuple(EvidenceState),
        counts.evidence_nodes,
    )


def family(name: str, about: str, label: str, states: Sequence[str], counts: Mapping[str, float]) -> GaugeMetricFamily:
    """All states, zero or not: a series that comes and goes cannot be alerted on."""
    gauge = GaugeMetricFamily(name, about, labels=[label])
    for state in states:
        gauge.add_metric([state], counts.get(state, 0))
    return gauge


class Bound(dict[K, V], Generic[K, V]):
    """Label children by their values, each made once: `labels()` costs more than counting."""

    def __init__(self, bind: Callable[[K], V]) -> None:
        super().__init__()
        self.bind = bind

    def __missing__(self, key: K) -> V:
        self[key] = self.bind(key)
        return self[key]


class Metrics:
    """All metrics of one server. Label values come from us, never from a request: each new one is a new series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        seconds = Histogram(
            "gpuwarden_admission_duration_seconds",
            "Time from a review's arrival to its answer",
            ["operation", "verdict"],
            registry=self.registry,
            buckets=ADMISSION_BUCKETS,
        )
        verdicts = self._counter("gpuwarden_verdicts_total", "Answered reviews by reason", "reason")
        certificates = self._counter(
            "gpuwarden_certificate_reloads_total", "Changed certificates taken in", "listener", "outcome"
        )
        files = self._counter("gpuwarden_file_reloads_total", "Changed files taken in", "file", "outcome")
        requests = self._counter("gpuwarden_http_requests_total", "Answered HTTP requests", "route", "status")
        not_after = Gauge(
            "gpuwarden_certificate_not_after_seconds",
            "When the certificate in use ends, as a Unix time",
            ["listener"],
            registry=self.registry,
        )
        review_callers = Gauge(
            "gpuwarden_review_callers",
            "1 for the way in which callers of /mutate and /validate prove who they are",
            ["proof"],
            registry=self.registry,
        )
        extender = Histogram(
            "gpuwarden_extender_duration_seconds",
            "Time from a scheduler's question to its answer",
            ["verb", "outcome"],
            registry=self.registry,
            buckets=ADMISSION_BUCKETS,
        )
        proofs = self._counter("gpuwarden_evidence_proofs_total", "Answers of nodes to challenges", "outcome")
        bundles = self._counter("gpuwarden_trust_bundle_looks_total", "Looks at the trust bundle", "outcome")
        nodes = self._counter("gpuwarden_extender_nodes_total", "Nodes that were offered, by our answer", "answer")
        events = self._counter("gpuwarden_events_total", "Events told about pods and nodes", "reason")
        bindings = self._counter("gpuwarden_bindings_total", "Pods to be put on nodes, by what became of it", "outcome")
        scorings = self._counter("gpuwarden_scoring_total", "Pods to be hinted, by outcome", "outcome")
        scoring_seconds = Histogram(
            "gpuwarden_scoring_duration_seconds",
            "Time from a question to a scorer to its end",
            ["outcome"],
            registry=self.registry,
            buckets=ADMISSION_BUCKETS,
        )
        self._conflicts = self._counter("gpuwarden_ledger_conflicts_total", "Placements that somebody else was given")
        self._seconds = Bound[tuple[str, str], Histogram](lambda key: seconds.labels(*key))
        self._events = Bound[str, Counter](events.labels)
        self._extender = Bound[tuple[str, str], Histogram](lambda key: extender.labels(*key))
        self._nodes = Bound[str, Counter](nodes.labels)
        self._proofs = Bound[str, Counter](proofs.labels)
        self._bindings = Bound[str, Counter](bindings.labels)
        self._scorings = Bound[str, Counter](scorings.labels)
        self._scoring_seconds = Bound[str, Histogram](scoring_seconds.labels)
        self._bundles = Bound[str, Counter](bundles.labels)
        changes = self._counter("gpuwarden_evidence_changes_total", "Changes of nodes' evidence by new state", "state")
        provider_errors = self._counter(
            "gpuwarden_evidence_provider_errors_total", "Evidence providers asked in vain", "provider"
        )
        self._changes = Bound[str, Counter](changes.labels)
        self._provider_errors = Bound[str, Counter](provider_errors.labels)
        for outcome in ("accepted", "replayed"):  # what alerts ask about is there from the start
            proofs.labels(outcome)
        for outcome in ("refused", "away"):
            bundles.labels(outcome)
        for outcome in SCORING_OUTCOMES:
            scorings.labels(outcome)
        for state in EvidenceState:
            changes.labels(state)
        self._verdicts = Bound[str, Counter](verdicts.labels)
        self._certificates = Bound[tuple[str, Outcome], Counter](lambda key: certificates.labels(*key))
        self._files = Bound[tuple[str, Outcome], Counter](lambda key: files.labels(*key))
        self._requests = Bound[tuple[str, int], Counter](lambda key: requests.labels(*key))
        self._not_after = Bound[str, Gauge](not_after.labels)
        self._review_callers = Bound[str, Gauge](review_callers.labels)
        for reason in Reason:
            (events if reason in EVENTS_ONLY else verdicts).labels(reason)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

    def show_review_callers(self, proof: str) -> None:
        """Of a server in a cluster: `none`, `token` or `certificate`."""
        self._review_callers[proof].set(1)

    def observe_verdict(self, operation: str, verdict: str, reason: str, seconds: float) -> None:
        known = operation if operation in OPERATIONS else OTHER_OPERATION
        self._seconds[known, verdict].observe(seconds)
        self._verdicts[reason].inc()

    def observe_extender(self, verb: str, outcome: str, seconds: float) -> None:
        self._extender[verb, outcome].observe(seconds)

    def count_extender_nodes(self, passed: int, refused: Mapping[str, int]) -> None:
        """Those that passed, and the others by what speaks against them; the texts are ours and few."""
        self._nodes["passed"].inc(passed)
        for text, number in refused.items():
            self._nodes[text].inc(number)

    def count_ledger_conflict(self) -> None:
        self._conflicts.inc()

    def count_proof(self, outcome: str) -> None:
        """How one answer to a challenge ended: taken, or by what was wrong with it."""
        self._proofs[outcome].inc()

    def count_binding(self, outcome: str) -> None:
        """What became of one try to put a pod on a node, or that no node would do; a word of ours."""
        self._bindings[outcome].inc()

    def count_scoring(self, outcome: str) -> None:
        """How one question to the scorer ended, or why it was not put; a word of `SCORING_OUTCOMES`."""
        self._scorings[outcome].inc()

    def observe_scoring(self, outcome: str, seconds: float) -> None:
        self._scoring_seconds[outcome].observe(seconds)

    def count_evidence_change(self, state: str) -> None:
        self._changes[state].inc()

    def count_provider_error(self, provider: str) -> None:
        self._provider_errors[provider].inc()

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
        """`route` is the path as declared, or one word for all that nobody declared: not the path as sent."""
        self._requests[route, status].inc()

    def watch_fleet(self, count: CountsSource) -> None:
        """From now on every look at the metrics asks `count`."""
        self.registry.register(FleetCollector(count))

    def watch_evidence(self, count: Callable[[], EvidenceCounts]) -> None:
        """From now on every look at the metrics asks `count`."""
        self.registry.register(EvidenceCollector(count))

    def watch_audit(self, count: Callable[[], Mapping[str, int]]) -> None:
        """From now on every look at the metrics asks `count`, which names every kind."""
        self.registry.register(AuditCollector(count))

    def watch_ages(self, ages: Callable[[], Ages]) -> None:
        """From now on every look at the metrics asks `ages`."""
        self.registry.register(AgesCollector(ages))

    def render(self) -> tuple[bytes, str]:
        """The metrics as text, and the content type of that text."""
        return prometheus_client.generate_latest(self.registry), prometheus_client.CONTENT_TYPE_LATEST
