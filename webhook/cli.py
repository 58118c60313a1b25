"""The command `gpuwarden`: the words it takes and what its exit code says. What a command needs is imported by it.

S4's rule: whatever is wrong with the options is said on stderr, with the usage, and the exit code is 1. So is that of a
server that could not start.
"""

import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import webhook
from webhook.core.errors import GpuwardenError
from webhook.core.names import is_label_key
from webhook.runtime import settings
from webhook.runtime.clock import utc_now
from webhook.runtime.setting_kinds import NAMESPACE, read_interval, read_namespace, read_url
from webhook.runtime.settings import Settings, SettingsError

FAILED: Final = 1
# Lines of usage above a mistake: more would hide it.
SHORT: Final = 4
# S2's, for a configuration that cannot be used and a start that failed.
NOT_STARTED: Final = 2
# `explain` and `audit`: nothing can be said.
CANNOT_SAY: Final = 2
# What a shell reports of a program that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED: Final = 130

# What can go wrong without a mistake of ours: a port in use, a file that went away, a part of ours that says so.
FORESEEN: Final = (GpuwardenError, OSError)


class Parser(ArgumentParser):
    """argparse, but an exit code of 1, and no abbreviated options: those may mean another one tomorrow."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.mistaken = FAILED
        """The exit code of whoever has written what cannot be read."""

    def error(self, message: str) -> NoReturn:
        self.refuse([message])
        self.exit(self.mistaken)

    def refuse(self, mistakes: Sequence[str]) -> None:
        """The usage, and under it, where it is read first, what is wrong."""
        usage = self.format_usage()
        if usage.count("\n") > SHORT:
            usage = f"usage: {self.prog} [options]; {self.prog} --help says which\n"
        sys.stderr.write(usage)
        complain(self.prog, mistakes)


def complain(prog: str, mistakes: Sequence[str]) -> None:
    for mistake in mistakes:
        print(f"{prog}: {mistake}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    args, unknown = make_parser().parse_known_args(argv)
    args.unknown = [f"there is no option {word}" for word in unknown]
    return exit_code(args.parser, lambda: args.run(args))


def exit_code(parser: Parser, command: Callable[[], int]) -> int:
    """What the command returns. A foreseen failure becomes a line on stderr; a bug keeps its traceback."""
    try:
        return command()
    except SettingsError as exc:
        parser.refuse(exc.mistakes)
    except FORESEEN as exc:
        complain(parser.prog, [str(exc)])
    except ExceptionGroup as group:
        foreseen = leaves(group)
        if not all(isinstance(exc, FORESEEN) for exc in foreseen):
            raise
        complain(parser.prog, [str(exc) for exc in foreseen])
    except KeyboardInterrupt:
        return INTERRUPTED
    return FAILED


def leaves(exc: Exception) -> list[Exception]:
    """The exceptions in a group of groups."""
    if isinstance(exc, ExceptionGroup):
        return [leaf for part in exc.exceptions for leaf in leaves(part)]
    return [exc]


def make_parser() -> Parser:
    parser = Parser(prog="gpuwarden", description="Attested GPU admission for Kubernetes.")
    parser.add_argument("--version", action="version", version=f"gpuwarden {webhook.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    one = commands.add_parser("serve", help="answer admission reviews")
    one.add_argument("--hints", action="store_true", help=SUPPRESS)  # `make run` explains itself to a person
    with_settings(one, serve)

    one = commands.add_parser("reconcile", help="bring reservations and pods of a cluster together; one of many acts")
    with_settings(one, reconcile)

    one = commands.add_parser("bind", help="the scheduler of the pods that name it; one of many acts")
    with_settings(one, bind)

    one = commands.add_parser("attest", help="prove the node that this is, again and again, to a server")
    one.add_argument("--once", action="store_true", help="once, and the exit code says whether it was proven")
    one.add_argument(
        "--gpus", action="store_true", help="print the GPUs of this machine, a JSON line each, and no more"
    )
    with_settings(one, attest)

    one = commands.add_parser("export", help="bring serials of GPUs, and who used which, to stores")
    one.add_argument("--smi-file", metavar="FILE", help="no cluster: print what this output of nvidia-smi -q -x says")
    one.add_argument("--cluster", dest="cluster_name", help="the cluster's name in every record, as --cluster-name")
    one.add_argument("--node", metavar="NODE", help="for --smi-file: the node it is from")
    one.add_argument("--machine", metavar="MACHINE", help="for --smi-file: what its provider calls it (default: na)")
    with_export_settings(one, export)

    one = commands.add_parser("history", help="say who used which GPU, and when, from the database of `export`")
    add_question(one)
    with_export_settings(one, history)

    one = commands.add_parser("score", help="answer which GPUs suit a pod; a scorer for `serve --scorer`")
    with_settings(one, score)

    one = commands.add_parser("explain", help="say what would become of a pod, node by node; reserves nothing")
    add_explained(one)
    with_answer_settings(one, explain)

    one = commands.add_parser(
        "audit", help="say what runs and would be refused today; reads the cluster, changes nothing"
    )
    one.add_argument("-o", "--output", choices=("table", "json"), default="table", help="form of the answer")
    one.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    with_answer_settings(one, audit)

    one = commands.add_parser(
        "release", help="offer the GPUs of a pod again that is gone and does not run; for who may manage reservations"
    )
    one.add_argument("wanted", nargs="+", metavar="RESERVATION|GPU|NAMESPACE/POD", help="what is held, by any of these")
    one.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    with_settings(one, release)

    certs = commands.add_parser("certs", help="certificates").add_subparsers(metavar="COMMAND", required=True)
    one = certs.add_parser("dev", help="make a development CA and a certificate for localhost")
    one.add_argument("--dir", type=Path, default=Path("certs/dev"), help="where to (default: certs/dev)")
    one.set_defaults(parser=one, run=without_settings(certs_dev))
    one = certs.add_parser("ensure", help="make the certificate of a cluster's `serve` and have it trusted, once")
    with_settings(one, certs_ensure)
    one = certs.add_parser("keep", help="the same again and again: it is renewed, and its CA too")
    with_settings(one, certs_keep)

    one = commands.add_parser("crds", help="the custom resource definitions, as YAML")
    one.set_defaults(parser=one, run=without_settings(crds))

    one = commands.add_parser("manifests", help="what a cluster is told of gpuwarden, as YAML for kubectl apply")
    add_installation(one)
    one.set_defaults(parser=one, run=without_settings(manifests))

    config = commands.add_parser("config", help="settings").add_subparsers(metavar="COMMAND", required=True)
    with_settings(config.add_parser("show", help="the settings in effect and where each comes from"), config_show)
    with_settings(config.add_parser("check", help="name every mistake in the settings"), config_check)
    one = config.add_parser("reference", help="the table of all settings, as Markdown")
    one.add_argument("of", nargs="?", choices=("export",), help="of the command that has settings of its own")
    one.set_defaults(parser=one, run=without_settings(config_reference))
    return parser


def add_question(parser: Parser) -> None:
    parser.add_argument("--serial", help="of the GPU")
    parser.add_argument("--uuid", help="of the GPU")
    parser.add_argument("--pod", metavar="NAMESPACE/NAME", help="that used it")
    parser.add_argument("--hash", metavar="HASH", help="of the evidence that it was used on")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")


def add_explained(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="FILE", help="manifests, - for stdin; or: pod NAMESPACE/NAME")
    parser.add_argument("-f", "--filename", action="append", default=[], metavar="FILE", help="a manifest, as FILE")
    parser.add_argument("-n", "--namespace", help="of pods that name none (default: the context's)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")
    parser.add_argument("--show", choices=("pod", "patch"), help="the pod as it would be stored, or the patch")
    parser.add_argument("--context", metavar="NAME", help="of the kubeconfig (default: its current one)")
    parser.add_argument("--ca", dest="server_ca", metavar="FILE", help="as --server-ca")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token for --server")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="client certificate for --server (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="its key (PEM)")


def add_installation(parser: Parser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("rbac", "webhooks", "policies", "crds", "export", "certs", "score", "all"),
        default="all",
        help="default: all, which is all but the rights of `gpuwarden export` and `gpuwarden certs`",
    )
    parser.add_argument(
        "--gpu-namespace", default="gpu-operator", help="where the device plugin's pods are (default: gpu-operator)"
    )
    parser.add_argument("--namespace", default="gpuwarden", help="where gpuwarden runs (default: gpuwarden)")
    parser.add_argument("--service", default="gpuwarden", help="the Service of `serve` there (default: gpuwarden)")
    parser.add_argument("--url", help="where `serve` is, if not behind that Service")
    parser.add_argument("--required-hash-alias", metavar="KEY", help="as `serve` has it, if it has one")
    parser.add_argument(
        "--blind",
        choices=("policy", "webhook", "nobody"),
        default="policy",
        help="who blinds pods that ask for nothing: policies (Kubernetes 1.36), or the webhook (default: policy)",
    )
    parser.add_argument(
        "--max-grace",
        type=read_interval,
        default=timedelta(hours=1),
        metavar="TIME",
        help="as `serve` has it: how long a deletion may let containers of a pod with GPUs go on (default: 1h)",
    )
    parser.add_argument(
        "--host-paths",
        default="",
        metavar="PATHS",
        help="directories of nodes, separated by commas: pods of opted-in namespaces may mount them read-only",
    )
    parser.add_argument("--ca-bundle", type=Path, metavar="FILE", help="the CA of its certificate (PEM)")


def with_settings(parser: Parser, command: Callable[[Namespace, Settings], int]) -> None:
    """The command takes all settings; words nobody knows are named together with the mistakes in those."""
    settings.add_flags(parser)
    parser.set_defaults(parser=parser, run=lambda args: command(args, settings.load(vars(args), also=args.unknown)))


def with_export_settings(parser: Parser, command: Callable[[Namespace], int]) -> None:
    """S2's exit codes: what keeps it from starting, the settings above all, is 2."""
    from webhook.export.settings import add_flags

    add_flags(parser)

    def run(args: Namespace) -> int:
        ended = exit_code(parser, lambda: command(args))
        return NOT_STARTED if ended == FAILED and not args.has_run else ended

    parser.mistaken = NOT_STARTED
    parser.set_defaults(parser=parser, run=run, has_run=False)


def with_answer_settings(parser: Parser, command: Callable[[Namespace, Settings], int]) -> None:
    """For commands whose exit status is their answer: whatever keeps them from giving one is 2."""
    settings.add_flags(parser)

    def run(args: Namespace) -> int:
        ended = exit_code(parser, lambda: command(args, settings.load(vars(args), also=args.unknown)))
        return CANNOT_SAY if ended == FAILED and not args.has_run else ended

    parser.mistaken = CANNOT_SAY
    parser.set_defaults(parser=parser, run=run, has_run=False)


def without_settings(command: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    def run(args: Namespace) -> int:
        if args.unknown:
            raise SettingsError(args.unknown)
        return command(args)

    return run


def serve(args: Namespace, chosen: Settings) -> int:
    import asyncio

    import uvloop

    from webhook.commands.serve import serve as serve_all

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_all(chosen, hints=args.hints))
    return 0


def reconcile(args: Namespace, chosen: Settings) -> int:
    import asyncio

    from webhook.core.errors import GpuwardenError

    if chosen.is_embedded:
        raise GpuwardenError("there is nothing to reconcile without a cluster: name one by --kubeconfig")
    from webhook.commands.reconcile import reconcile as reconcile_all

    asyncio.run(reconcile_all(chosen))
    return 0


def bind(args: Namespace, chosen: Settings) -> int:
    import asyncio

    import uvloop

    if chosen.is_embedded:
        raise GpuwardenError("there are no pods to bind without a cluster: name one by --kubeconfig")
    from webhook.commands.bind import schedule

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(schedule(chosen))
    return 0


def attest(args: Namespace, chosen: Settings) -> int:
    import asyncio

    from webhook.node.attest import attest as attest_node
    from webhook.node.attest import print_gpus

    if args.gpus:
        print_gpus()
        return 0
    asyncio.run(attest_node(chosen, once=args.once))
    return 0


def export(args: Namespace) -> int:
    import asyncio

    from webhook.commands.export import export as export_all
    from webhook.commands.export import read_file
    from webhook.export import settings as export_settings

    if args.smi_file is None:
        also = [f"flag --{name}: only with --smi-file" for name in ("node", "machine") if getattr(args, name)]
        chosen = export_settings.load(vars(args), also=[*args.unknown, *also])
        ended = asyncio.run(export_all(chosen))
        args.has_run = True
        return ended
    missing = [f"flag --{name}: --smi-file needs it" for name in ("node",) if not args.node]
    chosen = export_settings.load(vars(args), also=[*args.unknown, *missing], part=export_settings.ONE_READING)
    args.has_run = True
    return read_file(args.smi_file, chosen.cluster_name or "", args.node, args.machine)


def history(args: Namespace) -> int:
    import asyncio

    from webhook.export import settings as export_settings
    from webhook.export.history import UseQuery, find_uses, rendered

    question = UseQuery.from_flags(serial=args.serial, uuid=args.uuid, pod=args.pod, hash=args.hash)
    chosen = export_settings.load(vars(args), also=args.unknown, part=export_settings.HISTORY)
    args.has_run = True
    complain(args.parser.prog, chosen.notes)
    print(rendered(asyncio.run(find_uses(chosen.postgres, question)), args.output))
    return 0


def score(args: Namespace, chosen: Settings) -> int:
    import asyncio

    from webhook.commands.score import score as score_pods

    asyncio.run(score_pods(chosen))
    return 0


def explain(args: Namespace, chosen: Settings) -> int:
    from webhook.commands.explain import ExplainRequest, run
    from webhook.runtime.telemetry import configure_logging

    named = ("output", "show", "namespace", "context", "token_file", "cert", "key")
    asked = ExplainRequest.of(args.words, args.filename, **{name: getattr(args, name) for name in named})
    # The watches of a cluster tell of their beginnings.
    configure_logging("error" if chosen.sources.get("log_level", "default") == "default" else chosen.log_level)
    complain(args.parser.prog, chosen.notes)
    ended = run(asked, chosen)
    args.has_run = True
    return ended


def audit(args: Namespace, chosen: Settings) -> int:
    from webhook.commands.audit import run
    from webhook.commands.explain import by_current_context
    from webhook.runtime.telemetry import configure_logging

    configure_logging(chosen.log_level)
    complain(args.parser.prog, chosen.notes)
    ended = run(by_current_context(chosen), args.context, args.output)
    args.has_run = True
    return ended


def release(args: Namespace, chosen: Settings) -> int:
    from webhook.commands.explain import by_current_context
    from webhook.commands.release import run
    from webhook.runtime.telemetry import configure_logging

    configure_logging(chosen.log_level)
    return run(by_current_context(chosen), args.context, args.wanted)


def crds(args: Namespace) -> int:
    from webhook.kube.install.crds import as_yaml

    print(as_yaml(), end="")
    return 0


def manifests(args: Namespace) -> int:
    from webhook.core.host_paths import mistake_in
    from webhook.kube.install.policies import Blinds, Installation, as_yaml

    mistakes = []
    named = (("namespace", args.namespace), ("service", args.service), ("gpu-namespace", args.gpu_namespace))
    for name, text in named:
        try:
            read_namespace(text)
        except ValueError:
            mistakes.append(f"flag --{name}: {text!r} is not a name; allowed: {NAMESPACE.allowed}, or one like it")
    alias = args.required_hash_alias
    if alias is not None and not is_label_key(alias):
        mistakes.append(f"flag --required-hash-alias: {alias!r} is not an annotation key")
    if args.url is not None and not is_https(args.url):
        mistakes.append(f"flag --url: {args.url!r} is not a URL with https")
    host_paths = tuple(path.strip() for path in args.host_paths.split(",")) if args.host_paths else ()
    for path in host_paths:
        if (mistake := mistake_in(path)) is not None:
            mistakes.append(f"flag --host-paths: {path!r}: {mistake}")
    bundle = b""
    if args.ca_bundle is not None:
        try:
            bundle = args.ca_bundle.read_bytes()
        except OSError as exc:
            mistakes.append(f"flag --ca-bundle: {args.ca_bundle} cannot be read: {exc.strerror}")
        else:
            if b"-----BEGIN CERTIFICATE-----" not in bundle:
                mistakes.append(f"flag --ca-bundle: there is no certificate in {args.ca_bundle}")
    if mistakes:
        raise SettingsError(mistakes)
    installation = Installation(
        namespace=args.namespace,
        service=args.service,
        gpu_namespace=args.gpu_namespace,
        url=args.url,
        ca_bundle=bundle,
        hash_aliases=() if alias is None else (alias,),
        blinds=Blinds(args.blind),
        max_grace=int(args.max_grace.total_seconds()),
        host_paths=host_paths,
    )
    print(as_yaml(args.what, installation), end="")
    return 0


def is_https(text: str) -> bool:
    """Whether the API server would call a webhook there."""
    try:
        return read_url(text).startswith("https:")
    except ValueError:
        return False


def certs_dev(args: Namespace) -> int:
    from webhook.runtime.tls.dev_certificates import make_dev_certificates

    made = make_dev_certificates(args.dir, now=utc_now())
    for path in (made.ca_cert, made.cert, made.key):
        print(path)
    return 0


def certs_ensure(_args: Namespace, chosen: Settings) -> int:
    import asyncio

    needs_cluster(chosen)
    from webhook.commands.certs import ensure

    asyncio.run(ensure(chosen))
    return 0


def certs_keep(_args: Namespace, chosen: Settings) -> int:
    import asyncio

    needs_cluster(chosen)
    from webhook.commands.certs import keep

    asyncio.run(keep(chosen))
    return 0


def needs_cluster(chosen: Settings) -> None:
    if chosen.is_embedded:
        raise GpuwardenError("there are no webhook configurations without a cluster: name one by --kubeconfig")


def config_show(args: Namespace, chosen: Settings) -> int:
    complain(args.parser.prog, chosen.notes)
    print(settings.as_yaml(chosen), end="")
    return 0


def config_check(args: Namespace, chosen: Settings) -> int:
    complain(args.parser.prog, chosen.notes)
    print("The settings can be used.")
    return 0


def config_reference(args: Namespace) -> int:
    from webhook.export.settings import reference as export_reference

    print(export_reference() if args.of == "export" else settings.reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
