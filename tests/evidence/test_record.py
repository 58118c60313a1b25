"""A record is accepted only with the signature of a node of the trust domain, for this node and hash."""

import base64
import json
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from tests.builders import HASH, OTHER_HASH, Raw
from tests.evidence.certificates import HOUR, Authority, Issued
from tests.evidence.jwt.tokens import TRUST_DOMAIN, evidence_id
from tests.running import GPUWARDEN
from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId
from webhook.evidence.record import (
    MAX_CHAIN,
    MAX_RECORD,
    TYPE,
    BadRecordError,
    EvidenceRecord,
    RecordedClaim,
    algorithm_of,
    claim_of,
    signed,
    verified,
)
from webhook.evidence.spire.x509_svid import X509Svid
from webhook.runtime.clock import utc_now
from webhook.runtime.tls.certificates import certificate_in

CA, OTHER_CA = Authority(TRUST_DOMAIN), Authority(TRUST_DOMAIN)
NODE_ID = evidence_id("node-a", HASH)
NODE = CA.issue(NODE_ID)
# The certificate with the number of another curve.
P_256 = bytes.fromhex("06082a8648ce3d030107")
ODD_CURVE = NODE.chain.replace(P_256, P_256[:-1] + b"\x7f")
NOW = utc_now().replace(microsecond=0)
CLAIM = RecordedClaim("ml", "gpuwarden-1", "uid-1")
RECORD = EvidenceRecord("node-a", NODE_ID, HASH, NOW, CLAIM, ["uid-train"], ["GPU-1"], NOW + HOUR)


def svid_of(issued: Issued, roots: bytes = CA.root) -> X509Svid:
    not_after = certificate_in(issued.chain).not_valid_after_utc
    return X509Svid(issued.spiffe_id, not_after, issued.pem.encode(), roots)


def check(text: str, *, ca: Authority = CA, trust_domain: str = TRUST_DOMAIN) -> EvidenceRecord:
    return verified(text, [certificate_in(ca.root)], EvidenceId(DEFAULT_TEMPLATE, trust_domain))


def changed(**members: Any) -> EvidenceRecord:
    return msgspec.structs.replace(RECORD, **members)


def forged(record: EvidenceRecord | bytes, issued: Issued, **header: Any) -> str:
    """Signed by anyone who has a key, with any header."""
    pem = issued.pem[issued.pem.index("-----BEGIN P") :]
    key: Any = jwt.PyJWS().get_algorithm_by_name("ES256").prepare_key(pem.encode())
    content = record if isinstance(record, bytes) else msgspec.json.encode(record)
    chain = {"typ": TYPE, "x5c": [base64.b64encode(issued.chain).decode()]}
    return jwt.PyJWS().encode(content, key, "ES256", headers=chain | header)


def test_record_of_a_node_is_verified_with_the_bundle_alone() -> None:
    text = signed(RECORD, svid_of(NODE))
    assert check(text) == RECORD
    assert claim_of(text) == CLAIM
    assert jwt.get_unverified_header(text).keys() == {"alg", "typ", "x5c"}


def test_record_outlives_the_certificate_that_has_signed_it() -> None:
    old = CA.issue(NODE_ID, not_after=NOW - timedelta(minutes=1))
    before = changed(issued=NOW - HOUR)
    assert check(signed(before, svid_of(old))) == before
    with pytest.raises(BadRecordError, match="not valid at"):
        check(signed(RECORD, svid_of(old)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (signed(changed(node="node-b"), svid_of(NODE)), "it says node node-b"),
        (signed(changed(hash=OTHER_HASH), svid_of(NODE)), f"and hash {OTHER_HASH}, its certificate"),
        (signed(changed(spiffe_id=evidence_id("node-b")), svid_of(NODE)), "is not that of a node"),
        (signed(RECORD, svid_of(CA.issue(evidence_id("node-b", HASH)))), "is not that of a node"),
        (signed(RECORD, svid_of(CA.issue(f"spiffe://{TRUST_DOMAIN}/workload"))), "is not that of a node"),
        (signed(RECORD, svid_of(OTHER_CA.issue(NODE_ID))), "is not of the trust bundle"),
        (forged(RECORD, OTHER_CA.issue(NODE_ID), x5c=[base64.b64encode(NODE.chain).decode()]), "signature is wrong"),
        (forged(RECORD, NODE, x5c=[base64.b64encode(ODD_CURVE).decode()]), "its key cannot be read"),
        (forged(b"{}", NODE), "content or its key cannot be read"),
        (forged(RECORD, NODE, typ="JWT"), "header is not that of a record"),
        (forged(RECORD, NODE, jku="https://a"), "header is not that of a record"),
        (forged(RECORD, NODE, x5c="AA=="), "header is not that of a record"),
        (forged(RECORD, NODE, x5c=[]), "does not have 1 to 8 certificates"),
        (forged(RECORD, NODE, x5c=["AA=="] * (MAX_CHAIN + 1)), "does not have 1 to 8 certificates"),
        (forged(RECORD, NODE, x5c=[7]), "does not have 1 to 8 certificates"),
        (forged(RECORD, NODE, x5c=["AA=="]), "a certificate in its header cannot be read"),
        (forged(RECORD, NODE, x5c=["?"]), "a certificate in its header cannot be read"),
        (forged(msgspec.json.encode(RECORD).replace(b"2026", b"0001"), NODE), "not valid at"),
        ("", "it is not a JWS"),
        ("a.b.c", "it is not a JWS"),
        ("a" * (MAX_RECORD + 1), "it is longer than"),
    ],
    ids=[
        "another node",
        "another hash",
        "the SPIFFE ID of another node",
        "signed by another node",
        "signed by a workload that is no node",
        "another authority",
        "the chain of another key",
        "a key on an unknown curve",
        "no content",
        "a token",
        "a key by reference",
        "certificates that are no list",
        "no certificate",
        "many certificates",
        "a certificate that is no text",
        "a certificate that is none",
        "a certificate that is not base64",
        "a time before all certificates",
        "empty",
        "no JSON",
        "long",
    ],
)
def test_record_that_no_node_has_signed_for_itself_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BadRecordError, match=problem):
        check(text)


def test_content_cannot_be_changed() -> None:
    header, content, signature = signed(RECORD, svid_of(NODE)).split(".")
    raw: Raw = json.loads(base64.urlsafe_b64decode(content + "=="))
    raw["gpus"] = ["GPU-2"]
    other = base64.urlsafe_b64encode(json.dumps(raw).encode()).decode().rstrip("=")
    with pytest.raises(BadRecordError, match="signature is wrong"):
        check(f"{header}.{other}.{signature}")


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_algorithm_is_that_of_the_key(algorithm: str) -> None:
    header = {"typ": TYPE, "x5c": [base64.b64encode(NODE.chain).decode()]}
    key = "" if algorithm == "none" else "a secret that is long enough for the algorithm"
    with pytest.raises(BadRecordError, match="signature is wrong"):
        check(jwt.PyJWS().encode(msgspec.json.encode(RECORD), key, algorithm, headers=header))


def test_trust_domain_is_the_one_that_the_caller_names() -> None:
    with pytest.raises(BadRecordError, match="is not that of a node"):
        check(signed(RECORD, svid_of(NODE)), trust_domain="other.org")


@pytest.mark.parametrize(
    ("key", "algorithm"),
    [
        (ec.generate_private_key(ec.SECP384R1()), "ES384"),
        (rsa.generate_private_key(65537, 2048), "RS256"),
        (ed25519.Ed25519PrivateKey.generate(), None),
    ],
    ids=["P-384", "RSA", "Ed25519"],
)
def test_algorithm_follows_the_key(key: Any, algorithm: str | None) -> None:
    if algorithm is not None:
        assert algorithm_of(key.public_key()) == algorithm
        return
    with pytest.raises(BadRecordError):
        algorithm_of(key.public_key())


def test_command_prints_the_content_of_a_record(tmp_path: Path) -> None:
    record, bundle = tmp_path / "evidence.jws", tmp_path / "bundle.pem"
    record.write_text(signed(RECORD, svid_of(NODE)))
    bundle.write_bytes(x509.load_der_x509_certificate(CA.root).public_bytes(Encoding.PEM))
    command = [GPUWARDEN, "record", "verify", str(record), "--bundle", str(bundle), "--trust-domain", TRUST_DOMAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert msgspec.json.decode(done.stdout, type=EvidenceRecord) == RECORD
    record.write_text(record.read_text().replace("e", "f"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gpuwarden record verify: it is not a JWS")
    bundle.write_text("")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
