"""The signed record of a node's evidence, which a container gets with its GPUs.

A compact JWS, signed with the key of the node's X.509-SVID. Its header contains the chain of the certificate (`x5c`),
so that the trust bundle of the trust domain is enough to verify it. No I/O.
"""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import jwt
import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509 import verification

from webhook.core.errors import GpuwardenError
from webhook.core.evidence_id import EvidenceId
from webhook.evidence.spire.x509_svid import X509Svid, uri_sans
from webhook.runtime.tls.certificates import certificate_in, certificates_in

# It keeps a record from being taken for a token.
TYPE: Final = "gpuwarden-record"
HEADER: Final = frozenset({"alg", "typ", "x5c"})
# A record with a chain of three certificates has some 5 kB.
MAX_RECORD: Final = 64 * 1024
MAX_CHAIN: Final = 8
CURVES: Final = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
KEY_BEGINS: Final = b"-----BEGIN PRIVATE KEY-----"

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class BadRecordError(GpuwardenError):
    """The record cannot be made, or does not prove what it says."""


class RecordedClaim(msgspec.Struct, frozen=True):
    """The ResourceClaim that the GPUs were allocated to."""

    namespace: str
    name: str
    uid: str


class EvidenceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the node says. `until` is the end of the evidence as it was published then; later evidence moves it."""

    node: str
    spiffe_id: str
    hash: str
    issued: Moment
    claim: RecordedClaim
    # The uids of the pods that the claim is reserved for.
    pods: list[str]
    gpus: list[str]
    until: Moment | None = None


def signed(record: EvidenceRecord, svid: X509Svid) -> str:
    """The record as a compact JWS. Raises BadRecordError."""
    try:
        chain = certificates_in(svid.pem)
        key: Any = load_pem_private_key(svid.pem[svid.pem.index(KEY_BEGINS) :], None)
    except ValueError as exc:
        raise BadRecordError(f"the X.509-SVID {svid.spiffe_id} cannot be read: {exc}") from exc
    x5c = [base64.b64encode(one.public_bytes(Encoding.DER)).decode() for one in chain]
    header = {"typ": TYPE, "x5c": x5c}
    return jwt.PyJWS().encode(msgspec.json.encode(record), key, algorithm_of(key.public_key()), headers=header)


def algorithm_of(key: object) -> str:
    """The only algorithm for a key, so that a record cannot choose one. Raises BadRecordError."""
    match key:
        case rsa.RSAPublicKey():
            return "RS256"
        case ec.EllipticCurvePublicKey() if key.curve.name in CURVES:
            return CURVES[key.curve.name]
        case _:
            raise BadRecordError("the key of the X.509-SVID is neither RSA nor of the curves P-256, P-384 and P-521")


def verified(text: str, roots: Sequence[x509.Certificate], evidence_id: EvidenceId) -> EvidenceRecord:
    """The content of a record whose signature, chain and SPIFFE ID are those of a node of the trust domain, at the time
    that it was signed. Raises BadRecordError."""
    chain = chain_in(text)
    record = content_of(text, chain[0])
    try:
        policy = verification.PolicyBuilder().store(verification.Store(list(roots))).time(record.issued.astimezone(UTC))
        policy.build_client_verifier().verify(chain[0], chain[1:])
    except (verification.VerificationError, ValueError, OverflowError) as exc:
        at = record.issued.isoformat()
        raise BadRecordError(f"its certificate is not of the trust bundle, or not valid at {at}: {exc}") from exc
    parts, names = evidence_id.read(record.spiffe_id), uri_sans(chain[0])
    if names != [record.spiffe_id] or parts is None:
        raise BadRecordError(f"its certificate is not that of a node: {', '.join(names) or 'no SPIFFE ID'}")
    if (parts.node, parts.hash) != (record.node, record.hash):
        raise BadRecordError(f"it says node {record.node} and hash {record.hash}, its certificate {record.spiffe_id}")
    return record


def chain_in(text: str) -> list[x509.Certificate]:
    """The certificates in the header. Nothing is verified. Raises BadRecordError."""
    if len(text) > MAX_RECORD:
        raise BadRecordError(f"it is longer than {MAX_RECORD} bytes")
    try:
        header = jwt.get_unverified_header(text)
    except (jwt.PyJWTError, RecursionError) as exc:
        raise BadRecordError(f"it is not a JWS: {exc}") from exc
    x5c = header.get("x5c")
    if not set(header) <= HEADER or header.get("typ") != TYPE or not isinstance(x5c, list):
        raise BadRecordError(f"its header is not that of a record: typ {TYPE}, alg and x5c")
    if not 1 <= len(x5c) <= MAX_CHAIN or not all(isinstance(one, str) for one in x5c):
        raise BadRecordError(f"its header does not have 1 to {MAX_CHAIN} certificates")
    try:
        return [certificate_in(base64.b64decode(one, validate=True)) for one in x5c]
    except ValueError as exc:
        raise BadRecordError(f"a certificate in its header cannot be read: {exc}") from exc


def content_of(text: str, leaf: x509.Certificate) -> EvidenceRecord:
    """The content, if the key of the certificate has signed it. Raises BadRecordError."""
    try:
        key: Any = leaf.public_key()
        content = jwt.PyJWS().decode(text, key, algorithms=[algorithm_of(key)])
        return msgspec.json.decode(content, type=EvidenceRecord)
    except jwt.PyJWTError as exc:
        raise BadRecordError(f"its signature is wrong: {exc}") from exc
    except (ValueError, RecursionError, UnsupportedAlgorithm) as exc:
        raise BadRecordError(f"its content or its key cannot be read: {exc}") from exc


def claim_of(text: str) -> RecordedClaim:
    """The claim of a record that this process wrote earlier. Nothing is verified. Raises BadRecordError."""
    parts = text.split(".")
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(payload, type=EvidenceRecord).claim
    except (IndexError, ValueError, RecursionError) as exc:
        raise BadRecordError(f"it is not a record: {exc}") from exc
