"""The corpus: seeds by group, and earlier findings, which are tried first."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FOUND = "found-"


def seeds(group: str) -> Sequence[bytes]:
    """Earlier findings first, then by name."""
    files = sorted((CORPUS / group).iterdir(), key=lambda one: (not one.name.startswith(FOUND), one.name))
    return [one.read_bytes() for one in files]


def keep(group: str, content: bytes) -> Path:
    """Adds a finding to the corpus. Commit it with the fix."""
    path = CORPUS / group / f"{FOUND}{sha256(content).hexdigest()[:16]}"
    path.write_bytes(content)
    return path
