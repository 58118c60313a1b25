"""Challenges: accepted by every replica, for their node, for a short time, and stored by none."""

import tracemalloc
from datetime import timedelta
from pathlib import Path

import pytest

from tests.builders import NOW, SECOND
from webhook.evidence.jwt.nonce import (
    OLD_KEY_LIFE,
    PREFIX,
    BadKeyError,
    BadNonceError,
    KeyFile,
    Nonces,
    digest,
    is_ours,
    process_key,
    read_key,
)

SKEW = timedelta(seconds=5)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def replica(*keys: bytes) -> Nonces:
    return Nonces(lambda: keys or (KEY,), SKEW)


def test_replicas_accept_each_others_challenges() -> None:
    text = replica().issue("node-a", NOW).text
    assert replica().check(text, "node-a", NOW + 59 * SECOND) == NOW
    assert is_ours(text)


def test_challenges_are_unique() -> None:
    assert len({replica().issue("node-a", NOW).text for _ in range(1000)}) == 1000


@pytest.mark.parametrize("after", [60, 61, 3600])
def test_challenge_expires(after: int) -> None:
    nonce = replica().issue("node-a", NOW)
    assert nonce.expires == NOW + 60 * SECOND
    with pytest.raises(BadNonceError, match="the challenge has expired"):
        replica().check(nonce.text, "node-a", NOW + after * SECOND)


def test_challenge_is_accepted_within_the_clock_skew() -> None:
    text = replica().issue("node-a", NOW).text
    replica().check(text, "node-a", NOW - 5 * SECOND)
    with pytest.raises(BadNonceError, match="future"):
        replica().check(text, "node-a", NOW - 6 * SECOND)


@pytest.mark.parametrize("node", ["node-b", "node-", "node-a.", "", "Node-a", "node-a\0"])
def test_challenge_is_valid_only_for_its_node(node: str) -> None:
    with pytest.raises(BadNonceError, match="for this node"):
        replica().check(replica().issue("node-a", NOW).text, node, NOW)


def test_challenge_with_another_key_is_rejected() -> None:
    with pytest.raises(BadNonceError):
        replica(OTHER_KEY).check(replica().issue("node-a", NOW).text, "node-a", NOW)


def test_changed_challenge_is_rejected() -> None:
    text = replica().issue("node-a", NOW).text
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for at in range(len(PREFIX), len(text)):
        bent = text[:at] + letters[letters.index(text[at]) ^ 1] + text[at + 1 :]
        with pytest.raises(BadNonceError):
            replica().check(bent, "node-a", NOW)


def test_alternative_encoding_of_a_challenge_is_rejected() -> None:
    text = next(found for found in (replica().issue("node-a", NOW).text for _ in range(1000)) if "-" in found[16:])
    for other in (text.replace("-", "+"), text + "=", text + "\n", " " + text, text[:20] + "\n" + text[21:]):
        with pytest.raises(BadNonceError, match="not a challenge of this server"):
            replica().check(other, "node-a", NOW)


@pytest.mark.parametrize("text", ["", PREFIX, "é" * 92, PREFIX + "A" * 76, PREFIX + "A" * 75, PREFIX + "A" * 100_000])
def test_other_audience_is_no_challenge(text: str) -> None:
    with pytest.raises(BadNonceError):
        replica().check(text, "node-a", NOW)


def test_issuing_challenges_uses_no_memory() -> None:
    nonces = replica()
    nonces.issue("node-a", NOW)
    tracemalloc.start()
    try:
        for _ in range(100_000):
            nonces.issue("node-a", NOW)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 50_000


def test_digest_hides_the_challenge_and_fits_its_field() -> None:
    text = replica().issue("node-a", NOW).text
    assert (len(digest(text)), text in digest(text)) == (64, False)


def test_each_process_has_its_own_key() -> None:
    first, second = Nonces(process_key(), SKEW), Nonces(process_key(), SKEW)
    text = first.issue("node-a", NOW).text
    first.check(text, "node-a", NOW)
    with pytest.raises(BadNonceError):
        second.check(text, "node-a", NOW)


def test_new_key_signs_and_the_old_one_is_still_accepted(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    file = KeyFile(path)
    nonces = Nonces(file.keys, SKEW)
    before = nonces.issue("node-a", NOW).text
    assert not file.refresh(NOW)
    path.write_bytes(OTHER_KEY + b"\n")
    assert file.refresh(NOW)
    nonces.check(before, "node-a", NOW)
    replica(OTHER_KEY).check(nonces.issue("node-a", NOW).text, "node-a", NOW)
    path.write_bytes(b"third" * 10)
    assert file.refresh(NOW)
    with pytest.raises(BadNonceError):
        nonces.check(before, "node-a", NOW)


def test_old_key_expires_after_its_overlap(tmp_path: Path) -> None:
    """A key that is revoked because it leaked must not stay valid as long as the process lives."""
    path = tmp_path / "key"
    path.write_bytes(KEY)
    file = KeyFile(path)
    path.write_bytes(OTHER_KEY)
    assert file.refresh(NOW)
    assert not file.refresh(NOW + OLD_KEY_LIFE - SECOND)
    assert file.keys() == (OTHER_KEY, KEY)
    assert not file.refresh(NOW + OLD_KEY_LIFE)
    assert file.keys() == (OTHER_KEY,)


def test_binary_key_is_used_completely(tmp_path: Path) -> None:
    path = tmp_path / "key"
    random = bytes(range(200, 231)) + b"\n"
    path.write_bytes(random)
    assert read_key(path) == random


@pytest.mark.parametrize(
    "content", [b"", b"k" * 31, b"k" * 31 + b"\n", b"k" * 5000], ids=["empty", "short", "padded", "huge"]
)
def test_invalid_key_file_is_rejected_and_the_old_key_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(BadKeyError, match="bytes; allowed: 32 to 4096"):
        KeyFile(path)
    path.write_bytes(KEY)
    file = KeyFile(path)
    path.write_bytes(content)
    with pytest.raises(BadKeyError):
        file.refresh(NOW)
    assert file.keys() == (KEY,)
    path.unlink()
    with pytest.raises(BadKeyError, match="cannot be read"):
        file.refresh(NOW)
