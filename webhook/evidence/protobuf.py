"""As much of the protobuf wire as SPIRE's messages need: varints, texts and messages in messages.

Unknown fields are skipped, as protobuf has it; a known field in an unknown form is a fault, not a default.
"""

from collections.abc import Iterator

from webhook.core.errors import GpuwardenError

Value = int | bytes

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
WORD = 1 << 64


class MalformedMessageError(GpuwardenError):
    """These bytes are not the message that they should be."""


def fields_of(message: bytes) -> Iterator[tuple[int, Value]]:
    """Every field with its number, in the order of the wire."""
    at, end = 0, len(message)
    while at < end:
        key, at = varint_at(message, at)
        number, form = key >> 3, key & 7
        if number == 0:
            raise MalformedMessageError("a field without a number")
        if form == VARINT:
            value, at = varint_at(message, at)
            yield number, value
            continue
        size, at = varint_at(message, at) if form == LENGTH else (FIXED_SIZES.get(form), at)
        if size is None:
            raise MalformedMessageError(f"field {number} has a form that there is not: {form}")
        if at + size > end:
            raise MalformedMessageError(f"field {number} is cut off")
        yield number, message[at : at + size]
        at += size


def varint_at(message: bytes, at: int) -> tuple[int, int]:
    """The number that stands there, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise MalformedMessageError("a number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % WORD, at
    raise MalformedMessageError("a number has no end")


def as_text(value: Value) -> str:
    try:
        return as_bytes(value).decode()
    except UnicodeDecodeError as exc:
        raise MalformedMessageError("a text is not UTF-8") from exc


def as_bytes(value: Value) -> bytes:
    if isinstance(value, int):
        raise MalformedMessageError("a number stands where a text or a message should")
    return value


def as_int64(value: Value) -> int:
    if not isinstance(value, int):
        raise MalformedMessageError("a text or a message stands where a number should")
    return value - WORD if value >= WORD // 2 else value


def as_bool(value: Value) -> bool:
    return as_int64(value) != 0


def text_field(number: int, text: str) -> bytes:
    return message_field(number, text.encode()) if text else b""


def message_field(number: int, message: bytes) -> bytes:
    return varint(number << 3 | LENGTH) + varint(len(message)) + message


def int_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value % WORD) if value else b""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
