"""The labels that tell of a node's serials, and the patch that makes them so. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import frozen

from webhook.inventory.nvidia_smi import Gpu, available

DOMAIN: Final = "gpuid.github.com/"
# What Kubernetes takes as a label's value.
MAX_VALUE: Final = 63
NOT_ALLOWED: Final = re.compile(r"[^A-Za-z0-9\-_.]")
ENDS: Final = "-_."

Labels = dict[str, str]


@frozen
class WantedLabels:
    """What a node's labels should say, and of what could not be said as it is, why."""

    labels: Labels
    notes: tuple[str, ...] = ()


def wanted_labels(gpus: Iterable[Gpu]) -> WantedLabels:
    """A group is what has one chassis serial, or none. The number in a key is a serial's place in its group.

    Two dies that share a serial share a label: labels name boards. Devices are told apart by UUID, in the records.
    """
    groups = grouped(gpus)
    chassis = [name for name, _ in groups if name is not None]
    found: Labels = {}
    notes: list[str] = []

    def put(key: str, text: str) -> None:
        value = cleaned(text)
        if len(value) > MAX_VALUE:
            notes.append(f"{key}: {len(value)} characters, cut to {MAX_VALUE}")
            value = value[:MAX_VALUE].rstrip(ENDS)
        found[DOMAIN + key] = value

    for place, (name, serials) in enumerate(groups):
        several = len(groups) > 1 and name is not None
        if name is not None:
            put(f"chassis-{place}" if several else "chassis", name)
        for number, serial in enumerate(serials):
            if serial:  # one that is empty has its number all the same: S2's rule
                put(f"chassis-{place}-gpu-{number}" if several else f"gpu-{number}", serial)
    if chassis:
        put("chassis-count", str(len(chassis)))
    return WantedLabels(found, tuple(notes))


def grouped(gpus: Iterable[Gpu]) -> Sequence[tuple[str | None, Sequence[str]]]:
    """By chassis serial in the order of the texts, all that have none together; the serials of each, sorted."""
    serials: dict[str | None, set[str]] = {}
    texts: dict[str | None, str] = {}
    for one in gpus:
        serials.setdefault(one.chassis, set()).add(one.raw_serial)
        texts[one.chassis] = min(texts.get(one.chassis, one.raw_chassis), one.raw_chassis)
    return [(name, sorted(serials[name])) for name in sorted(serials, key=lambda name: texts[name])]


def cleaned(text: str) -> str:
    """`na` where nothing is left that a label may hold."""
    return NOT_ALLOWED.sub("-", available(text) or "").strip(ENDS) or "na"


def label_patch(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str | None]:
    """What a merge patch of the labels has to say: what differs, and of our own what is not wanted any more."""
    new = {key: value for key, value in wanted.items() if present.get(key) != value}
    stale = {key: None for key in present if key.startswith(DOMAIN) and key not in wanted}
    return {**new, **stale}
