"""NodeEvidence in the API server: each source writes its own entry, seldom; every replica hears of all."""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from attrs import evolve

from tests.builders import HASH, NOW, OTHER_HASH, SECOND, Raw, evidence
from tests.fake_objects import FakeObjects
from webhook.core.evidence import Evidence, EvidenceState, state_of
from webhook.core.fleet import Fleet
from webhook.evidence import EvidenceUnavailableError
from webhook.inventory.gpu_nodes import ClusterInventory
from webhook.node_evidences import POLL_EVERY, EvidenceView, EvidenceWriter

HOUR = timedelta(hours=1)
SAID, LATER = "2026-03-02T12:00:00Z", "2026-03-02T13:00:00Z"


class Provider:
    """Says what the test says."""

    is_for_development = False

    def __init__(self, name: str, **said: Evidence) -> None:
        self.name = name
        self.said: dict[str, Evidence] = {node.replace("_", "-"): one for node, one in said.items()}
        self.is_away = False
        self.polls = 0

    async def poll(self) -> Mapping[str, Evidence]:
        self.polls += 1
        if self.is_away:
            raise EvidenceUnavailableError(self.name)
        return self.said


class Scene:
    def __init__(self, *providers: Provider, retired: Iterable[str] = ()) -> None:
        self.now = NOW
        self.is_current = True
        self.objects = FakeObjects()
        self.errors: list[str] = []
        self.writer = EvidenceWriter(
            self.objects,
            providers,
            lambda: self.now,
            lambda: self.is_current,
            retired=retired,
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
    assert not scene.writer.is_owed("node-a")  # nobody has said anything yet
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


async def test_an_api_server_that_is_away_is_asked_again_in_the_next_pass(static: Provider) -> None:
    scene = Scene(static)
    scene.objects.is_away = True
    assert await scene.step() == []
    scene.objects.is_away = False
    assert await scene.step(0.5) == ["create node-a", "status node-a"]


async def test_what_the_api_server_refuses_keeps_nobody_else_waiting(static: Provider) -> None:
    static.said["node-b"] = evidence("node-b")
    scene = Scene(static)
    scene.objects.refused = {"node-a"}
    assert await scene.step() == ["create node-b", "status node-b"]
    assert await scene.step() == []


# What a replica hears.


class Hearing:
    def __init__(self, **own: Evidence) -> None:
        self.shown: list[tuple[str, Evidence | None]] = []
        self.view = EvidenceView(
            {node.replace("_", "-"): one for node, one in own.items()},
            show=lambda name: self.shown.append((name, self.view.word_on(name))),
        )


def raw(version: int = 1, name: str = "node-a", **sources: Any) -> Raw:
    entries = {source.replace("_", "-"): one for source, one in sources.items()}
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"sources": entries}}


def test_what_is_said_is_shown_and_remembered() -> None:
    hearing = Hearing()
    hearing.view.replaced({"/node-a": raw(static=entry())})
    assert hearing.shown == [("node-a", evidence("node-a"))]
    assert hearing.view.word_on("node-a") == evidence("node-a")
    assert hearing.view.word_on("node-b") is None


def test_only_news_are_shown() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static=entry()))
    assert len(hearing.shown) == 1


def test_all_sources_count() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry(hash=OTHER_HASH), jwt_svid=entry(since=SAID, until=LATER)))
    assert state_of(hearing.view.word_on("node-a"), NOW) is EvidenceState.CONFLICT


def test_what_this_process_was_told_itself_counts_too() -> None:
    hearing = Hearing(node_a=evidence("node-a"), node_b=evidence("node-b"))
    hearing.view.changed(raw(jwt_svid=entry(banned=True)))
    assert state_of(hearing.view.word_on("node-a"), NOW) is EvidenceState.BANNED
    assert hearing.view.word_on("node-b") == evidence("node-b")


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
    inventory = ClusterInventory(fleet, lambda: NOW, proven=lambda name: view.word_on(name))
    view = EvidenceView({}, show=inventory.prove)
    node = {"metadata": {"name": "node-a"}}
    if is_node_first:
        inventory.know_node(node)
    view.changed(raw(static=entry()))
    if not is_node_first:
        inventory.know_node(node)
    states = [fleet.berths["node-a"].state]
    view.deleted(raw(2))
    states.append(fleet.berths["node-a"].state)
    assert states == [EvidenceState.FRESH, EvidenceState.ABSENT]


def test_an_object_that_cannot_be_read_leaves_what_was_known() -> None:
    hearing = Hearing()
    hearing.view.changed(raw(static=entry()))
    hearing.view.changed(raw(2, static={"hash": OTHER_HASH}))
    hearing.view.changed(raw(3, name="node-b", static=entry()))
    assert [name for name, _ in hearing.shown] == ["node-a", "node-b"]
    assert hearing.view.word_on("node-a") == evolve(evidence("node-a"), source="static")
