"""A fake container runtime and kubelet of a node, on real sockets, with messages of Google's protobuf library."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import define, field
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream

from tests.evidence.doubles import Table, built
from webhook.core.proof_devices import DRIVER

# Messages of runtime.v1 and of the kubelet's PodResources v1. On the wire a map is a list of entries, an enumeration is
# a number.
TABLE: Table = {
    "Empty": (),
    "Label": ((1, "key", "string"), (2, "value", "string")),
    "PodSandboxMetadata": ((1, "name", "string"), (2, "uid", "string"), (3, "namespace", "string")),
    "PodSandbox": (
        (1, "id", "string"),
        (2, "metadata", "PodSandboxMetadata"),
        (3, "state", "int32"),
        (4, "created_at", "int64"),
        (5, "labels", "*Label"),
        (6, "annotations", "*Label"),
        (7, "runtime_handler", "string"),
    ),
    "ListPodSandboxResponse": ((1, "items", "*PodSandbox"),),
    "ContainerMetadata": ((1, "name", "string"),),
    "Container": (
        (1, "id", "string"),
        (2, "pod_sandbox_id", "string"),
        (3, "metadata", "ContainerMetadata"),
        (5, "image_ref", "string"),
        (6, "state", "int32"),
        (7, "created_at", "int64"),
        (8, "labels", "*Label"),
    ),
    "ListContainersResponse": ((1, "containers", "*Container"),),
    "ContainerDevices": ((1, "resource_name", "string"), (2, "device_ids", "*string")),
    "ClaimResource": ((2, "driver_name", "string"), (3, "pool_name", "string"), (4, "device_name", "string")),
    "DynamicResource": (
        (2, "claim_name", "string"),
        (3, "claim_namespace", "string"),
        (4, "claim_resources", "*ClaimResource"),
    ),
    "ContainerResources": (
        (1, "name", "string"),
        (2, "devices", "*ContainerDevices"),
        (5, "dynamic_resources", "*DynamicResource"),
    ),
    "PodResources": ((1, "name", "string"), (2, "namespace", "string"), (3, "containers", "*ContainerResources")),
    "ListPodResourcesResponse": ((1, "pod_resources", "*PodResources"),),
}
MESSAGES = built(TABLE)
READY, NOT_READY = 0, 1
CREATED, RUNNING, EXITED, UNKNOWN = range(4)
OWN = "uid-own"
ANSWERS = {
    "ListPodSandbox": "ListPodSandboxResponse",
    "ListContainers": "ListContainersResponse",
    "List": "ListPodResourcesResponse",
}


def label(key: str, value: str) -> Any:
    return MESSAGES["Label"](key=f"io.kubernetes.pod.{key}", value=value)


@define(eq=False)
class NodeDouble:
    """A test sets the states of sandboxes and containers by the uid of their pod, and the names of the pods that the
    kubelet lists. The uid `uid-x` belongs to pod `x`. By default the pod of the caller (`own`) runs."""

    directory: Path
    sandboxes: dict[str, list[int]] = field(factory=lambda: {OWN: [READY]})
    containers: dict[str, list[int]] = field(factory=lambda: {OWN: [RUNNING]})
    kubelet_pods: set[str] = field(factory=lambda: {"own"})
    # By uid: the annotation with the reserved GPUs, the ids of devices of a device plugin, and proof devices.
    reserved: dict[str, str] = field(factory=dict)
    given: dict[str, list[str]] = field(factory=dict)
    proofs: dict[str, list[str]] = field(factory=dict)
    # The names of calls that fail.
    failing_calls: set[str] = field(factory=set)
    calls: list[str] = field(factory=list)
    _servers: list[Server] = field(factory=list)

    @property
    def runtime(self) -> str:
        return f"unix:{self.directory / 'runtime.sock'}"

    @property
    def kubelet(self) -> str:
        return f"unix:{self.directory / 'kubelet.sock'}"

    def run(self, uid: str) -> None:
        self.sandboxes[uid], self.containers[uid] = [READY], [RUNNING]
        self.kubelet_pods.add(uid.removeprefix("uid-"))

    def delete(self, uid: str) -> None:
        """The kubelet no longer lists the pod, but its containers still run."""
        self.kubelet_pods.discard(uid.removeprefix("uid-"))

    def end(self, uid: str) -> None:
        self.sandboxes[uid], self.containers[uid] = [NOT_READY], [EXITED]

    def clear(self, uid: str) -> None:
        """The kubelet has removed the sandboxes and containers."""
        self.sandboxes.pop(uid, None)
        self.containers.pop(uid, None)

    async def start(self) -> None:
        for socket, calls in (
            (self.runtime, {"ListPodSandbox": self._list_sandboxes, "ListContainers": self._list_containers}),
            (self.kubelet, {"List": self._list_pods}),
        ):
            service = "/v1.PodResourcesLister/" if socket == self.kubelet else "/runtime.v1.RuntimeService/"
            server = Server([Service({service + name: call for name, call in calls.items()})])
            with suppress(FileNotFoundError):
                Path(socket.removeprefix("unix:")).unlink()
            await server.start(path=socket.removeprefix("unix:"))
            self._servers.append(server)

    async def stop(self) -> None:
        for server in self._servers:
            server.close()
            await server.wait_closed()
        self._servers.clear()

    async def kill_kubelet(self) -> None:
        server = self._servers.pop()
        server.close()
        await server.wait_closed()

    async def _list_sandboxes(self, stream: "Stream[Any, Any]") -> None:
        await self._received(stream, "ListPodSandbox")
        items = [
            MESSAGES["PodSandbox"](
                id=f"sandbox-{uid}-{number}",
                metadata=MESSAGES["PodSandboxMetadata"](name=uid.removeprefix("uid-"), uid=uid, namespace="ml"),
                state=state,
                created_at=1,
                labels=[label("uid", uid)],
                annotations=[MESSAGES["Label"](key="gpuwarden.io/gpu-uuid", value=self.reserved.get(uid, ""))],
                runtime_handler="nvidia",
            )
            for uid, states in self.sandboxes.items()
            for number, state in enumerate(states)
        ]
        await stream.send_message(MESSAGES["ListPodSandboxResponse"](items=items))

    async def _list_containers(self, stream: "Stream[Any, Any]") -> None:
        await self._received(stream, "ListContainers")
        found = [
            MESSAGES["Container"](
                id=f"container-{uid}-{number}",
                pod_sandbox_id=f"sandbox-{uid}-0",
                metadata=MESSAGES["ContainerMetadata"](name="main"),
                image_ref="image",
                state=state,
                created_at=1,
                labels=[label("uid", uid), label("namespace", "ml"), label("name", uid.removeprefix("uid-"))],
            )
            for uid, states in self.containers.items()
            for number, state in enumerate(states)
        ]
        without_pod = MESSAGES["Container"](id="without a pod", state=RUNNING)
        await stream.send_message(MESSAGES["ListContainersResponse"](containers=[*found, without_pod]))

    async def _list_pods(self, stream: "Stream[Any, Any]") -> None:
        await self._received(stream, "List")
        pods = [
            MESSAGES["PodResources"](name=name, namespace="ml", containers=self._resources(f"uid-{name}"))
            for name in sorted(self.kubelet_pods)
        ]
        await stream.send_message(MESSAGES["ListPodResourcesResponse"](pod_resources=pods))

    def _resources(self, uid: str) -> list[Any]:
        """Of two containers: one has the devices of a device plugin, the other those of a claim."""
        plugin = MESSAGES["ContainerDevices"](resource_name="nvidia.com/gpu", device_ids=self.given.get(uid, []))
        drivers = [("gpu.nvidia.com", "gpu-0"), *((DRIVER, name) for name in self.proofs.get(uid, []))]
        results = [MESSAGES["ClaimResource"](driver_name=one, pool_name="n", device_name=name) for one, name in drivers]
        claim = MESSAGES["DynamicResource"](claim_name="c", claim_namespace="ml", claim_resources=results)
        return [
            MESSAGES["ContainerResources"](name="main", devices=[plugin]),
            MESSAGES["ContainerResources"](name="other", dynamic_resources=[claim]),
        ]

    async def _received(self, stream: "Stream[Any, Any]", call: str) -> None:
        await stream.recv_message()
        self.calls.append(call)
        if call in self.failing_calls:
            raise GRPCError(Status.UNAVAILABLE, "the server is not ready")


@define
class Service:
    """The calls of one socket. Their requests are empty."""

    calls: dict[str, Any]

    def __mapping__(self) -> dict[str, Handler]:
        empty = MESSAGES["Empty"]
        return {
            name: Handler(call, Cardinality.UNARY_UNARY, empty, MESSAGES[ANSWERS[name.rpartition("/")[2]]])
            for name, call in self.calls.items()
        }
