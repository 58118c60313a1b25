"""The labels that name a node's GPU serials, and the patch that sets them. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attrs import frozen

from webhook.inventory.nvidia_smi import Gpu, available

DOMAIN: Final = "gpuid.github.com/"
# Kubernetes' limit for a label value.
MAX_VALUE: Final = 63
NOT_ALLOWED: Final = re.compile(r"[^A-Za-z0-9\-_.]")
EDGE_CHARACTERS: Final = "-_."

Labels = dict[str, str]


@frozen
class WantedLabels:
    """The labels a node should have, with a note for each value that had to be changed."""

    labels: Labels
    notes: tuple[str, ...] = ()


def wanted_labels(gpus: Iterable[Gpu]) -> WantedLabels:
    """GPUs with the same chassis serial, or with none, form a group. A key's number is the serial's index in its group.

    Two dies with one serial share a label: labels name boards. Records tell devices apart by UUID.
    """
    groups = grouped(gpus)
    chassis = [name for name, _ in groups if name is not None]
    found: Labels = {}
    notes: list[str] = []

    def put(key: str, text: str) -> None:
        value = label_value(text)
        if len(value) > MAX_VALUE:
            notes.append(f"{key}: {len(value)} characters, cut to {MAX_VALUE}")
            value = value[:MAX_VALUE].rstrip(EDGE_CHARACTERS)
        found[DOMAIN + key] = value

    for place, (name, serials) in enumerate(groups):
        several = len(groups) > 1 and name is not None
        if name is not None:
            put(f"chassis-{place}" if several else "chassis", name)
        for number, serial in enumerate(serials):
            if serial:  # as in gpuid, an empty serial still takes a number
                put(f"chassis-{place}-gpu-{number}" if several else f"gpu-{number}", serial)
    if chassis:
        put("chassis-count", str(len(chassis)))
    return WantedLabels(found, tuple(notes))


def grouped(gpus: Iterable[Gpu]) -> Sequence[tuple[str | None, Sequence[str]]]:
    """Groups in the order of chassis serials, GPUs without one as a single group. Serials in a group are sorted."""
    serials: dict[str | None, set[str]] = {}
    texts: dict[str | None, str] = {}
    for one in gpus:
        serials.setdefault(one.chassis, set()).add(one.raw_serial)
        texts[one.chassis] = min(texts.get(one.chassis, one.raw_chassis), one.raw_chassis)
    return [(name, sorted(serials[name])) for name in sorted(serials, key=lambda name: texts[name])]


def label_value(text: str) -> str:
    """`na` if no character is allowed in a label."""
    return NOT_ALLOWED.sub("-", available(text) or "").strip(EDGE_CHARACTERS) or "na"


def label_patch(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str | None]:
    """The labels of a merge patch: those that differ, and None for labels of our domain that are no longer wanted."""
    new = {key: value for key, value in wanted.items() if present.get(key) != value}
    stale = {key: None for key in present if key.startswith(DOMAIN) and key not in wanted}
    return {**new, **stale}
