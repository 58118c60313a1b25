"""AdmissionReview v1, request and response. No other module knows its JSON and its status codes."""

import binascii
from enum import StrEnum
from typing import Any, assert_never

import msgspec
from attrs import frozen

from webhook.core.errors import MalformedReviewError
from webhook.core.pod import WireStruct
from webhook.core.reasons import STATUS_CODES, Reason
from webhook.core.reservation import ReservationId
from webhook.core.verdict import Admit, Deny, Verdict, plain

API_VERSION = "admission.k8s.io/v1"
# The API server's uids have 36 characters. Uids become part of annotations and object names.
MAX_UID = 128
# The API server stops reading warnings after about 4 KiB.
MAX_WARNINGS = 12


class Operation(StrEnum):
    """The operation on the object."""

    CREATE = "CREATE"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    CONNECT = "CONNECT"


class KindWire(WireStruct, frozen=True):
    group: str | None = None
    version: str | None = None
    kind: str | None = None


class ResourceWire(WireStruct, frozen=True):
    group: str | None = None
    version: str | None = None
    resource: str | None = None


class RequestWire(WireStruct, frozen=True):
    uid: str = ""
    kind: KindWire | None = None
    resource: ResourceWire | None = None
    sub_resource: str | None = None
    operation: str | None = None
    namespace: str | None = None
    name: str | None = None
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None
    dry_run: bool | None = None


class EnvelopeWire(WireStruct, frozen=True):
    api_version: str = ""
    kind: str = ""
    request: RequestWire | None = None


DECODER = msgspec.json.Decoder(EnvelopeWire)
ENCODER = msgspec.json.Encoder()


@frozen
class Review:
    """One review request of the API server."""

    uid: ReservationId  # of the review, and of the reservation that it creates
    kind: str
    subresource: str
    operation: str
    namespace: str
    name: str
    raw: dict[str, Any] | None
    raw_old: dict[str, Any] | None
    is_dry_run: bool
    # Whether it is small enough to stay in memory while it waits.
    is_light: bool = True

    @classmethod
    def parse(cls, body: bytes) -> "Review":
        """Raises `MalformedReviewError` if the review has no uid to answer with."""
        try:
            envelope = DECODER.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise MalformedReviewError(f"not an AdmissionReview: {plain(str(exc))}") from exc
        if envelope.kind != "AdmissionReview":
            raise MalformedReviewError("not an AdmissionReview")
        if envelope.api_version != API_VERSION:
            raise MalformedReviewError(f"not an AdmissionReview of {API_VERSION}")
        request = envelope.request
        if request is None or not request.uid.strip():
            raise MalformedReviewError("the review has no request with a uid")
        if len(request.uid) > MAX_UID or not request.uid.isprintable():
            raise MalformedReviewError(f"the review's uid is not a printable text of up to {MAX_UID} characters")
        return cls(
            uid=ReservationId(request.uid),
            kind=kind_of(request),
            subresource=request.sub_resource or "",
            operation=request.operation or "",
            namespace=request.namespace or namespace_of(request.object or request.old_object),
            name=request.name or "",
            raw=request.object,
            raw_old=request.old_object,
            is_dry_run=bool(request.dry_run),
        )

    @property
    def is_of_pods(self) -> bool:
        return self.kind in ("Pod", "v1/Pod")

    @property
    def is_of_jobs(self) -> bool:
        return self.kind == "batch/Job"

    @property
    def is_of_bindings(self) -> bool:
        """For `pods/binding` and `bindings`, which are two resources for one operation."""
        return self.kind == "Binding" and self.operation == Operation.CREATE

    @property
    def subject(self) -> str:
        """The operation and the kind, for messages."""
        return f"{self.operation or 'an unnamed operation'} of {self.kind or 'an object without a kind'}" + (
            f"/{self.subresource}" if self.subresource else ""
        )


def kind_of(request: RequestWire) -> str:
    """`Pod` for the core group; `group/Kind` for others."""
    kind = request.kind or KindWire()
    return "/".join(part for part in (kind.group, kind.kind) if part)


def namespace_of(raw: dict[str, Any] | None) -> str:
    meta = (raw or {}).get("metadata")
    namespace = meta.get("namespace") if isinstance(meta, dict) else None
    return namespace if isinstance(namespace, str) else ""


def answer(uid: str, verdict: Verdict) -> bytes:
    """The body of the reply."""
    return ENCODER.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response(uid, verdict)})


def response(uid: str, verdict: Verdict) -> dict[str, Any]:
    match verdict:
        case Admit(patch, warnings, audit, _):
            body: dict[str, Any] = {"uid": uid, "allowed": True}
            if patch:
                body["patchType"] = "JSONPatch"
                body["patch"] = binascii.b2a_base64(ENCODER.encode(patch), newline=False).decode()
            if warnings:
                body["warnings"] = [plain(warning) for warning in warnings[:MAX_WARNINGS]]
            if audit:
                body["auditAnnotations"] = audit
            return body
        case Deny(reason, _, _, causes):
            return {
                "uid": uid,
                "allowed": False,
                "status": status(reason, verdict.sentence, causes),
                "auditAnnotations": {"reason": reason},
            }
    assert_never(verdict)


def status(reason: Reason, message: str, causes: tuple[str, ...]) -> dict[str, Any]:
    """A Kubernetes Status. Clients show nothing without code, reason and message."""
    body: dict[str, Any] = {
        "status": "Failure",
        "code": STATUS_CODES[reason],
        "reason": reason,
        "message": plain(message, length=4096),
    }
    if causes:
        body["details"] = {"causes": [{"reason": reason, "message": plain(cause)} for cause in causes]}
    return body
