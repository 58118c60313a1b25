"""`GET /evidence/challenge` and `POST /evidence`: a node gets a challenge and answers it with a token.

Both routes are open, because the token is the credential. Expensive checks happen only after the check that this server
has made the challenge.
"""

from typing import Annotated, Any, Final

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from webhook.core.evidence import Evidence
from webhook.core.names import is_object_name
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.attestation import Attestation
from webhook.evidence.jwt.jwt_svid import MAX_TOKEN, BadTokenError, TokenFault
from webhook.evidence.jwt.node_reports import MAX_GIVEN, MAX_PODS
from webhook.evidence.jwt.proofs import ReplayedProofError, UnknownNodeError
from webhook.evidence.jwt.trust_bundle import KeysUnavailableError
from webhook.web.body import RefusedBodyError, error, read_body
from webhook.web.health import Health

log = structlog.get_logger(__name__)

# A token, the uids of pods, the UUIDs of GPUs, and the JSON around them.
MAX_BODY: Final = MAX_TOKEN + MAX_PODS * 128 + MAX_GIVEN * MAX_GIVEN * 136 + 1024
STATUS: Final = {TokenFault.FORM: 400, TokenFault.SIZE: 413}


Uid = Annotated[str, msgspec.Meta(max_length=64)]
Gpus = Annotated[list[Annotated[str, msgspec.Meta(max_length=127)]], msgspec.Meta(max_length=MAX_GIVEN)]


class ProofBody(msgspec.Struct, frozen=True):
    """What a node posts."""

    token: str
    # The uids of orphaned pods that have no containers left on the node.
    ended: Annotated[list[Uid], msgspec.Meta(max_length=MAX_PODS)] = []
    # The GPUs of pods that have others than those in their annotations, by the uids of the pods.
    given: Annotated[dict[Uid, Gpus], msgspec.Meta(max_length=MAX_GIVEN)] = {}


class EvidenceRoutes:
    """The routes."""

    def __init__(self, attestation: Attestation, health: Health) -> None:
        self._attestation = attestation
        self._health = health

    async def challenge(self, request: Request) -> Response:
        node = request.query_params.get("node", "")
        if not is_object_name(node):
            return error(400, "the parameter node must be the name of a node")
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        nonce = self._attestation.challenge(node)
        expires = nonce.expires.isoformat().replace("+00:00", "Z")
        content: dict[str, Any] = {"nonce": nonce.text, "expires": expires}
        if orphans := self._attestation.orphans(node):
            content["orphans"] = orphans
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    async def answer(self, request: Request) -> Response:
        if not self._health.is_serving:
            return error(503, f"the server is {self._health.stage}")
        try:
            answer = msgspec.json.decode(await read_body(request, MAX_BODY), type=ProofBody)
            evidence = await self._attestation.take(answer.token, answer.ended, answer.given)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return error(400, 'the body must be {"token": "…"}')
        except RefusedBodyError as exc:
            return error(exc.code, str(exc))
        except BadTokenError as exc:
            log.debug("proof refused", fault=exc.fault, problem=str(exc))  # debug: any caller can post invalid proofs
            return error(STATUS.get(exc.fault, 403), str(exc))
        except UnknownNodeError as exc:
            log.warning("proof refused", fault="node", problem=str(exc))
            return error(403, str(exc))
        except ReplayedProofError as exc:
            log.warning("proof refused", fault="replayed", problem=str(exc))
            return error(409, str(exc))
        except KeysUnavailableError as exc:
            log.debug("proof could not be checked", problem=str(exc))  # debug: any caller can post unknown keys
            return error(503, "the proof cannot be checked at this moment")
        except EvidenceUnavailableError as exc:
            log.warning("proof could not be stored", exc_info=exc)
            return error(503, "the proof cannot be stored at this moment")
        log.info("proof accepted", node=evidence.node, hash=evidence.hash, until=evidence.until)
        return JSONResponse(evidence_json(evidence))


def evidence_json(evidence: Evidence) -> dict[str, object]:
    """The accepted evidence. The node renews it before `until`."""
    content: dict[str, object] = msgspec.to_builtins(
        {"node": evidence.node, "hash": evidence.hash, "since": evidence.since, "until": evidence.until}
    )
    return content
