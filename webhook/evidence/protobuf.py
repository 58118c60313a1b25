"""The part of the protobuf wire format that SPIRE's messages need: varints, strings and nested messages.

Unknown fields are skipped, as the protobuf specification says. A known field with another wire type is an error.
"""

from collections.abc import Iterator

from webhook.core.errors import GpuwardenError

Value = int | bytes

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
UINT64_RANGE = 1 << 64


class MalformedMessageError(GpuwardenError):
    """The bytes are not a valid message."""


def fields_of(message: bytes) -> Iterator[tuple[int, Value]]:
    """The fields with their numbers, in the order of the message."""
    at, end = 0, len(message)
    while at < end:
        key, at = varint_at(message, at)
        number, wire_type = key >> 3, key & 7
        if number == 0:
            raise MalformedMessageError("a field has no number")
        if wire_type == VARINT:
            value, at = varint_at(message, at)
            yield number, value
            continue
        size, at = varint_at(message, at) if wire_type == LENGTH else (FIXED_SIZES.get(wire_type), at)
        if size is None:
            raise MalformedMessageError(f"field {number} has an unknown wire type: {wire_type}")
        if at + size > end:
            raise MalformedMessageError(f"field {number} is truncated")
        yield number, message[at : at + size]
        at += size


def varint_at(message: bytes, at: int) -> tuple[int, int]:
    """The number at this position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise MalformedMessageError("a number is truncated")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % UINT64_RANGE, at
    raise MalformedMessageError("a number is too long")


def as_text(value: Value) -> str:
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError as exc:
        raise MalformedMessageError("a string is not UTF-8") from exc


def as_bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise MalformedMessageError("a number where a string or a message is expected")
    return value


def as_int64(value: Value) -> int:
    if not isinstance(value, int):
        raise MalformedMessageError("a string or a message where a number is expected")
    return value - UINT64_RANGE if value >= UINT64_RANGE // 2 else value


def as_bool(value: Value) -> bool:
    return as_int64(value) != 0


def text_field(number: int, text: str) -> bytes:
    return message_field(number, text.encode()) if text else b""


def message_field(number: int, message: bytes) -> bytes:
    return varint(number << 3 | LENGTH) + varint(len(message)) + message


def int_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value % UINT64_RANGE) if value else b""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
