"""Evidence and native pods that come and go all the time."""

import asyncio
import itertools
import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TypeVar

import httpx
from attrs import define, field

from tests.e2e.dra.seen import DeviceKey, SeenClaim, SeenObjects, SeenPod
from tests.e2e.dra.test_proof_devices import Proofs
from tests.e2e.kube import CONFIG_MAPS, PODS, ApiError, Kube, NotInTimeError, Raw, wait_until
from tests.e2e.processes import running_tasks
from webhook.core.proof_devices import hash_attribute
from webhook.runtime.clock import utc_now

Answer = TypeVar("Answer")
RETRY_AFTER = 0.1
LOOK_EVERY, WRITE_EVERY = 0.05, 0.5
# A read of etcd that is cheap: its answer has the revision.
ONE_KEY = {"key": "AA==", "serializable": True}
CLIENTS = 16
# For pods whose evidence ends just before the churn does.
PATIENCE = 60.0


@define(eq=False)
class RevisionClock:
    """When a resource version was written. It asks etcd for its revision all the time: that is quick even while the API
    server is slow."""

    _etcd: str
    _revisions: list[int] = field(factory=list)
    _begun: list[datetime] = field(factory=list)
    _ended: list[datetime] = field(factory=list)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with httpx.AsyncClient(base_url=self._etcd, trust_env=False) as client:
            while True:
                begun = utc_now()
                with suppress(httpx.HTTPError):
                    answer = await client.post("/v3/kv/range", json=ONE_KEY)
                    self._revisions.append(int(answer.json()["header"]["revision"]))
                    self._begun.append(begun)
                    self._ended.append(utc_now())
                await asyncio.sleep(LOOK_EVERY)

    def earliest(self, version: int) -> datetime:
        """A moment before the version was written."""
        return self._begun[max(0, bisect_left(self._revisions, version) - 1)]

    def latest(self, version: int) -> datetime:
        """A moment after the version was written."""
        return self._ended[min(len(self._ended) - 1, bisect_left(self._revisions, version))]


@define(eq=False)
class WriteTimes:
    """How long a write to the API server takes, in seconds."""

    _kube: Kube
    _namespace: str
    seconds: list[float] = field(factory=list)

    async def run(self) -> None:
        """Writes a ConfigMap until cancelled."""
        made = await self._kube.create(CONFIG_MAPS, {"metadata": {"generateName": "written-"}}, self._namespace)
        for number in itertools.count():
            begun = time.monotonic()
            with suppress(httpx.HTTPError):
                change = {"data": {"number": str(number)}}
                await self._kube.patch(CONFIG_MAPS, made["metadata"]["name"], change, self._namespace)
                self.seconds.append(time.monotonic() - begun)
            await asyncio.sleep(WRITE_EVERY)


@define
class Period:
    """A time during which a node was proven for a hash."""

    hash: str
    start: datetime
    end: datetime


@define(eq=False)
class ProofChurn:
    """Changes the evidence of all nodes, and keeps as many pods as there are GPUs: some run, the others wait for a
    proven GPU. A node stays as it is for about `pace` seconds."""

    proofs: Proofs
    gpus: Mapping[DeviceKey, str]
    hashes: Sequence[str]
    pace: float
    asking: Callable[[str, int, str], Raw]
    clock: RevisionClock = field(init=False)
    writes: WriteTimes = field(init=False)
    seen: SeenObjects = field(init=False)
    periods: dict[str, list[Period]] = field(factory=lambda: defaultdict(list), init=False)
    begun: datetime = field(factory=utc_now, init=False)
    over: datetime = field(factory=utc_now, init=False)
    _rng: random.Random = field(factory=lambda: random.Random(7), init=False)  # noqa: S311 - a plan, not a secret

    def __attrs_post_init__(self) -> None:
        self.clock = RevisionClock(self.proofs.cluster.etcd)
        self.writes = WriteTimes(self.proofs.kube, self.proofs.namespace)
        self.seen = SeenObjects(self.proofs.kube, self.proofs.namespace)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end the evidence stays as it is, and what follows from its last changes is seen."""
        nodes = sorted({pool for _, pool, _ in self.gpus})
        async with self.seen.watching(), running_tasks(self.clock.run(), self.writes.run()):
            async with running_tasks(self._create_pods(), self._remove_ended(), *map(self._change_evidence, nodes)):
                yield
            self.over = utc_now()
            with suppress(NotInTimeError):  # the figures tell
                await wait_until(self._is_settled, seconds=PATIENCE)

    async def end(self) -> None:
        """Deletes all pods. One request for thousands of them takes longer than a client waits."""
        names = iter([one.name for one in self.seen.pods.values() if not one.marked])

        async def delete_in_turn() -> None:
            for name in names:
                await self._delete(name)

        await asyncio.gather(*(delete_in_turn() for _ in range(CLIENTS)))

    # Evidence.

    async def _change_evidence(self, node: str) -> None:
        while True:
            await self._wait(0, 0.25)
            hash = self._rng.choice(self.hashes)
            for _ in range(self._rng.choice((0, 1, 2))):
                await self._prove(node, hash, self.pace)
                await self._wait(0.2, 0.5)
            await self._rng.choice((self._end, self._withdraw, self._change_hash))(node, hash)

    async def _end(self, node: str, hash: str) -> None:
        end = await self._prove(node, hash, self.pace / 2)
        await asyncio.sleep(max(0, (end - utc_now()).total_seconds()))
        await self._wait(0, 0.25)

    async def _withdraw(self, node: str, hash: str) -> None:
        await self._prove(node, hash, self.pace * 2)
        await self._wait(0.3, 1)
        with suppress(ApiError):  # the answer to the first request was lost
            await insisted(lambda: self.proofs.withdraws(node))
        self._has_lost(node)

    async def _change_hash(self, node: str, hash: str) -> None:
        for one in (hash, self._rng.choice([one for one in self.hashes if one != hash])):
            await self._prove(node, one, self.pace * 2)
            await self._wait(0.3, 1)

    async def _prove(self, node: str, hash: str, seconds: float) -> datetime:
        start = utc_now()
        end = await insisted(lambda: self.proofs.proves(node, hash, timedelta(seconds=seconds)))
        self._has_lost(node)
        self.periods[node].append(Period(hash, start, end))
        return end

    def _has_lost(self, node: str) -> None:
        for last in self.periods[node][-1:]:
            last.end = min(last.end, utc_now())

    async def _wait(self, shortest: float, longest: float) -> None:
        await asyncio.sleep(self._rng.uniform(shortest, longest) * self.pace)

    # Pods.

    async def _create_pods(self) -> None:
        for _ in self.gpus:
            self.seen.removed.put_nowait("")
        names = (f"p-{number}" for number in itertools.count())
        await asyncio.gather(*(self._create_in_turn(names) for _ in range(CLIENTS)))

    async def _create_in_turn(self, names: Iterator[str]) -> None:
        while True:
            await self.seen.removed.get()
            await self._create(next(names))

    async def _create(self, name: str) -> None:
        content = self.asking(name, self._rng.choice((1, 1, 1, 2)), self._rng.choice(self.hashes))
        runs = self._rng.uniform(0.5, 2) * self.pace
        notes = {"kubelet.test/ends": "Succeeded", "kubelet.test/runs-for": f"{runs * 1000:.0f}ms"}
        content["metadata"]["annotations"] |= notes
        with suppress(ApiError):  # the answer to the first request was lost
            await insisted(lambda: self.proofs.kube.create(PODS, content, self.proofs.namespace))

    async def _remove_ended(self) -> None:
        await asyncio.gather(*(self._remove_in_turn() for _ in range(CLIENTS)))

    async def _remove_in_turn(self) -> None:
        while True:
            name = await self.seen.ended.get()
            if not self.seen.pods[name].marked:
                await self._delete(name)

    async def _delete(self, name: str) -> None:
        with suppress(ApiError):  # it is gone
            await insisted(lambda: self.proofs.kube.delete(PODS, name, self.proofs.namespace))

    # What was seen.

    def bound(self) -> list[SeenPod]:
        return [one for one in self.seen.pods.values() if one.bound]

    def faults(self) -> list[str]:
        """What must never be: a device of two claims, a pair of two GPUs, a proof for another hash, another node."""
        return [*self.seen.faults, *(words for one in self.seen.claims.values() for words in self._wrong_pairs(one))]

    def unseen(self) -> Iterator[str]:
        """What a watch that is late has not shown yet."""
        claims = {one.pod for one in self.seen.claims.values()}
        yield from (f"{name} has a claim and was not seen" for name in sorted(claims - self.seen.pods.keys()))
        yield from (f"{one.name} is bound without a claim" for one in self.bound() if one.name not in claims)

    def _wrong_pairs(self, claim: SeenClaim) -> Iterator[str]:
        pod = self.seen.pods.get(claim.pod)
        if pod is None:
            return
        for gpu, proof in claim.pairs:
            proven = {(one.uuid, one.hash) for one in self.seen.devices[proof]}
            if proven != {(self.gpus[gpu], hash_attribute(pod.hash))}:
                yield f"{pod.name} asks for {pod.hash} and has {gpu} with {proof}: {proven}"
            if pod.bound and {gpu[1], proof[1]} != {pod.node}:
                yield f"{pod.name} is on {pod.node} and has {gpu} with {proof}"

    def seconds_bound_late(self) -> list[float]:
        """Of each pod that was bound: how long after the end of the evidence of its node; 0 if before."""
        return [self._lateness(one) for one in self.bound()]

    def _lateness(self, pod: SeenPod) -> float:
        moment = self.clock.latest(pod.bound)
        begun = [one for one in self.periods[pod.node] if one.hash == pod.hash and one.start <= moment]
        if not begun:
            return float("inf")
        return max(0.0, (moment - max(one.end for one in begun)).total_seconds())

    def seconds_until_marked(self) -> list[float]:
        """Of each pod whose proof ended while it ran: from the end, or from the write of the slice that tells it, until
        the pod was marked for deletion or had ended by itself."""
        claims = {one.pod: one for one in self.seen.claims.values()}
        found = []
        for pod in self.bound():
            if pod.name not in claims:
                continue
            stops = min((self.clock.latest(one) for one in (pod.marked, pod.ended) if one), default=None)
            ends = [self._end_of(proof, pod, stops or utc_now()) for _, proof in claims[pod.name].pairs]
            due = min((one for one in ends if one is not None), default=self.over)
            if due < self.over:
                found.append((stops - due).total_seconds() if stops else float("inf"))
        return found

    async def _is_settled(self) -> bool:
        await asyncio.sleep(1)  # it looks at all pods
        return not list(self.unseen()) and float("inf") not in self.seconds_until_marked()

    def _end_of(self, proof: DeviceKey, pod: SeenPod, stops: datetime) -> datetime | None:
        """When the proof of the bound pod ended; None if it did not before the pod stopped. An end that was moved away
        within a second does not count: the pod may have stayed or not."""
        states = [*self.seen.devices[proof], None]
        for state, following in itertools.pairwise(states):
            assert state is not None
            if following is not None and following.version <= pod.bound:
                continue
            due = max(state.end, *(self.clock.earliest(one) for one in (state.version, pod.bound)))
            changed = utc_now() if following is None else self.clock.earliest(following.version)
            stays_ended = following is not None and following.end <= state.end
            if due < stops and (stays_ended or due + timedelta(seconds=1) < changed):
                return due
        return None


async def insisted(request: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeats a request until it is answered."""
    while True:
        try:
            return await request()
        except httpx.HTTPError:
            await asyncio.sleep(RETRY_AFTER)
