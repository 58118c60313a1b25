"""The GPUs of this machine, read with NVML if its library is installed, else with nvidia-smi."""

import importlib
import shutil
import subprocess
from collections.abc import Callable
from ctypes import byref
from typing import Any, Final

from webhook.inventory.nvidia_smi import MAX_SIZE, Gpu, SmiReport, UnreadableSmiError, available, parse

# nvidia-smi takes several seconds on a host that has just started.
TIMEOUT: Final = 20.0
MIB: Final = 1024 * 1024


def local_gpus() -> SmiReport:
    """Raises UnreadableSmiError, which says why neither worked. It blocks: await it in a thread."""
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


def by_program(name: str = "nvidia-smi") -> SmiReport:
    program = shutil.which(name)
    if program is None:
        raise UnreadableSmiError(f"there is no {name} here")
    try:
        done = subprocess.run(  # noqa: S603 - nvidia-smi from PATH
            [program, "-q", "-x"], capture_output=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UnreadableSmiError(f"{name} could not be run: {exc}") from exc
    if done.returncode:
        output = (done.stderr or done.stdout)[:500].decode(errors="replace").strip()
        raise UnreadableSmiError(f"{name} ended with {done.returncode}: {output}")
    return parse(done.stdout[: MAX_SIZE + 1])


def by_nvml(nvml: Any) -> SmiReport:
    """`nvml` is the module of nvidia-ml-py."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as exc:
        raise UnreadableSmiError(f"NVML cannot be initialized: {exc}") from exc
    try:
        count = nvml.nvmlDeviceGetCount()
        driver = available(text_of(query(nvml, nvml.nvmlSystemGetDriverVersion)))
        return SmiReport(tuple(device(nvml, index) for index in range(count)), driver)
    except nvml.NVMLError as exc:
        raise UnreadableSmiError(f"NVML does not answer: {exc}") from exc
    finally:
        query(nvml, nvml.nvmlShutdown)


def device(nvml: Any, index: int) -> Gpu:
    """Values that the GPU does not report are None; for a lost GPU, all of them."""
    handle = query(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu(index)
    memory = query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = query(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    mig = query(nvml, nvml.nvmlDeviceGetMigMode, handle)
    serial = text_of(query(nvml, nvml.nvmlDeviceGetSerial, handle))
    chassis = chassis_of(nvml, handle)
    return Gpu(
        index=index,
        pci=available(text_of(getattr(pci, "busId", None))),
        uuid=available(text_of(query(nvml, nvml.nvmlDeviceGetUUID, handle))),
        serial=available(serial),
        minor=query(nvml, nvml.nvmlDeviceGetMinorNumber, handle),
        model=available(text_of(query(nvml, nvml.nvmlDeviceGetName, handle))),
        memory=f"{memory.total // MIB}Mi" if memory is not None else None,
        is_mig=bool(mig and mig[0]),
        chassis=available(chassis),
        raw_serial=serial or "",
        raw_chassis=chassis or "",
    )


def chassis_of(nvml: Any, handle: Any) -> str | None:
    """None with older versions of the library, which cannot query it."""
    form = getattr(nvml, "c_nvmlPlatformInfo_v2_t", None)
    if form is None:
        return None
    platform = form()
    # The library passes its argument on as it is, and a structure by value would be read as an address.
    query(nvml, nvml.nvmlDeviceGetPlatformInfo, handle, byref(platform))
    return text_of(platform.chassisSerialNumber)


def query(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """None if this GPU, driver or library does not answer, or does not answer with text."""
    try:
        return question(*about)
    except (nvml.NVMLError, UnicodeDecodeError):
        return None


def text_of(value: Any) -> str | None:
    """Older versions of the library return bytes, and structures contain arrays of numbers."""
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
