"""A kubelet for the Pods of a release: they are bound to its node by the scheduler and made by their Deployments, and
their processes run here. Probes, `preStop`, signals and the grace period are those of the Pods."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
from attrs import define, field

from scripts.controlplane.cluster import gpu_node
from tests.e2e.chart_release import Process, Release, free_port
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw
from tests.e2e.processes import Balancer, Way, Worker, ended, way_to
from webhook.runtime.clock import utc_now

LOOK_EVERY = 0.5
HEARTBEAT = 10.0
# Until every node knows that an endpoint is leaving, new connections still go there.
PROXIES_LAG = 1.0


class Proxy(Balancer):
    """As kube-proxy: who gets a connection is settled before anybody asks whether he takes it."""

    async def _connected(self) -> Way | None:
        return await way_to(self.servers[next(self._turn) % len(self.servers)]) if self.servers else None


@define(eq=False)
class Running:
    """A Pod and its process."""

    uid: str
    name: str
    component: str
    spec: Raw
    leaving: asyncio.Event = field(factory=asyncio.Event)
    worker: Worker | None = None

    @property
    def container(self) -> Raw:
        (one,) = self.spec["containers"]
        return dict(one)


class Kubelet:
    """One node."""

    def __init__(self, release: Release, balancer: Balancer, node: str = "kubelet") -> None:
        self._release = release
        self._kube: Kube = release.kube
        self._balancer = balancer
        self.node = node
        self.pods: dict[str, Running] = {}
        self.ended: list[str] = []
        """Pods whose process has stopped in time when it was told to."""
        self.wrongs: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def working(self) -> AsyncIterator["Kubelet"]:
        await self._kube.create(NODES, gpu_node(self.node, 0))
        await self._beat()
        tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._beats())]
        try:
            yield self
        finally:
            await ended(tasks)
            await ended(list(self._tasks.values()))
            await self._kube.delete(NODES, self.node)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT)
            with suppress(ApiError, httpx.HTTPError):
                await self._beat()

    async def _beat(self) -> None:
        condition = {"type": "Ready", "status": "True", "lastHeartbeatTime": now(), "reason": "KubeletReady"}
        await self._kube.patch(NODES, self.node, {"status": {"conditions": [condition]}}, subresource="status")

    async def _look(self) -> None:
        while True:
            with suppress(ApiError, httpx.HTTPError):
                found = await self._kube.list(PODS, self._release.namespace, fieldSelector=f"spec.nodeName={self.node}")
                for raw in found:
                    self._see(raw)
            await asyncio.sleep(LOOK_EVERY)

    def _see(self, raw: Raw) -> None:
        meta = raw["metadata"]
        one = self.pods.get(meta["uid"])
        if one is None and meta["uid"] not in self._tasks:
            component = meta["labels"]["app.kubernetes.io/component"]
            one = self.pods[meta["uid"]] = Running(meta["uid"], meta["name"], component, raw["spec"])
            self._tasks[meta["uid"]] = asyncio.create_task(self._live(one))
        if one is not None and "deletionTimestamp" in meta:
            one.leaving.set()

    async def _live(self, one: Running) -> None:
        process: Process | None = None
        try:
            port, http = free_port(), free_port()
            process = await self._release.launched(one.spec, one.name, {"--port": port, "--ui-port": http})
            urls = {"https": f"https://127.0.0.1:{port}", "http": f"http://127.0.0.1:{http}"}
            one.worker = Worker(process.process, process.log, urls)
            await self._probe(one, process)
            await self._stop(one, process)
        except Exception as exc:
            self.wrongs.append(f"{one.name}: {exc!r}")
            raise
        finally:
            if process is not None:
                await process.kill()
            del self.pods[one.uid]

    async def _probe(self, one: Running, process: Process) -> None:
        """Until the Pod is to go."""
        was = False
        async with httpx.AsyncClient(trust_env=False) as client:
            await self._probed(client, one, process, "startupProbe")
            while not one.leaving.is_set():
                is_ready = await self._answers(client, one, "readinessProbe")
                if is_ready != was:
                    await self._tell(one, is_ready=is_ready)
                was = is_ready
                await self._pause(one, process, one.container["readinessProbe"]["periodSeconds"])

    async def _probed(self, client: httpx.AsyncClient, one: Running, process: Process, probe: str) -> None:
        found = one.container[probe]
        for _ in range(found["failureThreshold"]):
            if one.leaving.is_set() or await self._answers(client, one, probe):
                return
            await self._pause(one, process, found["periodSeconds"])
        raise AssertionError(f"no {probe} was answered: {process.log.read_text()[-2000:]}")

    async def _answers(self, client: httpx.AsyncClient, one: Running, probe: str) -> bool:
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
        """Until the next probe; a process that ends by itself is seen at once."""
        ending = asyncio.ensure_future(process.process.wait())
        leaving = asyncio.ensure_future(one.leaving.wait())
        await asyncio.wait((ending, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if ending.done():
            raise AssertionError(f"it ended by itself: {process.log.read_text()[-2000:]}")
        ending.cancel()

    async def _tell(self, one: Running, *, is_ready: bool) -> None:
        """The Deployment goes by the Pod's status, connections by the balancer."""
        said = "True" if is_ready else "False"
        conditions = [
            {"type": kind, "status": said, "lastTransitionTime": now()} for kind in ("Ready", "ContainersReady")
        ]
        status = {"phase": "Running", "startTime": now(), "conditions": conditions}
        with suppress(ApiError):
            await self._kube.patch(PODS, one.name, {"status": status}, self._release.namespace, "status")
        if one.component == "serve" and one.worker is not None:
            servers = self._balancer.servers
            if is_ready and not one.leaving.is_set():
                servers.append(one.worker)
            elif one.worker in servers:
                servers.remove(one.worker)

    async def _leave(self, one: Running) -> None:
        """No new connections, from when all proxies have heard."""
        await asyncio.sleep(PROXIES_LAG)
        if one.worker in self._balancer.servers:
            self._balancer.servers.remove(one.worker)

    async def _stop(self, one: Running, process: Process) -> None:
        pause = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        left = one.spec["terminationGracePeriodSeconds"] - pause
        leaving = asyncio.create_task(self._leave(one))
        await asyncio.sleep(pause)
        process.process.terminate()
        try:
            async with asyncio.timeout(left):
                code = await process.process.wait()
        except TimeoutError:
            self.wrongs.append(f"{one.name}: killed, {left} s after it was told to stop")
        else:
            if code:
                self.wrongs.append(f"{one.name}: exit code {code}: {process.log.read_text()[-2000:]}")
            self.ended.append(one.name)
        await leaving
        with suppress(ApiError):
            await self._kube.delete(PODS, one.name, self._release.namespace, grace=0)


def now() -> str:
    return utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
