"""JSON lines for log collectors."""

import asyncio
import fcntl
import io
import json
import os
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from tests.export.records import batch, later, use
from webhook.export import ExportError
from webhook.export.records import Batch
from webhook.export.stdout import StdoutExporter


async def written(one: Batch) -> list[dict[str, Any]]:
    stream = io.StringIO()
    await StdoutExporter(stream).export(one)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_reading_is_a_line_with_members_of_gpuid() -> None:
    first, *_ = await written(batch())
    s2s = {
        "level": "INFO",
        "msg": "gpu serial number reading",
        "service": "gpuid",
        "cluster": "prod",
        "node": "gpu-a",
        "machine": "i-0aaaabbbbccccdddd",
        "source": "gpu-operator/nvidia-device-plugin-daemonset-abcde",
        "chassis": "1820000000042",
        "gpu": "1760000000011",
        "time": "2026-01-01T00:00:00.123456Z",
    }
    assert list(first.items())[: len(s2s)] == list(s2s.items())
    assert (first["uuid"], first["minor"]) == ("GPU-0", 0)


async def test_last_line_has_the_number_of_records() -> None:
    *_, last = await written(batch(gpus=3, uses=(use(), use(1))))
    assert (last["msg"], last["records"], last["batch"]) == ("export completed", 5, "batch-0")


async def test_a_use_is_a_line_too() -> None:
    (line, _) = await written(Batch("uses", uses=(use(until=later(60)),)))
    assert (line["msg"], line["reservation"], line["until"]) == (
        "gpu use",
        "reservation-0",
        "2026-01-01T00:01:00.123456Z",
    )


async def test_every_line_has_one_time() -> None:
    stream = io.StringIO()
    await StdoutExporter(stream).export(batch(uses=(use(),)))
    assert [line.count('"time":') for line in stream.getvalue().splitlines()] == [1, 1, 1, 1]


async def test_broken_pipe_is_an_export_error() -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(ExportError, match=r"cannot write to stdout: .*Broken pipe"):
        await StdoutExporter(Broken()).export(batch())


class Pipe:
    """A pipe with room for a page, and its reader."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        self.stream = os.fdopen(writer, "w")
        self._reader = os.fdopen(reader, "rb", buffering=0)

    def read(self) -> bytes:
        """Reads everything in the pipe."""
        os.set_blocking(self._reader.fileno(), False)
        found = b""
        while content := self._reader.read(65536):
            found += content
        return found

    def close(self) -> None:
        self.stream.close()
        self._reader.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    found = Pipe()
    yield found
    found.close()


async def read_out(pipe: Pipe, exporting: Coroutine[Any, Any, None]) -> bytes:
    """Reads until the task is done."""
    task, found = asyncio.create_task(exporting), b""
    async with asyncio.timeout(20):
        while not task.done():
            await asyncio.sleep(0.01)
            found += pipe.read()
    await task
    return found + pipe.read()


@pytest.mark.defect("gpuid-16")
async def test_late_reader_gets_whole_lines_and_nothing_written_after_the_end(pipe: Pipe) -> None:
    exporter = StdoutExporter(pipe.stream)
    big = batch(gpus=50)
    exporting = asyncio.create_task(exporter.export(big))
    done, _ = await asyncio.wait([exporting], timeout=0.3)
    assert not done
    exporting.cancel()
    await asyncio.wait([exporting])
    first = pipe.read()
    assert first.endswith(b"\n")
    await asyncio.sleep(0.3)
    assert pipe.read() == b""
    # A retry in the same process continues where it stopped.
    lines = [json.loads(line) for line in (first + await read_out(pipe, exporter.export(big))).splitlines()]
    assert [one["index"] for one in lines[:-1]] == list(range(50))
    assert lines[-1]["records"] == 50


async def test_another_batch_starts_with_its_first_line(pipe: Pipe) -> None:
    exporter = StdoutExporter(pipe.stream)
    exporting = asyncio.create_task(exporter.export(batch(gpus=50)))
    await asyncio.wait([exporting], timeout=0.3)
    exporting.cancel()
    await asyncio.wait([exporting])
    pipe.read()
    found = await read_out(pipe, exporter.export(batch("other", gpus=2)))
    assert [json.loads(line).get("index") for line in found.splitlines()] == [0, 1, None]


async def test_a_closed_stdout_is_not_ready() -> None:
    stream = io.StringIO()
    exporter = StdoutExporter(stream)
    await exporter.check()
    stream.close()
    with pytest.raises(ExportError, match="stdout is closed"):
        await exporter.check()
