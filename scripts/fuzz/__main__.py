"""Fuzzes the parsers, then the routes of a real server on loopback.

    python -m scripts.fuzz [--seconds 60] [--seed N]

It prints the seed. Findings are added to the corpus, and later runs try them first.
"""

import argparse
import asyncio
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random, SystemRandom
from tempfile import TemporaryDirectory

from scripts.fuzz.corpus import keep, seeds
from scripts.fuzz.mutations import mutated
from scripts.fuzz.parsers import PARSERS, Parser
from scripts.fuzz.routes import fuzz, told_of
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey
from tests.running import GPUWARDEN, serving, started
from tests.web.harness import INVENTORY
from webhook.runtime.telemetry import configure_logging

# Time limit for parsing any text that fits into a request or an object.
SLOWEST = 2.0


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=60.0)
    asked.add_argument("--seed", type=int, default=SystemRandom().randrange(2**32))
    options = asked.parse_args()
    print(f"seed {options.seed}")
    configure_logging("error")  # parsers log what they ignore
    wrong = parsers(options.seconds / 3, Random(options.seed))
    wrong += asyncio.run(routes(options.seconds * 2 / 3, options.seed))
    print(f"{len(wrong)} findings")
    return 1 if wrong else 0


def parsers(seconds: float, random: Random) -> list[str]:
    until = time.monotonic() + seconds
    read, wrong = 0, []
    for parser in PARSERS:
        for content in seeds(parser.seeds):
            wrong += tried(parser, content)
    while time.monotonic() < until and len(wrong) < 5:
        parser = random.choice(PARSERS)
        wrong += tried(parser, mutated(random.choice(seeds(parser.seeds)), random))
        read += 1
    print(f"parsers: {read} inputs", *wrong, sep="\n", flush=True)
    return wrong


def tried(parser: Parser, content: bytes, *, keeps: bool = True) -> list[str]:
    """What went wrong; None if the input was parsed or raised an error that the parser names."""
    began = time.process_time()  # CPU time, independent of other load
    problem = ""
    try:
        parser.read(content)
    except parser.refuses:
        pass
    except Exception as exc:  # noqa: BLE001 - unnamed exceptions are findings
        problem = f"{type(exc).__name__}: {exc!s:.200}"
    took = time.process_time() - began
    if not problem and took > SLOWEST:
        problem = f"{took:.1f} s"
    if not problem:
        return []
    return [f"{parser.name}: {problem}" + (f"; kept as {keep(parser.seeds, content)}" if keeps else "")]


async def routes(seconds: float, seed: int) -> list[str]:
    with TemporaryDirectory() as place:
        directory = Path(place)
        agent = JwtWorkloadApiDouble(str(directory / "agent.sock"), SigningKey.make())
        await agent.start()
        trusted = ["--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{agent.path}"]
        flags = ["--evidence", "jwt-svid", "--log-level", "warn", *trusted]
        try:
            with ExitStack() as stack:
                port = free_port()
                flags += ["--extender-plain-address", f"127.0.0.1:{port}"]
                running = await asyncio.to_thread(stack.enter_context, serving(directory, INVENTORY, flags))
                scorer = [GPUWARDEN, "score", "--inventory", "inventory.json", "--ui-port", "0", "--log-level", "warn"]
                scoring = await asyncio.to_thread(stack.enter_context, started(scorer, directory))
                others = {"plain-extender": f"http://127.0.0.1:{port}", "scorer": scoring.urls["http"]}
                found = await fuzz(running, {**running.urls, **others}, seconds, seed)
                found.wrong += told_of(scoring)
        finally:
            await agent.stop()
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(found.by_status.items()))
    print(f"routes: {found.sent} requests, the slowest {found.slowest:.2f} s: {statuses}", *found.wrong, sep="\n")
    return found.wrong


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
