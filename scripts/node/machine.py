"""The machine's resources for a node: an address and cgroups, derived from the node's number."""

import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

# One byte of the node's address and of its pod network.
NUMBERS: Final = range(1, 255)
CGROUPS_GO_WITHIN: Final = 15.0


class NoNumberError(Exception):
    """All numbers are taken by running nodes, or by the remains of crashed ones."""


def address_of(number: int) -> str:
    """Kubelet refuses loopback addresses. On the loopback interface this one stays on the machine."""
    return f"10.255.255.{number}"


def subnet_of(number: int) -> str:
    return f"10.88.{number}.0/24"


def cgroup_of(number: int) -> str:
    return f"gpuwarden-node-{number}"


def take_number() -> int:
    """Reserves a number by adding its address: the kernel refuses an existing address, so numbers are unique."""
    for number in random.sample(NUMBERS, len(NUMBERS)):
        if ip("add", number):
            return number
    raise NoNumberError(f"no address of {address_of(NUMBERS[0])} to {address_of(NUMBERS[-1])} is free on lo")


def give_back(number: int) -> None:
    ip("del", number)


def ip(verb: str, number: int) -> bool:
    command = ["ip", "address", verb, f"{address_of(number)}/32", "dev", "lo"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def make_cgroups(number: int) -> None:
    """Creates a cgroup in every hierarchy that kubelet uses. In cgroup v1 a new cpuset must be filled first."""
    v1, v2 = hierarchies("cgroup"), hierarchies("cgroup2")
    for hierarchy in v1 or v2:
        own = hierarchy / cgroup_of(number)
        own.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if v1 and (hierarchy / name).exists():
                (own / name).write_text((hierarchy / name).read_text())


def remove_cgroups(number: int) -> None:
    """Retries: a cgroup cannot be removed while its last process ends."""
    until = time.monotonic() + CGROUPS_GO_WITHIN
    for hierarchy in (*hierarchies("cgroup"), *hierarchies("cgroup2")):
        own = hierarchy / cgroup_of(number)
        while own.exists():
            for directory in sorted(filter(Path.is_dir, own.rglob("*")), reverse=True):
                with suppress(OSError):
                    directory.rmdir()
            try:
                own.rmdir()
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)


def hierarchies(kind: str) -> list[Path]:
    """The mount points of cgroups. With v1 (`cgroup`), a `cgroup2` mount may exist without controllers."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(fields[1]) for fields in mounts if fields[2] == kind]
