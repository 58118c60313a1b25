"""Bad tokens prove nothing; valid tokens prove their node, as SPIRE issues them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import HASH, NOW, Raw
from tests.evidence.jwt.bad_tokens import BAD, Bad, World
from tests.evidence.jwt.tokens import (
    ES256,
    ES384,
    RS256,
    TRUST_DOMAIN,
    SigningKey,
    assemble,
    b64,
    claims,
    document,
    evidence_id,
    header,
    seconds,
    token,
)
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId, EvidenceIdParts
from webhook.evidence.jwt.jwt_bundle import parse_bundle
from webhook.evidence.jwt.jwt_svid import BadTokenError, Proof, TokenFault, TokenVerifier, check_signature, read_token
from webhook.evidence.jwt.nonce import Nonces

SKEW = timedelta(seconds=5)
KEYS = {name: SigningKey.make(f"key-{name}", name) for name in (ES256, ES384, RS256)}
KEY = SigningKey("key-1", ES256, KEYS[ES256].private)
X509_KEY = SigningKey.make("x509")
FOREIGN = SigningKey.make("key-1")
BUNDLE = parse_bundle(
    document(KEY, *KEYS.values(), extra=(X509_KEY.jwk("x509-svid"), SigningKey.make("wit").jwk("wit-svid")))
)
SECRET = b"k" * 32
NONCES = Nonces(lambda: (SECRET,), SKEW)
EXAMINER = TokenVerifier(EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN), NONCES, SKEW)


def nonce(node: str = "node-a") -> str:
    return NONCES.issue(node, NOW).text


WORLD = World(KEY, FOREIGN, nonce, NOW)


def proven(text: str, now: datetime = NOW) -> Proof:
    proof = EXAMINER.check_claims(text, now)
    check_signature(proof, BUNDLE.keys.get(proof.token.key_id))
    return proof


@pytest.mark.parametrize("key", [pytest.param(key, id=name) for name, key in KEYS.items()])
def test_valid_token_proves_its_node(key: SigningKey) -> None:
    proof = proven(token(key, nonce(), NOW))
    assert (proof.evidence_id, proof.issued) == (EvidenceIdParts("node-a", HASH), NOW)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({"typ": None}, id="no typ"),
        pytest.param({"typ": "JOSE"}, id="JOSE"),
    ],
)
def test_optional_claims_and_headers_are_accepted(bad: dict[str, str | None]) -> None:
    text = assemble(header(KEY, **bad), claims(nonce(), NOW, iss="https://spire", jti="1"), KEY)
    assert proven(text).evidence_id.node == "node-a"


@pytest.mark.parametrize(("bad", "fault"), [pytest.param(bad, fault, id=name) for name, bad, fault in BAD])
def test_bad_token_is_rejected_with_its_fault(bad: Bad, fault: TokenFault) -> None:
    with pytest.raises(BadTokenError) as caught:
        proven(bad(WORLD))
    assert caught.value.fault is fault


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([evidence_id(), "ES256"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["alg", "kid", "typ", "jwk"]), VALUES),
    st.dictionaries(st.sampled_from(["aud", "exp", "iat", "nbf", "sub", "iss", "jti", "x"]), VALUES),
)
def test_token_without_a_valid_signature_is_rejected(head: Raw, said: Raw) -> None:
    """Changes members of a valid token, so that each check is reached; any other error than a rejection would be a
    500."""
    text = assemble({**header(KEY), **head}, {**claims(nonce(), NOW), **said}, FOREIGN)
    with pytest.raises(BadTokenError):
        proven(text)


@given(st.text() | st.lists(st.binary(), min_size=3, max_size=3).map(lambda parts: ".".join(map(b64, parts))))
def test_arbitrary_text_is_rejected_as_a_token(text: str) -> None:
    with pytest.raises(BadTokenError):
        proven(text)


def test_token_times_are_exact_at_their_limits() -> None:
    def at(iat: float, exp: float) -> str:
        return token(
            KEY, nonce(), NOW, iat=seconds(NOW + timedelta(seconds=iat)), exp=seconds(NOW + timedelta(seconds=exp))
        )

    for iat, exp in ((5, 60), (-30, 1), (0, 90), (0, 1)):
        assert proven(at(iat, exp)).token.expires == seconds(NOW + timedelta(seconds=exp))


@pytest.mark.parametrize("hash", ["SHA256:AA11", "sha256:AA11", "sha256", "sha256:aa1", "aa11"])
def test_hash_keeps_its_case(hash: str) -> None:
    said = proven(token(KEY, nonce(), NOW, sub=evidence_id(hash=hash))).evidence_id.hash
    assert (said, said == HASH) == (hash, False)


def test_alternative_encoding_of_a_signature_answers_the_same_challenge() -> None:
    """Every ECDSA signature has a second valid form; single use depends on the challenge, not on the token's bytes."""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    first = token(KEY, nonce(), NOW)
    signed, _, _ = first.rpartition(".")
    raw = read_token(first).signature
    flipped = raw[:32] + (order - int.from_bytes(raw[32:], "big")).to_bytes(32, "big")
    second = f"{signed}.{b64(flipped)}"
    assert proven(second).token.audience == proven(first).token.audience


def test_token_of_a_real_server_is_verified() -> None:
    directory = Path(__file__).parent / "recorded"
    keys = parse_bundle((directory / "bundle-endpoint.json").read_bytes()).keys
    text = (directory / "jwt-svid.txt").read_text().strip()
    found = read_token(text)
    says = EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN).read(found.subject)
    assert says is not None
    assert says.node == "node-1"
    check_signature(Proof(found, says, NOW), keys[found.key_id])
    with pytest.raises(BadTokenError, match="not a challenge of this server"):
        EXAMINER.check_claims(text, datetime.fromtimestamp(found.issued, UTC))
