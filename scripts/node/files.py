"""The configuration files of a node's programs."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from enum import StrEnum
from os import makedev, mknod
from pathlib import Path
from stat import S_IFCHR
from typing import Any, Final

from scripts.node.build import DRIVER, Parts
from scripts.node.images import PAUSE

# Device numbers of NVIDIA's device nodes.
MAJOR: Final = 195
CONTROL_MINOR: Final = 255
PRODUCT: Final = "NVIDIA H100 80GB HBM3"
RUNTIME: Final = "nvidia"
"""The RuntimeClass handler for NVIDIA's container runtime."""


class Mode(StrEnum):
    """The mode of NVIDIA's container runtime."""

    AUTO = "auto"
    CDI = "cdi"


def write_containerd(home: Path, parts: Parts) -> None:
    """`restrict_oom_score_adj` because root may be without CAP_SYS_RESOURCE; tracing and NRI are not used."""
    (home / "containerd.toml").write_text(
        textwrap.dedent(
            f"""\
            version = 4
            root = "{home}/containerd"
            state = "/run/containerd"
            disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.blockfile",
              "io.containerd.internal.v1.tracing", "io.containerd.nri.v1.nri"]
            [grpc]
              address = "/run/containerd/containerd.sock"
            [plugins.'io.containerd.cri.v1.images'.pinned_images]
              sandbox = "{PAUSE}"
            [plugins.'io.containerd.cri.v1.runtime']
              disable_apparmor = true
              restrict_oom_score_adj = true
              enable_criu = false
              cdi_spec_dirs = ["/run/cdi"]
              [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
                runtime_type = "io.containerd.runc.v2"
                [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
                  BinaryName = "{parts.runc}"
                  SystemdCgroup = false
              [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{RUNTIME}]
                runtime_type = "io.containerd.runc.v2"
                [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{RUNTIME}.options]
                  BinaryName = "{home}/nvidia-runtime.sh"
                  SystemdCgroup = false
              [plugins.'io.containerd.cri.v1.runtime'.cni]
                bin_dirs = ["{parts.cni}"]
                conf_dir = "{home}/cni"
            """
        )
    )


def write_cni(home: Path, subnet: str) -> None:
    ipam = {"type": "host-local", "dataDir": str(home / "ipam"), "subnet": subnet}
    plugins = [{"type": "ptp", "ipMasq": False, "ipam": ipam}]
    content = {"cniVersion": "1.0.0", "name": "node", "plugins": plugins}
    (home / "cni/10-ptp.conflist").write_text(json.dumps(content, indent=1))


def write_kubelet(home: Path, *, ca: Path, address: str, cgroup: str) -> None:
    content: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(ca)}},
        "address": address,
        "healthzPort": 0,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "podLogsDir": str(home / "log/pods"),
        "resolvConf": "",
        "clusterDNS": ["10.0.0.10"],
        "clusterDomain": "cluster.local",
        # Other data may fill the machine's disk and memory.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "10Mi"},
        # Often enough for a test that waits for a fresh heartbeat.
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "2s",
    }
    (home / "kubelet.json").write_text(json.dumps(content, indent=1))


def write_driver(home: Path, parts: Parts, gpus: Sequence[str]) -> None:
    """The files of NVIDIA's driver: libraries, device nodes, nvidia-smi."""
    root = home / "driver"
    libraries, devices, programs = root / "usr/lib64", root / "dev", root / "usr/bin"
    for directory in (libraries, devices, programs):
        directory.mkdir(parents=True, exist_ok=True)
    for library in parts.libraries:
        shutil.copy(library, libraries)
        link(libraries / library.name.replace(DRIVER, "1"), library.name)
    (home / "gpus").write_text("".join(f"{uuid} {PRODUCT}\n" for uuid in gpus))
    for name, minor in [("nvidiactl", CONTROL_MINOR), *((f"nvidia{number}", number) for number in range(len(gpus)))]:
        device_node(devices / name, minor)
    write_program(programs / "nvidia-smi", SMI + "".join(smi_line(n, uuid) for n, uuid in enumerate(gpus)))


# It lists the GPUs whose device nodes exist: in a container, the container's own.
SMI: Final = "i=0\n"


def smi_line(number: int, uuid: str) -> str:
    said = f"GPU $i: {PRODUCT} (UUID: {uuid})"
    return f'if [ -c /dev/nvidia{number} ]; then echo "{said}"; i=$((i+1)); fi\n'


def write_nvidia_runtime(home: Path, parts: Parts, mode: Mode) -> None:
    """containerd calls the wrapper script. The runtime reads the configuration at each call."""
    root = home / "driver"
    etc = home / "etc/nvidia-container-runtime"
    etc.mkdir(parents=True, exist_ok=True)
    new = etc / "config.toml.new"
    new.write_text(
        textwrap.dedent(
            f"""\
            [nvidia-container-cli]
            root = "{root}"
            load-kmods = false
            [nvidia-container-runtime]
            debug = "{home}/log/nvidia-runtime.log"
            log-level = "debug"
            runtimes = ["{parts.runc}"]
            mode = "{mode}"
            [nvidia-ctk]
            path = "{parts.programs}/nvidia-ctk"
            """
        )
    )
    new.rename(etc / "config.toml")
    variables = " ".join(nvml_variables(home))
    runtime = f"XDG_CONFIG_HOME={home}/etc exec {parts.programs}/nvidia-container-runtime"
    write_program(home / "nvidia-runtime.sh", f'{variables} {runtime} "$@"\n')


def nvml_variables(home: Path) -> list[str]:
    """Environment variables for programs that load the mock of NVML."""
    return [f"MOCK_NVML_GPUS={home}/gpus", f"LD_LIBRARY_PATH={home}/driver/usr/lib64"]


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


def link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def device_node(path: Path, minor: int) -> None:
    path.unlink(missing_ok=True)
    mknod(path, S_IFCHR, makedev(MAJOR, minor))
    path.chmod(0o666)
