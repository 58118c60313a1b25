"""The attack table: tokens that prove nothing, by what is wrong with them."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from attrs import frozen
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.builders import HASH
from tests.evidence.jwt.tokens import (
    ES256,
    ES512,
    RS256,
    SigningKey,
    assemble,
    b64,
    claims,
    evidence_id,
    header,
    hs256,
    seconds,
    token,
)
from webhook.evidence.jwt.jwt_svid import TokenFault

ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
NODE: Final = "node-a"


@frozen
class World:
    """What an attacker may have: everything public, valid tokens, and keys of other trust domains."""

    key: SigningKey
    foreign: SigningKey
    nonce: Callable[[str], str]
    now: datetime

    def ours(self) -> str:
        return self.nonce(NODE)

    def good(self, **members: Any) -> str:
        return token(self.key, self.ours(), self.now, **members)

    def at(self, **offset: float) -> int:
        return seconds(self.now + timedelta(**offset))


Bad = Callable[[World], str]


def with_header(**members: Any) -> Bad:
    return lambda w: assemble(header(w.key, **members), claims(w.ours(), w.now), w.key)


def with_claims(**members: Any) -> Bad:
    return lambda w: w.good(**members)


def with_times(*, iat: float, exp: float) -> Bad:
    return lambda w: w.good(iat=w.at(seconds=iat), exp=w.at(seconds=exp))


def with_raw(name: str, text: str) -> Bad:
    """A claim exactly as written."""

    def make(w: World) -> str:
        found = claims(w.ours(), w.now)
        raw = json.dumps(found | {name: "@"}).replace('"@"', text)
        return assemble(header(w.key), raw.encode(), w.key)

    return make


def unsigned(alg: str, signature: str = "") -> Bad:
    def make(w: World) -> str:
        parts = (header(w.key, alg=alg), claims(w.ours(), w.now))
        return ".".join([*(b64(json.dumps(part).encode()) for part in parts), signature])

    return make


def secret(form: str) -> Bad:
    """HS256 with the public key as the secret, as PEM, DER or the x coordinate of its point."""

    def make(w: World) -> str:
        public = w.key.private.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        spelt = {
            "pem": public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            "der": public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
            "x": public.public_numbers().x.to_bytes(32, "big"),
        }
        return hs256(w.key, w.ours(), w.now, spelt[form])

    return make


def with_signature(change: Callable[[bytes], bytes]) -> Bad:
    def make(w: World) -> str:
        signed = w.good().rpartition(".")[0]
        return f"{signed}.{b64(change(w.key.sign(signed.encode())))}"

    return make


def as_der(raw: bytes) -> bytes:
    return encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))


def other_payload(w: World) -> str:
    head, _, signature = w.good().split(".")
    return ".".join(
        [head, b64(json.dumps(claims(w.ours(), w.now, sub=evidence_id(hash="sha256:bb22"))).encode()), signature]
    )


def twice(name: str, value: str) -> Bad:
    """A duplicate claim: the correct one, preceded by another one that some parser might use."""

    def make(w: World) -> str:
        raw = json.dumps(claims(w.ours(), w.now)).replace("{", f'{{"{name}": {value}, ', 1)
        return assemble(header(w.key), raw.encode(), w.key)

    return make


def respelt(change: Callable[[str], str]) -> Bad:
    return lambda w: change(w.good())


def with_other_last_bits(text: str) -> str:
    """Another last letter for the same bytes: 64 bytes leave four of its bits unused."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return text[:-1] + letters[letters.index(text[-1]) ^ 1]


def signed_by_foreign(**members: Any) -> Bad:
    return lambda w: assemble(header(w.foreign), claims(w.ours(), w.now, **members), w.foreign)


def es512(w: World) -> str:
    key = SigningKey.make(w.key.key_id, ES512)
    return token(key, w.ours(), w.now)


def cases() -> Iterator[tuple[str, Bad, TokenFault]]:
    for alg in ("none", "None", "NONE", "nOnE"):
        yield f"alg {alg}", unsigned(alg), TokenFault.FORM
        yield f"alg {alg} with a signature", unsigned(alg, "AAAA"), TokenFault.ALGORITHM
    yield "no signature", unsigned(ES256), TokenFault.FORM
    for form in ("pem", "der", "x"):
        yield f"HS256 under the public key's {form}", secret(form), TokenFault.ALGORITHM
    for alg in ("HS384", "HS512", "ES512", "PS256", "RS512", "EdDSA", "es256", "ES256K", ""):
        yield f"alg {alg!r} claimed", with_header(alg=alg), TokenFault.ALGORITHM
    yield "ES512 for real", es512, TokenFault.ALGORITHM
    yield "alg of another kind of key", with_header(alg=RS256), TokenFault.ALGORITHM
    yield "alg of another curve", with_header(alg="ES384"), TokenFault.ALGORITHM
    yield "alg is a list", with_header(alg=[ES256]), TokenFault.ALGORITHM
    yield "alg left out", with_header(alg=None), TokenFault.ALGORITHM
    for name, value in (
        ("jwk", {"kty": "EC"}),
        ("jku", "https://attacker.example/keys"),
        ("x5c", ["MIIB"]),
        ("x5u", "https://attacker.example/cert"),
        ("crit", ["b64"]),
        ("b64", False),
        ("cty", "JWT"),
        ("zip", "DEF"),
    ):
        yield f"header {name}", with_header(**{name: value}), TokenFault.FORM
    yield "typ of another thing", with_header(typ="at+jwt"), TokenFault.FORM
    yield "typ is a list", with_header(typ=["JWT"]), TokenFault.FORM
    yield "kid left out", with_header(kid=None), TokenFault.KEY
    yield "kid empty", with_header(kid=""), TokenFault.KEY
    yield "kid is a list", with_header(kid=["key-1"]), TokenFault.KEY
    yield "kid unknown", with_header(kid="key-9"), TokenFault.KEY
    yield "kid of the X.509 side", with_header(kid="x509"), TokenFault.KEY
    yield "kid of a path", with_header(kid="../../key-1"), TokenFault.KEY
    yield "key of another trust domain", signed_by_foreign(), TokenFault.SIGNATURE
    yield "other trust domain", signed_by_foreign(sub=evidence_id(trust_domain="other.org")), TokenFault.TRUST_DOMAIN
    yield "other trust domain, our key", with_claims(sub=evidence_id(trust_domain="other.org")), TokenFault.TRUST_DOMAIN
    yield (
        "trust domain with more behind",
        with_claims(sub=evidence_id(trust_domain="example.org.evil.com")),
        TokenFault.TRUST_DOMAIN,
    )

    yield "signature as DER", with_signature(as_der), TokenFault.SIGNATURE
    yield "signature of zeros", with_signature(lambda raw: bytes(64)), TokenFault.SIGNATURE
    yield "signature of ones", with_signature(lambda raw: b"\xff" * 64), TokenFault.SIGNATURE
    yield "r of zero", with_signature(lambda raw: bytes(32) + raw[32:]), TokenFault.SIGNATURE
    yield "r past the order", with_signature(lambda raw: ORDER.to_bytes(32, "big") + raw[32:]), TokenFault.SIGNATURE
    yield "signature short", with_signature(lambda raw: raw[:-1]), TokenFault.SIGNATURE
    yield "signature long", with_signature(lambda raw: raw + b"\0"), TokenFault.SIGNATURE
    yield "signature bent", with_signature(lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])), TokenFault.SIGNATURE
    yield "other payload under a good signature", other_payload, TokenFault.SIGNATURE

    yield "padding", respelt(lambda text: text + "=="), TokenFault.FORM
    yield "loose last bits", respelt(with_other_last_bits), TokenFault.FORM
    yield "line end", respelt(lambda text: text + "\n"), TokenFault.FORM
    yield "space inside", respelt(lambda text: text[:20] + " " + text[20:]), TokenFault.FORM
    yield "ordinary base64", respelt(lambda text: text.rpartition(".")[0] + "." + "+/" * 43), TokenFault.FORM
    yield "four parts", respelt(lambda text: text + ".AAAA"), TokenFault.FORM
    yield "two parts", respelt(lambda text: text.rpartition(".")[0]), TokenFault.FORM
    yield "five parts, as if encrypted", respelt(lambda text: text + ".AAAA.AAAA"), TokenFault.FORM
    yield "JSON instead", lambda w: json.dumps({"payload": w.good()}), TokenFault.FORM
    yield "nothing", lambda w: "", TokenFault.FORM
    yield "not ASCII", respelt(lambda text: text[:30] + "é" + text[31:]), TokenFault.FORM
    yield "one megabyte", respelt(lambda text: text + "A" * 2**20), TokenFault.SIZE
    yield "nine kibibytes, signed", with_claims(extra="x" * 9 * 1024), TokenFault.SIZE
    yield "deep JSON", with_raw("extra", "[" * 5000), TokenFault.FORM
    yield "header is a list", lambda w: assemble(b"[]", claims(w.ours(), w.now), w.key), TokenFault.FORM
    yield "claims are a list", lambda w: assemble(header(w.key), b"[]", w.key), TokenFault.FORM
    yield "claims are not JSON", lambda w: assemble(header(w.key), b"{", w.key), TokenFault.FORM
    yield (
        "claims in UTF-16",
        lambda w: assemble(header(w.key), json.dumps(claims(w.ours(), w.now)).encode("utf-16"), w.key),
        TokenFault.FORM,
    )
    for name, value in (("sub", '"x"'), ("aud", '["x"]'), ("exp", "1"), ("iat", "1")):
        yield f"{name} twice", twice(name, value), TokenFault.FORM

    for name in ("exp", "iat"):
        for text in ("true", "1.5", "1e400", '"1772452860"', "null", "[1]", "{}"):
            yield f"{name} {text}", with_raw(name, text), TokenFault.TIME
        for text in ("NaN", "Infinity", "-Infinity"):
            yield f"{name} {text}", with_raw(name, text), TokenFault.FORM
        yield f"{name} left out", with_claims(**{name: None}), TokenFault.TIME
        yield f"{name} of a hundred digits", with_raw(name, "1" + "0" * 100), TokenFault.TIME
        yield f"{name} negative", with_claims(**{name: -1}), TokenFault.TIME
    yield "exp of five thousand digits", with_raw("exp", "1" + "0" * 5000), TokenFault.FORM
    yield "expired", with_times(iat=-25, exp=-5), TokenFault.TIME
    yield "expired this second", with_times(iat=-20, exp=0), TokenFault.TIME
    yield "issued in the future", with_times(iat=60, exp=90), TokenFault.TIME
    yield "issued in the future, just past the skew", with_times(iat=6, exp=60), TokenFault.TIME
    yield "old though not expired", with_times(iat=-31, exp=30), TokenFault.TIME
    yield "valid for a day", with_times(iat=0, exp=86400), TokenFault.TIME
    yield "valid for too long", with_times(iat=0, exp=91), TokenFault.TIME
    yield "ends before it begins", with_times(iat=4, exp=3), TokenFault.TIME
    yield "nbf of tomorrow", lambda w: w.good(nbf=w.at(days=1)), TokenFault.TIME
    yield "nbf is a string", with_claims(nbf="soon"), TokenFault.TIME

    yield "jti is a number", with_claims(jti=1), TokenFault.FORM
    yield "iss is a list", with_claims(iss=["https://spire"]), TokenFault.FORM
    yield "aud of another service", with_claims(aud=["vault"]), TokenFault.NONCE
    yield "aud empty", with_claims(aud=[]), TokenFault.AUDIENCE
    yield "aud of an empty string", with_claims(aud=[""]), TokenFault.NONCE
    yield "no aud", with_claims(aud=None), TokenFault.AUDIENCE
    yield "aud of a number", with_claims(aud=[1]), TokenFault.AUDIENCE
    yield "aud as one string", lambda w: w.good(aud=w.ours()), TokenFault.AUDIENCE
    yield "aud ours and another", lambda w: w.good(aud=[w.ours(), "vault"]), TokenFault.AUDIENCE
    yield "aud another and ours", lambda w: w.good(aud=["vault", w.ours()]), TokenFault.AUDIENCE
    yield "aud ours twice", lambda w: w.good(aud=[w.ours()] * 2), TokenFault.AUDIENCE
    yield "aud of the prefix", with_claims(aud=["gpuwarden/nonce/"]), TokenFault.NONCE
    yield "aud truncated", lambda w: w.good(aud=[w.ours()[:-1]]), TokenFault.NONCE
    yield "aud with a suffix", lambda w: w.good(aud=[w.ours() + "A"]), TokenFault.NONCE
    yield "aud with an invalid character", lambda w: w.good(aud=[w.ours()[:-1] + "*"]), TokenFault.NONCE
    yield "aud of a nonce with two nodes", lambda w: w.good(aud=[w.nonce("node-a,node-b")]), TokenFault.NONCE
    yield "aud of two hundred kilobytes", with_claims(aud=["x" * 200_000]), TokenFault.SIZE
    yield "nonce of another node", lambda w: w.good(aud=[w.nonce("node-b")]), TokenFault.NONCE
    yield "node of another nonce", with_claims(sub=evidence_id(node="node-b")), TokenFault.NONCE

    for name, sub in (
        ("upper-case trust domain", evidence_id(trust_domain="Example.org")),
        ("user in it", evidence_id(trust_domain="root@example.org")),
        ("port in it", evidence_id(trust_domain="example.org:443")),
        ("escaped slash", evidence_id(node="node-a%2Fx")),
        ("dot segments", f"spiffe://example.org/evidence/../evidence/{NODE}/{HASH.replace(':', '.')}"),
        ("dot segment", f"spiffe://example.org/./evidence/{NODE}/{HASH.replace(':', '.')}"),
        ("line end", evidence_id() + "\n"),
        ("leading space", " " + evidence_id()),
        ("space in the hash", evidence_id(hash="sha256:aa 11")),
        ("colon in the hash", f"spiffe://example.org/evidence/{NODE}/{HASH}"),
        ("trailing slash", evidence_id() + "/"),
        ("double slash", evidence_id().replace("/evidence", "//evidence")),
        ("query", evidence_id() + "?x"),
        ("fragment", evidence_id() + "#x"),
        ("https", evidence_id().replace("spiffe:", "https:")),
        ("upper-case scheme", evidence_id().replace("spiffe:", "SPIFFE:")),
        ("no path", "spiffe://example.org"),
        ("nothing", ""),
        ("other letters", evidence_id(node="nod\u0435-a")),
        ("nul", evidence_id() + "\0"),
        ("long", evidence_id(hash="a" * 2048)),
    ):
        yield f"sub {name}", with_claims(sub=sub), TokenFault.SUBJECT
    yield "sub of a workload", with_claims(sub="spiffe://example.org/ns/default/sa/web"), TokenFault.SUBJECT
    yield "sub of the agent", with_claims(sub="spiffe://example.org/spire/agent/x509pop/node-a"), TokenFault.SUBJECT
    yield "sub with a suffix", with_claims(sub=evidence_id() + "/more"), TokenFault.SUBJECT
    yield "sub without a hash", with_claims(sub="spiffe://example.org/evidence/node-a"), TokenFault.SUBJECT
    yield "no sub", with_claims(sub=None), TokenFault.SUBJECT
    yield "sub is a list", with_claims(sub=[evidence_id()]), TokenFault.SUBJECT


BAD: Final = tuple(cases())
