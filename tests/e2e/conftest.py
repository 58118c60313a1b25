"""One cluster for all of these tests, and a namespace for each."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest

from scripts.controlplane.build import BuildError, binaries
from scripts.controlplane.cluster import Cluster, gpu_node
from tests.e2e.kube import NAMESPACES, PODS, SERVICE_ACCOUNTS, Kube, wait_until
from tests.e2e.measurements import pytest_terminal_summary
from tests.e2e.reruns import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport", "pytest_terminal_summary"]

NODES = ("node-0", "node-1", "node-2")
GPUS = 8
# Also the exit status of `python -m scripts.controlplane`.
TOOL_MISSING = 3


def pytest_itemcollected(item: pytest.Item) -> None:
    """A resource that the garbage collector finds in one test may belong to another, such as a connection that was cut
    off. So the warning is shown here and fails no test. Tests without a cluster fail for it."""
    item.add_marker(pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """If the binaries cannot be built, the whole run fails with a message that says what to do."""
    try:
        binaries()
    except BuildError as exc:
        pytest.exit(str(exc), returncode=TOOL_MISSING)
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        running.add_nodes(gpu_node(name, GPUS) for name in NODES)
        yield running


@pytest.fixture
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    """A client with the administrator's credentials."""
    async with Kube(cluster.kubeconfig) as client:
        yield client


@asynccontextmanager
async def new_namespace(kube: Kube, labels: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """A namespace that is ready for pods: its default service account exists."""
    made = await kube.create(NAMESPACES, {"metadata": {"generateName": "e2e-", "labels": dict(labels or {})}})
    name = str(made["metadata"]["name"])
    await wait_until(lambda: kube.find(SERVICE_ACCOUNTS, "default", name))
    try:
        yield name
    finally:
        await kube.delete(NAMESPACES, name)


@asynccontextmanager
async def emptied_namespace(kube: Kube, labels: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    """Like `new_namespace`. At the end its pods are gone: a later test does not count their deletion as a review, or
    their annotations as GPUs."""
    async with new_namespace(kube, labels) as name:
        yield name
    # The namespace is being deleted, so no controller creates new ones.
    await kube.call("DELETE", PODS.path(name), query={"gracePeriodSeconds": "0"})
    await wait_until(lambda: kube.list(PODS, name), lambda left: left == [])


@pytest.fixture
async def namespace(kube: Kube) -> AsyncIterator[str]:
    """A namespace that has not opted in to gpuwarden."""
    async with emptied_namespace(kube) as name:
        yield name
