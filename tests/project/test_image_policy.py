"""The image policy covers exactly gpuwarden's repository. tests/e2e/test_image_policy.py runs policy-controller
itself."""

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

# As policy-controller reads them: a name without tag or digest counts as `:latest`.
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
    """policy-controller's glob rule: `**` matches anything, `*` anything but a slash, other characters match
    themselves."""
    for one in policy["spec"]["images"]:
        parts = re.split(r"(\*\*?)", one["glob"])
        pattern = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
        if re.fullmatch(pattern, image):
            return True
    return False


def test_policy_file_has_two_policies() -> None:
    assert [one["metadata"]["name"] for one in policies()] == ["must-have-slsa", "must-have-spdx-cue"]


@pytest.mark.defect("gpuid-21")
@pytest.mark.parametrize("policy", policies(), ids=lambda one: one["metadata"]["name"])
def test_policy_covers_exactly_the_own_repository(policy: dict[str, Any]) -> None:
    assert [image for image in OURS + OTHERS if is_covered(policy, image)] == OURS


def test_older_glob_covers_other_repositories() -> None:
    """`is_covered` distinguishes a wide glob from a narrow one."""
    wide = {"spec": {"images": [{"glob": f"{REPOSITORY}*"}]}}
    assert is_covered(wide, f"ghcr.io/gpuwarden/gpuwarden-evil@{DIGEST}")


def test_identity_is_the_release_workflow_at_a_tag() -> None:
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
    """The external actions that a job runs, without their versions."""
    return [step["uses"].partition("@")[0] for step in JOBS[job]["steps"] if "uses" in step]


def test_only_one_job_signs_and_it_runs_few_external_actions() -> None:
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
    """Runs the workflow's own check on the text; its exit status and its message."""
    *_, step = JOBS["pinned"]["steps"]
    (directory / "release.yaml").write_text(text)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


PIN = "@" + "0123456789abcdef" * 2 + "01234567"


def pinned() -> str:
    """The workflow with every action pinned, as a release requires."""
    return re.sub(r"(uses: [^@\s]+)@\S+", rf"\1{PIN}", WORKFLOW.read_text())


def test_release_continues_if_every_action_is_pinned(tmp_path: Path) -> None:
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
def test_release_stops_if_an_action_is_not_pinned(tmp_path: Path, line: str) -> None:
    code, said = pins_of(f"{pinned()}      {line}\n", tmp_path)
    assert code == 1
    assert said.startswith("No release: these actions are not pinned to the 40 hex digits of a commit:\n")
    assert [one.partition(":")[2].strip() for one in said.splitlines()[1:]] == [line]


def test_file_without_actions_is_not_accepted_as_workflow(tmp_path: Path) -> None:
    assert pins_of('{"message": "Not Found"}', tmp_path)[0] == 1


def test_workflow_creates_the_attestations_that_the_policies_require() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow[True]["push"]["tags"] == ["v[0-9]+.[0-9]+.[0-9]+"]  # YAML 1.1 reads the key `on` as true
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
