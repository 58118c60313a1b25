"""The account of `attest` may close proof devices that have ended, and may change nothing else in any slice."""

import copy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio

from scripts.controlplane.cluster import Cluster
from tests.e2e.cluster_users import is_denied, refused
from tests.e2e.dra.gpus import GPU_DRIVER, RESOURCE_SLICES
from tests.e2e.dra.tenants import BROAD_RULES, HASH, Tenants, granted, guarded, in_seconds, tenants_of, version
from tests.e2e.kube import Kube, Raw, Resource, wait_until
from webhook.core.proof_claims import EVIDENCE_ENDED, EVIDENCE_ENDS
from webhook.core.proof_devices import ProofDevice
from webhook.kube.resource_slices import MAX_DEVICES, close_ended, closing_taint, slices_of, stamp
from webhook.runtime.clock import utc_now

ATTEST = "system:serviceaccount:gpuwarden:gpuwarden-attest"
NAME = "gpuwarden-closing-0"
FUTURE = "2999-01-01T00:00:00Z"
OWN_TAINT = "may only add the taint gpuwarden.io/evidence-ended to devices whose taint"
# The devices of the slice.
ENDED, TOO, CLOSED, LASTING, ENDLESS = range(5)
Change = Callable[[Raw], object]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """It serves the older versions of the API too, and no other test sees its policies."""
    older = "--runtime-config=resource.k8s.io/v1beta1=true,resource.k8s.io/v1beta2=true"
    with Cluster(tmp_path_factory.mktemp("closing"), flags={"kube-apiserver": [older]}) as running:
        yield running


def slice_with_ended_devices() -> Raw:
    now = utc_now()
    ends = [now - timedelta(hours=1), now - timedelta(seconds=1), now - timedelta(hours=1), now + timedelta(hours=1)]
    devices = [ProofDevice.of(f"GPU-{k}", HASH, end) for k, end in enumerate([*ends, None])]
    devices[CLOSED] = devices[CLOSED].closed_by(now)
    (raw,) = slices_of("closing", devices, 1, GPU_DRIVER)
    return raw


# What the account may try: changes of the slice.


def closed(*places: int, **taint: Any) -> Change:
    """Closes these devices."""

    def change(raw: Raw) -> None:
        for place in places:
            taints = raw["spec"]["devices"][place].setdefault("taints", [])
            end = next((one["timeAdded"] for one in taints if one["key"] == EVIDENCE_ENDS), stamp(utc_now()))
            taints.append({**closing_taint(end), **taint})

    return change


def forged_times(fields: Raw) -> Change:
    """Closes a device that has not ended, and claims that its devices were written in the future."""

    def change(raw: Raw) -> None:
        closed(LASTING)(raw)
        entry = {"manager": "forged", "operation": "Update", "apiVersion": "resource.k8s.io/v1", "time": FUTURE}
        fields_of_entry = {"fieldsType": "FieldsV1", "fieldsV1": fields}
        raw["metadata"]["managedFields"] = [
            *({**one, "time": FUTURE} for one in raw["metadata"]["managedFields"]),
            {**entry, **fields_of_entry},
        ]

    return change


def without_times(raw: Raw) -> None:
    closed(LASTING)(raw)
    raw["metadata"]["managedFields"] = []


def ends_at(place: int, end: str) -> Change:
    return lambda raw: raw["spec"]["devices"][place]["taints"][0].update(timeAdded=end)


def both(*changes: Change) -> Change:
    return lambda raw: [change(raw) for change in changes]


CHANGES: dict[str, Change] = {
    "closes a device that has not ended": closed(LASTING),
    "closes one that has ended and one that has not": closed(ENDED, LASTING),
    "closes a device without an end": closed(ENDLESS),
    "closes a device twice": closed(CLOSED),
    "with times of the future": forged_times({"f:spec": {"f:devices": {}}}),
    "with times of the future for other fields": forged_times({"f:spec": {"f:driver": {}}}),
    "with times of the future for parts of the devices": forged_times({"f:spec": {"f:devices": {"f:x": {}}}}),
    "without times": without_times,
    "closes for good": closed(ENDED, effect="NoExecute"),
    "closes with another time": closed(ENDED, timeAdded="2026-01-01T00:00:00Z"),
    "closes with a value": closed(ENDED, value="x"),
    "adds another taint": closed(ENDED, key="example.com/x"),
    "opens a device": lambda raw: raw["spec"]["devices"][CLOSED]["taints"].pop(1),
    "removes an end": lambda raw: raw["spec"]["devices"][LASTING].pop("taints"),
    "replaces an end": both(closed(ENDED), lambda raw: raw["spec"]["devices"][ENDED]["taints"].pop(0)),
    "moves an end away": ends_at(ENDED, FUTURE),
    "moves an end nearer": ends_at(LASTING, "2026-01-01T00:00:00Z"),
    "moves an end nearer and closes": both(ends_at(LASTING, "2026-01-01T00:00:00Z"), closed(LASTING)),
    "changes a hash": both(
        closed(ENDED), lambda raw: raw["spec"]["devices"][LASTING]["attributes"].update(hash={"string": "bb22"})
    ),
    "changes a closed device": both(
        closed(ENDED), lambda raw: raw["spec"]["devices"][ENDED]["attributes"].update(hash={"string": "bb22"})
    ),
    "renames a device": lambda raw: raw["spec"]["devices"][ENDED].update(name="x"),
    "removes a device": lambda raw: raw["spec"]["devices"].pop(),
    "adds a device": lambda raw: raw["spec"]["devices"].append({**raw["spec"]["devices"][ENDLESS], "name": "x"}),
    "reorders devices": lambda raw: raw["spec"]["devices"].reverse(),
    "removes all devices": lambda raw: raw["spec"].pop("devices"),
    "changes the pool": both(closed(ENDED), lambda raw: raw["spec"]["pool"].update(generation=9)),
    "counts other slices": lambda raw: raw["spec"]["pool"].update(resourceSliceCount=2),
    "adds a label": both(closed(ENDED), lambda raw: raw["metadata"].update(labels={"a": "b"})),
    "adds an annotation": lambda raw: raw["metadata"].update(annotations={"a": "b"}),
    "adds a finalizer": lambda raw: raw["metadata"].update(finalizers=["example.com/x"]),
    "adds an owner": both(
        closed(ENDED),
        lambda raw: raw["metadata"].update(
            ownerReferences=[{"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "u"}]
        ),
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def arena(own_cluster: Cluster) -> AsyncIterator[tuple[Tenants, Kube, dict[str, Raw | str]]]:
    """The users, the account with all rights on slices, and what it gets for each change without the policies."""
    async with AsyncExitStack() as stack:
        users = await stack.enter_async_context(tenants_of(own_cluster))
        attest = await granted(own_cluster, users.admin, stack, ATTEST, BROAD_RULES)
        await users.admin.create(RESOURCE_SLICES, slice_with_ended_devices())
        before: dict[str, Raw | str] = {}
        for name, change in CHANGES.items():
            before[name] = await changed(attest, change)
        async with guarded(users, {"slice": lambda users: changed(users.operator, closed(LASTING))}):
            yield users, attest, before


async def changed(kube: Kube, change: Change, of: Resource = RESOURCE_SLICES) -> Raw:
    """Replaces the slice by a changed one, as a dry run."""
    raw = copy.deepcopy(await kube.get(of, NAME))
    change(raw)
    return await kube.call("PUT", of.path(None, NAME), raw, {"dryRun": "All"})


@pytest.mark.parametrize("name", CHANGES)
async def test_other_change_is_refused_and_succeeds_without_the_policy(
    arena: tuple[Tenants, Kube, dict[str, Raw | str]], name: str
) -> None:
    _, attest, before = arena
    assert before[name]
    await refused(changed(attest, CHANGES[name]), f"{ATTEST} {OWN_TAINT}")


async def test_other_change_is_refused_in_an_older_version(arena: tuple[Tenants, Kube, Any]) -> None:
    _, attest, _ = arena
    older = version(RESOURCE_SLICES, "v1beta2")
    await refused(changed(attest, closed(LASTING), older), OWN_TAINT)
    await changed(attest, closed(ENDED), older)


@pytest.mark.parametrize("places", [(ENDED,), (TOO,), (ENDED, TOO), ()])
async def test_ended_devices_are_closed(arena: tuple[Tenants, Kube, Any], places: tuple[int, ...]) -> None:
    _, attest, _ = arena
    found = await changed(attest, closed(*places))
    keys = [[one["key"] for one in device.get("taints", ())] for device in found["spec"]["devices"]]
    assert [place for place, one in enumerate(keys) if EVIDENCE_ENDED in one] == sorted({*places, CLOSED})


async def test_full_slice_is_closed_at_once(arena: tuple[Tenants, Kube, Any]) -> None:
    """The cost of the policy is limited."""
    users, attest, _ = arena
    devices = [ProofDevice.of(f"GPU-{k:03}", "sha256:" + "ab" * 32, utc_now()) for k in range(MAX_DEVICES)]
    (raw,) = slices_of("full", devices, 1, GPU_DRIVER)
    full = await users.warden.create(RESOURCE_SLICES, raw)
    assert len(close_ended(full, utc_now())) == MAX_DEVICES
    await attest.call("PUT", RESOURCE_SLICES.path(None, raw["metadata"]["name"]), full, {"dryRun": "All"})


async def test_other_users_close_nothing(arena: tuple[Tenants, Kube, Any]) -> None:
    users, _, _ = arena
    await refused(changed(users.operator, closed(ENDED)), "are written by gpuwarden only, not by operator")
    await refused(changed(users.node, closed(ENDED)), "are written by gpuwarden only, not by system:node:")
    await changed(users.warden, closed(LASTING))


async def test_account_neither_creates_nor_deletes(arena: tuple[Tenants, Kube, Any]) -> None:
    _, attest, _ = arena
    (raw,) = slices_of("forged", [ProofDevice.of("GPU-x", HASH, utc_now())], 1, GPU_DRIVER)
    words = f"are written by gpuwarden only, not by {ATTEST}"
    await refused(attest.create(RESOURCE_SLICES, raw, dryRun="All"), words)
    await refused(attest.call("DELETE", RESOURCE_SLICES.path(None, NAME), query={"dryRun": "All"}), words)


async def test_slice_of_our_driver_is_not_made_of_another(arena: tuple[Tenants, Kube, Any]) -> None:
    """The driver is immutable, and slices of other drivers are not the account's concern."""
    _, attest, _ = arena
    (raw,) = slices_of("forged", [ProofDevice.of("GPU-x", HASH, None)], 1, GPU_DRIVER)
    await attest.create(RESOURCE_SLICES, {**raw, "spec": {**raw["spec"], "driver": "nic.other.com"}}, dryRun="All")


async def test_end_that_has_just_passed_is_closed(arena: tuple[Tenants, Kube, Any]) -> None:
    """By the API server's clock."""
    users, attest, _ = arena
    raw = await users.admin.get(RESOURCE_SLICES, NAME)
    raw["spec"]["devices"][TOO]["taints"][0]["timeAdded"] = in_seconds(4)
    await users.admin.replace(RESOURCE_SLICES, raw)
    await refused(changed(attest, closed(TOO)), OWN_TAINT)

    async def is_allowed() -> bool:
        return not await is_denied(changed(attest, closed(TOO)))

    await wait_until(is_allowed)
    now = stamp(utc_now())
    assert raw["spec"]["devices"][TOO]["taints"][0]["timeAdded"] <= now
