"""Good and bad JWT-SVIDs, assembled by hand: a library would refuse to create most of the bad ones."""

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from attrs import frozen
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.builders import HASH, Raw

TRUST_DOMAIN: Final = "example.org"
ES256, ES384, ES512, RS256 = "ES256", "ES384", "ES512", "RS256"
ALL = object()

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
# Shared, because generating a key takes a while.
RSA: Final = rsa.generate_private_key(public_exponent=65537, key_size=2048)
CURVES: Final = {ES256: ec.SECP256R1(), ES384: ec.SECP384R1(), ES512: ec.SECP521R1()}
HASHES: Final = {ES256: hashes.SHA256(), ES384: hashes.SHA384(), ES512: hashes.SHA512(), RS256: hashes.SHA256()}
SIZES: Final = {ES256: 32, ES384: 48, ES512: 66}


def b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def number(value: int, size: int | None = None) -> str:
    return b64(value.to_bytes(size or (value.bit_length() + 7) // 8, "big"))


@frozen
class SigningKey:
    """A JWT signing key of a trust domain."""

    key_id: str
    algorithm: str
    private: Private

    @classmethod
    def make(cls, key_id: str = "key-1", algorithm: str = ES256) -> "SigningKey":
        private: Private = RSA if algorithm == RS256 else ec.generate_private_key(CURVES[algorithm])
        return cls(key_id, algorithm, private)

    def sign(self, content: bytes) -> bytes:
        if isinstance(self.private, rsa.RSAPrivateKey):
            return self.private.sign(content, padding.PKCS1v15(), HASHES[self.algorithm])
        size = SIZES[self.algorithm]
        r, s = decode_dss_signature(self.private.sign(content, ec.ECDSA(HASHES[self.algorithm])))
        return r.to_bytes(size, "big") + s.to_bytes(size, "big")

    def jwk(self, use: str | None = "jwt-svid") -> Raw:
        members: Raw = {"kid": self.key_id} | ({} if use is None else {"use": use})
        public = self.private.public_key()
        if isinstance(public, rsa.RSAPublicKey):
            numbers = public.public_numbers()
            return members | {"kty": "RSA", "n": number(numbers.n), "e": number(numbers.e)}
        point, size = public.public_numbers(), SIZES[self.algorithm]
        curve = {ES256: "P-256", ES384: "P-384", ES512: "P-521"}[self.algorithm]
        return members | {"kty": "EC", "crv": curve, "x": number(point.x, size), "y": number(point.y, size)}


def document(*keys: SigningKey, sequence: int | None = 1, hint: int | None = 10, extra: tuple[Raw, ...] = ()) -> bytes:
    members: Raw = {"keys": [*extra, *(key.jwk() for key in keys)]}
    members |= {} if sequence is None else {"spiffe_sequence": sequence}
    return json.dumps(members | ({} if hint is None else {"spiffe_refresh_hint": hint})).encode()


def evidence_id(node: str = "node-a", hash: str = HASH, trust_domain: str = TRUST_DOMAIN) -> str:
    return f"spiffe://{trust_domain}/evidence/{node}/{hash.replace(':', '.')}"


def seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def header(key: SigningKey, **members: Any) -> Raw:
    """The header as SPIRE Server writes it; a member that is None is omitted."""
    return {
        k: v for k, v in ({"alg": key.algorithm, "kid": key.key_id, "typ": "JWT"} | members).items() if v is not None
    }


def claims(nonce: str, now: datetime, **members: Any) -> Raw:
    """The claims as SPIRE Server writes them for the evidence of node-a; a member that is None is omitted."""
    said = {
        "aud": [nonce],
        "exp": seconds(now + timedelta(seconds=60)),
        "iat": seconds(now),
        "sub": evidence_id(),
    }
    return {name: value for name, value in (said | members).items() if value is not None}


def assemble(raw_header: bytes | Mapping[str, Any], raw_claims: bytes | Mapping[str, Any], key: SigningKey) -> str:
    """A token of exactly these parts, signed."""
    signed = ".".join(
        b64(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (raw_header, raw_claims)
    )
    return f"{signed}.{b64(key.sign(signed.encode()))}"


def token(key: SigningKey, nonce: str, now: datetime, **members: Any) -> str:
    return assemble(header(key), claims(nonce, now, **members), key)


def hs256(key: SigningKey, nonce: str, now: datetime, secret: bytes, **members: Any) -> str:
    """A token whose secret is public."""
    parts = (header(key, alg="HS256"), claims(nonce, now, **members))
    signed = ".".join(b64(json.dumps(part).encode()) for part in parts)
    code = hmac.HMAC(secret, hashes.SHA256())
    code.update(signed.encode())
    return f"{signed}.{b64(code.finalize())}"
