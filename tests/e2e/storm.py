"""Many concurrent clients that create pods with GPUs and retry after denials."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import httpx
from attrs import define, field

from tests.e2e.kube import PODS, ApiError, Raw, pod
from tests.e2e.processes import Site

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
SHORT_LIVED = {"kubelet.test/ends": "Succeeded", "kubelet.test/runs-for": "500ms"}


@define(eq=False)
class Tally:
    """The answers that the clients got."""

    made: list[float] = field(factory=list)
    """The duration of each successful creation."""
    denied: list[float] = field(factory=list)
    why: Counter[tuple[int, str]] = field(factory=Counter)
    unclear: list[str] = field(factory=list)
    """Errors that are not denials by gpuwarden."""


@define(eq=False)
class Storm:
    """Clients of one site. `seed` fixes what they request, not the order."""

    site: Site
    clients: int = 64
    seed: int = 1
    tally: Tally = field(factory=Tally)
    rng: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # noqa: S311 - a plan, not a secret

    async def create(self, count: int, wanted: Callable[[random.Random], Raw]) -> None:
        """Creates `count` pods, each retried until it is created."""
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await self.create_until_made(wanted(self.rng))

        await asyncio.gather(*(client() for _ in range(min(self.clients, count))))

    async def create_until_made(self, content: Raw) -> Raw:
        pause = FIRST_PAUSE
        while True:
            made = await self.try_create(content)
            if made is not None:
                return made
            await asyncio.sleep(pause * (0.5 + self.rng.random()))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def try_create(self, content: Raw) -> Raw | None:
        """Tries once; None if it was denied."""
        started = time.monotonic()
        try:
            made = await self.site.kube.create(PODS, content, self.site.namespace)
        except ApiError as exc:
            self.tally.denied.append(time.monotonic() - started)
            if "denied the request" in exc.message:
                self.tally.why[exc.status, exc.reason] += 1
            else:
                self.tally.unclear.append(str(exc))
        except httpx.HTTPError as exc:
            self.tally.unclear.append(repr(exc))
        else:
            self.tally.made.append(time.monotonic() - started)
            return made
        return None

    async def reap(self, share: float = 0.9, *, forgives: bool = False) -> None:
        """Deletes running pods while more than this share of the GPUs is in use. Runs until cancelled. With `forgives`,
        an API server that is down only causes a delay."""
        asked: set[str] = set()

        async def delete(uid: str, name: str) -> None:
            try:
                await self.site.kube.delete(PODS, name, self.site.namespace)
            except ApiError as exc:
                asked.discard(uid)
                if exc.status != httpx.codes.NOT_FOUND and not forgives:
                    raise
            except httpx.HTTPError:
                asked.discard(uid)
                if not forgives:
                    raise

        checker = self.site.checker
        async with asyncio.TaskGroup() as tasks:
            while True:
                room = len(checker.gpus) - int(share * len(self.site.gpus))
                running = [one for one in checker.live_pods.values() if one.phase == "Running" and one.uid not in asked]
                for one in self.rng.sample(running, min(len(running), max(0, room), 8)):
                    asked.add(one.uid)
                    tasks.create_task(delete(one.uid, one.name))
                await asyncio.sleep(0.05)


# The API server removes a pod at once if it is bound between two steps of its deletion, and kwok may write that a pod
# runs after it has stopped. Such a pod may have run until it was gone, so it keeps its GPUs for this long, not for the
# default of 30 s.
GRACE = 1


def plain(_: random.Random) -> Raw:
    return pod(None, gpus=1, terminationGracePeriodSeconds=GRACE)


def mixed(rng: random.Random) -> Raw:
    """Mostly one GPU, sometimes two; a third of the pods complete by themselves."""
    annotations = SHORT_LIVED if rng.random() < 1 / 3 else {}
    gpus = 2 if rng.random() < 0.1 else 1
    return pod(None, gpus=gpus, annotations=annotations, terminationGracePeriodSeconds=GRACE)
