"""A kubelet for the Pods of a release. Deployments create the Pods, the scheduler binds them, and their processes run
here. Probes, `preStop`, signals and the grace period are those of the Pods."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
from attrs import define, field

from scripts.controlplane.cluster import gpu_node
from tests.e2e.chart_release import Process, Release, free_port
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw
from tests.e2e.processes import Balancer, Connection, Worker, cancel_and_wait, connect_to
from webhook.runtime.clock import utc_now

POLL_INTERVAL = 0.5
HEARTBEAT = 10.0
# Until every node knows that an endpoint is leaving, it still gets new connections.
ENDPOINT_LAG = 1.0


class Proxy(Balancer):
    """Like kube-proxy: the endpoint is chosen before it is known whether it accepts the connection."""

    async def _connected(self) -> Connection | None:
        return await connect_to(self.servers[next(self._turn) % len(self.servers)]) if self.servers else None


@define(eq=False)
class Running:
    """A Pod and its process."""

    uid: str
    name: str
    component: str
    spec: Raw
    terminating: asyncio.Event = field(factory=asyncio.Event)
    worker: Worker | None = None

    @property
    def container(self) -> Raw:
        (one,) = self.spec["containers"]
        return dict(one)


class Kubelet:
    """A kubelet of one node."""

    def __init__(self, release: Release, balancer: Balancer, node: str = "kubelet") -> None:
        self._release = release
        self._kube: Kube = release.kube
        self._balancer = balancer
        self.node = node
        self.pods: dict[str, Running] = {}
        self.stopped_pods: list[str] = []
        """Pods whose process stopped in time after SIGTERM."""
        self.violations: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def working(self) -> AsyncIterator["Kubelet"]:
        await self._kube.create(NODES, gpu_node(self.node, 0))
        await self._heartbeat()
        tasks = [asyncio.create_task(self._poll()), asyncio.create_task(self._heartbeats())]
        try:
            yield self
        finally:
            await cancel_and_wait(tasks)
            await cancel_and_wait(list(self._tasks.values()))
            await self._kube.delete(NODES, self.node)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            with suppress(ApiError, httpx.HTTPError):
                await self._heartbeat()

    async def _heartbeat(self) -> None:
        condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": now(), "reason": "KubeletReady"}
        await self._kube.patch(NODES, self.node, {"status": {"conditions": [condition]}}, subresource="status")

    async def _poll(self) -> None:
        while True:
            with suppress(ApiError, httpx.HTTPError):
                found = await self._kube.list(PODS, self._release.namespace, fieldSelector=f"spec.nodeName={self.node}")
                for raw in found:
                    self._observe(raw)
            await asyncio.sleep(POLL_INTERVAL)

    def _observe(self, raw: Raw) -> None:
        meta = raw["metadata"]
        one = self.pods.get(meta["uid"])
        if one is None and meta["uid"] not in self._tasks:
            component = meta["labels"]["app.kubernetes.io/component"]
            one = self.pods[meta["uid"]] = Running(meta["uid"], meta["name"], component, raw["spec"])
            self._tasks[meta["uid"]] = asyncio.create_task(self._run_pod(one))
        if one is not None and "deletionTimestamp" in meta:
            one.terminating.set()

    async def _run_pod(self, one: Running) -> None:
        process: Process | None = None
        try:
            port, http = free_port(), free_port()
            process = await self._release.launch(one.spec, one.name, {"--port": port, "--ui-port": http})
            urls = {"https": f"https://127.0.0.1:{port}", "http": f"http://127.0.0.1:{http}"}
            one.worker = Worker(process.process, process.log, urls)
            await self._probe_until_terminating(one, process)
            await self._stop(one, process)
        except Exception as exc:
            self.violations.append(f"{one.name}: {exc!r}")
            raise
        finally:
            if process is not None:
                await process.kill()
            del self.pods[one.uid]

    async def _probe_until_terminating(self, one: Running, process: Process) -> None:
        """Probes and reports readiness until the Pod terminates."""
        was = False
        async with httpx.AsyncClient(trust_env=False) as client:
            await self._wait_for_probe(client, one, process, "startupProbe")
            while not one.terminating.is_set():
                is_ready = await self._is_probe_answered(client, one, "readinessProbe")
                if is_ready != was:
                    await self._report_readiness(one, is_ready=is_ready)
                was = is_ready
                await self._pause(one, process, one.container["readinessProbe"]["periodSeconds"])

    async def _wait_for_probe(self, client: httpx.AsyncClient, one: Running, process: Process, probe: str) -> None:
        found = one.container[probe]
        for _ in range(found["failureThreshold"]):
            if one.terminating.is_set() or await self._is_probe_answered(client, one, probe):
                return
            await self._pause(one, process, found["periodSeconds"])
        raise AssertionError(f"no {probe} was answered: {process.log.read_text()[-2000:]}")

    async def _is_probe_answered(self, client: httpx.AsyncClient, one: Running, probe: str) -> bool:
        assert one.worker is not None
        found = one.container[probe]
        try:
            got = await client.get(
                one.worker.urls["http"] + found["httpGet"]["path"], timeout=found.get("timeoutSeconds", 1)
            )
        except httpx.HTTPError:
            return False
        return got.is_success

    async def _pause(self, one: Running, process: Process, seconds: float) -> None:
        """Waits for the next probe; fails if the process ends by itself."""
        ending = asyncio.ensure_future(process.process.wait())
        terminating = asyncio.ensure_future(one.terminating.wait())
        await asyncio.wait((ending, terminating), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        terminating.cancel()
        if ending.done():
            raise AssertionError(f"it ended by itself: {process.log.read_text()[-2000:]}")
        ending.cancel()

    async def _report_readiness(self, one: Running, *, is_ready: bool) -> None:
        """Writes the Pod's status for the Deployment, and adds it to or removes it from the balancer."""
        said = "True" if is_ready else "False"
        conditions = [
            {"type": kind, "status": said, "lastTransitionTime": now()} for kind in ("Ready", "ContainersReady")
        ]
        status = {"phase": "Running", "startTime": now(), "conditions": conditions}
        with suppress(ApiError):
            await self._kube.patch(PODS, one.name, {"status": status}, self._release.namespace, "status")
        if one.component == "serve" and one.worker is not None:
            servers = self._balancer.servers
            if is_ready and not one.terminating.is_set():
                servers.append(one.worker)
            elif one.worker in servers:
                servers.remove(one.worker)

    async def _remove_endpoint(self, one: Running) -> None:
        """Removes the Pod from the balancer after the lag of the proxies."""
        await asyncio.sleep(ENDPOINT_LAG)
        if one.worker in self._balancer.servers:
            self._balancer.servers.remove(one.worker)

    async def _stop(self, one: Running, process: Process) -> None:
        pause = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        left = one.spec["terminationGracePeriodSeconds"] - pause
        terminating = asyncio.create_task(self._remove_endpoint(one))
        await asyncio.sleep(pause)
        process.process.terminate()
        try:
            async with asyncio.timeout(left):
                code = await process.process.wait()
        except TimeoutError:
            self.violations.append(f"{one.name}: killed, {left} s after SIGTERM")
        else:
            if code:
                self.violations.append(f"{one.name}: exit code {code}: {process.log.read_text()[-2000:]}")
            self.stopped_pods.append(one.name)
        await terminating
        with suppress(ApiError):
            await self._kube.delete(PODS, one.name, self._release.namespace, grace=0)


def now() -> str:
    return utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
