"""The hashes that a namespace allows: a pod may name fewer, never others."""

import pytest

from tests.builders import HASH, OTHER_HASH, Raw, claim, raw_container, raw_pod
from webhook.core.claim import ClaimRules, claim_of
from webhook.core.errors import InvalidPodError
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.pod import Pod

KEY = "gpuwarden.io/required-hash"
THIRD = "sha256:cc33"


def bound(*hashes: str) -> ClaimRules:
    return ClaimRules(hash_policy=HashPolicy.of("ml", {KEY: ",".join(hashes)}))


def asking(*hashes: str, gpus: int = 1) -> Raw:
    return raw_pod(raw_container(gpus=gpus), annotations={KEY: ",".join(hashes)} if hashes else {})


@pytest.mark.parametrize(
    ("own", "namespace", "resulting"),
    [
        pytest.param((), (HASH,), (HASH,), id="a-pod-that-names-none-is-held-to-the-namespaces"),
        pytest.param((), (OTHER_HASH, HASH), (HASH, OTHER_HASH), id="to-any-of-them"),
        pytest.param((HASH,), (HASH, OTHER_HASH), (HASH,), id="a-pod-narrows"),
        pytest.param((HASH, THIRD), (HASH, OTHER_HASH), (HASH,), id="what-would-widen-falls-away"),
    ],
)
def test_claim_accepts_only_hashes_that_the_namespace_allows(
    own: tuple[str, ...], namespace: tuple[str, ...], resulting: tuple[str, ...]
) -> None:
    assert claim(asking(*own), bound(*namespace)).record.hashes == resulting
    if own:
        assert claim(asking(*own, gpus=0), bound(*namespace)).record.hashes == resulting


def test_pod_with_only_disallowed_hashes_is_denied() -> None:
    with pytest.raises(InvalidPodError) as refused:
        claim_of(Pod.parse(asking(THIRD)), bound(HASH, OTHER_HASH))
    assert refused.value.mistakes == (
        f"annotation {KEY} asks for {THIRD}, but namespace ml allows only {HASH} or {OTHER_HASH}: "
        "name one of those, or none",
    )


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "has an empty hash: add a value or remove it"),
        (f"{HASH},", "has an empty hash: add a value or remove it"),
        (f" {HASH}", f"' {HASH}' contains white space"),
        ("x" * 257, "a hash has at most 256 characters"),
        (",".join(f"h{n}" for n in range(65)), "has 65 hashes; the maximum is 64"),
    ],
    ids=["nothing", "an empty one", "white space", "too long", "too many"],
)
def test_invalid_hash_annotation_of_a_namespace_denies_every_claim(text: str, mistake: str) -> None:
    rules = ClaimRules(hash_policy=HashPolicy.of("ml", {KEY: text}))
    with pytest.raises(InvalidPodError) as refused:
        claim_of(Pod.parse(asking(HASH)), rules)
    assert len(refused.value.mistakes) == 1
    assert refused.value.mistakes[0].startswith(f"namespace ml: its annotation {KEY}")
    assert refused.value.mistakes[0].endswith(mistake)


@pytest.mark.parametrize("text", [HASH, ""], ids=["a hash", "unreadable"])
def test_namespace_hashes_do_not_apply_to_pods_without_a_claim(text: str) -> None:
    assert claim_of(Pod.parse(raw_pod()), ClaimRules(hash_policy=HashPolicy.of("ml", {KEY: text}))) is None


def test_namespace_without_annotation_allows_all_hashes() -> None:
    assert HashPolicy.of("ml", {"team": "vision"}) is NO_HASH_POLICY
    assert claim(asking(), bound(HASH)) != claim(asking(), ClaimRules())
    assert claim(asking(THIRD), ClaimRules()).record.hashes == (THIRD,)
