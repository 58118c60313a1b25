"""Pods whose GPUs come from a ResourceClaim carry their reservations as all others do."""

import pytest

from tests.builders import HASH, claim, created, raw_container, raw_pod, reservation, slot
from webhook.admission.audit import AuditRules
from webhook.admission.evidence_loss import BoundPod
from webhook.core.claim import ClaimRules
from webhook.core.dress import Allocation, DressRules, dressed, waiting
from webhook.core.hashes import HashPolicy
from webhook.core.injection import Injection
from webhook.core.raw import Raw
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod, reservation_mismatch

NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"
IN_DRA = ClaimRules(hash_policy=HashPolicy("ml", injection=Injection.DRA))
WISH = raw_pod(raw_container("main", gpus=2), annotations={"gpuwarden.io/required-hash": HASH})
CLAIM = claim(WISH, IN_DRA)
HELD = reservation(slot("GPU-1"), slot("GPU-2"), id="r-1", digest=CLAIM.digest)


def fit(*, has_waited: bool = False) -> Allocation:
    return Allocation(CLAIM, ("node-a",), "r-1", HELD.uuids, has_waited=has_waited, claim_name=NAME)


@pytest.fixture(params=[False, True], ids=["reserved at once", "from the queue"])
def raw(request: pytest.FixtureRequest) -> Raw:
    """A pod on its node."""
    wish = waiting(WISH, CLAIM, DressRules(), "because", claim_name=NAME) if request.param else WISH
    made = created(dressed(wish, fit(has_waited=request.param), DressRules()))
    return {**made, "spec": {**made["spec"], "nodeName": "node-a"}, "status": {"phase": "Running"}}


def test_reservation_is_read_from_the_pod(raw: Raw) -> None:
    found = ReservedPod.of(raw)
    assert found is not None
    assert found.carries(HELD)
    assert (found.uuids, found.claim_digest, found.is_on_node) == (HELD.uuids, HELD.claim_digest, True)
    assert reservation_mismatch(raw, HELD) is None


def test_pod_without_its_annotations_is_still_known_to_use_its_gpus(raw: Raw) -> None:
    bare = {**raw, "metadata": {**raw["metadata"], "annotations": {}}}
    assert PodSnapshot.of(bare).may_use_gpus_of(HELD)


def test_audit_finds_nothing_at_a_pod_with_its_claim(raw: Raw) -> None:
    found = AuditRules(ClaimRules(), DressRules()).pod(raw)
    assert found is not None
    assert found.reserved_pod is not None
    assert (found.asks, found.unblinded, found.exposed, found.slow) == ("", (), (), "")


def test_evidence_of_its_node_is_watched(raw: Raw) -> None:
    found = BoundPod.of(raw, ClaimRules())
    assert found is not None
    assert (set(found.claim.hashes), found.is_bound) == ({HASH}, False)
