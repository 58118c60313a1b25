"""Runs gpuwarden as processes: replicas behind one Service, reconcilers, and nodes with GPUs of their own."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import trustme
from attrs import define, field, frozen

from scripts.controlplane.cluster import ROOT, Cluster
from scripts.controlplane.cluster import gpu_node as node_object
from tests.e2e.cluster_users import resource_of
from tests.e2e.conftest import new_namespace
from tests.e2e.gpu_checker import GpuChecker, checking_gpus
from tests.e2e.kube import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    MUTATING,
    NODES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICES,
    VALIDATING,
    ApiError,
    Kube,
    Raw,
    Resource,
    pod,
    wait_until,
)
from tests.e2e.test_ledger import GPU_NODES, installed
from tests.e2e.webhook_configurations import is_reviewed
from tests.ledger.fake_store import gpu_node as gpu_node_object
from tests.running import GPUWARDEN, WITHOUT_EVIDENCE, taken_by
from webhook.kube.install.policies import Installation, policies, rbac, webhooks, while_down

# For a busy machine.
START_TIMEOUT = 60.0
REGISTRATION = "apis/admissionregistration.k8s.io/v1"
RBAC = {
    "ClusterRole": CLUSTER_ROLES,
    "ClusterRoleBinding": CLUSTER_ROLE_BINDINGS,
    "Role": ROLES,
    "RoleBinding": ROLE_BINDINGS,
}
KINDS = {
    "MutatingWebhookConfiguration": MUTATING,
    "ValidatingWebhookConfiguration": VALIDATING,
    "ValidatingAdmissionPolicy": Resource(REGISTRATION, "validatingadmissionpolicies", is_namespaced=False),
    "ValidatingAdmissionPolicyBinding": Resource(
        REGISTRATION, "validatingadmissionpolicybindings", is_namespaced=False
    ),
}
OPT_IN = {"gpuwarden.io/enabled": "true"}


@frozen(eq=False)
class Worker:
    """A gpuwarden process, its log and its listeners."""

    process: asyncio.subprocess.Process
    log: Path
    urls: dict[str, str] = field(factory=dict)

    @property
    def port(self) -> int:
        return int(self.urls["https"].rpartition(":")[2])

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def wait_for_log(self, words: str) -> None:
        """Waits until the log contains `words`."""

        async def last_words() -> str:
            text = self.log.read_text()
            return words if words in text else text[-2000:]

        await wait_until(last_words, lambda text: text == words, START_TIMEOUT)

    async def metric(self, name: str) -> float:
        """The sum over all label values."""
        async with httpx.AsyncClient(base_url=self.urls["http"], trust_env=False) as client:
            text = (await client.get("/metrics")).raise_for_status().text
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([\d.e+]+)$", text, re.MULTILINE)
        return sum(map(float, found))


Connection = tuple["Worker", asyncio.StreamReader, asyncio.StreamWriter]


class Balancer:
    """Distributes connections over the servers as a Service does; a server that refuses is skipped."""

    def __init__(self) -> None:
        self.servers: list[Worker] = []
        self._turn = itertools.count()
        self._tasks: dict[asyncio.Task[None], Worker | None] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        await cancel_and_wait(list(self._tasks))

    async def only(self, *servers: Worker) -> None:
        """Replaces the servers. Connections to other servers are closed, as when a Service loses an endpoint."""
        self.servers = list(servers)
        await cancel_and_wait([task for task, server in self._tasks.items() if server not in servers])

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        try:
            connection = await self._connected()
            if connection is not None:
                self._tasks[task], answers, questions = connection
                with suppress(asyncio.CancelledError):
                    await asyncio.gather(copy_stream(reader, questions), copy_stream(answers, writer))
                questions.close()
        finally:
            writer.close()

    async def _connected(self) -> Connection | None:
        first = next(self._turn)
        for offset in range(len(self.servers)):
            connection = await connect_to(self.servers[(first + offset) % len(self.servers)])
            if connection is not None:
                return connection
        return None


async def connect_to(server: Worker) -> Connection | None:
    with suppress(OSError):
        return server, *await asyncio.open_connection("127.0.0.1", server.port)
    return None


async def cancel_and_wait(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancels the tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running_tasks(*actions: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs endless actions meanwhile. If one has failed, its exception is raised at the end."""
    tasks = [asyncio.create_task(one) for one in actions]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await cancel_and_wait(tasks)


async def copy_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until the reader ends, then closes the writer."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


@define(eq=False)
class Site:
    """The installation under test: its processes, its namespace, its nodes and their GPUs."""

    kube: Kube
    checker: GpuChecker
    balancer: Balancer
    directory: Path
    kubeconfig: Path
    namespace: str
    own_namespace: str
    nodes: tuple[str, ...]
    gpus: frozenset[str]
    flags: tuple[str, ...]
    replicas: list[Worker] = field(factory=list)
    reconcilers: list[Worker] = field(factory=list)
    reconcile_account: Path | None = None
    """The kubeconfig of reconcilers that are given none; None: the administrator's."""
    _numbers: Any = field(factory=itertools.count)

    async def replica(
        self,
        kubeconfig: Path | None = None,
        *,
        serves: bool = True,
        skew: float = 0,
        program: Sequence[str] = (GPUWARDEN,),
    ) -> Worker:
        """Starts a replica and waits until it is ready. With `serves`, the Service routes to it. Its clock is off by
        `skew` seconds."""
        ports = ["--port", "0", "--ui-port", "0", "--extender-port", "0"]
        files = ["--tls-cert", str(self.directory / "tls.crt"), "--tls-key", str(self.directory / "tls.key")]
        worker = await self._started("serve", ["--ledger", "cluster", *ports, *files], kubeconfig, skew, program)
        assert worker.process.stdout is not None
        line = (await asyncio.wait_for(worker.process.stdout.readline(), START_TIMEOUT)).decode()
        assert line.startswith("ready "), worker.log.read_text()[-3000:]
        for part in line.split()[1:]:
            listener, _, url = part.partition("=")
            worker.urls[listener] = url
        self.replicas.append(worker)
        if serves:
            self.balancer.servers.append(worker)
        return worker

    async def reconciler(
        self, kubeconfig: Path | None = None, *, leads: bool = True, program: Sequence[str] = (GPUWARDEN,)
    ) -> Worker:
        # kwok runs no containers, so the reconciler need not wait long for deletions that it did not observe.
        short = [] if "--max-grace" in self.flags else ["--max-grace", "1s", "--orphan-margin", "1s"]
        flags = ["--ui-port", "0", "--lease-namespace", self.own_namespace, "--log-level", "info", *short]
        worker = await self._started("reconcile", flags, kubeconfig or self.reconcile_account, program=program)
        self.reconcilers.append(worker)
        await worker.wait_for_log("leading" if leads else "watching")
        return worker

    async def _started(
        self,
        command: str,
        flags: Sequence[str],
        kubeconfig: Path | None,
        skew: float = 0,
        program: Sequence[str] = (GPUWARDEN,),
    ) -> Worker:
        directory = self.directory / f"{command}-{next(self._numbers)}"
        directory.mkdir()
        where = ["--kubeconfig", str(kubeconfig or self.kubeconfig)]
        log = directory / "log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *([] if skew == 0 else skewed(directory, skew)),
                *program,
                command,
                "--log-level",
                "warn",
                *WITHOUT_EVIDENCE,
                *where,
                *taken_by(command, self.flags),
                *flags,
                cwd=directory,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
            )
        return Worker(process, log)

    async def stop(self) -> None:
        for worker in (*self.replicas, *self.reconcilers):
            await worker.kill()

    async def held(self) -> dict[str, Raw]:
        """The reservations of the nodes under test, by slot."""
        found = [one for one in await self.kube.list(GPU_NODES) if one["metadata"]["name"] in self.nodes]
        return {slot: entry for one in found for slot, entry in one.get("status", {}).get("held", {}).items()}

    async def versions(self) -> dict[str, str]:
        found = await self.kube.list(GPU_NODES)
        return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in found}

    async def wait_until_reviewed(self) -> None:
        """Waits until the API server sends pods to the webhooks."""
        await wait_until(lambda: is_reviewed(self.kube, self.namespace))

    async def wait_until_offered(self) -> None:
        """Waits until a pod could get all GPUs of each node."""
        (one,) = {len(self.gpus) // len(self.nodes)}
        for node in self.nodes:
            whole = pod("probe", gpus=one, nodeSelector={"kubernetes.io/hostname": node})
            await wait_until(lambda whole=whole: self._is_possible(whole))  # type: ignore[misc]  # bound now, not later

    async def _is_possible(self, content: Raw) -> bool:
        try:
            made = await self.kube.create(PODS, content, self.namespace, dryRun="All")
        except ApiError:
            return False
        return "gpuwarden.io/claim" in made["metadata"]["annotations"] and not made["spec"].get("schedulingGates")

    async def held_on(self, node: str) -> dict[str, Raw]:
        return dict((await self.kube.get(GPU_NODES, node)).get("status", {}).get("held", {}))

    async def free_all(self) -> None:
        """Deletes every pod of the test."""
        found = await self.kube.list(PODS, self.namespace)
        gate = asyncio.Semaphore(32)

        async def delete(name: str) -> None:
            async with gate:
                with suppress(ApiError):
                    await self.kube.delete(PODS, name, self.namespace)

        await asyncio.gather(*(delete(one["metadata"]["name"]) for one in found))

    def all_used(self) -> bool:
        return self.checker.gpus >= self.gpus


@asynccontextmanager
async def site(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    *,
    nodes: int,
    gpus: int,
    name: str,
    replicas: int = 0,
    flags: Iterable[str] = (),
) -> AsyncIterator[Site]:
    """Creates nodes, a Service, the shipped configurations, a GPU checker and `replicas` replicas."""
    names = tuple(f"{name}-{number}" for number in range(nodes))
    devices = {node: [f"GPU-{node}-{k}" for k in range(gpus)] for node in names}
    async with AsyncExitStack() as stack:
        await installed(kube)
        stack.push_async_callback(remove_nodes, kube, names)
        await asyncio.to_thread(cluster.add_nodes, [node_object(node, gpus) for node in names])
        standing = site_on_nodes(cluster, kube, directory, devices, replicas=replicas, flags=flags)
        yield await stack.enter_async_context(standing)


@asynccontextmanager
async def site_on_nodes(
    cluster: Cluster,
    kube: Kube,
    directory: Path,
    devices: Mapping[str, Sequence[str]],
    *,
    replicas: int = 0,
    flags: Iterable[str] = (),
    is_native: bool = False,
    is_discovered: bool = False,
) -> AsyncIterator[Site]:
    """Like `site`, on existing nodes with the given GPU UUIDs. The caller removes the GPUNodes. With `is_native` no
    webhooks are installed. With `is_discovered` the reconciler finds the GPUs itself."""
    async with AsyncExitStack() as stack:
        for node, uuids in devices.items() if not is_discovered else ():
            await kube.create(GPU_NODES, gpu_node_object(node, *uuids))
        own = await stack.enter_async_context(new_namespace(kube))
        balancer = await stack.enter_async_context(Balancer())
        checker = await stack.enter_async_context(checking_gpus(kube))
        namespace = await stack.enter_async_context(new_namespace(kube, OPT_IN))
        ca = write_certificate(directory, f"gpuwarden.{own}.svc")
        here = Site(
            kube=kube,
            checker=checker,
            balancer=balancer,
            directory=directory,
            kubeconfig=cluster.kubeconfig,
            namespace=namespace,
            own_namespace=own,
            nodes=tuple(devices),
            gpus=frozenset(uuid for uuids in devices.values() for uuid in uuids),
            flags=tuple(flags),
        )
        stack.push_async_callback(here.stop)
        for _ in range(replicas):
            await here.replica()
        await kube.create(SERVICES, external_name_service(balancer.port), own)
        installation = Installation(own, port=balancer.port, ca_bundle=ca, native=is_native)
        await stack.enter_async_context(registered(kube, installation))
        if replicas and not is_native:
            await here.wait_until_reviewed()
        stack.push_async_callback(here.free_all)
        yield here


@asynccontextmanager
async def with_policies(here: Site, manifests: Sequence[Raw] = ()) -> AsyncIterator[None]:
    """Installs the policies that need no server, and waits until they act: about a second after they are written.
    `manifests` replace those of an installation without ResourceClaims."""
    async with AsyncExitStack() as stack:
        for manifest in manifests or policies(Installation()):
            await here.kube.create(resource_of(manifest), manifest)
            stack.push_async_callback(here.kube.delete, resource_of(manifest), manifest["metadata"]["name"])
        await wait_until(lambda: is_blinded(here))
        yield


@asynccontextmanager
async def reconciler_account(here: Site, cluster: Cluster) -> AsyncIterator[Path]:
    """The kubeconfig of the service account that the webhooks take for the reconciler's, with the shipped rights."""
    own = here.own_namespace
    async with AsyncExitStack() as stack:
        for manifest in rbac(Installation(own)):
            name, place = manifest["metadata"]["name"], manifest["metadata"].get("namespace")
            if name == "gpuwarden-reconcile" and manifest["kind"] in RBAC:
                of = RBAC[manifest["kind"]]
                await here.kube.create(of, manifest, place)
                stack.push_async_callback(here.kube.delete, of, name, place)
        yield cluster.service_account_kubeconfig(own, "gpuwarden-reconcile")


@asynccontextmanager
async def bindings_refused(kube: Kube, namespace: str, node: str) -> AsyncIterator[None]:
    """A policy of someone else refuses the Bindings of the namespace, after our webhooks have reviewed them."""
    name = f"no-bindings-{namespace}"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}
    spec: Raw = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "false", "message": "not today"}],
    }
    only = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    bound = {"policyName": name, "validationActions": ["Deny"], "matchResources": only}
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "probe"}, "target": target}

    async def refused() -> bool:
        try:
            await kube.call("POST", PODS.path(namespace, "probe", "binding"), binding, {"dryRun": "All"})
        except ApiError as exc:
            return "not today" in exc.message
        return False

    async with AsyncExitStack() as stack:
        for kind, content in (("ValidatingAdmissionPolicy", spec), ("ValidatingAdmissionPolicyBinding", bound)):
            await kube.create(KINDS[kind], {"metadata": {"name": name}, "spec": content})
            stack.push_async_callback(kube.delete, KINDS[kind], name)
        await kube.create(PODS, pod("probe", schedulerName="nobody"), namespace)
        await wait_until(refused)
        await kube.delete(PODS, "probe", namespace)
        yield


async def is_blinded(here: Site) -> bool:
    try:
        made = await here.kube.create(PODS, pod("probe"), here.namespace, dryRun="All")
    except ApiError:  # the policy that refuses unblinded containers can act before the one that blinds
        return False
    return "NVIDIA_VISIBLE_DEVICES" in {env["name"] for env in made["spec"]["containers"][0].get("env", ())}


# Every Python that finds this file runs it before gpuwarden is imported: a clock cannot be set for one process alone.
SKEWED_CLOCK = """
from datetime import timedelta
import webhook.runtime.clock
true_now = webhook.runtime.clock.utc_now
webhook.runtime.clock.utc_now = lambda: true_now() + timedelta(seconds={seconds})
"""


def skewed(directory: Path, seconds: float) -> list[str]:
    """A command prefix that shifts the clock of gpuwarden by `seconds`."""
    (directory / "sitecustomize.py").write_text(SKEWED_CLOCK.format(seconds=seconds))
    return ["/usr/bin/env", f"PYTHONPATH={directory}:{ROOT}"]


def write_certificate(directory: Path, name: str) -> bytes:
    """Writes a certificate for the Service to `tls.crt` and `tls.key`, and its CA to `ca.crt`. Returns the CA."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(directory / "ca.crt")
    issued = ca.issue_cert(name, "localhost", "127.0.0.1")
    (directory / "tls.crt").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    (directory / "tls.key").write_bytes(issued.private_key_pem.bytes())
    return ca.cert_pem.bytes()


def external_name_service(port: int) -> Raw:
    """There is no cluster network: an ExternalName Service leads the API server to loopback."""
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
    return {"metadata": {"name": "gpuwarden"}, "spec": spec}


@asynccontextmanager
async def registered(kube: Kube, installation: Installation) -> AsyncIterator[None]:
    made = [*while_down(installation), *webhooks(installation)]
    async with AsyncExitStack() as stack:
        for manifest in made:
            of = KINDS[manifest["kind"]]
            await kube.create(of, manifest)
            stack.push_async_callback(kube.delete, of, manifest["metadata"]["name"])
        yield


async def remove_nodes(kube: Kube, nodes: Collection[str], kinds: Sequence[Resource] = (GPU_NODES, NODES)) -> None:
    """Deletes the nodes and their GPUNodes, including their finalizers. The policies of a test, which may refuse that,
    still apply for a moment after they were deleted. A running reconciler may create the objects again."""
    for node in nodes:
        for of in kinds:
            uid = await uid_of(kube, of, node)
            if uid is not None:
                await wait_until(partial(is_removed, kube, of, node, uid))


async def uid_of(kube: Kube, of: Resource, name: str) -> str | None:
    """None if there is no such object."""
    try:
        return str((await kube.get(of, name))["metadata"]["uid"])
    except ApiError as exc:
        if exc.status != 404:
            raise
        return None


async def is_removed(kube: Kube, of: Resource, name: str, uid: str) -> bool:
    """Deletes the object, and returns whether it is gone."""
    with suppress(ApiError):
        await kube.delete(of, name)
        await kube.patch(of, name, {"metadata": {"finalizers": None}})
    return await uid_of(kube, of, name) != uid
