"""`POST /finalize`: somebody tells us that a pod exists. Only what fits every known fact is believed."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import structlog
from attrs import frozen
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
from webhook.runtime.clock import utc_now
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.callers import CALLERS_UNAVAILABLE, CallerGate, caller_of, finalize_reservations, forbidden
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# The fields and how long they may be. The UUIDs are those of one pod, so of one node.
FIELDS = {"namespace": 63, "name": 253, "uid": 128, "reservation-id": 128, "gpu-uuid": 16384}
MAX_BODY = 2**16
NOT_ALLOWED = (
    "only the pod itself, or who may `finalize reservations.gpuwarden.io` in its namespace, tells that it exists"
)


class RefusedFinalizeError(GpuwardenError):
    """What was told does not fit; `code` is the HTTP status that says so."""

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
        raise RefusedFinalizeError(400, f"fields that have to be strings: {', '.join(wrong)}")
    long = [field for field, most in FIELDS.items() if len(raw[field]) > most]
    if long:
        raise RefusedFinalizeError(400, f"fields that are too long: {', '.join(long)}")
    return {field: raw[field] for field in FIELDS}


def is_blank(raw: Mapping[str, Any], field: str) -> bool:
    value = raw.get(field)
    return value is None or (isinstance(value, str) and not value.strip())


class Finalize:
    """The route."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: Fleet,
        pods: PodSource,
        facts: PodFacts,
        health: Health,
        gate: CallerGate | None = None,
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._pods = pods
        self._facts = facts
        self._health = health
        self._gate = gate or CallerGate(utc_now)

    async def finalize(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            told = FinalizeBody.parse(await read_body(request, MAX_BODY))
            if not await self._may_tell(caller_of(request), told.pod):
                return forbidden(NOT_ALLOWED)
            await self._believe(told)
        except (RefusedBodyError, RefusedFinalizeError) as exc:
            return error(exc.code, str(exc))
        except CallersUnavailableError:
            return error(503, CALLERS_UNAVAILABLE)
        except (PodsUnavailableError, LedgerError) as exc:
            log.warning("finalize could not be checked", exc_info=exc)
            return error(503, "what was told cannot be checked at this moment")
        log.info("reservation finalized", reservation=told.reservation_id, namespace=told.pod.namespace)
        return JSONResponse({"status": "ok"})

    async def _may_tell(self, caller: Caller, pod: PodIdentity) -> bool:
        """The pod itself, by a token that is bound to it; or who has been given the right."""
        if caller.is_pod(pod.namespace, pod.uid):
            return True
        return await self._gate.may(caller, finalize_reservations(pod.namespace))

    async def _believe(self, told: FinalizeBody) -> None:
        held = await self._held(told)
        if not held.may_be(told.pod):
            raise RefusedFinalizeError(409, f"reservation {held.id} is held by another pod")
        against = await self._facts.contradicts(told.pod, held)
        if against is not None:
            raise RefusedFinalizeError(422, against)
        self._refuse_a_second(told.pod, held)
        try:
            proof = PodProof.REPORTED if self._pods.believes_reviews else PodProof.CONFIRMED
            await self._ledger.bind_to_pod(proof, held.id, told.pod, node=held.node)
        except UnknownReservationError as exc:
            raise RefusedFinalizeError(404, f"reservation {held.id} is gone") from exc
        except ReservationConflictError as exc:
            raise RefusedFinalizeError(409, f"reservation {held.id} is held by another pod") from exc
        except ReservationExpiredError as exc:
            raise RefusedFinalizeError(409, f"reservation {held.id} has expired") from exc
        self._pods.created(told.pod)

    def _refuse_a_second(self, pod: PodIdentity, held: Reservation) -> None:
        """Embedded, nobody has seen the pod but the ledger. In a cluster the pod itself says which one is its own."""
        other = self._ledger.of_pod(pod.uid) if self._pods.believes_reviews else None
        if other is not None and other.id != held.id:
            raise RefusedFinalizeError(409, f"the pod of uid {pod.uid} has reservation {other.id}")

    async def _held(self, told: FinalizeBody) -> Reservation:
        """The reservation that holds the devices told, all of them under the id told."""
        held = await self._found(told)
        if held is None or not set(told.uuids) <= set(held.uuids):
            raise self._not_held(told, () if held is None else held.uuids)
        if len(told.uuids) > 1 and set(told.uuids) != set(held.uuids):
            raise RefusedFinalizeError(409, f"reservation {held.id} holds other GPUs as well: name one, or all")
        return held

    def _not_held(self, told: FinalizeBody, held: Collection[DeviceUuid]) -> RefusedFinalizeError:
        uuid = next(one for one in told.uuids if one not in held)
        if self._ledger.of_device(uuid):
            return RefusedFinalizeError(409, f"{uuid} is held by another reservation")
        return RefusedFinalizeError(404, f"no reservation holds {uuid}")

    async def _found(self, told: FinalizeBody) -> Reservation | None:
        """By the id told: known here, or on a node that says it has the device. A reservation is on one node, so where
        one of its devices can be, it is."""
        first = told.uuids[0]
        for node in self._fleet.claimants(first) or (self._fleet.home_of(first),):
            held = await self._ledger.find(told.reservation_id, node=node)
            if held is not None:
                return held
        return None
