"""The keys by which a pod states what it asks for, and the record of a claim.

The parser, messages, suggestions, webhook configurations and policies derive from `CLAIM_KEYS`. CONTRIBUTING.md
explains how to add a key.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import msgspec
from attrs import frozen
from msgspec import structs

from webhook.core import keys
from webhook.core.errors import InvalidPodError
from webhook.core.injection import Injection
from webhook.core.keys import (
    ASSIGNER_DOMAIN,
    CLAIM,
    DOMAIN,
    HINT_NAMES,
    NATIVE,
    OUTPUT_NAMES,
    QUEUED_LABEL,
    WAITING,
    WOKEN_AT,
    Key,
)
from webhook.core.reservation import GpuDelivery
from webhook.core.reserve import Reserve


@frozen
class ClaimField:
    """The field of `ClaimRecord` with the value of a key."""

    name: str
    # The value of the text. Raises InvalidPodError; the name of the key comes before its mistakes.
    read: Callable[[str], Any]
    # The part of the sentence about the claim. Not used if the value is the field's default.
    words: Callable[[Any], str]


@frozen
class ClaimKey(Key):
    """An annotation by which a pod asks for something."""

    # Whether a label of the pod counts too, if it has no annotation.
    is_label: bool = False
    # Whether the key alone makes a claim. The API server then sends every pod with it to the webhook. A key that only
    # refines a claim has no effect in other pods.
    makes_claim: bool = True
    # None if `ClaimParser` has a method of its own for the key. A key with a field that makes a claim asks for one GPU,
    # if nothing else gives the number.
    field: ClaimField | None = None


def read_flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise InvalidPodError(f" is {text[:40]!r}; allowed are true and false")
    return text == "true"


REQUIRED_HASH: Final = ClaimKey(keys.REQUIRED_HASH.name, keys.REQUIRED_HASH.aliases)
GPU_COUNT: Final = ClaimKey(f"{DOMAIN}/gpu-count", is_label=True)
GPU_MAP: Final = ClaimKey(f"{DOMAIN}/gpu-map", ("gpu-scheduling-map",))
SHARED: Final = ClaimKey(
    f"{DOMAIN}/shared",
    is_label=True,
    makes_claim=False,
    field=ClaimField("shared", read_flag, lambda value: "to share"),
)

CLAIM_KEYS: Final = (REQUIRED_HASH, GPU_COUNT, GPU_MAP, SHARED)
FIELDS: Final = tuple((key, key.field) for key in CLAIM_KEYS if key.field is not None)
INPUT_NAMES: Final = frozenset(name for key in CLAIM_KEYS for name in key.names)
# All keys of our domain that may be in a pod.
KNOWN_NAMES: Final = INPUT_NAMES | OUTPUT_NAMES | HINT_NAMES | {NATIVE, WOKEN_AT, WAITING, QUEUED_LABEL}

# Device requirements are labels: gpuwarden.io/gpu.<key>=<value> and fudo.org/gpu.<x>.
REQUIREMENT_PREFIX: Final = f"{DOMAIN}/gpu."
ASSIGNER_REQUIREMENT: Final = f"{ASSIGNER_DOMAIN}/gpu"
ASSIGNER_ASSIGN: Final = f"{ASSIGNER_DOMAIN}/gpu.assign"


class ClaimRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The claim as it was first parsed, for the pod's annotation `gpuwarden.io/claim`.

    Older versions have written records, and ledgers know their digests: a new field needs a default.
    """

    gpus: int = 0
    hashes: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    shared: bool = False
    node: str | None = None
    devices: tuple[str, ...] = ()
    # The pod's ordinal, if its map has no line for it: the claim cannot be served.
    unmapped: int | None = None
    # The number of GPUs by container that requests them. If none does, `containers` are all: each sees the GPUs.
    asked: dict[str, int] = {}
    containers: tuple[str, ...] = ()
    # Whether the pod's own affinity names one node. It cannot be distinguished from gpuwarden's own pin.
    named: bool = False
    # What gives the containers their GPUs (`core/injection.py`); None: the installation's default.
    injection: str | None = None
    # When the GPUs are chosen (`core/reserve.py`); None: at creation.
    reserve: str | None = None

    @classmethod
    def parse(cls, text: str) -> "ClaimRecord":
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise InvalidPodError(f"annotation {CLAIM.name} was not written by gpuwarden") from exc

    def text(self) -> str:
        return ENCODER.encode(self).decode()

    def digest(self) -> str:
        return hashlib.sha256(ENCODER.encode(self)).hexdigest()

    def without_count(self) -> "ClaimRecord":
        """What the claim asks for besides a number of GPUs. Equals `ClaimRecord()` if that is nothing."""
        return structs.replace(self, gpus=0, asked={}, containers=(), named=False)

    def without_mode(self) -> "ClaimRecord":
        """The same without what the installation and the namespace decide."""
        return structs.replace(self.without_count(), injection=None, reserve=None)

    @property
    def delivery(self) -> GpuDelivery | None:
        """AWAITED if the kubelet chooses the GPUs, by a device plugin."""
        return GpuDelivery.AWAITED if self.injection == Injection.PLUGIN else None

    @property
    def is_left_to_scheduler(self) -> bool:
        """Whether kube-scheduler chooses the GPUs, by a ResourceClaim. No ledger holds them."""
        return (self.injection, self.reserve) == (Injection.DRA, Reserve.BIND)

    @property
    def selects_devices(self) -> bool:
        """Whether only gpuwarden can select the devices. A new field counts unless it is listed here."""
        others = structs.replace(self.without_mode(), hashes=(), node=None, devices=(), unmapped=None)
        return others != ClaimRecord()


ENCODER: Final = msgspec.json.Encoder(order="sorted")
