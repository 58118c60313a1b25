"""One cluster with one real node for all of these tests; `front` installs gpuwarden in it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from scripts.controlplane.build import BuildError
from scripts.controlplane.cluster import Cluster
from scripts.node.build import CannotRunError, parts
from scripts.node.real import RealNode
from tests.e2e.conftest import TOOL_MISSING, new_namespace
from tests.e2e.kube import Kube
from tests.e2e.node.containers import GPUS, NODE, RUNTIME_CLASS, RUNTIME_CLASSES
from tests.e2e.node.front import installed_on
from tests.e2e.processes import Site
from tests.e2e.skipping import skip_or_fail


@pytest.fixture(scope="session")
def node_parts() -> None:
    """Skips the test with a reason if no real node can run; fails it where one is required."""
    try:
        parts()
    except CannotRunError as exc:
        skip_or_fail("NODE", str(exc))
    except BuildError as exc:
        pytest.exit(str(exc), returncode=TOOL_MISSING)


@pytest.fixture(scope="session")
def real_cluster(node_parts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with the node `real-0`. Tests may add other nodes, also simulated ones."""
    with Cluster(tmp_path_factory.mktemp("real"), real_nodes=True) as running:
        running.add_real_node(NODE, GPUS)
        with running.api() as api:
            api.post(RUNTIME_CLASSES.path(None), json=RUNTIME_CLASS).raise_for_status()
        yield running


@pytest.fixture(scope="session")
def real_node(real_cluster: Cluster) -> RealNode:
    """The real node. Tests can kill and start its processes and reboot it."""
    return real_cluster.real_node(NODE)


@pytest.fixture
async def real_kube(real_cluster: Cluster) -> AsyncIterator[Kube]:
    """A client with the administrator's credentials."""
    async with Kube(real_cluster.kubeconfig) as client:
        yield client


@pytest.fixture
async def plain_namespace(real_kube: Kube) -> AsyncIterator[str]:
    """A namespace that has not opted in to gpuwarden."""
    async with new_namespace(real_kube) as name:
        yield name


@pytest.fixture
async def front(real_cluster: Cluster, real_kube: Kube, real_node: RealNode, tmp_path: Path) -> AsyncIterator[Site]:
    """gpuwarden installed on the cluster: webhooks, policies, one replica, the reconciler, an opted-in namespace."""
    async with installed_on(real_cluster, real_kube, tmp_path, [real_node]) as here:
        yield here
