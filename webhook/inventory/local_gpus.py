"""The GPUs of the machine this runs on: by NVML where its library is there, else by nvidia-smi."""

import importlib
import shutil
import subprocess
from collections.abc import Callable
from ctypes import byref
from typing import Any, Final

from webhook.inventory.nvidia_smi import MAX_SIZE, Gpu, Smi, UnreadableSmiError, known, parse

# nvidia-smi of a host that has just started takes several seconds.
PATIENCE: Final = 20.0
MIB: Final = 1024 * 1024


def local_gpus() -> Smi:
    """Raises UnreadableSmiError, which says why neither could be asked. It blocks: await it in a thread."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return by_program()
    try:
        return by_nvml(nvml)
    except UnreadableSmiError as exc:
        try:
            return by_program()
        except UnreadableSmiError as other:
            raise UnreadableSmiError(f"{exc}; {other}") from other


def by_program(name: str = "nvidia-smi") -> Smi:
    program = shutil.which(name)
    if program is None:
        raise UnreadableSmiError(f"there is no {name} here")
    try:
        done = subprocess.run(  # noqa: S603 - what the path says is nvidia-smi
            [program, "-q", "-x"], capture_output=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UnreadableSmiError(f"{name} could not be run: {exc}") from exc
    if done.returncode:
        said = (done.stderr or done.stdout)[:500].decode(errors="replace").strip()
        raise UnreadableSmiError(f"{name} ended with {done.returncode}: {said}")
    return parse(done.stdout[: MAX_SIZE + 1])


def by_nvml(nvml: Any) -> Smi:
    """`nvml` is the module of nvidia-ml-py."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        raise UnreadableSmiError(f"NVML cannot be used: {exc}") from exc
    try:
        count = nvml.nvmlDeviceGetCount()
        driver = known(text_of(asked(nvml, nvml.nvmlSystemGetDriverVersion)))
        return Smi(tuple(device(nvml, index) for index in range(count)), driver)
    except nvml.NVMLError as exc:
        raise UnreadableSmiError(f"NVML does not answer: {exc}") from exc
    finally:
        asked(nvml, nvml.nvmlShutdown)


def device(nvml: Any, index: int) -> Gpu:
    """What it does not know of itself is None; of one that is lost, all of it."""
    handle = asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu(index)
    memory = asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = asked(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    mig = asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
    serial = text_of(asked(nvml, nvml.nvmlDeviceGetSerial, handle))
    chassis = chassis_of(nvml, handle)
    return Gpu(
        index=index,
        pci=known(text_of(getattr(pci, "busId", None))),
        uuid=known(text_of(asked(nvml, nvml.nvmlDeviceGetUUID, handle))),
        serial=known(serial),
        minor=asked(nvml, nvml.nvmlDeviceGetMinorNumber, handle),
        model=known(text_of(asked(nvml, nvml.nvmlDeviceGetName, handle))),
        memory=f"{memory.total // MIB}Mi" if memory is not None else None,
        is_mig=bool(mig and mig[0]),
        chassis=known(chassis),
        said_serial=serial or "",
        said_chassis=chassis or "",
    )


def chassis_of(nvml: Any, handle: Any) -> str | None:
    """Only newer versions of the library have words for it."""
    form = getattr(nvml, "c_nvmlPlatformInfo_v2_t", None)
    if form is None:
        return None
    platform = form()
    # The library hands on what it is given, and a structure by value is read as an address.
    asked(nvml, nvml.nvmlDeviceGetPlatformInfo, handle, byref(platform))
    return text_of(platform.chassisSerialNumber)


def asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """None where this GPU, this driver or this library has no answer, or not one that is text."""
    try:
        return question(*about)
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def text_of(value: Any) -> str | None:
    """Older versions of the library answer in bytes, structures in arrays of numbers."""
    if value is None:
        return None
    if not isinstance(value, str | bytes):
        try:
            value = bytes(value)
        except TypeError:
            return None
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    text = text.rstrip("\0").strip()
    return text if text.isprintable() else None
