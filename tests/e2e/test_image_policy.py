"""policy-controller's own code on our image policies."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.controlplane.cluster import ROOT
from tests.test_image_policy import OTHERS, OURS, POLICY, REPOSITORY

PROGRAM = ROOT / "tests" / "policy-controller"
BUILD_LIMIT = 1800.0


# It compiles most of sigstore: minutes the first time, for a file that hardly changes.
@pytest.mark.long
@pytest.mark.defect("S2-21")
def test_policy_controller_accepts_the_policies_and_they_cover_our_repository_alone(tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no Go here to build policy-controller with")
    judge = tmp_path / "judge"
    build = ["/usr/bin/env", "GOWORK=off", go, "build", "-mod=readonly", "-buildvcs=false", "-o", str(judge), "."]
    subprocess.run(build, cwd=PROGRAM, check=True, timeout=BUILD_LIMIT)
    bare = REPOSITORY  # without a tag it is `:latest`
    said = subprocess.run([judge, POLICY, *OURS, bare, *OTHERS], capture_output=True, text=True, check=True).stdout
    assert json.loads(said) == [
        {"name": name, "problem": "", "matched": [*OURS, bare]} for name in ("must-have-slsa", "must-have-spdx-cue")
    ]
