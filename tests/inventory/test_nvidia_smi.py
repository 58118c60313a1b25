"""What nvidia-smi says, and what only looks like it."""

import time

import pytest

from tests.export.smi import Card, dead, document, gb200_tray, h100_host, uuid_of, with_mig
from webhook.inventory import nvidia_smi
from webhook.inventory.nvidia_smi import Gpu, Smi, UnreadableSmiError, parse

ENTITIES = b"".join(b'<!ENTITY a%d "%s">' % (k, b"&a%d;" % (k - 1) * 10) for k in range(1, 10))


def test_a_gpu_with_all_its_neighbours() -> None:
    found = parse(document(h100_host()))
    assert found.driver == "580.10.01"
    assert len(found.gpus) == 8
    assert found.gpus[3] == Gpu(
        index=3,
        pci="00000000:13:00.0",
        uuid=uuid_of("h100", 3),
        serial="1320000000005",
        minor=3,
        model="NVIDIA H100 80GB HBM3",
        memory="81559Mi",
        module="4",
        said_serial="1320000000005",
        said_chassis="N/A",
    )


@pytest.mark.defect("S2-18")
def test_two_dies_that_share_a_serial_stay_two_devices() -> None:
    found = parse(document(gb200_tray())).gpus
    assert [(one.index, one.serial, one.minor) for one in found] == [
        (0, "176000000002", 0),
        (1, "176000000002", 1),
        (2, "176000000001", 2),
        (3, "176000000001", 3),
    ]
    assert len({one.uuid for one in found}) == 4
    assert {one.chassis for one in found} == {"1820000000042"}


def test_a_gpu_in_mig_mode_is_itself_and_not_its_instances() -> None:
    found = parse(document(with_mig(h100_host()))).gpus
    assert [one.serial for one in found] == [one.serial for one in h100_host()]
    assert all(one.is_mig and one.memory == "81559Mi" for one in found)


def test_of_a_dead_gpu_nothing_is_known_but_where_it_was() -> None:
    (found,) = parse(document([dead(h100_host()[0])])).gpus
    assert found == Gpu(index=0, pci="00000000:10:00.0", module="1", said_serial="N/A", said_chassis="N/A")


@pytest.mark.defect("S2-1")
def test_a_gpu_without_a_platform_is_one_without_a_chassis() -> None:
    (found,) = parse(document([Card(0, serial="1", chassis=None)])).gpus
    assert (found.serial, found.chassis) == ("1", None)


def test_a_host_without_gpus() -> None:
    assert parse(document([])) == Smi((), "580.10.01")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "there is nothing", id="nothing"),
        pytest.param(b"NVIDIA-SMI has failed\n", "it is no XML: 'NVIDIA-SMI has failed'", id="a-complaint"),
        pytest.param(document(h100_host())[:9000], "it ends in the middle", id="truncated"),
        pytest.param(document(h100_host())[:-20], "it ends in the middle", id="truncated-at-the-end"),
        pytest.param(b"<html/>", "its root is 'html', not nvidia_smi_log", id="another-root"),
        pytest.param(b"<nvidia_smi_log/><gpu/>", "it is no XML: junk after document element", id="two-roots"),
        pytest.param(b"<nvidia_smi_log>" + b"<a/>" * 600_000, "it has more than 500000 tags", id="many-tags"),
        pytest.param(
            b"<!DOCTYPE nvidia_smi_log [" + ENTITIES + b"]><nvidia_smi_log>&a9;</nvidia_smi_log>",
            "it has an entity, 'a1'",
            id="an-entity-bomb",
        ),
        pytest.param(
            b'<!DOCTYPE nvidia_smi_log [<!ENTITY f SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&f;</nvidia_smi_log>',
            "it has an entity, 'f'",
            id="a-file-of-ours",
        ),
        pytest.param(
            b'<!DOCTYPE a SYSTEM "x.dtd"><nvidia_smi_log><gpu><serial>1&x;2</serial></gpu></nvidia_smi_log>',
            "it is no XML: undefined entity",
            id="an-entity-of-the-dtd",
        ),
        pytest.param(b'<?xml version="1.0" encoding="klingon"?><a/>', "it is in an encoding", id="an-encoding"),
        pytest.param(
            b"<nvidia_smi_log>" + b"<gpu/>" * 2000 + b"</nvidia_smi_log>",
            "it describes more than 1024 GPUs",
            id="too-many",
        ),
        pytest.param(b"\x00\xff\xfe", "it is no XML", id="bytes"),
    ],
)
def test_what_is_no_list_of_gpus_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSmiError) as caught:
        parse(content)
    assert str(caught.value).startswith(reason)


def test_more_than_20_mb_are_refused_unread() -> None:
    with pytest.raises(UnreadableSmiError, match="are more than"):
        parse(b" " * (nvidia_smi.MAX_SIZE + 1))


def test_a_deep_text_harms_nobody() -> None:
    deep = 200_000
    assert parse(b"<nvidia_smi_log>" + b"<a>" * deep + b"</a>" * deep + b"</nvidia_smi_log>") == Smi(())


def test_a_text_that_is_no_name_is_left_out() -> None:
    content = b"<nvidia_smi_log><gpu><serial>" + b"1" * 300 + b"</serial><uuid>a&#10;b</uuid></gpu></nvidia_smi_log>"
    (found,) = parse(content).gpus
    assert (found.serial, found.uuid) == (None, None)


def test_eight_gpus_are_read_in_a_few_milliseconds() -> None:
    """The figure is in the benchmarks; here it is that nothing grows with the square."""
    content = document(h100_host())
    assert content.count(b"\n") > 5000
    began = time.perf_counter()
    parse(content)
    assert time.perf_counter() - began < 0.5
