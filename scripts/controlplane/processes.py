"""Processes that outlive their starting command, identified by pid and start time. Linux only: it reads /proc."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# Long enough for an API server with open watches. After this time processes are killed.
STOP_TIMEOUT = 15.0
LOOK_EVERY = 0.02


class State(StrEnum):
    """The state of a process as seen from outside."""

    RUNNING = "running"
    PAUSED = "paused"
    GONE = "gone"


@dataclass(frozen=True)
class Record:
    """One started process. Pids are reused, but pid and start time together are unique."""

    pid: int
    started: str
    command: list[str]

    @property
    def state(self) -> State:
        stat = stat_of(self.pid)
        if stat is None or stat.started != self.started or not stat.is_alive:
            return State.GONE
        return State.PAUSED if stat.letter in "Tt" else State.RUNNING

    def send(self, number: signal.Signals) -> None:
        if self.state is not State.GONE:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Stat:
    letter: str
    parent: int
    group: int
    started: str

    @property
    def is_alive(self) -> bool:
        """False for zombies, which may stay for long until their parent reads their status."""
        return self.letter not in "ZX"


def stat_of(pid: int) -> Stat | None:
    """State and start time of a process from /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain anything
    return Stat(letter=fields[0], parent=int(fields[1]), group=int(fields[2]), started=fields[19])


class Processes:
    """The processes of one directory, recorded in a file there for other `Processes` objects."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._file = directory / "processes.json"
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def records(self) -> dict[str, Record]:
        if not self._file.exists():
            return {}
        return {name: Record(**one) for name, one in json.loads(self._file.read_text()).items()}

    def state(self, name: str) -> State:
        record = self.records().get(name)
        return record.state if record else State.GONE

    @property
    def any_left(self) -> bool:
        return any(record.state is not State.GONE for record in self.records().values())

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def spawn(self, name: str, command: Sequence[str]) -> None:
        """Starts in a new session, so that Ctrl-C reaches the process only through the test run."""
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[name] = child
        stat = stat_of(child.pid)
        started = stat.started if stat else ""
        self._save(self.records() | {name: Record(child.pid, started, list(command))})

    def signal(self, name: str, number: signal.Signals) -> None:
        self.records()[name].send(number)

    def stop(self, names: Iterable[str]) -> None:
        """Stops all of them at once and waits until they are gone and their ports free."""
        records = [(name, record) for name, record in self.records().items() if name in set(names)]
        for _, record in records:
            record.send(signal.SIGTERM)
            record.send(signal.SIGCONT)  # a stopped process receives no other signal
        until = time.monotonic() + STOP_TIMEOUT
        for name, record in records:
            if not self._ended(name, record, until):
                self.kill(name)

    def kill(self, name: str) -> None:
        record = self.records()[name]
        record.send(signal.SIGKILL)
        if not self._ended(name, record, time.monotonic() + STOP_TIMEOUT):
            raise TimeoutError(f"{name} (pid {record.pid}) survives SIGKILL")

    def forget(self) -> None:
        self._file.unlink(missing_ok=True)

    def _ended(self, name: str, record: Record, until: float) -> bool:
        while record.state is not State.GONE:
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_EVERY)
        child = self._children.get(name)
        if child is not None and child.pid == record.pid:
            child.wait()
        return True

    def _save(self, records: dict[str, Record]) -> None:
        """Writes atomically: a reader sees the old or the new file."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({name: asdict(record) for name, record in records.items()}, indent=1))
        new.rename(self._file)
