"""Static evidence."""

from webhook.core.evidence import Evidence
from webhook.evidence.static import StaticEvidence


async def test_node_hash_map_is_evidence() -> None:
    assert await StaticEvidence({"node-a": "abc123"}).poll() == {"node-a": Evidence("node-a", "abc123", "static")}


async def test_map_and_file_must_agree() -> None:
    evidence = StaticEvidence({"node-a": "abc", "node-b": "abc"})
    evidence.read_from_file(
        {"node-a": Evidence("node-a", "abc", "static"), "node-b": Evidence("node-b", "x", "static")}
    )
    said = await evidence.poll()
    assert (said["node-a"].is_conflict, said["node-b"].is_conflict) == (False, True)


async def test_new_file_replaces_the_old_entries() -> None:
    evidence = StaticEvidence({})
    evidence.read_from_file({"node-a": Evidence("node-a", "abc", "static")})
    evidence.read_from_file({})
    assert await evidence.poll() == {}
