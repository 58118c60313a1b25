"""A Binding: a scheduler assigns a pod to a node. The API server copies its metadata to the pod without validation."""

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.pod import Metadata, WireStruct
from webhook.core.reservation import PodIdentity


class TargetWire(WireStruct, frozen=True):
    kind: str | None = None
    name: str | None = None


class BindingMetadata(Metadata, frozen=True):
    finalizers: list[str] | None = None


class BindingWire(WireStruct, frozen=True):
    metadata: BindingMetadata | None = None
    target: TargetWire | None = None


@frozen
class Binding:
    """The pod, its node, and the annotations that the Binding adds to the pod."""

    pod: PodIdentity
    node: str
    annotations: Mapping[str, str | None]

    @classmethod
    def parse(cls, raw: Mapping[str, Any], namespace: str, name: str) -> "Binding":
        try:
            wire = msgspec.convert(raw, BindingWire)
        except msgspec.ValidationError as exc:
            raise InvalidPodError(f"the Binding cannot be read: {exc}") from exc
        meta, target = wire.metadata or BindingMetadata(), wire.target or TargetWire()
        pod = PodIdentity(namespace, meta.name or name, meta.uid or "")
        return cls(pod, target.name or "", meta.annotations or {})


def marked(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The Binding with a finalizer that says for which node it was reviewed. `raw` has been parsed before."""
    meta, node = raw.get("metadata") or {}, (raw.get("target") or {}).get("name") or ""
    others = [one for one in meta.get("finalizers") or () if not one.startswith(keys.REVIEWED_FOR)]
    return {**raw, "metadata": {**meta, "finalizers": [*others, keys.REVIEWED_FOR + node]}}


def with_reservation(raw: Mapping[str, Any], uid: str, annotations: Mapping[str, str]) -> dict[str, Any]:
    """The Binding with the annotations of a reservation. The uid makes sure that no later pod of the name gets them."""
    meta = raw.get("metadata") or {}
    return {**raw, "metadata": {**meta, "uid": uid, "annotations": {**(meta.get("annotations") or {}), **annotations}}}
