"""Exec over a WebSocket, with a server that sends the test's frames."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client

from webhook.kube.pod_exec import ExecError, PodExec
from webhook.kube.requests import RateLimit

Frames = Callable[[web.WebSocketResponse], Awaitable[None]]
SUCCESS = b'\x03{"metadata":{},"status":"Success"}'
EXIT_9 = (
    b'\x03{"status":"Failure","message":"command terminated with non-zero exit code","reason":"NonZeroExitCode",'
    b'"details":{"causes":[{"reason":"ExitCode","message":"9"}]}}'
)


@asynccontextmanager
async def saying(*frames: bytes, status: int = 101) -> AsyncIterator[tuple[PodExec, list[web.Request]]]:
    asked: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request)
        if status != 101:
            return web.json_response({"message": "no"}, status=status)
        socket = web.WebSocketResponse(protocols=["v4.channel.k8s.io"])
        await socket.prepare(request)
        for frame in frames:
            await socket.send_bytes(frame)
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    configuration = client.Configuration(host=f"http://{host}:{port}")
    async with client.ApiClient(configuration) as api:
        execute = PodExec(api, RateLimit(50, 100, time.monotonic))
        try:
            yield execute, asked
        finally:
            await execute.close()
            await runner.cleanup()


async def run(execute: PodExec, limit: int = 100) -> bytes:
    return await execute.run("gpu-operator", "p", "nvidia-device-plugin", ("/bin/sh", "-c", "nvidia-smi -q -x"), limit)


async def test_stdout_is_returned_despite_output_on_stderr() -> None:
    async with saying(b"\x01", b"\x01<a", b"\x02a warning", b"\x01/>", SUCCESS) as (execute, asked):
        assert await run(execute) == b"<a/>"
    assert asked[0].path == "/api/v1/namespaces/gpu-operator/pods/p/exec"
    assert asked[0].query.getall("command") == ["/bin/sh", "-c", "nvidia-smi -q -x"]
    assert (asked[0].query["container"], asked[0].query.get("stdin")) == ("nvidia-device-plugin", None)


@pytest.mark.parametrize(
    ("frames", "reason", "text"),
    [
        pytest.param([b"\x01NVIDIA-SMI has failed", EXIT_9], "exit_code", "exit code 9: NVIDIA-SMI", id="exit-code"),
        pytest.param([b"\x01x", b"\x02why", EXIT_9], "exit_code", "exit code 9: why", id="error-on-stderr"),
        pytest.param([b"\x01<a/>"], "cut_off", "the connection was closed before", id="no-status"),
        pytest.param([b"\x01" + b"x" * 60, b"\x01" + b"x" * 60], "too_large", "larger than 100 bytes", id="too-large"),
        pytest.param([b"\x03nonsense"], "unavailable", "the exit status cannot be read", id="malformed-status"),
        pytest.param(
            [b'\x03{"status":"Failure","message":"no such container"}'],
            "unavailable",
            "no such container",
            id="never-begun",
        ),
    ],
)
async def test_failed_commands_have_different_reasons(frames: list[bytes], reason: str, text: str) -> None:
    async with saying(*frames) as (execute, _):
        with pytest.raises(ExecError, match=text) as caught:
            await run(execute)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("status", "reason"), [(403, "forbidden"), (404, "gone"), (500, "unavailable")])
async def test_refused_exec_has_a_reason(status: int, reason: str) -> None:
    async with saying(status=status) as (execute, _):
        with pytest.raises(ExecError) as caught:
            await run(execute)
    assert caught.value.reason == reason


async def test_unreachable_api_server_is_an_exec_error() -> None:
    async with client.ApiClient(client.Configuration(host="http://127.0.0.1:1")) as api:
        execute = PodExec(api, RateLimit(50, 100, time.monotonic))
        with pytest.raises(ExecError) as caught:
            await run(execute)
        await execute.close()
    assert caught.value.reason == "unavailable"
