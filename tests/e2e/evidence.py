"""Evidence of nodes, written as a replica of `serve` writes it after a challenge."""

from datetime import datetime, timedelta

from tests.e2e.kube import Kube
from tests.e2e.test_discovery import NODE_EVIDENCES
from webhook.evidence.node_evidence import new_node_evidence
from webhook.runtime.clock import utc_now


async def write_evidence(kube: Kube, node: str, hash: str, lasts: timedelta) -> datetime:
    """Returns its end. A server that challenges nodes reads it (`challenging`)."""
    made = await kube.find(NODE_EVIDENCES, node)
    made = made or await kube.create(NODE_EVIDENCES, new_node_evidence(node))
    now = utc_now()
    end = (now + lasts).replace(microsecond=0)
    entry = {"hash": hash, "banned": False, "conflict": False, "since": stamp(now), "until": stamp(end)}
    await kube.replace(NODE_EVIDENCES, {**made, "status": {"sources": {"jwt-svid": entry}}}, None, "status")
    return end


def stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
