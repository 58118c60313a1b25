"""The sources of a node's name and hash."""

import pytest

from webhook.core.agent_naming import naming_of
from webhook.evidence.spire.spire_messages import AgentMessage, AgentSelector

AGENT = AgentMessage(
    trust_domain="example.org",
    path="/spire/agent/x509pop/node-a/sha256.aa11",
    attestation_type="x509pop",
    serial="1",
    expires_at=1,
    selectors=(
        AgentSelector("x509pop", "san:node-name:node-a"),
        AgentSelector("x509pop", "san:node-name-2:node-z"),
        AgentSelector("x509pop", "san:attestation-hash:sha256:aa11"),
        AgentSelector("tpm", "san:attestation-hash:bb22"),
        AgentSelector("pcr", "0:aa"),
        AgentSelector("pcr", "0:bb"),
    ),
    is_banned=False,
    can_reattest=True,
)


@pytest.mark.parametrize(
    ("text", "place", "values"),
    [
        pytest.param("x509pop:san:node-name", "node", {"node-a"}, id="selector"),
        pytest.param("x509pop:san:node-name:", "node", {"node-a"}, id="selector-with-its-colon"),
        pytest.param("x509pop:san:attestation-hash", "hash", {"sha256:aa11"}, id="a-colon-in-the-value"),
        pytest.param("x509pop:san", "hash", None, id="a-prefix-ends-at-a-colon"),
        pytest.param("X509pop:san:node-name", "node", set(), id="another-type"),
        pytest.param("pcr:0", "hash", {"aa", "bb"}, id="two-values"),
        pytest.param("spiffe://{trust_domain}/spire/agent/x509pop/{node}/{hash}", "node", {"node-a"}, id="node-by-id"),
        pytest.param(
            "spiffe://example.org/spire/agent/x509pop/{node}/{hash}", "hash", {"sha256:aa11"}, id="hash-by-id"
        ),
        pytest.param("spiffe://{trust_domain}/spire/agent/x509pop/{node}", "node", set(), id="another-form"),
        pytest.param("spiffe://other.org/spire/agent/x509pop/{node}/{hash}", "node", set(), id="another-trust-domain"),
    ],
)
def test_value_is_read_by_selector_or_by_id_template(text: str, place: str, values: set[str] | None) -> None:
    if values is None:  # all values with the prefix `san:`
        values = {"node-name:node-a", "node-name-2:node-z", "attestation-hash:sha256:aa11"}
    assert naming_of(text, place).values(AGENT) == values


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", "node", "neither TYPE:PREFIX nor"),
        ("x509pop", "node", "neither TYPE:PREFIX nor"),
        ("x509pop:", "node", "neither TYPE:PREFIX nor"),
        ("x509 pop:san", "node", "neither TYPE:PREFIX nor"),
        ("k8s_psat:agent_node_label:hash", "hash", "labels prove nothing"),
        ("k8s_psat:agent_pod_label:hash", "hash", "labels prove nothing"),
        ("k8s_psat:agent_node_label:node", "node", "labels prove nothing"),
        ("k8s_psat:agent_pod_label:node", "node", "labels prove nothing"),
        ("spiffe://{trust_domain}/spire/agent/x509pop/{node}", "hash", "must contain {hash} once"),
        ("spiffe://{trust_domain}/spire/agent/x509pop/{node}/{node}", "node", "must contain {node} once"),
        ("spiffe://{trust_domain}/spire/agent/x509pop/{node}/{x}", "node", "must contain {node} once"),
        (
            "spiffe://{trust_domain}/spire/agent/x509pop/{node}-{hash}",
            "node",
            "a placeholder must be a whole path segment",
        ),
        ("spiffe://{trust_domain}/evidence/{node}/{hash}", "node", "not the ID of an agent"),
    ],
)
def test_ambiguous_setting_is_rejected(text: str, place: str, problem: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + problem.replace("{", r"\{").replace("}", r"\}")):
        naming_of(text, place)


def test_node_name_selector_of_k8s_psat_is_accepted() -> None:
    """The attestor reads the node name from the API server."""
    assert naming_of("k8s_psat:agent_node_name", "node").values(AGENT) == frozenset()
