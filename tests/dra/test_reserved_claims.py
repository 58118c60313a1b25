"""The claims of pods whose GPUs are reserved: when they are made, for whom, and what they ask for."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.builders import (
    HASH,
    NOW,
    OTHER_HASH,
    Raw,
    claim,
    created,
    device,
    evidence,
    node,
    raw_container,
    raw_pod,
    slot,
)
from tests.builders import reservation as built_reservation
from tests.recorded_events import RecordedEvents
from webhook.core.claim import ClaimRules
from webhook.core.claim_keys import ClaimRecord
from webhook.core.dress import Allocation, DressRules, dressed, left_to_scheduler, waiting
from webhook.core.fleet import Fleet
from webhook.core.gpu_map import SetId
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy
from webhook.core.injection import Injection
from webhook.core.proof_claims import reserved_claim_spec
from webhook.core.reasons import Reason
from webhook.core.reservation import Orphan, Phase, Reservation
from webhook.core.reserve import Reserve
from webhook.dra.reserved_claims import CHECKED_EVERY, ClaimForm, OnEveryChange, ReservedClaims
from webhook.kube.requests import ApiUnavailableError

NAME = "gpuwarden-0b2f3c46-0000-4000-8000-00000000000a"
IN_DRA = ClaimRules(hash_policy=HashPolicy("ml", injection=Injection.DRA))
FORM = ClaimForm(
    "gpu.nvidia.com", "gpu.nvidia.com", "mig.nvidia.com", has_proofs=True, evicts=True, needs_evidence=False
)
UUID_OF = "device.attributes['gpu.nvidia.com'].uuid == '{}'"
OWN = "device.attributes['attested.gpuwarden.io']"


class FakeClaims:
    """The API server's claims by name. `fails` refuses requests, `loses_answers` carries them out without an answer."""

    def __init__(self) -> None:
        self.claims: dict[str, Raw] = {}
        self.requests: list[str] = []
        self.fails = self.loses_answers = self.vanishes = False

    async def create(self, raw: Raw) -> Raw | None:
        self.requests.append(f"create {raw['metadata']['name']}")
        if self.fails:
            raise ApiUnavailableError("away")
        name = raw["metadata"]["name"]
        if self.vanishes:
            return None
        if name not in self.claims:
            self.claims[name] = {**raw, "metadata": {**raw["metadata"], "uid": f"uid-of-{name}"}}
        if self.loses_answers:
            raise ApiUnavailableError("no answer")
        return self.claims[name]

    async def get(self, namespace: str, name: str) -> Raw | None:
        self.requests.append(f"get {name}")
        if self.fails:
            raise ApiUnavailableError("away")
        return self.claims.get(name)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        self.requests.append(f"delete {name} {uid}")
        if self.fails:
            raise ApiUnavailableError("away")
        if name in self.claims and self.claims[name]["metadata"]["uid"] == uid:
            del self.claims[name]


class Scene:
    """An elected writer, one node with evidence, and reservations by the uids of their pods."""

    def __init__(self, form: ClaimForm = FORM) -> None:
        self.now, self.is_current = NOW, True
        self.policy: HashPolicy | None = None
        self.fleet = Fleet(injection=Injection.DRA)
        self.fleet.put(node("node-a", device("GPU-1"), device("GPU-2")), NOW)
        self.proves(HASH)
        self.objects, self.heard = FakeClaims(), RecordedEvents()
        self.ledger: dict[str, Reservation] = {}
        self.claims = self.another(form)

    def another(self, form: ClaimForm = FORM) -> ReservedClaims:
        return ReservedClaims(
            self.objects, self.ledger.get, self.fleet, self.heard, lambda: self.now, form, lambda: self.is_current
        )

    def proves(self, digest: str | None) -> None:
        self.fleet.set_evidence("node-a", None if digest is None else evidence("node-a", digest), NOW)

    def reserve(self, raw: Raw, **members: Any) -> None:
        meta = raw["metadata"]
        uuids = meta["annotations"]["gpuwarden.io/gpu-uuid"].split(",")
        given = {"id": "r-1", "phase": Phase.FINALIZED, "uid": meta["uid"], "digest": digest_of(raw), **members}
        self.ledger[meta["uid"]] = built_reservation(*map(slot, uuids), **given)

    def come(self, raw: Raw, **members: Any) -> None:
        """The pod exists and has its reservation."""
        self.reserve(raw, **members)
        self.claims.changed(raw)

    async def step(self, after: timedelta = timedelta()) -> list[str]:
        """The requests of one pass."""
        self.now += after
        self.objects.requests.clear()
        await self.claims.step()
        return list(self.objects.requests)


def wished(*uuids: str, hash: str | None = HASH, name: str = NAME, **members: Any) -> Raw:
    asked = {"gpuwarden.io/required-hash": hash} if hash else {}
    wish = raw_pod(raw_container("main", gpus=len(uuids)), annotations=asked)
    fit = Allocation(claim(wish, IN_DRA), ("node-a",), "r-1", uuids, claim_name=name)
    raw = created(dressed(wish, fit, DressRules()))
    raw["metadata"] |= members.pop("metadata", {})
    raw["spec"] |= members
    return raw


def digest_of(raw: Raw) -> str:
    return ClaimRecord.parse(raw["metadata"]["annotations"]["gpuwarden.io/claim"]).digest()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def selectors(raw: Raw) -> dict[str, str]:
    requests = raw["spec"]["devices"]["requests"]
    return {one["name"]: one["exactly"]["selectors"][0]["cel"]["expression"] for one in requests}


async def test_claim_takes_the_reserved_gpus_with_their_proofs(scene: Scene) -> None:
    raw = wished("GPU-2", "GPU-1")
    scene.come(raw)
    assert scene.claims.wakeup.is_set()
    assert await scene.step() == [f"create {NAME}"]
    made = scene.objects.claims[NAME]
    meta = raw["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
    assert made["metadata"]["ownerReferences"] == [{**owner, "controller": True, "blockOwnerDeletion": True}]
    assert made["metadata"]["namespace"] == meta["namespace"]
    assert made["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "gpuwarden",
        "gpuwarden.io/gpu-claim": "true",
    }
    proof = f"{OWN}.hash == 'aa11' && {OWN}.mode == 'dra' && "
    assert selectors(made) == {
        "proof0": proof + UUID_OF.format("GPU-1"),
        "gpu0": UUID_OF.format("GPU-1"),
        "proof1": proof + UUID_OF.format("GPU-2"),
        "gpu1": UUID_OF.format("GPU-2"),
    }
    devices = made["spec"]["devices"]
    assert [one["requests"] for one in devices["constraints"]] == [["gpu0", "proof0"], ["gpu1", "proof1"]]
    assert {one["matchAttribute"] for one in devices["constraints"]} == {"gpu.nvidia.com/uuid"}
    assert devices["config"][0]["requests"] == ["proof0", "proof1"]
    tolerations = [one["exactly"].get("tolerations") for one in devices["requests"]]
    assert [one and one[0]["tolerationSeconds"] for one in tolerations] == [0, None, 0, None]


async def test_mig_device_is_taken_by_the_class_of_mig_devices(scene: Scene) -> None:
    mig = "MIG-11111111-0000-4000-8000-000000000001"
    scene.come(wished("GPU-1", mig))
    await scene.step()
    requests = scene.objects.claims[NAME]["spec"]["devices"]["requests"]
    assert [(one["name"], one["exactly"]["deviceClassName"]) for one in requests] == [
        ("proof0", "attested.gpuwarden.io"),
        ("gpu0", "gpu.nvidia.com"),
        ("proof1", "attested.gpuwarden.io"),
        ("gpu1", "mig.nvidia.com"),
    ]
    assert selectors(scene.objects.claims[NAME])["gpu1"] == UUID_OF.format(mig)


async def test_without_proof_devices_the_claim_takes_gpus_only() -> None:
    scene = Scene(ClaimForm("gpu.nvidia.com", "class", "mig-class", has_proofs=False, evicts=True, needs_evidence=True))
    scene.proves(None)
    scene.come(wished("GPU-1"))
    await scene.step()
    made = scene.objects.claims[NAME]
    assert made["spec"] == {
        "devices": {
            "requests": [
                {
                    "name": "gpu0",
                    "exactly": {
                        "deviceClassName": "class",
                        "selectors": [{"cel": {"expression": UUID_OF.format("GPU-1")}}],
                    },
                }
            ]
        }
    }


@pytest.mark.parametrize(
    ("hash", "proven", "needs", "is_made"),
    [
        (HASH, HASH, False, True),
        (HASH, OTHER_HASH, False, False),
        (HASH, None, False, False),
        (None, None, False, True),
        (None, None, True, False),
        (None, OTHER_HASH, True, True),
    ],
)
async def test_claim_waits_for_the_evidence_that_the_pod_needs(
    hash: str | None, proven: str | None, needs: bool, is_made: bool
) -> None:
    scene = Scene(
        ClaimForm("gpu.nvidia.com", "class", "mig-class", has_proofs=True, evicts=False, needs_evidence=needs)
    )
    scene.proves(proven)
    scene.come(wished("GPU-1", hash=hash))
    await scene.step()
    assert (NAME in scene.objects.claims) is is_made
    scene.proves(HASH)
    await scene.step()
    assert NAME in scene.objects.claims


# Pods that get no claim.


@pytest.mark.parametrize(
    "held",
    [
        {"uid": "another"},
        {"id": "r-2"},
        {"digest": "another"},
        {"namespace": "other"},
        {"phase": Phase.RELEASING},
    ],
    ids=str,
)
async def test_pod_without_this_reservation_gets_no_claim(scene: Scene, held: Raw) -> None:
    scene.come(wished("GPU-1"), **held)
    assert await scene.step() == []


async def test_pod_without_a_reservation_gets_its_claim_once_the_reservation_is_known(scene: Scene) -> None:
    raw = wished("GPU-1")
    scene.claims.changed(raw)
    assert await scene.step() == []
    scene.reserve(raw)
    scene.claims.wakeup.clear()
    listener = OnEveryChange(scene.claims.wake)
    listener.changed({})
    assert scene.claims.wakeup.is_set()
    assert await scene.step() == [f"create {NAME}"]


async def test_orphan_gets_no_claim(scene: Scene) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    held = scene.ledger[raw["metadata"]["uid"]]
    scene.ledger[raw["metadata"]["uid"]] = held.orphaned(Orphan(NOW, timedelta()))
    assert await scene.step() == []


@pytest.mark.parametrize(
    "members",
    [
        {"nodeName": "node-a"},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"resourceClaims": [{"name": "gpuwarden", "resourceClaimName": "another"}]},
        {"resourceClaims": [{"name": "gpuwarden", "resourceClaimTemplateName": NAME}]},
        {"schedulingGates": [{"name": "gpuwarden.io/queue"}]},
    ],
    ids=str,
)
async def test_pod_that_needs_no_claim_gets_none(scene: Scene, members: Raw) -> None:
    scene.come(wished("GPU-1", **members))
    assert await scene.step() == []


async def test_queued_pod_gets_its_claim_when_its_gate_is_open(scene: Scene) -> None:
    wish = raw_pod(raw_container("main", gpus=1))
    asked = claim(wish, IN_DRA)
    gated = created(waiting(wish, asked, DressRules(), "because", claim_name=NAME))
    scene.claims.changed(gated)
    assert await scene.step() == []
    fit = Allocation(asked, ("node-a",), "r-1", ("GPU-1",), has_waited=True, claim_name=NAME)
    scene.come(dressed(gated, fit, DressRules()))
    assert await scene.step() == [f"create {NAME}"]


async def test_nothing_is_written_on_old_data(scene: Scene) -> None:
    scene.come(wished("GPU-1"))
    scene.is_current = False
    assert await scene.step() == []


# Repetitions and failures.


async def test_claim_is_made_once_and_checked_again_later(scene: Scene) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    scene.claims.changed(raw)
    assert await scene.step() == []
    assert await scene.step(CHECKED_EVERY) == [f"create {NAME}"]
    del scene.objects.claims[NAME]
    await scene.step(CHECKED_EVERY)
    assert NAME in scene.objects.claims
    assert scene.heard.recorded == []
    scene.claims.changed({**raw, "spec": {**raw["spec"], "nodeName": "node-a"}})
    assert await scene.step(CHECKED_EVERY) == []


@pytest.mark.parametrize("failure", ["fails", "loses_answers"])
async def test_failed_request_is_repeated_after_a_pause(scene: Scene, failure: str) -> None:
    setattr(scene.objects, failure, True)
    scene.come(wished("GPU-1"))
    await scene.step()
    assert await scene.step() == []
    setattr(scene.objects, failure, False)
    assert await scene.step(timedelta(seconds=1)) == [f"create {NAME}"]
    assert NAME in scene.objects.claims
    assert scene.heard.recorded == []


async def test_claim_that_is_deleted_in_between_is_made_in_the_next_pass(scene: Scene) -> None:
    scene.objects.vanishes = True
    scene.come(wished("GPU-1"))
    await scene.step()
    scene.objects.vanishes = False
    assert await scene.step() == [f"create {NAME}"]
    assert NAME in scene.objects.claims


async def test_restarted_process_finds_its_claim(scene: Scene) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    made = scene.objects.claims[NAME]
    scene.proves(OTHER_HASH)  # a claim is not made again when the evidence has changed
    scene.proves(HASH)
    scene.claims = scene.another()
    scene.claims.replaced({"train": raw})
    assert await scene.step() == [f"create {NAME}"]
    assert scene.objects.claims == {NAME: made}
    assert scene.heard.recorded == []


async def test_newly_elected_process_checks_each_claim(scene: Scene) -> None:
    scene.come(wished("GPU-1"))
    await scene.step()
    scene.claims.begin()
    assert await scene.step() == [f"create {NAME}"]


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "another", "controller": True}]},
        {"labels": None},
    ],
    ids=str,
)
async def test_claim_of_another_is_reported_and_left_alone(scene: Scene, change: Raw) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    made = scene.objects.claims[NAME]
    foreign = scene.objects.claims[NAME] = {**made, "metadata": {**made["metadata"], **change}}
    scene.claims = scene.another()
    scene.come(raw)
    await scene.step()
    assert scene.objects.claims == {NAME: foreign}
    assert scene.heard.recorded == [(raw["metadata"]["name"], Reason.RESOURCE_CLAIM_TAKEN)]
    assert NAME in scene.heard.messages[0]
    # It is not withdrawn with the reservation either.
    scene.ledger.clear()
    await scene.step(CHECKED_EVERY)
    assert await scene.step(CHECKED_EVERY) == [f"get {NAME}"]
    assert scene.objects.claims == {NAME: foreign}


@pytest.mark.parametrize("spec", [{}, {"devices": {"requests": ["x"]}}, {"devices": "x"}], ids=str)
async def test_claim_that_cannot_be_read_is_reported(scene: Scene, spec: Raw) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    scene.objects.claims[NAME]["spec"] = spec
    await scene.step(CHECKED_EVERY)
    assert scene.heard.recorded == [(raw["metadata"]["name"], Reason.RESOURCE_CLAIM_TAKEN)]


def without_constraints(devices: Raw) -> None:
    del devices["constraints"]


def without_selector(devices: Raw) -> None:
    del devices["requests"][1]["exactly"]["selectors"]


def without_seconds(devices: Raw) -> None:
    del devices["requests"][0]["exactly"]["tolerations"][0]["tolerationSeconds"]


def without_parameters(devices: Raw) -> None:
    del devices["config"]


def for_another_hash(devices: Raw) -> None:
    classes = {"gpu_class": "gpu.nvidia.com", "mig_class": "mig.nvidia.com"}
    other = reserved_claim_spec(["GPU-1"], "bb22", gpu_driver="gpu.nvidia.com", evicts=True, **classes)
    devices |= other["devices"]


@pytest.mark.parametrize(
    "change", [without_constraints, without_selector, without_seconds, without_parameters, for_another_hash]
)
async def test_claim_that_another_has_changed_is_deleted_and_reported(
    scene: Scene, change: Callable[[Raw], None]
) -> None:
    """A webhook for ResourceClaims may change it on the way."""
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    change(scene.objects.claims[NAME]["spec"]["devices"])
    assert await scene.step(CHECKED_EVERY) == [f"create {NAME}", f"delete {NAME} uid-of-{NAME}"]
    assert scene.heard.recorded == [(raw["metadata"]["name"], Reason.RESOURCE_CLAIM_TAKEN)]
    assert "a webhook or a policy has changed what it asks for" in scene.heard.messages[0]
    # It is made again later.
    assert await scene.step() == []
    assert await scene.step(CHECKED_EVERY) == [f"create {NAME}"]
    assert len(scene.heard.recorded) == 1


async def test_claim_with_the_defaults_of_the_api_server_is_as_written(scene: Scene) -> None:
    scene.come(wished("GPU-1"))
    await scene.step()
    for one in scene.objects.claims[NAME]["spec"]["devices"]["requests"]:
        one["exactly"] |= {"allocationMode": "ExactCount", "count": 1}
    assert await scene.step(CHECKED_EVERY) == [f"create {NAME}"]
    assert scene.heard.recorded == []


async def test_claim_whose_hash_has_changed_is_the_pods_own(scene: Scene) -> None:
    scene.come(wished("GPU-1", hash=None))
    await scene.step()
    scene.proves(OTHER_HASH)
    await scene.step(CHECKED_EVERY)
    assert scene.heard.recorded == []


async def test_second_pod_of_one_claim_gets_none(scene: Scene) -> None:
    scene.come(wished("GPU-1"))
    await scene.step()
    second = wished("GPU-2", metadata={"uid": "uid-2", "name": "second"})
    scene.come(second)
    await scene.step()
    assert selectors(scene.objects.claims[NAME])["gpu0"] == UUID_OF.format("GPU-1")
    assert scene.heard.recorded == [("second", Reason.RESOURCE_CLAIM_TAKEN)]


# Withdrawal.


async def test_claim_of_a_pod_that_lost_its_reservation_is_deleted(scene: Scene) -> None:
    """A pod that was not bound in time may stay. Its claim would keep a GPU that others can reserve."""
    scene.come(wished("GPU-1"))
    await scene.step()
    scene.ledger.clear()
    scene.objects.fails = True
    await scene.step(CHECKED_EVERY)
    scene.objects.fails = False
    assert await scene.step(CHECKED_EVERY) == [f"delete {NAME} uid-of-{NAME}"]
    assert await scene.step() == []


async def test_claim_that_an_earlier_leader_has_left_is_deleted(scene: Scene) -> None:
    """Not at once: the reservation of a new pod may not be known yet."""
    raw = wished("GPU-1")
    scene.come(raw)
    await scene.step()
    scene.ledger.clear()
    scene.claims = scene.another()
    scene.claims.changed(raw)
    assert await scene.step() == []
    assert await scene.step(CHECKED_EVERY) == [f"get {NAME}", f"delete {NAME} uid-of-{NAME}"]
    assert await scene.step() == []
    scene.reserve(raw)
    assert await scene.step() == [f"create {NAME}"]


@pytest.mark.parametrize("is_listed", [False, True])
async def test_deleted_pod_is_forgotten(scene: Scene, is_listed: bool) -> None:
    raw = wished("GPU-1")
    scene.come(raw)
    if is_listed:
        scene.claims.replaced({})
    else:
        scene.claims.deleted(raw)
    assert await scene.step() == []


# Claims of pods whose GPUs kube-scheduler chooses.


def demanding(hashes: str = f"{OTHER_HASH},{HASH}", **meta: Any) -> Raw:
    wish = raw_pod(raw_container("main", gpus=1), annotations={"gpuwarden.io/required-hash": hashes})
    rules = ClaimRules(default_injection=Injection.DRA, default_reserve=Reserve.BIND)
    raw = created(left_to_scheduler(wish, claim(wish, rules), DressRules(), NAME))
    raw["metadata"] |= meta
    return raw


def within(policy: HashPolicy | None) -> Scene:
    scene = Scene()
    scene.policy = policy
    scene.claims = ReservedClaims(
        scene.objects,
        scene.ledger.get,
        scene.fleet,
        scene.heard,
        lambda: scene.now,
        FORM,
        lambda: scene.is_current,
        lambda _: scene.policy,
    )
    return scene


async def test_claim_of_a_pod_without_a_reservation_takes_what_its_record_asks_for() -> None:
    scene = within(NO_HASH_POLICY)
    scene.claims.changed(demanding())
    assert scene.claims.wakeup.is_set()
    assert await scene.step() == [f"create {NAME}"]
    found = scene.objects.claims[NAME]["spec"]["devices"]["requests"]
    assert [one["name"] for one in found] == ["proof0", "gpu0"]
    (selector,) = found[0]["exactly"]["selectors"]
    assert selector["cel"]["expression"].startswith(f"{OWN}.hash in ['aa11', 'bb22'] && {OWN}.mode == 'native' && ")
    assert "selectors" not in found[1]["exactly"]
    assert await scene.step(CHECKED_EVERY) == [f"create {NAME}"]


async def test_claim_takes_only_hashes_that_the_namespace_allows_now() -> None:
    scene = within(HashPolicy("ml", (HASH,)))
    scene.claims.changed(demanding())
    assert await scene.step() == [f"create {NAME}"]
    assert "bb22" not in str(scene.objects.claims[NAME])


@pytest.mark.parametrize(
    ("policy", "raw"),
    [
        (None, demanding()),
        (HashPolicy("ml", ("sha256:cc33",)), demanding()),
        (HashPolicy("ml", (), ("mistake",)), demanding()),
        (NO_HASH_POLICY, demanding(HASH)),
        (NO_HASH_POLICY, demanding(deletionTimestamp="2026-01-01T00:00:00Z")),
    ],
    ids=["not opted in", "another hash", "a mistake of the namespace", "a template", "deleted"],
)
async def test_no_claim_is_made(policy: HashPolicy | None, raw: Raw) -> None:
    scene = within(policy)
    scene.claims.changed(raw)
    assert await scene.step() == []


def of_map(uid: str | None) -> Raw:
    """A pod whose map names GPU-1, of a StatefulSet with this uid."""
    record = {"gpus": 1, "injection": "dra", "reserve": "bind", "node": "node-a", "devices": ["GPU-1"]}
    owners = [] if uid is None else [{"kind": "StatefulSet", "name": "web", "uid": uid, "controller": True}]
    raw = demanding(ownerReferences=owners)
    raw["metadata"]["annotations"]["gpuwarden.io/claim"] = json.dumps(record)
    return raw


@pytest.mark.parametrize(
    ("uid", "modes"),
    [("own", f"in ['native', 'mapped-{SetId('own', 'ml').digest}']"), (None, "== 'native'")],
    ids=["of a set", "of none"],
)
async def test_claim_for_a_map_takes_a_gpu_that_is_kept_for_its_own_stateful_set_only(
    uid: str | None, modes: str
) -> None:
    scene = within(NO_HASH_POLICY)
    scene.claims.changed(of_map(uid))
    assert await scene.step() == [f"create {NAME}"]
    assert selectors(scene.objects.claims[NAME])["proof0"] == f"{OWN}.mode {modes} && {UUID_OF.format('GPU-1')}"


def test_stateful_sets_of_two_namespaces_are_told_apart() -> None:
    """A pod can name any uid in its owner references."""
    assert SetId("own", "ml").digest != SetId("own", "another-namespace").digest


@pytest.mark.parametrize("policy", [None, HashPolicy("ml", ("sha256:cc33",))], ids=["not opted in", "another hash"])
@pytest.mark.parametrize("is_elected", [False, True])
async def test_claim_is_withdrawn_when_its_namespace_no_longer_allows_it(
    policy: HashPolicy | None, is_elected: bool
) -> None:
    scene = within(NO_HASH_POLICY)
    raw = demanding()
    scene.claims.changed(raw)
    assert await scene.step() == [f"create {NAME}"]
    if is_elected:
        made, scene = scene.objects.claims, within(policy)
        scene.objects.claims |= made
        scene.claims.changed(raw)
    else:
        scene.policy = policy
    for _ in range(2):
        await scene.step(CHECKED_EVERY)
    assert scene.objects.claims == {}


async def test_forged_record_makes_no_claim() -> None:
    scene, raw = within(NO_HASH_POLICY), demanding()
    for forged in (
        {"gpus": 1, "injection": "dra", "reserve": "bind", "requirements": ["model=' || true || '"]},
        {"gpus": 17, "injection": "dra", "reserve": "bind"},
        {"gpus": 1, "injection": "dra"},
    ):
        raw["metadata"]["annotations"]["gpuwarden.io/claim"] = json.dumps(forged)
        scene.claims.changed(raw)
        assert await scene.step() == []
