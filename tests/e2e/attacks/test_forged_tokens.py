"""gpuwarden's verification of JWT-SVIDs compared with go-spiffe's, over valid and invalid tokens: gpuwarden may reject
more, never less."""

import json
import random
import shutil
import string
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import jwt
import pytest
from attrs import frozen

from tests.evidence.jwt.bad_tokens import BAD, World
from tests.evidence.jwt.tokens import (
    ES256,
    ES384,
    ES512,
    RS256,
    TRUST_DOMAIN,
    SigningKey,
    assemble,
    claims,
    document,
    evidence_id,
    header,
    seconds,
)
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.evidence.jwt.jwt_bundle import parse_bundle
from webhook.evidence.jwt.jwt_svid import BadTokenError, Proof, TokenFault, TokenVerifier, check_signature
from webhook.evidence.jwt.nonce import Nonces
from webhook.runtime.clock import utc_now

PROGRAM = Path(__file__).resolve().parents[2] / "go-spiffe"
BUILD_LIMIT = 600.0
SKEW = timedelta(seconds=5)
NO_GO = "there is no Go here to build go-spiffe with"

KEYS = [SigningKey.make(f"key-{name}", name) for name in (ES256, ES384, RS256)]
KEY = SigningKey("key-1", ES256, KEYS[0].private)
# Accepted by go-spiffe, rejected by gpuwarden.
UNSUPPORTED_KEY = SigningKey.make("key-ES512", ES512)
FOREIGN = SigningKey.make("key-1")
HEADER = {"typ", "kid", "alg"}
BUNDLE = document(KEY, *KEYS, UNSUPPORTED_KEY)


@frozen
class Case:
    name: str
    token: str
    is_good: bool = False


@pytest.fixture(scope="module")
def go_spiffe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None:
        pytest.skip(NO_GO)
    binary = tmp_path_factory.mktemp("go") / "go-spiffe"
    subprocess.run([go, "build", "-buildvcs=false", "-o", binary, "."], cwd=PROGRAM, check=True, timeout=BUILD_LIMIT)
    return binary


def random_cases(rng: random.Random, nonce: str, now: datetime, number: int) -> Iterator[Case]:
    """Tokens with up to three anomalies, and each of them with one character changed."""
    letters = string.ascii_letters + string.digits + "-_.=+/ "
    for at in range(number):
        key = rng.choice([*KEYS, *KEYS, KEY, UNSUPPORTED_KEY, FOREIGN])
        odd = {name: rng.choice(values) for name, values in rng.sample(anomalies(nonce, now), rng.randrange(4))}
        head = {name: value for name, value in odd.items() if name in HEADER}
        said = {name: value for name, value in odd.items() if name not in HEADER}
        text = assemble(header(key, **head), claims(nonce, now, **said), key)
        yield Case(f"random {at}: {key.key_id} {odd}", text)
        place = rng.randrange(len(text))
        yield Case(f"random {at}, bent at {place}", text[:place] + rng.choice(letters) + text[place + 1 :])


def anomalies(nonce: str, now: datetime) -> list[tuple[str, list[Any]]]:
    """Values of headers and claims; not all of them are invalid."""
    at = seconds(now)
    return [
        ("typ", ["JOSE", None, "jwt", "", "JWT ", 1]),
        ("kid", ["key-1", "key-2", "", None, 1]),
        ("alg", [ES256, ES384, RS256, "RS384", "PS256", "HS256", "none", None]),
        ("iat", [at - 10, at + 3, at - 300, at + 300, at + 0.5, None, "1", True]),
        ("exp", [at + 30, at + 85, at + 300, at - 400, at + 60.5, 1e20, 10**30, None, True, "1"]),
        ("nbf", [at - 5, at + 600, at + 3, "1", 1.5, True]),
        ("aud", [nonce, [nonce, nonce], ["vault"], [nonce, "vault"], [], [1], [None], None]),
        ("sub", [*(evidence_id(trust_domain=name) for name in ("other.org", "Example.org")), evidence_id() + "/"]),
        (
            "sub",
            ["spiffe://example.org", "spiffe://example.org/web", "web", "", evidence_id(node="..", hash="x"), None],
        ),
        ("jti", ["1", 1, "", []]),
        ("iss", ["https://spire", 1, {}]),
        ("extra", [1, [[]], {"sub": "x"}, "\ud800", "\0", 1e308]),
    ]


def corpus(rng: random.Random, world: World, number: int = 300) -> list[Case]:
    good = [
        Case(
            f"good, {key.algorithm} {at}",
            assemble(header(key), claims(world.ours(), world.now, iat=world.at(seconds=-at)), key),
            is_good=True,
        )
        for key in (KEY, *KEYS)
        for at in range(20)
    ]
    bad = [Case(name, make(world)) for name, make, _ in BAD]
    return [*good, *bad, *random_cases(rng, world.ours(), world.now, number)]


def asked(binary: Path, cases: list[Case], nonce: str) -> list[str]:
    """The SPIFFE ID that go-spiffe accepts, or an empty text."""
    question = {
        "trustDomain": TRUST_DOMAIN,
        "bundle": BUNDLE.decode(),
        "tokens": [{"token": case.token, "audience": nonce} for case in cases],
    }
    answer = subprocess.run(binary, input=json.dumps(question), capture_output=True, text=True, check=True, timeout=60)
    return [one["id"] for one in json.loads(answer.stdout)]


def verified(verifier: TokenVerifier, keys: Mapping[str, jwt.PyJWK], text: str, now: datetime) -> Proof | TokenFault:
    try:
        proof = verifier.check_claims(text, now)
        check_signature(proof, keys.get(proof.token.key_id))
    except BadTokenError as exc:
        return exc.fault
    return proof


def test_gpuwarden_accepts_no_token_that_go_spiffe_rejects(go_spiffe: Path) -> None:
    now, secret = utc_now(), b"k" * 32
    nonces = Nonces(lambda: (secret,), SKEW)
    verifier = TokenVerifier(EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN), nonces, SKEW)
    keys = parse_bundle(BUNDLE).keys
    world = World(KEY, FOREIGN, cache(lambda node: nonces.issue(node, now).text), now)
    seed = random.randrange(2**32)  # noqa: S311 - a corpus, no secret
    cases = corpus(random.Random(seed), world)  # noqa: S311 - the same
    theirs = asked(go_spiffe, cases, world.ours())
    assert len(theirs) == len(cases) >= 500

    stricter: Counter[TokenFault] = Counter()
    both = 0
    for case, believed in zip(cases, theirs, strict=True):
        ours = verified(verifier, keys, case.token, now)
        assert isinstance(ours, Proof) or not case.is_good, f"{case.name}: {ours} (seed {seed})"
        if isinstance(ours, Proof):
            assert believed == ours.token.subject, f"{case.name} passes with us alone (seed {seed})"
            both += 1
        else:
            stricter[ours] += bool(believed)
    # The corpus is balanced: both accept many tokens, and both reject many.
    print(f"{len(cases)} tokens, good for both {both}, refused by us alone {dict(stricter)}, seed {seed}")  # noqa: T201
    assert both >= 100
    assert len(cases) - both - stricter.total() >= 250
    assert not stricter[TokenFault.SIGNATURE]
    assert not stricter[TokenFault.KEY]
    assert not stricter[TokenFault.TRUST_DOMAIN]
