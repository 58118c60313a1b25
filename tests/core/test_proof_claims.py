"""Claims for GPUs together with their proofs."""

import re
from itertools import combinations

import pytest

from webhook.core.proof_claims import MAX_PAIRS, claim_spec, hash_of_template, template_name, toleration
from webhook.core.raw import Raw

DIGITS = "ab" * 32
INDICES = re.compile(
    r"device\.attributes\['attested\.gpuwarden\.io'\]\.hash == '(\w+)' && "
    r"device\.attributes\['attested\.gpuwarden\.io'\]\.mode == 'native' && "
    r"device\.attributes\['attested\.gpuwarden\.io'\]\.index >= (\d+) && "
    r"device\.attributes\['attested\.gpuwarden\.io'\]\.index <= (-\d+) \+ "
    r"device\.attributes\['attested\.gpuwarden\.io'\]\.count"
)


def spec(count: int, *, evicts: bool = True) -> Raw:
    claim = claim_spec(count, DIGITS, gpu_driver="gpu.nvidia.com", gpu_class="gpus", evicts=evicts)
    found: Raw = claim["devices"]
    return found


def selects(request: Raw, index: int, count: int) -> bool:
    """Evaluates the selector of a proof."""
    found = INDICES.fullmatch(request["exactly"]["selectors"][0]["cel"]["expression"])
    assert found is not None
    assert found[1] == DIGITS
    return int(found[2]) <= index <= int(found[3]) + count


def test_each_gpu_is_tied_to_a_proof_of_the_same_uuid() -> None:
    devices = spec(2)
    assert [one["name"] for one in devices["requests"]] == ["proof0", "gpu0", "proof1", "gpu1"]
    assert [one["exactly"]["deviceClassName"] for one in devices["requests"]] == ["attested.gpuwarden.io", "gpus"] * 2
    uuid = "gpu.nvidia.com/uuid"
    assert devices["constraints"] == [
        {"requests": ["gpu0", "proof0"], "matchAttribute": uuid},
        {"requests": ["gpu1", "proof1"], "matchAttribute": uuid},
    ]
    opaque = {"driver": "attested.gpuwarden.io", "parameters": {"hash": DIGITS}}
    assert devices["config"] == [{"requests": ["proof0", "proof1"], "opaque": opaque}]


def test_claim_with_a_fresh_challenge_takes_other_proofs() -> None:
    claim = claim_spec(1, DIGITS, gpu_driver="gpu.nvidia.com", gpu_class="gpus", evicts=True, is_challenged=True)
    selectors = [one["exactly"]["selectors"] for one in (spec(1)["requests"][0], claim["devices"]["requests"][0])]
    plain, challenged = (one[0]["cel"]["expression"] for one in selectors)
    assert plain.replace("mode == 'native'", "mode == 'challenged'") == challenged != plain


def test_largest_claim_has_as_many_requests_as_the_api_server_accepts() -> None:
    assert len(spec(MAX_PAIRS)["requests"]) == 32


@pytest.mark.parametrize(("published", "count"), [(4, 2), (5, 5), (6, 3), (1, 1)])
def test_every_choice_of_proofs_satisfies_the_selectors_in_the_order_of_indices(published: int, count: int) -> None:
    proofs = spec(count)["requests"][::2]
    for chosen in combinations(range(published), count):
        assert all(selects(one, index, published) for one, index in zip(proofs, chosen, strict=True))


def test_no_proof_is_selected_where_fewer_are_published_than_asked_for() -> None:
    assert not any(selects(one, index, 3) for one in spec(4)["requests"][::2] for index in range(3))


def test_pod_tolerates_the_end_for_no_time_or_for_ever() -> None:
    both = {"key": "gpuwarden.io/evidence-ends", "operator": "Exists", "effect": "NoExecute"}
    assert toleration(evicts=True) == {**both, "tolerationSeconds": 0}
    assert toleration(evicts=False) == both
    assert spec(1, evicts=False)["requests"][0]["exactly"]["tolerations"] == [both]


@pytest.mark.parametrize(
    ("name", "hash"),
    [
        (template_name(8, "aa11"), "aa11"),
        (template_name(16, DIGITS), DIGITS),
        (template_name(1, "aa11", is_challenged=True), "aa11"),
        (template_name(1, "bind"), "bind"),
        ("gpuwarden-0-aa11", None),
        ("gpuwarden-1-", None),
        ("gpuwarden-1-AA11", None),
        ("my-gpuwarden-1-aa11", None),
        ("gpuwarden-1-aa11-x", None),
        ("gpuwarden-1-aa11\n", None),
    ],
)
def test_hash_is_read_from_names_of_our_templates_only(name: str, hash: str | None) -> None:
    assert hash_of_template(name) == hash
