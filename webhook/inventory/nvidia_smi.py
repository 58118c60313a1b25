"""What `nvidia-smi -q -x` says, read from its bytes. They come from a container, so nothing in them is trusted.

The text names an external DTD, which is never fetched. What declares entities or attributes itself is refused: none is
needed, and a few lines of them grow to gigabytes.
"""

import re
from typing import Final
from xml.etree import ElementTree
from xml.parsers import expat

from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.inventory.xml_thinning import thinned

# A GPU has some 30 KiB there. Whatever is larger than this is no list of GPUs, and many nodes may answer at once.
MAX_SIZE: Final = 8 * 1024 * 1024
# A GPU has about 1,000 elements there, and an element in memory is larger than its text: so many take some 100 MiB.
MAX_TAGS: Final = 200_000
# A GPU has one. Each takes some 300 bytes of memory, and equals signs in texts count too.
MAX_ATTRIBUTES: Final = 50_000
MAX_GPUS: Final = 1024
# Longer is no serial, no model and no version.
MAX_TEXT: Final = 128

ROOT: Final = "nvidia_smi_log"
# By place and element. `platformInfo` is the one name there in camel case.
OF_GPU: Final = (
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
# The names on all ways from the root to what is read.
WAYS: Final = frozenset(
    name.encode()
    for name in (
        *(ROOT, "driver_version", "gpu"),
        *(place for place, _ in OF_GPU if place is not None),
        *(element for _, names in OF_GPU for element in names),
    )
)
NOTHING: Final = frozenset({"", "N/A", "[N/A]", "Unknown Error", "[Unknown Error]", "ERR!", "[GPU is lost]"})
MINOR: Final = re.compile(r"[0-9]{1,9}")
MEMORY: Final = re.compile(r"([0-9]{1,9}) MiB")


class UnreadableSmiError(GpuwardenError):
    """This is not what nvidia-smi says of GPUs."""


@frozen
class Gpu:
    """One device, in the order of the text, which is that of the index. What it does not say is None."""

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
    # As they stand there: labels keep apart what is empty and what is not applicable.
    said_serial: str = ""
    said_chassis: str = ""


@frozen
class Smi:
    """A host's GPUs as they were read at once."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None


def parse(content: bytes) -> Smi:
    """Raises UnreadableSmiError, which says why."""
    if len(content) > MAX_SIZE:
        raise UnreadableSmiError(f"{len(content)} bytes are more than {MAX_SIZE}")
    if content.count(b"<") > MAX_TAGS:
        raise UnreadableSmiError(f"it has more than {MAX_TAGS} tags")
    if content.count(b"=") > MAX_ATTRIBUTES:
        raise UnreadableSmiError(f"it has more than {MAX_ATTRIBUTES} attributes")
    root = _root(content)
    if root.tag != ROOT:
        raise UnreadableSmiError(f"its root is {root.tag[:MAX_TEXT]!r}, not {ROOT}")
    gpus = root.findall("gpu")
    if len(gpus) > MAX_GPUS:
        raise UnreadableSmiError(f"it describes more than {MAX_GPUS} GPUs")
    driver = known(_text(root.find("driver_version")))
    return Smi(tuple(_gpu(index, one.get("id", ""), _said(one)) for index, one in enumerate(gpus)), driver)


def _root(content: bytes) -> ElementTree.Element:
    try:
        survey = _Survey(content)
        # Where the root's tag stands in ASCII, all tags do: expat knows no encodings but UTF-16 and such.
        if survey.has_tags_only and content.startswith(ROOT_TAG, survey.root_at):
            content = thinned(content, survey.root_at, WAYS)
        return ElementTree.fromstring(content)  # noqa: S314 - see above
    except expat.ExpatError as exc:
        raise UnreadableSmiError(_why(content, exc.code, exc.lineno)) from exc
    except ElementTree.ParseError as exc:
        raise UnreadableSmiError(_why(content, exc.code, exc.position[0])) from exc
    except (ValueError, LookupError) as exc:
        raise UnreadableSmiError(f"it is in an encoding that cannot be read: {exc}") from exc


class _Survey:
    """What expat alone has seen of the whole text, before anything is made of it."""

    def __init__(self, content: bytes) -> None:
        """Raises UnreadableSmiError where things are declared, and ExpatError where the text is not well-formed."""
        self.root_at = 0
        self.has_tags_only = True  # from the root on: nothing else that begins with "<"
        self._parser = parser = expat.ParserCreate(namespace_separator="}")  # as ElementTree's does
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.StartDoctypeDeclHandler = _refuse_declarations
        parser.SkippedEntityHandler = self._refuse_entity
        parser.StartElementHandler = self._see_root
        parser.CommentHandler = self._see_no_tag
        parser.ProcessingInstructionHandler = self._see_no_tag
        parser.StartCdataSectionHandler = self._see_no_tag
        try:
            parser.Parse(content, True)
        finally:
            del self._parser  # it knows us, too

    def _see_root(self, _name: str, _attributes: object) -> None:
        self.root_at = self._parser.CurrentByteIndex
        self._parser.StartElementHandler = None

    def _see_no_tag(self, *_said: str) -> None:
        self.has_tags_only = False

    def _refuse_entity(self, _name: str, _is_parameter: bool) -> None:
        raise UnreadableSmiError(f"it is no XML: undefined entity at line {self._parser.CurrentLineNumber}")


def _refuse_declarations(_name: str, _system: str | None, _public: str | None, has_own: int) -> None:
    if has_own:
        raise UnreadableSmiError("it declares things of its own")


def _said(gpu: ElementTree.Element) -> dict[str, str]:
    said = {}
    for place, names in OF_GPU:
        where = gpu if place is None else gpu.find(place)
        if where is None:
            continue
        for element, name in names.items():
            text = _text(where.find(element))
            if text is not None:
                said[name] = text
    return said


def _text(element: ElementTree.Element | None) -> str | None:
    """What stands there, if it could be a name or a number."""
    text = "" if element is None else (element.text or "").strip()
    return None if element is None or len(text) > MAX_TEXT or not text.isprintable() else text


def known(text: str | None) -> str | None:
    return None if text is None or text in NOTHING else text


def _gpu(index: int, pci: str, said: dict[str, str]) -> Gpu:
    minor = said.pop("minor", "")
    address = known(said.pop("pci", None)) or known(pci.strip()[:MAX_TEXT])
    memory = MEMORY.fullmatch(said.pop("memory", ""))
    return Gpu(
        index=index,
        pci=address if address is not None and address.isprintable() else None,
        minor=int(minor) if MINOR.fullmatch(minor) else None,
        memory=f"{memory[1]}Mi" if memory else None,
        is_mig=said.pop("mig", "") == "Enabled",
        said_serial=said.get("serial", ""),
        said_chassis=said.get("chassis", ""),
        **{name: known(text) for name, text in said.items()},
    )


def _why(content: bytes, code: int, line: int) -> str:
    """In words that tell a tool's own complaint from half an answer."""
    if not content.strip():
        return "there is nothing"
    if not content.lstrip().startswith(b"<") and not content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        first = content.strip().splitlines()[0][:MAX_TEXT].decode(errors="replace")
        return f"it is no XML: {first!r}"
    if code in _TRUNCATED:
        return f"it ends in the middle, at line {line}"
    return f"it is no XML: {expat.ErrorString(code)} at line {line}"


_TRUNCATED: Final = tuple(
    expat.errors.codes[text]
    for text in (
        expat.errors.XML_ERROR_NO_ELEMENTS,
        expat.errors.XML_ERROR_UNCLOSED_TOKEN,
        expat.errors.XML_ERROR_PARTIAL_CHAR,
        expat.errors.XML_ERROR_UNCLOSED_CDATA_SECTION,
    )
)
