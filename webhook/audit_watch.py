"""The audit of a process that watches all of it anyway: counted when somebody looks at the metrics."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from webhook.audit import AuditedPod, Facts, Kind, Reading, findings
from webhook.clock import Clock
from webhook.core.fleet import Fleet
from webhook.ledger import Ledger
from webhook.maps import map_of, may_keep, opted_in
from webhook.view import View
from webhook.watch import key_of

Raw = dict[str, Any]


class Pods:
    """Hears of pods, and keeps what an audit may say something of."""

    def __init__(self, read: Callable[[Raw], AuditedPod | None]) -> None:
        self._read = read
        self.kept: dict[str, AuditedPod] = {}

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.kept.clear()
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        found = self._read(raw)
        if found is None:
            self.kept.pop(key_of(raw), None)
        else:
            self.kept[key_of(raw)] = found

    def deleted(self, raw: Raw) -> None:
        self.kept.pop(key_of(raw), None)


class MappedNames:
    """Hears of StatefulSets, and keeps the names of those with a placement map."""

    def __init__(self) -> None:
        self.names: set[tuple[str, str]] = set()

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        self.names.clear()
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        if map_of(raw):
            self.names.add(name_of(raw))
        else:
            self.names.discard(name_of(raw))

    def deleted(self, raw: Raw) -> None:
        self.names.discard(name_of(raw))


def name_of(raw: Raw) -> tuple[str, str]:
    return raw["metadata"].get("namespace") or "", raw["metadata"]["name"]


class AuditWatch:
    """`pods`, `sets` and `namespaces` are listeners for the process's own watches."""

    def __init__(
        self, reading: Reading, fleet: Fleet, ledger: Ledger, clock: Clock, opt_in: str, *, needs_evidence: bool
    ) -> None:
        self.pods = Pods(reading.pod)
        self.sets = MappedNames()
        # Whether its pods are looked at, and whether its maps keep GPUs.
        self.namespaces: View[tuple[bool, bool]] = View(partial(asked, opt_in=opt_in))
        self._fleet = fleet
        self._ledger = ledger
        self._clock = clock
        self._needs_evidence = needs_evidence

    def counts(self) -> dict[str, int]:
        """Findings by kind, all kinds."""
        found = Counter(one.kind for one in findings(self._facts(), self._clock(), needs_evidence=self._needs_evidence))
        return {kind.value: found[kind] for kind in Kind}

    def _facts(self) -> Facts:
        namespaces = {name: self.namespaces.get(name) or (False, False) for name in self.namespaces.names()}
        unkept = {name for name, (is_ours, keeps) in namespaces.items() if is_ours and not keeps}
        return Facts(
            pods=self.pods.kept.values(),
            held=self._ledger.reservations(),
            opted_in={name for name, (is_ours, _) in namespaces.items() if is_ours},
            evidence={name: berth.evidence for name, berth in self._fleet.berths.items()},
            unkept_maps=[one for one in self.sets.names if one[0] in unkept],
        )


def asked(raw: Raw, opt_in: str) -> tuple[bool, bool]:
    return opted_in(raw, opt_in), may_keep(raw, opt_in)
