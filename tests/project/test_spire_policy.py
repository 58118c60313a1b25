"""The SPIRE policy for gpuwarden allows reading agents and nothing else."""

import json
import re
from pathlib import Path

from webhook.evidence.spire.spire_messages import LIST_AGENTS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "spire"


def test_policy_data_allows_only_the_called_method() -> None:
    data = json.loads((EXAMPLES / "gpuwarden-reader.json").read_text())
    assert data == {"agent_readers": ["spiffe://example.org/gpuwarden"], "agent_read_methods": [LIST_AGENTS]}


def test_rule_requires_caller_and_method() -> None:
    """One rule with two conditions, which leaves the server's own rules unchanged."""
    rego = re.sub(r"#.*", "", (EXAMPLES / "gpuwarden-reader.rego").read_text())
    rule = "allow if { input.caller == data.agent_readers[_] input.full_method == data.agent_read_methods[_] }"
    assert " ".join(rego.split()) == rule
