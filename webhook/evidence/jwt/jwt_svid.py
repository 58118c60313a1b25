"""What makes a JWT-SVID a proof of a node: its form, its times, what it is for, and whose key signed it.

No I/O and no clock. Everything that needs no signature is looked at first, and our own challenge before all keys.
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
# Evidence entries are to have a jwtSVIDTTL of 60 s. Who may mint tokens by hand makes them last for hours.
MAX_LIFE: Final = timedelta(seconds=90)
# It is made for our challenge, so it is new.
MAX_AGE: Final = timedelta(seconds=30)


class TokenFault(StrEnum):
    """Why a token is not taken, for the metrics."""

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
    """The token proves nothing."""

    def __init__(self, fault: TokenFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


@frozen
class UnverifiedToken:
    """A token as it was read: nothing in it is believed yet."""

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
    """What a token says that only its signature is left to be seen of."""

    token: UnverifiedToken
    says: EvidenceIdParts
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
        raise BadTokenError(TokenFault.FORM, "the token has not three parts")
    header, claims, signature = (decoded(part) for part in parts)
    algorithm, key_id = read_header(json_object(header))
    found = json_object(claims)
    if any(not isinstance(found[name], str) for name in ("iss", "jti") if name in found):
        raise BadTokenError(TokenFault.FORM, "iss and jti have to be text")
    issued, expires = whole(found, "iat"), whole(found, "exp")
    return UnverifiedToken(
        algorithm=algorithm,
        key_id=key_id,
        subject=word(found, "sub"),
        audience=only_audience(found),
        issued=issued,
        expires=expires,
        not_before=whole(found, "nbf") if "nbf" in found else issued,
        signed=text.rpartition(".")[0].encode(),
        signature=signature,
    )


def decoded(part: str) -> bytes:
    """Only the one spelling that base64url has for these bytes."""
    try:
        raw = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except ValueError as exc:
        raise BadTokenError(TokenFault.FORM, "the token is not base64url") from exc
    if not raw or base64.urlsafe_b64encode(raw).decode().rstrip("=") != part:
        raise BadTokenError(TokenFault.FORM, "the token is not base64url")
    return raw


def json_object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode(), object_pairs_hook=once_only, parse_constant=no_number)
    except (ValueError, RecursionError) as exc:
        raise BadTokenError(TokenFault.FORM, "the token's parts are not JSON of one meaning") from exc
    if not isinstance(found, dict):
        raise BadTokenError(TokenFault.FORM, "the token's parts are not JSON objects")
    return found


def once_only(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a member stands twice")
    return found


def no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def read_header(header: dict[str, Any]) -> tuple[str, str]:
    """No header that asks for more than a signature: no key in the token, no place to fetch one, nothing critical."""
    if not set(header) <= HEADER:
        raise BadTokenError(TokenFault.FORM, "the token's header may have alg, kid and typ, nothing else")
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise BadTokenError(TokenFault.ALGORITHM, f"the token's alg has to be one of {', '.join(sorted(ALGORITHMS))}")
    if not isinstance(kind, str) or kind not in TYPES:
        raise BadTokenError(TokenFault.FORM, "the token's typ has to be JWT, JOSE, or left out")
    if not isinstance(key_id, str) or not key_id:
        raise BadTokenError(TokenFault.KEY, "the token names no key")
    return algorithm, key_id


def whole(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name)
    if type(value) is not int:  # true is an int to isinstance
        raise BadTokenError(TokenFault.TIME, f"{name} has to be a whole number of seconds")
    return value


def word(claims: dict[str, Any], name: str) -> str:
    value = claims.get(name)
    if not isinstance(value, str):
        raise BadTokenError(TokenFault.SUBJECT, f"{name} has to be text")
    return value


def only_audience(claims: dict[str, Any]) -> str:
    match claims.get("aud"):
        case [str() as only]:
            return only
        case _:
            raise BadTokenError(TokenFault.AUDIENCE, "aud has to be a list of the challenge, and of nothing else")


class TokenVerifier:
    """Looks at tokens that should prove nodes of one trust domain."""

    def __init__(self, evidence_id: EvidenceId, nonces: Nonces, skew: timedelta) -> None:
        self._id = evidence_id
        self._nonces = nonces
        self._skew = int(skew.total_seconds())

    def examined(self, text: str, now: datetime) -> Proof:
        """All but the signature. Raises BadTokenError."""
        token = read_token(text)
        says = self._named(token.subject)
        try:
            challenged = self._nonces.check(token.audience, says.node, now)
        except BadNonceError as exc:
            raise BadTokenError(TokenFault.NONCE, str(exc)) from exc
        self._check_times(token, now)
        return Proof(token, says, challenged)

    def _named(self, subject: str) -> EvidenceIdParts:
        domain = trust_domain_of(subject)
        if domain is None:
            raise BadTokenError(TokenFault.SUBJECT, "sub is no SPIFFE ID")
        if domain != self._id.trust_domain:
            raise BadTokenError(TokenFault.TRUST_DOMAIN, "sub is of another trust domain")
        says = self._id.read(subject)
        if says is None:
            raise BadTokenError(TokenFault.SUBJECT, "sub is not the ID of a node's evidence")
        return says

    def _check_times(self, token: UnverifiedToken, now: datetime) -> None:
        seconds = now.timestamp()
        life = token.expires - token.issued
        if token.expires <= seconds:
            raise BadTokenError(TokenFault.TIME, "the token has expired")
        if token.issued > seconds + self._skew or token.not_before > seconds + self._skew:
            raise BadTokenError(TokenFault.TIME, "the token is of the future")
        if not 0 < life <= MAX_LIFE.total_seconds():
            raise BadTokenError(
                TokenFault.TIME,
                f"the token is good for {min(life, 10**9)} s, which may be {MAX_LIFE.total_seconds():g} s at most: "
                "give its registration entry a jwtSVIDTTL of 60 s",
            )
        if seconds - token.issued > MAX_AGE.total_seconds():
            raise BadTokenError(TokenFault.TIME, "the token is too old")


def check_signature(proof: Proof, key: jwt.PyJWK | None) -> None:
    """The key decides the algorithm; the token may only agree. Raises BadTokenError."""
    if key is None:
        raise BadTokenError(TokenFault.KEY, "the token's key is none of the trust domain's")
    if key.algorithm_name != proof.token.algorithm:
        raise BadTokenError(TokenFault.ALGORITHM, "the token's alg does not fit its key")
    if not key.Algorithm.verify(proof.token.signed, key.key, proof.token.signature):
        raise BadTokenError(TokenFault.SIGNATURE, "the token's signature is wrong")
