"""The shipped policy for SPIRE Server, in the server's own engine, beside rules in the server's form."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.builders import Raw
from webhook.evidence.spire.spire_messages import LIST_AGENTS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/spire"
PROGRAM = ROOT / "tests/opa"
BUILD_LIMIT = 600.0
API = "/spire.api.server."
# The server's input for calls by administrators, over its socket, and by others.
SERVERS_OWN = """
package spire

result = {"allow": allow, "allow_if_admin": allow_if_admin, "allow_if_local": allow_if_local}

default allow_if_admin = false
default allow_if_local = false
default allow = false

allow_if_admin = true if { some one in data.apis; one.full_method == input.full_method; one.allow_admin }
allow_if_local = true if { some one in data.apis; one.full_method == input.full_method; one.allow_local }
allow = true if { some one in data.apis; one.full_method == input.full_method; one.allow_any }
"""
FOR_ADMINISTRATORS = [
    "agent.v1.Agent/ListAgents",
    "agent.v1.Agent/GetAgent",
    "agent.v1.Agent/CountAgents",
    "agent.v1.Agent/BanAgent",
    "agent.v1.Agent/DeleteAgent",
    "agent.v1.Agent/CreateJoinToken",
    "svid.v1.SVID/MintJWTSVID",
    "svid.v1.SVID/MintX509SVID",
    "entry.v1.Entry/ListEntries",
    "entry.v1.Entry/BatchCreateEntry",
    "trustdomain.v1.TrustDomain/ListFederationRelationships",
    "localauthority.v1.LocalAuthority/RotateX509Authority",
]
FOR_ALL = ["bundle.v1.Bundle/GetBundle", "agent.v1.Agent/AttestAgent"]
OURS = "spiffe://example.org/gpuwarden"
OTHERS = ["", "spiffe://example.org/gpuwarden2", "spiffe://example.org/gpuwarden/x", "spiffe://other.org/gpuwarden"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no Go here to build the policy engine with")
    binary = tmp_path_factory.mktemp("go") / "opa"
    subprocess.run([go, "build", "-buildvcs=false", "-o", binary, "."], cwd=PROGRAM, check=True, timeout=BUILD_LIMIT)
    return binary


def answers(engine: Path, policy: str, data: Raw) -> dict[tuple[str, str], Raw]:
    """The engine's verdicts by caller and method."""
    calls = [(who, API + method) for who in (OURS, *OTHERS) for method in (*FOR_ADMINISTRATORS, *FOR_ALL)]
    asked = [{"caller": who, "full_method": method, "req": {}} for who, method in calls]
    question = json.dumps({"policy": policy, "data": data, "calls": asked})
    done = subprocess.run(engine, input=question, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, json.loads(done.stdout), strict=True))


def test_policy_allows_one_more_caller_one_more_method(engine: Path) -> None:
    apis = [{"full_method": API + one, "allow_admin": True, "allow_local": True} for one in FOR_ADMINISTRATORS]
    apis += [{"full_method": API + one, "allow_any": True} for one in FOR_ALL]
    ours = json.loads((EXAMPLES / "gpuwarden-reader.json").read_text())
    reader = (EXAMPLES / "gpuwarden-reader.rego").read_text()
    before = answers(engine, SERVERS_OWN, {"apis": apis})
    after = answers(engine, SERVERS_OWN + reader, {"apis": apis, **ours})
    changed = {call: after[call] for call in after if after[call] != before[call]}
    assert changed == {(OURS, LIST_AGENTS): {"allow": True, "allow_if_admin": True, "allow_if_local": True}}
    assert before[OURS, LIST_AGENTS]["allow"] is False
