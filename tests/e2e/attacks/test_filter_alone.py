"""Attack: an invalid claim, where the extender's filter is the only guard and no webhook is installed."""

from tests.e2e.kube import PODS, Raw, wait_until
from tests.e2e.test_extender import HASH, WITH_A_GPU, Harness, accounts, harness

__all__ = ["accounts", "harness"]

KEY = "gpuwarden.io/required-hash"
ALIAS = "attestation-hash.my-company.com/required-hash"

INVALID = {
    "empty-hash": ({KEY: ""}, {}, "has an empty hash"),
    "empty-hash-alias": ({ALIAS: ""}, {}, "has an empty hash"),
    "empty-hash-with-a-gpu": ({KEY: ""}, WITH_A_GPU, "has an empty hash"),
    "empty-hash-in-a-list": ({KEY: f"{HASH},"}, {}, "has an empty hash"),
    "two-hash-keys": ({KEY: HASH, ALIAS: ""}, {}, "have different values"),
    "empty-count": ({"gpuwarden.io/gpu-count": ""}, {}, "is empty"),
    "broken-record": ({KEY: HASH, "gpuwarden.io/claim": "[]"}, {}, "was not written by gpuwarden"),
    "empty-map": ({"gpuwarden.io/gpu-map": ""}, WITH_A_GPU, "empty-map"),
    "shared-as-a-word": ({"gpuwarden.io/shared": "yes"}, WITH_A_GPU, "allowed are true and false"),
}


async def test_pod_with_an_invalid_claim_is_scheduled_on_no_node(harness: Harness) -> None:
    """One node is proven, two are not. A tenant's pod with an invalid claim is scheduled on none of them."""
    await harness.prove("ext-1", HASH)
    await harness.is_known("ext-1", proven=True)
    with harness.scheduler():
        for name, (annotations, spec, _) in INVALID.items():
            await harness.create(name, annotations, **spec)
        await harness.create("honest", {KEY: HASH})
        await harness.is_on("honest", "ext-1")
        assert await nodes_given(harness) == {}
        for name, (_, _, mistake) in INVALID.items():
            await harness.waits(name, "the pod's claim cannot be read: InvalidPod: ", mistake)


async def nodes_given(harness: Harness) -> dict[str, str]:
    """The nodes of the invalid pods, once the scheduler has considered each."""

    async def looked_at() -> list[Raw]:
        pods = await harness.kube.list(PODS, harness.namespace)
        return [one for one in pods if one["metadata"]["name"] in INVALID and one["status"].get("conditions")]

    found = await wait_until(looked_at, lambda pods: len(pods) == len(INVALID))
    return {one["metadata"]["name"]: one["spec"]["nodeName"] for one in found if "nodeName" in one["spec"]}
