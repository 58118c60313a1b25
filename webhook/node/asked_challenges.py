"""Learns from the API server that this node has to answer a new challenge.

`reconcile` writes a time into an annotation of the node's first slice when a claim waits for an answer.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from attrs import define, field

from webhook.core.raw import Raw
from webhook.kube.client import ApiClient
from webhook.kube.paths import RESOURCE_SLICES_PATH
from webhook.kube.resource_slices import CHALLENGE_AFTER, slice_name
from webhook.kube.watch import Watch


@define(eq=False, repr=False)
class AskedChallenges:
    """Listener of the watch of the slice."""

    _last: object = field(default=None, init=False)
    _is_asked: asyncio.Event = field(factory=asyncio.Event, init=False)

    def watch(self, api: ApiClient, node: str) -> Watch:
        return Watch(api, RESOURCE_SLICES_PATH, self, only={"fieldSelector": f"metadata.name={slice_name(node, 0)}"})

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        after = (raw["metadata"].get("annotations") or {}).get(CHALLENGE_AFTER)
        if after != self._last:
            self._last = after
            self._is_asked.set()

    def deleted(self, raw: Raw) -> None:
        """What was asked stays."""

    async def sleep(self, seconds: float) -> None:
        """Ends early when the node has to answer a challenge."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_asked.wait()
        self._is_asked.clear()
