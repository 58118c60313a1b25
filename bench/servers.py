"""Starts and stops the measured servers, and reads their memory and CPU time."""

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from bench import inventory

MIB = 1024  # in the kB of /proc
START_LIMIT = 60.0
STOP_LIMIT = 40.0
TICKS_PER_SECOND = 100  # of /proc/<pid>/stat: the same on all Linux systems
GPUWARDEN = Path(sys.executable).parent / "gpuwarden"
ROOT = Path(__file__).resolve().parent.parent
CERTIFICATES = Path("certs/dev")  # where `gpuwarden serve` creates its own


class BenchError(Exception):
    """A measurement failed. The text says why."""


@frozen
class Running:
    """A running server."""

    pid: int
    url: str
    ca: Path
    seconds_to_ready: float
    path: str = "/mutate"
    # UI, health and metrics, if the server has them.
    plain_url: str = ""

    def memory_mib(self, row: str) -> float:
        """VmRSS or VmHWM."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{row}:"):
                return int(line.split()[1]) / MIB
        raise BenchError(f"/proc has no {row}")

    def cpu_seconds(self) -> float:
        """User and system time of all threads so far."""
        return cpu_seconds(self.pid)


def cpu_seconds(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_SECOND


def write_inventory(directory: Path, gpus: int) -> Path:
    path = directory / f"inventory-{gpus}.json"
    path.write_text(json.dumps(inventory.document(gpus)))
    return path


def write_certificates(directory: Path) -> Path:
    """The directory with the certificate and key of all servers."""
    made = directory / CERTIFICATES
    subprocess.run([GPUWARDEN, "certs", "dev", "--dir", made], check=True, stdout=subprocess.DEVNULL)
    return made


@contextmanager
def started(command: Sequence[str | Path], directory: Path, *, name: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs the process with its log in a file, and terminates it at the end."""
    with (directory / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def gpuwarden(directory: Path, *options: str | Path) -> Iterator[Running]:
    """`gpuwarden serve` on free ports; entered once it is ready."""
    begun = time.perf_counter()
    command = [GPUWARDEN, "serve", "--port", "0", "--ui-port", "0", *options]
    with started([*command, "--extender-port", "0"], directory, name="gpuwarden") as process:
        line = "" if process.stdout is None else process.stdout.readline()
        took = time.perf_counter() - begun
        if not line.startswith("ready "):
            raise BenchError(f"gpuwarden did not start: {last_line(directory / 'gpuwarden.log')}")
        urls = dict(part.split("=", 1) for part in line.split()[1:])
        ca = directory / CERTIFICATES / "ca.crt"
        yield Running(process.pid, urls["https"], ca, took, plain_url=urls["http"])


@contextmanager
def other(name: str, command: Sequence[str | Path], directory: Path, port: int) -> Iterator[Running]:
    """Another server on a chosen port; entered once it accepts connections."""
    begun = time.perf_counter()
    ca = directory / CERTIFICATES / "ca.crt"
    with started(command, directory, name=name) as process:
        while not speaks_tls(port, ca):
            if process.poll() is not None or time.perf_counter() - begun > START_LIMIT:
                raise BenchError(f"{name} did not start: {last_line(directory / f'{name}.log')}")
            time.sleep(0.05)
        yield Running(process.pid, f"https://127.0.0.1:{port}", ca, time.perf_counter() - begun)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def speaks_tls(port: int, ca: Path) -> bool:
    context = ssl.create_default_context(cafile=str(ca))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
            context.wrap_socket(raw, server_hostname="localhost"),
        ):
            return True
    except OSError:
        return False


def last_line(path: Path) -> str:
    return (path.read_text().strip().splitlines() or ["its log is empty"])[-1]
