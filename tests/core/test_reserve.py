"""When GPUs are chosen: what is recorded, and what a record means where the setting has changed."""

import pytest

from tests.builders import HASH, claim, raw_container, raw_pod
from webhook.core.claim import ClaimRules
from webhook.core.dress import DressRules
from webhook.core.errors import InvalidPodError
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.reserve import Reserve, recorded_reserve, reserve_of

CREATE, BIND = Reserve
BINDING = ClaimRules(default_injection=Injection.DRA, default_reserve=BIND)


@pytest.mark.parametrize("setting", Reserve)
def test_record_gives_the_setting_back(setting: Reserve) -> None:
    assert reserve_of(recorded_reserve(setting)) is setting


def test_only_bind_is_recorded() -> None:
    assert [recorded_reserve(one) for one in Reserve] == [None, "bind"]


def test_value_of_a_newer_version_is_a_mistake() -> None:
    with pytest.raises(InvalidPodError, match="'start' is not known; allowed are create, bind"):
        reserve_of("start")


def test_claims_for_gpus_record_the_setting_and_others_do_not() -> None:
    assert claim(raw_pod(raw_container(gpus=1)), BINDING).record.reserve == "bind"
    assert claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}), BINDING).record.reserve is None


@pytest.mark.parametrize(("injection", "expected"), [("nvidia", True), ("cuda", True), ("dra", False)])
def test_gpus_are_reserved_at_the_binding_unless_kube_scheduler_allocates_them(injection: str, expected: bool) -> None:
    rules = ClaimRules(hash_policy=HashPolicy.of("ml", {"gpuwarden.io/injection": injection}), default_reserve=BIND)
    assert claim(raw_pod(raw_container(gpus=1)), rules).is_reserved_at_binding is expected
    assert not claim(raw_pod(annotations={"gpuwarden.io/required-hash": HASH}), rules).is_reserved_at_binding


@pytest.mark.parametrize("setting", Reserve)
def test_pod_keeps_what_it_was_created_with(setting: Reserve) -> None:
    made = claim(raw_pod(raw_container(gpus=1)), BINDING)
    assert DressRules(reserve=setting).of(made).reserve is BIND
    assert DressRules(reserve=setting).of(claim(raw_pod(raw_container(gpus=1)))).reserve is CREATE
