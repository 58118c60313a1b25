"""A node, or an attacker with its disk, replays a token, or uses the evidence of a previous node of that name."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.builders import HASH
from tests.e2e.kube import (
    NODES,
    Kube,
    gone,
)
from tests.e2e.test_proofs import NODE, Harness, account_of, another, create_node, new_harness


@pytest.fixture
async def account(cluster: Cluster, kube: Kube) -> AsyncIterator[Path]:
    async with account_of(cluster, kube) as found:
        yield found


@pytest.fixture
async def harness(cluster: Cluster, kube: Kube, account: Path, tmp_path: Path) -> AsyncIterator[Harness]:
    async with new_harness(cluster, kube, account, tmp_path) as found:
        yield found


@pytest.mark.defect("extender-2")
async def test_all_replicas_together_accept_a_token_once(harness: Harness) -> None:
    text = await harness.token(harness.replicas[0])
    answers = await asyncio.gather(*(harness.posted(one, text) for one in harness.replicas * 10))
    assert Counter(answers) == {200: 1, 409: 19}


async def test_used_token_is_refused_after_a_restart(harness: Harness, account: Path, tmp_path: Path) -> None:
    text = await harness.token(harness.replicas[0])
    assert await harness.posted(harness.replicas[0], text) == 200
    async with another(harness, account, tmp_path) as again:
        assert await harness.posted(again, text) == 409
        assert await harness.admits(again, HASH)


async def test_recreated_node_must_prove_itself_again(harness: Harness) -> None:
    first, _ = harness.replicas
    await harness.proves(first)
    await harness.all_admit(HASH, admitted=True)
    in_hand = await harness.token(first)
    await harness.kube.delete(NODES, NODE)
    await gone(harness.kube, NODES, NODE)
    assert await harness.posted(first, in_hand) == 403
    await create_node(harness.cluster, harness.kube)
    assert await harness.posted(first, in_hand) == 403
    assert (await harness.entry())["hash"] == HASH  # the evidence of the old node exists and is not valid
    await harness.all_admit(HASH, admitted=False)
    await harness.proves(first)
    await harness.all_admit(HASH, admitted=True)
