"""Verifies a JWT-SVID as the proof of a node: its form, times, audience and signature.

No I/O and no clock. All checks that need no signature come first, and our own challenge is checked before any key.
"""

import base64
import json
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import jwt
from attrs import frozen

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId, EvidenceIdParts, trust_domain_of
from webhook.evidence.jwt.jwt_bundle import ALGORITHMS
from webhook.evidence.jwt.nonce import BadNonceError, Nonces

SOURCE: Final = "jwt-svid"

# A token of SPIRE has some 700 bytes, a few hundred more with our challenge.
MAX_TOKEN: Final = 8192
HEADER: Final = frozenset({"alg", "kid", "typ"})
TYPES: Final = frozenset({"JWT", "JOSE"})
# Registration entries should set a jwtSVIDTTL of 60 s. Tokens that an administrator mints last for hours.
MAX_LIFE: Final = timedelta(seconds=90)
# A token is issued for our challenge, so it is new.
MAX_AGE: Final = timedelta(seconds=30)


class TokenFault(StrEnum):
    """Why a token is rejected, for the metrics."""

    FORM = "form"
    SIZE = "size"
    ALGORITHM = "algorithm"
    TRUST_DOMAIN = "trust_domain"
    SUBJECT = "subject"
    AUDIENCE = "audience"
    NONCE = "nonce"
    TIME = "time"
    KEY = "key"
    SIGNATURE = "signature"


class BadTokenError(GpuwardenError):
    """The token is rejected."""

    def __init__(self, fault: TokenFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


@frozen
class UnverifiedToken:
    """A parsed token. Nothing in it is verified."""

    algorithm: str
    key_id: str
    subject: str
    audience: str
    issued: int
    expires: int
    not_before: int
    signed: bytes
    signature: bytes


@frozen
class Proof:
    """A token that passed all checks but the signature."""

    token: UnverifiedToken
    evidence_id: EvidenceIdParts
    challenged: datetime

    @property
    def issued(self) -> datetime:
        return datetime.fromtimestamp(self.token.issued, UTC)


def read_token(text: str) -> UnverifiedToken:
    """Raises BadTokenError."""
    if len(text) > MAX_TOKEN:
        raise BadTokenError(TokenFault.SIZE, f"the token is longer than {MAX_TOKEN} bytes")
    parts = text.split(".")
    if len(parts) != 3:
        raise BadTokenError(TokenFault.FORM, "the token does not have three parts")
    header, claims, signature = (decoded(part) for part in parts)
    algorithm, key_id = read_header(json_object(header))
    found = json_object(claims)
    if any(not isinstance(found[name], str) for name in ("iss", "jti") if name in found):
        raise BadTokenError(TokenFault.FORM, "iss and jti must be strings")
    issued, expires = integer_claim(found, "iat"), integer_claim(found, "exp")
    return UnverifiedToken(
        algorithm=algorithm,
        key_id=key_id,
        subject=text_claim(found, "sub"),
        audience=only_audience(found),
        issued=issued,
        expires=expires,
        not_before=integer_claim(found, "nbf") if "nbf" in found else issued,
        signed=text.rpartition(".")[0].encode(),
        signature=signature,
    )


def decoded(part: str) -> bytes:
    """Accepts only the canonical base64url encoding."""
    try:
        raw = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except ValueError as exc:
        raise BadTokenError(TokenFault.FORM, "the token is not base64url") from exc
    if not raw or base64.urlsafe_b64encode(raw).decode().rstrip("=") != part:
        raise BadTokenError(TokenFault.FORM, "the token is not base64url")
    return raw


def json_object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode(), object_pairs_hook=unique_members, parse_constant=reject_constant)
    except (ValueError, RecursionError) as exc:
        raise BadTokenError(TokenFault.FORM, "the token's parts are not unambiguous JSON") from exc
    if not isinstance(found, dict):
        raise BadTokenError(TokenFault.FORM, "the token's parts are not JSON objects")
    return found


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a member is repeated")
    return found


def reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def read_header(header: dict[str, Any]) -> tuple[str, str]:
    """Rejects headers with more than a signature needs: embedded keys, key URLs, critical extensions."""
    if not set(header) <= HEADER:
        raise BadTokenError(TokenFault.FORM, "the token's header may have alg, kid and typ, nothing else")
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise BadTokenError(TokenFault.ALGORITHM, f"the token's alg must be one of {', '.join(sorted(ALGORITHMS))}")
    if not isinstance(kind, str) or kind not in TYPES:
        raise BadTokenError(TokenFault.FORM, "the token's typ must be JWT, JOSE or absent")
    if not isinstance(key_id, str) or not key_id:
        raise BadTokenError(TokenFault.KEY, "the token names no key")
    return algorithm, key_id


def integer_claim(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name)
    if type(value) is not int:  # isinstance accepts bool
        raise BadTokenError(TokenFault.TIME, f"{name} must be a whole number of seconds")
    return value


def text_claim(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    if not isinstance(value, str):
        raise BadTokenError(TokenFault.SUBJECT, f"{name} must be a string")
    return value


def only_audience(claims: dict[str, Any]) -> str:
    match claims.get("aud"):
        case [str() as only]:
            return only
        case _:
            raise BadTokenError(TokenFault.AUDIENCE, "aud must be a list with one audience")


class TokenVerifier:
    """Verifies tokens of nodes in one trust domain."""

    def __init__(self, evidence_id: EvidenceId, nonces: Nonces, skew: timedelta) -> None:
        self._id = evidence_id
        self._nonces = nonces
        self._skew = int(skew.total_seconds())

    def check_claims(self, text: str, now: datetime) -> Proof:
        """Check everything but the signature. Raises BadTokenError."""
        token = read_token(text)
        evidence_id = self._named(token.subject)
        try:
            challenged = self._nonces.check(token.audience, evidence_id.node, now)
        except BadNonceError as exc:
            raise BadTokenError(TokenFault.NONCE, str(exc)) from exc
        self._check_times(token, now)
        return Proof(token, evidence_id, challenged)

    def _named(self, subject: str) -> EvidenceIdParts:
        domain = trust_domain_of(subject)
        if domain is None:
            raise BadTokenError(TokenFault.SUBJECT, "sub is not a SPIFFE ID")
        if domain != self._id.trust_domain:
            raise BadTokenError(TokenFault.TRUST_DOMAIN, "sub is of another trust domain")
        evidence_id = self._id.read(subject)
        if evidence_id is None:
            raise BadTokenError(TokenFault.SUBJECT, "sub is not the ID of a node's evidence")
        return evidence_id

    def _check_times(self, token: UnverifiedToken, now: datetime) -> None:
        seconds = now.timestamp()
        life = token.expires - token.issued
        if token.expires <= seconds:
            raise BadTokenError(TokenFault.TIME, "the token has expired")
        if token.issued > seconds + self._skew or token.not_before > seconds + self._skew:
            raise BadTokenError(TokenFault.TIME, "the token was issued in the future")
        if not 0 < life <= MAX_LIFE.total_seconds():
            raise BadTokenError(
                TokenFault.TIME,
                f"the token is valid for {min(life, 10**9)} s, the maximum is {MAX_LIFE.total_seconds():g} s: "
                "set jwtSVIDTTL to 60 s in its registration entry",
            )
        if seconds - token.issued > MAX_AGE.total_seconds():
            raise BadTokenError(TokenFault.TIME, "the token is too old")


def check_signature(proof: Proof, key: jwt.PyJWK | None) -> None:
    """The key determines the algorithm, and the token must match it. Raises BadTokenError."""
    if key is None:
        raise BadTokenError(TokenFault.KEY, "the token's key is not in the trust bundle")
    if key.algorithm_name != proof.token.algorithm:
        raise BadTokenError(TokenFault.ALGORITHM, "the token's alg does not match its key")
    if not key.Algorithm.verify(proof.token.signed, key.key, proof.token.signature):
        raise BadTokenError(TokenFault.SIGNATURE, "the token's signature is wrong")
