"""The command line of `gpuwarden`: its commands, their flags and its exit codes. Each command imports what it needs.

A mistake in the options prints the usage and the mistake to stderr, and the exit code is 1, as in the older webhook
(the GPU Device Assigner). A server that cannot start exits with 1 too.
"""

import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import webhook
from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import DEFAULT_TEMPLATE
from webhook.core.names import is_label_key, is_object_name
from webhook.runtime import settings
from webhook.runtime.clock import utc_now
from webhook.runtime.setting_kinds import NAMESPACE, read_interval, read_namespace, read_url
from webhook.runtime.settings import Command, Settings, SettingsError

FAILED: Final = 1
# A longer usage is not printed: it would hide the mistake.
MAX_USAGE_LINES: Final = 4
# gpuid's exit code for invalid settings and a failed start.
NOT_STARTED: Final = 2
# `explain` and `audit` have no answer.
NO_ANSWER: Final = 2
# The exit code that a shell reports after Ctrl-C: 128 + SIGINT.
INTERRUPTED: Final = 130

# Errors that are not bugs of gpuwarden: a port in use, a file that is gone, an error that gpuwarden reports itself.
EXPECTED_ERRORS: Final = (GpuwardenError, OSError)


class Parser(ArgumentParser):
    """An argparse parser that exits with 1 and takes no abbreviated options: a later option may make them ambiguous."""

    def __init__(self, **options: Any) -> None:
        self.flags: dict[str, Action] = {}
        super().__init__(**options, allow_abbrev=False)
        self.failed_exit_code = FAILED
        # Of the main parser: all commands.
        self.commands: list[Parser] = []
        # `config show` and `config check` take the flags of all commands.
        self.has_all_flags = False

    def add_argument(self, *names: Any, **options: Any) -> Action:
        action = super().add_argument(*names, **options)
        if options.get("help") != SUPPRESS:
            self.flags.update(dict.fromkeys(action.option_strings, action))
        return action

    @property
    def command(self) -> str:
        """The words after `gpuwarden`."""
        return self.prog.partition(" ")[2]

    def error(self, message: str) -> NoReturn:
        self.refuse([message])
        self.exit(self.failed_exit_code)

    def refuse(self, mistakes: Sequence[str]) -> None:
        """Prints the usage and, below it, the mistakes."""
        usage = self.format_usage()
        if usage.count("\n") > MAX_USAGE_LINES:
            usage = f"usage: {self.prog} [options]; {self.prog} --help lists them\n"
        sys.stderr.write(usage)
        complain(self.prog, mistakes)


def complain(prog: str, mistakes: Sequence[str]) -> None:
    for mistake in mistakes:
        print(f"{prog}: {mistake}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    args.unknown = list(mistakes_in(rest, args.parser, parser.commands))
    args.has_run = False
    ended = exit_code(args.parser, lambda: args.run(args))
    return args.parser.failed_exit_code if ended == FAILED and not args.has_run else ended


def mistakes_in(rest: Sequence[str], parser: Parser, commands: Sequence[Parser]) -> Iterator[str]:
    """One sentence for each option and word that the command does not take."""
    is_value = False
    for word in rest:
        name, equals, _ = word.partition("=")
        owners = [one for one in commands if name in one.flags and not one.has_all_flags]
        if is_value and not word.startswith("-"):
            is_value = False
        elif owners:
            names = in_words([one.command for one in owners])
            yield f"{name} is a flag of {names}, not of {parser.command}"
            is_value = not equals and owners[0].flags[name].nargs != 0
        else:
            yield f"there is no option {word}"
            is_value = False


def in_words(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def exit_code(parser: Parser, command: Callable[[], int]) -> int:
    """What the command returns. An expected error is printed as one line; a bug keeps its traceback."""
    try:
        return command()
    except SettingsError as exc:
        parser.refuse(exc.mistakes)
    except EXPECTED_ERRORS as exc:
        complain(parser.prog, [str(exc)])
    except ExceptionGroup as group:
        errors = leaves(group)
        if not all(isinstance(exc, EXPECTED_ERRORS) for exc in errors):
            raise
        complain(parser.prog, [str(exc) for exc in errors])
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

    def added(to: Any, name: str, text: str) -> Parser:
        one: Parser = to.add_parser(name, help=text)
        parser.commands.append(one)
        return one

    one = added(commands, "serve", "answer admission reviews")
    one.add_argument("--hints", action="store_true", help=SUPPRESS)  # only `make run` uses it
    with_settings(one, serve)

    one = added(
        commands,
        "reconcile",
        "confirm, release and expire reservations, and write GPUs and evidence; one replica is the leader",
    )
    with_settings(one, reconcile)

    one = commands.add_parser("bind")  # for one release; `--help` does not list it
    one.set_defaults(parser=one, run=bind)

    one = added(commands, "attest", "prove this node to a server, repeatedly")
    one.add_argument("--once", action="store_true", help="prove the node once; the exit code is the result")
    one.add_argument("--gpus", action="store_true", help="only print the GPUs of this machine, one JSON line each")
    with_settings(one, attest)

    one = added(commands, "export", "export serial numbers and uses of GPUs to stores")
    one.add_argument(
        "--smi-file", metavar="FILE", help="without a cluster: print the readings in this output of nvidia-smi -q -x"
    )
    one.add_argument("--cluster", dest="cluster_name", help="same as --cluster-name")
    one.add_argument("--node", metavar="NODE", help="for --smi-file: name of the node")
    one.add_argument(
        "--machine", metavar="MACHINE", help="for --smi-file: the provider's name of the node (default: na)"
    )
    with_export_settings(one, export)

    one = added(commands, "history", "show which pods used a GPU and when, from the database of `export`")
    add_question(one)
    with_export_settings(one, history)

    one = added(commands, "score", "recommend GPUs for pods; a scorer for `serve --scorer`")
    with_settings(one, score)

    one = added(
        commands, "explain", "show the verdict for a pod, and for each node why it fits or not; reserves nothing"
    )
    add_explained(one)
    with_settings(one, explain, failed=NO_ANSWER)

    one = added(commands, "audit", "list pods that run and would be refused today; changes nothing")
    one.add_argument("-o", "--output", choices=("table", "json"), default="table", help="output format")
    one.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current context)")
    with_settings(one, audit, failed=NO_ANSWER)

    one = added(
        commands,
        "release",
        "release the GPUs of a pod that is gone; requires the right to manage reservations",
    )
    one.add_argument(
        "wanted",
        nargs="+",
        metavar="RESERVATION|GPU|NAMESPACE/POD",
        help="the reservation to release, by any of these names",
    )
    one.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current context)")
    with_settings(one, release)

    parts = commands.add_parser("record", help="records of the evidence in containers")
    records = parts.add_subparsers(metavar="COMMAND", required=True)
    one = added(records, "verify", "check a record, and print its content as JSON")
    one.add_argument("file", type=Path, metavar="FILE", help="the file that GPUWARDEN_EVIDENCE names in the container")
    one.add_argument("--bundle", type=Path, required=True, metavar="FILE", help="roots of the trust domain (PEM)")
    one.add_argument("--trust-domain", required=True, metavar="NAME", help="the trust domain of the node")
    one.add_argument("--evidence-id", default=DEFAULT_TEMPLATE, metavar="TEMPLATE", help="as the setting of `attest`")
    without_settings(one, record_verify)

    certs = commands.add_parser("certs", help="certificates").add_subparsers(metavar="COMMAND", required=True)
    one = added(certs, "dev", "create a development CA and a certificate for localhost")
    one.add_argument("--dir", type=Path, default=Path("certs/dev"), help="output directory (default: certs/dev)")
    without_settings(one, certs_dev)
    one = added(certs, "ensure", "create the certificate of `serve` in a cluster and publish its CA, once")
    with_settings(one, certs_ensure)
    one = added(certs, "keep", "create, publish and renew the certificate of `serve` and its CA")
    with_settings(one, certs_keep)

    one = added(certs, "scheduler", "make the certificates of a kube-scheduler and its extender in one Pod")
    one.add_argument("--dir", type=Path, required=True, help="where to")
    without_settings(one, certs_scheduler)

    one = added(commands, "crds", "print the custom resource definitions as YAML")
    without_settings(one, crds)

    one = added(commands, "manifests", "print the manifests of gpuwarden as YAML for kubectl apply")
    add_installation(one)
    without_settings(one, manifests)

    config = commands.add_parser("config", help="settings").add_subparsers(metavar="COMMAND", required=True)
    with_all_settings(added(config, "show", "print the settings in effect and the source of each"), config_show)
    with_all_settings(added(config, "check", "report every mistake in the settings"), config_check)
    one = added(config, "reference", "print the table of all settings as Markdown")
    one.add_argument("of", nargs="?", choices=("export",), help="the settings of `export` and `history` instead")
    without_settings(one, config_reference)
    return parser


def add_question(parser: Parser) -> None:
    parser.add_argument("--serial", help="serial number of the GPU")
    parser.add_argument("--uuid", help="UUID of the GPU")
    parser.add_argument("--pod", metavar="NAMESPACE/NAME", help="pod that used the GPU")
    parser.add_argument("--hash", metavar="HASH", help="attestation hash of the node during the use")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")


def add_explained(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="FILE", help="manifests, - for stdin; or: pod NAMESPACE/NAME")
    parser.add_argument(
        "-f", "--filename", action="append", default=[], metavar="FILE", help="a manifest, same as FILE"
    )
    parser.add_argument("-n", "--namespace", help="namespace of pods that name none (default: the context's)")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("--show", choices=("pod", "patch"), help="print the pod as it would be stored, or the patch")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current context)")
    parser.add_argument("--ca", dest="server_ca", metavar="FILE", help="same as --server-ca")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token for --server")
    parser.add_argument("--cert", type=Path, metavar="FILE", help="client certificate for --server (PEM)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="private key of --cert (PEM)")


def add_installation(parser: Parser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("rbac", "webhooks", "policies", "crds", "export", "certs", "score", "dra", "kueue", "all"),
        default="all",
        help="default: all besides `export`, `certs`, `score`, `kueue` and, without --native, `dra`",
    )
    parser.add_argument(
        "--gpu-namespace", default="gpu-operator", help="namespace of the device plugin's pods (default: gpu-operator)"
    )
    parser.add_argument("--namespace", default="gpuwarden", help="namespace of gpuwarden (default: gpuwarden)")
    parser.add_argument("--service", default="gpuwarden", help="Service of `serve` (default: gpuwarden)")
    parser.add_argument("--url", help="URL of `serve`, if it is not behind a Service")
    parser.add_argument("--required-hash-alias", metavar="KEY", help="the same as the setting of `serve`")
    parser.add_argument(
        "--blind",
        choices=("policy", "webhook", "nobody"),
        default="policy",
        help="what hides GPUs from pods without a claim: policies (Kubernetes 1.36) or the webhook (default: policy)",
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="no webhooks: policies change requests for GPUs into ResourceClaims for proven GPUs (Kubernetes 1.36)",
    )
    parser.add_argument(
        "--max-grace",
        type=read_interval,
        default=timedelta(hours=1),
        metavar="TIME",
        help="the same as the setting of `serve` (default: 1h)",
    )
    parser.add_argument(
        "--host-paths",
        default="",
        metavar="PATHS",
        help="directories of nodes, separated by commas, that pods of opted-in namespaces may mount read-only",
    )
    parser.add_argument(
        "--gpu-driver",
        default="gpu.nvidia.com",
        metavar="NAME",
        help="DRA driver of the GPUs, the same as the setting of `reconcile` (default: gpu.nvidia.com)",
    )
    parser.add_argument(
        "--dra-guard",
        choices=("opted-in", "all"),
        default="opted-in",
        help="namespaces where only gpuwarden writes ResourceClaims for GPUs (default: opted-in)",
    )
    parser.add_argument(
        "--dra-device-classes",
        default="",
        metavar="NAMES",
        help="DeviceClasses, separated by commas, that the claims of all users may have there",
    )
    parser.add_argument("--ca-bundle", type=Path, metavar="FILE", help="CA of the certificate of `serve` (PEM)")


def with_settings(parser: Parser, run: Callable[[Namespace, Settings], int], failed: int = FAILED) -> None:
    """The command takes the flags of the settings that it reads. Unknown options are reported with their mistakes."""
    command = Command(parser.command)
    settings.add_flags(parser, command)

    def load_and_run(args: Namespace) -> int:
        return run(args, settings.load(vars(args), also=args.unknown, command=command))

    parser.failed_exit_code = failed
    parser.set_defaults(parser=parser, run=load_and_run)


def with_all_settings(parser: Parser, run: Callable[[Namespace, Settings], int]) -> None:
    """The command is about the settings of all commands."""
    settings.add_flags(parser)
    parser.has_all_flags = True
    parser.set_defaults(parser=parser, run=lambda args: run(args, settings.load(vars(args), also=args.unknown)))


def with_export_settings(parser: Parser, run: Callable[[Namespace], int]) -> None:
    from webhook.export.settings import add_flags

    add_flags(parser, Command(parser.command))
    parser.failed_exit_code = NOT_STARTED
    parser.set_defaults(parser=parser, run=run)


def without_settings(parser: Parser, run: Callable[[Namespace], int]) -> None:
    def run_alone(args: Namespace) -> int:
        if args.unknown:
            raise SettingsError(args.unknown)
        return run(args)

    parser.set_defaults(parser=parser, run=run_alone)


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
        raise GpuwardenError("reconcile needs a cluster: name one by --kubeconfig")
    from webhook.commands.reconcile import reconcile as reconcile_all

    asyncio.run(reconcile_all(chosen))
    return 0


def bind(_args: Namespace) -> int:
    raise GpuwardenError(
        "`gpuwarden bind` is gone: a profile of kube-scheduler replaces it, which the chart runs with "
        "scheduler.enabled=true (docs/how-to/scheduler.md)"
    )


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
    from webhook.export.targets import POSTGRES

    question = UseQuery.from_flags(serial=args.serial, uuid=args.uuid, pod=args.pod, hash=args.hash)
    chosen = export_settings.load(vars(args), also=args.unknown, part=export_settings.HISTORY)
    args.has_run = True
    complain(args.parser.prog, chosen.notes)
    print(rendered(asyncio.run(find_uses(chosen.target(POSTGRES), question)), args.output))
    return 0


def score(args: Namespace, chosen: Settings) -> int:
    import asyncio

    from webhook.commands.score import score as score_pods

    asyncio.run(score_pods(chosen))
    return 0


def record_verify(args: Namespace) -> int:
    from webhook.commands.record import verify

    return verify(args.file, args.bundle, args.trust_domain, args.evidence_id)


def explain(args: Namespace, chosen: Settings) -> int:
    from webhook.commands.explain import ExplainRequest, run
    from webhook.runtime.telemetry import configure_logging

    named = ("output", "show", "namespace", "context", "token_file", "cert", "key")
    asked = ExplainRequest.of(args.words, args.filename, **{name: getattr(args, name) for name in named})
    # Watches log their start at level info.
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
    from webhook.core.proof_devices import DRIVER
    from webhook.kube.install.policies import Blinds, DraGuard, Installation, as_yaml

    mistakes = []
    named = (("namespace", args.namespace), ("service", args.service), ("gpu-namespace", args.gpu_namespace))
    for name, text in named:
        try:
            read_namespace(text)
        except ValueError:
            mistakes.append(f"flag --{name}: {text!r} is not a valid name; allowed: {NAMESPACE.allowed}")
    alias = args.required_hash_alias
    if alias is not None and not is_label_key(alias):
        mistakes.append(f"flag --required-hash-alias: {alias!r} is not an annotation key")
    if args.url is not None and not is_https(args.url):
        mistakes.append(f"flag --url: {args.url!r} is not a URL with https")
    host_paths = names_in(args.host_paths)
    for path in host_paths:
        if (mistake := mistake_in(path)) is not None:
            mistakes.append(f"flag --host-paths: {path!r}: {mistake}")
    if args.native and args.blind != "policy":
        mistakes.append(f"flag --blind: {args.blind!r} needs webhooks; allowed with --native: policy")
    device_classes = names_in(args.dra_device_classes)
    for flag, names in (("gpu-driver", (args.gpu_driver,)), ("dra-device-classes", device_classes)):
        mistakes += [f"flag --{flag}: {one!r} is not a valid name" for one in names if not is_object_name(one)]
    mistakes += [
        f"flag --dra-device-classes: with {one!r} a claim takes GPUs or their proofs"
        for one in device_classes
        if one in (DRIVER, args.gpu_driver)
    ]
    bundle = b""
    if args.ca_bundle is not None:
        try:
            bundle = args.ca_bundle.read_bytes()
        except OSError as exc:
            mistakes.append(f"flag --ca-bundle: {args.ca_bundle} cannot be read: {exc.strerror}")
        else:
            if b"-----BEGIN CERTIFICATE-----" not in bundle:
                mistakes.append(f"flag --ca-bundle: {args.ca_bundle} contains no certificate")
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
        native=args.native,
        max_grace=int(args.max_grace.total_seconds()),
        host_paths=host_paths,
        gpu_driver=args.gpu_driver,
        dra_guard=DraGuard(args.dra_guard),
        device_classes=device_classes,
    )
    print(as_yaml(args.what, installation), end="")
    return 0


def names_in(text: str) -> tuple[str, ...]:
    """The parts of a list with commas."""
    return tuple(one.strip() for one in text.split(",")) if text else ()


def is_https(text: str) -> bool:
    """Whether the API server accepts it as a webhook's URL."""
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


def certs_scheduler(args: Namespace) -> int:
    from webhook.scheduler.profile import make_certificates

    for path in make_certificates(args.dir, now=utc_now()):
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
        raise GpuwardenError("certs needs a cluster: name one by --kubeconfig")


def config_show(args: Namespace, chosen: Settings) -> int:
    complain(args.parser.prog, chosen.notes)
    print(settings.as_yaml(chosen), end="")
    return 0


def config_check(args: Namespace, chosen: Settings) -> int:
    complain(args.parser.prog, chosen.notes)
    print("The settings are valid.")
    return 0


def config_reference(args: Namespace) -> int:
    from webhook.export.settings import reference as export_reference

    print(export_reference() if args.of == "export" else settings.reference(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
