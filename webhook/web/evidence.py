"""`GET /evidence/challenge` and `POST /evidence`: a node is challenged, and answers with a token.

Open to everybody: the token is the credential. What costs something comes behind what only we can have made.
"""

from typing import Final

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhook.attestation import Attestation
from webhook.core.evidence import Evidence
from webhook.core.names import is_object_name
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt_svid import MAX_TOKEN, BadTokenError, Fault
from webhook.evidence.proofs import ReplayedProofError, UnknownNodeError
from webhook.evidence.trust_bundle import KeysAwayError
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# A token, and the JSON around it.
MAX_BODY: Final = MAX_TOKEN + 1024
STATUS: Final = {Fault.FORM: 400, Fault.SIZE: 413}


class Answer(msgspec.Struct, frozen=True):
    """What a node posts."""

    token: str


class EvidenceRoutes:
    """The routes."""

    def __init__(self, attestation: Attestation, health: Health) -> None:
        self._attestation = attestation
        self._health = health

    async def challenge(self, request: Request) -> Response:
        node = request.query_params.get("node", "")
        if not is_object_name(node):
            return error(400, "?node= has to be the name of a node")
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        nonce = self._attestation.challenge(node)
        expires = nonce.expires.isoformat().replace("+00:00", "Z")
        return JSONResponse({"nonce": nonce.text, "expires": expires}, headers={"Cache-Control": "no-store"})

    async def answer(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            answer = msgspec.json.decode(await read_body(request, MAX_BODY), type=Answer)
            evidence = await self._attestation.take(answer.token)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return error(400, 'the body has to be {"token": "…"}')
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except BadTokenError as exc:
            log.debug("proof refused", fault=exc.fault, problem=str(exc))  # anybody can post anything
            return error(STATUS.get(exc.fault, 403), str(exc))
        except UnknownNodeError as exc:
            log.warning("proof refused", fault="node", problem=str(exc))
            return error(403, str(exc))
        except ReplayedProofError as exc:
            log.warning("proof refused", fault="replayed", problem=str(exc))
            return error(409, str(exc))
        except KeysAwayError as exc:
            log.debug("proof could not be checked", problem=str(exc))  # by anybody, with any key
            return error(503, "the proof cannot be checked at this moment")
        except EvidenceUnavailableError as exc:
            log.warning("proof could not be kept", exc_info=exc)
            return error(503, "the proof cannot be kept at this moment")
        log.info("proof accepted", node=evidence.node, hash=evidence.hash, until=evidence.until)
        return JSONResponse(told(evidence))


def told(evidence: Evidence) -> dict[str, object]:
    """Until when the node is proven, so that it can come back in time."""
    told: dict[str, object] = msgspec.to_builtins(
        {"node": evidence.node, "hash": evidence.hash, "since": evidence.since, "until": evidence.until}
    )
    return told
