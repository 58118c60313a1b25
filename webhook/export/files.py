"""Atomic file writes: after a crash or power loss the file is either complete or absent."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

NEW: Final = ".new"
# Flushes a file descriptor to disk. Tests check the order of flushes.
Flush = Callable[[int], None]


def write_whole(path: Path, content: bytes, flush: Flush = os.fsync) -> None:
    """Writes a temporary file, flushes it, renames it, and flushes the directory. Raises OSError; the file may then
    have its old or its new content."""
    new = path.with_name(path.name + NEW)
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            flush(file.fileno())
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(directory)
    finally:
        os.close(directory)
