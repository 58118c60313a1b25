"""`gpuwarden explain` by a kubeconfig: the API server answers a dry run of the creation, with the caller's own rights.

The whole admission takes part: gpuwarden's webhooks with the settings of `serve`, policies, quotas, other webhooks.
`docs/decisions/0028-explain-asks-the-api-server.md`.
"""

import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from attrs import frozen

from webhook.admission.explanation import DEFAULT_NAMESPACE, sentence_of
from webhook.admission.manifest_pods import mapping, namespace_of
from webhook.commands.explain.sources import SET_BY_SERVER, NoAnswerError, Source
from webhook.core import keys
from webhook.core.claim import Claim, ClaimRules, claim_of, recorded_claim_or_none
from webhook.core.difference import difference
from webhook.core.errors import GpuwardenError, InvalidPodError
from webhook.core.evidence import EvidenceState, state_of
from webhook.core.near_misses import near_misses
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.core.reasons import STATUS_CODES, Reason
from webhook.core.reservation import Phase
from webhook.evidence.node_evidence import NodeEvidence
from webhook.kube.client import ApiClient, connect, namespace_of_context
from webhook.kube.gpu_node import GpuNode
from webhook.kube.json_objects import object_in
from webhook.kube.paths import GPU_NODES_PATH, NODE_EVIDENCES_PATH
from webhook.kube.requests import REQUEST_ERRORS, ApiReply, request_json, send_request
from webhook.kube.watch import WATCH_ERRORS, whole_list
from webhook.runtime.clock import Clock, utc_now
from webhook.runtime.settings import Settings

PODS_OF: Final = "/api/v1/namespaces/{namespace}/pods"
SET_PATH: Final = "/apis/apps/v1/namespaces/{namespace}/statefulsets/{name}"
GPU_NODE_PATH: Final = GPU_NODES_PATH + "/{name}"
REVIEWS_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
# The API server calls the webhooks one after the other.
TIMEOUT: Final = 60.0
# Only the API server's text shows whether a webhook or the API server itself refused: both give the same reasons.
DENIED: Final = re.compile(r'admission webhook "[^"]*" denied the request: ')
WARNING: Final = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
# Fields of metadata that the API server sets.
WRITTEN: Final = SET_BY_SERVER | {"uid"}
# Reasons of temporary denials, because a part of gpuwarden is unavailable.
TEMPORARY: Final = {reason for reason, code in STATUS_CODES.items() if code == 503}
EXISTS: Final = "AlreadyExists"
NOT_ASKED: Final = (
    "gpuwarden did not change the pod, although the pod has a claim: is its namespace labelled "
    f"{keys.OPT_IN.name}=true, and are the webhooks installed?"
)


class DryRunStatusWire(msgspec.Struct, frozen=True):
    """The Status object of a refusal."""

    reason: str = ""
    message: str = ""


class ReviewStatusWire(msgspec.Struct, frozen=True):
    allowed: bool


class ReviewWire(msgspec.Struct, frozen=True):
    status: ReviewStatusWire


@frozen
class ListedObjects:
    """Hashes and labels in the GPUNodes and NodeEvidences that the caller may list."""

    proven_hashes: dict[str, int]
    device_labels: set[str]


class DryRuns:
    """Explains pods by dry runs on the API server."""

    def __init__(self, api: ApiClient, namespace: str, clock: Clock) -> None:
        self.name = f"cluster {api.configuration.host}, by a dry run of the creation"
        self._api = api
        self._namespace = namespace
        self._clock = clock
        self._objects: ListedObjects | str | None = None

    async def explained(self, raw: Raw) -> Raw:
        namespace = namespace_of(raw) or self._namespace
        held = await self._held(raw, namespace)
        if held is not None:
            return held
        sent = await self._with_set(creatable(raw, namespace), namespace)
        where = f"a dry run in namespace {namespace}"
        try:
            reply = await send_request(
                self._api,
                "POST",
                PODS_OF,
                {"namespace": namespace},
                sent,
                seconds=TIMEOUT,
                query={"dryRun": "All", "fieldValidation": "Warn"},
            )
        except REQUEST_ERRORS as exc:
            raise NoAnswerError(f"{where}: the API server did not answer: {str(exc) or type(exc).__name__}") from exc
        except (ValueError, TypeError, RecursionError) as exc:  # a value that JSON does not have
            raise NoAnswerError(f"{where}: the pod cannot be sent: {type(exc).__name__}") from exc
        warnings = list(warnings_in(reply.warnings))
        try:
            if reply.status == 201:
                return admitted(raw, object_in(reply.content), warnings)
            status = msgspec.json.decode(reply.content, type=DryRunStatusWire)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise NoAnswerError(f"{where}: the API server answered {reply.status}, which cannot be read") from exc
        if status.reason == EXISTS:
            return answer_of("admit", EXISTS, f"nothing refuses the pod, but {status.message}", warnings)
        if not await self._is_verdict(reply, status, namespace):
            raise NoAnswerError(f"{where}: the API server answered {reply.status}: {status.message}")
        message = DENIED.sub("", status.message, count=1)
        return answer_of("deny", status.reason, message, warnings, await self._hints(sent))

    async def _is_verdict(self, reply: ApiReply, status: DryRunStatusWire, namespace: str) -> bool:
        """Whether the refusal is about the pod, and not temporary."""
        if DENIED.match(status.message):
            return status.reason not in TEMPORARY
        match reply.status:
            case 400:  # the API server does not call a webhook with side effects for a dry run
                return "does not support dry run" not in status.message
            case 403:
                return await self._may_create(namespace)
            case other:
                return other in (413, 422)

    async def _may_create(self, namespace: str) -> bool:
        """Whether the caller may create pods: if not, the pod itself was not judged."""
        asked = {"namespace": namespace, "verb": "create", "resource": "pods"}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        try:
            _, content = await request_json(self._api, "POST", REVIEWS_PATH, {}, body, seconds=TIMEOUT)
            return msgspec.json.decode(content, type=ReviewWire).status.allowed
        except (*REQUEST_ERRORS, msgspec.MsgspecError, UnicodeDecodeError):
            return False

    async def _held(self, raw: Raw, namespace: str) -> Raw | None:
        """The GPUs of an existing pod; None if it has none."""
        meta = mapping(raw, "metadata")
        annotations = mapping(meta, "annotations")
        uid, node = meta.get("uid"), annotations.get(keys.NODE.name)
        if not isinstance(uid, str) or not uid or not isinstance(node, str):
            return None
        status, content = await self._got(GPU_NODE_PATH, {"name": node})
        if status == 404:
            return None
        if status == 403:
            uuids = str(annotations.get(keys.GPU_UUID.name) or "").replace(",", ", ")
            text = f"the pod has {uuids or 'GPUs'} of node {node}, as its annotations say"
            return answer_of("admit", Reason.ADMITTED, text)
        if status != 200:
            raise NoAnswerError(f"GPUNode {node}, with the pod's GPUs: the API server answered {status}")
        try:
            found = GpuNode.parse(object_in(content)).reservations.values()
        except (GpuwardenError, msgspec.DecodeError) as exc:
            raise NoAnswerError(f"GPUNode {node}, with the pod's GPUs, cannot be read") from exc
        for one in found:
            if one.uid == uid and one.namespace == namespace and one.phase is not Phase.RELEASING:
                return answer_of("admit", Reason.ADMITTED, sentence_of(one))
        return None

    async def _with_set(self, sent: Raw, namespace: str) -> Raw:
        """Adds the UIDs of owners. The API server requires them, and the GPUs of a map belong to a set's UID."""
        owners = mapping(sent, "metadata").get("ownerReferences")
        if not isinstance(owners, list) or all(not isinstance(one, dict) or one.get("uid") for one in owners):
            return sent
        named = [
            one if not isinstance(one, dict) or one.get("uid") else {**one, "uid": await self._uid(one, namespace)}
            for one in owners
        ]
        return {**sent, "metadata": {**sent["metadata"], "ownerReferences": named}}

    async def _uid(self, owner: Raw, namespace: str) -> str:
        """A random one if the set does not exist yet."""
        status, content = await self._got(SET_PATH, {"namespace": namespace, "name": str(owner.get("name"))})
        try:
            found = mapping(object_in(content), "metadata").get("uid") if status == 200 else None
        except msgspec.DecodeError:
            found = None
        return found if isinstance(found, str) and found else str(uuid.uuid4())

    async def _got(self, path: str, names: dict[str, str]) -> tuple[int, bytes]:
        try:
            return await request_json(self._api, "GET", path, names, seconds=TIMEOUT)
        except REQUEST_ERRORS as exc:
            raise NoAnswerError(f"the API server did not answer: {str(exc) or type(exc).__name__}") from exc

    async def _hints(self, sent: Raw) -> list[str]:
        """Hints about probable mistakes in the manifest. The message names the requirements of the namespace."""
        try:
            pod = Pod.parse(sent)
            claim = claim_of(pod, ClaimRules())
        except InvalidPodError:
            return []
        if claim is None or not (claim.record.hashes or claim.record.requirements):
            return list(near_misses(pod, None, ListedObjects({}, set())))
        if self._objects is None:
            self._objects = await self._listed()
        if isinstance(self._objects, str):
            return [*near_misses(pod, None, ListedObjects({}, set())), self._objects]
        return list(near_misses(pod, known_of(claim, self._objects), self._objects))

    async def _listed(self) -> ListedObjects | str:
        try:
            nodes, _ = await whole_list(self._api, GPU_NODES_PATH)
            evidence, _ = await whole_list(self._api, NODE_EVIDENCES_PATH)
        except WATCH_ERRORS:
            return "the right to list GPUNodes and NodeEvidences is needed for hints about hashes and labels"
        labels = {label for raw in nodes.values() for one in devices_of(raw) for label in one}
        proven: dict[str, int] = {}
        for raw in evidence.values():
            for digest in self._hashes_of(raw):
                proven[digest] = proven.get(digest, 0) + 1
        return ListedObjects(proven, labels)

    def _hashes_of(self, raw: Raw) -> Iterator[str]:
        try:
            word = NodeEvidence.parse(raw).combined_evidence
        except GpuwardenError:
            return
        if word is not None and state_of(word, self._clock()) is EvidenceState.FRESH:
            yield word.hash


def known_of(claim: Claim, listed: ListedObjects) -> Claim | None:
    """None for a claim with hashes if there is no NodeEvidence: static evidence is in no object."""
    return claim if listed.proven_hashes or not claim.record.hashes else None


def devices_of(raw: Raw) -> Iterator[Iterable[str]]:
    try:
        yield from (one.labels for one in GpuNode.parse(raw).devices)
    except GpuwardenError:
        return


def creatable(raw: Raw, namespace: str) -> Raw:
    """The pod as it can be created: without fields that the API server sets, and the name of an existing pod."""
    own = mapping(raw, "metadata")
    meta = {key: value for key, value in own.items() if key not in WRITTEN}
    meta["namespace"] = namespace
    name, is_there = meta.get("name"), bool(own.get("uid"))
    if is_there and name and not is_of_set(meta):
        del meta["name"]
        meta["generateName"] = f"{name}-"
    if not meta.get("name") and not meta.get("generateName"):
        meta["generateName"] = "explained-"
    kept = {key: value for key, value in raw.items() if key != "status"}
    spec = mapping(raw, "spec")
    if is_there:
        kept["spec"] = {key: value for key, value in spec.items() if key != "ephemeralContainers"}
    return {**kept, "apiVersion": "v1", "kind": "Pod", "metadata": meta}


def is_of_set(meta: Raw) -> bool:
    """Whether a StatefulSet owns it: then the ordinal is in the name."""
    owners = meta.get("ownerReferences")
    return isinstance(owners, list) and any(
        isinstance(one, dict) and one.get("kind") == "StatefulSet" for one in owners
    )


def admitted(raw: Raw, made: Raw, warnings: list[str]) -> Raw:
    """The answer for an admitted pod, from the pod that would be stored."""
    stored = {key: value for key, value in made.items() if key != "status"}
    stored["metadata"] = {key: value for key, value in mapping(made, "metadata").items() if key not in WRITTEN}
    patch = list(difference(raw, stored))
    try:
        pod = Pod.parse(stored)
    except InvalidPodError as exc:
        raise NoAnswerError(f"the API server's answer is not a pod: {exc}") from exc
    claim = recorded_claim_or_none(pod)
    if claim is None:
        hints = [NOT_ASKED] if asks(raw) else []
        return answer_of("admit", Reason.NOT_ASKED, "nothing refuses the pod", warnings, hints, patch=patch)
    if pod.is_gated:
        return answer_of("admit", Reason.QUEUED, next(iter(warnings), "the pod waits"), warnings, patch=patch)
    gpus = str(pod.annotations.get(keys.GPU_UUID.name) or "")
    node = str(pod.annotations.get(keys.NODE.name) or "")
    has = f"{gpus.replace(',', ', ')} on node {node}" if gpus else "admitted"
    nodes = [{"name": node, "fits": True, "reasons": [], "devices": gpus.split(",")}] if gpus else []
    return answer_of("admit", Reason.ADMITTED, f"{claim.sentence}: {has}", warnings, nodes=nodes, patch=patch)


def asks(raw: Raw) -> bool:
    try:
        return claim_of(Pod.parse(raw), ClaimRules()) is not None
    except InvalidPodError:
        return True


def warnings_in(headers: Iterable[str]) -> Iterator[str]:
    for header in headers:
        for found in WARNING.finditer(header):
            yield re.sub(r"\\(.)", r"\1", found[1])


def answer_of(
    verdict: str,
    reason: str,
    message: str,
    warnings: Iterable[str] = (),
    hints: Iterable[str] = (),
    nodes: Iterable[Raw] = (),
    patch: list[Raw] | None = None,
) -> Raw:
    """An answer in the format of `POST /explain`."""
    found: Raw = {
        "verdict": verdict,
        "reason": str(reason) or "Refused",
        "message": message,
        "warnings": list(warnings),
        "hints": list(hints),
        "nodes": list(nodes),
    }
    return found if patch is None else {**found, "patch": patch}


@asynccontextmanager
async def cluster_source(settings: Settings, context: str | None) -> AsyncIterator[Source]:
    """The API server, with the caller's rights."""
    async with await connect(settings, context=context) as api:
        own = None if settings.kubeconfig is None else namespace_of_context(settings.kubeconfig, context)
        yield DryRuns(api, own or DEFAULT_NAMESPACE, utc_now)
