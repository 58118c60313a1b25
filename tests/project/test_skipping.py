"""`.ci/run` fails where `make e2e` skips because of a missing requirement, unless configured otherwise."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.skipping import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("what", ["NODE", "HISTORY"])
def test_missing_requirement_fails_if_required_and_skips_otherwise(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(f"E2E_{what}_REQUIRED", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no apt"):
        skip_or_fail(what, "no apt")
    monkeypatch.setenv(f"E2E_{what}_REQUIRED", "1")
    with pytest.raises(pytest.fail.Exception, match=f"no apt; E2E_ALLOW_NO_{what}=1 lets the run pass without"):
        skip_or_fail(what, "no apt")


@pytest.mark.parametrize(
    ("allowed", "required"),
    [
        ({}, "NODE=1 HISTORY=1"),
        ({"E2E_ALLOW_NO_NODE": "1"}, "NODE= HISTORY=1"),
        ({"E2E_ALLOW_NO_HISTORY": "1"}, "NODE=1 HISTORY="),
    ],
    ids=["nothing", "no node", "no history"],
)
def test_ci_requires_everything_that_is_not_explicitly_optional(allowed: dict[str, str], required: str) -> None:
    (lines,) = re.findall(r"^for what in .*?^done$", (ROOT / ".ci/run").read_text(), re.MULTILINE | re.DOTALL)
    say = 'echo "NODE=${E2E_NODE_REQUIRED:-} HISTORY=${E2E_HISTORY_REQUIRED:-}"'
    command = ["/usr/bin/env", "bash", "-euo", "pipefail", "-c", f"{lines}\n{say}"]
    said = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **allowed}, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == required
