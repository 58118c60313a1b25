"""`gpuwarden export` as a whole: exec through a real API server into a fake nvidia-smi, to a real store."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import frozen

from scripts.controlplane.cluster import Cluster, gpu_node
from scripts.controlplane.components import API_SERVER, KWOK, free_ports
from scripts.postgres import Postgres
from tests.e2e.cluster_users import grant
from tests.e2e.kube import (
    NODES,
    PODS,
    SERVICE_ACCOUNTS,
    Kube,
    Raw,
    Resource,
    gone,
    wait_until,
)
from tests.e2e.test_access import requests
from tests.e2e.test_export_stores import postgres  # noqa: F401 - the fixture
from tests.export.smi import dead, document, gb200_tray, h100_host
from tests.running import GPUWARDEN, reconciling
from webhook.kube.install.policies import Installation, export

PLUGINS = "gpu-operator"
OURS = "gpuwarden"
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)
ACCESS_REVIEWS = Resource("apis/authorization.k8s.io/v1", "selfsubjectaccessreviews", is_namespaced=False)
LEASES = Resource("apis/coordination.k8s.io/v1", "leases")
NODE_NAMES = ("gpu-a", "gpu-b")
LABEL = {"app": "nvidia-device-plugin-daemonset"}
# Only the test's own variables, none of the machine.
CLEAN = {name: text for name, text in os.environ.items() if name in ("PATH", "HOME", "LANG")}  # noqa: TID251


AUDITED: Raw = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [f"system:serviceaccount:{OURS}:gpuwarden-export"]}, {"level": "None"}],
}


@frozen
class FakeNvidiaSmi:
    """The script that runs in containers instead of nvidia-smi; tests change it."""

    directory: Path

    def prints(self, content: bytes) -> None:
        (self.directory / "content.xml").write_bytes(content)
        self.runs_shell('cat "$STANDIN/content.xml"')

    def runs_shell(self, line: str) -> None:
        new = self.directory / "behaviour.new"
        new.write_text(f'echo . >> "$STANDIN/calls"\n{line}\n')
        new.rename(self.directory / "behaviour")

    @property
    def calls(self) -> int:
        path = self.directory / "calls"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture(scope="module")
def fake_nvidia_smi(tmp_path_factory: pytest.TempPathFactory) -> FakeNvidiaSmi:
    directory = tmp_path_factory.mktemp("stand-in")
    program = directory / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$*" = "-q -x" ] || exit 64\n. "$STANDIN/behaviour"\n')
    program.chmod(0o755)
    found = FakeNvidiaSmi(directory)
    found.prints(document(gb200_tray()))
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, fake_nvidia_smi: FakeNvidiaSmi) -> Iterator[Cluster]:
    """A control plane whose simulated kubelets run commands."""
    directory = tmp_path_factory.mktemp("export")
    (port,) = free_ports(1)
    envs = [
        {"name": "PATH", "value": f"{fake_nvidia_smi.directory}:/usr/bin:/bin"},
        {"name": "STANDIN", "value": str(fake_nvidia_smi.directory)},
    ]
    execs = [
        {"containers": ["nvidia-device-plugin"], "local": {"workDir": str(fake_nvidia_smi.directory), "envs": envs}}
    ]
    content = {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "ClusterExec",
        "metadata": {"name": "stand-in"},
        "spec": {"execs": execs},
    }
    (directory / "exec.yaml").write_text(json.dumps(content))
    kwok = [f"--server-address=127.0.0.1:{port}", f"--node-port={port}", f"--config={directory / 'exec.yaml'}"]
    (directory / "audited.json").write_text(json.dumps(AUDITED))
    audit = [f"--audit-policy-file={directory / 'audited.json'}", f"--audit-log-path={directory / 'audit.log'}"]
    flags = {KWOK: kwok, API_SERVER: ["--kubelet-preferred-address-types=InternalIP", *audit]}
    with Cluster(directory / "cluster", flags=flags) as running:
        provided = {"spec": {"providerID": "aws:///zone/i-0aaaa"}}
        running.add_nodes([{**gpu_node(NODE_NAMES[0]), **provided}, gpu_node(NODE_NAMES[1])])
        for name in (PLUGINS, OURS):
            subprocess.run([*running.kubectl, "create", "namespace", name], check=True, capture_output=True)
        for what in ("crds", "export"):
            printed = subprocess.run([GPUWARDEN, "manifests", what], check=True, capture_output=True, text=True)
            command = [*running.kubectl, "apply", "-f", "-"]
            subprocess.run(command, input=printed.stdout, check=True, capture_output=True, text=True)
        yield running


@pytest.fixture(autouse=True)
async def nothing_left(cluster: Cluster, kube: Kube, fake_nvidia_smi: FakeNvidiaSmi) -> AsyncIterator[None]:
    await wait_until(lambda: kube.find(SERVICE_ACCOUNTS, "default", PLUGINS))
    fake_nvidia_smi.prints(document(gb200_tray()))
    yield
    for pod in await kube.list(PODS, PLUGINS):
        await kube.delete(PODS, pod["metadata"]["name"], PLUGINS, grace=0)
        await gone(kube, PODS, pod["metadata"]["name"], PLUGINS)
    for name in NODE_NAMES:
        meta = (await kube.get(NODES, name))["metadata"]
        labels = {key: None for key in meta["labels"] if "gpuid" in key}
        notes = {key: None for key in meta.get("annotations", {}) if key.startswith("gpuwarden.io/")}
        await kube.patch(NODES, name, {"metadata": {"labels": labels, "annotations": notes}})


def plugin_pod(name: str, node: str = NODE_NAMES[0]) -> Raw:
    return {
        "metadata": {"name": name, "labels": LABEL},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "nvidia-device-plugin", "image": "x"}],
            "terminationGracePeriodSeconds": 0,
        },
    }


@frozen
class Exporting:
    """A running process with stdout and stderr in files."""

    process: subprocess.Popen[bytes]
    directory: Path

    def records(self) -> list[Raw]:
        lines = (self.directory / "stdout").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one.get("gpu")]

    def log(self) -> list[Raw]:
        return [json.loads(line) for line in (self.directory / "stderr").read_text().splitlines() if line[:1] == "{"]

    def logged(self, event: str) -> list[Raw]:
        return [line for line in self.log() if line["event"] == event]

    async def url(self) -> str:
        found = await wait_for(lambda: self.logged("listening"), self)
        return str(found[0]["http"])

    async def metrics(self) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{await self.url()}/metrics")).text

    async def count(self, series: str) -> float:
        return sum(
            float(line.rpartition(" ")[2]) for line in (await self.metrics()).splitlines() if line.startswith(series)
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


async def wait_for(look: Callable[[], Any], running: Exporting, is_right: Callable[[Any], object] = bool) -> Any:
    async def once() -> Any:
        return look()

    try:
        return await wait_until(once, is_right)
    except AssertionError as exc:
        raise AssertionError(f"{exc}\n{(running.directory / 'stderr').read_text()[-5000:]}") from exc


@contextmanager
def exporting(
    kubeconfig: Path, directory: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[Exporting]:
    directory.mkdir(exist_ok=True)
    command = [
        GPUWARDEN,
        "export",
        "--kubeconfig",
        str(kubeconfig),
        "--host",
        "127.0.0.1",
        "--server-port",
        "0",
        *flags,
    ]
    with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
        own = {**CLEAN, "CLUSTER_NAME": "prod", **(environ or {})}
        with subprocess.Popen(command, cwd=directory, stdout=out, stderr=err, env=own) as process:
            try:
                yield Exporting(process, directory)
            finally:
                process.kill()


@pytest.fixture
def account(cluster: Cluster) -> Path:
    return cluster.service_account_kubeconfig(OURS, "gpuwarden-export")


async def test_nvidia_smi_output_is_exported_and_labels_the_node(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    with exporting(account, tmp_path / "export") as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        records = await wait_for(running.records, running, lambda found: len(found) == 4)
        node = await kube.get(NODES, NODE_NAMES[0])
        assert (await running.count("gpuid_export_success_total")) == 1
        assert running.stop() == 0
    assert [(one["index"], one["gpu"], one["minor"]) for one in records] == [
        (0, "176000000002", 0),
        (1, "176000000002", 1),
        (2, "176000000001", 2),
        (3, "176000000001", 3),
    ]
    assert {one["uuid"] for one in records} == {card.uuid for card in gb200_tray()}
    for one in records:
        assert (one["cluster"], one["node"], one["machine"]) == ("prod", NODE_NAMES[0], "i-0aaaa")
        assert (one["source"], one["chassis"]) == (f"{PLUGINS}/plugin-a", "1820000000042")
    assert {key: text for key, text in node["metadata"]["labels"].items() if "gpuid" in key} == {
        "gpuid.github.com/chassis": "1820000000042",
        "gpuid.github.com/chassis-count": "1",
        "gpuid.github.com/gpu-0": "176000000001",
        "gpuid.github.com/gpu-1": "176000000002",
    }


@pytest.mark.defect("gpuid-4")
async def test_a_node_without_a_provider_is_exported_once(kube: Kube, account: Path, tmp_path: Path) -> None:
    with exporting(account, tmp_path / "export") as running:
        await kube.create(PODS, plugin_pod("plugin-b", NODE_NAMES[1]), PLUGINS)
        records = await wait_for(running.records, running, lambda found: len(found) == 4)
        assert {one["machine"] for one in records} == {"na"}
        await wait_for(lambda: running.logged("node labelled"), running)
        assert await running.count("gpuid_export_failure_total") == 0
        assert running.stop() == 0
    assert len(running.records()) == 4


async def test_failure_is_logged_with_its_reason_counted_once_and_retried(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    fake_nvidia_smi.runs_shell('echo "NVIDIA-SMI has failed"; exit 9')
    with exporting(account, tmp_path / "export") as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        entries = await wait_for(lambda: running.logged("node not read"), running)
        # These kubelets report the exit code in the message only.
        assert entries[0]["reason"] == "unavailable"
        assert "exit status 9" in entries[0]["problem"]
        assert entries[0]["problem"].endswith("NVIDIA-SMI has failed")
        await wait_for(lambda: len(running.logged("node not read")) > 1, running)
        counted = await running.count('gpuid_export_failure_total{exporter="",reason="unavailable"}')
        assert 2 <= counted <= len(running.logged("node not read"))
        fake_nvidia_smi.prints(document([*h100_host()[:7], dead(h100_host()[7])]))
        records = await wait_for(running.records, running, lambda found: len(found) == 7)
        assert await running.count("gpuid_export_success_total") == 1
        assert running.stop() == 0
    assert {one["chassis"] for one in records} == {"unknown"}
    labels = (await kube.get(NODES, NODE_NAMES[0]))["metadata"]["labels"]
    assert "gpuid.github.com/chassis" not in labels


async def test_truncated_output_is_a_failure_and_stderr_output_is_not(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    fake_nvidia_smi.runs_shell('head -c 20000 "$STANDIN/content.xml"')
    with exporting(account, tmp_path / "export") as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        entries = await wait_for(lambda: running.logged("node not read"), running)
        assert entries[0]["reason"] == "unreadable"
        assert "is truncated at line" in entries[0]["problem"]
        fake_nvidia_smi.runs_shell("head -c 30000000 /dev/zero")
        await wait_for(lambda: "too_large" in {one["reason"] for one in running.logged("node not read")}, running)
        fake_nvidia_smi.runs_shell('echo "a warning" >&2; cat "$STANDIN/content.xml"')
        await wait_for(running.records, running, lambda found: len(found) == 4)


@pytest.mark.defect("gpuid-20")
async def test_exec_is_allowed_in_the_watched_namespace_only(
    cluster: Cluster, kube: Kube, account: Path, tmp_path: Path
) -> None:
    rules = [{"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}]
    subject = {"kind": "ServiceAccount", "name": "reads-only", "namespace": OURS}
    reads_only = cluster.service_account_kubeconfig(OURS, "reads-only")
    async with AsyncExitStack() as stack:
        await grant(kube, stack, "reads-only", rules, subject)
        running = stack.enter_context(exporting(reads_only, tmp_path / "export", "--history", "false"))
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        entries = await wait_for(lambda: running.logged("node not read"), running)
        assert entries[0]["reason"] == "forbidden"
        assert "403" in entries[0]["problem"]
        assert await running.count('gpuid_export_failure_total{exporter="",reason="forbidden"}') >= 1
    async with Kube(account) as own:
        for namespace, is_allowed in ((PLUGINS, True), ("default", False), ("kube-system", False)):
            for verb in ("get", "create"):
                asked = {"namespace": namespace, "verb": verb, "resource": "pods", "subresource": "exec"}
                said = await own.create(ACCESS_REVIEWS, {"spec": {"resourceAttributes": asked}})
                assert said["status"]["allowed"] is is_allowed


@pytest.mark.defect("gpuid-17")
async def test_killed_exporter_repeats_the_same_records_and_no_others(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    before = fake_nvidia_smi.calls
    with exporting(account, tmp_path / "first") as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        first = await wait_for(running.records, running, lambda found: len(found) == 4)
        running.stop(signal.SIGKILL)
    with exporting(account, tmp_path / "second") as running:
        second = await wait_for(running.records, running, lambda found: len(found) == 4)
    assert [kept(one) for one in second] == [kept(one) for one in first]
    assert fake_nvidia_smi.calls - before == 1


def kept(record: Raw) -> Raw:
    """The stored part of a record."""
    return {name: value for name, value in record.items() if name not in ("level", "msg", "service")}


async def test_reading_from_a_pod_that_was_replaced_is_dropped(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    before = fake_nvidia_smi.calls
    fake_nvidia_smi.runs_shell('while [ ! -e "$STANDIN/go" ]; do sleep 0.1; done; cat "$STANDIN/content.xml"')
    with exporting(account, tmp_path / "export") as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        await wait_for(lambda: fake_nvidia_smi.calls - before, running, lambda calls: calls == 1)
        await kube.delete(PODS, "plugin-a", PLUGINS, grace=0)
        await gone(kube, PODS, "plugin-a", PLUGINS)
        made = await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        (fake_nvidia_smi.directory / "go").touch()
        await wait_for(running.records, running, lambda found: len(found) == 4)
        assert running.stop() == 0
    (fake_nvidia_smi.directory / "go").unlink()
    node = await kube.get(NODES, NODE_NAMES[0])
    assert json.loads(node["metadata"]["annotations"]["gpuwarden.io/gpus"])["pod"] == made["metadata"]["uid"]
    assert len(running.records()) == 4


@pytest.mark.defect("gpuid-12")
async def test_watch_lasts_longer_than_the_timeout_of_a_pod(kube: Kube, account: Path, tmp_path: Path) -> None:
    await held_for(3.0, kube, account, tmp_path)


@pytest.mark.long
@pytest.mark.defect("gpuid-12")
async def test_watch_lasts_two_minutes(kube: Kube, account: Path, tmp_path: Path) -> None:
    await held_for(120.0, kube, account, tmp_path)


async def held_for(seconds: float, kube: Kube, account: Path, tmp_path: Path) -> None:
    with exporting(account, tmp_path / "export", environ={"TIMEOUT": "1s"}) as running:
        await wait_for(lambda: running.logged("exporting"), running)
        until = time.monotonic() + seconds
        await wait_until(lambda: past(until), seconds=seconds + 10)
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        await wait_for(running.records, running, lambda found: len(found) == 4)
        assert running.logged("watch interrupted") == []


async def past(moment: float) -> bool:
    return time.monotonic() > moment


ELECTING = {
    "LEADER_ELECTION": "true",
    "LEASE_NAMESPACE": OURS,
    "LEASE_DURATION": "3s",
    "LEASE_RENEW_DEADLINE": "2s",
    "LEASE_RETRY_PERIOD": "500ms",
}


@pytest.mark.defect("gpuid-16")
async def test_second_exporter_takes_over_when_the_leader_stops(
    kube: Kube, account: Path, tmp_path: Path, fake_nvidia_smi: FakeNvidiaSmi
) -> None:
    before = fake_nvidia_smi.calls
    await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
    with exporting(account, tmp_path / "first", environ={**ELECTING, "POD_NAME": "first"}) as first:
        own = await wait_for(first.records, first, lambda found: len(found) == 4)
        with exporting(account, tmp_path / "second", environ={**ELECTING, "POD_NAME": "second"}) as second:
            url = await second.url()
            async with httpx.AsyncClient(trust_env=False) as client:
                await wait_until(lambda: answers(client, f"{url}/readyz"))
            assert second.records() == []
            assert first.stop() == 0
            entries = [line["event"] for line in first.log()]
            assert entries.index("drained") < entries.index("the Lease is released")
            found = await wait_for(second.records, second, lambda found: len(found) == 4)
            assert [kept(one) for one in found] == [kept(one) for one in own]
            assert fake_nvidia_smi.calls - before == 1
            lease = await kube.get(LEASES, "gpuid-leader", OURS)
            assert lease["spec"]["holderIdentity"].startswith("second_")
            await kube.patch(LEASES, "gpuid-leader", {"spec": {"holderIdentity": "a thief"}}, OURS)
            assert second.process.wait(30) == 1
    await kube.delete(LEASES, "gpuid-leader", OURS)


@pytest.mark.defect("gpuid-16")
async def test_nothing_is_exported_after_the_lease_is_lost(kube: Kube, account: Path, tmp_path: Path) -> None:
    with HangingStore() as store:
        environ = {**ELECTING, "POD_NAME": "first", "EXPORTER_TYPE": "http", "HTTP_ENDPOINT": store.url}
        with exporting(account, tmp_path / "export", environ=environ) as running:
            await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
            await wait_for(lambda: store.begun, running, lambda begun: begun == 1)
            await kube.patch(LEASES, "gpuid-leader", {"spec": {"holderIdentity": "a thief"}}, OURS)
            assert running.process.wait(30) == 1
            assert running.logged("drained")
        store.go.set()
        assert store.begun == 1
    await kube.delete(LEASES, "gpuid-leader", OURS)


class HangingStore:
    """A store that accepts a request and answers only when the test allows it."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.begun += 1
                outer.go.wait(60)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Discards the log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client has hung up
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/data"

    def __enter__(self) -> "HangingStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()


async def answers(client: httpx.AsyncClient, url: str) -> bool:
    return (await client.get(url)).status_code == httpx.codes.OK


@pytest.mark.defect("gpuid-19")
async def test_gpu_uses_are_exported_with_start_and_end_across_a_kill(
    kube: Kube, account: Path, tmp_path: Path
) -> None:
    uuid = gb200_tray()[2].uuid
    content = {
        "apiVersion": "gpuwarden.io/v1alpha1",
        "kind": "GPUNode",
        "metadata": {"name": NODE_NAMES[0]},
        "spec": {"devices": [{"uuid": uuid}]},
    }
    made = await kube.create(GPU_NODES, content)
    user = await kube.create(PODS, {**plugin_pod("user"), "metadata": {"name": "user"}}, "default")
    held = {
        "reservation": "r-1",
        "phase": "finalized",
        "namespace": "default",
        "digest": "d",
        "pod": "user",
        "uid": user["metadata"]["uid"],
        "since": "2026-01-01T00:00:00Z",
    }
    await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
    keeping = ["--outbox", str(tmp_path / "outbox")]
    try:
        with exporting(account, tmp_path / "first", *keeping) as running:
            await wait_for(running.records, running, lambda found: len(found) == 4)
            made["status"] = {"held": {f"{uuid}/0": held}}
            made = await kube.replace(GPU_NODES, made, subresource="status")
            (begun,) = await wait_for(lambda: uses(running), running)
            assert (begun["reservation"], begun["gpu_uuid"], begun["until"]) == ("r-1", uuid, None)
            assert (begun["serial"], begun["chassis"]) == ("176000000001", "1820000000042")
            assert (begun["namespace"], begun["pod"], begun["pod_uid"]) == ("default", "user", held["uid"])
            running.stop(signal.SIGKILL)
        for left in ({f"{uuid}/0": {**held, "phase": "releasing"}}, {}):
            made["status"] = {"held": left}
            made = await kube.replace(GPU_NODES, made, subresource="status")
        with exporting(account, tmp_path / "second", *keeping) as running:
            await wait_for(lambda: [one for one in uses(running) if one["until"]], running)
            assert running.stop() == 0
        entries = uses(running)
        assert {one["until"] for one in entries} - {None} == {entries[-1]["until"]}
        assert {one["since"] for one in entries} == {begun["since"]}
    finally:
        await kube.delete(PODS, "user", "default", grace=0)
        await kube.delete(GPU_NODES, NODE_NAMES[0])


def uses(running: Exporting) -> list[Raw]:
    lines = (running.directory / "stdout").read_text().splitlines()
    return [one for one in map(json.loads, lines) if "reservation" in one]


@pytest.mark.defect("gpuid-19")
async def test_one_reading_gives_gpu_node_index_uuid_and_serial(
    cluster: Cluster, kube: Kube, account: Path, tmp_path: Path
) -> None:
    (tmp_path / "reconcile").mkdir()
    lease = ["--lease-namespace", OURS, "--kubeconfig", str(cluster.kubeconfig), "--log-level", "warn"]
    await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
    with reconciling(tmp_path / "reconcile", lease), exporting(account, tmp_path / "export"):
        found = await wait_until(lambda: kube.find(GPU_NODES, NODE_NAMES[0]))
        assert found is not None
        entries = {(one["index"], one["uuid"], one["serial"]) for one in found["spec"]["devices"]}
        assert entries == {(card.number, card.uuid, card.serial) for card in gb200_tray()}


@pytest.mark.defect("gpuid-15")
@pytest.mark.defect("gpuid-17")
async def test_each_record_is_stored_once_if_the_exporter_is_killed_during_a_database_outage(
    kube: Kube,
    account: Path,
    tmp_path: Path,
    postgres: Postgres,  # noqa: F811 - the fixture
) -> None:
    environ = {
        "EXPORTER_TYPE": "postgres",
        "POSTGRES_HOST": postgres.host,
        "POSTGRES_PORT": str(postgres.port),
        "POSTGRES_DB": postgres.database,
        "POSTGRES_USER": postgres.user,
        "POSTGRES_PASSWORD": postgres.password,
        "POSTGRES_SSLMODE": "disable",
        "POSTGRES_AUTO_MIGRATE": "true",
        "GPUWARDEN_EXPORT_OUTBOX": str(tmp_path / "outbox"),
    }

    async def found() -> int:
        try:
            return int(await asyncio.to_thread(postgres.run_sql, "SELECT count(*) FROM gpu"))
        except RuntimeError:
            return 0

    for name, node in zip(("plugin-a", "plugin-b"), NODE_NAMES, strict=True):
        await kube.create(PODS, plugin_pod(name, node), PLUGINS)
    postgres.stop()
    with exporting(account, tmp_path / "first", environ=environ) as running:
        await wait_for(lambda: running.logged("batches not stored"), running)
        await wait_for(lambda: len(running.logged("node labelled")) == 2, running)
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{await running.url()}/readyz", timeout=30)).status_code == 503
        assert await running.count("gpuid_export_success_total") == 0
        assert await running.count('gpuid_export_failure_total{exporter="postgres",reason="store"}') >= 1
        running.stop(signal.SIGKILL)
    postgres.start()
    for number in range(2):
        with exporting(account, tmp_path / f"again-{number}", environ=environ) as running:
            await wait_until(found, lambda rows: rows >= 8)
            async with httpx.AsyncClient(trust_env=False) as client:
                url = await running.url()
                await wait_until(lambda client=client, url=url: answers(client, f"{url}/readyz"))  # type: ignore[misc]
            running.stop(signal.SIGTERM if number else signal.SIGKILL)
    assert await found() == 8
    assert int(postgres.run_sql("SELECT count(DISTINCT uuid) FROM gpu")) == 4
    assert int(postgres.run_sql("SELECT count(DISTINCT (node, read_time)) FROM gpu")) == 2


SPARE = {("", "pods/exec", "create"): "asked for beside the GET, by the API server itself"}


@pytest.mark.defect("gpuid-20")
async def test_exporter_account_has_exactly_the_permissions_it_uses(
    cluster: Cluster, kube: Kube, account: Path, tmp_path: Path
) -> None:
    with exporting(account, tmp_path / "export", environ={**ELECTING, "POD_NAME": "first"}) as running:
        await kube.create(PODS, plugin_pod("plugin-a"), PLUGINS)
        await wait_for(running.records, running, lambda found: len(found) == 4)
        await wait_for(lambda: running.logged("node labelled"), running)
        assert running.stop() == 0
    await kube.delete(LEASES, "gpuid-leader", OURS)
    seen = requests(cluster.directory.parent / "audit.log")
    assert [one for one in seen if one[2] in (401, 403)] == []
    used = {use for _, use, _ in seen}
    rules = [rule for one in export(Installation()) for rule in one.get("rules", ())]
    granted = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted - used == set(SPARE)
