"""The GPUs of this machine: with a fake nvidia-smi, and with a fake driver library under nvidia-ml-py."""

from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]  # theirs to annotate
import pytest

from tests.export.smi import document, gb200_tray
from tests.inventory.nvml import Chip, Driver
from tests.running import refusing
from webhook.inventory.local_gpus import by_nvml, by_program, local_gpus
from webhook.inventory.nvidia_smi import Gpu, UnreadableSmiError


@pytest.fixture
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def make_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """nvidia-ml-py with the test's driver library."""

    def loaded(driver: Driver) -> Any:
        monkeypatch.setattr(pynvml, "nvmlLib", driver)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return pynvml

    return loaded


TRAY = (
    Chip(b"GPU-1", b"1760000000012", 0, b"1820000000042"),
    Chip(b"GPU-2", b"1760000000012", 1, b"1820000000042"),
    Chip(b"GPU-3", None, 2, b"N/A", mig=1),
    Chip(b"GPU-4", b"1760000000011", 3, is_lost=True),
)


def test_gpus_are_read_with_nvml(library: Any) -> None:
    """Through the real nvidia-ml-py, which decides what it passes by reference and what by value."""
    driver = Driver(TRAY)
    found = by_nvml(library(driver))
    assert found.driver == "580.10.01"
    first, second, third, lost = found.gpus
    assert first == Gpu(
        index=0,
        pci="00000000:01:00.0",
        uuid="GPU-1",
        serial="1760000000012",
        minor=0,
        model="NVIDIA GB200",
        memory="189471Mi",
        chassis="1820000000042",
        raw_serial="1760000000012",
        raw_chassis="1820000000042",
    )
    assert (second.uuid, second.serial, second.minor) == ("GPU-2", "1760000000012", 1)
    assert (third.serial, third.chassis, third.raw_chassis, third.is_mig) == (None, None, "N/A", True)
    assert lost == Gpu(3)
    assert driver.opened == 0


def test_older_driver_reports_no_chassis(library: Any) -> None:
    found = by_nvml(library(Driver(TRAY, lacks=["nvmlDeviceGetPlatformInfo", "nvmlDeviceGetMigMode"])))
    assert [(one.serial, one.chassis, one.is_mig) for one in found.gpus[:2]] == [("1760000000012", None, False)] * 2


def test_undecodable_model_is_unknown_and_the_rest_is_read(library: Any) -> None:
    found = by_nvml(library(Driver([Chip(b"GPU-1", b"\xff\xfe", 0, name=b"\xff")])))
    assert [(one.uuid, one.serial, one.model) for one in found.gpus] == [("GPU-1", None, None)]


def test_unloaded_driver_is_reported(library: Any) -> None:
    with pytest.raises(UnreadableSmiError, match="NVML cannot be initialized: Driver Not Loaded"):
        by_nvml(library(Driver(TRAY, works=False)))


def test_nvml_is_tried_first_and_nvidia_smi_on_failure(library: Any, fake_nvidia_smi: Path) -> None:
    fake_nvidia_smi.with_name("content.xml").write_bytes(document(gb200_tray()))
    make_script(fake_nvidia_smi, f"cat {fake_nvidia_smi.with_name('content.xml')}")
    library(Driver(TRAY[:1]))
    assert [one.uuid for one in local_gpus().gpus] == ["GPU-1"]
    library(Driver(TRAY, works=False))
    assert [one.uuid for one in local_gpus().gpus] == [one.uuid for one in gb200_tray()]
    fake_nvidia_smi.unlink()
    with pytest.raises(UnreadableSmiError, match=r"NVML cannot be initialized: .*; there is no nvidia-smi here"):
        local_gpus()


def test_gpus_are_read_with_nvidia_smi(fake_nvidia_smi: Path) -> None:
    fake_nvidia_smi.with_name("content.xml").write_bytes(document(gb200_tray()))
    make_script(fake_nvidia_smi, f'[ "$*" = "-q -x" ] && cat {fake_nvidia_smi.with_name("content.xml")}')
    assert [one.uuid for one in by_program().gpus] == [one.uuid for one in gb200_tray()]


def test_failing_or_missing_nvidia_smi_is_reported(fake_nvidia_smi: Path) -> None:
    make_script(fake_nvidia_smi, "echo NVIDIA-SMI has failed; exit 9")
    with pytest.raises(UnreadableSmiError, match="nvidia-smi ended with 9: NVIDIA-SMI has failed"):
        by_program()
    fake_nvidia_smi.unlink()
    with pytest.raises(UnreadableSmiError, match="there is no nvidia-smi here"):
        by_program()


def test_attest_prints_the_gpus_of_its_node(fake_nvidia_smi: Path, tmp_path: Path) -> None:
    fake_nvidia_smi.with_name("content.xml").write_bytes(document(gb200_tray()))
    make_script(fake_nvidia_smi, f"cat {fake_nvidia_smi.with_name('content.xml')}")
    done = refusing(tmp_path, "attest", "--gpus")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)
    assert '"serial":"176000000002"' in done.stdout
    fake_nvidia_smi.unlink()
    done = refusing(tmp_path, "attest", "--gpus")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no nvidia-smi here" in done.stderr
