"""Real gpuwarden processes, on free ports, in an empty directory."""

import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from attrs import frozen

from webhook.runtime.settings import SETTINGS

GPUWARDEN = str(Path(sys.executable).parent / "gpuwarden")
START_TIMEOUT = 30.0
STOP_TIMEOUT = 60.0


@frozen
class Running:
    """A running process, its URLs and its files."""

    process: subprocess.Popen[str]
    ready: str
    directory: Path
    log: Path

    @property
    def urls(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.ready.split()[1:])

    @property
    def port(self) -> int:
        return int(self.urls["https"].rpartition(":")[2])

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.directory / "certs/dev/ca.crt"))

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.urls["https"], verify=self.trust, **options)

    def stop(self) -> tuple[int, str, str]:
        """Stop the process. Returns the exit code, the rest of stdout, and the log."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=STOP_TIMEOUT)
        return self.process.returncode, out, self.log.read_text()


# Most tests in a cluster do not need evidence. Flags of a test come later and override these.
WITHOUT_EVIDENCE = ("--require-evidence", "asked")


def challenging(directory: Path) -> list[str]:
    """Flags of a server that challenges nodes. The test writes the proofs itself; no reconciler removes them."""
    (directory / "nonce.key").write_bytes(bytes(range(32)))
    flags = f"--evidence jwt-svid --spire-trust-domain example.org --spire-workload-api unix:{directory}/absent.sock"
    return [*flags.split(), "--nonce-key", str(directory / "nonce.key")]


def taken_by(command: str, flags: Sequence[str]) -> list[str]:
    """The flags that the command takes, of flags that a test uses for several commands."""
    not_taken = {one.flag for one in SETTINGS if command not in one.commands}
    found: list[str] = []
    is_skipped = False
    for word in flags:
        if word.startswith("--"):
            is_skipped = word.partition("=")[0] in not_taken
        if not is_skipped:
            found.append(word)
    return found


@contextmanager
def serving(directory: Path, inventory: Any, flags: Sequence[str] = ()) -> Iterator[Running]:
    """A `gpuwarden serve` that is ready. It is killed at the end. Without an inventory `flags` configure a cluster."""
    own = []
    if inventory is not None:
        (directory / "inventory.json").write_text(json.dumps(inventory))
        own = ["--inventory", "inventory.json"]
    ports = ["--port", "0", "--ui-port", "0", "--extender-port", "0"]
    all_flags = [*own, *ports, *WITHOUT_EVIDENCE, *taken_by("serve", flags)]
    with started([GPUWARDEN, "serve", *all_flags], directory) as running:
        yield running


@contextmanager
def reconciling(directory: Path, flags: Sequence[str]) -> Iterator[Running]:
    """A `gpuwarden reconcile` that watches; killed at the end if the test has not stopped it."""
    all_flags = ["--ui-port", "0", *WITHOUT_EVIDENCE, *taken_by("reconcile", flags)]
    with started([GPUWARDEN, "reconcile", *all_flags], directory) as running:
        yield running


@contextmanager
def started(command: Sequence[str], directory: Path) -> Iterator[Running]:
    """A process that has written its `ready` line. It logs to a file, because an unread pipe would block it."""
    with TemporaryDirectory() as log_directory:
        log = Path(log_directory) / "log"
        with (
            log.open("a") as file,
            subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=file, text=True) as process,
        ):
            try:
                yield Running(process, ready_line(process, log), directory, log)
            finally:
                process.kill()


def ready_line(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    found, _, _ = select([process.stdout], [], [], START_TIMEOUT)
    line = process.stdout.readline() if found else ""
    if not line.startswith("ready "):
        process.kill()
        raise AssertionError(f"not ready: {line!r} {log.read_text()}")
    return line.rstrip("\n")


def refusing(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail."""
    return subprocess.run(
        [GPUWARDEN, *arguments], cwd=directory, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
    )
