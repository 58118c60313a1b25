"""Labels of a node as in gpuid, with its mistakes corrected."""

import pytest

from webhook.export.labels import WantedLabels, label_patch, wanted_labels
from webhook.inventory.nvidia_smi import Gpu, available

LONG = "9" * 80


def gpus(*pairs: tuple[str, str]) -> list[Gpu]:
    """GPUs from pairs of chassis and serial texts."""
    return [
        Gpu(k, serial=available(serial), chassis=available(chassis), raw_serial=serial, raw_chassis=chassis)
        for k, (chassis, serial) in enumerate(pairs)
    ]


def short(wanted: WantedLabels) -> dict[str, str]:
    return {key.removeprefix("gpuid.github.com/"): text for key, text in wanted.labels.items()}


@pytest.mark.parametrize(
    ("pairs", "labels"),
    [
        pytest.param([], {}, id="no-gpu"),
        pytest.param([("N/A", "2"), ("N/A", "1")], {"gpu-0": "1", "gpu-1": "2"}, id="no-chassis"),
        pytest.param(
            [("C", "2"), ("C", "2"), ("C", "1"), ("C", "1")],
            {"chassis": "C", "chassis-count": "1", "gpu-0": "1", "gpu-1": "2"},
            id="dies-that-share-serials",
        ),
        pytest.param(
            [("A", "x1"), ("A", "x2"), ("B", "x3")],
            {
                "chassis-0": "A",
                "chassis-0-gpu-0": "x1",
                "chassis-0-gpu-1": "x2",
                "chassis-1": "B",
                "chassis-1-gpu-0": "x3",
                "chassis-count": "2",
            },
            id="two-chassis",
        ),
        pytest.param(
            [("A", "x1"), ("N/A", "x2")],
            {"chassis-0": "A", "chassis-0-gpu-0": "x1", "gpu-0": "x2", "chassis-count": "1"},
            id="one-chassis-and-none",
        ),
        pytest.param([("N/A", ""), ("N/A", "1")], {"gpu-1": "1"}, id="an-empty-serial-keeps-its-number"),
        pytest.param([("N/A", "N/A"), ("N/A", "1")], {"gpu-0": "1", "gpu-1": "na"}, id="a-serial-not-applicable"),
        pytest.param([("N/A", "-a b/c_")], {"gpu-0": "a-b-c"}, id="cleaned"),
        pytest.param([("N/A", "äö")], {"gpu-0": "na"}, id="nothing-left"),
    ],
)
def test_labels(pairs: list[tuple[str, str]], labels: dict[str, str]) -> None:
    assert short(wanted_labels(gpus(*pairs))) == labels


@pytest.mark.defect("gpuid-3")
def test_gpus_with_empty_and_missing_chassis_have_different_keys() -> None:
    found = short(wanted_labels(gpus(("", "x1"), ("N/A", "x2"), ("", "x3"))))
    assert found == {"gpu-0": "x1", "gpu-1": "x2", "gpu-2": "x3"}


@pytest.mark.defect("gpuid-2")
def test_a_chassis_that_is_not_applicable_is_no_label() -> None:
    assert not [key for key in wanted_labels(gpus(("N/A", "1"))).labels if "chassis" in key]


@pytest.mark.defect("gpuid-5")
def test_long_serial_is_cut_and_noted_and_others_are_unchanged() -> None:
    found = wanted_labels(gpus(("N/A", LONG), ("N/A", "1"), ("N/A", "2" * 62 + "--" + "2" * 9)))
    assert short(found) == {"gpu-0": "1", "gpu-1": "2" * 62, "gpu-2": "9" * 63}
    assert found.notes == ("gpu-1: 73 characters, cut to 63", "gpu-2: 80 characters, cut to 63")


@pytest.mark.defect("gpuid-6")
def test_patch_removes_only_labels_of_our_domain() -> None:
    present = {
        "gpuid.github.com/gpu-0": "1",
        "gpuid.github.com/gpu-1": "old",
        "gpuid.github.com/gpu-7": "gone",
        "gpuid.github.com.example/gpu-7": "another's",
        "gpuid.github.community": "another's",
    }
    wanted = {"gpuid.github.com/gpu-0": "1", "gpuid.github.com/gpu-1": "new"}
    assert label_patch(wanted, present) == {"gpuid.github.com/gpu-1": "new", "gpuid.github.com/gpu-7": None}


def test_patch_is_empty_if_labels_are_up_to_date() -> None:
    assert label_patch({"gpuid.github.com/gpu-0": "1"}, {"gpuid.github.com/gpu-0": "1", "a": "b"}) == {}
