"""gRPC calls with messages as bytes, over grpclib. Every failure of a call is raised as CallFailedError."""

import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from h2.exceptions import H2Error

from webhook.core.errors import GpuwardenError
from webhook.evidence.protobuf import MalformedMessageError

# grpclib raises the last four for truncated, compressed or missing responses, and for malformed metadata.
FAULTS = (
    GRPCError,
    ProtocolError,
    StreamTerminatedError,
    H2Error,
    OSError,  # includes ssl.SSLError
    MalformedMessageError,
    struct.error,
    NotImplementedError,
    AssertionError,
    ValueError,
)


class CallFailedError(GpuwardenError):
    """The peer could not be reached, refused the call, or sent a malformed response."""


class RawCodec(CodecBase):
    """Passes bytes through: the caller encodes and decodes messages."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


@contextmanager
def faults_of(peer: str) -> Iterator[None]:
    """Translate failures in this block into a CallFailedError that names `peer`."""
    try:
        yield
    except TimeoutError as exc:
        raise CallFailedError(f"{peer}: no answer in time") from exc
    except FAULTS as exc:
        raise CallFailedError(f"{peer}: {describe(exc)}") from exc


def describe(fault: BaseException) -> str:
    if isinstance(fault, GRPCError):
        return f"{fault.status.name}: {fault.message or ''}"
    return str(fault) or type(fault).__name__


async def ask(channel: Channel, method: str, request: bytes) -> bytes:
    return await UnaryUnaryMethod[bytes, bytes](channel, method, bytes, bytes)(request)


async def listen(channel: Channel, method: str, request: bytes, metadata: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The messages that the peer sends, as they arrive."""
    opened = UnaryStreamMethod[bytes, bytes](channel, method, bytes, bytes).open(metadata=dict(metadata))
    async with opened as stream:
        await stream.send_message(request, end=True)
        async for message in stream:
            yield message
