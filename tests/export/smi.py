"""nvidia-smi's output for hosts that are too large for fixtures, with all sections of real output."""

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve, frozen

NOT_HERE = "N/A"
# As many lines as a real driver writes for one GPU, in invented sections.
SECTIONS = ("ecc_errors", "clocks_event_reasons", "temperature", "gpu_power_readings", "clocks", "accounted_processes")
LINES = 150


@frozen
class Card:
    """One GPU of a generated host."""

    number: int
    model: str = "NVIDIA H100 80GB HBM3"
    serial: str = NOT_HERE
    uuid: str = NOT_HERE
    minor: str = NOT_HERE
    memory: str = "81559 MiB"
    chassis: str | None = NOT_HERE  # None: no platformInfo at all
    mig: str = "Disabled"
    bus: str = ""

    @property
    def pci(self) -> str:
        return self.bus or f"{self.number:08X}:01:00.0"


def uuid_of(host: str, number: int) -> str:
    return f"GPU-{sum(map(ord, host)):08x}-0000-4000-8000-{number:012x}"


def h100_host(host: str = "h100", count: int = 8) -> list[Card]:
    """Pairs have consecutive serials; serials and devices have different orders."""
    return [
        Card(
            k, serial=f"13200000{count - k:05d}", uuid=uuid_of(host, k), minor=str(k), bus=f"00000000:{16 + k:02X}:00.0"
        )
        for k in range(count)
    ]


def gb200_tray(host: str = "gb200") -> list[Card]:
    """Two boards with two dies each, which share a serial, in one chassis."""
    return [
        Card(
            k,
            model="NVIDIA GB200",
            serial=f"17600000000{1 if k > 1 else 2}",
            uuid=uuid_of(host, k),
            minor=str(k),
            memory="189471 MiB",
            chassis="1820000000042",
        )
        for k in range(4)
    ]


def with_mig(cards: list[Card]) -> list[Card]:
    return [evolve(one, mig="Enabled") for one in cards]


def dead(card: Card) -> Card:
    """A GPU that has fallen off the bus: only its address is known."""
    return Card(card.number, model=NOT_HERE, memory=NOT_HERE, bus=card.pci)


def document(cards: list[Card], driver: str = "580.10.01") -> bytes:
    lines = [
        '<?xml version="1.0" ?>',
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">',
        "<nvidia_smi_log>",
        "\t<timestamp>Thu Jan  1 00:00:00 2026</timestamp>",
        f"\t<driver_version>{driver}</driver_version>",
        "\t<cuda_version>13.0</cuda_version>",
        f"\t<attached_gpus>{len(cards)}</attached_gpus>",
        *(line for card in cards for line in of_card(card)),
        "</nvidia_smi_log>",
    ]
    return "\n".join(lines).encode() + b"\n"


def of_card(card: Card) -> Iterator[str]:
    yield f'\t<gpu id="{card.pci}">'
    yield f"\t\t<product_name>{card.model}</product_name>"
    yield "\t\t<product_brand>NVIDIA</product_brand>"
    yield f"\t\t<mig_mode><current_mig>{card.mig}</current_mig><pending_mig>{card.mig}</pending_mig></mig_mode>"
    yield "\t\t<mig_devices>"
    if card.mig == "Enabled":
        for k in range(2):
            yield f"\t\t\t<mig_device><index>{k}</index><gpu_instance_id>{k + 1}</gpu_instance_id>"
            yield f"\t\t\t\t<uuid>MIG-{k}</uuid><serial>not of a GPU</serial>"
            yield "\t\t\t\t<fb_memory_usage><total>9984 MiB</total></fb_memory_usage></mig_device>"
    yield "\t\t</mig_devices>"
    yield f"\t\t<serial>{card.serial}</serial>"
    yield f"\t\t<uuid>{card.uuid}</uuid>"
    yield f"\t\t<minor_number>{card.minor}</minor_number>"
    if card.chassis is not None:
        yield "\t\t<platformInfo>"
        yield f"\t\t\t<chassis_serial_number>{card.chassis}</chassis_serial_number>"
        yield f"\t\t\t<slot_number>{NOT_HERE}</slot_number><tray_index>{NOT_HERE}</tray_index>"
        yield f"\t\t\t<module_id>{card.number + 1}</module_id>"
        yield "\t\t</platformInfo>"
    yield f"\t\t<pci><pci_bus>01</pci_bus><pci_bus_id>{card.pci}</pci_bus_id></pci>"
    yield f"\t\t<fb_memory_usage><total>{card.memory}</total><used>5 MiB</used></fb_memory_usage>"
    yield "\t\t<bar1_memory_usage><total>131072 MiB</total></bar1_memory_usage>"
    for section in SECTIONS:
        yield f"\t\t<{section}>"
        for k in range(LINES):
            yield f"\t\t\t<value_{k}>{k} W</value_{k}>"
        yield f"\t\t</{section}>"
    yield "\t\t<processes><process_info><pid>7</pid><process_name>a&amp;b</process_name></process_info></processes>"
    yield "\t</gpu>"


HOSTS: dict[str, Callable[[], Any]] = {"h100": h100_host, "gb200": gb200_tray}
