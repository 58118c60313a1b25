"""Images for a node without registry: busybox, also with variables that NVIDIA's container runtime reads."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

REGISTRY: Final = "images.test"
PAUSE: Final = f"{REGISTRY}/pause:1"
BUSYBOX: Final = f"{REGISTRY}/busybox:1"
CUDA_VERSION: Final = f"{REGISTRY}/cuda-version:1"
ALL_DEVICES: Final = f"{REGISTRY}/all-devices:1"
CUDA: Final = f"{REGISTRY}/cuda:1"
"""The environment variables of the nvidia/cuda images."""

# The variables of each image; the content is always busybox.
VARIABLES: Final[Mapping[str, Mapping[str, str]]] = {
    BUSYBOX: {},
    CUDA_VERSION: {"CUDA_VERSION": "12.4"},
    ALL_DEVICES: {"NVIDIA_VISIBLE_DEVICES": "all"},
    CUDA: {
        "CUDA_VERSION": "12.4",
        "NVIDIA_REQUIRE_CUDA": "cuda>=12.4",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    },
}
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS: Final = ("bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr", "var")


class Archive:
    """An OCI image layout in one tar file for `ctr images import`. Equal layers are stored once."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        self._manifests: list[dict[str, Any]] = []

    def add(self, name: str, command: Sequence[str], variables: Mapping[str, str], layer: bytes) -> None:
        packed = gzip.compress(layer, mtime=0)
        env = ["PATH=/bin:/usr/bin", *(f"{key}={value}" for key, value in variables.items())]
        config = {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Cmd": list(command), "Env": env},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": media("manifest.v1+json"),
            "config": self._put(media("config.v1+json"), encoded(config)),
            "layers": [self._put(media("layer.v1.tar+gzip"), packed)],
        }
        named = {"io.containerd.image.name": name}
        self._manifests.append({**self._put(media("manifest.v1+json"), encoded(manifest)), "annotations": named})

    def write(self, path: Path) -> None:
        index = {"schemaVersion": 2, "manifests": self._manifests}
        files = {"oci-layout": encoded({"imageLayoutVersion": "1.0.0"}), "index.json": encoded(index)}
        with tarfile.open(path, "w") as tar:
            for name, content in (files | self._blobs).items():
                put_file(tar, name, content, 0o644)

    def _put(self, kind: str, content: bytes) -> dict[str, Any]:
        digest = digest_of(content)
        self._blobs[f"blobs/{digest.replace(':', '/')}"] = content
        return {"mediaType": kind, "digest": digest, "size": len(content)}


def write_images(path: Path, *, pause: Path, busybox: Path, applets: Iterable[str]) -> None:
    archive = Archive()
    archive.add(PAUSE, ["/bin/pause"], {}, layer_of({"pause": pause}))
    shell = layer_of({"busybox": busybox}, {name: "busybox" for name in applets})
    for name, variables in VARIABLES.items():
        archive.add(name, ["/bin/sh"], variables, shell)
    archive.write(path)


def layer_of(programs: Mapping[str, Path], links: Mapping[str, str] | None = None) -> bytes:
    """A reproducible tar with programs and symbolic links in /bin."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder in FOLDERS:
            one = tarfile.TarInfo(folder)
            one.type, one.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            tar.addfile(one)
        for name, file in programs.items():
            put_file(tar, f"bin/{name}", file.read_bytes(), 0o755)
        for name, target in (links or {}).items():
            one = tarfile.TarInfo(f"bin/{name}")
            one.type, one.linkname = tarfile.SYMTYPE, target
            tar.addfile(one)
    return content.getvalue()


def put_file(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    one = tarfile.TarInfo(name)
    one.size, one.mode = len(content), mode
    tar.addfile(one, io.BytesIO(content))


def media(kind: str) -> str:
    return f"application/vnd.oci.image.{kind}"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encoded(content: object) -> bytes:
    return json.dumps(content).encode()
