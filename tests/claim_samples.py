"""A sample of each key by which a pod asks for something. Tests and generated pods take their values from here."""

from typing import Any

from attrs import field, frozen

from tests.builders import HASH, OTHER_HASH
from webhook.core.claim_keys import ClaimRecord


@frozen
class Sample:
    """What a key does in a pod whose only container requests no GPU, and whose ordinal is 0."""

    # The canonical name and the aliases. Others write them, so they never change.
    names: tuple[str, ...]
    value: str
    # The members that the value changes in the record of a pod with one GPU, and the sentence of that claim.
    record: dict[str, Any]
    sentence: str
    # The slots that the claim gets. One node has the hash OTHER_HASH, the GPU 0, the GPU 1 with the label model=h100,
    # and the GPU 2 with two shares. Another node has the hash HASH and the GPU 3, which a pod without the key gets.
    slots: tuple[str, ...]
    makes_claim: bool = True
    is_label: bool = False
    # More values for generated pods, invalid ones included.
    others: tuple[str, ...] = field(default=())


SAMPLES = (
    Sample(
        ("gpuwarden.io/required-hash", "attestation-hash.my-company.com/required-hash"),
        OTHER_HASH,
        {"hashes": (OTHER_HASH,)},
        f"1 GPU on a node attested as {OTHER_HASH}",
        ("GPU-0/0",),
        others=(HASH, f"{HASH},{OTHER_HASH}", "sha256:AA11", "sha256:0000", "", "sha256:a b"),
    ),
    Sample(
        ("gpuwarden.io/gpu-count",),
        "2",
        {"gpus": 2},
        "2 GPUs",
        ("GPU-0/0", "GPU-1/0"),
        is_label=True,
        others=("1", "0", "two", "1.5", "-1", "50", ""),
    ),
    Sample(
        ("gpuwarden.io/gpu-map", "gpu-scheduling-map"),
        "0=node-a:1",
        {"node": "node-a", "devices": ("1",)},
        "GPU 1 of node node-a",
        ("GPU-1/0",),
        others=(
            "0=node-a:0",
            "0=node-a:0,1",
            "0=node-z:0",
            "1=node-b:0",
            "0=node-a:GPU-a1",
            "nonsense",
            "0=node-a:0\n0=node-b:0",
        ),
    ),
    Sample(
        ("gpuwarden.io/shared",),
        "true",
        {"shared": True},
        "1 GPU to share",
        ("GPU-2/0",),
        makes_claim=False,
        is_label=True,
        others=("false", "yes"),
    ),
)
# The record of the pod without the key.
ONE_GPU = ClaimRecord(gpus=1, containers=("main",))
