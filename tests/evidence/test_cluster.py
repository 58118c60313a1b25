"""NodeEvidence in the API server: each source writes its own entry, seldom; every replica hears of all."""

from collections.abc import Iterable, Mapping
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
    """Says what the test says."""

    is_for_development = False

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
    def __init__(self, *providers: Provider, retired: Iterable[str] = (), awaited: Iterable[str] = ()) -> None:
        self.now = NOW
        self.is_current = self.are_nodes_current = True
        # In the API server, whatever the watch has told of them.
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
            awaited=awaited,
            patience=HOUR,
            keep=MINUTE,
            count_error=self.errors.append,
        )
        self.objects.listener = self.writer.view

    async def step(self, seconds: float = POLL_EVERY.total_seconds()) -> list[str]:
        """What was written, after so long."""
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


async def test_what_a_provider_says_is_written_once(static: Provider) -> None:
    scene = Scene(static)
    assert await scene.step() == ["create node-a", "status node-a"]
    assert scene.sources() == {"static": entry()}
    assert [await scene.step() for _ in range(3)] == [[], [], []]


async def test_what_is_yet_to_be_written_is_known(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    assert not scene.writer.is_owed("node-a")
    scene.objects.remove("node-a")
    scene.objects.is_away = True
    await scene.step()
    assert scene.writer.is_owed("node-a")
    scene.objects.is_away = False
    await scene.step()
    assert not scene.writer.is_owed("node-a")


async def test_a_provider_that_is_away_owes_nothing_and_is_counted(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.is_away = True
    await scene.step()
    assert (scene.writer.is_owed("node-a"), scene.errors) == (False, ["static"])


async def test_a_first_answer_is_owed_to_nodes_that_the_provider_has_never_spoken_of(static: Provider) -> None:
    """A provider that was added a moment ago, and is away: nobody loses what he never had."""
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    spire.is_away = True
    scene = Scene(static, spire)
    known = {"spire-server": entry(since=SAID, until=LATER)}
    scene.objects.put({"metadata": {"name": "node-b"}, "status": {"sources": known}})
    await scene.step()
    assert scene.writer.is_owed("node-a")
    assert not scene.writer.is_owed("node-b")  # what was said of it stands until its own end
    spire.is_away = False
    await scene.step()
    assert not scene.writer.is_owed("node-a")


async def test_a_first_proof_is_owed_for_a_while_to_nodes_that_have_never_sent_one(static: Provider) -> None:
    scene = Scene(static, awaited=["jwt-svid"])
    proof = {"jwt-svid": entry(since=SAID, until=LATER)}
    scene.objects.put({"metadata": {"name": "node-b"}, "status": {"sources": proof}})
    await scene.step()
    assert (scene.writer.is_owed("node-a"), scene.writer.is_owed("node-b")) == (True, False)
    scene.objects.remove("node-b")
    await scene.step()
    assert not scene.writer.is_owed("node-b")  # it had one, and it is gone
    await scene.step(HOUR.total_seconds())
    assert not scene.writer.is_owed("node-a")


async def test_an_outage_is_told_once(static: Provider) -> None:
    scene = Scene(static)
    static.is_away = True
    with capture_logs() as lines:
        for _ in range(3):
            await scene.step()
        static.is_away = False
        for _ in range(3):
            await scene.step()
    told = [line["event"] for line in lines if line.get("provider") == "static" and line["log_level"] != "debug"]
    assert told == ["evidence provider away, what it said stays until its own end", "evidence provider answers again"]
    assert scene.errors == ["static"] * 3


async def test_a_change_is_written(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.said = {"node-a": evidence("node-a", OTHER_HASH)}
    assert await scene.step() == ["status node-a"]
    assert scene.sources() == {"static": entry(hash=OTHER_HASH)}


async def test_a_node_that_the_provider_no_longer_has_loses_that_entry_alone(static: Provider) -> None:
    scene = Scene(static)
    scene.objects.put(
        {"metadata": {"name": "node-a"}, "status": {"sources": {"jwt-svid": entry(since=SAID, until=LATER)}}}
    )
    await scene.step()
    assert set(scene.sources()) == {"jwt-svid", "static"}
    static.said = {}
    assert await scene.step() == ["status node-a"]
    assert scene.sources() == {"jwt-svid": entry(since=SAID, until=LATER)}


async def test_an_object_without_entries_stays(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    static.said = {}
    await scene.step()
    assert (scene.sources(), await scene.step()) == ({}, [])


async def test_a_provider_that_is_away_changes_nothing(static: Provider) -> None:
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    scene = Scene(spire, static)
    await scene.step()
    spire.is_away = True
    static.said = {}
    await scene.step()
    assert set(scene.sources()) == {"spire-server"}


async def test_a_provider_that_has_not_answered_yet_takes_nothing_away(static: Provider) -> None:
    static.is_away = True
    scene = Scene(static)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry()}}})
    assert await scene.step() == []


async def test_what_a_source_said_that_is_no_longer_asked_is_taken_away() -> None:
    spire = Provider("spire-server")
    scene = Scene(spire, retired=["static"])
    proof = entry(since=SAID, until=LATER)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry(), "jwt-svid": proof}}})
    await scene.step()
    assert scene.sources() == {"jwt-svid": proof}


async def test_evidence_that_is_renewed_all_the_time_is_written_at_half_its_life() -> None:
    spire = Provider("spire-server")
    scene = Scene(spire)
    writes = 0
    for _ in range(120):
        since = scene.now + 60 * SECOND
        spire.said = {"node-a": evidence("node-a", since=since, until=since + HOUR)}
        writes += len(await scene.step(60))
    assert writes == 2 + 3  # made, and renewed after 30, 60 and 90 minutes


async def test_the_first_word_on_a_node_made_anew_is_written_at_once() -> None:
    """What is written is of the machine before, and counts for nothing: half of its life is no time to wait."""
    spire = Provider("spire-server", node_a=evidence("node-a", since=NOW, until=NOW + HOUR))
    scene = Scene(spire)

    def born(moment: str) -> Raw:
        return {"metadata": {"name": "node-a", "creationTimestamp": moment}}

    scene.writer.births.changed(born("2026-03-02T11:00:00Z"))
    assert len(await scene.step()) == 2
    scene.writer.births.changed(born("2026-03-02T12:00:30Z"))
    assert await scene.step() == []  # there is nothing else to be said
    attested = NOW + 31 * SECOND
    spire.said = {"node-a": evidence("node-a", since=attested, until=attested + HOUR)}
    assert await scene.step() == ["status node-a"]
    assert scene.writer.is_owed("node-a") is False


async def test_providers_are_asked_now_and_then(static: Provider) -> None:
    scene = Scene(static)
    for _ in range(10):
        await scene.step(1)
    assert static.polls == 2


async def test_nothing_is_written_before_it_is_known_what_is_there(static: Provider) -> None:
    scene = Scene(static)
    scene.is_current = False
    assert (await scene.step(), static.polls) == ([], 0)


async def test_a_hand_is_put_right_at_once(static: Provider) -> None:
    scene = Scene(static)
    await scene.step()
    scene.objects.status("node-a", sources={"static": {"hash": OTHER_HASH}})
    assert await scene.step(0.5) == ["status node-a"]
    assert scene.sources() == {"static": entry()}


async def test_an_entry_of_nobody_that_cannot_be_read_is_taken_away(static: Provider) -> None:
    static.said = {}
    scene = Scene(static)
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": {"hash": HASH}}}})
    assert await scene.step() == ["status node-a"]


async def test_who_is_overtaken_writes_on_what_is_there_then(static: Provider) -> None:
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


async def test_whoever_is_elected_again_takes_no_ban_of_another_leader_back(spire: Provider) -> None:
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


async def test_whoever_is_elected_asks_at_once_and_deletes_nothing_before_the_answer(spire: Provider) -> None:
    scene = Scene(spire)
    await scene.step()
    spire.is_away = True
    spire.said, scene.nodes = {}, set()
    scene.now += 2 * HOUR
    scene.writer.begin()
    assert (await scene.step(0.0), spire.polls) == ([], 2)
    spire.is_away = False
    assert await scene.step() == ["delete node-a"]


async def test_what_a_retired_source_said_is_taken_away_by_whoever_is_elected() -> None:
    scene = Scene(retired=["static"])
    scene.writer.begin()
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": {"static": entry()}}})
    assert await scene.step() == ["status node-a"]


async def test_who_finds_another_leaders_word_asks_anew_before_it_is_overwritten(spire: Provider) -> None:
    """It stopped for a while in mid-pass, or its watch is behind."""
    scene = Scene(spire)
    await scene.step()
    scene.objects.status("node-a", sources={"spire-server": BANNED})
    spire.said = {"node-a": evolve(spire.said["node-a"], hash=OTHER_HASH)}
    scene.now += POLL_EVERY
    scene.objects.done.clear()
    await scene.writer.step()  # which has not heard of it
    assert (scene.objects.done, spire.begun) == ([], 1)
    spire.said = {"node-a": evolve(spire.said["node-a"], hash=HASH, is_banned=True)}
    assert await scene.step(0.0) == []
    assert scene.sources() == {"spire-server": BANNED}


async def test_who_is_overtaken_by_a_proof_goes_on_at_once(spire: Provider) -> None:
    scene = Scene(spire)
    await scene.step()
    scene.objects.status("node-a", sources={**scene.sources(), "jwt-svid": entry(since=SAID, until=LATER)})
    spire.said = {"node-a": evolve(spire.said["node-a"], is_banned=True)}
    scene.now += POLL_EVERY
    await scene.writer.step()
    assert (scene.sources()["spire-server"]["banned"], spire.begun) == (True, 0)


async def test_an_api_server_that_is_away_is_asked_again_in_the_next_pass(static: Provider) -> None:
    scene = Scene(static)
    scene.objects.is_away = True
    assert await scene.step() == []
    scene.objects.is_away = False
    assert await scene.step(0.5) == ["create node-a", "status node-a"]


async def test_an_api_server_that_does_not_answer_is_not_asked_for_every_node(static: Provider) -> None:
    static.said = {f"n{number}": evidence(f"n{number}") for number in range(50)}
    scene = Scene(static)
    scene.objects.is_away = True
    with capture_logs() as said:
        await scene.step()
    assert [one["event"] for one in said].count("evidence left for the next pass") == MAX_FAILURES
    scene.objects.is_away = False
    assert len(await scene.step(0.5)) == 2 * 50


async def test_what_the_api_server_refuses_keeps_nobody_else_waiting(static: Provider) -> None:
    static.said["node-b"] = evidence("node-b")
    scene = Scene(static)
    scene.objects.refused = {"node-a"}
    assert await scene.step() == ["create node-b", "status node-b"]
    assert await scene.step() == []


# What a replica hears.


class Hearing:
    def __init__(self, *asked: str, **own: Evidence) -> None:
        self.shown: list[tuple[str, Evidence | None]] = []
        self.view = EvidenceView(
            {node.replace("_", "-"): one for node, one in own.items()},
            asked=asked or ("static",),
        )
        self.view.notify(lambda name: self.shown.append((name, self.view.combined_evidence(name))))


def raw(version: int = 1, name: str = "node-a", **sources: Any) -> Raw:
    entries = {source.replace("_", "-"): one for source, one in sources.items()}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"sources": entries}}


def test_what_is_said_is_shown_and_remembered() -> None:
    hearing = Hearing()
    hearing.view.replaced({"/node-a": raw(static=entry())})
    assert hearing.shown == [("node-a", evidence("node-a"))]
    assert hearing.view.combined_evidence("node-a") == evidence("node-a")
    assert hearing.view.combined_evidence("node-b") is None


def test_only_news_are_shown() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static=entry()))
    assert len(hearing.shown) == 1


def test_all_sources_count() -> None:
    hearing = Hearing("static", "jwt-svid")
    hearing.view.changed(raw(static=entry(hash=OTHER_HASH), jwt_svid=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.CONFLICT


def test_what_this_process_was_told_itself_counts_too() -> None:
    hearing = Hearing("static", "spire-server", node_a=evidence("node-a"), node_b=evidence("node-b"))
    assert state_of(hearing.view.combined_evidence("node-b"), NOW) is EvidenceState.ABSENT
    hearing.view.changed(raw(spire_server=entry(banned=True)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_a_ban_beats_a_living_proof() -> None:
    hearing = Hearing("spire-server", "jwt-svid")
    proof = entry(since=SAID, until=LATER)
    hearing.view.changed(raw(jwt_svid=proof, spire_server=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.FRESH
    hearing.view.changed(raw(2, jwt_svid=proof, spire_server={"banned": True, "conflict": False}))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_a_node_that_one_of_two_says_nothing_of_is_not_proven() -> None:
    """Its agent was evicted, or the other provider has not been asked yet."""
    hearing = Hearing("spire-server", "jwt-svid")
    hearing.view.changed(raw(jwt_svid=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.ABSENT


def test_what_a_source_said_that_is_not_asked_counts_for_nothing_at_once() -> None:
    hearing = Hearing("spire-server")
    others: Raw = {"jwt_svid": entry(since=SAID, until=LATER), "static": entry(hash=OTHER_HASH)}
    hearing.view.changed(raw(**others))
    assert hearing.view.combined_evidence("node-a") is None
    hearing.view.changed(raw(2, **others, spire_server=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.FRESH
    hearing.view.changed(raw(3, jwt_svid={"nobody": "reads it"}, spire_server=entry(banned=True)))
    assert state_of(hearing.view.combined_evidence("node-a"), NOW) is EvidenceState.BANNED


def test_a_deleted_object_is_no_evidence() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry()))
    hearing.view.deleted(raw(2, static=entry()))
    assert hearing.shown[-1] == ("node-a", None)
    hearing.view.changed(raw(3, static=entry()))
    hearing.view.replaced({})
    assert hearing.shown[-1] == ("node-a", None)


@pytest.mark.parametrize("is_node_first", [True, False], ids=["node first", "evidence first"])
def test_evidence_and_its_node_come_together(*, is_node_first: bool) -> None:
    fleet = Fleet()
    view = EvidenceView({}, asked=["static"])
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
        pytest.param(1, 0, EvidenceState.ABSENT, id="the proof of the node before"),
        pytest.param(0, 1, EvidenceState.ABSENT, id="the agent of the node before"),
    ],
)
def test_each_word_has_to_be_of_this_node_and_not_of_the_one_before(spire: int, proof: int, state: str) -> None:
    """The newer of two must not hide that the other is of the machine that had the name before."""
    fleet = Fleet()
    view = EvidenceView({}, asked=["spire-server", "jwt-svid"])
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


def test_a_proof_by_a_clock_that_is_ahead_is_not_of_the_node_that_came_after() -> None:
    fleet = Fleet()
    view = EvidenceView({}, asked=["jwt-svid"], skew=5 * SECOND)
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
@pytest.mark.defect("S0-2")
def test_what_is_written_counts_no_longer_than_evidence_may_here(source: str) -> None:
    """Written under a longer `--max-evidence-age`, by a process of yesterday or by hand, it is as old as it is."""
    shown: list[str] = []
    view = EvidenceView({}, asked=[source, "static"], skew=5 * SECOND, max_age=10 * MINUTE)
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


def test_what_somebody_wrote_down_has_the_end_that_he_gave_it() -> None:
    view = EvidenceView({}, asked=["static"], max_age=10 * MINUTE)
    view.changed(raw(static=entry(since="2026-03-02T11:00:00Z", until=LATER)))
    found = view.combined_evidence("node-a")
    assert found is not None
    assert found.until == datetime.fromisoformat(LATER)


@pytest.mark.parametrize("since", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"])
def test_a_moment_that_nobody_can_reckon_with_leaves_what_was_known(since: str) -> None:
    shown: list[str] = []
    view = EvidenceView({}, asked=["jwt-svid"], skew=MINUTE, max_age=HOUR)
    view.notify(shown.append)
    view.changed(raw(jwt_svid=entry(since=SAID, until=LATER, nonceDigest="d")))
    known = view.combined_evidence("node-a")
    assert known is not None
    view.changed(raw(2, jwt_svid=entry(since=since, until="9999-12-31T23:59:59Z", nonceDigest="d")))
    assert view.combined_evidence("node-a") == known


def test_an_object_that_cannot_be_read_leaves_what_was_known() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static={"hash": OTHER_HASH}))
    hearing.view.changed(raw(3, name="node-b", static=entry()))
    assert [name for name, _ in hearing.shown] == ["node-a", "node-b"]
    assert hearing.view.combined_evidence("node-a") == evolve(evidence("node-a"), source="static")


# Of a node that is gone.


PROVEN = NOW - MINUTE


def proven(until: timedelta = timedelta(), **members: Any) -> Raw:
    """What a node has sent a minute ago, good until so long from now."""
    said = {"since": stamp(PROVEN), "until": stamp(NOW + until), "nonceDigest": "n", "challenged": stamp(PROVEN)}
    return {"jwt-svid": entry(**{**said, **members})}


def stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def left_behind(*providers: Provider, sources: Raw, gone: bool = True) -> Scene:
    scene = Scene(*providers, awaited=["jwt-svid"])
    scene.nodes = set() if gone else {"node-a"}
    labels = {"app.kubernetes.io/managed-by": "gpuwarden"}
    scene.objects.put({"metadata": {"name": "node-a", "labels": labels}, "status": {"sources": sources}})
    return scene


async def test_evidence_of_a_node_that_is_gone_goes_when_nobody_speaks_of_it(static: Provider) -> None:
    scene = left_behind(static, sources=proven())
    scene.writer.births.changed({"metadata": {"name": "node-a", "resourceVersion": "1"}})
    assert await scene.step() == ["status node-a"]
    static.said = {}
    assert await scene.step() == ["status node-a"]
    scene.nodes.clear()
    assert await scene.step() == []  # the watch has not said so yet
    scene.writer.births.deleted({"metadata": {"name": "node-a", "resourceVersion": "2"}})
    assert await scene.step() == ["delete node-a"]
    assert [await scene.step() for _ in range(2)] == [[], []]
    assert scene.objects.objects == {}


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param(proven(until=2 * MINUTE), id="a proof that is good"),
        pytest.param(proven(since=stamp(NOW)), id="a token that was issued a moment ago"),
        pytest.param(proven(challenged=stamp(NOW)), id="a challenge that is young"),
        pytest.param({"jwt-svid": {"hash": 1}}, id="what cannot be read"),
        pytest.param({"jwt-svid": {"banned": True, "conflict": False}}, id="a ban of somebody else"),
    ],
)
async def test_what_may_be_needed_stays_without_a_node(sources: Raw) -> None:
    scene = left_behind(sources=sources)
    assert await scene.step() == []
    assert scene.asked_for == []


async def test_a_proof_goes_when_nothing_of_it_can_be_replayed() -> None:
    scene = left_behind(sources=proven(challenged=stamp(NOW)))
    assert await scene.step(59) == []
    assert await scene.step() == ["delete node-a"]


async def test_a_node_that_a_watch_has_missed_keeps_its_evidence() -> None:
    scene = left_behind(sources=proven(), gone=False)
    assert await scene.step() == []
    assert scene.asked_for == ["node-a"]


async def test_while_the_watch_of_nodes_is_interrupted_nothing_is_deleted() -> None:
    scene = left_behind(sources=proven())
    scene.are_nodes_current = False
    assert await scene.step() == []
    scene.are_nodes_current, scene.objects.is_away = True, True
    assert await scene.step() == []
    scene.objects.is_away = False
    assert await scene.step() == ["delete node-a"]


async def test_while_a_provider_has_not_answered_nothing_is_deleted(static: Provider) -> None:
    static.is_away, static.said = True, {}
    scene = left_behind(static, sources=proven())
    assert await scene.step() == []
    static.is_away = False
    assert await scene.step() == ["delete node-a"]
    static.is_away = True  # what it has said stands
    scene.objects.put(left_behind(sources=proven()).objects.objects["node-a"])
    assert await scene.step() == ["delete node-a"]


async def test_what_a_provider_says_keeps_the_object_of_a_node_that_is_not_there(static: Provider) -> None:
    scene = left_behind(static, sources=proven())
    assert await scene.step() == ["status node-a"]
    assert await scene.step() == []


async def test_a_proof_that_comes_meanwhile_keeps_the_object() -> None:
    scene = left_behind(sources=proven())
    scene.objects.tell()
    scene.objects.status("node-a", sources=proven(until=HOUR, nonceDigest="n2"))  # the watch is behind
    told, scene.objects.tell = scene.objects.tell, lambda: None  # type: ignore[method-assign]  # the watch is behind
    assert await scene.step() == []
    scene.objects.tell = told  # type: ignore[method-assign]  # and catches up
    assert await scene.step() == []


async def test_what_a_hand_has_made_stays() -> None:
    scene = left_behind(sources=proven())
    scene.objects.put({"metadata": {"name": "node-a"}, "status": {"sources": proven()}})
    assert await scene.step() == []
