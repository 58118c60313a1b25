"""`POST /finalize`: a caller reports that a pod exists. The report is accepted only if it matches all known facts."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import structlog
from attrs import define, frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhook.core.caller import Caller, CallersUnavailableError
from webhook.core.device import DeviceUuid
from webhook.core.errors import (
    GpuwardenError,
    LedgerError,
    ReservationConflictError,
    ReservationExpiredError,
    UnknownReservationError,
)
from webhook.core.fleet import Fleet
from webhook.core.reservation import PodIdentity, PodProof, Reservation, ReservationId
from webhook.ledger import Ledger
from webhook.ledger.pods import PodFacts, PodSource, PodsUnavailableError
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, caller_of, finalize_reservations, forbidden
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# The fields and their maximum lengths. The UUIDs belong to one pod, so to one node.
FIELDS = {"namespace": 63, "name": 253, "uid": 128, "reservation-id": 128, "gpu-uuid": 16384}
MAX_BODY = 2**16
NOT_ALLOWED = (
    "the caller must be the pod itself, or be allowed to `finalize reservations.gpuwarden.io` in its namespace"
)


class RefusedFinalizeError(GpuwardenError):
    """The report is refused. `code` is the HTTP status of the answer."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@frozen
class FinalizeBody:
    """The five fields of a request."""

    pod: PodIdentity
    reservation_id: ReservationId
    uuids: tuple[DeviceUuid, ...]

    @classmethod
    def parse(cls, body: bytes) -> "FinalizeBody":
        fields = fields_of(body)
        uuids = tuple(DeviceUuid(uuid.strip()) for uuid in fields["gpu-uuid"].split(","))
        pod = PodIdentity(fields["namespace"], fields["name"], fields["uid"])
        return cls(pod, ReservationId(fields["reservation-id"]), uuids)


def fields_of(body: bytes) -> dict[str, str]:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise RefusedFinalizeError(400, "the body is not JSON") from exc
    if not isinstance(raw, dict):
        raise RefusedFinalizeError(400, "the body is not a JSON object")
    absent = [field for field in FIELDS if is_blank(raw, field)]
    if absent:
        raise RefusedFinalizeError(400, f"fields required but absent: {', '.join(absent)}")
    wrong = [field for field in FIELDS if not isinstance(raw[field], str)]
    if wrong:
        raise RefusedFinalizeError(400, f"fields that must be strings: {', '.join(wrong)}")
    long = [field for field, most in FIELDS.items() if len(raw[field]) > most]
    if long:
        raise RefusedFinalizeError(400, f"fields that are too long: {', '.join(long)}")
    return {field: raw[field] for field in FIELDS}


def is_blank(raw: Mapping[str, Any], field: str) -> bool:
    value = raw.get(field)
    return value is None or (isinstance(value, str) and not value.strip())


@define(eq=False, repr=False)
class Finalize:
    """The route."""

    _ledger: Ledger
    _fleet: Fleet
    _pods: PodSource
    _facts: PodFacts
    _health: Health
    _gate: CallerGate

    async def finalize(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            body = FinalizeBody.parse(await read_body(request, MAX_BODY))
            if not await self._may_report(caller_of(request), body.pod):
                return forbidden(NOT_ALLOWED)
            await self._bind(body)
        except (RefusedBodyError, RefusedFinalizeError) as exc:
            return error(exc.code, str(exc))
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        except (PodsUnavailableError, LedgerError) as exc:
            log.warning("finalize could not be checked", exc_info=exc)
            return error(503, "the pod cannot be checked at this moment")
        log.info("reservation finalized", reservation=body.reservation_id, namespace=body.pod.namespace)
        return JSONResponse({"status": "ok"})

    async def _may_report(self, caller: Caller, pod: PodIdentity) -> bool:
        """Whether the caller is the pod, by a token bound to it, or has the right to finalize reservations."""
        if caller.is_pod(pod.namespace, pod.uid):
            return True
        return await self._gate.may(caller, finalize_reservations(pod.namespace))

    async def _bind(self, body: FinalizeBody) -> None:
        held = await self._matching_reservation(body)
        if not held.may_belong_to(body.pod):
            raise RefusedFinalizeError(409, f"reservation {held.id} is held by another pod")
        mismatch = await self._facts.find_mismatch(body.pod, held)
        if mismatch is not None:
            raise RefusedFinalizeError(422, mismatch)
        self._refuse_second_reservation(body.pod, held)
        try:
            proof = PodProof.REPORTED if self._pods.trusts_reviews else PodProof.CONFIRMED
            await self._ledger.bind_to_pod(proof, held.id, body.pod, node=held.node)
        except UnknownReservationError as exc:
            raise RefusedFinalizeError(404, f"reservation {held.id} is gone") from exc
        except ReservationConflictError as exc:
            raise RefusedFinalizeError(409, f"reservation {held.id} is held by another pod") from exc
        except ReservationExpiredError as exc:
            raise RefusedFinalizeError(409, f"reservation {held.id} has expired") from exc
        self._pods.created(body.pod)

    def _refuse_second_reservation(self, pod: PodIdentity, held: Reservation) -> None:
        """In embedded mode only the ledger knows the pod. In a cluster the pod's annotations name its reservation."""
        other = self._ledger.of_pod(pod.uid) if self._pods.trusts_reviews else None
        if other is not None and other.id != held.id:
            raise RefusedFinalizeError(409, f"the pod with uid {pod.uid} has reservation {other.id}")

    async def _matching_reservation(self, body: FinalizeBody) -> Reservation:
        """The reservation with this id, if it holds the devices of the report."""
        held = await self._find(body)
        if held is None or not set(body.uuids) <= set(held.uuids):
            raise self._mismatch(body, () if held is None else held.uuids)
        if len(body.uuids) > 1 and set(body.uuids) != set(held.uuids):
            raise RefusedFinalizeError(409, f"reservation {held.id} holds more GPUs: name one of them, or all")
        return held

    def _mismatch(self, body: FinalizeBody, held: Collection[DeviceUuid]) -> RefusedFinalizeError:
        uuid = next(one for one in body.uuids if one not in held)
        if self._ledger.of_device(uuid):
            return RefusedFinalizeError(409, f"{uuid} is held by another reservation")
        return RefusedFinalizeError(404, f"no reservation holds {uuid}")

    async def _find(self, body: FinalizeBody) -> Reservation | None:
        """The reservation with this id. A reservation is on one node, so it is looked up on the nodes that have its
        first device."""
        first = body.uuids[0]
        for node in self._fleet.claimants(first) or (self._fleet.node_of_device(first),):
            held = await self._ledger.find(body.reservation_id, node=node)
            if held is not None:
                return held
        return None
