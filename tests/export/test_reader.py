"""When pods are read, and the result of each reading. The cluster is a few dictionaries."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from attrs import define, evolve, field

from tests.export.smi import Card, dead, document, gb200_tray, h100_host
from webhook.export.delivery import ExporterState
from webhook.export.measured import ExportCollector, ExportMetrics
from webhook.export.nodes import ExportedNode
from webhook.export.outbox import Backlog
from webhook.export.reader import MIN_INTERVAL, PARSE_IN_THREAD, FailureObserver, GpuReader, ReadingPlan
from webhook.export.records import Batch, Reading
from webhook.inventory.nvidia_smi import SmiReport, parse
from webhook.kube.pod_exec import ExecError
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError

Raw = dict[str, Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAN = ReadingPlan(cluster="prod", namespace="gpu-operator", container="nvidia-device-plugin")


def plugin_pod(name: str = "p", uid: str = "u-1", node: str = "node-a", **status: Any) -> Raw:
    ready = {"phase": "Running", "containerStatuses": [{"ready": True}], **status}
    spec = {"nodeName": node, "containers": [{"name": "nvidia-device-plugin"}]}
    return {"metadata": {"name": name, "uid": uid, "namespace": "gpu-operator"}, "spec": spec, "status": ready}


@define
class Harness:
    """A cluster of pods and nodes, with nvidia-smi's output in each pod."""

    plan: ReadingPlan = PLAN
    says: Callable[[str], bytes] = lambda _: document(gb200_tray())
    nodes: dict[str, ExportedNode] = field(factory=dict)
    pods: dict[str, Raw] = field(factory=dict)
    labels: dict[str, Mapping[str, str]] = field(factory=dict)
    batches: list[Batch] = field(factory=list)
    failures: list[str] = field(factory=list)
    count: Callable[[str], None] = lambda _: None
    execs: list[str] = field(factory=list)
    refuses_labels: Exception | None = None
    labels_take: float = 0.0
    before_answer: Callable[[], Any] = lambda: None
    parse: Callable[[bytes], SmiReport] = parse
    now: datetime = NOW
    # How far the schedule's clock is ahead of the loop's.
    ahead: float = 0.0
    reader: GpuReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        observer = FailureObserver(failed=self._failed)
        self.reader = GpuReader(
            self.plan, self, self, self._take, lambda: self.now, lambda: loop.time() + self.ahead, observer, self.parse
        )

    def _failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.count(reason)

    async def _take(self, batch: Batch) -> None:
        self.batches.append(batch)

    async def run(self, namespace: str, pod: str, container: str, command: tuple[str, ...], limit: int) -> bytes:
        assert command == ("/bin/sh", "-c", "nvidia-smi -q -x")
        self.execs.append(pod)
        content = self.says(pod)
        await asyncio.sleep(0)
        self.before_answer()
        return content

    async def get(self, name: str) -> ExportedNode | None:
        return self.nodes.get(name)

    async def pod(self, namespace: str, name: str) -> Raw | None:
        return self.pods.get(name)

    async def write_metadata(self, name: str, node: ExportedNode, labels: Mapping[str, str], gpus: str) -> bool:
        await asyncio.sleep(self.labels_take)
        if self.refuses_labels is not None:
            raise self.refuses_labels
        self.labels[name] = labels
        self.nodes[name] = evolve(self.nodes[name], labels=labels, gpus=gpus)
        return True

    def skip(self, seconds: float) -> None:
        self.ahead += seconds
        self.reader.schedule.put("nobody")  # waiting workers read the clock again

    def see(self, raw: Raw) -> None:
        """Sends the pod as an event of the watch."""
        self.pods[raw["metadata"]["name"]] = raw
        node = raw["spec"]["nodeName"]
        self.nodes.setdefault(node, ExportedNode(f"uid-{node}", "aws:///zone/i-1", "boot-1", {}, None))
        self.reader.changed(raw)

    @property
    def readings(self) -> list[Reading]:
        return [one for batch in self.batches for one in batch.readings]

    @asynccontextmanager
    async def working(self, workers: int = 2) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self.reader.work()) for _ in range(workers)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def settled(harness: Harness) -> None:
    """Waits until nothing is due or in progress."""
    await until(lambda: not len(harness.reader.schedule))
    await asyncio.sleep(0.05)


@pytest.mark.simulated_time
async def test_all_gpus_of_a_node_have_one_time() -> None:
    harness = Harness()
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
    (batch,) = harness.batches
    first = batch.readings[0]
    assert first == Reading(
        cluster="prod",
        node="node-a",
        machine="i-1",
        source="gpu-operator/p",
        chassis="1820000000042",
        gpu="176000000002",
        time=NOW,
        uuid=gb200_tray()[0].uuid,
        index=0,
        minor=0,
        pci_bus_id="00000000:01:00.0",
        model="NVIDIA GB200",
        memory="189471Mi",
        driver="580.10.01",
        boot_id="boot-1",
    )
    assert harness.reader.last_reads == {"node-a": NOW}


@pytest.mark.defect("gpuid-8")
@pytest.mark.simulated_time
async def test_all_of_a_reading_has_one_time() -> None:
    harness = Harness(says=lambda _: document(h100_host()))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: len(harness.readings) == 8)
    assert {one.time for one in harness.readings} == {NOW}


@pytest.mark.defect("gpuid-1")
@pytest.mark.defect("gpuid-2")
@pytest.mark.parametrize("chassis", [None, "N/A", ""], ids=["no-element", "not-applicable", "empty"])
@pytest.mark.simulated_time
async def test_a_missing_chassis_is_unknown(chassis: str | None) -> None:
    harness = Harness(says=lambda _: document([Card(0, serial="1", chassis=chassis)]))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.readings)
    assert [one.chassis for one in harness.readings] == ["unknown"]
    assert harness.labels["node-a"] == {"gpuid.github.com/gpu-0": "1"}


@pytest.mark.defect("gpuid-18")
@pytest.mark.simulated_time
async def test_two_dies_that_share_a_serial_are_two_records() -> None:
    harness = Harness()
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.readings)
    assert [(one.index, one.minor, one.gpu) for one in harness.readings] == [
        (0, 0, "176000000002"),
        (1, 1, "176000000002"),
        (2, 2, "176000000001"),
        (3, 3, "176000000001"),
    ]
    assert len({one.uuid for one in harness.readings}) == 4


@pytest.mark.simulated_time
async def test_a_dead_gpu_is_left_out_and_the_others_are_read() -> None:
    harness = Harness(says=lambda _: document([dead(h100_host()[0]), *h100_host()[1:]]))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.readings)
    assert [one.index for one in harness.readings] == list(range(1, 8))


@pytest.mark.parametrize("said", ["N/A", "[N/A]", ""])
@pytest.mark.simulated_time
async def test_gpu_without_serial_is_exported_with_its_uuid(said: str) -> None:
    cards = [Card(0, serial=said, uuid="GPU-a"), Card(1, serial="1", uuid="GPU-b")]
    harness = Harness(says=lambda _: document(cards))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.readings)
    assert [(one.gpu, one.uuid) for one in harness.readings] == [("unknown", "GPU-a"), ("1", "GPU-b")]
    assert "unknown" not in harness.labels["node-a"].values()


@pytest.mark.defect("gpuid-4")
@pytest.mark.parametrize("provider_id", [None, ""])
@pytest.mark.simulated_time
async def test_a_node_without_a_provider_is_called_na_and_read_once(provider_id: str | None) -> None:
    harness = Harness()
    harness.nodes["node-a"] = ExportedNode("uid", provider_id, "boot-1", {}, None)
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
        await settled(harness)
    assert {one.machine for one in harness.readings} == {"na"}
    assert (len(harness.batches), len(harness.execs)) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        plugin_pod(phase="Pending"),
        plugin_pod(containerStatuses=[]),
        plugin_pod(containerStatuses=[{"ready": False}]),
        plugin_pod(containerStatuses=[{"ready": True}, {"ready": True}]),
        {**plugin_pod(), "metadata": {"name": "p", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
    ids=["pending", "no-status", "not-ready", "one-too-many", "going"],
)
@pytest.mark.simulated_time
async def test_pod_that_is_not_ready_is_not_read(raw: Raw) -> None:
    harness = Harness()
    async with harness.working():
        harness.see(raw)
        harness.see(plugin_pod("other", uid="u-2", node="node-b"))
        await until(lambda: harness.batches)
        await settled(harness)
    assert harness.execs == ["other"]


@pytest.mark.defect("gpuid-17")
@pytest.mark.simulated_time
async def test_next_leader_makes_equal_records_from_the_annotation() -> None:
    first = Harness()
    async with first.working():
        first.see(plugin_pod())
        await until(lambda: first.batches)
    second = Harness(nodes=first.nodes, now=NOW + timedelta(days=1))
    async with second.working():
        second.see(plugin_pod())
        await until(lambda: second.batches)
    assert second.batches == first.batches
    assert second.execs == []


@pytest.mark.defect("gpuid-17")
@pytest.mark.parametrize("change", ["pod", "boot", "age"])
@pytest.mark.simulated_time
async def test_node_is_read_again_if_its_gpus_may_have_changed(change: str) -> None:
    first = Harness()
    async with first.working():
        first.see(plugin_pod())
        await until(lambda: first.batches)
    plan = evolve(PLAN, resync=timedelta(hours=1)) if change == "age" else PLAN
    second = Harness(plan, nodes=first.nodes, now=NOW + timedelta(hours=2))
    if change == "boot":
        second.nodes["node-a"] = evolve(second.nodes["node-a"], boot_id="boot-2")
    async with second.working():
        second.see(plugin_pod(uid="u-2" if change == "pod" else "u-1"))
        await until(lambda: second.batches)
    assert second.execs == ["p"]


@pytest.mark.defect("gpuid-17")
@pytest.mark.simulated_time
async def test_running_process_reads_again_at_the_resync_interval() -> None:
    harness = Harness(evolve(PLAN, resync=timedelta(minutes=10)))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
        for number in range(1, 4):
            harness.skip(599)
            await asyncio.sleep(0.05)
            assert len(harness.execs) == number
            harness.now += timedelta(minutes=10)
            harness.skip(1)
            await until(lambda number=number: len(harness.batches) == number + 1)  # type: ignore[misc]
    assert [batch.readings[0].time for batch in harness.batches] == [NOW + k * timedelta(minutes=10) for k in range(4)]


@pytest.mark.simulated_time
async def test_pod_is_not_read_more_often_than_the_minimum_interval() -> None:
    harness = Harness(evolve(PLAN, resync=timedelta(milliseconds=1)))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
        harness.now += timedelta(seconds=1)
        await asyncio.sleep(0.1)
        assert harness.execs == ["p"]
        harness.skip(MIN_INTERVAL)
        await until(lambda: len(harness.batches) == 2)


@pytest.mark.simulated_time
async def test_node_is_read_again_after_a_reboot() -> None:
    harness = Harness()
    async with harness.working():
        harness.reader.booted("node-a", "boot-1")
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
        harness.reader.booted("node-a", "boot-1")
        await settled(harness)
        assert len(harness.execs) == 1
        harness.nodes["node-a"] = evolve(harness.nodes["node-a"], boot_id="boot-2")
        harness.reader.booted("node-a", "boot-2")
        harness.skip(MIN_INTERVAL)
        await until(lambda: len(harness.batches) == 2)
    assert {one.boot_id for one in harness.batches[1].readings} == {"boot-2"}


def flip_boots(harness: Harness, number: int) -> None:
    harness.nodes["node-a"] = evolve(harness.nodes["node-a"], boot_id=f"boot-{number}")
    harness.reader.booted("node-a", f"boot-{number}")


def flip_readiness(harness: Harness, number: int) -> None:
    harness.nodes["node-a"] = evolve(harness.nodes["node-a"], gpus=None)
    harness.see(plugin_pod(containerStatuses=[{"ready": False}]))
    harness.see(plugin_pod())


def make_it_anew(harness: Harness, number: int) -> None:
    harness.reader.deleted(plugin_pod())
    harness.see(plugin_pod(uid=f"anew-{number}"))


@pytest.mark.parametrize("flip", [flip_boots, flip_readiness, make_it_anew])
@pytest.mark.simulated_time
async def test_pod_with_flapping_status_is_not_read_without_pause(
    flip: Callable[[Harness, int], None],
) -> None:
    harness = Harness()
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: len(harness.batches) == 1)
        for number in range(50):
            flip(harness, number)
            await asyncio.sleep(0.01)
        assert harness.execs == ["p"]
        harness.skip(MIN_INTERVAL)
        await until(lambda: len(harness.batches) == 2)
        await settled(harness)
        assert harness.execs == ["p", "p"]


async def test_long_outputs_are_parsed_one_at_a_time() -> None:
    """Parsing takes many times the size of the text in memory, and there are many workers."""
    long = document(h100_host()) + b" " * PARSE_IN_THREAD
    at_once, most, lock = 0, 0, threading.Lock()

    def counting(content: bytes) -> SmiReport:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.005)  # so that parses in several threads overlap
        found = parse(content)
        with lock:
            at_once -= 1
        return found

    harness = Harness(says=lambda _: long, parse=counting)
    async with harness.working(8):
        for number in range(8):
            harness.see(plugin_pod(f"p-{number}", uid=f"u-{number}", node=f"node-{number}"))
        await until(lambda: len(harness.batches) == 8)
    assert most == 1


@pytest.mark.simulated_time
async def test_annotation_with_an_out_of_range_time_is_ignored() -> None:
    harness = Harness()
    text = '{"time":"0001-01-01T00:00:00+14:00","gpus":[{"index":0,"serial":"1"}],"pod":"u-1","boot":"boot-1"}'
    harness.nodes["node-a"] = ExportedNode("uid", "aws:///zone/i-1", "boot-1", {}, text)
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
    assert (harness.execs, {one.time for one in harness.readings}) == (["p"], {NOW})


@pytest.mark.simulated_time
async def test_reading_of_a_replaced_pod_is_dropped() -> None:
    harness = Harness()
    harness.before_answer = lambda: harness.pods.update(p=plugin_pod(uid="u-2"))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.failures)
        await settled(harness)
    assert (harness.failures, harness.batches, harness.labels) == (["replaced"], [], {})


def complains(_: str) -> bytes:
    raise ExecError("exit_code", "exit code 9: NVIDIA-SMI has failed")


@pytest.mark.defect("gpuid-14")
@pytest.mark.parametrize(
    ("says", "reason"),
    [
        pytest.param(complains, "exit_code", id="exit-code"),
        pytest.param(lambda _: document(h100_host())[:5000], "unreadable", id="truncated"),
        pytest.param(lambda _: b"", "unreadable", id="nothing"),
    ],
)
@pytest.mark.simulated_time
async def test_failed_reading_is_counted_once_and_retried(says: Callable[[str], bytes], reason: str) -> None:
    harness = Harness(says=says)
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.failures)
        await asyncio.sleep(0.1)
        assert (harness.failures, harness.execs) == ([reason], ["p"])  # no busy loop
        harness.says = lambda _: document(h100_host())
        await until(lambda: harness.batches)
    assert harness.failures == [reason]


@pytest.mark.defect("gpuid-13")
@pytest.mark.simulated_time
async def test_reading_is_cancelled_at_its_timeout() -> None:
    harness = Harness(evolve(PLAN, timeout=timedelta(seconds=1)), labels_take=60.0)
    loop = asyncio.get_running_loop()
    async with harness.working(1):
        began = loop.time()
        harness.see(plugin_pod())
        await until(lambda: harness.failures)
        took = loop.time() - began
    assert harness.failures == ["timeout"]
    assert 0.9 < took < 10


@pytest.mark.simulated_time
async def test_reading_is_exported_if_labels_are_refused() -> None:
    harness = Harness(refuses_labels=ApiRefusesError(422, ""))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.batches)
        await settled(harness)
    assert (harness.failures, len(harness.batches), len(harness.execs)) == (["label_refused"], 1, 1)


@pytest.mark.simulated_time
async def test_reading_is_retried_if_the_api_server_is_unavailable() -> None:
    harness = Harness(refuses_labels=ApiUnavailableError("away"))
    async with harness.working():
        harness.see(plugin_pod())
        await until(lambda: harness.failures)
        harness.refuses_labels = None
        await until(lambda: harness.batches)
    assert harness.failures == ["unavailable"]


def test_metrics_show_queue_depth_and_reading_age() -> None:
    metrics = ExportMetrics()
    read = {"node-a": NOW - timedelta(seconds=90), "node-b": NOW + timedelta(seconds=5)}
    states = {"postgres": ExporterState(Backlog(7, 100, NOW), "down"), "s3": ExporterState(Backlog(), None)}
    metrics.show(ExportCollector(lambda: 3, lambda: read, lambda: states, lambda: NOW))
    found = metrics.render()[0].decode().splitlines()
    assert {
        "gpuwarden_export_queue_depth 3.0",
        'gpuwarden_export_read_age_seconds{node="node-a"} 90.0',
        'gpuwarden_export_read_age_seconds{node="node-b"} 0.0',
        'gpuwarden_export_outbox_batches{exporter="postgres"} 7.0',
        'gpuwarden_export_outbox_batches{exporter="s3"} 0.0',
    } <= set(found)


@pytest.mark.defect("gpuid-14")
@pytest.mark.simulated_time
async def test_number_of_series_does_not_grow_with_replaced_pods() -> None:
    metrics = ExportMetrics()
    metrics.initialize_counters(["stdout"])
    harness = Harness(says=complains, count=metrics.count_not_read)
    reader = harness.reader
    metrics.show(ExportCollector(lambda: reader.schedule.waiting, lambda: reader.last_reads, dict, lambda: NOW))
    series = set()
    async with harness.working(8):
        for generation in range(1000):
            raw = plugin_pod(f"plugin-{generation}", uid=f"u-{generation}")
            harness.see(raw)
            if generation % 100 == 0:
                await until(lambda generation=generation: f"plugin-{generation}" in harness.execs)  # type: ignore[misc]
                series.add(len(metrics.render()[0].splitlines()))
            harness.reader.deleted(raw)
    assert len(series) == 1
    assert len(harness.reader.schedule) == 0
