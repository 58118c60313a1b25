"""Reviews per second over TLS: gpuwarden, a Go webhook that only adds an annotation, and Starlette with a constant.

`go` decodes the pod, adds the annotation and sends the difference, as controller-runtime's examples do. `go_minimal`
answers the same patch without reading the pod. The target applies to both.
All servers run all the time, and one client on the same machine sends requests to them in turns. The results also show
the CPU time of a review, because other load disturbs it less than the rate.
"""

import itertools
import json
import random
import resource
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from bench import go
from bench.figures import Target, typical
from bench.pods import Asker, create_review
from bench.servers import Running, free_port, gpuwarden, other, write_certificates, write_inventory

Raw = dict[str, Any]

GPUS = 100_000
UID = "@UID@"
# Enough pods that every model and hash occurs: with few different pods, their GPUs would run out.
PODS_OF_A_WAY = 80
NO_GO = "Skipped: there is no Go here to build the floor and the client with."
NOT_BUILT = "Skipped: the floor is not built yet, which takes minutes; `make bench` builds it."
PROTOCOLS = {"http/1.1": (), "h2": ("-http2",)}
FLOORS = ("go", "go_minimal")


@frozen
class Plan:
    """The size of the measurement."""

    rounds: int = 5
    reviews: int = 3_000
    # The API server keeps at most 25 idle connections to a webhook; the same number of streams with HTTP/2.
    workers: int = 20
    may_build: bool = True


SHORT = Plan(rounds=3, reviews=1_000, may_build=False)


@frozen
class Client:
    """The client and its requests."""

    binary: Path
    directory: Path
    templates: Path
    plan: Plan

    def ask(self, server: Running, uid_prefix: str, options: Sequence[str]) -> Raw:
        """One round: the client's report and the CPU time of both sides."""
        own, theirs = children_cpu(), server.cpu_seconds()
        amounts = ("-count", str(self.plan.reviews), "-workers", str(self.plan.workers), "-prefix", uid_prefix)
        where = ("-url", f"{server.url}{server.path}?timeout=10s", "-ca", server.ca, "-templates", self.templates)
        report = go.load(self.binary, self.directory, *where, *amounts, *options)
        micros = 1e6 / self.plan.reviews
        return {
            **report,
            "cpu_us": micros * (server.cpu_seconds() - theirs),
            "client_cpu_us": micros * (children_cpu() - own),
        }


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(plan: Plan) -> Raw:
    path = go.find()
    if path is None:
        return {"skipped": NO_GO}
    if not (plan.may_build or go.is_built()):
        return {"skipped": NOT_BUILT}
    binary = go.build(path)
    with tempfile.TemporaryDirectory() as work, ExitStack() as servers:
        directory = Path(work)
        client = Client(binary, directory, write_templates(directory), plan)
        running = start(servers, binary, directory)
        rounds = [one_round(number, client, running) for number in range(plan.rounds + 1)]
    return {
        "go": go.version(path),
        "controller_runtime": go.floor_version(),
        "gpus": GPUS,
        "workers": plan.workers,
        "reviews_a_round": plan.reviews,
        "servers": {proto: {name: middle(rounds[1:], proto, name) for name in running} for proto in PROTOCOLS},
        "ratios": {proto: ratios(rounds[1:], proto, running) for proto in PROTOCOLS},
    }


def start(servers: ExitStack, binary: Path, directory: Path) -> dict[str, Running]:
    certificates: Path = write_certificates(directory)
    inventory = write_inventory(directory, GPUS)
    floor, hypercorn, listener = free_port(), free_port(), free_port()
    bare: list[str | Path] = [sys.executable, "-m", "bench.bare"]
    serve: list[str | Path] = [binary, "serve", "-port", str(floor), "-certificates", certificates]
    on = {"hypercorn": hypercorn, "listener": listener}
    running = {
        "gpuwarden": servers.enter_context(gpuwarden(directory, "--inventory", inventory, "--pending-deadline", "1h")),
        "go": servers.enter_context(other("go", serve, directory, floor)),
    }
    running["go_minimal"] = evolve(running["go"], path="/minimal")
    for name, port in on.items():
        command = [*bare, name, str(port), certificates]
        running[f"bare_{name}"] = servers.enter_context(other(f"bare_{name}", command, directory, port))
    return running


def write_templates(directory: Path) -> Path:
    """Pods with several kinds of small claims, so that all can be served. The client inserts the uid."""
    names = [f"gpu-node-{number:05d}" for number in range(GPUS // 8)]
    path = directory / "reviews.json"
    path.write_text(json.dumps([create_review(raw, UID) for raw in served_pods(names)]))
    return path


def served_pods(names: Sequence[str]) -> Iterator[Raw]:
    asker = Asker(names, random.Random(7), sizes={1: 3, 2: 1})  # noqa: S311 - the same pods each time, no secret
    for way in (Asker.plain, Asker.hashed, Asker.labelled_and_hashed, Asker.selecting_zone, Asker.with_affinity):
        for _ in range(PODS_OF_A_WAY):
            yield asker.make(way)


def one_round(number: int, client: Client, running: dict[str, Running]) -> dict[str, dict[str, Raw]]:
    """Measures every server with every protocol; the first round is a warm-up."""
    return {
        proto: {
            name: client.ask(server, f"{number:08x}-{position:04x}-4000-8000-", options)
            for name, server in running.items()
        }
        for position, (proto, options) in enumerate(PROTOCOLS.items())
    }


Rounds = Sequence[dict[str, dict[str, Raw]]]


def middle(rounds: Rounds, proto: str, name: str) -> Raw:
    found = [one[proto][name] for one in rounds]
    problems = [one["first_problem"] for one in found if "first_problem" in one]
    return {
        "per_second": round(typical([one["per_second"] for one in found])),
        "p50_ms": round(typical([one["p50_ms"] for one in found]), 2),
        "p99_ms": round(typical([one["p99_ms"] for one in found]), 2),
        "cpu_us": round(typical([one["cpu_us"] for one in found])),
        "client_cpu_us": round(typical([one["client_cpu_us"] for one in found])),
        "lost": sum(one["lost"] for one in found),
        "refused": sum(one["refused"] for one in found),
        "protocol": found[0]["protocol"],
        **({"first_problem": problems[0]} if problems else {}),
    }


def ratios(rounds: Rounds, proto: str, names: dict[str, Running]) -> Raw:
    """Against the Go webhooks, each round's own: rates, and reviews by CPU second, which leaves out how many cores
    each can use."""
    found: Raw = {}
    for name, floor in itertools.product(names, FLOORS):
        pairs = [(one[proto][name], one[proto][floor]) for one in rounds]
        found[f"{name}/{floor}"] = round(typical([ours["per_second"] / it["per_second"] for ours, it in pairs]), 3)
        found[f"{name}/{floor} by cpu"] = round(typical([it["cpu_us"] / ours["cpu_us"] for ours, it in pairs]), 3)
    return found


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    if "skipped" in found:
        return []
    return [
        Target(
            f"gpuwarden/{floor}, {proto}", found["ratios"][proto][f"gpuwarden/{floor}"], 0.2 / slack, "x", at_most=False
        )
        for proto in PROTOCOLS
        for floor in FLOORS
    ] + [
        Target(f"reviews {fate} by gpuwarden, {proto}", found["servers"][proto]["gpuwarden"][fate], 0)
        for proto in PROTOCOLS
        for fate in ("lost", "refused")
    ]


def lines(found: Raw) -> list[str]:
    if "skipped" in found:
        return [found["skipped"]]
    head = [
        "| | server | reviews/s | over go | over go_minimal | by CPU second | p50 | p99 | CPU a review | client's |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return head + [
        f"| {proto} | {name} | {one['per_second']:,} | {ratio[f'{name}/go']}x | {ratio[f'{name}/go_minimal']}x "
        f"| {ratio[f'{name}/go by cpu']}x, {ratio[f'{name}/go_minimal by cpu']}x "
        f"| {one['p50_ms']} ms | {one['p99_ms']} ms | {one['cpu_us']} µs | {one['client_cpu_us']} µs |"
        for proto, servers in found["servers"].items()
        for ratio in (found["ratios"][proto],)
        for name, one in servers.items()
    ]
