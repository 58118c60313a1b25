"""Whether a pod could open devices of its node by itself: the rules of the policy `gpuwarden-isolation`, for a stored
pod. The policy explains each path and capability in its lists."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from webhook.core import keys
from webhook.core.host_paths import PROTECTED_PATHS, STORAGE, overlap
from webhook.core.pod import WireStruct

STRONG = ("ALL", "SYS_ADMIN", "SYS_MODULE", "SYS_BOOT", "SYS_RAWIO", "BPF", "DAC_READ_SEARCH")
# Annotations by which runtimes and their plugins inject devices and paths of the node, alone or followed by `/pod` or
# `/container.NAME`.
INJECTING = (
    *("devices.noderesource.dev", "mounts.noderesource.dev", "cdi-devices.noderesource.dev", "devices.nri.io"),
    *("mounts.nri.io", "cdi-devices.nri.io", "cdi.nri.io", "devices.gke.io", "devices.crio.io"),
    *("io.kubernetes.cri-o.Devices", "org.systemd.property.DeviceAllow", "org.systemd.property.DevicePolicy"),
)
DEVICE_TYPES = ("Socket", "CharDevice", "BlockDevice")
# Exempt, whatever its labels are.
SYSTEM_NAMESPACE = "kube-system"
EXEMPT = "none"

ClaimName = tuple[str, str]
"""The namespace and name of a PersistentVolumeClaim."""


class Capabilities(WireStruct, frozen=True):
    add: list[str] | None = None


class SecurityContext(WireStruct, frozen=True):
    privileged: bool | None = None
    capabilities: Capabilities | None = None


class VolumeMount(WireStruct, frozen=True):
    name: str = ""
    read_only: bool | None = None


class IsolatedContainer(WireStruct, frozen=True):
    name: str = ""
    security_context: SecurityContext | None = None
    volume_mounts: list[VolumeMount] | None = None

    def strong(self) -> Iterator[str]:
        """The added capabilities that can open devices, as the pod spells them."""
        context = self.security_context or SecurityContext()
        for name in (context.capabilities or Capabilities()).add or ():
            if without_prefix(name) in STRONG:
                yield name


class NodePath(WireStruct, frozen=True):
    path: str = ""
    type: str | None = None

    def is_outside(self, allowed: Collection[str]) -> bool:
        """Whether the path is outside the allowed directories. The API server rejects paths with `..`."""
        is_inside = any(f"{self.path}/".startswith(f"{one}/") for one in allowed)
        return self.type in DEVICE_TYPES or not is_inside


class ClaimSource(WireStruct, frozen=True):
    claim_name: str = ""


class PodVolume(WireStruct, frozen=True):
    name: str = ""
    host_path: NodePath | None = None
    persistent_volume_claim: ClaimSource | None = None
    ephemeral: dict[str, Any] | None = None


class PodSpec(WireStruct, frozen=True):
    containers: list[IsolatedContainer] | None = None
    init_containers: list[IsolatedContainer] | None = None
    ephemeral_containers: list[IsolatedContainer] | None = None
    volumes: list[PodVolume] | None = None
    host_pid: bool | None = msgspec.field(default=None, name="hostPID")

    def named(self) -> Iterator[tuple[str, IsolatedContainer]]:
        """Every container with its path in the pod, in the order of the policy."""
        for one in self.containers or ():
            yield f"spec.containers[{one.name}]", one
        for one in self.init_containers or ():
            yield f"spec.initContainers[{one.name}]", one
        for one in self.ephemeral_containers or ():
            yield f"spec.ephemeralContainers[{one.name}]", one


class PodMeta(WireStruct, frozen=True):
    name: str | None = None
    namespace: str | None = None
    annotations: dict[str, str | None] | None = None


class IsolatedPod(WireStruct, frozen=True):
    metadata: PodMeta | None = None
    spec: PodSpec | None = None


def refusals(raw: Mapping[str, Any], allowed: Collection[str], volumes: Mapping[ClaimName, str]) -> list[str]:
    """Why the policies deny the pod, with their texts and in their order. `allowed` are the directories that pods may
    mount; `volumes` are the paths of bound PersistentVolumes that tenants may not create. Raises
    msgspec.ValidationError."""
    pod = msgspec.convert(raw, IsolatedPod)
    meta, spec = pod.metadata or PodMeta(), pod.spec or PodSpec()
    return [
        *(["spec.hostPID"] if spec.host_pid else []),
        *context_refusals(spec),
        *host_path_refusals(spec, allowed),
        *annotation_refusals(meta),
        *claim_refusals(meta, spec, volumes),
    ]


def context_refusals(spec: PodSpec) -> Iterator[str]:
    for path, one in spec.named():
        if one.security_context is not None and one.security_context.privileged:
            yield f"{path}.securityContext.privileged"
    for path, one in spec.named():
        first = next(one.strong(), None)
        if first is not None:
            yield f"{path}.securityContext.capabilities.add: {first}"


def host_path_refusals(spec: PodSpec, allowed: Collection[str]) -> Iterator[str]:
    paths = {one.name: one.host_path for one in spec.volumes or () if one.host_path is not None}
    outside = {name for name, path in paths.items() if path.is_outside(allowed)}
    for name in paths:
        if name in outside:
            yield f"spec.volumes[{name}].hostPath: not in a directory that an administrator allows"
    for path, one in spec.named():
        mounts = [mount for mount in one.volume_mounts or () if mount.name in paths]
        if any(mount.name in outside or not mount.read_only for mount in mounts):
            yield f"{path}.volumeMounts: a hostPath that is not readOnly, or that no administrator allows"


def annotation_refusals(meta: PodMeta) -> Iterator[str]:
    for key in sorted(meta.annotations or ()):
        if any(f"{key}/".startswith(f"{name}/") for name in INJECTING):
            yield f"metadata.annotations[{key}]: a runtime may inject devices or paths of the node by it"


def claim_refusals(meta: PodMeta, spec: PodSpec, volumes: Mapping[ClaimName, str]) -> Iterator[str]:
    for one in spec.volumes or ():
        claim = claim_of_volume(meta, one)
        path = volumes.get((meta.namespace or "", claim))
        if path is not None:
            yield f"spec.volumes[{one.name}]: the PersistentVolume of claim {claim} leads to {path}"


def claim_of_volume(meta: PodMeta, volume: PodVolume) -> str:
    """Kubernetes names the claim of an ephemeral volume after pod and volume."""
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim.claim_name
    return f"{meta.name}-{volume.name}" if volume.ephemeral is not None else ""


def is_protected_path(path: str) -> bool:
    """Whether a PersistentVolume with this path exposes devices, sockets or programs of the node."""
    clean = "".join(f"/{one}" for one in path.split("/") if one not in ("", "."))
    is_storage = any(f"{clean}/".startswith(f"{one}/") for one in STORAGE)
    return not is_storage and any(overlap(clean, place) for place in PROTECTED_PATHS)


def without_prefix(capability: str) -> str:
    """In upper case without `CAP_`, as the policy does: it leaves letters beyond ASCII as they are."""
    return capability.encode().upper().decode().replace("CAP_", "", 1)


# PersistentVolumes.


class VolumeSpec(WireStruct, frozen=True):
    host_path: NodePath | None = None
    local: NodePath | None = None
    claim_ref: PodMeta | None = None


class VolumeStatus(WireStruct, frozen=True):
    phase: str | None = None


class PersistentVolume(WireStruct, frozen=True):
    spec: VolumeSpec | None = None
    status: VolumeStatus | None = None


def refused_volume(raw: Mapping[str, Any]) -> tuple[ClaimName, str] | None:
    """The claim bound to the volume, and its path, if the policy does not allow the volume to tenants."""
    try:
        volume = msgspec.convert(raw, PersistentVolume)
    except msgspec.ValidationError:
        return None
    spec, status = volume.spec or VolumeSpec(), volume.status or VolumeStatus()
    paths = [one.path for one in (spec.host_path, spec.local) if one is not None and is_protected_path(one.path)]
    if not paths or spec.claim_ref is None or status.phase != "Bound":
        return None
    return (spec.claim_ref.namespace or "", spec.claim_ref.name or ""), paths[0]


def is_isolated(raw: Mapping[str, Any], own_namespace: str) -> bool:
    """Whether the policy applies to the pods of a namespace that has opted in."""
    meta = raw["metadata"]
    exempt = (meta.get("labels") or {}).get(keys.ISOLATION_LABEL) == EXEMPT
    return not exempt and meta["name"] not in (SYSTEM_NAMESPACE, own_namespace)
