"""A command in a container of a pod, by the API server's exec over a WebSocket."""

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

# Of what a command says beside its answer, enough to see what is wrong.
MAX_COMPLAINT: Final = 2000


class ExecError(GpuwardenError):
    """The command has given no answer. `reason` is one of few words, for metrics."""

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
    """What has come so far."""

    limit: int
    stdout: bytearray = field(factory=bytearray)
    stderr: bytearray = field(factory=bytearray)
    status: ExecStatusWire | None = None

    def take(self, frame: bytes) -> None:
        """The first byte says what it is part of."""
        channel, content = frame[0], frame[1:]
        if channel == STDOUT_CHANNEL:
            self.stdout += content
            if len(self.stdout) > self.limit:
                raise ExecError("too_large", f"its answer is larger than {self.limit} bytes")
        elif channel == STDERR_CHANNEL:
            self.stderr += content[: MAX_COMPLAINT - len(self.stderr)]
        elif channel == ERROR_CHANNEL and content:
            try:
                self.status = decoded(content, ExecStatusWire)
            except msgspec.DecodeError as exc:
                raise ExecError("unavailable", "its end cannot be read") from exc

    def content(self) -> bytes:
        """All of stdout, if the command has succeeded. Words on stderr are no failure; the exit code is."""
        if self.status is None:
            raise ExecError("cut_off", "the connection ended before the command")
        if self.status.status == "Success":
            return bytes(self.stdout)
        causes = (self.status.details and self.status.details.causes) or []
        codes = [one.message for one in causes if one.reason == "ExitCode"]
        # nvidia-smi complains on stdout.
        said = bytes(self.stderr or self.stdout[:MAX_COMPLAINT]).decode(errors="replace").strip()
        if codes:
            raise ExecError("exit_code", f"exit code {codes[0][:20]}: {said[:MAX_COMPLAINT]}")
        raise ExecError("unavailable", f"it did not run to its end: {self.status.message[:MAX_COMPLAINT]}: {said}")


class PodExec:
    """Runs commands in pods, with the credentials of `api`."""

    def __init__(self, api: client.ApiClient, limit: RateLimit) -> None:
        self._limit = limit
        self._client = WsApiClient(api.configuration)  # type: ignore[no-untyped-call]  # theirs to annotate

    async def run(self, namespace: str, pod: str, container: str, command: Sequence[str], limit: int) -> bytes:
        """What it writes on stdout. Raises ExecError; the caller bounds the time."""
        answer = ExecOutput(limit)
        await self._limit.turn()
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
            raise ExecError("unavailable", f"the API server cannot be reached: {type(exc).__name__}") from exc
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
        return ExecError("forbidden", "exec is not allowed here: 403; it takes get and create on pods/exec")
    if status == 404:
        return ExecError("gone", "there is no such pod any more")
    return ExecError("unavailable", f"the API server answered {status}")
