"""How fast `gpuwarden bind` binds pods, compared with kube-scheduler on the same control plane in the same run.

All pods exist before the scheduler starts. The rate is measured from the first Binding to the last, by a watch of the
pods. Both schedulers run in turns with the same pods, nodes and simulated kubelets. The audit log of the API server
shows what ours reads. On a shared machine the CPU time says more than the rate: the sum of scheduler, API server and
etcd from the start to the last Binding. Needs the control plane of `make e2e`: `python -m bench.bind`.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import frozen

from bench.figures import Target, typical
from bench.servers import GPUWARDEN, TICKS_PER_SECOND, BenchError
from scripts.controlplane.build import BuildError
from scripts.controlplane.cluster import Cluster, gpu_node
from scripts.controlplane.components import API_SERVER, ETCD, SCHEDULERS
from tests.e2e.kube import NAMESPACES, PODS, SERVICE_ACCOUNTS, ApiError, Kube, wait_until

Raw = dict[str, Any]

OURS, THEIRS = "gpu-scheduler", "default-scheduler"
NAMESPACE = "bench"
USER = "bench-binder"
PATIENCE = 600.0
AT_ONCE = 32
AUDITED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [
        {"level": "Metadata", "users": [USER], "verbs": ["list", "watch", "get"]},
        {"level": "None"},
    ],
}
# The least share of kube-scheduler's rate.
SHARE = 0.5


@frozen
class Plan:
    """The size of the measurement."""

    nodes: int = 1_000
    pods: int = 1_000
    rounds: int = 3


SHORT = Plan(nodes=100, pods=100, rounds=1)


def run(plan: Plan, directory: Path) -> Raw:
    policy = directory / "audited.json"
    policy.write_text(json.dumps(AUDITED))
    audit = [f"--audit-policy-file={policy}", f"--audit-log-path={directory / 'audit.log'}"]
    with Cluster(directory / "cluster", flags={API_SERVER: audit}) as cluster:
        crds = subprocess.run([GPUWARDEN, "crds"], check=True, capture_output=True).stdout
        subprocess.run([*cluster.kubectl, "apply", "-f", "-"], input=crds, check=True, capture_output=True)
        cluster.add_nodes(gpu_node(f"node-{number:04}") for number in range(plan.nodes))
        cluster.as_user(USER, ["system:masters"])
        return asyncio.run(measured(plan, cluster, directory))


async def measured(plan: Plan, cluster: Cluster, directory: Path) -> Raw:
    rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
    starts: dict[str, list[float]] = {OURS: [], THEIRS: []}
    costs: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    async with Kube(cluster.kubeconfig, timeout=60) as kube:
        await kube.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
        await wait_until(lambda: kube.find(SERVICE_ACCOUNTS, "default", NAMESPACE))
        for number in range(plan.rounds):
            for name in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                cluster.processes.stop([SCHEDULERS])
                await all_of(plan.pods, lambda n, name=name: create(kube, n, name))  # type: ignore[misc]
                with ExitStack() as stack:
                    started = time.monotonic()
                    pids = {part: cluster.processes.records()[part].pid for part in (API_SERVER, ETCD)}
                    before = {part: cpu_seconds(pid) for part, pid in pids.items()}
                    if name == THEIRS:
                        cluster.restart(SCHEDULERS)
                        pids["scheduler"] = cluster.processes.records()[SCHEDULERS].pid
                    else:
                        pids["scheduler"] = stack.enter_context(binding(cluster, directory / f"bind-{number}"))
                    first, last = await bound(kube, plan.pods)
                    after = {part: cpu_seconds(pid) for part, pid in pids.items()}
                    costs[name].append({part: round(after[part] - before.get(part, 0.0), 2) for part in after})
                    rates[name].append((plan.pods - 1) / max(last - first, 1e-3))
                    starts[name].append(first - started)
                await all_of(plan.pods, lambda n: delete(kube, n))
                await wait_until(lambda: kube.list(PODS, NAMESPACE), lambda pods: not pods, PATIENCE)
    return {
        "nodes": plan.nodes,
        "pods": plan.pods,
        "bound_per_s": {name: typical(found) for name, found in rates.items()},
        "rounds": rates,
        "cpu_s": costs,
        "first_bound_s": {name: typical(found) for name, found in starts.items()},
        "requests_a_run": requests(directory / "audit.log", plan.rounds),
    }


@contextmanager
def binding(cluster: Cluster, directory: Path) -> Iterator[int]:
    directory.mkdir()
    where = ["--kubeconfig", str(cluster.as_user(USER, ["system:masters"])), "--ui-port", "0", "--log-level", "warn"]
    names = ["--scheduler-name", OURS, "--lease-namespace", NAMESPACE]
    with (directory / "log").open("w") as log:
        command = [str(GPUWARDEN), "bind", *where, *names]
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=log)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)
        # The next one need not wait until this one's Lease has run out.
        with cluster.api() as api:
            api.delete(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/gpuwarden-bind")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


async def all_of(count: int, act: Callable[[int], Awaitable[None]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            await act(number)

    await asyncio.gather(*map(one, range(count)))


async def create(kube: Kube, number: int, scheduler: str) -> None:
    requests = {"cpu": "100m", "memory": "64Mi"}
    container = {"name": "main", "image": "example.test/main:1", "resources": {"requests": requests}}
    meta = {"name": f"pod-{number:05}", "labels": {"app": "bench"}}
    await kube.create(
        PODS, {"metadata": meta, "spec": {"schedulerName": scheduler, "containers": [container]}}, NAMESPACE
    )


async def delete(kube: Kube, number: int) -> None:
    with suppress(ApiError):
        await kube.delete(PODS, f"pod-{number:05}", NAMESPACE, grace=0)


async def bound(kube: Kube, count: int) -> tuple[float, float]:
    """When the first pod was seen on a node, and when the last."""
    seen: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE):
        async for event in kube.watch(PODS, NAMESPACE):
            if event["object"]["spec"].get("nodeName"):
                seen.setdefault(event["object"]["metadata"]["name"], time.monotonic())
            if len(seen) == count:
                break
    return min(seen.values()), max(seen.values())


def requests(log: Path, rounds: int) -> dict[str, float]:
    """What one run of ours has read from the API server."""
    found: dict[str, float] = {}
    for event in map(json.loads, log.read_text().splitlines()):
        what = f"{event['verb']} {event.get('objectRef', {}).get('resource', 'version')}"
        found[what] = found.get(what, 0) + 1
    return {what: round(number / rounds, 2) for what, number in sorted(found.items())}


def targets(found: Raw, slack: float = 1.0) -> list[Target]:
    rates = found["bound_per_s"]
    share = rates[OURS] / rates[THEIRS]
    lists = found["requests_a_run"].get("list nodes", 0)
    watches = found["requests_a_run"].get("watch nodes", 0)
    # A list of 1,000 nodes comes in pages of 500.
    pages = max(1, -(-found["nodes"] // 500)) * max(1, watches)
    return [
        Target("pods bound, share of kube-scheduler's rate", share, SHARE / slack, at_most=False),
        Target("lists of nodes in a run (pages)", lists, pages),
    ]


def lines(found: Raw) -> list[str]:
    return [
        f"{found['pods']:,} pods on {found['nodes']:,} nodes",
        "",
        "| scheduler | bound a second | rounds | first bound after |",
        "|---|---:|---|---:|",
        *(
            f"| {name} | {found['bound_per_s'][name]:.0f} | {', '.join(f'{one:.0f}' for one in found['rounds'][name])} "
            f"| {found['first_bound_s'][name]:.1f} s |"
            for name in (OURS, THEIRS)
        ),
        "",
        *(f"CPU seconds, {name}: {found['cpu_s'][name]}" for name in (OURS, THEIRS)),
        f"Read in a run: {found['requests_a_run']}",
    ]


def run_somewhere(plan: Plan) -> Raw:
    try:
        with tempfile.TemporaryDirectory() as directory:
            return run(plan, Path(directory))
    except BuildError as exc:
        raise BenchError(str(exc)) from exc


def main() -> int:
    parser = ArgumentParser(prog="python -m bench.bind", description=__doc__)
    parser.add_argument("--short", action="store_true", help="100 pods on 100 nodes, once")
    for name, default in (("nodes", Plan().nodes), ("pods", Plan().pods), ("rounds", Plan().rounds)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    plan = SHORT if asked.short else Plan(asked.nodes, asked.pods, asked.rounds)
    found = run_somewhere(plan)
    verdicts = targets(found)
    print("\n".join([*lines(found), "", *(one.sentence for one in verdicts)]))
    return int(not all(one.is_met for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
