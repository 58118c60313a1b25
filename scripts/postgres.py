"""A temporary Postgres on loopback: the machine's own, or Debian's, which this installs.

`python -m scripts.postgres` installs it if needed, or prints why it is missing.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.controlplane.components import free_ports

# Debian's directories; elsewhere the programs are on the PATH.
INSTALLED: Final = Path("/usr/lib/postgresql")
COMMON: Final = Path("/etc/postgresql-common")
PATIENCE: Final = 120.0
# Postgres refuses to run as root. Debian's package creates the first user; the second exists everywhere.
UNPRIVILEGED: Final = ("postgres", "nobody")


class PostgresMissingError(Exception):
    """Postgres is missing. The text says how to install it."""


def binaries() -> Path:
    """The program directory of the newest version. Raises PostgresMissingError."""
    versions = [path for path in INSTALLED.glob("*/bin") if (path / "initdb").exists()]
    if versions:
        return max(versions, key=lambda path: float(path.parent.name))
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    raise PostgresMissingError(
        "there is no Postgres here: install the package `postgresql`, or run `python -m scripts.postgres` as root"
    )


def install() -> Path:
    """Installs Debian's package as root, if Postgres is missing. Raises PostgresMissingError."""
    with contextlib.suppress(PostgresMissingError):
        return binaries()
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return binaries()
    apt_get("update")
    apt_get("install", "--no-install-recommends", "postgresql-common")
    # Otherwise Debian would start its own server.
    with (COMMON / "createcluster.conf").open("a") as file:
        file.write("create_main_cluster = false\n")
    apt_get("install", "--no-install-recommends", "postgresql")
    return binaries()


def apt_get(*words: str) -> None:
    command = ["/usr/bin/env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "--assume-yes", *words]
    if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode:
        raise PostgresMissingError("Postgres could not be installed; see the output of `apt-get` above")


class Postgres:
    """One server with its data in one directory. It can be stopped, killed and restarted on the same port."""

    user: Final = "gpuwarden"
    database: Final = "gpuwarden"
    host: Final = "127.0.0.1"

    def __init__(self, directory: Path, password: str) -> None:
        self.directory = directory
        self.password = password
        self.port = free_ports(1)[0]
        self._bin = binaries()
        self._process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        password = self.directory / "password"
        password.write_text(self.password + "\n")
        if (owner := unprivileged()) is not None:
            for path in (self.directory, password):
                shutil.chown(path, owner)
        options = ["--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", f"--username={self.user}"]
        made = self._run("initdb", *options, f"--pwfile={password}", f"--pgdata={self.directory / 'data'}")
        if made.returncode:
            raise RuntimeError(f"initdb failed: {made.stderr}")

    def start(self) -> None:
        options = {
            "listen_addresses": self.host,
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",  # a test's data need not survive a power cut
            "max_connections": 30,
            "shared_buffers": "64MB",
        }
        flags = [text for name, value in options.items() for text in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(self.directory / "data"), *flags),
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()
        self._make_database()

    def stop(self) -> None:
        """Closes all client connections."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kills the server as a crash would. Its children end by themselves."""
        self._end(signal.SIGQUIT)

    def run_sql(self, text: str, database: str | None = None) -> str:
        """One line per row, with `|` between columns."""
        with self.session(database) as session:
            said, errors = session.communicate(text)
        if session.returncode:
            raise RuntimeError(errors)
        return said.strip()

    @contextlib.contextmanager
    def session(self, database: str | None = None) -> Iterator[subprocess.Popen[str]]:
        """A psql that reads statements from stdin. Uncommitted changes are rolled back at the end."""
        environment = {
            "PATH": os.defpath,
            "PGHOST": self.host,
            "PGPORT": str(self.port),
            "PGUSER": self.user,
            "PGPASSWORD": self.password,
            "PGDATABASE": database or self.database,
        }
        with subprocess.Popen(
            [str(self._bin / "psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-f", "-"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def _make_database(self) -> None:
        if not self.run_sql(f"SELECT 1 FROM pg_database WHERE datname = '{self.database}'", "postgres"):  # noqa: S608
            self.run_sql(f"CREATE DATABASE {self.database}", "postgres")

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _wait(self) -> None:
        give_up = time.monotonic() + PATIENCE
        while time.monotonic() < give_up and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=5):
                if self._is_ready():
                    return
            time.sleep(0.1)
        raise RuntimeError(f"Postgres did not start; see {self.directory / 'log'}")

    def _is_ready(self) -> bool:
        return not subprocess.run(
            [str(self._bin / "pg_isready"), "-q", "-h", self.host, "-p", str(self.port)], check=False
        ).returncode

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self._command(name, *arguments)
        return subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)

    def _command(self, name: str, *arguments: str) -> Sequence[str]:
        owner = unprivileged()
        if owner is None:
            return [str(self._bin / name), *arguments]
        setpriv = ["setpriv", f"--reuid={owner}", f"--regid={pwd.getpwnam(owner).pw_gid}", "--clear-groups"]
        return [*setpriv, str(self._bin / name), *arguments]


def unprivileged() -> str | None:
    """The prefix that drops root. setpriv replaces itself by the server, so signals reach it."""
    if os.geteuid() != 0:
        return None
    for name in UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise PostgresMissingError("Postgres does not run as root, and there is no user `postgres` or `nobody`")


if __name__ == "__main__":
    try:
        print(install())
    except PostgresMissingError as exc:
        # The tests skip with the same message.
        print(exc, file=sys.stderr)
