"""What a namespace holds its pods to: a pod may narrow it, never widen it."""

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
def test_a_pod_is_held_to_what_its_namespace_allows(
    own: tuple[str, ...], namespace: tuple[str, ...], resulting: tuple[str, ...]
) -> None:
    assert claim(asking(*own), bound(*namespace)).record.hashes == resulting
    if own:
        assert claim(asking(*own, gpus=0), bound(*namespace)).record.hashes == resulting


def test_a_pod_that_names_only_others_is_refused_with_both() -> None:
    with pytest.raises(InvalidPodError) as refused:
        claim_of(Pod.parse(asking(THIRD)), bound(HASH, OTHER_HASH))
    assert refused.value.mistakes == (
        f"annotation {KEY} asks for {THIRD}, and namespace ml holds its pods to {HASH} or {OTHER_HASH}: "
        "a pod may choose among those, or name none",
    )


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "holds an empty hash: name one or take it away"),
        (f"{HASH},", "holds an empty hash: name one or take it away"),
        (f" {HASH}", f"' {HASH}' holds white space"),
        ("x" * 257, "a hash has at most 256 characters"),
        (",".join(f"h{n}" for n in range(65)), "names 65 hashes, at most 64"),
    ],
    ids=["nothing", "an empty one", "white space", "too long", "too many"],
)
def test_what_nobody_can_read_on_a_namespace_lets_no_claim_through(text: str, mistake: str) -> None:
    rules = ClaimRules(hash_policy=HashPolicy.of("ml", {KEY: text}))
    with pytest.raises(InvalidPodError) as refused:
        claim_of(Pod.parse(asking(HASH)), rules)
    assert len(refused.value.mistakes) == 1
    assert refused.value.mistakes[0].startswith(f"namespace ml: its annotation {KEY}")
    assert refused.value.mistakes[0].endswith(mistake)


@pytest.mark.parametrize("text", [HASH, ""], ids=["a hash", "unreadable"])
def test_a_pod_without_a_claim_is_nobodys_business(text: str) -> None:
    assert claim_of(Pod.parse(raw_pod()), ClaimRules(hash_policy=HashPolicy.of("ml", {KEY: text}))) is None


def test_a_namespace_that_says_nothing_changes_nothing() -> None:
    assert HashPolicy.of("ml", {"team": "vision"}) is NO_HASH_POLICY
    assert claim(asking(), bound(HASH)) != claim(asking(), ClaimRules())
    assert claim(asking(THIRD), ClaimRules()).record.hashes == (THIRD,)
