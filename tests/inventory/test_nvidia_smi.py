"""The output of nvidia-smi, and documents that only look like it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.export.smi import Card, dead, document, gb200_tray, h100_host, uuid_of, with_mig
from webhook.inventory import nvidia_smi
from webhook.inventory.nvidia_smi import Gpu, SmiReport, UnreadableSmiError, parse

ROOT = Path(__file__).parents[2]
ENTITIES = b"".join(b'<!ENTITY a%d "%s">' % (k, b"&a%d;" % (k - 1) * 10) for k in range(1, 10))


def test_all_fields_of_a_gpu_are_read() -> None:
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
        raw_serial="1320000000005",
        raw_chassis="N/A",
    )


@pytest.mark.defect("gpuid-18")
def test_two_dies_with_one_serial_stay_two_devices() -> None:
    found = parse(document(gb200_tray())).gpus
    assert [(one.index, one.serial, one.minor) for one in found] == [
        (0, "176000000002", 0),
        (1, "176000000002", 1),
        (2, "176000000001", 2),
        (3, "176000000001", 3),
    ]
    assert len({one.uuid for one in found}) == 4
    assert {one.chassis for one in found} == {"1820000000042"}


def test_gpu_in_mig_mode_is_one_device_without_its_instances() -> None:
    found = parse(document(with_mig(h100_host()))).gpus
    assert [one.serial for one in found] == [one.serial for one in h100_host()]
    assert all(one.is_mig and one.memory == "81559Mi" for one in found)


def test_dead_gpu_has_only_its_pci_address() -> None:
    (found,) = parse(document([dead(h100_host()[0])])).gpus
    assert found == Gpu(index=0, pci="00000000:10:00.0", module="1", raw_serial="N/A", raw_chassis="N/A")


@pytest.mark.defect("gpuid-1")
def test_gpu_without_platform_info_has_no_chassis() -> None:
    (found,) = parse(document([Card(0, serial="1", chassis=None)])).gpus
    assert (found.serial, found.chassis) == ("1", None)


def test_host_without_gpus_is_accepted() -> None:
    assert parse(document([])) == SmiReport((), "580.10.01")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "it is empty", id="empty"),
        pytest.param(b"NVIDIA-SMI has failed\n", "it is not XML: 'NVIDIA-SMI has failed'", id="an-error-message"),
        pytest.param(document(h100_host())[:9000], "it is truncated", id="truncated"),
        pytest.param(document(h100_host())[:-20], "it is truncated", id="truncated-at-the-end"),
        pytest.param(b"<html/>", "its root element is 'html', not nvidia_smi_log", id="another-root"),
        pytest.param(b"<nvidia_smi_log/><gpu/>", "it is not XML: junk after document element", id="two-roots"),
        pytest.param(b"<nvidia_smi_log>" + b"<a/>" * 600_000, "it has more than 200000 tags", id="many-tags"),
        pytest.param(
            b"<!DOCTYPE nvidia_smi_log [" + ENTITIES + b"]><nvidia_smi_log>&a9;</nvidia_smi_log>",
            "it contains its own declarations",
            id="an-entity-bomb",
        ),
        pytest.param(
            b'<!DOCTYPE nvidia_smi_log [<!ENTITY f SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&f;</nvidia_smi_log>',
            "it contains its own declarations",
            id="a-local-file",
        ),
        pytest.param(
            b'<!DOCTYPE a SYSTEM "x.dtd"><nvidia_smi_log><gpu><serial>1&x;2</serial></gpu></nvidia_smi_log>',
            "it is not XML: undefined entity",
            id="an-entity-of-the-dtd",
        ),
        pytest.param(
            b'<?xml version="1.0" encoding="klingon"?><a/>', "its encoding is not supported", id="an-encoding"
        ),
        pytest.param(
            b'<?xml version="1.0" encoding="mac_arabic"?><nvidia_smi_log><a><b/>\xbc/a\xbe</nvidia_smi_log>',
            "it is not XML: unknown encoding",
            id="an-encoding-with-two-signs-for-a-tag",
        ),
        pytest.param(
            b"<nvidia_smi_log>" + b"<gpu/>" * 2000 + b"</nvidia_smi_log>",
            "it describes more than 1024 GPUs",
            id="too-many",
        ),
        pytest.param(b"\x00\xff\xfe", "it is not XML", id="bytes"),
    ],
)
def test_invalid_document_is_rejected_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(UnreadableSmiError) as caught:
        parse(content)
    assert str(caught.value).startswith(reason)


def test_document_above_8_mib_is_rejected_unparsed() -> None:
    assert nvidia_smi.MAX_SIZE == 8 * 1024 * 1024
    with pytest.raises(UnreadableSmiError, match="are more than"):
        parse(b" " * (nvidia_smi.MAX_SIZE + 1))


@pytest.mark.parametrize("dtd", [b"", b'SYSTEM "nvsmi_device_v12.dtd" '], ids=["alone", "with-a-dtd"])
def test_attribute_defaults_are_rejected(dtd: bytes) -> None:
    """Each element without the attribute would get its own copy of the default."""
    declared = b"<!DOCTYPE r " + dtd + b'[<!ATTLIST a x CDATA "' + b"A" * 100_000 + b'">]>'
    with pytest.raises(UnreadableSmiError, match=r"^it contains its own declarations$"):
        parse(declared + b"<nvidia_smi_log>" + b"<a/>" * 100 + b"</nvidia_smi_log>")


def test_external_dtd_is_ignored() -> None:
    assert parse(b'<!DOCTYPE nvidia_smi_log SYSTEM "http://127.0.0.1:9/x.dtd"><nvidia_smi_log/>') == SmiReport(())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_too_many_attributes_are_rejected(encoding: str) -> None:
    many = " ".join(f'a{number:x}=""' for number in range(nvidia_smi.MAX_ATTRIBUTES + 1))
    with pytest.raises(UnreadableSmiError, match=r"^it has more than 50000 attributes$"):
        parse(f"<nvidia_smi_log {many}/>".encode(encoding))


MEASURING = """
import resource, sys
from webhook.inventory.nvidia_smi import UnreadableSmiError, parse
def peak_memory(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
content = sys.stdin.buffer.read()
before = peak_memory()
try:
    parse(content)
except UnreadableSmiError:
    pass
print(peak_memory() - before)
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(
            b'<!DOCTYPE r [<!ATTLIST a x CDATA "' + b"A" * 1_000_000 + b'">]><r>' + b"<a/>" * 1000 + b"</r>",
            id="defaults",
        ),
        pytest.param(b"<r " + b" ".join(b'a%x=""' % k for k in range(500_000)) + b"/>", id="attributes"),
        pytest.param(b"<r " + b" ".join(b'a%x=""' % k for k in range(49_000)) + b"/>", id="attributes-within-bounds"),
        pytest.param(b"<r>" + b"".join(b"<a%x/>x\n" % k for k in range(199_000)) + b"</r>", id="names-within-bounds"),
        pytest.param(b"<r>" + "\U0001f600".encode() * 2_000_000 + b"</r>", id="a-long-text"),
    ],
)
def test_parsing_memory_is_bounded(content: bytes) -> None:
    """In its own process, whose peak memory nothing else has raised."""
    command = [sys.executable, "-c", MEASURING]
    done = subprocess.run(command, input=content, capture_output=True, check=True, timeout=120, cwd=ROOT)
    assert int(done.stdout) < 128


def test_deeply_nested_document_is_harmless() -> None:
    deep = 99_000
    assert parse(b"<nvidia_smi_log>" + b"<a>" * deep + b"</a>" * deep + b"</nvidia_smi_log>") == SmiReport(())


def test_unprintable_text_is_ignored() -> None:
    content = b"<nvidia_smi_log><gpu><serial>" + b"1" * 300 + b"</serial><uuid>a&#10;b</uuid></gpu></nvidia_smi_log>"
    (found,) = parse(content).gpus
    assert (found.serial, found.uuid) == (None, None)


def in_a_gpu(text: str) -> bytes:
    return f"<nvidia_smi_log><gpu>{text}<uuid>GPU-1</uuid></gpu></nvidia_smi_log>".encode()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<serial>1</serial><clocks><serial>2</serial></clocks>", id="in-a-later-section"),
        pytest.param("<clocks><serial>2</serial></clocks><serial>1</serial>", id="in-an-earlier-section"),
        pytest.param("<clocks><gpu><serial>2</serial></gpu></clocks><serial>1</serial>", id="a-gpu-in-a-section"),
        pytest.param(
            "<pci><clocks><pci_bus_id>2</pci_bus_id></clocks></pci><serial>1</serial>", id="in-a-read-section"
        ),
        pytest.param(
            "<clocks><clocks><a/></clocks><serial>2</serial></clocks><serial>1</serial>",
            id="a-section-in-one-of-the-same-name",
        ),
        pytest.param("<clocks><!--</clocks>--><serial>2</serial></clocks><serial>1</serial>", id="a-comment"),
        pytest.param("<clocks><a/><![CDATA[</clocks>]]><serial>2</serial></clocks><serial>1</serial>", id="cdata"),
        pytest.param("<clocks><?a </clocks>?><serial>2</serial></clocks><serial>1</serial>", id="an-instruction"),
        pytest.param("<serial>1<clocks><a/></clocks>2</serial>", id="a-section-in-a-text"),
        pytest.param('<clocks><a b="/clocks>"/><serial>2</serial></clocks><serial>1</serial>', id="an-attribute"),
    ],
)
def test_unread_sections_do_not_affect_the_gpu(text: str) -> None:
    assert parse(in_a_gpu(text)) == SmiReport((Gpu(index=0, serial="1", raw_serial="1", uuid="GPU-1"),))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param("<clocks><a></clocks>", "it is not XML: mismatched tag at line 1", id="open"),
        pytest.param("<clocks>\n<a>1 < 2</a></clocks>", "it is not XML: not well-formed", id="a-less-than-sign"),
        pytest.param(
            "<clocks><a b='1' b='2'/></clocks>", "it is not XML: duplicate attribute", id="an-attribute-twice"
        ),
        pytest.param("<clocks><a:b/></clocks>", "it is not XML: unbound prefix", id="a-prefix"),
        pytest.param("<clocks>\n<a>&x;</a></clocks>", "it is not XML: undefined entity at line 2", id="an-entity"),
    ],
)
@pytest.mark.parametrize("dtd", ["", '<!DOCTYPE nvidia_smi_log SYSTEM "x.dtd">'], ids=["alone", "with-a-dtd"])
def test_malformed_xml_is_rejected_in_unread_sections(dtd: str, text: str, reason: str) -> None:
    with pytest.raises(UnreadableSmiError) as caught:
        parse(dtd.encode() + in_a_gpu(text))
    assert str(caught.value).startswith(reason)


def test_first_of_several_elements_with_one_name_counts() -> None:
    doubled = "<{0}> <a><b/></a></{0}><{0}>1</{0}>".format
    log = f"<nvidia_smi_log>{doubled('driver_version')}<gpu>{doubled('serial')}</gpu></nvidia_smi_log>"
    assert parse(log.encode()) == SmiReport((Gpu(index=0),))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_characters_with_the_bytes_of_tags_are_not_tags(encoding: str) -> None:
    letters = b"<a><b/></a> ".decode("utf-16-be" if encoding == "utf-16-be" else "utf-16-le")
    (found,) = parse(in_a_gpu(f"<serial>{letters}</serial>").decode().encode(encoding)).gpus
    assert found.serial == letters


@pytest.mark.parametrize("encoding", ["utf-8-sig", "iso-8859-1", "us-ascii"])
def test_tags_are_found_in_every_supported_encoding(encoding: str) -> None:
    declared = f'<?xml version="1.0" encoding="{encoding}"?>' if encoding != "utf-8-sig" else ""
    content = in_a_gpu("<clocks><serial>2</serial></clocks><serial>1</serial>").decode()
    (found,) = parse((declared + content).encode(encoding)).gpus
    assert found.serial == "1"


NAMED = st.sampled_from(("gpu", "serial", "uuid", "pci", "pci_bus_id", "clocks", "clocks_max", "a", "b"))
ATTRIBUTES = st.sampled_from(("", "", "", "", ' id="7"', " x='>'", " "))
SAID = st.sampled_from(("", "1", "N/A", "2&amp;3", " > ", "\n"))


def element(name: str, attributes: str, inner: list[str], blank: str) -> str:
    return f"<{name}{attributes}>{blank}{blank.join(inner)}</{name}{blank}>"


ELEMENTS = st.recursive(
    st.builds("<{0}>{1}</{0}>".format, NAMED, SAID) | st.builds("<{}/>".format, NAMED) | SAID,
    lambda inner: st.builds(element, NAMED, ATTRIBUTES, st.lists(inner, max_size=6), st.sampled_from(("", "", "\n\t"))),
    max_leaves=40,
)
DAMAGE = st.sampled_from(("", "<!--</a>-->", "<![CDATA[</a>]]>", "<?a </a>?>", "&gone;", "<a>", "</a>", "<"))


def outcome(content: bytes) -> SmiReport | str:
    try:
        return parse(content)
    except UnreadableSmiError as exc:
        return str(exc)


@given(
    st.lists(st.builds(element, st.just("gpu"), ATTRIBUTES, st.lists(ELEMENTS, max_size=6), SAID), max_size=3),
    st.sampled_from(("", "\ufeff", '<?xml version="1.0"?>', '<!DOCTYPE nvidia_smi_log SYSTEM "<a><a>">')),
    st.none() | st.tuples(st.integers(1, 300), DAMAGE, st.integers(0, 20)),
)
def test_thinning_does_not_change_the_result(gpus: list[str], prolog: str, damage: tuple[int, str, int] | None) -> None:
    """A document with a comment is not thinned. Some documents are changed at one place."""
    text = element("nvidia_smi_log", "", gpus, "")
    if damage is not None:
        at, put, lost = damage
        text = text[:at] + put + text[at + lost :]
    assert outcome((prolog + text).encode()) == outcome((prolog + "<!---->" + text).encode())


def test_eight_gpus_are_read_in_a_few_milliseconds() -> None:
    """The benchmarks have the figure; this test shows that time does not grow quadratically."""
    content = document(h100_host())
    assert content.count(b"\n") > 5000
    began = time.perf_counter()
    parse(content)
    assert time.perf_counter() - began < 0.5
