"""A process that takes batches and delivers them to Postgres, for tests that kill it. It reads its arguments as JSON
from stdin, and writes a line to stdout for each batch after it has stored it in the outbox."""

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from tests.export.records import batch, later, use
from webhook.export.delivery import Delivery
from webhook.export.outbox import opener
from webhook.export.postgres import PostgresExporter
from webhook.export.records import Batch
from webhook.export.targets import PostgresTarget
from webhook.runtime.backoff import Backoff
from webhook.runtime.clock import utc_now

GPUS = 4


def numbered(number: int) -> Batch:
    """A reading of a node, and a use that begins; every third use has ended."""
    begun = use(number, gpu_uuid=f"GPU-{number % GPUS}", until=later(number + 60) if number % 3 == 0 else None)
    return batch(f"batch-{number}", GPUS, (begun,), node=f"node-{number % 7}", time=later(number))


async def run(arguments: dict[str, Any]) -> None:
    backoff = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=200))
    exporter = PostgresExporter(PostgresTarget(**arguments["target"]))
    delivery = Delivery([exporter], opener(Path(arguments["outbox"])), utc_now, backoff=backoff)
    running = asyncio.create_task(delivery.run())
    for number in range(arguments["first"], arguments["count"]):
        await delivery.take(numbered(number))
        print(number, flush=True)  # noqa: T201 - its parent reads it
    left = await delivery.drain(timedelta(seconds=60))
    await running
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(run(json.load(sys.stdin)))
