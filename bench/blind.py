"""The cost of the policy `gpuwarden-blind`: plain pods created per second in opted-in namespaces, with and without.

The other shipped policies and webhooks are applied both times. No server runs, because pods without a claim call no
webhook. No scheduler binds the pods. The results also show the API server's CPU time for a creation: writer, API server
and etcd share the cores, so the rate depends more on the machine than the CPU time does. Compare the ratios. Needs the
control plane of `make e2e`: `python -m bench.blind`.
"""

import http.client
import json
import ssl
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attrs import frozen

from bench.figures import typical
from bench.servers import GPUWARDEN, BenchError, cpu_seconds
from scripts.controlplane.build import BuildError
from scripts.controlplane.cluster import Cluster
from scripts.controlplane.components import API_SERVER
from webhook.kube.install.policies import (
    BLIND,
    Installation,
    Manifest,
    filled,
    manifests,
    policies,
    webhooks,
    while_down,
)

Raw = dict[str, Any]

NAMESPACE = "bench"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WITH, WITHOUT = "with", "without"
PATIENCE = 60.0
VARIABLE = b"NVIDIA_VISIBLE_DEVICES"


@frozen
class Plan:
    """The size of the measurement."""

    pods: int = 1_000
    rounds: int = 5
    writers: int = 8
    containers: int = 2


SHORT = Plan(pods=100, rounds=1)


class Scene:
    """A control plane with the shipped manifests, and an opted-in namespace."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.plan = plan
        installation = Installation(ca_bundle=cluster.ca.read_bytes())
        self.blinding: Sequence[Manifest] = [filled(one, installation) for one in manifests(BLIND)]
        others = [one for one in policies(installation) if one not in self.blinding]
        crds = subprocess.run([GPUWARDEN, "crds"], check=True, capture_output=True).stdout
        self._kubectl("apply", crds)
        self._kubectl("apply", listed([*others, *while_down(installation), *webhooks(installation)]))
        with cluster.api() as api:
            meta = {"name": NAMESPACE, "labels": {"gpuwarden.io/enabled": "true"}}
            api.post("/api/v1/namespaces", json={"metadata": meta}).raise_for_status()
        cluster.service_account_token(NAMESPACE, "default")
        self._context = ssl.create_default_context(cafile=str(cluster.ca))
        self._headers = {"Authorization": f"Bearer {cluster.admin_token}", "Content-Type": "application/json"}
        self._body = json.dumps(pod(plan.containers)).encode()

    def _kubectl(self, verb: str, content: bytes, *flags: str) -> None:
        subprocess.run([*self.cluster.kubectl, verb, *flags, "-f", "-"], input=content, check=True, capture_output=True)

    def round(self, name: str) -> Raw:
        """The time of these creations. The pods are deleted afterwards."""
        if name == WITH:
            self._kubectl("apply", listed(self.blinding))
        else:
            self._kubectl("delete", listed(self.blinding), "--ignore-not-found")
        self._wait_until_it_acts(name == WITH)
        pid = self.cluster.processes.records()[API_SERVER].pid
        before, begun = cpu_seconds(pid), time.perf_counter()
        with ThreadPoolExecutor(self.plan.writers) as writers:
            shares = [len(range(n, self.plan.pods, self.plan.writers)) for n in range(self.plan.writers)]
            times = [took for taken in writers.map(self._write, shares) for took in taken]
        seconds = time.perf_counter() - begun
        found = {
            "per_second": self.plan.pods / seconds,
            "cpu_ms": (cpu_seconds(pid) - before) * 1000 / self.plan.pods,
            "p50_ms": typical(times) * 1000,
        }
        with self.cluster.api() as api:
            api.delete(PODS, params={"gracePeriodSeconds": 0}, timeout=PATIENCE).raise_for_status()
        return {key: round(value, 2) for key, value in found.items()}

    def _wait_until_it_acts(self, is_wanted: bool) -> None:
        """Waits until a policy is active, or no longer active: about a second after the write."""
        connection, until = self._connected(), time.monotonic() + PATIENCE
        while (VARIABLE in self._made(connection, "?dryRun=All")) is not is_wanted:
            if time.monotonic() > until:
                raise BenchError("the policy is not active" if is_wanted else "the policy is still active")
            time.sleep(0.1)
        connection.close()

    def _write(self, count: int) -> list[float]:
        connection, times = self._connected(), []
        for _ in range(count):
            begun = time.perf_counter()
            self._made(connection)
            times.append(time.perf_counter() - begun)
        connection.close()
        return times

    def _connected(self) -> http.client.HTTPSConnection:
        where = urlsplit(self.cluster.url)
        return http.client.HTTPSConnection(where.hostname or "", where.port, context=self._context, timeout=PATIENCE)

    def _made(self, connection: http.client.HTTPSConnection, query: str = "") -> bytes:
        connection.request("POST", PODS + query, self._body, self._headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != http.client.CREATED:
            raise BenchError(f"a pod was not created: {content.decode()[:300]}")
        return content


def pod(containers: int) -> Raw:
    """A plain pod without GPUs, for a scheduler that does not exist."""
    made = [
        {
            "name": f"main-{number}",
            "image": "example.test/main:1",
            "env": [{"name": "MODE", "value": "fast"}, {"name": "LEVEL", "value": "info"}],
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        }
        for number in range(containers)
    ]
    return {"metadata": {"generateName": "plain-"}, "spec": {"schedulerName": "nobody", "containers": made}}


def listed(found: Sequence[Manifest]) -> bytes:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": found}).encode()


def run(plan: Plan) -> Raw:
    rounds: dict[str, list[Raw]] = {WITH: [], WITHOUT: []}
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory)) as cluster:
        scene = Scene(cluster, plan)
        scene.round(WITH)  # warm-up
        for number in range(plan.rounds):
            for name in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
                rounds[name].append(scene.round(name))
    return {"rounds": rounds, "ratios": {key: ratio(rounds, key) for key in ("per_second", "cpu_ms", "p50_ms")}}


def ratio(rounds: dict[str, list[Raw]], key: str) -> float:
    """The ratio of two consecutive rounds, with and without the policy."""
    return round(typical([one[key] / other[key] for one, other in zip(rounds[WITH], rounds[WITHOUT], strict=True)]), 2)


def lines(plan: Plan, found: Raw) -> list[str]:
    titles = {"per_second": "creations a second", "cpu_ms": "CPU of the API server, ms", "p50_ms": "creation p50, ms"}
    rows = [
        [title, *(f"{typical([one[key] for one in found['rounds'][name]]):.2f}" for name in (WITHOUT, WITH))]
        for key, title in titles.items()
    ]
    return [
        f"{plan.pods:,} pods of {plan.containers} containers, {plan.writers} writers, {plan.rounds} rounds in turns",
        "",
        "| | without the policy | with it | ratio | rounds |",
        "|---|---:|---:|---:|---|",
        *(
            f"| {' | '.join(row)} | {found['ratios'][key]:.2f} | {pairs(found['rounds'], key)} |"
            for key, row in zip(titles, rows, strict=True)
        ),
    ]


def pairs(rounds: dict[str, list[Raw]], key: str) -> str:
    both = zip(rounds[WITH], rounds[WITHOUT], strict=True)
    return ", ".join(f"{one[key] / other[key]:.2f}" for one, other in both)


def main() -> int:
    parser = ArgumentParser(prog="python -m bench.blind", description=__doc__)
    parser.add_argument("--short", action="store_true", help="100 pods, once")
    for name in ("pods", "rounds", "writers", "containers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Plan(), name))
    asked = parser.parse_args()
    plan = SHORT if asked.short else Plan(asked.pods, asked.rounds, asked.writers, asked.containers)
    try:
        print("\n".join(lines(plan, run(plan))))
    except (BenchError, BuildError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
