"""How long it takes to store the readings of 10,000 nodes with 8 GPUs each, and how much memory that needs.

`python -m bench.export` uses a temporary Postgres on this machine. First it measures the delivery with its outbox on
disk, in this process: each round has one reading of every node, and memory must not grow between rounds. Then it
measures a whole `gpuwarden export`, readings and uses, with a simulated API server of that size. Not part of `make
bench`, which needs no database.
"""

import asyncio
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from attrs import frozen

from bench import machine
from bench.figures import Target
from bench.run import RESULTS, SLACK
from scripts.postgres import Postgres, PostgresMissingError
from tests.export.test_fleet import Fleet, serving
from webhook.export.delivery import Delivery
from webhook.export.outbox import opener
from webhook.export.postgres import PostgresExporter
from webhook.export.records import Batch, Reading
from webhook.export.targets import PostgresTarget
from webhook.runtime.clock import utc_now

Raw = dict[str, Any]

KIB_IN_MIB = 1024


@frozen
class Plan:
    """The size of the measurement."""

    nodes: int = 10_000
    gpus: int = 8
    rounds: int = 3
    # The default number of nodes read at once.
    workers: int = 16


SHORT = Plan(nodes=1_000, rounds=2)


def run(plan: Plan) -> Raw:
    with database() as server, tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measured(plan, server, Path(directory) / "outbox"))
        return {**found, "whole": asyncio.run(whole(plan, server, Path(directory)))}


async def whole(plan: Plan, server: Postgres, home: Path) -> Raw:
    """The process from its start until every reading and every use is stored."""
    server.run_sql("TRUNCATE gpu, gpu_use")
    flags = {
        "kubeconfig": home / "kubeconfig",
        "outbox": home / "whole",
        "cluster-name": "prod",
        "exporter-type": "postgres",
        "qps": 100_000,  # the API server is not measured
        "burst": 100_000,
        "host": "127.0.0.1",
        "server-port": 0,
        "postgres-host": server.host,
        "postgres-port": server.port,
        "postgres-db": server.database,
        "postgres-user": server.user,
        "postgres-sslmode": "disable",
    }
    command = [sys.executable, "-m", "webhook.cli", "export", *(f"--{name}={value}" for name, value in flags.items())]
    own = {"PATH": os.defpath, "POSTGRES_PASSWORD": server.password}
    wanted = plan.nodes * plan.gpus
    async with serving(Fleet(plan.nodes), home / "kubeconfig"):
        begun = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL, env=own)
        try:
            while await asyncio.to_thread(stored, server) != (wanted, wanted):
                if process.returncode is not None:
                    raise RuntimeError(f"gpuwarden export ended with {process.returncode}")
                await asyncio.sleep(1)
            peak = peak_mib(process.pid)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
    return {
        "readings": wanted,
        "uses": wanted,
        "took_s": round(time.perf_counter() - begun, 1),
        "peak_mib": peak,
    }


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / KIB_IN_MIB, 1)


def stored(server: Postgres) -> tuple[int, int]:
    readings, uses = server.run_sql("SELECT (SELECT count(*) FROM gpu), (SELECT count(*) FROM gpu_use)").split("|")
    return int(readings), int(uses)


async def measured(plan: Plan, server: Postgres, outbox: Path) -> Raw:
    target = PostgresTarget(
        host=server.host,
        port=server.port,
        db=server.database,
        user=server.user,
        password=server.password,
        sslmode="disable",
        auto_migrate=True,
    )
    delivery = Delivery([PostgresExporter(target)], opener(outbox), utc_now)
    running = asyncio.create_task(delivery.run())
    idle = memory_mib()
    rounds = [await one_round(plan, number, delivery, server) for number in range(plan.rounds)]
    await delivery.drain(timedelta(minutes=1))
    await running
    return {
        "nodes": plan.nodes,
        "gpus": plan.nodes * plan.gpus,
        "rss_mib_idle": idle,
        "rounds": rounds,
        "rows": int(server.run_sql("SELECT count(*) FROM gpu")),
        "expected_rows": plan.rounds * plan.nodes * plan.gpus,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB_IN_MIB, 1),
    }


async def one_round(plan: Plan, number: int, delivery: Delivery, server: Postgres) -> Raw:
    """Reads every node once and stores all readings."""
    moment = utc_now()
    transactions = committed(server)
    begun, busy = time.perf_counter(), time.process_time()
    todo = iter(range(plan.nodes))

    async def work() -> None:
        for node in todo:
            await delivery.take(batch_of(node, plan.gpus, moment))

    await asyncio.gather(*(work() for _ in range(plan.workers)))
    taken = time.perf_counter() - begun
    while delivery.states["postgres"].waiting.batches:  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.01)
    return {
        "round": number,
        "taken_s": round(taken, 2),
        "stored_s": round(time.perf_counter() - begun, 2),
        "cpu_s": round(time.process_time() - busy, 2),
        "transactions": committed(server) - transactions,
        "rss_mib": memory_mib(),
    }


def batch_of(node: int, gpus: int, moment: datetime) -> Batch:
    name = f"gpu-node-{node:05d}"
    readings = tuple(
        Reading(
            cluster="prod",
            node=name,
            machine=f"i-{node:017x}",
            source=f"gpu-operator/nvidia-device-plugin-daemonset-{node:05d}",
            chassis=f"{1_820_000_000_000 + node}",
            gpu=f"{1_760_000_000_000 + node * gpus + index}",
            time=moment,
            uuid=f"GPU-{node:08x}-0000-4000-8000-{index:012x}",
            index=index,
            minor=index,
            pci_bus_id=f"00000000:{0x10 + index:02X}:00.0",
            model="NVIDIA H100 80GB HBM3",
            memory="81559 MiB",
            driver="570.86.15",
            boot_id=f"{node:08x}-1111-4111-8111-111111111111",
        )
        for index in range(gpus)
    )
    return Batch(f"{name}/{moment.isoformat()}", readings)


def committed(server: Postgres) -> int:
    """The number of transactions so far, including the two of this query."""
    server.run_sql("SELECT pg_stat_force_next_flush()")
    return int(server.run_sql("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"))


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / KIB_IN_MIB**2, 1)


@contextmanager
def database() -> Iterator[Postgres]:
    """A directory that Postgres' user can access."""
    directory = Path(tempfile.mkdtemp(prefix="gpuwarden-postgres."))
    try:
        server = Postgres(directory, "bench")
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory)


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    rounds = found["rounds"]
    return [
        Target("rows that are not there, or twice", abs(found["rows"] - found["expected_rows"]), 0),
        Target(f"{found['nodes']:,} nodes stored", max(one["stored_s"] for one in rounds), 60 * slack, " s"),
        Target("RSS at its peak", found["peak_mib"], 200 * slack, " MiB"),
        Target("RSS of the whole process at its peak", found["whole"]["peak_mib"], 200 * slack, " MiB"),
        Target(
            "RSS from the first round to the last", rounds[-1]["rss_mib"] - rounds[0]["rss_mib"], 20 * slack, " MiB"
        ),
        # A thousand rows are 125 nodes: waiting batches are stored merged.
        Target("transactions for a thousand rows", most_transactions(found), 10 * slack),
    ]


def most_transactions(found: Raw) -> float:
    return float(max(one["transactions"] for one in found["rounds"]) / (found["gpus"] / 1000))


def lines(found: Raw) -> list[str]:
    return [
        "| round | taken | stored | CPU | transactions | RSS |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {one['round'] + 1} | {one['taken_s']} s | {one['stored_s']} s | {one['cpu_s']} s "
            f"| {one['transactions']} | {one['rss_mib']} MiB |"
            for one in found["rounds"]
        ),
        "",
        f"{found['nodes']:,} nodes with {found['gpus']:,} GPUs a round; RSS {found['rss_mib_idle']} MiB before, "
        f"{found['peak_mib']} MiB at its peak; {found['rows']:,} rows at the end.",
        "",
        f"The whole process: {found['whole']['readings']:,} readings and {found['whole']['uses']:,} uses stored "
        f"{found['whole']['took_s']} s after its start, {found['whole']['peak_mib']} MiB at its peak. It shares the "
        "cores with the API server too, which makes each answer as it is asked.",
    ]


def main() -> int:
    parser = ArgumentParser(prog="python -m bench.export", description="Measures the way from a reading to Postgres.")
    parser.add_argument("--check", action="store_true", help="the short form; exit code 1 if a limit is broken")
    asked = parser.parse_args()
    described = machine.description()
    try:
        found = run(SHORT if asked.check else Plan())
    except PostgresMissingError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    verdicts = targets(found, SLACK if asked.check else 1.0)
    print("\n".join([*lines(found), "", *(one.sentence for one in verdicts)]))
    if not asked.check:
        write(described, found, verdicts)
    return int(asked.check and not all(one.is_met for one in verdicts))


def write(described: Raw, found: Raw, verdicts: list[Target]) -> None:
    RESULTS.mkdir(exist_ok=True)
    day = utc_now().date().isoformat()
    kept = {"date": day, "command": "python -m bench.export", "machine": described, "export": found}
    (RESULTS / f"export-{day}.json").write_text(json.dumps(kept, indent=2) + "\n")
    text = [
        "# Measured: from a reading to Postgres",
        "",
        f"By `python -m bench.export` on {day}, which wrote this page and [export-{day}.json](export-{day}.json), on",
        f"{described['cores']} cores ({described['cpu']}) that the database shares.",
        "",
        *lines(found),
        "",
        *(f"- {one.sentence}" for one in verdicts),
    ]
    (RESULTS / "export.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
