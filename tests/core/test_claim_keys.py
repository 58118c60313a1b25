"""Each key by which a pod asks for something is known in every place that has to know it."""

import re
from pathlib import Path

import pytest
from msgspec import structs

from tests.builders import HASH, OTHER_HASH, claim, device, fleet, node, pod, raw_pod
from tests.claim_samples import ONE_GPU, SAMPLES, Sample
from webhook.core.claim import Claim, ClaimRules, claim_of
from webhook.core.claim_keys import CLAIM_KEYS, INPUT_NAMES, ClaimRecord
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.near_misses import near_keys
from webhook.core.queue_order import ClaimKind
from webhook.core.verdict import Deny
from webhook.scheduler.filter import NodeQuery

DOCS = Path(__file__).resolve().parents[2] / "docs/reference/pods.md"
ORDINAL = {"apps.kubernetes.io/pod-index": "0"}
COUNT = {"gpuwarden.io/gpu-count": "1"}
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.names[0])


def record_of(sample: Sample) -> ClaimRecord:
    return structs.replace(ONE_GPU, **sample.record)


def slots(record: ClaimRecord) -> tuple[str, ...]:
    there = fleet(
        node(
            "node-a",
            device("GPU-0", index=0),
            device("GPU-1", "model=h100", index=1),
            device("GPU-2", index=2, shares=2),
        ),
        node("node-b", device("GPU-3")),
        proven={"node-a": OTHER_HASH, "node-b": HASH},
    )
    found = decide(Claim(record), there, EvidencePolicy(is_always_required=True))
    assert not isinstance(found, Deny), found.sentence
    return tuple(str(slot) for slot in found[0].slots)


def test_each_key_has_a_sample() -> None:
    declared = {key.names: (key.makes_claim, key.is_label) for key in CLAIM_KEYS}
    assert declared == {sample.names: (sample.makes_claim, sample.is_label) for sample in SAMPLES}
    assert {name for sample in SAMPLES for name in sample.names} == INPUT_NAMES


def test_each_field_of_the_record_with_the_value_of_a_key_is_in_a_sample() -> None:
    fields = {key.field.name for key in CLAIM_KEYS if key.field is not None}
    assert fields <= {name for sample in SAMPLES for name in sample.record}
    assert fields <= set(ClaimRecord.__struct_fields__)


def asked_with(sample: Sample, name: str, *, as_label: bool) -> ClaimRecord:
    """The record of a pod that asks for one GPU if the key does not give the number."""
    key = {name: sample.value}
    annotations = ({} if name in COUNT else COUNT) | ({} if as_label else key)
    return claim(raw_pod(labels=ORDINAL | (key if as_label else {}), annotations=annotations)).record


@each_sample
def test_each_key_is_parsed_under_all_names(sample: Sample) -> None:
    for name in sample.names:
        assert asked_with(sample, name, as_label=False) == record_of(sample)


@pytest.mark.parametrize("sample", [one for one in SAMPLES if one.is_label], ids=lambda sample: sample.names[0])
def test_key_of_a_label_is_parsed_from_the_label(sample: Sample) -> None:
    assert asked_with(sample, sample.names[0], as_label=True) == record_of(sample)


@pytest.mark.parametrize("sample", [one for one in SAMPLES if not one.is_label], ids=lambda sample: sample.names[0])
def test_key_of_an_annotation_has_no_effect_as_a_label(sample: Sample) -> None:
    assert asked_with(sample, sample.names[0], as_label=True) == ONE_GPU


@each_sample
def test_each_key_makes_a_claim_or_refines_one(sample: Sample) -> None:
    alone = claim_of(pod(labels=ORDINAL, annotations={sample.names[0]: sample.value}), ClaimRules())
    assert (alone is not None) == sample.makes_claim


@each_sample
def test_the_sentence_of_a_claim_names_each_key(sample: Sample) -> None:
    assert Claim(record_of(sample)).sentence == sample.sentence


@each_sample
def test_each_key_changes_the_decision(sample: Sample) -> None:
    assert slots(ONE_GPU) == ("GPU-3/0",)
    assert slots(record_of(sample)) == sample.slots != slots(ONE_GPU)


@each_sample
def test_each_key_changes_the_digest(sample: Sample) -> None:
    assert record_of(sample).digest() != ONE_GPU.digest()
    assert ClaimRecord.parse(record_of(sample).text()) == record_of(sample)


@each_sample
def test_only_the_number_of_gpus_does_not_concern_the_extender_and_the_kind_in_the_queue(sample: Sample) -> None:
    is_count = sample.record.keys() == {"gpus"}
    asked = Claim(record_of(sample))
    assert NodeQuery(asked).is_of_gpus_alone == is_count
    assert (ClaimKind.of(asked) == ClaimKind.of(Claim(ONE_GPU))) == is_count


@each_sample
def test_each_key_has_a_row_in_the_documentation(sample: Sample) -> None:
    rows = [line.split("|")[1] for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    assert any(re.search(rf"`{re.escape(sample.names[0])}[`:]", row) for row in rows)


@each_sample
def test_each_key_is_known_and_suggested_for_misspelt_ones(sample: Sample) -> None:
    name = sample.names[0]
    assert list(near_keys([name])) == []
    assert list(near_keys([f"{name}x"])) == [f"gpuwarden does not know the key {name}x: did you mean {name}?"]


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        pytest.param(
            '{"asked":{"main":1},"gpus":1}',
            "1e12116deb97586868127ac21735fe8bc8936821fdba81ff064cd1961ef72b6d",
            id="one-gpu",
        ),
        pytest.param(
            '{"asked":{"a":2,"b":1},"devices":["0"],"gpus":3,"hashes":["sha256:aa11"],"named":true,"node":"n",'
            '"requirements":["model=h100"],"shared":true}',
            "17d97cbff6c155f7d486015b39d8f502ffbac2b11fd9a0b259d62ecdb891c1b6",
            id="everything",
        ),
        pytest.param(
            '{"containers":["main"],"gpus":1,"unmapped":4}',
            "46ffde903b03318e2ec7f2530b7d871f41d5d9965d51bccc9755640e2f9441ff",
            id="not-in-the-map",
        ),
    ],
)
def test_record_of_an_older_version_is_read_and_keeps_its_digest(text: str, digest: str) -> None:
    record = ClaimRecord.parse(text)
    assert record.text() == text
    assert record.digest() == digest
