"""A node, or who has its disk, shows again what has been shown, or what the node before it of that name has proven."""

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
from tests.e2e.test_proofs import NODE, Scene, account_of, another, came_up, scene_of


@pytest.fixture
async def account(cluster: Cluster, kube: Kube) -> AsyncIterator[Path]:
    async with account_of(cluster, kube) as found:
        yield found


@pytest.fixture
async def scene(cluster: Cluster, kube: Kube, account: Path, tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_of(cluster, kube, account, tmp_path) as found:
        yield found


@pytest.mark.defect("S0-2")
async def test_a_token_is_taken_once_by_all_replicas_together(scene: Scene) -> None:
    text = await scene.token(scene.replicas[0])
    answers = await asyncio.gather(*(scene.posted(one, text) for one in scene.replicas * 10))
    assert Counter(answers) == {200: 1, 409: 19}


async def test_a_token_is_refused_after_a_restart_too(scene: Scene, account: Path, tmp_path: Path) -> None:
    text = await scene.token(scene.replicas[0])
    assert await scene.posted(scene.replicas[0], text) == 200
    async with another(scene, account, tmp_path) as again:
        assert await scene.posted(again, text) == 409
        assert await scene.admits(again, HASH)


async def test_a_node_made_anew_under_its_old_name_has_to_prove_itself_anew(scene: Scene) -> None:
    first, _ = scene.replicas
    await scene.proves(first)
    await scene.all_admit(HASH, admitted=True)
    in_hand = await scene.token(first)
    await scene.kube.delete(NODES, NODE)
    await gone(scene.kube, NODES, NODE)
    assert await scene.posted(first, in_hand) == 403
    await came_up(scene.cluster, scene.kube)
    assert await scene.posted(first, in_hand) == 403
    assert (await scene.entry())["hash"] == HASH  # what the old one proved is there, and counts for nothing
    await scene.all_admit(HASH, admitted=False)
    await scene.proves(first)
    await scene.all_admit(HASH, admitted=True)
