"""Parses the output of `nvidia-smi -q -x`. It comes from a container, so nothing in it is trusted.

The document names an external DTD, which is never fetched. A document that declares entities or attributes itself is
rejected: none is needed, and a few lines of them can expand to gigabytes.
"""

import re
from typing import Final
from xml.etree import ElementTree
from xml.parsers import expat

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.inventory.xml_thinning import thinned

# A GPU takes some 30 KiB. A larger document is no list of GPUs, and many nodes may respond at once.
MAX_SIZE: Final = 8 * 1024 * 1024
# A GPU has about 1,000 elements, and an element in memory is larger than its text: this many take some 100 MiB.
MAX_TAGS: Final = 200_000
# A GPU has one. Each takes some 300 bytes of memory. Equals signs in text count too.
MAX_ATTRIBUTES: Final = 50_000
MAX_GPUS: Final = 1024
# No serial, model or version is longer.
MAX_TEXT: Final = 128

ROOT: Final = "nvidia_smi_log"
# Field names by parent and element. `platformInfo` is the only parent in camel case.
GPU_ELEMENTS: Final = (
    (None, {"serial": "serial", "uuid": "uuid", "minor_number": "minor", "product_name": "model"}),
    ("fb_memory_usage", {"total": "memory"}),
    ("mig_mode", {"current_mig": "mig"}),
    ("pci", {"pci_bus_id": "pci"}),
    (
        "platformInfo",
        {
            "chassis_serial_number": "chassis",
            "slot_number": "slot",
            "tray_index": "tray",
            "host_id": "host_id",
            "peer_type": "peer_type",
            "module_id": "module",
            "gpu_fabric_guid": "fabric_guid",
        },
    ),
    ("fabric", {"cliqueId": "clique", "clusterUuid": "fabric_cluster"}),
)
ROOT_TAG: Final = f"<{ROOT}".encode()
# The names on all paths from the root to the elements that are read.
KEPT_NAMES: Final = frozenset(
    name.encode()
    for name in (
        *(ROOT, "driver_version", "gpu"),
        *(parent for parent, _ in GPU_ELEMENTS if parent is not None),
        *(element for _, names in GPU_ELEMENTS for element in names),
    )
)
UNAVAILABLE: Final = frozenset({"", "N/A", "[N/A]", "Unknown Error", "[Unknown Error]", "ERR!", "[GPU is lost]"})
MINOR: Final = re.compile(r"[0-9]{1,9}")
MEMORY: Final = re.compile(r"([0-9]{1,9}) MiB")


class UnreadableSmiError(GpuwardenError):
    """This is not the output of `nvidia-smi -q -x`."""


@frozen
class Gpu:
    """One device. The document lists devices in the order of their index. Missing values are None."""

    index: int
    pci: str | None = None
    uuid: str | None = None
    serial: str | None = None
    minor: int | None = None
    model: str | None = None
    memory: str | None = None
    is_mig: bool = False
    chassis: str | None = None
    slot: str | None = None
    tray: str | None = None
    host_id: str | None = None
    peer_type: str | None = None
    module: str | None = None
    fabric_guid: str | None = None
    clique: str | None = None
    fabric_cluster: str | None = None
    # Unchanged from the document: labels distinguish an empty value from N/A.
    raw_serial: str = ""
    raw_chassis: str = ""


@frozen
class SmiReport:
    """The GPUs of a host, from one reading."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None


def parse(content: bytes) -> SmiReport:
    """Raises UnreadableSmiError, which says why."""
    if len(content) > MAX_SIZE:
        raise UnreadableSmiError(f"{len(content)} bytes are more than {MAX_SIZE}")
    if content.count(b"<") > MAX_TAGS:
        raise UnreadableSmiError(f"it has more than {MAX_TAGS} tags")
    if content.count(b"=") > MAX_ATTRIBUTES:
        raise UnreadableSmiError(f"it has more than {MAX_ATTRIBUTES} attributes")
    root = _root(content)
    if root.tag != ROOT:
        raise UnreadableSmiError(f"its root element is {root.tag[:MAX_TEXT]!r}, not {ROOT}")
    gpus = root.findall("gpu")
    if len(gpus) > MAX_GPUS:
        raise UnreadableSmiError(f"it describes more than {MAX_GPUS} GPUs")
    driver = available(_text(root.find("driver_version")))
    return SmiReport(tuple(_gpu(index, one.get("id", ""), _values(one)) for index, one in enumerate(gpus)), driver)


def _root(content: bytes) -> ElementTree.Element:
    try:
        scan = _Scan(content)
        # If the root's tag is in ASCII, all tags are: expat supports no other encodings than UTF-16 and ASCII
        # supersets.
        if scan.has_tags_only and content.startswith(ROOT_TAG, scan.root_at):
            content = thinned(content, scan.root_at, KEPT_NAMES)
        return ElementTree.fromstring(content)  # noqa: S314 - see above
    except expat.ExpatError as exc:
        raise UnreadableSmiError(_describe_error(content, exc.code, exc.lineno)) from exc
    except ElementTree.ParseError as exc:
        raise UnreadableSmiError(_describe_error(content, exc.code, exc.position[0])) from exc
    except (ValueError, LookupError) as exc:
        raise UnreadableSmiError(f"its encoding is not supported: {exc}") from exc


class _Scan:
    """A first pass over the whole document with expat alone, before a tree is built."""

    def __init__(self, content: bytes) -> None:
        """Raises UnreadableSmiError for declarations, and ExpatError if the document is not well-formed."""
        self.root_at = 0
        self.has_tags_only = True  # from the root on: no other markup that begins with "<"
        self._parser = parser = expat.ParserCreate(namespace_separator="}")  # as ElementTree's does
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.SkippedEntityHandler = self._refuse_entity
        parser.StartElementHandler = self._note_root
        parser.CommentHandler = self._note_other_markup
        parser.ProcessingInstructionHandler = self._note_other_markup
        parser.StartCdataSectionHandler = self._note_other_markup
        try:
            parser.Parse(content, True)
        finally:
            del self._parser  # breaks the reference cycle

    def _note_root(self, _name: str, _attributes: object) -> None:
        self.root_at = self._parser.CurrentByteIndex
        self._parser.StartElementHandler = None

    def _note_other_markup(self, *_values: str) -> None:
        self.has_tags_only = False

    def _refuse_entity(self, _name: str, _is_parameter: bool) -> None:
        raise UnreadableSmiError(f"it is not XML: undefined entity at line {self._parser.CurrentLineNumber}")


def _refuse_declarations(_name: str, _system: str | None, _public: str | None, has_own: int) -> None:
    if has_own:
        raise UnreadableSmiError("it contains its own declarations")


def _values(gpu: ElementTree.Element) -> dict[str, str]:
    values = {}
    for parent, names in GPU_ELEMENTS:
        parent_element = gpu if parent is None else gpu.find(parent)
        if parent_element is None:
            continue
        for element, name in names.items():
            text = _text(parent_element.find(element))
            if text is not None:
                values[name] = text
    return values


def _text(element: ElementTree.Element | None) -> str | None:
    """The element's text, if it could be a name or a number."""
    text = "" if element is None else (element.text or "").strip()
    return None if element is None or len(text) > MAX_TEXT or not text.isprintable() else text


def available(text: str | None) -> str | None:
    return None if text is None or text in UNAVAILABLE else text


def _gpu(index: int, pci: str, values: dict[str, str]) -> Gpu:
    minor = values.pop("minor", "")
    address = available(values.pop("pci", None)) or available(pci.strip()[:MAX_TEXT])
    memory = MEMORY.fullmatch(values.pop("memory", ""))
    return Gpu(
        index=index,
        pci=address if address is not None and address.isprintable() else None,
        minor=int(minor) if MINOR.fullmatch(minor) else None,
        memory=f"{memory[1]}Mi" if memory else None,
        is_mig=values.pop("mig", "") == "Enabled",
        raw_serial=values.get("serial", ""),
        raw_chassis=values.get("chassis", ""),
        **{name: available(text) for name, text in values.items()},
    )


def _describe_error(content: bytes, code: int, line: int) -> str:
    """A message that distinguishes an error message of a tool from a truncated document."""
    if not content.strip():
        return "it is empty"
    if not content.lstrip().startswith(b"<") and not content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        first = content.strip().splitlines()[0][:MAX_TEXT].decode(errors="replace")
        return f"it is not XML: {first!r}"
    if code in _TRUNCATED:
        return f"it is truncated at line {line}"
    return f"it is not XML: {expat.ErrorString(code)} at line {line}"


_TRUNCATED: Final = tuple(
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
)
