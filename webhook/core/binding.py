"""A Binding: somebody puts a pod on a node. What stands in its metadata lands on the pod, unvalidated."""

from collections.abc import Mapping
from typing import Any

import msgspec
from attrs import frozen

from webhook.core.errors import InvalidPodError
from webhook.core.pod import Metadata, Wire
from webhook.core.reservation import PodIdentity


class TargetWire(Wire, frozen=True):
    kind: str | None = None
    name: str | None = None


class BindingWire(Wire, frozen=True):
    metadata: Metadata | None = None
    target: TargetWire | None = None


@frozen
class Binding:
    """Which pod, which node, and what is planted on the way."""

    pod: PodIdentity
    node: str
    annotations: Mapping[str, str | None]

    @classmethod
    def parse(cls, raw: Mapping[str, Any], namespace: str, name: str) -> "Binding":
        try:
            wire = msgspec.convert(raw, BindingWire)
        except msgspec.ValidationError as exc:
            raise InvalidPodError(f"the Binding cannot be read: {exc}") from exc
        meta, target = wire.metadata or Metadata(), wire.target or TargetWire()
        pod = PodIdentity(namespace, meta.name or name, meta.uid or "")
        return cls(pod, target.name or "", meta.annotations or {})
