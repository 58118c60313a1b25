"""Builds the binaries of the test clusters once, with `go` from the Go module proxy. Uses only the standard library."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KUBERNETES = "k8s.io/kubernetes"
GO_VERSION = re.compile(r"go version go(\d+)\.(\d+)")


class BuildError(Exception):
    """The binaries cannot be built. The text says what to do."""


class ToolMissingError(BuildError):
    """Go is missing or too old for these modules."""


@dataclass(frozen=True)
class Module:
    """One of our Go modules, the commands built from it, and the files copied from the module that it pins."""

    directory: Path
    pinned: str
    version: str
    ldflags: str
    binaries: Mapping[str, str]
    directories: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.directory.name


@dataclass(frozen=True)
class Pins:
    """The content of a pins.toml and its directory."""

    where: Path
    go: str
    modules: tuple[Module, ...]

    @property
    def made(self) -> frozenset[str]:
        """The names of all files after a build."""
        return frozenset(name for module in self.modules for name in (*module.binaries, *module.directories))


def read_pins(where: Path = HERE) -> Pins:
    raw = tomllib.loads((where / "pins.toml").read_text())
    go = raw.pop("go")
    modules = (checked(*chosen(where / name, one)) for name, one in raw.items() if "module" in one)
    return Pins(where, go, tuple(modules))


def chosen(directory: Path, raw: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The module, or another version of Kubernetes that E2E_KUBERNETES names, which has a directory of its own, such
    as kube-1.37.1. Raises BuildError if there is none."""
    version = os.environ.get("E2E_KUBERNETES")  # noqa: TID251 - of the run, not a setting of ours
    if not version or raw["module"] != KUBERNETES or raw["version"] == f"v{version}":
        return directory, raw
    other = directory.with_name(f"{directory.name}-{version}")
    if not other.is_dir():
        raise BuildError(f"E2E_KUBERNETES={version} needs a directory {other.name} beside {directory.name}")
    return other, raw | {"version": f"v{version}"}


def checked(directory: Path, raw: dict[str, Any]) -> Module:
    """The pinned module. Raises BuildError if go.mod, which `go` reads, has another version."""
    requirement = f"require {raw['module']} {raw['version']}"
    if requirement not in (directory / "go.mod").read_text().splitlines():
        raise BuildError(f"{directory.name}/go.mod and pins.toml disagree: go.mod has to say `{requirement}`")
    ldflags = "-s -w " + raw.get("ldflags", "").format(version=raw["version"])
    taken = raw.get("directories", {})
    return Module(directory, raw["module"], raw["version"], ldflags.strip(), raw["binaries"], taken)


def digest_of(pins: Pins) -> str:
    """A digest of what the binaries depend on: a checkout with other pins uses another directory."""
    whole = hashlib.sha256((pins.where / "pins.toml").read_bytes())
    for module in pins.modules:
        own = sorted(file for file in module.directory.rglob("*.go") if file.name != "tools.go")
        for file in (module.directory / "go.mod", module.directory / "go.sum", *own):
            whole.update(file.read_bytes())
    return whole.hexdigest()[:16]


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - the user's cache directory is not a setting of ours
    return (Path(base) if base else Path.home() / ".cache") / "gpuwarden"


def binaries(where: Path = HERE) -> Path:
    """The directory of the binaries, built if missing. A second process waits for the first."""
    pins = read_pins(where)
    cache = cache_directory() / where.name / digest_of(pins)
    bin_directory = cache / "bin"
    if is_complete(bin_directory, pins):
        return bin_directory
    go = find_go(pins)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "lock"):
        if not is_complete(bin_directory, pins):
            build_all(go, pins, bin_directory)
    return bin_directory


def is_complete(directory: Path, pins: Pins) -> bool:
    """Builds under another name and renames at the end, so an existing directory is complete."""
    return all((directory / name).exists() for name in pins.made)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_go(pins: Pins) -> str:
    wanted = ".".join(pins.go.split(".")[:2])
    install = f"install Go {wanted} or newer and have `go` on the PATH"
    go = shutil.which("go")
    if go is None:
        raise ToolMissingError(f"{the_rig(pins)} is built with Go, which is not installed: {install}")
    # Run inside our module: a `go` that downloads a newer toolchain prints that version there.
    asked = subprocess.run([go, "version"], cwd=pins.modules[0].directory, capture_output=True, text=True, check=False)
    found = GO_VERSION.match(asked.stdout)
    if found is None or tuple(map(int, found.groups())) < tuple(map(int, wanted.split("."))):
        said = (asked.stdout or asked.stderr).strip()
        raise ToolMissingError(f"{the_rig(pins)} is built with Go, and this one is too old ({said}): {install}")
    return go


def the_rig(pins: Pins) -> str:
    return "the control plane" if pins.where == HERE else f"the {pins.where.name}"


def build_all(go: str, pins: Pins, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="new.", dir=target.parent) as work:
        made = Path(work, "bin")
        made.mkdir()
        for module in pins.modules:
            names = ", ".join(module.binaries)
            print(f"building {names} {module.version}: minutes the first time", file=sys.stderr)
            build(go, module, made)
            take(go, module, made)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def build(go: str, module: Module, target: Path) -> None:
    """Builds all commands of a module at once, because they share most packages. `go` names them after their
    directories. etcd's name differs, but it is built alone."""
    names = list(module.binaries)
    output = f"{target}/{names[0] if len(names) == 1 else ''}"
    flags = ["-mod=readonly", "-buildvcs=false", f"-ldflags={module.ldflags}", "-o", output]
    command = ["env", "GOWORK=off", go, "build", *flags, *module.binaries.values()]
    if subprocess.run(command, cwd=module.directory, stdout=sys.stderr, check=False).returncode:
        raise BuildError(f"building {module.name} {module.version} failed; see the output of `go` above")


def take(go: str, module: Module, target: Path) -> None:
    """Copies directories of the pinned module; unlike Go's cache, the copies are writable."""
    if not module.directories:
        return
    command = ["env", "GOWORK=off", go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", module.pinned]
    asked = subprocess.run(command, cwd=module.directory, stdout=subprocess.PIPE, text=True, check=False)
    if asked.returncode:
        raise BuildError(f"{module.pinned} {module.version} was not found; see the output of `go` above")
    for name, inside in module.directories.items():
        shutil.copytree(Path(asked.stdout.strip()) / inside, target / name, copy_function=shutil.copyfile)
        (target / name).chmod(0o755)
