"""Which devices are allocated, as claims come, change and go."""

from collections.abc import Mapping

from tests.builders import Raw
from webhook.dra.claims import AllocatedClaims

OURS, THEIRS = "attested.gpuwarden.io", "gpu.nvidia.com"


def claim(name: str, *devices: tuple[str, str, str], pod: str = "p1") -> Raw:
    results = [{"driver": driver, "pool": pool, "device": device} for driver, pool, device in devices]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": [consumer(pod)]} if results else {}
    return {"metadata": {"name": name, "namespace": "ml", "uid": f"uid-{name}"}, "status": status}


def consumer(uid: str) -> Raw:
    return {"resource": "pods", "name": uid, "uid": uid}


def listed(*claims: Raw) -> Mapping[str, Raw]:
    return {f"ml/{one['metadata']['name']}": one for one in claims}


def test_allocated_devices_are_known_by_driver_and_pool() -> None:
    claims = AllocatedClaims()
    claims.changed(claim("a", (THEIRS, "node-a", "gpu-0"), (OURS, "node-a", "p-0")))
    claims.changed(claim("b", (OURS, "node-b", "p-0")))
    assert set(claims.proofs_in_use("node-a")) == {"p-0"}
    assert claims.devices(THEIRS, "node-a")["gpu-0"]["ml/a"].pods == ("p1",)
    assert set(claims.proofs_in_use("node-c")) == set()
    assert claims.take_changes() == {"node-a", "node-b"}
    assert claims.take_changes() == set()


def test_device_is_in_use_until_the_last_of_its_claims_is_gone() -> None:
    claims = AllocatedClaims()
    both = claim("a", (OURS, "node-a", "p-0"), (OURS, "node-a", "p-1")), claim("b", (OURS, "node-a", "p-0"))
    claims.replaced(listed(*both))
    claims.take_changes()
    claims.changed(claim("a"))
    assert set(claims.proofs_in_use("node-a")) == {"p-0"}
    assert claims.take_changes() == {"node-a"}
    claims.deleted(both[1])
    assert set(claims.proofs_in_use("node-a")) == set()


def test_claim_that_is_missing_in_a_new_list_was_deleted() -> None:
    claims = AllocatedClaims()
    claims.replaced(listed(claim("a", (OURS, "node-a", "p-0")), claim("b", (OURS, "node-b", "p-0"))))
    claims.take_changes()
    claims.replaced(listed(claim("b", (OURS, "node-b", "p-0"))))
    assert set(claims.proofs_in_use("node-a")) == set()
    assert set(claims.proofs_in_use("node-b")) == {"p-0"}
    assert claims.take_changes() == {"node-a"}


def test_new_pod_of_a_claim_changes_no_device() -> None:
    claims = AllocatedClaims()
    claims.changed(claim("a", (OURS, "node-a", "p-0")))
    claims.take_changes()
    claims.changed(claim("a", (OURS, "node-a", "p-0"), pod="p2"))
    assert claims.take_changes() == set()
    assert claims.devices(OURS, "node-a")["p-0"]["ml/a"].pods == ("p2",)


def test_claim_that_cannot_be_read_keeps_its_devices() -> None:
    claims = AllocatedClaims()
    claims.changed(claim("a", (OURS, "node-a", "p-0")))
    damaged = claim("a", (OURS, "node-a", "p-0"))
    damaged["status"]["allocation"] = 7
    claims.changed(damaged)
    assert set(claims.proofs_in_use("node-a")) == {"p-0"}
