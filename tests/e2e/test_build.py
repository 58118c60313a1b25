"""Builds of the control plane's binaries, with a fake `go`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.controlplane.build import read_pins
from scripts.controlplane.cluster import ROOT

# Creates the requested files slowly and counts its calls.
GO = """#!/bin/sh
if [ "$1" = version ]; then echo "{version}"; exit {status}; fi
echo build >>"{log}"
while [ "$1" != -o ]; do shift; done
sleep 0.3
case "$2" in
    */) target=$2; shift 2; for package; do : >"$target${{package##*/}}"; done ;;
    *) : >"$2" ;;
esac
"""


class FakeGo:
    def __init__(self, directory: Path, version: str = "go version go1.26.1 linux/amd64", status: int = 0) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.more_path = ":/usr/bin:/bin"
        self.kubernetes = ""
        go = directory / "bin" / "go"
        go.parent.mkdir()
        go.write_text(GO.format(version=version, status=status, log=self.log))
        go.chmod(0o755)

    @property
    def command(self) -> Sequence[str]:
        path = f"PATH={self.directory / 'bin'}{self.more_path}"
        cache = f"XDG_CACHE_HOME={self.directory / 'cache'}"
        kubernetes = f"E2E_KUBERNETES={self.kubernetes}"
        return ["/usr/bin/env", path, cache, kubernetes, sys.executable, "-m", "scripts.controlplane", "build"]

    def build(self, *parts: str) -> subprocess.CompletedProcess[str]:
        command = [*self.command, *parts]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def test_binaries_are_built_once_and_cached(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    first = go.build()
    assert first.returncode == 0, first.stderr
    made = Path(first.stdout.strip())
    assert made.is_relative_to(tmp_path / "cache" / "gpuwarden" / "controlplane")
    names = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kwok"]
    assert sorted(file.name for file in made.iterdir()) == names
    second = go.build()
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert go.runs == len(read_pins().modules)


def test_other_binaries_are_built_by_name(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    done = go.build("objectstore", "kubeconform")
    assert done.returncode == 0, done.stderr
    assert [sorted(file.name for file in Path(line).iterdir()) for line in done.stdout.splitlines()] == [
        ["versitygw"],
        ["kubeconform"],
    ]
    assert go.runs == 2


def test_other_version_of_kubernetes_is_built_beside_the_pinned_one(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    pinned = go.build()
    go.kubernetes = "1.37.1"
    other = go.build()
    assert other.returncode == 0, other.stderr
    assert "kubectl v1.37.1: minutes" in other.stderr
    assert "etcd v3.7.3: minutes" in other.stderr
    assert other.stdout != pinned.stdout
    go.kubernetes = "1.36.3"
    assert (go.build().stdout, go.build().stderr) == (pinned.stdout, "")


def test_version_of_kubernetes_without_a_module_is_refused(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    go.kubernetes = "1.20.0"
    done = go.build()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "E2E_KUBERNETES=1.20.0 needs a directory kube-1.20.0 beside kube\n"
    assert go.runs == 0


def test_concurrent_builds_build_once(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    both = [
        subprocess.Popen(go.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=60)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(said) == 1
    assert go.runs == len(read_pins().modules)


def test_failed_build_leaves_no_binary(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    working = (tmp_path / "bin" / "go").read_text()
    (tmp_path / "bin" / "go").write_text(working.replace("sleep 0.3", "exit 1"))
    failed = go.build()
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1] == "building etcd v3.7.3 failed; see the output of `go` above"
    (tmp_path / "bin" / "go").write_text(working)
    assert go.build().returncode == 0


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("go version go1.25.9 linux/amd64", 0),
        ("go: go.mod requires go >= 1.26.0 (running go 1.22.2; GOTOOLCHAIN=local)", 1),
    ],
    ids=["older", "without toolchain downloads"],
)
def test_too_old_go_is_reported_with_the_version_to_install(tmp_path: Path, version: str, status: int) -> None:
    done = FakeGo(tmp_path, version, status).build()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"the control plane is built with Go, and this one is too old ({version}): "
        "install Go 1.26 or newer and have `go` on the PATH\n"
    )


def test_missing_go_is_reported_with_what_to_install(tmp_path: Path) -> None:
    go = FakeGo(tmp_path)
    (tmp_path / "bin" / "go").unlink()
    go.more_path = ""
    done = go.build()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "the control plane is built with Go, which is not installed: "
        "install Go 1.26 or newer and have `go` on the PATH\n"
    )
