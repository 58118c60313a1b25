"""Sends requests to the routes of a running `serve` and checks the answers."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Final

import httpx
from attrs import define, field

from scripts.fuzz.corpus import keep, seeds
from scripts.fuzz.mutations import ASCII, mutated
from scripts.fuzz.targets import Target, targets
from scripts.fuzz.wire import Wire, spoken
from tests.running import Running

# Time limit of any request; the API server waits ten seconds for a review.
DEADLINE: Final = 10.0
# Allowed growth of memory after the first requests.
GROWTH_MIB: Final = 100
WARM_UP: Final = 500
CLIENTS: Final = 4
METHODS: Final = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")


TARGETS: Final = targets()


@define
class Findings:
    """The requests sent and the problems found."""

    sent: int = 0
    slowest: float = 0.0
    by_status: dict[int, int] = field(factory=dict)
    wrong: list[str] = field(factory=list)


TLS_LISTENERS: Final = ("https", "extender")


def rss_mib(running: Running) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) // 1024


async def fuzz(running: Running, urls: Mapping[str, str], seconds: float, seed: int) -> Findings:
    """Fuzzes all targets over several connections for `seconds`. `urls` has all listeners of all processes."""
    found = Findings()
    until = time.monotonic() + seconds
    clients = {
        name: httpx.AsyncClient(base_url=url, verify=running.trust, timeout=DEADLINE + 5, trust_env=False, http2=False)
        for name, url in urls.items()
    }
    first: list[int] = []
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(hammer(running, clients, found, until, Random(seed + number), first))
            for name in TLS_LISTENERS:
                wire = Wire(name, urls[name], running.trust)
                group.create_task(speak(wire, found, until, Random(f"{seed} {name}")))
    finally:
        for client in clients.values():
            await client.aclose()
    if first and (grown := rss_mib(running) - first[0]) > GROWTH_MIB:
        found.wrong.append(f"the process has grown by {grown} MiB")
    found.wrong += told_of(running)
    return found


def told_of(running: Running) -> list[str]:
    """Errors in the log of a process, and whether it still runs."""
    wrong = []
    log = running.log.read_text(errors="replace")
    if "Traceback" in log or '"level":"error"' in log.replace(" ", ""):
        wrong.append(f"the log has an error: {next(line for line in log.splitlines() if 'rror' in line)[:5000]}")
    if running.process.poll() is not None:
        wrong.append(f"the process has ended with {running.process.returncode}")
    return wrong


async def hammer(
    running: Running,
    clients: Mapping[str, httpx.AsyncClient],
    found: Findings,
    until: float,
    random: Random,
    first: list[int],
) -> None:
    replayed = [(target, one) for target in TARGETS if target.group for one in seeds(target.group)]
    while time.monotonic() < until and len(found.wrong) < 5:
        if replayed:
            target, body = replayed.pop()
        else:
            target = random.choice(TARGETS)
            body = mutated(random.choice(seeds(target.group)), random) if target.group else b""
        await send(clients[target.listener], target, body, found, random)
        if found.sent == WARM_UP:
            first.append(rss_mib(running))


async def speak(wire: Wire, found: Findings, until: float, random: Random) -> None:
    """HTTP/2 as kube-scheduler and the API server use it, and both protocols with damaged bytes."""
    here = [one for one in TARGETS if one.listener == wire.listener]
    while time.monotonic() < until and len(found.wrong) < 5:
        target = random.choice(here)
        body = mutated(random.choice(seeds(target.group)), random) if target.group else b""
        said = await spoken(wire, target, body, random)
        found.sent += 1
        if said.status is not None:
            found.by_status[said.status] = found.by_status.get(said.status, 0) + 1
        if said.problem:
            found.wrong.append(f"{said.how} {target.path}: {said.problem}; kept as {kept(target, body)}")


async def send(client: httpx.AsyncClient, target: Target, body: bytes, found: Findings, random: Random) -> None:
    method = "POST" if target.group else "GET"
    path = target.path
    if random.random() < 0.05:
        method = random.choice(METHODS)
    if random.random() < 0.05:
        path += random.choice(("/", "?", "&timeout=", "?node=")) + "".join(map(chr, random.choices(ASCII, k=12)))
        path = path.replace("#", "%23")
    kind = random.choice(("application/json", "application/json", "application/json", "text/plain", ""))
    began = time.monotonic()
    try:
        reply = await client.request(method, path, content=body, headers={"content-type": kind})
    except httpx.InvalidURL:
        return
    except httpx.TransportError as exc:
        found.wrong.append(f"{method} {path}: {exc!r}; kept as {kept(target, body)}")
        return
    took = time.monotonic() - began
    found.sent += 1
    found.slowest = max(found.slowest, took)
    found.by_status[reply.status_code] = found.by_status.get(reply.status_code, 0) + 1
    if reply.status_code >= 500 and reply.status_code != 503:
        found.wrong.append(f"{method} {path}: {reply.status_code} {reply.text[:200]}; kept as {kept(target, body)}")
    if took > DEADLINE:
        found.wrong.append(f"{method} {path}: answered after {took:.1f} s; kept as {kept(target, body)}")


def kept(target: Target, body: bytes) -> str:
    return str(keep(target.group, body)) if target.group else "no body"
