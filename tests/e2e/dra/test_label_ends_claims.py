"""The label of a node whose GPUs kube-scheduler allocates is changed for reservations, while claims have its GPUs."""

from typing import Any

import pytest

from tests.e2e.dra.gpus import RESOURCE_CLAIMS, proof_devices
from tests.e2e.dra.test_bound_claims import asking, claims, pairs  # noqa: F401 - a fixture
from tests.e2e.dra.test_reserved_claims import GPUS, HASH, INJECTION, LEASES, A, B, Claims
from tests.e2e.kube import NODES, PODS, ApiError, Kube, Raw, pod, wait_until
from tests.e2e.test_ledger import GPU_NODES
from webhook.core.device import CLAIMED
from webhook.core.proof_claims import EVIDENCE_ENDED
from webhook.core.proof_devices import KEPT_AFTER_END

PIN = {"kubernetes.io/hostname": A}
HAND_OVER = KEPT_AFTER_END.total_seconds() + 60


def by_variables(name: str) -> Raw:
    return pod(name, 1, {"gpuwarden.io/required-hash": HASH}, nodeSelector=PIN)


async def refusal(kube: Kube, asked: Raw, namespace: str) -> str:
    try:
        await kube.create(PODS, asked, namespace, dryRun="All")
    except ApiError as exc:
        return exc.message
    return ""


async def spec_of(kube: Kube) -> Raw:
    return dict((await kube.get(GPU_NODES, A))["spec"])


async def label(kube: Kube, injection: str | None) -> None:
    await kube.patch(NODES, A, {"metadata": {"labels": {INJECTION: injection}}})


async def change_is_seen(kube: Kube, namespace: str) -> None:
    """Waits until the replica has seen all changes of nodes so far: a later one has an effect."""
    anywhere = pod("probe", 0, {"gpuwarden.io/required-hash": HASH}, nodeSelector={"kubernetes.io/hostname": B})
    await kube.patch(NODES, B, {"spec": {"unschedulable": True}})
    await wait_until(lambda: refusal(kube, anywhere, namespace))
    await kube.patch(NODES, B, {"spec": {"unschedulable": None}})
    await wait_until(lambda: refusal(kube, anywhere, namespace), lambda text: not text)


async def test_label_alone_reserves_no_gpu_that_a_claim_may_have(claims: Claims, kube: Kube) -> None:  # noqa: F811
    """While `reconcile` is down, nothing ends the allocation by claims, and no GPU is marked."""
    async with claims.by_variables() as other:
        assert (await spec_of(kube))["injection"] == "native"
        await claims.here.reconcilers[-1].kill()
        await label(kube, "nvidia")
        await change_is_seen(kube, other)
        await kube.create(PODS, asking("claimed", 2, nodeSelector=PIN), claims.namespace)
        assert len(await pairs(claims, "claimed")) == 2
        with pytest.raises(ApiError, match="1 has another injection"):
            await kube.create(PODS, by_variables("reserved"), other)
        assert await claims.here.held() == {}


@pytest.mark.long
async def test_gpus_go_from_claims_to_reservations_and_back(claims: Claims, kube: Kube) -> None:  # noqa: F811
    async with claims.by_variables() as other:
        await kube.create(PODS, asking("claimed", nodeSelector=PIN), claims.namespace)
        (taken,) = await pairs(claims, "claimed")
        await label(kube, "nvidia")
        await wait_until(lambda: proof_devices(kube, A), lambda found: all(map(is_closed, found.values())))
        # An election in between.
        await claims.here.reconcilers[-1].kill()
        await kube.delete(LEASES, "gpuwarden-reconcile", claims.here.own_namespace)
        await claims.here.reconciler()
        assert "another injection" in await refusal(kube, by_variables("early"), other)
        spec = await wait_until(lambda: spec_of(kube), lambda spec: spec["injection"] == "nvidia", HAND_OVER)
        assert {one["uuid"]: one.get("mismatch") for one in spec["devices"]}[taken.gpu] == CLAIMED
        await wait_until(lambda: refusal(kube, by_variables("probe"), other), lambda text: not text)
        await kube.create(PODS, by_variables("reserved"), other)
        reserved = await claims.runs("reserved", other)
        assert reserved["metadata"]["annotations"][GPUS] != taken.gpu
        assert "1 has no free GPU" in await refusal(kube, by_variables("second"), other)
        await claims.gone("claimed")
        await wait_until(lambda: kube.list(RESOURCE_CLAIMS, claims.namespace), lambda found: not found)
        await wait_until(lambda: refusal(kube, by_variables("second"), other), lambda text: not text)
        # Back: the GPU of the reservation stays its own.
        await label(kube, None)
        await wait_until(lambda: spec_of(kube), lambda spec: spec["injection"] == "native")
        await kube.create(PODS, asking("again", nodeSelector=PIN), claims.namespace)
        assert [one.gpu for one in await pairs(claims, "again")] == [taken.gpu]


def is_closed(device: dict[str, Any]) -> bool:
    return EVIDENCE_ENDED in [one["key"] for one in device.get("taints", ())]
