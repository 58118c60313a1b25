"""The keys that may sign tokens of a trust domain, from a SPIFFE bundle document."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import jwt
import msgspec
from attrs import field, frozen
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from webhook.core.errors import GpuwardenError

MAX_DOCUMENT: Final = 2**20
MIN_RSA_BITS: Final = 2048
MAX_RSA_BITS: Final = 8192
# The members that make up a public key. Other members of a JWK are ignored.
MEMBERS: Final = {"EC": ("kty", "crv", "x", "y"), "RSA": ("kty", "n", "e")}
JWT_USE: Final = "jwt-svid"
X509_USE: Final = "x509-svid"
ALGORITHMS: Final = frozenset({"ES256", "ES384", "RS256"})


class BadBundleError(GpuwardenError):
    """Not a bundle document, or not a valid successor of the previous one."""


class BundleWire(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]
    spiffe_sequence: int | None = None
    spiffe_refresh_hint: int | None = None


@frozen
class BundleVersion:
    """The version of a trust domain's bundle: its sequence number, and a digest of the keys with that number."""

    sequence: int
    keys: str


@frozen
class JwtBundle:
    """Keys by key ID, and, if the document has them, its sequence number and refresh hint."""

    keys: Mapping[str, jwt.PyJWK] = field(eq=False)
    fingerprints: frozenset[tuple[str, str]]
    sequence: int | None = None
    refresh_hint: int | None = None
    x509_roots: tuple[bytes, ...] = field(default=(), eq=False)

    @property
    def version(self) -> BundleVersion | None:
        """None for a bundle without a sequence number."""
        if self.sequence is None:
            return None
        encoded = msgspec.json.encode(sorted(self.fingerprints))
        return BundleVersion(self.sequence, hashlib.sha256(encoded).hexdigest())


def parse_bundle(document: bytes, *, uses: frozenset[str | None] = frozenset({JWT_USE})) -> JwtBundle:
    """Parse a document. Keys with other uses are ignored, as are keys of kinds that are not accepted."""
    if len(document) > MAX_DOCUMENT:
        raise BadBundleError(f"the bundle is larger than {MAX_DOCUMENT} bytes")
    try:
        wire = msgspec.json.decode(document, type=BundleWire)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise BadBundleError("not a bundle document") from exc
    found = [(str(raw.get("kid") or ""), raw) for raw in wire.keys if use_of(raw) in uses]
    ids = [key_id for key_id, _ in found]
    if "" in ids or len(ids) != len(set(ids)):
        raise BadBundleError("the bundle has keys without a unique key ID")
    keys = {key_id: key for key_id, raw in found if (key := imported(raw)) is not None}
    return JwtBundle(
        keys=keys,
        fingerprints=frozenset(
            (key_id, msgspec.json.encode(public(raw), order="sorted").decode()) for key_id, raw in found
        ),
        sequence=wire.spiffe_sequence,
        refresh_hint=wire.spiffe_refresh_hint,
        x509_roots=tuple(roots(wire.keys)),
    )


def use_of(raw: Mapping[str, Any]) -> str | None:
    use = raw.get("use")
    if use is None or isinstance(use, str):
        return use
    raise BadBundleError("the bundle has a key whose use is not a string")


def public(raw: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(raw.get(name)) for name in MEMBERS.get(str(raw.get("kty")), ())}


def imported(raw: Mapping[str, Any]) -> jwt.PyJWK | None:
    try:
        key = jwt.PyJWK(public(raw))
    except jwt.PyJWTError:
        return None
    is_sound = key.algorithm_name in ALGORITHMS and is_strong(key.key)
    return key if is_sound else None


def is_strong(key: object) -> bool:
    match key:
        case RSAPublicKey():
            return MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS and key.public_numbers().e >= 65537
        case EllipticCurvePublicKey():
            return True
        case _:
            return False


def roots(keys: Iterable[Mapping[str, Any]]) -> Iterable[bytes]:
    """The X.509 roots, in DER."""
    for raw in keys:
        chain = raw.get("x5c")
        if raw.get("use") == X509_USE and isinstance(chain, list) and chain and isinstance(chain[0], str):
            try:
                yield base64.b64decode(chain[0], validate=True)
            except ValueError as exc:
                raise BadBundleError("the bundle has a root that is not a certificate") from exc


def check_succession(last: BundleVersion | None, new: JwtBundle) -> None:
    """The sequence must not decrease, and one number must mean one set of keys: a revoked key would return
    otherwise."""
    if not new.keys:
        raise BadBundleError("the bundle has no key that can sign tokens")
    if last is None:
        return
    if new.sequence is None or new.sequence < last.sequence:
        raise BadBundleError(f"the bundle went back from sequence {last.sequence} to {new.sequence}")
    if new.sequence == last.sequence and new.version != last:
        raise BadBundleError(f"the bundle has different keys with the same sequence {new.sequence}")
