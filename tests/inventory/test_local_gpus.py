"""The GPUs of this machine: a stand-in for nvidia-smi in the path, and one for NVML's library."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.export.smi import document, gb200_tray
from tests.running import refusing
from webhook.inventory.local_gpus import by_nvml, by_program
from webhook.inventory.nvidia_smi import Gpu, UnreadableSmiError


class NvmlError(Exception):
    pass


class Nvml:
    """Two GPUs as nvidia-ml-py tells of them: one is well, the other is lost."""

    NVMLError = NvmlError

    def __init__(self, *, works: bool = True) -> None:
        self.works = works

    def nvmlInit(self) -> None:
        if not self.works:
            raise NvmlError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.10.01"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise NvmlError("GPU is lost")
        return 7

    def nvmlDeviceGetUUID(self, _: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetSerial(self, _: int) -> str:
        return "1320000000010"

    def nvmlDeviceGetMinorNumber(self, _: int) -> int:
        return 3

    def nvmlDeviceGetName(self, _: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, _: int) -> Any:
        return SimpleNamespace(total=81559 * 1024 * 1024)

    def nvmlDeviceGetPciInfo(self, _: int) -> Any:
        return SimpleNamespace(busId=b"00000000:17:00.0\0\0")

    def nvmlDeviceGetMigMode(self, _: int) -> Any:
        raise NvmlError("Not Supported")

    def c_nvmlPlatformInfo_v2_t(self) -> Any:
        return SimpleNamespace(chassisSerialNumber=b"")

    def nvmlDeviceGetPlatformInfo(self, _: int, form: Any) -> int:
        form.chassisSerialNumber = b"1820000000042"
        return 0


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def does(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_by_nvml() -> None:
    found = by_nvml(Nvml())
    assert found.driver == "580.10.01"
    assert found.gpus == (
        Gpu(
            index=0,
            pci="00000000:17:00.0",
            uuid="GPU-1",
            serial="1320000000010",
            minor=3,
            model="NVIDIA H100 80GB HBM3",
            memory="81559Mi",
            chassis="1820000000042",
            said_serial="1320000000010",
            said_chassis="1820000000042",
        ),
        Gpu(1),
    )


def test_nvml_without_a_driver() -> None:
    with pytest.raises(UnreadableSmiError, match="NVML cannot be used: Driver Not Loaded"):
        by_nvml(Nvml(works=False))


def test_by_the_program(stand_in: Path) -> None:
    stand_in.with_name("content.xml").write_bytes(document(gb200_tray()))
    does(stand_in, f'[ "$*" = "-q -x" ] && cat {stand_in.with_name("content.xml")}')
    assert [one.uuid for one in by_program().gpus] == [one.uuid for one in gb200_tray()]


def test_a_program_that_fails_and_none(stand_in: Path) -> None:
    does(stand_in, "echo NVIDIA-SMI has failed; exit 9")
    with pytest.raises(UnreadableSmiError, match="nvidia-smi ended with 9: NVIDIA-SMI has failed"):
        by_program()
    stand_in.unlink()
    with pytest.raises(UnreadableSmiError, match="there is no nvidia-smi here"):
        by_program()


def test_attest_prints_the_gpus_of_its_node(stand_in: Path, tmp_path: Path) -> None:
    stand_in.with_name("content.xml").write_bytes(document(gb200_tray()))
    does(stand_in, f"cat {stand_in.with_name('content.xml')}")
    done = refusing(tmp_path, "attest", "--gpus")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)
    assert '"serial":"176000000002"' in done.stdout
    stand_in.unlink()
    done = refusing(tmp_path, "attest", "--gpus")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no nvidia-smi here" in done.stderr
