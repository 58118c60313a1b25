"""The kept inputs: seeds by group, and what was found once, which is tried first ever after."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FOUND = "found-"


def seeds(group: str) -> Sequence[bytes]:
    """What was found before first, then by name."""
    files = sorted((CORPUS / group).iterdir(), key=lambda one: (not one.name.startswith(FOUND), one.name))
    return [one.read_bytes() for one in files]


def keep(group: str, content: bytes) -> Path:
    """A finding stays: commit it with the fix."""
    path = CORPUS / group / f"{FOUND}{sha256(content).hexdigest()[:16]}"
    path.write_bytes(content)
    return path
