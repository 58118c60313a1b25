"""A fake NVML library for ctypes: C functions under the names that the real library exports.

Calls go through the real nvidia-ml-py, with its structures and its ways of passing them.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import CFUNCTYPE, Structure, c_char, c_int, c_uint, c_ulonglong, c_void_p, memmove
from typing import Any, Final

from attrs import frozen

SUCCESS, NOT_SUPPORTED, DRIVER_NOT_LOADED, GPU_IS_LOST = 0, 3, 9, 15
MIB: Final = 1024 * 1024

# Accepts any pointer. An argument passed by value is an error here; in the real library it would crash the process.
At = c_void_p


class Memory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Pci(Structure):
    _fields_ = (("legacy", c_char * 16), *((name, c_uint) for name in "abcde"), ("bus", c_char * 32))


class Platform(Structure):
    _fields_ = (("version", c_uint), ("guid", c_char * 16), ("chassis", c_char * 16), ("rest", c_char * 5))


@frozen
class Chip:
    """The values that a GPU reports; None means not supported."""

    uuid: bytes
    serial: bytes | None
    minor: int
    chassis: bytes | None = None
    name: bytes = b"NVIDIA GB200"
    mig: int | None = None
    is_lost: bool = False


class Driver:
    """The library of a machine with these GPUs. `lacks`: functions that an older driver does not export."""

    def __init__(self, chips: Sequence[Chip], *, lacks: Sequence[str] = (), works: bool = True) -> None:
        self._chips = chips
        self._works = works
        self.opened = 0
        self._exported = {name: one for name, one in self._functions().items() if name not in lacks}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._exported[name]
        except KeyError as exc:
            raise AttributeError(name) from exc

    def _chip(self, handle: int | None) -> Chip:
        return self._chips[(handle or 0) - 1]

    def _init(self, _flags: int) -> int:
        self.opened += self._works
        return SUCCESS if self._works else DRIVER_NOT_LOADED

    def _shutdown(self) -> int:
        self.opened -= 1
        return SUCCESS

    def _functions(self) -> Mapping[str, Any]:
        def text(said: Callable[[Chip], bytes | None]) -> Any:
            def answer(handle: int, into: int, size: int) -> int:
                found = said(self._chip(handle))
                return NOT_SUPPORTED if found is None else written(found, into, size)

            return CFUNCTYPE(c_int, c_void_p, At, c_uint)(answer)

        def number(said: Callable[[Chip], int | None]) -> Callable[..., int]:
            def answer(handle: int, into: int, *_: object) -> int:
                found = said(self._chip(handle))
                c_uint.from_address(into).value = found or 0
                return NOT_SUPPORTED if found is None else SUCCESS

            return answer

        def handle_of(index: int, into: int) -> int:
            c_void_p.from_address(into).value = index + 1
            return GPU_IS_LOST if self._chips[index].is_lost else SUCCESS

        def memory(_: int, into: int) -> int:
            Memory.from_address(into).total = 189_471 * MIB
            return SUCCESS

        def pci(handle: int, into: int) -> int:
            Pci.from_address(into).bus = b"00000000:%02X:00.0" % handle
            return SUCCESS

        def platform(handle: int, into: int) -> int:
            found, form = self._chip(handle).chassis, Platform.from_address(into)
            if found is None or form.version >> 24 != 2:
                return NOT_SUPPORTED
            form.chassis = found
            return SUCCESS

        def count(into: int) -> int:
            c_uint.from_address(into).value = len(self._chips)
            return SUCCESS

        def version(into: int, size: int) -> int:
            return written(b"580.10.01", into, size)

        return {
            "nvmlInitWithFlags": CFUNCTYPE(c_int, c_uint)(self._init),
            "nvmlShutdown": CFUNCTYPE(c_int)(self._shutdown),
            "nvmlSystemGetDriverVersion": CFUNCTYPE(c_int, At, c_uint)(version),
            "nvmlDeviceGetCount_v2": CFUNCTYPE(c_int, At)(count),
            "nvmlDeviceGetHandleByIndex_v2": CFUNCTYPE(c_int, c_uint, At)(handle_of),
            "nvmlDeviceGetUUID": text(lambda one: one.uuid),
            "nvmlDeviceGetSerial": text(lambda one: one.serial),
            "nvmlDeviceGetName": text(lambda one: one.name),
            "nvmlDeviceGetMinorNumber": CFUNCTYPE(c_int, c_void_p, At)(number(lambda one: one.minor)),
            "nvmlDeviceGetMigMode": CFUNCTYPE(c_int, c_void_p, At, At)(number(lambda one: one.mig)),
            "nvmlDeviceGetMemoryInfo": CFUNCTYPE(c_int, c_void_p, At)(memory),
            "nvmlDeviceGetPciInfo_v3": CFUNCTYPE(c_int, c_void_p, At)(pci),
            "nvmlDeviceGetPlatformInfo": CFUNCTYPE(c_int, c_void_p, At)(platform),
        }


def written(text: bytes, into: int, size: int) -> int:
    memmove(into, (text + b"\0")[:size], min(len(text) + 1, size))
    return SUCCESS
