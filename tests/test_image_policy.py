"""The image policy covers our repository, whole and alone. policy-controller's own word on it: tests/e2e."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
POLICY = ROOT / "examples" / "supply-chain" / "clusterimagepolicy.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"
DIGEST = "sha256:" + "ab" * 32
REPOSITORY = "ghcr.io/gpuwarden/gpuwarden"

# As policy-controller sees them: a name without tag or digest counts as `:latest`.
OURS = [f"{REPOSITORY}@{DIGEST}", f"{REPOSITORY}:v1.2.3", f"{REPOSITORY}:latest"]
OTHERS = [
    f"ghcr.io/gpuwarden/gpuwarden-evil@{DIGEST}",
    "ghcr.io/gpuwarden/gpuwardens:v1",
    f"ghcr.io/gpuwarden/gpuwarden/more@{DIGEST}",
    f"ghcr.io/gpuwarden/other@{DIGEST}",
    "ghcr.io/evil/gpuwarden:v1",
    f"evil.io/ghcr.io/gpuwarden/gpuwarden@{DIGEST}",
    "ghcrxio/gpuwarden/gpuwarden:v1",
]


def policies() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(POLICY.read_text()))


def is_covered(policy: dict[str, Any], image: str) -> bool:
    """The rule of policy-controller's globs: `**` is anything, `*` anything but a slash, nothing else is special."""
    for one in policy["spec"]["images"]:
        parts = re.split(r"(\*\*?)", one["glob"])
        pattern = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
        if re.fullmatch(pattern, image):
            return True
    return False


def test_there_are_the_two_policies() -> None:
    assert [one["metadata"]["name"] for one in policies()] == ["must-have-slsa", "must-have-spdx-cue"]


@pytest.mark.defect("S2-21")
@pytest.mark.parametrize("policy", policies(), ids=lambda one: one["metadata"]["name"])
def test_a_policy_covers_our_repository_exactly(policy: dict[str, Any]) -> None:
    assert [image for image in OURS + OTHERS if is_covered(policy, image)] == OURS


def test_the_older_glob_would_have_covered_others() -> None:
    """The rule above tells a wide glob from a narrow one."""
    wide = {"spec": {"images": [{"glob": f"{REPOSITORY}*"}]}}
    assert is_covered(wide, f"ghcr.io/gpuwarden/gpuwarden-evil@{DIGEST}")


def test_the_identity_is_the_release_workflow_at_a_tag_and_nothing_else() -> None:
    workflow = "https://github.com/gpuwarden/gpuwarden/.github/workflows/release.yaml@"
    for policy in policies():
        (authority,) = policy["spec"]["authorities"]
        (identity,) = authority["keyless"]["identities"]
        pattern = identity["subjectRegExp"]
        assert re.search(pattern, workflow + "refs/tags/v1.20.3")
        for other in ("refs/heads/main", "refs/tags/v1.2.3-rc1", "refs/tags/v1.2", "refs/tags/xv1.2.3"):
            assert not re.search(pattern, workflow + other)
        assert not re.search(pattern, "https://github.com/evil/x/" + workflow + "refs/tags/v1.2.3")
        assert not re.search(pattern, workflow.replace("github.com", "githubxcom") + "refs/tags/v1.2.3")
        assert identity["issuer"] == "https://token.actions.githubusercontent.com"


def test_the_workflow_makes_what_the_policy_asks_for() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True]["push"]["tags"] == ["v[0-9]+.[0-9]+.[0-9]+"]  # `on` is a truth value to YAML 1.1
    assert workflow["permissions"] == {}
    assert WORKFLOW.relative_to(ROOT).as_posix() in POLICY.read_text()
    image = workflow["jobs"]["image"]
    assert image["permissions"]["id-token"] == "write"
    text = WORKFLOW.read_text()
    assert "cosign sign " in text
    assert "cosign attest " in text
    assert "actions/attest-build-provenance@" in text
    predicates = [
        one["predicateType"]
        for policy in policies()
        for authority in policy["spec"]["authorities"]
        for one in authority["attestations"]
    ]
    assert predicates == ["https://slsa.dev/provenance/v1", "https://spdx.dev/Document"]
