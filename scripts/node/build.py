"""Builds a node's programs: Go programs, C with gcc, and three unpacked Debian packages."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.controlplane.build import BuildError, binaries, cache_directory, find_go, locked, read_pins
from scripts.node.images import write_images

HERE: Final = Path(__file__).resolve().parent
NATIVE: Final = HERE / "native"
# The version reported by the mock of NVML.
DRIVER: Final = "580.95.05"
# The module with nvml.h.
NVML: Final = "github.com/NVIDIA/go-nvml"
COMMANDS: Final = ("gcc", "apt-get", "dpkg", "ip", "mount", "nsenter", "unshare")


class CannotRunError(Exception):
    """This machine cannot run a node. The text says why."""


@dataclass(frozen=True)
class Parts:
    """A node's programs. `programs` has the Go binaries, `rest` all others."""

    programs: Path
    rest: Path

    @property
    def runc(self) -> Path:
        return self.rest / "debian/usr/sbin/runc"

    @property
    def cni(self) -> Path:
        return self.rest / "debian/usr/lib/cni"

    @property
    def pause(self) -> Path:
        return self.rest / "pause"

    @property
    def images(self) -> Path:
        return self.rest / "images.tar"

    @property
    def libraries(self) -> Sequence[Path]:
        """The driver's libraries with their names in the driver package."""
        return [self.rest / f"{name}.so.{DRIVER}" for name in ("libnvidia-ml", "libcuda")]

    @property
    def are_there(self) -> bool:
        return all(path.exists() for path in (self.runc, self.cni, self.pause, self.images, *self.libraries))


def check_machine() -> None:
    """Raises CannotRunError if a node cannot be built or run."""
    if sys.platform != "linux":
        raise CannotRunError(f"a real node needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise CannotRunError("a real node needs root: it has namespaces, cgroups and an address of its own")
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    if absent:
        raise CannotRunError(f"a real node needs the commands {', '.join(absent)}, which are missing on the PATH")
    if run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        raise CannotRunError("a real node needs mount and pid namespaces, and root cannot create them on this machine")


def parts() -> Parts:
    """All programs, built if missing. A second process waits for the first. Raises CannotRunError, BuildError."""
    check_machine()
    programs = binaries(HERE)
    cache = cache_directory() / "node-rest" / digest()
    done = Parts(programs, cache / "rest")
    if done.are_there:
        return done
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        if not done.are_there:
            build_rest(done)
    return done


def digest() -> str:
    """A digest of what the other parts than Go depend on."""
    whole = hashlib.sha256()
    for file in (HERE / "pins.toml", HERE / "images.py", HERE / "build.py", *sorted(NATIVE.iterdir())):
        whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def build_rest(done: Parts) -> None:
    """Builds under another name and renames at the end."""
    print("unpacking Debian's packages, compiling the mock of NVML, writing images", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="new.", dir=done.rest.parent) as work:
        made = Parts(done.programs, Path(work, "rest"))
        made.rest.mkdir()
        unpack(made.rest / "debian")
        compile_native(made)
        busybox = made.rest / "debian/bin/busybox"
        applets = run([str(busybox), "--list"]).stdout.split()
        write_images(
            made.images, pause=made.pause, busybox=busybox, applets=[name for name in applets if name != "busybox"]
        )
        shutil.rmtree(done.rest, ignore_errors=True)
        made.rest.rename(done.rest)


def unpack(target: Path) -> None:
    wanted = tomllib.loads((HERE / "pins.toml").read_text())["debian"]
    with tempfile.TemporaryDirectory(prefix="deb.", dir=target.parent) as work:
        # apt warns that its download user cannot write here, and continues as root.
        download = ["env", "-C", work, "apt-get", "--quiet", "download", *wanted]
        if run(download, check=False).returncode:
            run(["apt-get", "--quiet", "update"])
            run(download)
        for file in sorted(Path(work).glob("*.deb")):
            check_version(file, wanted)
            run(["dpkg", "--extract", str(file), str(target)])


def check_version(file: Path, wanted: dict[str, str]) -> None:
    name, version = run(["dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(file)]).stdout.split()
    if run(["dpkg", "--compare-versions", version, "ge", wanted[name]], check=False).returncode:
        raise BuildError(f"this machine's archive has {name} {version}, and {wanted[name]} or newer is needed")


def compile_native(made: Parts) -> None:
    header = nvml_header()
    stubs = made.rest / "stubs.c"
    stubs.write_text(stubs_for(header, NATIVE / "nvml.c"))
    nvml, cuda = made.libraries
    shared = ["gcc", "-O1", "-fPIC", "-shared"]
    flags = ["-Wall", f"-I{header.parent}", f'-DDRIVER="{DRIVER}"']
    run([*shared, *flags, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(nvml), str(NATIVE / "nvml.c"), str(stubs)])
    run([*shared, "-Wl,-soname,libcuda.so.1", "-o", str(cuda), str(NATIVE / "cuda.c")])
    run(["gcc", "-Os", "-static", "-s", "-o", str(made.pause), str(NATIVE / "pause.c")])


def nvml_header() -> Path:
    """The version that the container toolkit was built with, the newest of the three."""
    module = HERE / "container-toolkit"
    listed = ["env", "-C", str(module), "GOWORK=off", find_go(read_pins(HERE)), "list", "-mod=readonly", "-m"]
    return Path(run([*listed, "-f", "{{.Dir}}", NVML]).stdout.strip()) / "pkg/nvml/nvml.h"


def stubs_for(header: Path, source: Path) -> str:
    """Stubs for functions that the header declares and the source does not define."""
    declared = set(re.findall(r"nvmlReturn_t DECLDIR (nvml\w+)", header.read_text()))
    defined = set(re.findall(r"\b(nvml[A-Z]\w*)\(", source.read_text()))
    not_supported = 3
    return "".join(f"int {name}(void) {{ return {not_supported}; }}\n" for name in sorted(declared - defined))


def run(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done
