"""SPIFFE IDs of evidence: each has one meaning or is rejected."""

import pytest

from webhook.core.evidence_id import DEFAULT_TEMPLATE, EvidenceId, EvidenceIdParts, check_template, trust_domain_of


@pytest.mark.parametrize(
    ("template", "spiffe_id", "expected"),
    [
        (
            DEFAULT_TEMPLATE,
            "spiffe://example.org/evidence/node-1/sha256.aa11",
            EvidenceIdParts("node-1", "sha256:aa11"),
        ),
        (
            DEFAULT_TEMPLATE,
            "spiffe://example.org/evidence/ip-10-0-0-1.ec2.internal/aa",
            EvidenceIdParts("ip-10-0-0-1.ec2.internal", "aa"),
        ),
        (DEFAULT_TEMPLATE, "spiffe://example.org/evidence/node-1/SHA256.AA", EvidenceIdParts("node-1", "SHA256:AA")),
        ("spiffe://{trust_domain}/h-{hash}/n/{node}", "spiffe://example.org/h-aa/n/b", EvidenceIdParts("b", "aa")),
        ("spiffe://example.org/{node}/{hash}", "spiffe://example.org/b/aa", EvidenceIdParts("b", "aa")),
        (DEFAULT_TEMPLATE, "spiffe://example.org/evidence/node-1", None),
        (DEFAULT_TEMPLATE, "spiffe://example.org/evidence/node-1/aa/bb", None),
        (DEFAULT_TEMPLATE, "spiffe://example.com/evidence/node-1/aa", None),
        (DEFAULT_TEMPLATE, "spiffe://exampleXorg/evidence/node-1/aa", None),
        (DEFAULT_TEMPLATE, "spiffe://example.org/evidence/../aa", None),
        ("spiffe://other.org/{node}/{hash}", "spiffe://other.org/b/aa", None),
    ],
)
def test_node_and_hash_are_read_only_from_matching_ids(
    template: str, spiffe_id: str, expected: EvidenceIdParts | None
) -> None:
    assert EvidenceId(template, "example.org").read(spiffe_id) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("spiffe://{trust_domain}/evidence/{node}", "once each"),
        ("spiffe://{trust_domain}/{node}/{hash}/{hash}", "once each"),
        ("spiffe://{trust_domain}/{node}/{hash}/{uid}", "once each"),
        ("spiffe://{trust_domain}/{node}-{hash}", "separate path segments"),
        ("spiffe://{trust_domain}/{node}/{hash}-{trust_domain}", "once each"),
        ("spiffe://example.org/{trust_domain}/{node}/{hash}", "separate path segments"),
        ("spiffe://{node}/{hash}", "trust domain"),
        ("https://{trust_domain}/{node}/{hash}", "not a SPIFFE ID"),
        ("spiffe://{trust_domain}/{node}/{hash}/", "not a SPIFFE ID"),
        ("spiffe://{trust_domain}/{node}/sha256:{hash}", "not a SPIFFE ID"),
        ("spiffe://{trust_domain}/{node}/{hash", "once each"),
    ],
)
def test_ambiguous_template_is_rejected(template: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_template(template)


@pytest.mark.parametrize(
    "text", ["spiffe://a", "spiffe://a/", "spiffe:///b", "spiffe://a/b/", "spiffe://A/b", "spiffe://a/b\n", "a/b", ""]
)
def test_invalid_workload_id_has_no_trust_domain(text: str) -> None:
    assert trust_domain_of(text) is None
