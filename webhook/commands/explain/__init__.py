"""`gpuwarden explain`: reads manifests, asks one source about each pod, prints the answers."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from attrs import evolve, frozen
from jsonpatch import JsonPatchException, apply_patch
from jsonpointer import JsonPointerException

from webhook.admission.manifest_pods import UnreadableManifestError, mapping, name_of, namespace_of, pods_of
from webhook.commands.explain.sources import (
    Credentials,
    NoAnswerError,
    Source,
    file_source,
    kubeconfig_credentials,
    pod_in_cluster,
    server_source,
)
from webhook.core.errors import GpuwardenError
from webhook.core.names import is_object_name
from webhook.core.raw import Raw
from webhook.runtime.settings import Settings, SettingsError

ADMIT, DENY, NO_ANSWER = 0, 1, 2
# The word before NAMESPACE/NAME.
POD: Final = "pod"
UNKNOWN: Final = "unknown"


@frozen
class ExplainRequest:
    """The question, and the format of the answer."""

    files: tuple[str, ...]
    pod: tuple[str, str] | None = None
    output: str = "text"
    show: str | None = None
    namespace: str | None = None
    context: str | None = None
    token_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @classmethod
    def of(cls, words: Sequence[str], files: Sequence[str], **members: Any) -> "ExplainRequest":
        """Raises SettingsError if neither a manifest nor a pod is named."""
        if words[:1] == [POD] and len(words) == 2:
            namespace, slash, name = words[1].partition("/")
            if not (slash and is_object_name(namespace) and is_object_name(name)) or files:
                raise SettingsError(["pod NAMESPACE/NAME: name one pod, and no file"])
            return cls((), (namespace, name), **members)
        if not words and not files:
            raise SettingsError(["name a manifest, - for stdin, or pod NAMESPACE/NAME"])
        return cls((*words, *files), **members)

    @property
    def needs_cluster(self) -> bool:
        return self.pod is not None or self.context is not None


@frozen
class PodAnswer:
    """The answer for one pod."""

    raw: Raw
    content: Raw
    file: str | None = None

    @property
    def status(self) -> int:
        return {"admit": ADMIT, "deny": DENY}.get(self.content["verdict"], NO_ANSWER)


def run(asked: ExplainRequest, settings: Settings) -> int:
    """Explains every pod. Exit code 2: a pod has no answer; else 1: a pod is denied; else 0."""
    answers, problems = asyncio.run(answered(asked, with_cluster(asked, settings)))
    for problem in problems:
        sys.stderr.write(f"gpuwarden explain: {problem}\n")
    if asked.show is not None:
        sys.stdout.writelines(printed(answers, asked))
    elif asked.output == "json":
        sys.stdout.write(as_json(answers))
    else:
        sys.stdout.writelines(as_text(one, is_named=len(answers) > 1) for one in answers)
    return max([*(one.status for one in answers), *([NO_ANSWER] if problems else [])], default=NO_ANSWER)


def with_cluster(asked: ExplainRequest, settings: Settings) -> Settings:
    """The settings, with kubectl's default kubeconfig if no cluster is named and the request needs one, or there is no
    other source."""
    if not settings.is_embedded:
        return settings
    file = settings.inventory_file
    is_lost = settings.server is None and settings.inventory is None and (file is None or not file.exists())
    if not (asked.needs_cluster or is_lost):
        return settings
    from webhook.kube.client import DEFAULT_KUBECONFIG

    if not asked.needs_cluster and not DEFAULT_KUBECONFIG.exists():
        raise GpuwardenError(
            f"no source: name --server, --kubeconfig or --inventory ({file} and {DEFAULT_KUBECONFIG} do not exist)"
        )
    return by_current_context(settings)


def by_current_context(settings: Settings) -> Settings:
    """The settings, with kubectl's default kubeconfig if no cluster is named."""
    from webhook.kube.client import DEFAULT_KUBECONFIG

    return evolve(settings, kubeconfig=DEFAULT_KUBECONFIG) if settings.is_embedded else settings


async def answered(asked: ExplainRequest, settings: Settings) -> tuple[list[PodAnswer], list[str]]:
    pods, problems = await pods_asked(asked, settings)
    if not pods:
        return [], problems
    async with source_of(asked, settings) as source:
        if asked.output == "text" and asked.show is None:
            sys.stderr.write(f"gpuwarden explain: answered by {source.name}\n")
        return [await explained(source, raw, file) for raw, file in pods], problems


@asynccontextmanager
async def source_of(asked: ExplainRequest, settings: Settings) -> AsyncIterator[Source]:
    """The server, if one is named; else the cluster, if one is named; else the inventory file."""
    if settings.server is not None:
        credentials = await credentials_of(asked, settings)
        async with server_source(settings.server, settings.server_ca, credentials) as source:
            yield source
    elif settings.is_embedded:
        async with file_source(settings) as source:
            yield source
    else:
        from webhook.commands.explain.dry_run import cluster_source  # the client takes half a second to import

        async with cluster_source(settings, asked.context) as source:
            yield source


async def credentials_of(asked: ExplainRequest, settings: Settings) -> Credentials:
    """The named credentials, else those of a named kubeconfig. By default the server gets none."""
    if asked.token_file is not None or asked.cert is not None:
        token = None if asked.token_file is None else read(str(asked.token_file)).strip()
        return Credentials(token, asked.cert, asked.key or asked.cert)
    if settings.is_embedded:
        return Credentials()
    return await kubeconfig_credentials(settings, asked.context)


async def explained(source: Source, raw: Raw, file: str | None) -> PodAnswer:
    try:
        content = await source.explained(raw)
    except NoAnswerError as exc:
        content = {"verdict": UNKNOWN, "reason": "CannotSay", "message": str(exc), "nodes": []}
    return PodAnswer(raw, {**content, "source": source.name}, file)


# Pods.


async def pods_asked(asked: ExplainRequest, settings: Settings) -> tuple[list[tuple[Raw, str | None]], list[str]]:
    """The pods with their files, and the mistakes in the other files."""
    if asked.pod is not None:
        return [(await pod_in_cluster(settings, asked.context, *asked.pod), None)], []
    pods: list[tuple[Raw, str | None]] = []
    problems = []
    for path in asked.files:
        try:
            found = pods_in_file(path)
        except UnreadableManifestError as exc:
            problems.append(f"{path}: {exc}")
            continue
        except OSError as exc:
            problems.append(f"{path}: {exc.strerror}")
            continue
        pods += [(in_namespace(raw, asked.namespace), path) for raw in found]
    return pods, problems


def pods_in_file(path: str) -> list[Raw]:
    """At least one. Raises UnreadableManifestError or OSError."""
    found = pods_of(read(path))
    if not found:
        raise UnreadableManifestError("no pod, and no object that creates pods")
    return found


def in_namespace(raw: Raw, namespace: str | None) -> Raw:
    if namespace is None or namespace_of(raw):
        return raw
    return {**raw, "metadata": {**mapping(raw, "metadata"), "namespace": namespace}}


def read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except UnicodeDecodeError as exc:
        raise UnreadableManifestError("not text") from exc


# Output.


def as_json(answers: Sequence[PodAnswer]) -> str:
    """An object for one pod, a list for several."""
    content = [one.content for one in answers]
    if len(answers) != 1:
        content = [{"pod": name_of(one.raw), "file": one.file, **one.content} for one in answers]
    found: Raw | list[Raw] = content if len(answers) != 1 else content[0]
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def as_text(answer: PodAnswer, *, is_named: bool) -> str:
    content = answer.content
    name = f"{name_of(answer.raw) or answer.file}: " if is_named else ""
    lines = [f"{name}{content['verdict']}: {content['message']} ({content['reason']})"]
    lines += [f"  warning: {one}" for one in content.get("warnings", ())]
    lines += [f"  hint: {one}" for one in content.get("hints", ())]
    for node in content["nodes"]:
        lines.append(f"  {'+' if node['fits'] else '-'} {node['name']}: {node_text(node)}")
    return "\n".join(lines) + "\n"


def node_text(node: Raw) -> str:
    if node["fits"]:
        return ", ".join(node["devices"]) or "fits"
    return ", ".join(node["reasons"]) + (f": {node['hash']}" if node.get("hash") else "")


def printed(answers: Sequence[PodAnswer], asked: ExplainRequest) -> Iterator[str]:
    """The patches, or the pods as the API server would store them. The reason of a denial goes to stderr."""
    for one in answers:
        if one.status != ADMIT or "patch" not in one.content:
            why = "this server returns no patches" if one.status == ADMIT else one.content["message"]
            sys.stderr.write(f"gpuwarden explain: {name_of(one.raw) or one.file}: {one.content['verdict']}: {why}\n")
            continue
        patch = one.content["patch"]
        thing = patch if asked.show == "patch" else patched(one.raw, patch)
        if asked.output == "json" or asked.show == "patch":
            yield json.dumps(thing, indent=2) + "\n"
        else:
            yield ("---\n" if len(answers) > 1 else "") + yaml.safe_dump(thing, sort_keys=False)


def patched(raw: Raw, patch: list[Raw]) -> Raw:
    """Applies the patch as the API server does."""
    try:
        done: Raw = apply_patch(raw, patch)
    except (JsonPatchException, JsonPointerException) as exc:
        raise NoAnswerError(f"the patch does not fit the pod: {exc}") from exc
    return done
