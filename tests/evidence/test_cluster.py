"""NodeEvidence in the API server: each source writes its own entry, seldom; every replica observes all entries."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence
from tests.fake_objects import FakeObjects
from webhook.admission.cluster_fleet import ClusterFleet
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.cluster import MAX_FAILURES, POLL_EVERY, EvidenceView, EvidenceWriter
from webhook.kube.store import StoreUnavailableError

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
SAID, LATER = "2026-03-02T12:00:00Z", "2026-03-02T13:00:00Z"


class Provider:
    """Returns the test's answer."""

    def __init__(self, name: str, **said: Evidence) -> None:
        self.name = name
        self.said: dict[str, Evidence] = {node.replace("_", "-"): one for node, one in said.items()}
        self.is_away = False
        self.polls = 0
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    async def poll(self) -> Mapping[str, Evidence]:
        self.polls += 1
        if self.is_away:
            raise EvidenceUnavailableError(self.name)
        return self.said


class Scene:
    def __init__(self, *providers: Provider, retired: Sequence[str] = (), awaited: Sequence[str] = ()) -> None:
        self.now = NOW
        self.is_current = self.are_nodes_current = True
        # In the API server, whatever the watch has shown.
        self.nodes = {"node-a", "node-b"}
        self.asked_for: list[str] = []
        self.objects = FakeObjects()
        self.errors: list[str] = []
        self.writer = EvidenceWriter(
            self.objects,
            providers,
            lambda: self.now,
            lambda: self.is_current,
            nodes=self,
            are_nodes_current=lambda: self.are_nodes_current,
            retired=retired,
            pushed=awaited,
            first_report_timeout=HOUR,
            replay_window=MINUTE,
            count_error=self.errors.append,
        )
        self.objects.listener = self.writer.view

    async def step(self, seconds: float = POLL_EVERY.total_seconds()) -> list[str]:
        """The writes of a step, that much later."""
        self.now += timedelta(seconds=seconds)
        self.objects.tell()
        self.objects.done.clear()
        await self.writer.step()
        return list(self.objects.done)

    async def is_gone(self, name: str) -> bool:
        self.asked_for.append(name)
        if self.objects.is_away:
            raise StoreUnavailableError("away")
        return name not in self.nodes

    def sources(self, name: str = "node-a") -> Raw:
        found: Raw = self.objects.objects[name]["status"]["sources"]
        return found


def entry(**members: Any) -> Raw:
    return {"hash": HASH, "banned": False, "conflict": False, **members}


@pytest.fixture
def static() -> Provider:
    return Provider("static", node_a=evidence("node-a"))


async def test_provider_answer_is_written_once(static: Provider) -> None:
    scene = Scene(static)
    assert await scene.step() == ["create node-a", "status node-a"]
    assert scene.sources() == {"static": entry()}
    assert [await scene.step() for _ in range(3)] == [[], [], []]


async def test_pending_update_is_known(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    assert not scene.writer.is_update_pending("node-a")
    scene.objects.remove("node-a")
    scene.objects.is_away = True
    await scene.step()
    assert scene.writer.is_update_pending("node-a")
    scene.objects.is_away = False
    await scene.step()
    assert not scene.writer.is_update_pending("node-a")


async def test_unavailable_provider_has_no_pending_update_and_is_counted(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.is_away = True
    await scene.step()
    assert (scene.writer.is_update_pending("node-a"), scene.errors) == (False, ["static"])


async def test_first_answer_is_pending_for_nodes_without_an_entry(static: Provider) -> None:
    """A provider that was just added and is unavailable: no node has lost evidence that it never had."""
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    spire.is_away = True
    scene = Scene(static, spire)
    known = {"spire-server": entry(since=SAID, until=LATER)}
    scene.objects.put({"metadata": {"name": "node-b"}, "status": {"sources": known}})
    await scene.step()
    assert scene.writer.is_update_pending("node-a")
    assert not scene.writer.is_update_pending("node-b")  # its entry stays until it expires
    spire.is_away = False
    await scene.step()
    assert not scene.writer.is_update_pending("node-a")


async def test_first_proof_is_pending_for_a_while_for_nodes_without_one(static: Provider) -> None:
    scene = Scene(static, awaited=["jwt-svid"])
    proof = {"jwt-svid": entry(since=SAID, until=LATER)}
    scene.objects.put({"metadata": {"name": "node-b"}, "status": {"sources": proof}})
    await scene.step()
    assert (scene.writer.is_update_pending("node-a"), scene.writer.is_update_pending("node-b")) == (True, False)
    assert scene.writer.awaits("node-a", {"jwt-svid"})
    assert not scene.writer.awaits("node-a", {"jwt-svid", "static"})
    assert not scene.writer.awaits("node-b", {"jwt-svid"})
    scene.objects.remove("node-b")
    await scene.step()
    assert not scene.writer.is_update_pending("node-b")  # it had one, and it is gone
    await scene.step(HOUR.total_seconds())
    assert not scene.writer.is_update_pending("node-a")


async def test_provider_outage_is_logged_once(static: Provider) -> None:
    scene = Scene(static)
    static.is_away = True
    with capture_logs() as lines:
        for _ in range(3):
            await scene.step()
        static.is_away = False
        for _ in range(3):
            await scene.step()
    told = [line["event"] for line in lines if line.get("provider") == "static" and line["log_level"] != "debug"]
    assert told == [
        "evidence provider unavailable, its last answer stays until it expires",
        "evidence provider answers again",
    ]
    assert scene.errors == ["static"] * 3


async def test_changed_evidence_is_written(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.said = {"node-a": evidence("node-a", OTHER_HASH)}
    assert await scene.step() == ["status node-a"]
    assert scene.sources() == {"static": entry(hash=OTHER_HASH)}


async def test_node_missing_from_a_provider_loses_only_that_entry(static: Provider) -> None:
    scene = Scene(static)
    scene.objects.put(
        {"metadata": {"name": "node-a"}, "status": {"sources": {"jwt-svid": entry(since=SAID, until=LATER)}}}
    )
    await scene.step()
    assert set(scene.sources()) == {"jwt-svid", "static"}
    static.said = {}
    assert await scene.step() == ["status node-a"]
    assert scene.sources() == {"jwt-svid": entry(since=SAID, until=LATER)}


async def test_object_without_entries_is_not_deleted(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.said = {}
    await scene.step()
    assert (scene.sources(), await scene.step()) == ({}, [])


async def test_unavailable_provider_changes_nothing(static: Provider) -> None:
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    scene = Scene(spire, static)
    await scene.step()
    spire.is_away = True
    static.said = {}
    await scene.step()
    assert set(scene.sources()) == {"spire-server"}


async def test_provider_without_an_answer_removes_nothing(static: Provider) -> None:
    static.is_away = True
    scene = Scene(static)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry()}}})
    assert await scene.step() == []


async def test_entry_of_a_retired_source_is_removed() -> None:
    spire = Provider("spire-server")
    scene = Scene(spire, retired=["static"])
    proof = entry(since=SAID, until=LATER)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry(), "jwt-svid": proof}}})
    await scene.step()
    assert scene.sources() == {"jwt-svid": proof}


async def test_renewed_evidence_is_written_at_half_its_lifetime() -> None:
    spire = Provider("spire-server")
    scene = Scene(spire)
    writes = 0
    for _ in range(120):
        since = scene.now + 60 * SECOND
        spire.said = {"node-a": evidence("node-a", since=since, until=since + HOUR)}
        writes += len(await scene.step(60))
    assert writes == 2 + 3  # created, and renewed after 30, 60 and 90 minutes


async def test_first_evidence_of_a_recreated_node_is_written_at_once() -> None:
    """The written entry is of the earlier machine and counts for nothing, so half of its lifetime is not waited for."""
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    scene = Scene(spire)

    def born(moment: str) -> Raw:
        return {"metadata": {"name": "node-a", "creationTimestamp": moment}}

    scene.writer.creation_times.changed(born("2026-03-02T11:00:00Z"))
    assert len(await scene.step()) == 2
    scene.writer.creation_times.changed(born("2026-03-02T12:00:30Z"))
    assert await scene.step() == []  # nothing else has changed
    attested = NOW + 31 * SECOND
    spire.said = {"node-a": evidence("node-a", since=attested, until=attested + HOUR)}
    assert await scene.step() == ["status node-a"]
    assert scene.writer.is_update_pending("node-a") is False


async def test_providers_are_polled_at_intervals(static: Provider) -> None:
    scene = Scene(static)
    for _ in range(10):
        await scene.step(1)
    assert static.polls == 2


async def test_nothing_is_written_before_the_first_list(static: Provider) -> None:
    scene = Scene(static)
    scene.is_current = False
    assert (await scene.step(), static.polls) == ([], 0)


async def test_manual_change_is_corrected_at_once(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    scene.objects.status("node-a", sources={"static": {"hash": OTHER_HASH}})
    assert await scene.step(0.5) == ["status node-a"]
    assert scene.sources() == {"static": entry()}


async def test_unreadable_entry_of_a_retired_source_is_removed(static: Provider) -> None:
    static.said = {}
    scene = Scene(static)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": {"hash": HASH}}}})
    assert await scene.step() == ["status node-a"]


async def test_write_conflict_is_retried_on_the_current_object(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.said = {"node-a": evidence("node-a", OTHER_HASH)}
    scene.objects.overtaken = 1
    assert await scene.step() == ["status node-a"]


@pytest.fixture
def spire() -> Provider:
    said = evolve(evidence("node-a", since=NOW, until=NOW + HOUR), source="spire-server")
    return Provider("spire-server", node_a=said)


BANNED = entry(banned=True, since=SAID, until=LATER)


async def test_reelected_leader_does_not_revert_a_ban(spire: Provider) -> None:
    scene = Scene(spire)
    scene.writer.begin()
    await scene.step()
    scene.objects.status("node-a", sources={"spire-server": BANNED})
    spire.is_away = True
    scene.writer.begin()
    assert [await scene.step() for _ in range(3)] == [[], [], []]
    assert (scene.sources(), spire.begun) == ({"spire-server": BANNED}, 2)
    spire.is_away = False
    spire.said = {"node-a": evolve(spire.said["node-a"], until=NOW + 2 * HOUR)}
    assert await scene.step() == ["status node-a"]


async def test_new_leader_polls_at_once_and_deletes_nothing_before_the_answer(spire: Provider) -> None:
    scene = Scene(spire)
    await scene.step()
    spire.is_away = True
    spire.said, scene.nodes = {}, set()
    scene.now += 2 * HOUR
    scene.writer.begin()
    assert (await scene.step(0.0), spire.polls) == ([], 2)
    spire.is_away = False
    assert await scene.step() == ["delete node-a"]


async def test_new_leader_removes_entries_of_retired_sources() -> None:
    scene = Scene(retired=["static"])
    scene.writer.begin()
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry()}}})
    assert await scene.step() == ["status node-a"]


async def test_leader_polls_again_before_overwriting_another_leaders_entry(spire: Provider) -> None:
    """It was suspended during a pass, or its watch lags."""
    scene = Scene(spire)
    await scene.step()
    scene.objects.status("node-a", sources={"spire-server": BANNED})
    spire.said = {"node-a": evolve(spire.said["node-a"], hash=OTHER_HASH)}
    scene.now += POLL_EVERY
    scene.objects.done.clear()
    await scene.writer.step()  # which has not observed it
    assert (scene.objects.done, spire.begun) == ([], 1)
    spire.said = {"node-a": evolve(spire.said["node-a"], hash=HASH, is_banned=True)}
    assert await scene.step(0.0) == []
    assert scene.sources() == {"spire-server": BANNED}


async def test_write_conflict_with_a_proof_is_retried_at_once(spire: Provider) -> None:
    scene = Scene(spire)
    await scene.step()
    scene.objects.status("node-a", sources={**scene.sources(), "jwt-svid": entry(since=SAID, until=LATER)})
    spire.said = {"node-a": evolve(spire.said["node-a"], is_banned=True)}
    scene.now += POLL_EVERY
    await scene.writer.step()
    assert (scene.sources()["spire-server"]["banned"], spire.begun) == (True, 0)


async def test_unavailable_api_server_is_retried_in_the_next_pass(static: Provider) -> None:
    scene = Scene(static)
    scene.objects.is_away = True
    assert await scene.step() == []
    scene.objects.is_away = False
    assert await scene.step(0.5) == ["create node-a", "status node-a"]


async def test_pass_stops_after_some_failures_of_the_api_server(static: Provider) -> None:
    static.said = {f"n{number}": evidence(f"n{number}") for number in range(50)}
    scene = Scene(static)
    scene.objects.is_away = True
    with capture_logs() as said:
        await scene.step()
    assert [one["event"] for one in said].count("evidence left for the next pass") == MAX_FAILURES
    scene.objects.is_away = False
    assert len(await scene.step(0.5)) == 2 * 50


async def test_rejected_evidence_does_not_delay_other_nodes(static: Provider) -> None:
    static.said["node-b"] = evidence("node-b")
    scene = Scene(static)
    scene.objects.refused = {"node-a"}
    assert await scene.step() == ["create node-b", "status node-b"]
    assert await scene.step() == []


# What a replica observes.


class ViewListener:
    def __init__(self, *asked: str, **own: Evidence) -> None:
        self.shown: list[tuple[str, Evidence | None]] = []
        self.view = EvidenceView(
            {node.replace("_", "-"): one for node, one in own.items()},
            required=asked or ("static",),
        )
        self.view.notify(lambda name: self.shown.append((name, self.view.combined_evidence(name))))


def raw(version: int = 1, name: str = "node-a", **sources: Any) -> Raw:
    entries = {source.replace("_", "-"): one for source, one in sources.items()}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"sources": entries}}


def test_evidence_of_objects_is_shown_and_kept() -> None:
    hearing = ViewListener()
    hearing.view.replaced({"/node-a": raw(static=entry())})
    assert hearing.shown == [("node-a", evidence("node-a"))]
    assert hearing.view.combined_evidence("node-a") == evidence("node-a")
    assert hearing.view.combined_evidence("node-b") is None


def test_listeners_are_called_only_for_changes() -> None:
    hearing = ViewListener()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static=entry()))
    assert len(hearing.shown) == 1


def test_evidence_of_all_sources_is_combined() -> None:
    hearing = ViewListener("static", "jwt-svid")
    hearing.view.changed(raw(static=entry(hash=OTHER_HASH), jwt_svid=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.CONFLICT


def test_own_evidence_is_combined_with_the_objects() -> None:
    hearing = ViewListener("static", "spire-server", node_a=evidence("node-a"), node_b=evidence("node-b"))
    assert state_of(hearing.view.combined_evidence("node-b"), NOW) is EvidenceState.ABSENT
    hearing.view.changed(raw(spire_server=entry(banned=True)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_ban_overrides_a_valid_proof() -> None:
    hearing = ViewListener("spire-server", "jwt-svid")
    proof = entry(since=SAID, until=LATER)
    hearing.view.changed(raw(jwt_svid=proof, spire_server=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.FRESH
    hearing.view.changed(raw(2, jwt_svid=proof, spire_server={"banned": True, "conflict": False}))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_node_missing_from_one_of_two_sources_is_not_proven() -> None:
    """Its agent was evicted, or the other provider has not been polled yet."""
    hearing = ViewListener("spire-server", "jwt-svid")
    hearing.view.changed(raw(jwt_svid=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.ABSENT


def test_entries_of_other_sources_are_ignored_at_once() -> None:
    hearing = ViewListener("spire-server")
    others: Raw = {"jwt_svid": entry(since=SAID, until=LATER), "static": entry(hash=OTHER_HASH)}
    hearing.view.changed(raw(**others))
    assert hearing.view.combined_evidence("node-a") is None
    hearing.view.changed(raw(2, **others, spire_server=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.FRESH
    hearing.view.changed(raw(3, jwt_svid={"nobody": "reads it"}, spire_server=entry(banned=True)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_deleted_object_removes_the_evidence() -> None:
    hearing = ViewListener()
    hearing.view.changed(raw(static=entry()))
    hearing.view.deleted(raw(2, static=entry()))
    assert hearing.shown[-1] == ("node-a", None)
    hearing.view.changed(raw(3, static=entry()))
    hearing.view.replaced({})
    assert hearing.shown[-1] == ("node-a", None)


@pytest.mark.parametrize("is_node_first", [True, False], ids=["node first", "evidence first"])
def test_evidence_may_arrive_before_or_after_its_node(*, is_node_first: bool) -> None:
    fleet = Fleet()
    view = EvidenceView({}, required=["static"])
    inventory = ClusterFleet(fleet, lambda: NOW, proven=view.combined_evidence)
    view.notify(inventory.prove)
    node = {"metadata": {"name": "node-a"}}
    if is_node_first:
        inventory.put_node(node)
    view.changed(raw(static=entry()))
    if not is_node_first:
        inventory.put_node(node)
    states = [fleet.indexed_nodes["node-a"].state]
    view.deleted(raw(2))
    states.append(fleet.indexed_nodes["node-a"].state)
    assert states == [EvidenceState.FRESH, EvidenceState.ABSENT]


@pytest.mark.parametrize(
    ("spire", "proof", "state"),
    [
        pytest.param(1, 1, EvidenceState.FRESH, id="both of this node"),
        pytest.param(1, 0, EvidenceState.ABSENT, id="the proof of the earlier node"),
        pytest.param(0, 1, EvidenceState.ABSENT, id="the agent of the earlier node"),
    ],
)
def test_every_entry_must_be_newer_than_the_node(spire: int, proof: int, state: str) -> None:
    """The newer of two entries must not hide that the other is of the earlier machine with that name."""
    fleet = Fleet()
    view = EvidenceView({}, required=["spire-server", "jwt-svid"])
    inventory = ClusterFleet(fleet, lambda: NOW, proven=view.combined_evidence)
    view.notify(inventory.prove)
    inventory.put_node({"metadata": {"name": "node-a", "creationTimestamp": "2026-03-02T11:30:00Z"}})
    begins = ("2026-03-02T11:00:00Z", "2026-03-02T11:45:00Z")
    view.changed(
        raw(
            spire_server=entry(since=begins[spire], until=LATER),
            jwt_svid=entry(since=begins[proof], until=LATER, nonceDigest="n"),
        )
    )
    assert fleet.indexed_nodes["node-a"].state is state


def test_proof_with_a_fast_clock_is_not_of_the_recreated_node() -> None:
    fleet = Fleet()
    view = EvidenceView({}, required=["jwt-svid"], skew=5 * SECOND)
    inventory = ClusterFleet(fleet, lambda: NOW, proven=view.combined_evidence)
    view.notify(inventory.prove)
    inventory.put_node({"metadata": {"name": "node-a", "creationTimestamp": "2026-03-02T11:59:50Z"}})
    states = []
    for version, second in ((1, 55), (2, 56)):
        since = f"2026-03-02T11:59:{second}Z"
        view.changed(raw(version, jwt_svid=entry(since=since, until=LATER, nonceDigest=f"n{version}")))
        states.append(fleet.indexed_nodes["node-a"].state)
    assert states == [EvidenceState.ABSENT, EvidenceState.FRESH]


@pytest.mark.parametrize("source", ["jwt-svid", "spire-server"])
@pytest.mark.defect("extender-2")
def test_written_evidence_is_limited_to_the_configured_age(source: str) -> None:
    """Written with a longer `--max-evidence-age`, by an earlier process or by hand: its real age counts."""
    shown: list[str] = []
    view = EvidenceView({}, required=[source, "static"], skew=5 * SECOND, max_age=10 * MINUTE)
    view.notify(shown.append)
    proof = {"nonceDigest": "n"} if source == "jwt-svid" else {}
    for since, until, ends in (
        ("2026-03-02T12:00:00Z", "2026-03-02T12:40:00Z", NOW + 10 * MINUTE + 5 * SECOND),
        ("2026-03-02T12:00:01Z", "2026-03-02T12:10:01Z", NOW + 10 * MINUTE + SECOND),
    ):
        said = {source: entry(since=since, until=until, **proof), "static": entry()}
        view.changed(raw(len(shown) + 1, "node-a", **said))
        found = view.combined_evidence("node-a")
        assert found is not None
        assert found.until == ends


def test_static_evidence_keeps_its_own_expiry() -> None:
    view = EvidenceView({}, required=["static"], max_age=10 * MINUTE)
    view.changed(raw(static=entry(since="2026-03-02T11:00:00Z", until=LATER)))
    found = view.combined_evidence("node-a")
    assert found is not None
    assert found.until == datetime.fromisoformat(LATER)


@pytest.mark.parametrize("since", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"])
def test_time_out_of_range_leaves_the_known_evidence(since: str) -> None:
    shown: list[str] = []
    view = EvidenceView({}, required=["jwt-svid"], skew=MINUTE, max_age=HOUR)
    view.notify(shown.append)
    view.changed(raw(jwt_svid=entry(since=SAID, until=LATER, nonceDigest="d")))
    known = view.combined_evidence("node-a")
    assert known is not None
    view.changed(raw(2, jwt_svid=entry(since=since, until="9999-12-31T23:59:59Z", nonceDigest="d")))
    assert view.combined_evidence("node-a") == known


def test_unreadable_object_leaves_the_known_evidence() -> None:
    hearing = ViewListener()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static={"hash": OTHER_HASH}))
    hearing.view.changed(raw(3, name="node-b", static=entry()))
    assert [name for name, _ in hearing.shown] == ["node-a", "node-b"]
    assert hearing.view.combined_evidence("node-a") == evolve(evidence("node-a"), source="static")


# Evidence of a deleted node.


PROVEN = NOW - MINUTE


def proven(until: timedelta = timedelta(), **members: Any) -> Raw:
    """A proof of a minute ago, valid for that long from now."""
    said = {"since": stamp(PROVEN), "until": stamp(NOW + until), "nonceDigest": "n", "challenged": stamp(PROVEN)}
    return {"jwt-svid": entry(**{**said, **members})}


def stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def without_node(*providers: Provider, sources: Raw, gone: bool = True) -> Scene:
    scene = Scene(*providers, awaited=["jwt-svid"])
    scene.nodes = set() if gone else {"node-a"}
    labels = {"app.kubernetes.io/managed-by": "gpuwarden"}
    scene.objects.put({"metadata": {"name": "node-a", "labels": labels}, "status": {"sources": sources}})
    return scene


async def test_evidence_of_a_deleted_node_is_deleted_when_no_source_reports_it(static: Provider) -> None:
    scene = without_node(static, sources=proven())
    scene.writer.creation_times.changed({"metadata": {"name": "node-a", "resourceVersion": "1"}})
    assert await scene.step() == ["status node-a"]
    static.said = {}
    assert await scene.step() == ["status node-a"]
    scene.nodes.clear()
    assert await scene.step() == []  # the watch has not shown it yet
    scene.writer.creation_times.deleted({"metadata": {"name": "node-a", "resourceVersion": "2"}})
    assert await scene.step() == ["delete node-a"]
    assert [await scene.step() for _ in range(2)] == [[], []]
    assert scene.objects.objects == {}


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param(proven(until=2 * MINUTE), id="a valid proof"),
        pytest.param(proven(since=stamp(NOW)), id="a token that was issued a moment ago"),
        pytest.param(proven(challenged=stamp(NOW)), id="a recent challenge"),
        pytest.param({"jwt-svid": {"hash": 1}}, id="an unreadable entry"),
        pytest.param({"jwt-svid": {"banned": True, "conflict": False}}, id="a ban of another source"),
    ],
)
async def test_needed_evidence_stays_without_a_node(sources: Raw) -> None:
    scene = without_node(sources=sources)
    assert await scene.step() == []
    assert scene.asked_for == []


async def test_proof_is_deleted_when_it_can_no_longer_be_replayed() -> None:
    scene = without_node(sources=proven(challenged=stamp(NOW)))
    assert await scene.step(59) == []
    assert await scene.step() == ["delete node-a"]


async def test_node_missed_by_the_watch_keeps_its_evidence() -> None:
    scene = without_node(sources=proven(), gone=False)
    assert await scene.step() == []
    assert scene.asked_for == ["node-a"]


async def test_nothing_is_deleted_while_the_node_watch_is_interrupted() -> None:
    scene = without_node(sources=proven())
    scene.are_nodes_current = False
    assert await scene.step() == []
    scene.are_nodes_current, scene.objects.is_away = True, True
    assert await scene.step() == []
    scene.objects.is_away = False
    assert await scene.step() == ["delete node-a"]


async def test_nothing_is_deleted_before_all_providers_have_answered(static: Provider) -> None:
    static.is_away, static.said = True, {}
    scene = without_node(static, sources=proven())
    assert await scene.step() == []
    static.is_away = False
    assert await scene.step() == ["delete node-a"]
    static.is_away = True  # its last answer stays
    scene.objects.put(without_node(sources=proven()).objects.objects["node-a"])
    assert await scene.step() == ["delete node-a"]


async def test_provider_answer_keeps_the_object_of_a_missing_node(static: Provider) -> None:
    scene = without_node(static, sources=proven())
    assert await scene.step() == ["status node-a"]
    assert await scene.step() == []


async def test_concurrent_proof_keeps_the_object() -> None:
    scene = without_node(sources=proven())
    scene.objects.tell()
    scene.objects.status("node-a", sources=proven(until=HOUR, nonceDigest="n2"))  # the watch lags
    told, scene.objects.tell = scene.objects.tell, lambda: None  # type: ignore[method-assign]  # the watch is behind
    assert await scene.step() == []
    scene.objects.tell = told  # type: ignore[method-assign]  # and catches up
    assert await scene.step() == []


async def test_object_created_by_a_user_stays() -> None:
    scene = without_node(sources=proven())
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": proven()}})
    assert await scene.step() == []
