"""`python -m scripts.controlplane`: runs a control plane for experiments."""

import argparse
import sys
import time
from pathlib import Path

from scripts.controlplane.build import HERE, BuildError, ToolMissingError, binaries
from scripts.controlplane.cluster import ROOT, Cluster, StartError, gpu_node

DIRECTORY = ROOT / ".cluster"
# Pytest and make use codes up to 5; this one means that a requirement is missing.
TOOL_MISSING = 3


def main() -> int:
    args = parser().parse_args()
    try:
        return int(args.run(args))
    except ToolMissingError as exc:
        print(exc, file=sys.stderr)
        return TOOL_MISSING
    except (BuildError, StartError) as exc:
        print(exc, file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="python -m scripts.controlplane", description=__doc__)
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("build", help="build the binaries and print their directory")
    one.add_argument("parts", nargs="*", default=[HERE.name], help="directories of scripts/ (default: %(default)s)")
    one.set_defaults(run=build)

    one = commands.add_parser("up", help="start a cluster")
    with_directory(one)
    one.add_argument("--nodes", type=int, default=3, help="number of nodes (default: 3)")
    one.add_argument("--gpus", type=int, default=8, help="GPUs of each node (default: 8)")
    one.add_argument("--flag", action="append", default=[], metavar="COMPONENT=--FLAG", help="an extra flag")
    one.set_defaults(run=up)

    one = commands.add_parser("down", help="stop it")
    with_directory(one)
    one.add_argument("--after-stdin", action="store_true", help=argparse.SUPPRESS)  # `Cluster` uses it on itself
    one.set_defaults(run=down)

    one = commands.add_parser("status", help="show what runs")
    with_directory(one)
    one.set_defaults(run=status)
    return whole


def with_directory(one: argparse.ArgumentParser) -> None:
    one.add_argument("--dir", type=Path, default=DIRECTORY, help="directory of data and logs (default: .cluster)")


def build(args: argparse.Namespace) -> int:
    for name in args.parts:
        print(binaries(HERE.parent / name))
    return 0


def up(args: argparse.Namespace) -> int:
    flags: dict[str, list[str]] = {}
    for text in args.flag:
        name, _, flag = text.partition("=")
        flags.setdefault(name, []).append(flag)
    binaries()
    started = time.monotonic()
    cluster = Cluster(args.dir, flags=flags)
    cluster.start()
    cluster.add_nodes(gpu_node(f"node-{number}", args.gpus) for number in range(args.nodes))
    print(
        f"up after {time.monotonic() - started:.1f} s: {args.nodes} nodes with {args.gpus} GPUs each at {cluster.url}"
    )
    show(cluster)
    return 0


def down(args: argparse.Namespace) -> int:
    if args.after_stdin:
        sys.stdin.read()
    cluster = Cluster(args.dir)
    stopped = cluster.status()
    cluster.stop()
    print(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {args.dir}")
    return 0


def status(args: argparse.Namespace) -> int:
    cluster = Cluster(args.dir)
    if not cluster.status():
        print(f"nothing runs in {args.dir}")
        return 1
    show(cluster)
    return 0


def show(cluster: Cluster) -> None:
    for name, record in cluster.processes.records().items():
        print(f"  {name:24} {record.state:8} pid {record.pid:<8} {cluster.processes.log(name)}")
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    print(f"# kubectl is {cluster.kubectl[0]}")


if __name__ == "__main__":
    sys.exit(main())
