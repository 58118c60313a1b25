"""Bundle documents: only keys that sign tokens, and no return to an earlier version."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.evidence.jwt.tokens import ES384, ES512, RS256, SigningKey, document
from webhook.evidence.jwt.jwt_bundle import BadBundleError, JwtBundle, check_succession, parse_bundle

KEY, OTHER = SigningKey.make("key-1"), SigningKey.make("key-2")


def test_bundle_of_a_real_server_is_parsed() -> None:
    bundle = parse_bundle((Path(__file__).parent / "recorded/bundle-endpoint.json").read_bytes())
    assert set(bundle.keys) == {"d72lgjPqT6oqAmC8dmQqQ96ME1GpfzOu"}
    assert (bundle.sequence, bundle.refresh_hint, len(bundle.x509_roots)) == (1, 10, 1)


def test_keys_of_other_uses_and_kinds_are_ignored() -> None:
    short = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - to see it refused
    weak = SigningKey("weak", RS256, short)
    keys = [
        KEY,
        SigningKey.make("key-3", ES384),
        SigningKey.make("key-4", RS256),
        SigningKey.make("key-5", ES512),
        weak,
    ]
    others = tuple(OTHER.jwk(use) for use in ("x509-svid", "wit-svid", "sig", None))
    secret = {"kty": "oct", "k": "AAAA", "kid": "key-6", "use": "jwt-svid"}
    off_curve = KEY.jwk() | {"kid": "key-7", "x": "AAAA"}
    bundle = parse_bundle(document(*keys, extra=(*others, secret, off_curve)))
    assert set(bundle.keys) == {"key-1", "key-3", "key-4"}


def test_private_key_is_reduced_to_its_public_part() -> None:
    bundle = parse_bundle(document(extra=(KEY.jwk() | {"d": "AAAA"},)))
    assert bundle.keys["key-1"].key == KEY.private.public_key()


def test_bundle_of_an_agent_has_keys_without_use() -> None:
    content = json.dumps({"keys": [KEY.jwk(use=None)]}).encode()
    assert set(parse_bundle(content, uses=frozenset({"jwt-svid", None})).keys) == {"key-1"}
    assert not parse_bundle(content).keys


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"keys": {}}',
        b'{"keys": [1]}',
        b'{"keys": [{"use": ["jwt-svid"]}]}',
        b'{"keys": [{"use": {"jwt-svid": 1}}]}',
        b'{"keys": [{"use": 1}]}',
        b'{"keys": [], "spiffe_sequence": "1"}',
        b'{"keys": [], "spiffe_sequence": 1.5}',
        b"[" * 100_000,
        b" " * (2**20 + 1),
        document(KEY, SigningKey.make("key-1")),
        document(SigningKey.make("")),
        document(KEY, extra=({"use": "x509-svid", "x5c": ["***"]},)),
    ],
    ids=[
        "empty",
        "list",
        "no keys",
        "keys",
        "key",
        "uses",
        "use object",
        "use number",
        "sequence",
        "half",
        "deep",
        "huge",
        "twice",
        "nameless",
        "root",
    ],
)
def test_invalid_bundle_document_is_rejected(content: bytes) -> None:
    with pytest.raises(BadBundleError):
        parse_bundle(content)


def bundle(*keys: SigningKey, **members: Any) -> JwtBundle:
    return parse_bundle(document(*keys, **members))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, bundle(KEY, sequence=7)),
        (bundle(KEY, sequence=7), bundle(KEY, sequence=7)),
        (bundle(KEY, sequence=7), bundle(KEY, OTHER, sequence=8)),
        (bundle(KEY, OTHER, sequence=7), bundle(OTHER, KEY, sequence=7)),
        (bundle(KEY, sequence=None), bundle(OTHER, sequence=None)),
        (bundle(KEY, sequence=None), bundle(OTHER, sequence=1)),
    ],
    ids=["first", "same", "later", "other order", "never numbered", "numbered from now on"],
)
def test_later_bundle_is_a_valid_successor(old: JwtBundle | None, new: JwtBundle) -> None:
    check_succession(None if old is None else old.version, new)


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        (bundle(KEY, sequence=6), "went back"),
        (bundle(KEY, sequence=None), "went back"),
        (bundle(KEY, OTHER, sequence=7), "same sequence"),
        (bundle(OTHER, sequence=7), "same sequence"),
        (bundle(SigningKey.make("key-1"), sequence=7), "same sequence"),
        (bundle(sequence=8), "no key"),
    ],
    ids=["lower", "unnumbered", "one more", "another", "same name", "empty"],
)
def test_earlier_version_is_rejected(new: JwtBundle, problem: str) -> None:
    with pytest.raises(BadBundleError, match=problem):
        check_succession(bundle(KEY, sequence=7).version, new)


telling = st.sampled_from(
    ["", "jwt-svid", "x509-svid", "EC", "RSA", "P-256", "AQAB", "AAAA", "A" * 43, "key-1", -1, 2**70]
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
values = st.recursive(
    telling | scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
members = st.sampled_from(["use", "kid", "kty", "crv", "x", "y", "n", "e", "x5c", "alg"])
good = st.sampled_from([KEY.jwk(), SigningKey.make("key-4", RS256).jwk(), {"use": "x509-svid", "x5c": ["AAAA"]}])
bent = st.builds(
    lambda jwk, changes: {**jwk, **changes}, good, st.dictionaries(members, values, min_size=1, max_size=3)
)
documents = st.fixed_dictionaries(
    {"keys": st.lists(bent, max_size=3) | st.lists(good | values, max_size=3) | values},
    optional={"spiffe_sequence": values, "spiffe_refresh_hint": values, "more": values},
)


@settings(deadline=None)
@given(documents)
def test_arbitrary_document_is_parsed_or_rejected(found: Any) -> None:
    """Any other error would end the process."""
    try:
        bundle = parse_bundle(json.dumps(found).encode())
        check_succession(bundle.version, bundle)
    except BadBundleError:
        return
    assert bundle.keys


def test_bundle_that_is_not_utf_8_is_rejected() -> None:
    with pytest.raises(BadBundleError):
        parse_bundle(b'{"keys": [], "spiffe_refresh_hint": "\xe7"}')
