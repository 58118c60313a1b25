"""The image policy matches exactly our repository. tests/e2e runs policy-controller itself."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "examples" / "supply-chain" / "clusterimagepolicy.yaml"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"
DIGEST = "sha256:" + "ab" * 32
REPOSITORY = "ghcr.io/gpuwarden/gpuwarden"

# As policy-controller reads them: a name without tag or digest means `:latest`.
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
    """policy-controller's globs: `**` matches anything, `*` anything except a slash."""
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


def test_older_glob_would_have_matched_other_repositories() -> None:
    """The function above distinguishes a wide glob from a narrow one."""
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


JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]


def actions(job: str) -> list[str]:
    """The third-party actions of a job, without versions."""
    return [step["uses"].partition("@")[0] for step in JOBS[job]["steps"] if "uses" in step]


def test_only_one_job_signs_and_runs_few_third_party_actions() -> None:
    signing = [name for name, job in JOBS.items() if job["permissions"].keys() & {"id-token", "attestations"}]
    assert signing == ["sign"]
    assert actions("sign") == ["sigstore/cosign-installer", "actions/attest-build-provenance"]
    assert {name: job.get("needs") for name, job in JOBS.items()} == {
        "pinned": None,
        "check": "pinned",
        "image": "check",
        "sign": "image",
    }
    assert actions("pinned") == []


def pins_of(text: str, directory: Path) -> tuple[int, str]:
    """The output of the workflow's check for a workflow with this step, and whether it passes."""
    *_, step = JOBS["pinned"]["steps"]
    (directory / "release.yaml").write_text(text)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


PIN = "@" + "0123456789abcdef" * 2 + "01234567"


def pinned() -> str:
    """The workflow as required for a release."""
    return re.sub(r"(uses: [^@\s]+)@\S+", rf"\1{PIN}", WORKFLOW.read_text())


def test_a_release_is_made_when_every_action_is_pinned(tmp_path: Path) -> None:
    assert pins_of(pinned(), tmp_path) == (0, "")
    assert pins_of(pinned().replace(PIN, f"{PIN} # v5.0.1"), tmp_path) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        "- uses: actions/checkout@v5",
        "- uses: actions/checkout@main",
        "- uses: actions/checkout",
        "- uses: actions/checkout" + PIN[:-1],
        "- uses: actions/checkout" + PIN + "0",
        "- uses: actions/checkout" + PIN.upper(),
        "- uses: actions/checkout@v5 # " + PIN,
        "- {uses: actions/checkout@v5}",
        '- "uses": actions/checkout@v5',
        "- 'uses' : actions/checkout@v5",
        "- uses: docker://alpine:3",
        "- uses: ./local",
    ],
)
def test_no_release_while_one_action_is_not_pinned(tmp_path: Path, line: str) -> None:
    code, said = pins_of(f"{pinned()}      {line}\n", tmp_path)
    assert code == 1
    assert said.startswith("No release: these actions are not pinned to the 40 hex digits of a commit:\n")
    assert [one.partition(":")[2].strip() for one in said.splitlines()[1:]] == [line]


def test_file_without_actions_is_refused(tmp_path: Path) -> None:
    assert pins_of('{"message": "Not Found"}', tmp_path)[0] == 1


def test_workflow_creates_what_the_policy_requires() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True]["push"]["tags"] == ["v[0-9]+.[0-9]+.[0-9]+"]  # `on` is a truth value to YAML 1.1
    assert workflow["permissions"] == {}
    assert WORKFLOW.relative_to(ROOT).as_posix() in POLICY.read_text()
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
