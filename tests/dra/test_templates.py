"""The reconciler keeps the ResourceClaimTemplates of native pods: few writes, and none by others."""

import asyncio
import copy
from datetime import timedelta
from itertools import count as numbers

import pytest

from tests.builders import NOW, SECOND, Raw
from webhook.admission.placement_maps import opted_in
from webhook.core.device import Device, DeviceUuid, Node
from webhook.core.evidence import Evidence
from webhook.core.fleet import Fleet
from webhook.core.keys import OPT_IN
from webhook.core.native import NativeClaim
from webhook.core.proof_claims import claim_spec
from webhook.dra.templates import (
    BATCH_SIZE,
    CHECK_INTERVAL,
    CHECKS_PER_PASS,
    KEPT,
    MAX_FAILURES,
    ClaimTemplates,
)
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError

HASH = "sha256:aa11"
LABELLED = {"labels": {"gpuwarden.io/gpu-claim": "true"}}
OURS = {"app.kubernetes.io/managed-by": "gpuwarden"}


def spec_of(claim: NativeClaim) -> Raw:
    return claim_spec(claim.count, claim.hash, gpu_driver="gpu.test", gpu_class="gpu.test", evicts=True)


class FakeTemplates:
    """Templates as the API server stores them. The watch tells of writes when the test says so."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Raw] = {}
        self.done: list[str] = []
        self.events: list[tuple[str, Raw]] = []
        self.is_away = False
        self.conflicts = 0
        self.refuses: set[str] = set()
        self.fails: set[str] = set()
        self.failures = 0
        self._uids = numbers()

    async def create(self, namespace: str, raw: Raw) -> Raw | None:
        self._answer(namespace)
        if (namespace, raw["metadata"]["name"]) in self.stored:
            self.conflicts += 1
            raise ApiRefusesError(409, "it exists")
        self.done.append(f"create {namespace}/{raw['metadata']['name']}")
        return self.put(raw)

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        self._answer(namespace)
        if (namespace, name) in self.stored:
            if self.stored[namespace, name]["metadata"]["uid"] != uid:
                raise ApiRefusesError(409, "another uid")
            self.remove(namespace, name)
        self.done.append(f"delete {namespace}/{name}")

    def _answer(self, namespace: str) -> None:
        if self.is_away or namespace in self.fails:
            self.failures += 1
            raise ApiUnavailableError("away")
        if namespace in self.refuses:
            raise ApiRefusesError(403, "no")

    def put(self, raw: Raw) -> Raw:
        kept = copy.deepcopy(raw)
        for one in kept["spec"]["spec"]["devices"]["requests"]:
            one["exactly"] |= {"allocationMode": "ExactCount", "count": 1}
        kept["metadata"]["uid"] = f"uid-{next(self._uids)}"
        self.stored[kept["metadata"]["namespace"], kept["metadata"]["name"]] = kept
        self.events.append(("changed", kept))
        return copy.deepcopy(kept)

    def remove(self, namespace: str, name: str) -> None:
        self.events.append(("deleted", self.stored.pop((namespace, name))))


class Scene:
    def __init__(self) -> None:
        self.now, self.fleet, self.api = NOW, Fleet(), FakeTemplates()
        self.is_current, self.wakes = True, 0
        self.keeper = ClaimTemplates(
            self.api,
            self.fleet,
            spec_of,
            lambda: self.now,
            is_current=lambda: self.is_current,
            is_opted_in=lambda raw: opted_in(raw, OPT_IN.name),
            wake=self._wake,
        )

    def _wake(self) -> None:
        self.wakes += 1

    def prove(self, node: str, hash: str = HASH, lasts: timedelta = timedelta(days=1)) -> None:
        self.fleet.put(Node(node, {}, (Device(DeviceUuid(f"GPU-{node}")),)), self.now)
        self.fleet.set_evidence(node, Evidence(node, hash, "static", until=self.now + lasts), self.now)

    def namespace(self, name: str, required: str | None = None, *, is_opted_in: bool = True, **meta: str) -> None:
        labels = {OPT_IN.name: "true"} if is_opted_in else {}
        notes = {} if required is None else {"gpuwarden.io/required-hash": required}
        self.keeper.namespaces.changed({"metadata": {"name": name, "labels": labels, "annotations": notes, **meta}})

    def pod(self, name: str, template: str, namespace: str = "ml", phase: str = "Pending") -> Raw:
        claims = [{"name": "gpuwarden", "resourceClaimTemplateName": template}]
        meta = {"name": name, "namespace": namespace, "uid": f"uid-{name}"}
        raw: Raw = {"metadata": meta, "spec": {"resourceClaims": claims}, "status": {"phase": phase}}
        self.keeper.pods.changed(raw)
        return raw

    def tell(self) -> None:
        events, self.api.events = self.api.events, []
        for what, raw in events:
            (self.keeper.changed if what == "changed" else self.keeper.deleted)(raw)

    async def steps(self, number: int = 1, *, is_told: bool = True) -> "Scene":
        for _ in range(number):
            if is_told:
                self.tell()
            await self.keeper.step()
        return self

    def names(self, namespace: str = "ml") -> set[str]:
        return {name for place, name in self.api.stored if place == namespace}


def eight(*hashes: str) -> set[str]:
    return {f"gpuwarden-{count}-{hash}" for hash in hashes for count in range(1, 9)}


async def test_opted_in_namespaces_have_the_templates_of_all_proven_hashes_and_each_is_written_once() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    scene.namespace("other", is_opted_in=False)
    await scene.steps(5)
    assert scene.names() == eight("aa11")
    assert scene.names("other") == set()
    assert len(scene.api.done) == 8
    made = scene.api.stored["ml", "gpuwarden-2-aa11"]
    assert made["metadata"]["labels"] == OURS
    assert len(made["spec"]["spec"]["devices"]["constraints"]) == 2
    scene.prove("b", "sha256:bb22")
    await scene.steps(3)
    assert scene.names() == eight("aa11", "bb22")
    assert len(scene.api.done) == 16
    scene.now += CHECK_INTERVAL
    await scene.steps(3)
    assert len(scene.api.done) == 16


async def test_namespace_that_requires_hashes_has_templates_for_these_only_proven_or_not() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml", "sha256:cc33,dd44")
    assert (await scene.steps(2)).names() == eight("cc33", "dd44")
    scene.namespace("ml", "sha256:aa11")
    assert eight("aa11") <= (await scene.steps(2)).names()


async def test_new_namespace_gets_its_templates_in_the_next_pass() -> None:
    scene = Scene()
    scene.prove("a")
    await scene.steps(2)
    scene.namespace("ml")
    assert (await scene.steps()).names() == eight("aa11")


async def test_namespace_that_is_being_deleted_gets_no_templates() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml", deletionTimestamp="2026-01-01T00:00:00Z")
    assert (await scene.steps(2)).api.done == []


async def test_template_that_a_pod_names_is_made_before_all_others() -> None:
    scene = Scene()
    for number in range(10):
        scene.prove(f"n{number}", f"hash{number}")
    scene.namespace("ml")
    await scene.steps()
    assert scene.wakes, "there is more to do"
    scene.wakes = 0
    scene.pod("new", "gpuwarden-3-unknown")
    assert scene.wakes == 1
    await scene.steps()
    assert scene.api.done[BATCH_SIZE] == "create ml/gpuwarden-3-unknown"
    assert len(scene.api.done) == 2 * BATCH_SIZE, "a pass is bounded"


@pytest.mark.parametrize(
    ("namespace", "template"),
    [("ml", "gpuwarden-9-aa11"), ("ml", "theirs"), ("closed", "gpuwarden-1-aa11"), ("strict", "gpuwarden-1-aa11")],
    ids=["too-many", "of-another-name", "not-opted-in", "a-hash-that-the-namespace-forbids"],
)
async def test_pod_gets_no_template_that_policies_would_refuse(namespace: str, template: str) -> None:
    scene = Scene()
    scene.namespace("ml")
    scene.namespace("closed", is_opted_in=False)
    scene.namespace("strict", "sha256:bb22")
    await scene.steps(2)
    before = list(scene.api.done)
    scene.pod("new", template, namespace)
    assert (await scene.steps(2)).api.done == before


async def test_deleted_template_comes_back() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    scene.api.remove("ml", "gpuwarden-1-aa11")
    assert (await scene.steps()).names() == eight("aa11")


async def test_template_of_another_author_is_replaced_where_pods_would_use_it() -> None:
    """Also one that nothing needs: a pod that names it would get the GPU without proof."""
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    scene.namespace("closed", is_opted_in=False)
    weak = {"devices": {"requests": [{"name": "gpu0", "exactly": {"deviceClassName": "gpu.test"}}]}}
    for namespace, name in (("ml", "gpuwarden-1-aa11"), ("ml", "gpuwarden-1-zz"), ("closed", "gpuwarden-1-aa11")):
        scene.api.put({"metadata": {"namespace": namespace, "name": name}, "spec": {"spec": copy.deepcopy(weak)}})
    await scene.steps(3)
    assert scene.names() == eight("aa11")
    assert scene.api.stored["ml", "gpuwarden-1-aa11"]["spec"]["spec"]["devices"]["constraints"]
    assert scene.names("closed") == {"gpuwarden-1-aa11"}


@pytest.mark.parametrize("more", [{"adminAccess": True}, {"allocationMode": "All"}, {"count": 2}], ids=str)
async def test_claim_with_another_request_is_replaced_at_once(more: Raw) -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    scene.api.remove("ml", "gpuwarden-1-aa11")
    forged = spec_of(NativeClaim(1, "aa11"))
    scene.api.put(
        {"metadata": {"namespace": "ml", "name": "gpuwarden-1-aa11"}, "spec": {"metadata": LABELLED, "spec": forged}}
    )
    scene.api.stored["ml", "gpuwarden-1-aa11"]["spec"]["spec"]["devices"]["requests"][1]["exactly"] |= more
    await scene.steps()
    requests = scene.api.stored["ml", "gpuwarden-1-aa11"]["spec"]["spec"]["devices"]["requests"]
    assert requests[1]["exactly"].items().isdisjoint(more.items())


@pytest.mark.parametrize("is_served", [True, False])
async def test_template_for_a_fresh_challenge_exists_only_while_a_pod_names_it(*, is_served: bool) -> None:
    scene = Scene()
    scene.keeper._challenges = is_served
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    assert scene.names() == eight("aa11")
    scene.pod("a", "gpuwarden-1-aa11-bind")
    await scene.steps()
    assert scene.names() - eight("aa11") == ({"gpuwarden-1-aa11-bind"} if is_served else set())


async def test_new_template_of_another_author_is_deleted_at_once() -> None:
    scene = Scene()
    scene.namespace("ml")
    await scene.steps(2)
    weak = {"devices": {"requests": [{"name": "gpu0", "exactly": {"deviceClassName": "gpu.test"}}]}}
    scene.api.put({"metadata": {"namespace": "ml", "name": "gpuwarden-1-zz"}, "spec": {"spec": weak}})
    assert (await scene.steps()).names() == set()


async def test_template_whose_claims_would_have_no_label_is_replaced() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    bare = {"namespace": "ml", "name": "gpuwarden-1-aa11"}
    scene.api.put({"metadata": bare, "spec": {"spec": spec_of(NativeClaim(1, "aa11"))}})
    await scene.steps(2)
    assert scene.api.stored["ml", "gpuwarden-1-aa11"]["spec"]["metadata"] == LABELLED


async def test_template_that_is_missing_in_a_new_list_comes_back() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    del scene.api.stored["ml", "gpuwarden-1-aa11"]
    scene.keeper.replaced({name: raw for (_, name), raw in scene.api.stored.items()})
    assert (await scene.steps()).names() == eight("aa11")


async def test_pod_that_is_known_before_its_namespace_gets_its_template() -> None:
    scene = Scene()
    scene.pod("a", "gpuwarden-1-unknown")
    await scene.steps(2)
    scene.namespace("ml")
    assert (await scene.steps()).names() == {"gpuwarden-1-unknown"}


async def test_refused_template_of_a_pod_is_tried_again() -> None:
    scene = Scene()
    scene.namespace("ml")
    await scene.steps()
    scene.api.refuses.add("ml")
    scene.pod("a", "gpuwarden-1-unknown")
    await scene.steps(2)
    scene.api.refuses.clear()
    scene.now += CHECK_INTERVAL
    assert (await scene.steps()).names() == {"gpuwarden-1-unknown"}


async def test_equal_template_of_another_author_stays() -> None:
    scene = Scene()
    scene.namespace("ml")
    theirs = {"namespace": "ml", "name": "gpuwarden-1-zz"}
    scene.api.put({"metadata": theirs, "spec": {"metadata": LABELLED, "spec": spec_of(NativeClaim(1, "zz"))}})
    await scene.steps(2)
    scene.now += KEPT + CHECK_INTERVAL
    await scene.steps(2)
    scene.now += CHECK_INTERVAL
    assert (await scene.steps(2)).names() == {"gpuwarden-1-zz"}


async def test_templates_of_an_earlier_leader_are_kept() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    successor = Scene()
    successor.prove("a")
    successor.namespace("ml")
    successor.keeper.replaced({name: raw for (_, name), raw in scene.api.stored.items()})
    successor.keeper.begin()
    assert (await successor.steps(3)).api.done == []


async def test_default_that_a_later_api_server_adds_leads_to_one_write() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    for (_, name), raw in scene.api.stored.items():
        raw["spec"]["spec"]["devices"]["new"] = "default"
        scene.api.events.append(("changed", raw))
        assert name
    await scene.steps(3)
    assert len(scene.api.done) == 8, "this process has created them"


async def test_template_that_nothing_needs_is_deleted_after_an_hour() -> None:
    scene = Scene()
    scene.prove("a", lasts=SECOND)
    scene.namespace("ml")
    await scene.steps(2)
    used = scene.pod("used", "gpuwarden-1-aa11")
    ended = scene.pod("ended", "gpuwarden-2-aa11")
    scene.pod("ended", "gpuwarden-2-aa11", phase="Succeeded")
    assert ended
    scene.now += SECOND + CHECK_INTERVAL
    await scene.steps(3)
    scene.now += KEPT - SECOND
    assert (await scene.steps(3)).names() == eight("aa11")
    scene.now += CHECK_INTERVAL
    assert (await scene.steps(3)).names() == {"gpuwarden-1-aa11"}
    scene.keeper.pods.deleted(used)
    scene.now += CHECK_INTERVAL
    assert (await scene.steps(3)).names() == {"gpuwarden-1-aa11"}, "a pod used it until now"
    scene.now += KEPT + CHECK_INTERVAL
    assert (await scene.steps(3)).names() == set()


async def test_template_that_is_needed_again_is_kept() -> None:
    scene = Scene()
    scene.prove("a", lasts=SECOND)
    scene.namespace("ml")
    await scene.steps(2)
    scene.now += CHECK_INTERVAL
    await scene.steps(3)
    scene.prove("a")
    scene.now += KEPT
    await scene.steps(3)
    scene.prove("a", lasts=SECOND)
    scene.now += CHECK_INTERVAL
    await scene.steps(3)
    scene.now += CHECK_INTERVAL
    assert (await scene.steps(3)).names() == eight("aa11")


async def test_nothing_is_written_while_a_watch_is_behind_or_the_api_server_is_away() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    scene.is_current = False
    assert (await scene.steps(2)).api.done == []
    scene.is_current, scene.api.is_away = True, True
    assert (await scene.steps(2)).api.done == []
    scene.api.is_away = False
    assert (await scene.steps(2)).names() == eight("aa11")


async def test_refused_write_is_tried_again_later_and_holds_up_no_other() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("closed")
    scene.namespace("ml")
    scene.api.refuses.add("closed")
    assert (await scene.steps(2)).names() == eight("aa11")
    scene.api.refuses.clear()
    assert (await scene.steps(2)).names("closed") == set()
    scene.now += CHECK_INTERVAL
    assert (await scene.steps(2)).names("closed") == eight("aa11")


async def test_namespace_whose_webhook_fails_holds_up_no_other() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("broken")
    await scene.steps()
    scene.namespace("more")
    scene.namespace("ml")
    scene.api.fails.add("broken")
    scene.api.stored.clear()
    scene.keeper.replaced({})
    scene.api.events.clear()
    assert (await scene.steps()).names() == eight("aa11")
    assert scene.names("more") == eight("aa11")
    assert scene.api.failures == 1, "once in a pass"
    scene.wakes = 0
    await scene.steps()
    assert not scene.wakes, "no pass follows at once"
    scene.api.fails.clear()
    assert (await scene.steps()).names("broken") == eight("aa11")


async def test_pass_stops_after_a_few_failures() -> None:
    scene = Scene()
    scene.prove("a")
    for number in range(10):
        scene.namespace(f"ml-{number}")
    scene.api.is_away, scene.wakes = True, 0
    await scene.steps()
    assert (scene.api.failures, scene.wakes) == (MAX_FAILURES, 0)


async def test_tenant_with_many_new_hashes_does_not_delay_the_pod_of_another() -> None:
    scene = Scene()
    for name in ("greedy", "ml"):
        scene.namespace(name)
    await scene.steps()
    for number in range(5 * BATCH_SIZE):
        scene.pod(f"greedy-{number}", f"gpuwarden-1-hash{number}", "greedy")
    scene.pod("modest", "gpuwarden-1-mine")
    await scene.steps()
    assert scene.names() == {"gpuwarden-1-mine"}
    assert len(scene.api.done) == BATCH_SIZE


async def test_late_events_of_an_old_template_do_not_hide_the_new_one() -> None:
    scene = Scene()
    scene.prove("a")
    scene.namespace("ml")
    await scene.steps(2)
    old = scene.api.stored["ml", "gpuwarden-1-aa11"]
    scene.api.remove("ml", "gpuwarden-1-aa11")
    await scene.steps(2)
    scene.keeper.deleted(old)
    await scene.steps(2)
    assert scene.api.conflicts == 0, "the new one is known"
    scene.keeper.changed(old)
    scene.keeper.deleted(old)
    await scene.steps(3, is_told=False)
    assert scene.names() == eight("aa11")


async def test_list_of_pods_replaces_what_was_known() -> None:
    scene = Scene()
    scene.namespace("ml")
    first, second = scene.pod("a", "gpuwarden-1-x"), scene.pod("b", "gpuwarden-1-y")
    scene.keeper.pods.replaced({"ml/b": second})
    assert list(scene.keeper.pods) == [("ml", NativeClaim(1, "y"))]
    scene.keeper.pods.deleted(first)
    scene.keeper.pods.deleted(second)
    assert list(scene.keeper.pods) == []


async def test_check_of_all_templates_takes_several_passes_and_lets_other_tasks_run() -> None:
    scene = Scene()
    scene.prove("a")
    for number in range(CHECKS_PER_PASS // 8 + 1):
        scene.namespace(f"ns-{number}")
    while len(scene.api.stored) < CHECKS_PER_PASS:
        await scene.steps()
    await scene.steps(2)
    written, scene.wakes = len(scene.api.done), 0
    scene.now += CHECK_INTERVAL
    turns, is_over = 0, False

    async def count_turns() -> None:
        nonlocal turns
        while not is_over:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    before = turns
    await scene.steps()
    assert turns > before
    assert scene.wakes == 1, "the rest comes with the next pass"
    await scene.steps()
    assert scene.wakes == 1
    is_over = True
    await beside
    assert len(scene.api.done) == written
