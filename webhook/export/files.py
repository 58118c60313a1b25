"""A file that is whole or not there, whatever is killed and whenever the power goes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

NEW: Final = ".new"
# Of what a descriptor stands for, to the disk. Tests look at the order.
Flush = Callable[[int], None]


def write_whole(path: Path, content: bytes, flush: Flush = os.fsync) -> None:
    """Beside its place, flushed, renamed, and its directory flushed. Raises OSError; then nobody knows which it is."""
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
