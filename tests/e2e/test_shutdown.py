"""An elected process finishes its work when it is stopped, and another one takes over immediately."""

import time
from pathlib import Path

import pytest

from scripts.controlplane.cluster import Cluster
from tests.e2e.kube import Kube, Resource, wait_until
from tests.e2e.measurements import report_figures
from tests.e2e.test_ledger import installed
from tests.running import reconciling

LEASES = Resource("apis/coordination.k8s.io/v1", "leases")


async def test_stopped_process_releases_its_lease(
    cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await installed(kube)
    flags = ("--kubeconfig", str(cluster.kubeconfig), "--lease-namespace", namespace, "--log-level", "info")

    async def holder() -> str:
        lease = await kube.find(LEASES, "gpuwarden-reconcile", namespace)
        return str(lease and lease["spec"].get("holderIdentity", ""))

    with reconciling(tmp_path, flags) as first:
        await wait_until(holder, lambda name: f"-{first.process.pid}_" in name)
        with reconciling(tmp_path, flags) as second:
            assert f"-{first.process.pid}_" in await holder()
            signalled = time.monotonic()
            code, _, log = first.stop()
            stopped = time.monotonic()
            assert code == 0
            assert f"-{first.process.pid}_" not in await holder(), log
            await wait_until(holder, lambda name: f"-{second.process.pid}_" in name)
            report_figures(
                request, seconds_to_stop=stopped - signalled, seconds_until_another_led=time.monotonic() - signalled
            )
