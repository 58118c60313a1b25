"""Runs a command in a pod's container, through the API server's exec endpoint over a WebSocket."""

from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec
from attrs import define, field
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.stream import WsApiClient
from kubernetes.aio.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDOUT_CHANNEL

from webhook.core.errors import GpuwardenError
from webhook.kube.json_objects import decoded
from webhook.kube.requests import RateLimit

# Characters of error output in a message.
MAX_COMPLAINT: Final = 2000


class ExecError(GpuwardenError):
    """The command failed. `reason` is one of a few fixed values, used as a metric label."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


class CauseWire(msgspec.Struct, frozen=True):
    reason: str = ""
    message: str = ""


class DetailsWire(msgspec.Struct, frozen=True):
    causes: list[CauseWire] | None = None


class ExecStatusWire(msgspec.Struct, frozen=True):
    status: str = ""
    message: str = ""
    details: DetailsWire | None = None


@define
class ExecOutput:
    """The output received so far."""

    limit: int
    stdout: bytearray = field(factory=bytearray)
    stderr: bytearray = field(factory=bytearray)
    status: ExecStatusWire | None = None

    def take(self, frame: bytes) -> None:
        """The first byte of a frame is its channel."""
        channel, content = frame[0], frame[1:]
        if channel == STDOUT_CHANNEL:
            self.stdout += content
            if len(self.stdout) > self.limit:
                raise ExecError("too_large", f"the output is larger than {self.limit} bytes")
        elif channel == STDERR_CHANNEL:
            self.stderr += content[: MAX_COMPLAINT - len(self.stderr)]
        elif channel == ERROR_CHANNEL and content:
            try:
                self.status = decoded(content, ExecStatusWire)
            except msgspec.DecodeError as exc:
                raise ExecError("unavailable", "the exit status cannot be read") from exc

    def content(self) -> bytes:
        """Stdout, if the command succeeded. Output on stderr is not a failure; a non-zero exit code is."""
        if self.status is None:
            raise ExecError("cut_off", "the connection was closed before the command ended")
        if self.status.status == "Success":
            return bytes(self.stdout)
        causes = (self.status.details and self.status.details.causes) or []
        codes = [one.message for one in causes if one.reason == "ExitCode"]
        # nvidia-smi writes errors to stdout.
        text = bytes(self.stderr or self.stdout[:MAX_COMPLAINT]).decode(errors="replace").strip()
        if codes:
            raise ExecError("exit_code", f"exit code {codes[0][:20]}: {text[:MAX_COMPLAINT]}")
        raise ExecError("unavailable", f"the command did not complete: {self.status.message[:MAX_COMPLAINT]}: {text}")


class PodExec:
    """Runs commands in pods, with the credentials of `api`."""

    def __init__(self, api: client.ApiClient, limit: RateLimit) -> None:
        self._limit = limit
        self._client = WsApiClient(api.configuration)  # type: ignore[no-untyped-call]  # theirs to annotate

    async def run(self, namespace: str, pod: str, container: str, command: Sequence[str], limit: int) -> bytes:
        """The command's stdout. Raises ExecError. The caller sets a timeout."""
        answer = ExecOutput(limit)
        await self._limit.acquire()
        query = [("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
        try:
            opening = await self._opened(namespace, pod, [*query, *([("container", container)] if container else [])])
            async with opening as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY and message.data:
                        answer.take(message.data)
        except aiohttp.WSServerHandshakeError as exc:
            raise refusal(exc.status) from exc
        except ApiException as exc:
            raise refusal(exc.status or 0) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise ExecError("unavailable", f"the API server is unreachable: {type(exc).__name__}") from exc
        return answer.content()

    async def _opened(self, namespace: str, pod: str, query: list[tuple[str, str]]) -> Any:
        request = await self._client.param_serialize(
            method="GET",
            resource_path="/api/v1/namespaces/{namespace}/pods/{name}/exec",
            path_params={"namespace": namespace, "name": pod},
            query_params=query,
            header_params={"Accept": "*/*"},
            auth_settings=["BearerToken"],
        )
        call: Any = self._client.call_api
        answer = await call(*request, _preload_content=False)
        return answer.response

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # theirs to annotate


def refusal(status: int) -> ExecError:
    if status == 403:
        return ExecError("forbidden", "the API server answered 403; exec requires get and create on pods/exec")
    if status == 404:
        return ExecError("gone", "the pod no longer exists")
    return ExecError("unavailable", f"the API server answered {status}")
