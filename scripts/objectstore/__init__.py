"""A real S3 server on loopback, with its objects in a directory: versitygw, built like the control plane."""

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Final

from scripts.controlplane.build import binaries
from scripts.controlplane.components import free_ports

HERE = Path(__file__).resolve().parent
PATIENCE: Final = 60.0


def versitygw() -> Path:
    """The binary, built if missing. Raises BuildError."""
    return binaries(HERE) / "versitygw"


class ObjectStore:
    """One server in one directory. Buckets are the directories in `buckets`, with metadata in another directory."""

    access_key: Final = "gpuwarden"
    secret_key: Final = "gpuwarden-secret"  # noqa: S105 - for a test's server on loopback

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.buckets = directory / "buckets"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_ports(1)[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def make_bucket(self, name: str) -> None:
        (self.buckets / name).mkdir(parents=True)

    def start(self) -> None:
        for name in ("buckets", "metadata"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        keys = {"ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key}
        command = [str(versitygw()), "--port", f"127.0.0.1:{self._port}", "posix", "--sidecar"]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.directory / "metadata"), str(self.buckets)],
                env={"PATH": os.defpath, **keys},
                stdout=log,
                stderr=log,
            )
        self._wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _wait(self) -> None:
        """Waits until it listens, its last step of starting."""
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5):
                return
            time.sleep(0.1)
        raise RuntimeError(f"the object store did not start; see {self.directory / 'log'}")
