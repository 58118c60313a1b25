"""The image policies in policy-controller's own code."""

import json
import shutil
import subprocess
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from scripts.controlplane.cluster import ROOT
from tests.project.test_image_policy import DIGEST, OTHERS, OURS, POLICY, REPOSITORY

Raw = dict[str, Any]
PROGRAM = ROOT / "tests" / "policy-controller"
BUILD_LIMIT = 1800.0
SOURCE, REF = "https://github.com/gpuwarden/gpuwarden", "refs/tags/v1.2.3"
SUBJECT = [{"name": REPOSITORY, "digest": {"sha256": DIGEST.removeprefix("sha256:")}}]


def provenance(change: Callable[[Raw], None] = lambda definition: None) -> Raw:
    """A statement of `actions/attest-build-provenance`, with one change."""
    definition: Raw = {
        "buildType": "https://actions.github.io/buildtypes/workflow/v1",
        "externalParameters": {
            "workflow": {"ref": REF, "repository": SOURCE, "path": ".github/workflows/release.yaml"}
        },
        "internalParameters": {"github": {"event_name": "push", "runner_environment": "github-hosted"}},
        "resolvedDependencies": [{"uri": f"git+{SOURCE}@{REF}", "digest": {"gitCommit": "ab" * 20}}],
    }
    change(definition)
    details = {"builder": {"id": f"{SOURCE}/.github/workflows/release.yaml@{REF}"}}
    return statement("https://slsa.dev/provenance/v1", {"buildDefinition": definition, "runDetails": details})


def statement(kind: str, predicate: Raw) -> Raw:
    whole = {"_type": "https://in-toto.io/Statement/v1", "subject": SUBJECT, "predicateType": kind}
    return {**whole, "predicate": deepcopy(predicate)}


def workflow(**others: str) -> Callable[[Raw], None]:
    return lambda definition: definition["externalParameters"]["workflow"].update(others)


def without(*path: str) -> Callable[[Raw], None]:
    def change(definition: Raw) -> None:
        place = definition
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]

    return change


def source(uri: str) -> Callable[[Raw], None]:
    return lambda definition: definition["resolvedDependencies"][0].update(uri=uri)


SBOM = statement("https://spdx.dev/Document", {"spdxVersion": "SPDX-2.3", "SPDXID": "SPDXRef-DOCUMENT", "packages": []})
# The statement, and which of the two policies it satisfies.
STATED: list[tuple[Raw, list[bool]]] = [
    (provenance(), [True, False]),
    (SBOM, [False, True]),
    (provenance(workflow(repository="https://github.com/evil/gpuwarden")), [False, False]),
    (provenance(workflow(repository=SOURCE + "-evil")), [False, False]),
    (provenance(workflow(path=".github/workflows/other.yaml")), [False, False]),
    (provenance(workflow(ref="refs/heads/main")), [False, False]),
    (provenance(workflow(ref="refs/tags/v1.2.3-rc1")), [False, False]),
    (provenance(source("git+https://github.com/evil/gpuwarden@" + REF)), [False, False]),
    (provenance(source(f"git+{SOURCE}@refs/heads/main")), [False, False]),
    (provenance(without("resolvedDependencies")), [False, False]),
    (provenance(lambda definition: definition.update(resolvedDependencies=[])), [False, False]),
    (provenance(without("buildType")), [False, False]),
    (provenance(without("externalParameters")), [False, False]),
    (provenance(without("externalParameters", "workflow", "ref")), [False, False]),
    (statement("https://slsa.dev/provenance/v1", {}), [False, False]),
    (provenance(lambda definition: definition.update(buildType="https://evil.test/v1")), [False, False]),
    (statement("https://spdx.dev/Document", {"spdxVersion": "SPDX-2.3"}), [False, False]),
    (statement("https://slsa.dev/provenance/v0.2", {"buildType": "x"}), [False, False]),
]


# It compiles most of sigstore, which takes minutes the first time; the file rarely changes.
@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[Raw]:
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no Go here to build policy-controller with")
    checker = tmp_path_factory.mktemp("go") / "judge"
    build = ["/usr/bin/env", "GOWORK=off", go, "build", "-mod=readonly", "-buildvcs=false", "-o", str(checker), "."]
    subprocess.run(build, cwd=PROGRAM, check=True, timeout=BUILD_LIMIT)
    bare = REPOSITORY  # without a tag, `:latest` is assumed
    asked = json.dumps([one for one, _ in STATED])
    command = [str(checker), str(POLICY), *OURS, bare, *OTHERS]
    answer: list[Raw] = json.loads(
        subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout
    )
    return answer


@pytest.mark.long
@pytest.mark.defect("gpuid-21")
def test_policy_controller_accepts_the_policies_for_this_repository_only(said: list[Raw]) -> None:
    assert [(one["name"], one["problem"]) for one in said] == [("must-have-slsa", ""), ("must-have-spdx-cue", "")]
    assert [one["matched"] for one in said] == [[*OURS, REPOSITORY]] * 2


@pytest.mark.long
def test_only_a_build_of_the_release_workflow_at_a_tag_satisfies_the_policies(said: list[Raw]) -> None:
    satisfied = list(zip(*(one["satisfied"] for one in said), strict=True))
    assert [list(one) for one in satisfied] == [wanted for _, wanted in STATED]
