"""One-time challenges that nobody has to remember: an HMAC over node and time, under a key that all replicas share.

That a challenge is answered only once is kept where the evidence is written, not here.
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

# What a token is good for stands in its audience: one that answers us is good for nobody else.
PREFIX: Final = "gpuwarden/nonce/"
# A node answers within milliseconds; the rest is for slow networks.
LIFE: Final = timedelta(seconds=60)
# A Secret reaches the files of all replicas within minutes; until then some go on issuing under the old key.
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
    """A challenge, which is the whole audience of the token that answers it."""

    text: str
    expires: datetime


class Nonces:
    """Issues challenges and knows its own again, under the first of the keys or, for a while, under the others."""

    def __init__(self, keys: Callable[[], Sequence[bytes]], skew: timedelta, life: timedelta = LIFE) -> None:
        self._keys = keys
        self._skew = skew
        self._life = life

    def issue(self, node: str, now: datetime) -> Nonce:
        body = milliseconds(now).to_bytes(TIME, "big") + secrets.token_bytes(RANDOM)
        return Nonce(spelt(body + mac(self._keys()[0], body, node)), now + self._life)

    def check(self, text: str, node: str, now: datetime) -> datetime:
        """When it was issued. Raises BadNonceError. Clocks of replicas may differ by the skew."""
        body, found = split(text)
        if not any(hmac.compare_digest(found, mac(key, body, node)) for key in self._keys()):
            raise BadNonceError("the audience is no challenge of ours for this node")
        issued = datetime.fromtimestamp(int.from_bytes(body[:TIME], "big") / 1000, UTC)
        if issued > now + self._skew:
            raise BadNonceError("the challenge is of the future")
        if now - issued >= self._life:
            raise BadNonceError("the challenge is too old: ask for a new one")
        return issued


def mac(key: bytes, body: bytes, node: str) -> bytes:
    """The body is of fixed length, so node and body cannot run into each other."""
    return hmac.digest(key, PURPOSE + body + node.encode(), "sha256")


def split(text: str) -> tuple[bytes, bytes]:
    try:
        raw = base64.urlsafe_b64decode(text.removeprefix(PREFIX)) if is_ours(text) else b""
    except ValueError as exc:
        raise BadNonceError("the audience is no challenge of ours") from exc
    if len(raw) != LENGTH or spelt(raw) != text:
        raise BadNonceError("the audience is no challenge of ours")
    return raw[:-MAC], raw[-MAC:]


def spelt(raw: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(raw).decode()


def is_ours(text: str) -> bool:
    """Whether it looks like a challenge: a node gives nobody a token for any other audience."""
    return text.startswith(PREFIX) and len(text) == len(PREFIX) + LENGTH * 4 // 3


def digest(text: str) -> str:
    """What is written down of a challenge that was answered."""
    return hashlib.sha256(text.encode()).hexdigest()


def milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def one_process_only() -> Callable[[], Sequence[bytes]]:
    """A key that ends with the process, for evidence that does: no challenge outlives what its answers are kept in."""
    keys = (secrets.token_bytes(MIN_KEY),)
    return lambda: keys


class KeyFile:
    """The shared key. After a change the old one is known on for a while, for challenges that are under way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[bytes, ...] = (read_key(path),)
        self._changed: datetime | None = None

    def keys(self) -> Sequence[bytes]:
        return self._keys

    def refresh(self, now: datetime) -> bool:
        """Whether there is a new key. Raises BadKeyError, and what was known stays."""
        if self._changed is not None and now - self._changed >= OLD_KEY_LIFE:
            self._keys, self._changed = self._keys[:1], None
        key = read_key(self._path)
        if key == self._keys[0]:
            return False
        self._keys, self._changed = (key, self._keys[0]), now
        return True


def read_key(path: Path) -> bytes:
    """The file's bytes; of a key that is written in letters, without the white space round it."""
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY + 1)
        if key.isascii() and key.strip().decode().isprintable():
            key = key.strip()
    except OSError as exc:
        raise BadKeyError(f"{path} cannot be read: {exc.strerror}") from exc
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise BadKeyError(f"{path} holds {len(key)} bytes of key; allowed: {MIN_KEY} to {MAX_KEY}")
    return key
