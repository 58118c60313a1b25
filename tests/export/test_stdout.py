"""Lines for whoever collects logs."""

import io
import json
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


async def test_a_reading_is_a_line_with_s2s_members() -> None:
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


async def test_the_last_line_says_how_many() -> None:
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


async def test_a_pipe_that_nobody_reads_any_more_is_a_fault_with_a_reason() -> None:
    class Broken(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(ExportError, match=r"stdout takes nothing: .*Broken pipe"):
        await StdoutExporter(Broken()).export(batch())


async def test_a_closed_stdout_is_not_ready() -> None:
    stream = io.StringIO()
    exporter = StdoutExporter(stream)
    await exporter.check()
    stream.close()
    with pytest.raises(ExportError, match="stdout is closed"):
        await exporter.check()
