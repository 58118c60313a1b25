"""Emulators of Google's and Azure's object stores for the long tests: fake-gcs-server and Azurite."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scripts.controlplane.build import BuildError, ToolMissingError, binaries, cache_directory, locked

HERE = Path(__file__).resolve().parent
PATIENCE: Final = 120.0
# Its dependencies are older than this: new releases may be compromised before anyone has noticed.
AZURITE, NOT_AFTER = "3.37.0", "2026-11-01"


def fake_gcs_server() -> Path:
    """The binary, built if missing. Raises BuildError."""
    return binaries(HERE) / "fake-gcs-server"


def azurite() -> Sequence[str]:
    """The command of Azurite's blob store, installed if missing. Raises BuildError."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        raise ToolMissingError("Azurite needs Node.js and npm, which are not installed")
    cache = cache_directory() / f"azurite-{AZURITE}"
    main = cache / "node_modules/azurite/dist/src/blob/main.js"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        if not (cache / "whole").exists():
            # Without install scripts of dependencies.
            command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", f"--before={NOT_AFTER}"]
            done = subprocess.run(
                [*command, f"azurite@{AZURITE}"], cwd=cache, capture_output=True, text=True, check=False
            )
            if done.returncode or not main.exists():
                raise BuildError(f"Azurite {AZURITE} cannot be installed: {done.stderr[-500:]}")
            (cache / "whole").touch()
    return [node, str(main)]


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Runs the store; entered once it listens."""
    with (
        log.open("ab") as out,
        subprocess.Popen(
            command, stdout=out, stderr=out, cwd=log.parent, env={"PATH": os.defpath, "HOME": str(log.parent)}
        ) as process,
    ):
        try:
            wait_for(port, process, log)
            yield
        finally:
            process.kill()


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"the store did not start; see {log}")
