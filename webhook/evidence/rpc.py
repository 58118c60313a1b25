"""gRPC calls whose messages are bytes on both sides, over grpclib. Every fault of a call comes out as one error."""

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

# The last four are what grpclib has for an answer that is cut off, compressed or not there, and for broken metadata.
FAULTS = (
    GRPCError,
    ProtocolError,
    StreamTerminatedError,
    H2Error,
    OSError,  # ssl.SSLError is one
    MalformedMessageError,
    struct.error,
    NotImplementedError,
    AssertionError,
    ValueError,
)


class CallFailedError(GpuwardenError):
    """The other side could not be reached, refused, or made no sense."""


class RawCodec(CodecBase):
    """Messages are written and read by whoever calls."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


@contextmanager
def faults_of(peer: str) -> Iterator[None]:
    """What goes wrong in here went wrong with `peer`."""
    try:
        yield
    except TimeoutError as exc:
        raise CallFailedError(f"{peer}: no answer in time") from exc
    except FAULTS as exc:
        raise CallFailedError(f"{peer}: {in_words(exc)}") from exc


def in_words(fault: BaseException) -> str:
    if isinstance(fault, GRPCError):
        return f"{fault.status.name}: {fault.message or ''}"
    return str(fault) or type(fault).__name__


async def ask(channel: Channel, method: str, request: bytes) -> bytes:
    return await UnaryUnaryMethod[bytes, bytes](channel, method, bytes, bytes)(request)


async def listen(channel: Channel, method: str, request: bytes, metadata: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Every message that the other side sends, as it comes."""
    opened = UnaryStreamMethod[bytes, bytes](channel, method, bytes, bytes).open(metadata=dict(metadata))
    async with opened as stream:
        await stream.send_message(request, end=True)
        async for message in stream:
            yield message
