"""Native pods: the names of the templates that their claims are made from."""

import pytest

from webhook.core.native import MAX_GPUS, NativeClaim

HASH = "ab" * 32


@pytest.mark.parametrize("count", [1, MAX_GPUS])
@pytest.mark.parametrize("hash", ["a", "0", HASH])
def test_name_of_a_template_says_what_its_claim_takes(count: int, hash: str) -> None:
    for is_challenged, suffix in ((False, ""), (True, "-bind")):
        claim = NativeClaim(count, hash, is_challenged)
        assert claim.template == f"gpuwarden-{count}-{hash}{suffix}"
        assert NativeClaim.named(claim.template) == claim


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mine",
        "gpuwarden",
        "gpuwarden-1-",
        "gpuwarden-0-ab",
        "gpuwarden-9-ab",
        "gpuwarden-10-ab",
        "gpuwarden-1-AB",
        "gpuwarden-1-a.b",
        "gpuwarden-1-a-b",
        "gpuwarden-1--bind",
        "gpuwarden-1-a-bind-bind",
        f"gpuwarden-1-{HASH}a",
        "gpuwarden-1-ab\n",
        "x-gpuwarden-1-ab",
    ],
)
def test_other_names_are_not_templates_of_native_pods(name: str) -> None:
    assert NativeClaim.named(name) is None


def test_claim_of_a_pod_is_the_one_that_is_made_from_our_template() -> None:
    others = [{"name": "a", "resourceClaimName": "gpuwarden-1-ab"}, {"name": "b", "resourceClaimTemplateName": "nics"}]
    ours = {"name": "gpuwarden", "resourceClaimTemplateName": "gpuwarden-2-ab"}
    assert NativeClaim.of([*others, ours]) == NativeClaim(2, "ab")
    assert NativeClaim.of(others) is None
    assert NativeClaim.of([{}, {"resourceClaimTemplateName": None}, {"resourceClaimTemplateName": 1}]) is None
    assert NativeClaim.of(None) is None
