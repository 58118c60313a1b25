"""`python -m scripts.node`: runs a control plane and a real node with GPUs for experiments."""

import argparse
import sys
import time
from pathlib import Path

from scripts.controlplane.build import BuildError, ToolMissingError
from scripts.controlplane.cluster import ROOT, Cluster, StartError
from scripts.node.build import CannotRunError, parts
from scripts.node.files import RUNTIME
from scripts.node.images import VARIABLES
from scripts.node.machine import NoNumberError
from scripts.node.real import NodeError, RealNode

DIRECTORY = ROOT / ".node"
NAME = "real-0"
RUNTIME_CLASS = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": RUNTIME},
    "handler": RUNTIME,
}


def main() -> int:
    whole = argparse.ArgumentParser(prog="python -m scripts.node", description=__doc__)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("build", help="build a node's programs, if this machine can run a node").set_defaults(run=build)
    one = commands.add_parser("up", help="start both, and stop them with Ctrl-C")
    with_directory(one)
    one.add_argument("--gpus", type=int, default=4, help="GPUs of the node (default: 4)")
    one.set_defaults(run=up)
    one = commands.add_parser("down", help="stop them from another terminal")
    with_directory(one)
    one.set_defaults(run=down)
    args = whole.parse_args()
    try:
        return int(args.run(args))
    except (BuildError, CannotRunError, StartError, NodeError, NoNumberError) as exc:
        print(exc, file=sys.stderr)
        return 1


def with_directory(one: argparse.ArgumentParser) -> None:
    one.add_argument("--dir", type=Path, default=DIRECTORY, help="directory of data and logs (default: .node)")


def build(_: argparse.Namespace) -> int:
    """If no node can run here, `make parts` continues without it; the tests skip with the same message."""
    try:
        made = parts()
    except (CannotRunError, ToolMissingError) as exc:
        print(exc, file=sys.stderr)
    else:
        print(made.programs, made.rest, sep="\n")
    return 0


def up(args: argparse.Namespace) -> int:
    parts()
    with Cluster(args.dir, real_nodes=True) as cluster:
        node = cluster.add_real_node(NAME, [gpu_uuid(number) for number in range(args.gpus)])
        with cluster.api() as api:
            api.post("/apis/node.k8s.io/v1/runtimeclasses", json=RUNTIME_CLASS)
        show(cluster, node)
        try:
            while cluster.processes.any_left:
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("stopping")
    return 0


def down(args: argparse.Namespace) -> int:
    cluster = Cluster(args.dir)
    was_up = cluster.processes.any_left
    cluster.stop()
    print("stopped" if was_up else f"nothing runs in {args.dir}")
    return 0


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{number:012}"


def show(cluster: Cluster, node: RealNode) -> None:
    print(f"node {node.name} with {len(node.gpus)} GPUs at {node.address}; logs in {node.directory}")
    print(f"images on it: {', '.join(VARIABLES)}; runtime class `{RUNTIME}`")
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"# kubectl is {cluster.kubectl[0]}")
    print(f"# in the node's namespaces: {' '.join(node.inside('sh'))}")
    print("Ctrl-C or `make node-down` stops it", flush=True)


if __name__ == "__main__":
    sys.exit(main())
