"""Control planes of their own for tests whose policies no other test may see."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.controlplane.cluster import Cluster
from tests.running import GPUWARDEN


@contextmanager
def cluster_with_roles(directory: Path) -> Iterator[Cluster]:
    """A control plane with the namespace and the roles of an installation."""
    with Cluster(directory) as running:
        subprocess.run([*running.kubectl, "create", "namespace", "gpuwarden"], check=True, capture_output=True)
        roles = subprocess.run([GPUWARDEN, "manifests", "rbac"], check=True, capture_output=True).stdout
        subprocess.run([*running.kubectl, "apply", "-f", "-"], input=roles, check=True, capture_output=True)
        yield running
