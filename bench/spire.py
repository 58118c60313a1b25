"""The cost of polling all agents of a SPIRE Server and finding changes.

The server is the tests' double in another thread, with real mTLS. Times are CPU times of the polling thread, which does
TLS, gRPC, parsing and comparing. `first` reads every agent, `same` finds no change, and in `all new` every agent was
attested again.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from attrs import define, frozen

from bench.figures import Target, typical
from bench.servers import BenchError
from tests.evidence.certificates import Authority
from tests.evidence.doubles import SERVER_ID, TRUST_DOMAIN, VERIFIER, SpireDouble, WorkloadApiDouble, agent
from webhook.core.agent_naming import naming_of
from webhook.evidence.spire.attested import AgentRules
from webhook.evidence.spire.spire_server import SpireServer, TcpServer
from webhook.evidence.spire.workload_api import OwnIdentity
from webhook.runtime.clock import utc_now
from webhook.runtime.telemetry import configure_logging

Raw = dict[str, Any]

HOUR = timedelta(hours=1)
RULES = AgentRules(
    trust_domain=TRUST_DOMAIN,
    attestors=frozenset({"x509pop"}),
    node=naming_of("x509pop:san:node-name", "node"),
    hash=naming_of("x509pop:san:attestation-hash", "hash"),
    agent_ttl=HOUR,
    max_age=timedelta(minutes=40),
    skew=timedelta(seconds=5),
)


@frozen
class Plan:
    agents: int = 5_000
    rounds: int = 5


SHORT = Plan(rounds=2)


@define
class Turned:
    """A clock that stands still until it is moved: no agent expires while others are polled."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now


@contextmanager
def served(agents: list[Any], authority: Authority, socket: str) -> Iterator[SpireDouble]:
    """SPIRE and a Workload API in a separate thread."""
    spire = SpireDouble(agents)
    api = WorkloadApiDouble(socket, [authority.issue(VERIFIER)], [authority.root])
    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def begin() -> None:
        await api.start()
        await spire.start(authority.issue(SERVER_ID), authority)
        ready.set()

    async def end() -> None:
        await spire.stop()
        await api.stop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not ready.wait(60):
        raise BenchError("the SPIRE double did not start")
    try:
        yield spire
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def fleet(size: int, clock: Turned, serial: int) -> list[Any]:
    """This number of agents, attested now, with selectors like those of x509pop."""
    return [
        agent(
            expires_at=clock.now + HOUR,
            id=f"/spire/agent/x509pop/{number:040x}",
            serial=str(serial * size + number),
            selectors=[
                ("x509pop", f"ca:fingerprint:{7:040x}"),
                ("x509pop", f"san:attestation-hash:{number % 6:064x}"),
                ("x509pop", f"san:node-name:node-{number}"),
                ("x509pop", f"serialnumber:{number:040x}"),
                ("x509pop", f"subject:cn:node-{number}"),
            ],
        )
        for number in range(size)
    ]


async def one_round(plan: Plan, directory: Path) -> dict[str, float]:
    """CPU seconds by kind of poll."""
    clock, authority, socket = Turned(utc_now().replace(microsecond=0)), Authority(), str(directory / "agent.sock")
    with served(fleet(plan.agents, clock, 0), authority, socket) as spire:
        identity = OwnIdentity(socket, TRUST_DOMAIN, clock)
        server = TcpServer("127.0.0.1", spire.port, TRUST_DOMAIN, identity)
        patience = timedelta(minutes=1)
        provider = SpireServer(server, RULES, clock, timedelta(seconds=1), poll_timeout=patience, deadline=patience)

        async def polled() -> float:
            clock.now += timedelta(seconds=1)
            began = time.thread_time()
            if len(await provider.poll()) != plan.agents:
                raise BenchError("an agent is missing")
            return time.thread_time() - began

        try:
            found = {"first": await polled(), "same": await polled()}
            spire.agents = fleet(plan.agents, clock, 1)
            found["all new"] = await polled()
        finally:
            await identity.close()
    return found


def run(plan: Plan) -> Raw:
    configure_logging("error")
    with tempfile.TemporaryDirectory() as directory:
        rounds = [asyncio.run(one_round(plan, Path(directory))) for _ in range(plan.rounds)]
    return {
        "agents": plan.agents,
        "cpu_s": {kind: round(typical([one[kind] for one in rounds]), 4) for kind in rounds[0]},
    }


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    return [
        Target(f"SPIRE, {found['agents']:,} agents polled and compared, {kind}", seconds, slack, " s of CPU")
        for kind, seconds in found["cpu_s"].items()
    ]


def lines(found: Raw) -> list[str]:
    head = ["| agents | poll | CPU |", "|---:|---|---:|"]
    rows = [f"| {found['agents']:,} | {kind} | {1e3 * seconds:.0f} ms |" for kind, seconds in found["cpu_s"].items()]
    return head + rows
