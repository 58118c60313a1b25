"""The pods of a node, as reported by its kubelet and its container runtime, each through its own socket.

Uses a few messages of the CRI (`runtime.v1`) and of the kubelet's PodResources API (`v1`). Field numbers are those of
the protobuf definitions.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from attrs import frozen
from grpclib.client import Channel

from webhook.core import keys
from webhook.core.device import REPLICA, is_uuid
from webhook.core.errors import GpuwardenError
from webhook.core.proof_devices import DRIVER
from webhook.evidence.protobuf import as_bytes, as_int64, as_text, fields_of
from webhook.evidence.rpc import CallFailedError, RawCodec, ask, faults_of

LIST_SANDBOXES: Final = "/runtime.v1.RuntimeService/ListPodSandbox"
LIST_CONTAINERS: Final = "/runtime.v1.RuntimeService/ListContainers"
LIST_PODS: Final = "/v1.PodResourcesLister/List"
# Labels that the kubelet sets on the containers of pods.
UID, NAMESPACE, NAME = "io.kubernetes.pod.uid", "io.kubernetes.pod.namespace", "io.kubernetes.pod.name"
# The annotation with the reserved GPUs.
RESERVED: Final = keys.GPU_UUID.name.encode()
# Only a sandbox in NOT_READY and a container in EXITED run nothing and can start nothing. An omitted state is 0: ready,
# or created.
READY: Final = 0
NOT_READY: Final = 1
EXITED: Final = 2
# Both respond in milliseconds.
TIMEOUT: Final = 5.0

PodName = tuple[str, str]
"""Namespace and name."""


class NodeUnknownError(GpuwardenError):
    """The state of the node's pods cannot be determined at this moment."""


@frozen
class RemainingContainers:
    """What the runtime still has of one pod: sandboxes and containers, and whether one of them is alive."""

    uid: str
    pod: PodName
    is_alive: bool
    ready_sandboxes: int = 0
    # The GPUs in the annotation of its reservation.
    reserved: frozenset[str] = frozenset()


@frozen
class GivenByKubelet:
    """What the kubelet has allocated to the containers of one pod: GPUs of a device plugin, and proof devices."""

    uuids: frozenset[str] = frozenset()
    proof_devices: frozenset[str] = frozenset()


@frozen
class NodePodsSnapshot:
    """By uid, what the runtime has of each pod; and by name, the pods that the kubelet wants to run with what it has
    given to them. A kubelet that has observed a pod's deletion does not name the pod any more. The pod's containers may
    still run, and a sync that has begun may start them."""

    remains: Mapping[str, RemainingContainers]
    wanted: Mapping[PodName, GivenByKubelet]


@frozen
class NodePods:
    """The sockets of one node. `own` is the uid of this process's pod: if the runtime or the kubelet does not name it,
    the sockets are those of another node, or the process behind them does not know its pods yet."""

    runtime: str
    kubelet: str
    own: str

    async def snapshot(self) -> NodePodsSnapshot:
        """Asks the kubelet first: after that it starts no new sync for a pod that it does not name. Raises
        NodeUnknownError."""
        try:
            wanted = await self._wanted()
            remains = await self._remains()
        except CallFailedError as exc:
            raise NodeUnknownError(str(exc)) from exc
        own = remains.get(self.own)
        if own is None or not own.is_alive:
            raise NodeUnknownError(f"container runtime: does not run this pod, {self.own}")
        if own.pod not in wanted:
            raise NodeUnknownError(f"kubelet: does not list this pod, {'/'.join(own.pod)}")
        return NodePodsSnapshot(remains, wanted)

    async def _wanted(self) -> dict[PodName, GivenByKubelet]:
        with faults_of("kubelet"):
            return wanted_in(await call(self.kubelet, LIST_PODS))

    async def _remains(self) -> dict[str, RemainingContainers]:
        with faults_of("container runtime"):
            sandboxes = await call(self.runtime, LIST_SANDBOXES)
            return containers_in(sandboxes, await call(self.runtime, LIST_CONTAINERS))


async def call(socket: str, method: str) -> bytes:
    """Call a list method. Each call opens a connection, because the other side may have restarted in between."""
    channel = Channel(path=socket.removeprefix("unix:"), codec=RawCodec())
    try:
        async with asyncio.timeout(TIMEOUT):
            return await ask(channel, method, b"")
    finally:
        channel.close()


def wanted_in(pods: bytes) -> dict[PodName, GivenByKubelet]:
    """The pods in the kubelet's response."""
    found = [as_bytes(value) for number, value in fields_of(pods) if number == 1]
    return {pod_name(one): given_in(one) for one in found}


def containers_in(sandboxes: bytes, containers: bytes) -> dict[str, RemainingContainers]:
    """By uid, from the runtime's two responses."""
    found: dict[str, RemainingContainers] = {}
    for one in (*parse_items(sandboxes, of_sandbox), *parse_items(containers, of_container)):
        known = found.get(one.uid, RemainingContainers(one.uid, one.pod, is_alive=False))
        ready = known.ready_sandboxes + one.ready_sandboxes
        is_alive, reserved = known.is_alive or one.is_alive, known.reserved | one.reserved
        found[one.uid] = RemainingContainers(one.uid, known.pod, is_alive, ready, reserved)
    return found


def pod_name(message: bytes) -> PodName:
    """From a PodResources message."""
    found = dict(fields_of(message))
    return as_text(found.get(2, b"")), as_text(found.get(1, b""))


def given_in(pod: bytes) -> GivenByKubelet:
    """From a PodResources message. A device plugin that shares a GPU appends a number to the UUID."""
    containers = tuple(messages_in(pod, 3))
    devices = (one for container in containers for one in messages_in(container, 2))
    ids = (as_text(value).partition(REPLICA)[0] for one in devices for number, value in fields_of(one) if number == 2)
    claims = (one for container in containers for one in messages_in(container, 5))
    results = [dict(fields_of(one)) for claim in claims for one in messages_in(claim, 4)]
    proofs = (as_text(one.get(4, b"")) for one in results if as_text(one.get(2, b"")) == DRIVER)
    return GivenByKubelet(frozenset(filter(is_uuid, ids)), frozenset(proofs))


def messages_in(message: bytes, field: int) -> Iterator[bytes]:
    """The messages in a repeated field."""
    return (as_bytes(value) for number, value in fields_of(message) if number == field)


def entry_of(message: bytes) -> tuple[str, str]:
    """An entry of a map from text to text."""
    found = dict(fields_of(message))
    return as_text(found.get(1, b"")), as_text(found.get(2, b""))


def parse_items(answer: bytes, reading: Callable[[bytes], RemainingContainers | None]) -> Iterator[RemainingContainers]:
    for message in messages_in(answer, 1):
        if (one := reading(message)) is not None:
            yield one


def of_sandbox(message: bytes) -> RemainingContainers:
    found = dict(fields_of(message))
    meta = dict(fields_of(as_bytes(found.get(2, b""))))
    pod = as_text(meta.get(3, b"")), as_text(meta.get(1, b""))
    state = as_int64(found.get(3, 0))
    return RemainingContainers(
        as_text(meta.get(2, b"")),
        pod,
        is_alive=state != NOT_READY,
        ready_sandboxes=int(state == READY),
        reserved=reserved_in(message),
    )


def reserved_in(sandbox: bytes) -> frozenset[str]:
    """The GPUs in the annotation of the reservation. Other annotations may be long, and are not decoded."""
    for entry in map(dict, map(fields_of, messages_in(sandbox, 6))):
        if entry.get(1) == RESERVED:
            return frozenset(filter(None, as_text(entry.get(2, b"")).split(",")))
    return frozenset()


def of_container(message: bytes) -> RemainingContainers | None:
    """None for a container that no kubelet has created."""
    labels, state = {}, 0
    for number, value in fields_of(message):
        if number == 6:
            state = as_int64(value)
        elif number == 8:
            name, label = entry_of(as_bytes(value))
            labels[name] = label
    if UID not in labels:
        return None
    pod = labels.get(NAMESPACE, ""), labels.get(NAME, "")
    return RemainingContainers(labels[UID], pod, is_alive=state != EXITED)
