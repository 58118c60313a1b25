"""How long it takes to challenge a node, to verify its answer, and to refuse an answer without a challenge.

The verification covers form, challenge, times and signature, but not the write of the result. Times are CPU times of
the thread.
"""

import base64
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import jwt
from attrs import frozen
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from bench.figures import Target, percentile, typical
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.evidence.jwt.jwt_bundle import parse_bundle
from webhook.evidence.jwt.jwt_svid import BadTokenError, TokenVerifier, check_signature
from webhook.evidence.jwt.nonce import PREFIX, Nonces, process_key
from webhook.runtime.clock import utc_now

Raw = dict[str, Any]

TRUST_DOMAIN, NODE = "example.org", "gpu-node-00000"
SUBJECT = f"spiffe://{TRUST_DOMAIN}/evidence/{NODE}/sha256.{0xA0:064x}"
LIMIT_MS = 1.0
SKEW = timedelta(seconds=5)


@frozen
class Plan:
    """The size of the measurement."""

    rounds: int = 7
    tokens: int = 500


SHORT = Plan(rounds=3, tokens=100)


@frozen
class Signer:
    """One kind of key that SPIRE signs with."""

    algorithm: str
    private: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

    @property
    def jwk(self) -> Raw:
        convert = jwt.get_algorithm_by_name(self.algorithm).to_jwk
        return {**json.loads(convert(self.private.public_key())), "kid": self.algorithm, "use": "jwt-svid"}

    def token(self, nonce: str) -> str:
        now = int(utc_now().timestamp())
        claims = {"aud": [nonce], "exp": now + 60, "iat": now, "sub": SUBJECT}
        return jwt.encode(claims, self.private, self.algorithm, headers={"kid": self.algorithm})


def signers() -> list[Signer]:
    return [
        Signer("ES256", ec.generate_private_key(ec.SECP256R1())),
        Signer("ES384", ec.generate_private_key(ec.SECP384R1())),
        Signer("RS256", rsa.generate_private_key(public_exponent=65537, key_size=2048)),
    ]


def run(plan: Plan) -> Raw:
    made = signers()
    keys = parse_bundle(json.dumps({"keys": [one.jwk for one in made]}).encode()).keys
    nonces = Nonces(process_key(), SKEW)
    verifier = TokenVerifier(EvidenceId(DEFAULT_TEMPLATE, TRUST_DOMAIN), nonces, SKEW)

    def verify(token: str) -> None:
        proof = verifier.check_claims(token, utc_now())
        check_signature(proof, keys[proof.token.key_id])

    def turn_down(token: str) -> None:
        try:
            verifier.check_claims(token, utc_now())
        except BadTokenError:
            return
        raise AssertionError(token)

    def answers(one: Signer) -> list[str]:
        return [one.token(nonces.issue(NODE, utc_now()).text) for _ in range(plan.tokens)]

    stranger = PREFIX + base64.urlsafe_b64encode(bytes(57)).decode()
    return {
        "verify_us": {one.algorithm: spread(plan, verify, partial(answers, one)) for one in made},
        "turn_down_us": spread(plan, turn_down, lambda: [made[0].token(stranger)] * plan.tokens),
        "challenge_us": spread(plan, lambda node: nonces.issue(node, utc_now()), lambda: [NODE] * plan.tokens),
    }


def spread(plan: Plan, step: Callable[[str], object], inputs: Callable[[], Sequence[str]]) -> dict[str, float]:
    rounds = [[timed(step, one) for one in inputs()] for _ in range(plan.rounds)]
    shares = {"p50": 0.5, "p99": 0.99}
    return {name: round(typical([percentile(one, share) for one in rounds]), 1) for name, share in shares.items()}


def timed(step: Callable[[str], object], value: str) -> float:
    """In microseconds."""
    started = time.thread_time()
    step(value)
    return 1e6 * (time.thread_time() - started)


def targets(found: Raw, slack: float) -> list[Target]:
    return [
        Target(f"verification of a JWT-SVID ({name}), median", one["p50"] / 1000, LIMIT_MS * slack, " ms")
        for name, one in found["verify_us"].items()
    ]


def lines(found: Raw) -> list[str]:
    rows = [(f"verify, {name}", one) for name, one in found["verify_us"].items()]
    rows += [("turn down, no challenge of ours", found["turn_down_us"]), ("challenge", found["challenge_us"])]
    table = [f"| {name} | {one['p50']:.0f} | {one['p99']:.0f} |" for name, one in rows]
    return ["| µs of CPU | p50 | p99 |", "|---|---|---|", *table]
