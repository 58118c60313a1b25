"""Stateless one-time challenges: an HMAC over node and time, with a key that all replicas share.

That a challenge is answered only once is enforced where the evidence is stored, not here.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from attrs import frozen

from webhook.core.errors import GpuwardenError

# The nonce is the token's audience, so a token for us is valid nowhere else.
PREFIX: Final = "gpuwarden/nonce/"
# A node responds within milliseconds; the rest is for slow networks.
LIFE: Final = timedelta(seconds=60)
# A Secret reaches the files of all replicas within minutes; until then some still use the old key.
OLD_KEY_LIFE: Final = timedelta(minutes=10)
PURPOSE: Final = b"gpuwarden nonce 1\0"
TIME, RANDOM, MAC = 8, 17, 32
LENGTH: Final = TIME + RANDOM + MAC  # divisible by three: base64 without padding
MIN_KEY, MAX_KEY = 32, 4096


class BadNonceError(GpuwardenError):
    """Not a challenge of ours for that node at that time."""


class BadKeyError(GpuwardenError):
    """The key file cannot be used."""


@frozen
class Nonce:
    """A challenge. It is the only audience of the token that answers it."""

    text: str
    expires: datetime


class Nonces:
    """Issues challenges with the first key, and accepts challenges of all keys."""

    def __init__(self, keys: Callable[[], Sequence[bytes]], skew: timedelta, life: timedelta = LIFE) -> None:
        self._keys = keys
        self._skew = skew
        self._life = life

    def issue(self, node: str, now: datetime) -> Nonce:
        body = milliseconds(now).to_bytes(TIME, "big") + secrets.token_bytes(RANDOM)
        return Nonce(encode(body + mac(self._keys()[0], body, node)), now + self._life)

    def check(self, text: str, node: str, now: datetime) -> datetime:
        """When the challenge was issued. Raises BadNonceError. Clocks of replicas may differ by the skew."""
        body, found = split(text)
        if not any(hmac.compare_digest(found, mac(key, body, node)) for key in self._keys()):
            raise BadNonceError("the audience is not a challenge of this server for this node")
        issued = datetime.fromtimestamp(int.from_bytes(body[:TIME], "big") / 1000, UTC)
        if issued > now + self._skew:
            raise BadNonceError("the challenge was issued in the future")
        if now - issued >= self._life:
            raise BadNonceError("the challenge has expired: request a new one")
        return issued


def mac(key: bytes, body: bytes, node: str) -> bytes:
    """The body has a fixed length, so body and node cannot be confused."""
    return hmac.digest(key, PURPOSE + body + node.encode(), "sha256")


def split(text: str) -> tuple[bytes, bytes]:
    try:
        raw = base64.urlsafe_b64decode(text.removeprefix(PREFIX)) if is_ours(text) else b""
    except ValueError as exc:
        raise BadNonceError("the audience is not a challenge of this server") from exc
    if len(raw) != LENGTH or encode(raw) != text:
        raise BadNonceError("the audience is not a challenge of this server")
    return raw[:-MAC], raw[-MAC:]


def encode(raw: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(raw).decode()


def is_ours(text: str) -> bool:
    """Whether it looks like a challenge of ours: a node must not request a token for any other audience."""
    return text.startswith(PREFIX) and len(text) == len(PREFIX) + LENGTH * 4 // 3


def digest(text: str) -> str:
    """What is stored of an answered challenge."""
    return hashlib.sha256(text.encode()).hexdigest()


def milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def process_key() -> Callable[[], Sequence[bytes]]:
    """A key that ends with the process, for proofs that do: no challenge outlives the record of its answer."""
    keys = (secrets.token_bytes(MIN_KEY),)
    return lambda: keys


class KeyFile:
    """The shared key. After a change the old one stays valid for a while, for challenges in progress."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[bytes, ...] = (read_key(path),)
        self._changed: datetime | None = None

    def keys(self) -> Sequence[bytes]:
        return self._keys

    def refresh(self, now: datetime) -> bool:
        """Whether the key has changed. Raises BadKeyError, and then the known keys stay."""
        if self._changed is not None and now - self._changed >= OLD_KEY_LIFE:
            self._keys, self._changed = self._keys[:1], None
        key = read_key(self._path)
        if key == self._keys[0]:
            return False
        self._keys, self._changed = (key, self._keys[0]), now
        return True


def read_key(path: Path) -> bytes:
    """The file's bytes, without surrounding white space if the key is text."""
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY + 1)
        if key.isascii() and key.strip().decode().isprintable():
            key = key.strip()
    except OSError as exc:
        raise BadKeyError(f"{path} cannot be read: {exc.strerror}") from exc
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise BadKeyError(f"{path} has a key of {len(key)} bytes; allowed: {MIN_KEY} to {MAX_KEY}")
    return key
