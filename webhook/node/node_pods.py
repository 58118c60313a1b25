"""What a node has of its pods, by the word of its kubelet and its container runtime, each asked at its own socket.

A few messages of the CRI (`runtime.v1`) and of the kubelet's PodResources API (`v1`). Numbers are the wire.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from attrs import frozen
from grpclib.client import Channel

from webhook.core.errors import GpuwardenError
from webhook.evidence.protobuf import as_bytes, as_int64, as_text, fields_of
from webhook.evidence.rpc import CallFailedError, RawCodec, ask, faults_of

LIST_SANDBOXES: Final = "/runtime.v1.RuntimeService/ListPodSandbox"
LIST_CONTAINERS: Final = "/runtime.v1.RuntimeService/ListContainers"
LIST_PODS: Final = "/v1.PodResourcesLister/List"
# Labels that the kubelet gives to the containers of pods.
UID, NAMESPACE, NAME = "io.kubernetes.pod.uid", "io.kubernetes.pod.namespace", "io.kubernetes.pod.name"
# The only states in which nothing runs and nothing can be started. A state that is left out is 0: ready, or created.
READY: Final = 0
NOT_READY: Final = 1
EXITED: Final = 2
# Both answer in milliseconds.
TIMEOUT: Final = 5.0

PodName = tuple[str, str]
"""Namespace and name."""


class NodeUnknownError(GpuwardenError):
    """What the node has of its pods cannot be said at this moment."""


@frozen
class RemainingContainers:
    """What the runtime has of one pod: a sandbox or a container of it, which is alive or not."""

    uid: str
    pod: PodName
    is_alive: bool
    ready_sandboxes: int = 0


@frozen
class NodePodsSnapshot:
    """Of pods by uid, what the runtime has of them; and by name, which pods the kubelet wants to run. A kubelet that
    has heard that a pod's object is gone does not name the pod any more. Its containers may run, and a sync that it has
    begun may start them."""

    remains: Mapping[str, RemainingContainers]
    wanted: Collection[PodName]


@frozen
class NodePods:
    """The sockets of one node. `own` is the uid of the pod that this runs in: where runtime or kubelet do not name it,
    they are not those of this node, or have not heard of their pods yet."""

    runtime: str
    kubelet: str
    own: str

    async def look(self) -> NodePodsSnapshot:
        """The kubelet is asked first: of a pod that it does not name it begins no sync after that. Raises
        NodeUnknownError."""
        try:
            wanted = await self._wanted()
            remains = await self._remains()
        except CallFailedError as exc:
            raise NodeUnknownError(str(exc)) from exc
        own = remains.get(self.own)
        if own is None or not own.is_alive:
            raise NodeUnknownError(f"container runtime: it does not run this pod, {self.own}")
        if own.pod not in wanted:
            raise NodeUnknownError(f"kubelet: it does not name this pod, {'/'.join(own.pod)}")
        return NodePodsSnapshot(remains, wanted)

    async def _wanted(self) -> frozenset[PodName]:
        with faults_of("kubelet"):
            return wanted_in(await asked(self.kubelet, LIST_PODS))

    async def _remains(self) -> dict[str, RemainingContainers]:
        with faults_of("container runtime"):
            sandboxes = await asked(self.runtime, LIST_SANDBOXES)
            return remains_in(sandboxes, await asked(self.runtime, LIST_CONTAINERS))


async def asked(socket: str, method: str) -> bytes:
    """All that there is to be listed. One connection a question: the other side may have started anew in between."""
    channel = Channel(path=socket.removeprefix("unix:"), codec=RawCodec())
    try:
        async with asyncio.timeout(TIMEOUT):
            return await ask(channel, method, b"")
    finally:
        channel.close()


def wanted_in(pods: bytes) -> frozenset[PodName]:
    """Of the kubelet's answer."""
    return frozenset(pod_name(as_bytes(value)) for number, value in fields_of(pods) if number == 1)


def remains_in(sandboxes: bytes, containers: bytes) -> dict[str, RemainingContainers]:
    """Of the runtime's two answers."""
    found: dict[str, RemainingContainers] = {}
    for one in (*each(sandboxes, of_sandbox), *each(containers, of_container)):
        known = found.get(one.uid, RemainingContainers(one.uid, one.pod, is_alive=False))
        ready = known.ready_sandboxes + one.ready_sandboxes
        found[one.uid] = RemainingContainers(one.uid, known.pod, known.is_alive or one.is_alive, ready)
    return found


def pod_name(message: bytes) -> PodName:
    """Of PodResources."""
    found = dict(fields_of(message))
    return as_text(found.get(2, b"")), as_text(found.get(1, b""))


def each(answer: bytes, reading: Callable[[bytes], RemainingContainers | None]) -> Iterator[RemainingContainers]:
    for number, value in fields_of(answer):
        if number == 1 and (one := reading(as_bytes(value))) is not None:
            yield one


def of_sandbox(message: bytes) -> RemainingContainers:
    found = dict(fields_of(message))
    meta = dict(fields_of(as_bytes(found.get(2, b""))))
    pod = as_text(meta.get(3, b"")), as_text(meta.get(1, b""))
    state = as_int64(found.get(3, 0))
    return RemainingContainers(
        as_text(meta.get(2, b"")), pod, is_alive=state != NOT_READY, ready_sandboxes=int(state == READY)
    )


def of_container(message: bytes) -> RemainingContainers | None:
    """None for one that no kubelet has made."""
    labels, state = {}, 0
    for number, value in fields_of(message):
        if number == 6:
            state = as_int64(value)
        elif number == 8:
            entry = dict(fields_of(as_bytes(value)))
            labels[as_text(entry.get(1, b""))] = as_text(entry.get(2, b""))
    if UID not in labels:
        return None
    pod = labels.get(NAMESPACE, ""), labels.get(NAME, "")
    return RemainingContainers(labels[UID], pod, is_alive=state != EXITED)
