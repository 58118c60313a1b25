"""The audit in a process that watches everything already: findings are counted when the metrics are read."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from attrs import define, field, frozen

from webhook.admission.audit import AuditedPod, AuditRules, Facts, FindingKind, findings
from webhook.admission.device_plugins import DevicePlugins
from webhook.admission.placement_maps import map_of, may_reserve_by_map, opted_in
from webhook.core.fleet import Fleet
from webhook.core.isolation import is_isolated
from webhook.core.raw import Raw
from webhook.kube.view import ObjectView
from webhook.kube.watch import key_of
from webhook.ledger import Ledger
from webhook.runtime.clock import Clock


class AuditedPods:
    """Listener of the watch of pods. Keeps the pods that an audit could report."""

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


class MappedSetNames:
    """Listener of the watch of StatefulSets. Keeps the names of those with a placement map."""

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


@frozen
class AuditedNamespace:
    """What the audit needs of a namespace."""

    is_ours: bool = False
    isolates: bool = False
    reserves_by_map: bool = False


@define(eq=False, repr=False)
class AuditWatch:
    """The audit on the process's own watches: `pods`, `sets` and `namespaces` are their listeners."""

    _reading: AuditRules
    _fleet: Fleet
    _ledger: Ledger
    _clock: Clock
    _opt_in: str
    _own_namespace: str
    _needs_evidence: bool = field(kw_only=True)
    _plugins: DevicePlugins = field(kw_only=True)
    sets: MappedSetNames = field(factory=MappedSetNames, init=False)
    pods: AuditedPods = field(init=False)
    namespaces: ObjectView[AuditedNamespace] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pods = AuditedPods(self._reading.pod)
        self.namespaces = ObjectView(partial(asked, opt_in=self._opt_in, own_namespace=self._own_namespace))

    def counts(self) -> dict[str, int]:
        """The number of findings of each kind, zeros included."""
        found = Counter(one.kind for one in findings(self._facts(), self._clock(), needs_evidence=self._needs_evidence))
        return {kind.value: found[kind] for kind in FindingKind}

    def _facts(self) -> Facts:
        namespaces = {name: self.namespaces.get(name) or AuditedNamespace() for name in self.namespaces.names()}
        unkept = {name for name, one in namespaces.items() if one.is_ours and not one.reserves_by_map}
        return Facts(
            pods=self.pods.kept.values(),
            held=self._ledger.reservations(),
            opted_in={name for name, one in namespaces.items() if one.is_ours},
            isolated={name for name, one in namespaces.items() if one.isolates},
            evidence={name: indexed.evidence for name, indexed in self._fleet.indexed_nodes.items()},
            maps_without_label=[one for one in self.sets.names if one[0] in unkept],
            is_listed=lambda node, uuid: node in self._fleet.nodes_with_device(uuid),
            plugin_nodes=self._plugins.nodes(),
        )


def asked(raw: Raw, opt_in: str, own_namespace: str) -> AuditedNamespace:
    is_ours = opted_in(raw, opt_in)
    return AuditedNamespace(is_ours, is_ours and is_isolated(raw, own_namespace), may_reserve_by_map(raw, opt_in))
