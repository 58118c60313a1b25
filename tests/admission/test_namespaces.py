"""What namespaces require, by a watch. A namespace that is not known yet is looked up."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api_client import client_of
from tests.builders import HASH, OTHER_HASH, Raw
from tests.ledger.test_api_pods import ApiServer
from tests.ledger.test_api_pods import api_server as api_server  # a fixture
from webhook.admission.api_namespaces import ApiNamespaces
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError, NoDemands, WatchedNamespaces
from webhook.core.claim import ClaimRules
from webhook.core.hashes import NO_HASH_POLICY, HashPolicy

KEY = "gpuwarden.io/required-hash"


def namespace(name: str, required: str | None = None, version: int = 1) -> Raw:
    notes = {} if required is None else {KEY: required}
    return {"kind": "Namespace", "metadata": {"name": name, "resourceVersion": str(version), "annotations": notes}}


class Api:
    """Namespaces of a quorum read; records the lookups."""

    def __init__(self, *there: Raw) -> None:
        self.there = {one["metadata"]["name"]: one for one in there}
        self.asked: list[str] = []
        self.is_away = False

    async def get(self, name: str) -> Raw | None:
        self.asked.append(name)
        if self.is_away:
            raise NamespacesUnavailableError("away")
        return self.there.get(name)


async def test_known_namespace_is_not_looked_up() -> None:
    api = Api()
    namespaces = WatchedNamespaces(api)
    namespaces.view.replaced({"/ml": namespace("ml", HASH), "/web": namespace("web")})
    assert await namespaces.bond("ml") == HashPolicy("ml", (HASH,))
    assert await namespaces.bond("web") == NO_HASH_POLICY
    namespaces.view.changed(namespace("ml", OTHER_HASH, version=2))
    assert await namespaces.bond("ml") == HashPolicy("ml", (OTHER_HASH,))
    assert api.asked == []


async def test_unknown_namespace_is_looked_up() -> None:
    api = Api(namespace("new", HASH))
    namespaces = WatchedNamespaces(api)
    assert namespaces.known("new") is None
    assert await namespaces.bond("new") == HashPolicy("new", (HASH,))
    assert await namespaces.bond("nowhere") == NO_HASH_POLICY
    assert api.asked == ["new", "nowhere"]


async def test_recreated_namespace_is_looked_up() -> None:
    namespaces = WatchedNamespaces(Api(namespace("ml", HASH, version=3)))
    namespaces.view.changed(namespace("ml"))
    namespaces.view.deleted(namespace("ml", version=2))
    assert await namespaces.bond("ml") == HashPolicy("ml", (HASH,))


async def test_failed_lookup_of_a_namespace_raises() -> None:
    api = Api()
    api.is_away = True
    with pytest.raises(NamespacesUnavailableError):
        await WatchedNamespaces(api).bond("new")


async def test_unreadable_annotation_replaces_a_readable_one() -> None:
    namespaces = WatchedNamespaces(Api())
    namespaces.view.changed(namespace("ml", HASH))
    namespaces.view.changed(namespace("ml", "a,,b", version=2))
    bond = await namespaces.bond("ml")
    assert bond.hashes == ()
    assert bond.mistakes


async def test_claims_are_read_by_their_namespaces_policy() -> None:
    namespaces = WatchedNamespaces(Api(namespace("new", OTHER_HASH)))
    namespaces.view.changed(namespace("ml", HASH))
    reading = ClaimReader(ClaimRules(resource="example.com/gpu"), namespaces)
    assert await reading.within("ml") == ClaimRules(resource="example.com/gpu", hash_policy=HashPolicy("ml", (HASH,)))
    assert (await reading.within("new")).hash_policy.hashes == (OTHER_HASH,)
    assert reading.known_within("ml").hash_policy.hashes == (HASH,)
    assert reading.known_within("new").hash_policy is NO_HASH_POLICY
    assert await ClaimReader(ClaimRules(), NoDemands()).within("ml") == ClaimRules()


# Reading one namespace.


@pytest.fixture
async def lookup(api_server: ApiServer) -> AsyncIterator[ApiNamespaces]:
    async with client_of(api_server.port) as api:
        yield ApiNamespaces(api)


async def test_namespace_is_read_with_a_quorum(api_server: ApiServer, lookup: ApiNamespaces) -> None:
    api_server.says(200, namespace("ml", HASH))
    assert await lookup.get("ml") == namespace("ml", HASH)
    api_server.says(404, {"kind": "Status", "code": 404})
    assert await lookup.get("ml") is None
    assert api_server.asked == ["/api/v1/namespaces/ml"] * 2


@pytest.mark.parametrize(
    ("code", "raw"),
    [
        pytest.param(200, namespace("other", HASH), id="another"),
        pytest.param(200, {"kind": "NamespaceList", "items": []}, id="a-list"),
        pytest.param(200, b"<html>", id="no-json"),
        pytest.param(200, [], id="no-object"),
        pytest.param(403, {"kind": "Status", "code": 403}, id="forbidden"),
        pytest.param(500, {"kind": "Status", "code": 500}, id="a-failure"),
        pytest.param(429, b"", id="too-many"),
    ],
)
async def test_malformed_answer_does_not_waive_a_namespaces_policy(
    api_server: ApiServer,
    lookup: ApiNamespaces,
    code: int,
    raw: Any,
) -> None:
    api_server.says(code, raw)
    with pytest.raises(NamespacesUnavailableError):
        await lookup.get("ml")


async def test_unreachable_api_server_raises_namespaces_unavailable() -> None:
    async with client_of(1) as api:
        with pytest.raises(NamespacesUnavailableError):
            await ApiNamespaces(api).get("ml")
