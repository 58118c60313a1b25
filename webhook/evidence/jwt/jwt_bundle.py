"""The keys that may sign for a trust domain, from a SPIFFE bundle document."""

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
# What makes a public key; whatever else stands in a JWK is left alone.
MEMBERS: Final = {"EC": ("kty", "crv", "x", "y"), "RSA": ("kty", "n", "e")}
JWT_USE: Final = "jwt-svid"
X509_USE: Final = "x509-svid"
ALGORITHMS: Final = frozenset({"ES256", "ES384", "RS256"})


class BadBundleError(GpuwardenError):
    """No bundle document, or none that may take the place of the one before."""


class BundleWire(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]
    spiffe_sequence: int | None = None
    spiffe_refresh_hint: int | None = None


@frozen
class BundleVersion:
    """How far a trust domain's bundle has come: its number, and which keys have that number."""

    sequence: int
    keys: str


@frozen
class JwtBundle:
    """Keys by key ID. Where the document says so, how often to look again and how many there were before."""

    keys: Mapping[str, jwt.PyJWK] = field(eq=False)
    fingerprints: frozenset[tuple[str, str]]
    sequence: int | None = None
    refresh_hint: int | None = None
    x509_roots: tuple[bytes, ...] = field(default=(), eq=False)

    @property
    def mark(self) -> BundleVersion | None:
        """None for a bundle without a number."""
        if self.sequence is None:
            return None
        spelt = msgspec.json.encode(sorted(self.fingerprints))
        return BundleVersion(self.sequence, hashlib.sha256(spelt).hexdigest())


def parse_bundle(document: bytes, *, uses: frozenset[str | None] = frozenset({JWT_USE})) -> JwtBundle:
    """Keys of other uses sign no tokens. A key of a kind that signs none of ours is left out."""
    if len(document) > MAX_DOCUMENT:
        raise BadBundleError(f"the bundle is larger than {MAX_DOCUMENT} bytes")
    try:
        wire = msgspec.json.decode(document, type=BundleWire)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise BadBundleError("this is no bundle document") from exc
    found = [(str(raw.get("kid") or ""), raw) for raw in wire.keys if use_of(raw) in uses]
    ids = [key_id for key_id, _ in found]
    if "" in ids or len(ids) != len(set(ids)):
        raise BadBundleError("keys without a name of their own are in the bundle")
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
    raise BadBundleError("a key whose use is no text is in the bundle")


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
    """The roots of the X.509 side, in DER."""
    for raw in keys:
        chain = raw.get("x5c")
        if raw.get("use") == X509_USE and isinstance(chain, list) and chain and isinstance(chain[0], str):
            try:
                yield base64.b64decode(chain[0], validate=True)
            except ValueError as exc:
                raise BadBundleError("a root that is no certificate is in the bundle") from exc


def check_succession(last: BundleVersion | None, new: JwtBundle) -> None:
    """A sequence never goes back, and one number means one set of keys; a taken back key would come back otherwise."""
    if not new.keys:
        raise BadBundleError("there is no key in the bundle that could sign a token of ours")
    if last is None:
        return
    if new.sequence is None or new.sequence < last.sequence:
        raise BadBundleError(f"the bundle went back from sequence {last.sequence} to {new.sequence}")
    if new.sequence == last.sequence and new.mark != last:
        raise BadBundleError(f"the bundle has other keys under the same sequence {new.sequence}")
