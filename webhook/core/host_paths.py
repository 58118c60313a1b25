"""Which directories of a node administrators may let pods mount, and where no PersistentVolume may lead."""

import re
from typing import Final

# Devices, the kernel's own files, the sockets of kubelet and runtime, their state and keys, and the programs, libraries
# and settings that they and the driver consist of.
PLACES: Final = (
    *("/dev", "/proc", "/sys", "/run", "/var/run", "/etc", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/boot"),
    *("/root", "/sysroot", "/ostree", "/opt/nvidia", "/opt/cni", "/opt/nri", "/opt/containerd", "/home/kubernetes"),
    *("/srv/kubernetes", "/var/lib/kubelet", "/var/lib/kubernetes", "/var/lib/kube-proxy", "/var/lib/containerd"),
    *("/var/lib/containers", "/var/lib/crio", "/var/lib/docker", "/var/lib/cni", "/var/lib/etcd"),
    *("/var/lib/minikube", "/var/lib/rancher", "/var/lib/k0s", "/var/snap/microk8s"),
)
# Where provisioners make volumes inside of those.
STORAGE: Final = ("/var/lib/rancher/k3s/storage", "/var/snap/microk8s/common/default-storage")
# Where tenants write, and so could make links: by volumes of provisioners, or as any process of the node.
WRITABLE: Final = ("/opt/local-path-provisioner", "/var/local-path-provisioner", "/var/openebs", "/tmp", "/var/tmp")  # noqa: S108

# Absolute and clean. It can stand in a quoted word of CEL.
HOST_PATH: Final = r"(/\.?[A-Za-z0-9_@+=~-][A-Za-z0-9._@+=~-]*)+"


def mistake_in(path: str) -> str | None:
    """Why no administrator may let pods mount the directory."""
    if not re.fullmatch(HOST_PATH, path):
        return "not an absolute path of letters, digits and ._@+=~- without . and .."
    for place in PLACES:
        if overlap(path, place):
            return f"devices, sockets, programs or keys of the node are in {place}"
    for place in WRITABLE:
        if overlap(path, place):
            return f"pods may make links in {place}, which lead anywhere"
    return None


def overlap(one: str, other: str) -> bool:
    """Whether one of two clean paths is the other or lies in it."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
