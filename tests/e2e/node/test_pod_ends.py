"""On a real node with `attest`: an orphan's GPU is free again when the node reports that nothing of its pod is left.
Heartbeats of the containers prove it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from scripts.controlplane.cluster import Cluster
from scripts.node.real import RealNode
from tests.e2e.kube import EVENTS, PODS, Kube, Raw, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.node.containers import GPUS, NODE, container, real_pod, runs
from tests.e2e.node.front import HASH, installed_on
from tests.e2e.node.test_delivered import NIC, marks, nic_plugin, reasons
from tests.e2e.node.test_delivery import devices_by_uuid
from tests.e2e.node.test_force_delete import create_until_admitted, delete, lives, now, overlaps
from tests.e2e.processes import Site
from tests.evidence.jwt.jwt_doubles import JwtWorkloadApiDouble
from tests.evidence.jwt.tokens import TRUST_DOMAIN, SigningKey, evidence_id
from tests.running import GPUWARDEN

GRACE, MARGIN = 40, 90
FLAGS: Final = ("--orphan-margin", f"{MARGIN}s", "--max-grace", "150s")
# Consistent polls of the node over 5 s; a request every 5 s or so; an orphan that is 10 s old; the reconciler.
SOON: Final = 25.0
# The quick container's lifetime after SIGTERM: `attest` must see its sandbox for some time after the forced deletion.
QUICK: Final = 12
KEY: Final = SigningKey.make()
# Writes 20 lines per second for each GPU that it sees. SIGTERM ends it after QUICK seconds, or never; a file ends it at
# once.
BEATS: Final = """
left=
trap '{on_term}' TERM
uuids=$(/usr/bin/nvidia-smi -L | sed 's/.*UUID: //; s/)//')
while [ "$left" != 0 ] && [ ! -e /beats/stop/{name} ] && [ ! -e /beats/stop/all ]; do
  read now rest < /proc/uptime
  for uuid in $uuids; do echo $now {name} >> /beats/gpus/$uuid; done
  if [ -n "$left" ]; then left=$((left - 1)); fi
  usleep 50000
done
"""


def heartbeat_container(name: str, beats: Path, *, ends: bool = False) -> Raw:
    script = BEATS.replace("{name}", name).replace("{on_term}", f"left={20 * QUICK}" if ends else "")
    main = container(1, script=script, volumeMounts=[{"name": "beats", "mountPath": "/beats"}])
    return real_pod(name, main, grace=GRACE, volumes=[{"name": "beats", "hostPath": {"path": str(beats)}}])


@pytest.fixture
def beats(tmp_path: Path) -> Path:
    """A directory with a heartbeat file for each GPU, and a file for each container that is to stop."""
    for name in ("gpus", "stop"):
        (tmp_path / "beats" / name).mkdir(parents=True)
    return tmp_path / "beats"


@pytest.fixture
async def here(
    real_cluster: Cluster, real_kube: Kube, real_node: RealNode, plain_namespace: str, tmp_path: Path, beats: Path
) -> AsyncIterator[Site]:
    """gpuwarden on a node that attests itself. A plain pod replaces that of the DaemonSet."""
    await real_kube.create(PODS, real_pod("attest"), plain_namespace)
    uid = (await runs(real_kube, plain_namespace, "attest"))["metadata"]["uid"]
    agent = JwtWorkloadApiDouble(str(tmp_path / "agent.sock"), KEY, [evidence_id(NODE, HASH)])
    await agent.start()
    spire = ("--spire-trust-domain", TRUST_DOMAIN, "--spire-workload-api", f"unix:{agent.path}")
    (tmp_path / "nonce.key").write_bytes(os.urandom(32))
    flags = ("--evidence", "jwt-svid", "--nonce-key", str(tmp_path / "nonce.key"), *spire, *FLAGS)

    @asynccontextmanager
    async def attesting(site: Site) -> AsyncIterator[None]:
        server = ["--server", f"https://127.0.0.1:{site.balancer.port}", "--server-ca", str(site.directory / "ca.crt")]
        sockets = ["--runtime-socket", "unix:/run/containerd/containerd.sock", "--pod-uid", uid]
        command = [GPUWARDEN, "attest", *server, "--node", NODE, *spire, *sockets]
        real_node.processes.spawn("attest", real_node.inside(*command))
        try:
            yield
        finally:
            real_node.kill("attest")

    try:
        async with installed_on(
            real_cluster, real_kube, tmp_path, [real_node], flags=flags, attesting=attesting
        ) as standing:
            yield standing
            (beats / "stop" / "all").touch()
    finally:
        await agent.stop()


async def test_gpu_is_released_soon_after_its_containers_have_ended_and_not_before(
    here: Site, beats: Path, request: pytest.FixtureRequest
) -> None:
    for name in ("quick", "slow", "stays-0", "stays-1"):
        await here.kube.create(PODS, heartbeat_container(name, beats, ends=name == "quick"), here.namespace)
    for name in ("quick", "slow", "stays-0", "stays-1"):
        await runs(here.kube, here.namespace, name)
    begun = time.monotonic()
    for grace in (GRACE, 0):  # a container has two seconds after a forced deletion
        for name in ("quick", "slow"):
            await delete(here, name, grace)
        await asyncio.sleep(1)
    first = await create_until_admitted(here, heartbeat_container("next-0", beats), GRACE + MARGIN)
    assert first < QUICK + SOON, "by time alone after more than two minutes"
    await runs(here.kube, here.namespace, "next-0")
    await create_until_admitted(here, heartbeat_container("next-1", beats), GRACE + MARGIN)
    second = time.monotonic() - begun
    await runs(here.kube, here.namespace, "next-1")
    await asyncio.sleep(1)
    report_figures(request, ended_after_12_s_and_offered_after=first, ended_after_40_s_and_offered_after=second)
    assert GRACE - 2 < second < GRACE + SOON
    found = lives(beats / "gpus")
    assert overlaps(found) == []
    assert sorted(tuple(pods) for pods in found.values()) == [
        ("quick", "next-0"),
        ("slow", "next-1"),
        ("stays-0",),
        ("stays-1",),
    ]
    reasons = await wait_until(lambda: end_reasons(here), lambda found: len(found) >= 2)
    assert all("its node reports that nothing uses it" in why for why in reasons), reasons


async def test_gpus_stay_reserved_while_the_kubelet_is_dead(
    here: Site, beats: Path, real_node: RealNode, request: pytest.FixtureRequest
) -> None:
    """A kubelet that has not seen the deletion would restart the container that ends here. When it is back it ends the
    others within two seconds: too soon for a poll to show that no sandbox follows, so time decides."""
    old = [f"old-{number}" for number in range(4)]
    for name in old:
        await here.kube.create(PODS, heartbeat_container(name, beats), here.namespace)
    for name in old:
        await runs(here.kube, here.namespace, name)
    await asyncio.to_thread(real_node.kill_kubelet)
    for name in old:
        await delete(here, name, 0)
    trying = asyncio.create_task(create_until_admitted(here, heartbeat_container("next", beats), GRACE + 2 * MARGIN))
    (beats / "stop" / "old-0").touch()
    await asyncio.sleep(2 * SOON)
    assert not trying.done()
    alive = {name for pods in lives(beats / "gpus").values() for name, one in pods.items() if now() - one.last < 5}
    assert alive == {"old-1", "old-2", "old-3"}
    began = time.monotonic()
    await asyncio.to_thread(real_node.start_kubelet)
    await trying
    took = time.monotonic() - began
    report_figures(request, offered_after_the_kubelet_is_back_and=took)
    assert took < GRACE + MARGIN + SOON
    await runs(here.kube, here.namespace, "next")
    await asyncio.sleep(1)
    found = lives(beats / "gpus")
    assert sum("next" in pods for pods in found.values()) == 1
    assert overlaps(found) == []


async def test_gpus_that_the_kubelet_gave_to_a_sidecar_are_reported(
    here: Site, real_cluster: Cluster, real_node: RealNode, request: pytest.FixtureRequest
) -> None:
    """A device plugin offers them under a name of its own. The status of the pod does not show them."""
    given = set(GPUS[2:])
    sidecar = container(name="sidecar", restartPolicy="Always", resources={"limits": {NIC: str(len(given))}})
    async with nic_plugin(here.kube, real_node, *given):
        await here.kube.create(PODS, real_pod("train", container(1), initContainers=[sidecar]), here.namespace)
        train = await runs(here.kube, here.namespace, "train")
        began = time.monotonic()
        reserved = train["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        wrong = dict.fromkeys(given - {reserved}, "in use by a pod that has not reserved it")
        if reserved not in given:
            wrong[reserved] = "its pod was given another GPU"
        await wait_until(lambda: marks(here.kube), lambda found: found == wrong, SOON)
        report_figures(request, reported_after=time.monotonic() - began)
        await wait_until(lambda: reasons(here.kube, here.namespace, "train"), lambda found: "GPUMismatched" in found)
        assert "allocatedResourcesStatus" not in train["status"]["containerStatuses"][0]
        states = {uuid: one["state"] for uuid, one in (await devices_by_uuid(here, real_cluster)).items()}
        assert {uuid for uuid, state in states.items() if state == "mismatched"} == wrong.keys()
        await delete(here, "train", 1)
        await wait_until(lambda: marks(here.kube), lambda found: not found)


async def end_reasons(here: Site) -> list[str]:
    """The reasons why orphans of this test's pods were released."""
    found = await here.kube.list(EVENTS, "default", fieldSelector=f"involvedObject.name={NODE},reason=OrphanEnded")
    return [one["message"] for one in found if f" of pod {here.namespace}/" in one["message"]]
