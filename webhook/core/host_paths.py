"""The directories of a node that administrators may allow pods to mount, and those that no PersistentVolume may use."""

import re
from typing import Final

# Devices, kernel files, the sockets, state and keys of the kubelet and the runtime, and the programs, libraries and
# configuration of these and of the driver.
PROTECTED_PATHS: Final = (
    *("/dev", "/proc", "/sys", "/run", "/var/run", "/etc", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/boot"),
    *("/root", "/sysroot", "/ostree", "/opt/nvidia", "/opt/cni", "/opt/nri", "/opt/containerd", "/home/kubernetes"),
    *("/srv/kubernetes", "/var/lib/kubelet", "/var/lib/kubernetes", "/var/lib/kube-proxy", "/var/lib/containerd"),
    *("/var/lib/containers", "/var/lib/crio", "/var/lib/docker", "/var/lib/cni", "/var/lib/etcd"),
    *("/var/lib/minikube", "/var/lib/rancher", "/var/lib/k0s", "/var/snap/microk8s"),
)
# Directories within the protected paths where provisioners create volumes.
STORAGE: Final = ("/var/lib/rancher/k3s/storage", "/var/snap/microk8s/common/default-storage")
# Directories where tenants can create symbolic links: through volumes of provisioners, or from any process on the node.
WRITABLE: Final = ("/opt/local-path-provisioner", "/var/local-path-provisioner", "/var/openebs", "/tmp", "/var/tmp")  # noqa: S108

# Absolute, without `.` and `..`. The characters need no escape in a CEL string.
HOST_PATH: Final = r"(/\.?[A-Za-z0-9_@+=~-][A-Za-z0-9._@+=~-]*)+"


def mistake_in(path: str) -> str | None:
    """Why an administrator may not allow pods to mount the directory; None if that is allowed."""
    if not re.fullmatch(HOST_PATH, path):
        return "not an absolute path of letters, digits and ._@+=~- without . and .."
    for protected in PROTECTED_PATHS:
        if overlap(path, protected):
            return f"{protected} contains devices, sockets, programs or keys of the node"
    for writable in WRITABLE:
        if overlap(path, writable):
            return f"pods can create links in {writable} that lead to any path"
    return None


def overlap(one: str, other: str) -> bool:
    """Whether one of two clean paths equals or contains the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
