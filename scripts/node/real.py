"""One real node: containerd, kubelet and NVIDIA's plugins in their own mount and pid namespaces."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from scripts.controlplane.components import REAL_NODE
from scripts.controlplane.processes import Processes, Stat, State, stat_of
from scripts.node.build import Parts, parts, run
from scripts.node.files import (
    Mode,
    nvml_variables,
    write_cni,
    write_containerd,
    write_driver,
    write_kubelet,
    write_nvidia_runtime,
)
from scripts.node.machine import (
    address_of,
    cgroup_of,
    give_back,
    make_cgroups,
    remove_cgroups,
    subnet_of,
    take_number,
)

NAMESPACE: Final = Path(__file__).resolve().with_name("namespace.sh")
# The processes of a node, named like their logs.
SANDBOX: Final = "sandbox"
CONTAINERD: Final = "containerd"
KUBELET: Final = "kubelet"
DEVICE_PLUGIN: Final = "device-plugin"
DRA_DRIVER: Final = "dra-driver"

PATIENCE: Final = 60.0
LOOK_EVERY: Final = 0.05
SYSTEM_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


class NodeError(Exception):
    """A part of the node did not start. The text names its log."""


@dataclass(frozen=True)
class Access:
    """A node's access to its cluster."""

    ca: Path
    kubeconfig: Path
    admin: Path


class RealNode:
    """A node in one directory. The directory has all that another process needs to stop the node."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.processes = Processes(directory)

    # Properties.

    @property
    def gpus(self) -> list[str]:
        return [line.split()[0] for line in (self.directory / "gpus").read_text().splitlines()]

    @property
    def number(self) -> int:
        return int(self._state["number"])

    @property
    def address(self) -> str:
        return address_of(self.number)

    @property
    def boot_id(self) -> str:
        return (self.directory / "state/boot_id").read_text().strip()

    @property
    def is_there(self) -> bool:
        return (self.directory / "node.json").exists()

    def log(self, name: str) -> Path:
        return self.processes.log(name)

    # Start and stop.

    def create(self, gpus: Sequence[str], access: Access) -> None:
        """Creates the files of a new node and reserves its number."""
        for name in ("cdi", "cni", "containerd", "dev", "kubelet", "log", "state"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        number = take_number()
        state = {"number": number, "access": {key: str(path) for key, path in vars(access).items()}}
        (self.directory / "node.json").write_text(json.dumps(state))
        write_containerd(self.directory, self._parts)
        write_cni(self.directory, subnet_of(number))
        write_kubelet(self.directory, ca=access.ca, address=self.address, cgroup=cgroup_of(number))
        write_driver(self.directory, self._parts, gpus)
        write_nvidia_runtime(self.directory, self._parts, Mode.AUTO)

    def start(self) -> None:
        """Boots the node with a new bootID and starts its programs up to kubelet."""
        make_cgroups(self.number)
        # kubelet's directory is compiled in. The namespace mounts the node's own directory there.
        Path("/var/lib/kubelet").mkdir(parents=True, exist_ok=True)
        (self.directory / "state/boot_id").write_text(f"{uuid.uuid4()}\n")
        mounted = self.directory / "state/mounted"
        mounted.unlink(missing_ok=True)
        inside = ["sh", str(NAMESPACE), str(self.directory), str(self._parts.pause)]
        self.processes.spawn(
            SANDBOX, ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", *inside]
        )
        self._wait(SANDBOX, mounted.exists)
        self.start_containerd()
        self.start_kubelet()

    def power_off(self) -> None:
        """Kills all processes at once, like a power loss. The disk stays."""
        if self.processes.state(SANDBOX) is not State.GONE:
            # Killing its first process ends the namespaces; unshare returns when they are gone.
            try:
                os.kill(self._init, signal.SIGKILL)
            except ProcessLookupError:
                self.processes.kill(SANDBOX)
            self._wait_for(lambda: self.processes.state(SANDBOX) is State.GONE, "the node's namespaces do not end")
        self.processes.stop(self.processes.records())
        remove_cgroups(self.number)

    def reboot(self) -> None:
        self.power_off()
        self.start()

    def remove(self) -> None:
        """Removes everything from the machine except its files."""
        if self.is_there:
            self.power_off()
            give_back(self.number)
            self.processes.forget()
            (self.directory / "node.json").unlink()

    # Programs.

    def start_containerd(self) -> None:
        self._spawn(CONTAINERD, [self._program("containerd"), "-c", str(self.directory / "containerd.toml")])
        self._wait(CONTAINERD, lambda: self._ctr("version").returncode == 0)
        marker = self.directory / "state/imported"
        if not marker.exists():
            imported = self._ctr("images", "import", str(self._parts.images))
            if imported.returncode:
                raise NodeError(f"images are not imported: {imported.stderr}")
            marker.touch()

    def start_kubelet(self) -> None:
        self._spawn(
            KUBELET,
            [
                self._program("kubelet"),
                f"--config={self.directory / 'kubelet.json'}",
                f"--kubeconfig={self._access.kubeconfig}",
                f"--hostname-override={self.name}",
                f"--node-ip={self.address}",
                f"--node-labels={REAL_NODE}=true",
                "--root-dir=/var/lib/kubelet",
                f"--cert-dir={self.directory / 'state/pki'}",
                "--v=2",
            ],
        )

    def kill_containerd(self) -> None:
        """Restarts containerd. Shims and containers keep running."""
        self.kill(CONTAINERD)

    def kill_kubelet(self) -> None:
        """Restarts kubelet. Containers keep running."""
        self.kill(KUBELET)

    def kill(self, name: str) -> None:
        """Kills one program with its process group."""
        group = self.processes.records()[name].pid
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.processes.kill(name)
        self._wait_for(lambda: not has_members(group), f"{name} survives SIGKILL")

    def set_runtime_mode(self, mode: Mode) -> None:
        """Sets the runtime's mode for later containers. For `cdi` it creates the specification."""
        write_nvidia_runtime(self.directory, self._parts, mode)
        if mode is Mode.CDI:
            root = self.directory / "driver"
            ctk = [*nvml_variables(self.directory), self._program("nvidia-ctk"), "cdi", "generate"]
            roots = [f"--driver-root={root}", f"--dev-root={root}", "--nvidia-cdi-hook-path=/bin/true"]
            names = ["--device-name-strategy=uuid", "--device-name-strategy=index"]
            run(self.inside(*ctk, *roots, *names, "--output=/run/cdi/nvidia.yaml"))

    def start_device_plugin(self, *flags: str) -> None:
        """Starts NVIDIA's device plugin, which offers `nvidia.com/gpu`."""
        self._start_plugin(DEVICE_PLUGIN, "nvidia-device-plugin", "--device-list-strategy=envvar,cdi-cri", *flags)

    def start_dra_driver(self, *flags: str) -> None:
        """Starts NVIDIA's DRA driver, which writes ResourceSlices, with the administrator's credentials."""
        who = [f"--node-name={self.name}", "--namespace=kube-system", "--image-name=none"]
        where = [f"--kubeconfig={self._access.admin}", "--cdi-root=/run/cdi"]
        self._start_plugin(DRA_DRIVER, "gpu-kubelet-plugin", *who, *where, *flags)

    def inside(self, *command: str) -> list[str]:
        """A command line that runs the command in the node's namespaces. `NAME=value` may come before it."""
        path = f"PATH={self._parts.programs}:{self._parts.runc.parent}:{SYSTEM_PATH}"
        return ["nsenter", f"--target={self._init}", "--mount", "--pid", "env", "--chdir=/", path, *command]

    def _start_plugin(self, name: str, program: str, *flags: str) -> None:
        root = self.directory / "driver"
        roots = [f"--nvidia-driver-root={root}", f"--container-driver-root={root}", "--nvidia-cdi-hook-path=/bin/true"]
        self._spawn(name, [*nvml_variables(self.directory), self._program(program), *flags, *roots])

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        self.processes.spawn(name, self.inside(*command))

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.inside("ctr", "--address=/run/containerd/containerd.sock", "--namespace=k8s.io", *words)
        return run(command, check=False)

    def _program(self, name: str) -> str:
        return str(self._parts.programs / name)

    def _wait(self, name: str, is_there: Callable[[], bool]) -> None:
        """Waits for a file. Fails at once if the process that creates it has ended."""
        self._wait_for(
            is_there,
            f"{name} of {self.name} is not ready; see {self.log(name)}",
            while_it=lambda: self.processes.state(name) is not State.GONE,
        )

    def _wait_for(self, is_so: Callable[[], bool], complaint: str, while_it: Callable[[], bool] = lambda: True) -> None:
        until = time.monotonic() + PATIENCE
        while not is_so():
            if not while_it() or time.monotonic() > until:
                raise NodeError(complaint)
            time.sleep(LOOK_EVERY)

    @property
    def _state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directory / "node.json").read_text())
        return content

    @property
    def _access(self) -> Access:
        return Access(**{key: Path(text) for key, text in self._state["access"].items()})

    @cached_property
    def _parts(self) -> Parts:
        return parts()

    @property
    def _init(self) -> int:
        """The machine's pid of the first process in the node's pid namespace."""
        return child_of(self.processes.records()[SANDBOX].pid)


def nodes_in(directory: Path) -> list[RealNode]:
    """The real nodes of the cluster in this directory."""
    return [RealNode(file.parent) for file in sorted((directory / "nodes").glob("*/node.json"))]


def living() -> Iterator[tuple[int, Stat]]:
    """All processes of the machine."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    yield from ((pid, stat) for pid in pids if (stat := stat_of(pid)) is not None and stat.is_alive)


def child_of(parent: int) -> int:
    for pid, stat in living():
        if stat.parent == parent:
            return pid
    raise ProcessLookupError(f"process {parent} has no child")


def has_members(group: int) -> bool:
    return any(stat.group == group for _, stat in living())
