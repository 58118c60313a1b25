from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from webhook.assembly.parts import times_of
from webhook.core.claim import ClaimRules
from webhook.core.dress import DressRules
from webhook.core.injection import Injection
from webhook.core.reserve import Reserve
from webhook.runtime import setting_kinds, settings
from webhook.runtime.settings import SETTINGS, Settings, SettingsError

ROOT = Path(__file__).parents[2]
PORT_RULE = "0 to 65535; 0 selects a free port"
SOCKET_RULE = "`unix:PATH` or `unix:///PATH`"
PROVIDERS_RULE = f"a comma list of: {', '.join(settings.EVIDENCE_PROVIDERS)}"
SPIRE_SERVER_RULE = "`HOST:PORT`, or `unix:PATH` for tests"
DURATION_RULE = "`500ms`, `90s`, `5m`, `1h`, or a number of seconds; at most `168h`"
TRIO = {"kubernetes_url": "https://k:6443", "access_token": "FILE", "ca_certificate": "FILE"}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A file that can be read."""
    path = tmp_path / "there"
    path.write_text("x")
    return path


def mistakes(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        settings.load(flags or {}, environ or {})
    return caught.value.mistakes


def mistakes_in_file(tmp_path: Path, content: str) -> list[str]:
    """What is wrong with a settings file, which the messages call FILE here."""
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    return [mistake.replace(str(path), "FILE") for mistake in mistakes({"config": str(path)})]


# What could be set, as text and as YAML, and what has to come of it. FILE stands for a file that is there.
EXAMPLES: dict[str, tuple[str, object, object]] = {
    "config": ("FILE", None, "FILE"),
    "host": ("::1", "::1", "::1"),
    "port": ("443", 443, 443),
    "ui_port": ("0", 0, 0),
    "extender_port": ("65535", 65535, 65535),
    "scheduler_port": ("65534", 65534, 65534),
    "scheduler_certs": ("not-there-yet", "not-there-yet", Path("not-there-yet")),
    "scheduler_lease": ("one", "one", "one"),
    "drain_timeout": ("0", 0, timedelta(0)),
    "tls_cert": ("FILE", "FILE", "FILE"),
    "tls_key": ("FILE", "FILE", "FILE"),
    "max_body_memory": ("64", 64, 64),
    "max_reviews": ("50", 50, 50),
    "max_connections": ("50", 50, 50),
    "client_ca": ("FILE", "FILE", "FILE"),
    "extender_client_ca": ("FILE", "FILE", "FILE"),
    "extender_plain_address": (":8000", ":8000", ":8000"),
    "extender_plain_anywhere": ("true", True, True),
    "kubeconfig": ("FILE", "FILE", "FILE"),
    "kubernetes_url": ("https://10.0.0.1:6443/x", "https://10.0.0.1:6443/x", "https://10.0.0.1:6443/x"),
    "access_token": ("FILE", "FILE", "FILE"),
    "ca_certificate": ("FILE", "FILE", "FILE"),
    "in_cluster": ("true", True, True),
    "review_token_audience": ("gpuwarden", "gpuwarden", "gpuwarden"),
    "review_callers": ("a:b, c", ["a:b", "c"], ("a:b", "c")),
    "pending_per_namespace": ("50", 50, 50),
    "pending_share": ("25", 25, 25),
    "inventory": ("FILE", "FILE", "FILE"),
    "ledger": ("memory", "memory", "memory"),
    "lease_namespace": ("gpuwarden", "gpuwarden", "gpuwarden"),
    "pending_deadline": ("5m", "5m", timedelta(minutes=5)),
    "bind_deadline": ("10m", "10m", timedelta(minutes=10)),
    "on_bind_deadline": ("keep", "keep", "keep"),
    "max_grace": ("10m", "10m", timedelta(minutes=10)),
    "orphan_margin": ("2m", "2m", timedelta(minutes=2)),
    "orphans_per_namespace": ("50", 50, 50),
    "evidence": ("static", ["static"], ("static",)),
    "require_evidence": ("all", "all", "all"),
    "when_unavailable": ("queue", "queue", "queue"),
    "map_visible": ("uuid", "uuid", "uuid"),
    "on_evidence_lost": ("evict", "evict", "evict"),
    "on_mismatch": ("evict", "evict", "evict"),
    "strict_devices": ("true", True, True),
    "node_hash_map": ('{"node-a": "aa11"}', {"node-a": "aa11"}, {"node-a": "aa11"}),
    "spire_server": ("[::1]:8081", "[::1]:8081", "[::1]:8081"),
    "spire_trust_domain": ("example.org", "example.org", "example.org"),
    "spire_workload_api": ("unix:///run/agent.sock", "unix:/run/agent.sock", "unix:/run/agent.sock"),
    "spire_own_id": ("spiffe://example.org/v", "spiffe://example.org/v", "spiffe://example.org/v"),
    "spire_attestors": ("x509pop, tpm", ["x509pop", "tpm"], ("x509pop", "tpm")),
    "spire_node_selector": ("tpm:node", "tpm:node", "tpm:node"),
    "spire_hash_selector": ("tpm:pcr:0", "tpm:pcr:0", "tpm:pcr:0"),
    "spire_agent_ttl": ("15m", "15m", timedelta(minutes=15)),
    "max_evidence_age": ("10m", "10m", timedelta(minutes=10)),
    "evidence_poll": ("2s", 2, timedelta(seconds=2)),
    "bundle_endpoint": ("https://spire:8443", "https://spire:8443", "https://spire:8443"),
    "bundle_endpoint_profile": ("https_spiffe", "https_spiffe", "https_spiffe"),
    "bundle_endpoint_ca": ("FILE", "FILE", "FILE"),
    "bundle_endpoint_id": ("spiffe://example.org/s", "spiffe://example.org/s", "spiffe://example.org/s"),
    "max_bundle_age": ("10m", "10m", timedelta(minutes=10)),
    "evidence_id": ("spiffe://a/{node}/{hash}", "spiffe://a/{node}/{hash}", "spiffe://a/{node}/{hash}"),
    "nonce_key": ("FILE", "FILE", "FILE"),
    "server": ("https://gpuwarden:8443", "https://gpuwarden:8443", "https://gpuwarden:8443"),
    "server_ca": ("FILE", "FILE", "FILE"),
    "node": ("node-a.internal", "node-a.internal", "node-a.internal"),
    "runtime_socket": ("unix:///run/crio/crio.sock", "unix:/run/crio/crio.sock", "unix:/run/crio/crio.sock"),
    "pod_resources_socket": ("unix:/run/kubelet.sock", "unix:/run/kubelet.sock", "unix:/run/kubelet.sock"),
    "pod_uid": ("uid-1", "uid-1", "uid-1"),
    "certs_namespace": ("wardens", "wardens", "wardens"),
    "certs_service": ("hook", "hook", "hook"),
    "certs_names": ("10.0.0.1, a.example.org", ["10.0.0.1", "a.example.org"], ("10.0.0.1", "a.example.org")),
    "certs_secret": ("hook.tls", "hook.tls", "hook.tls"),
    "certs_configurations": ("one, two", ["one", "two"], ("one", "two")),
    "certs_dir": ("not-there-yet", "not-there-yet", Path("not-there-yet")),
    "certs_leaf_life": ("800h", "800h", timedelta(hours=800)),
    "certs_renew_before": ("90m", "90m", timedelta(minutes=90)),
    "certs_ca_life": ("20000h", "20000h", timedelta(hours=20000)),
    "certs_settle": ("0", 0, timedelta(0)),
    "certs_look_interval": ("1m", "1m", timedelta(minutes=1)),
    "clock_skew": ("1.5", 1.5, timedelta(seconds=1.5)),
    "reload_interval": ("500ms", "500ms", timedelta(milliseconds=500)),
    "injection": ("dra", "dra", "dra"),
    "native_templates": ("true", True, True),
    "proof_devices": ("true", True, True),
    "reserve": ("bind", "bind", "bind"),
    "runtime_class": ("nvidia", "nvidia", "nvidia"),
    "gpu_resource": ("amd.com/gpu", "amd.com/gpu", "amd.com/gpu"),
    "opt_in_label": ("acme.io/gpu", "acme.io/gpu", "acme.io/gpu"),
    "host_paths": ("/data, /mnt/a", ["/data", "/mnt/a"], ("/data", "/mnt/a")),
    "write_aliases": ("false", False, False),
    "required_hash_alias": ("example.com/hash", "example.com/hash", "example.com/hash"),
    "scorer": ("http://scorer:8080/a", "http://scorer:8080/a", "http://scorer:8080/a"),
    "scorer_ca": ("FILE", "FILE", "FILE"),
    "scorer_timeout": ("500ms", 0.5, timedelta(milliseconds=500)),
    "hint_pods": ("false", False, False),
    "priority_buckets": (
        '[{"minScore": 1.5, "priorityClassName": "a"}]',
        [{"minScore": 1.5, "priorityClassName": "a"}],
        ({"minScore": 1.5, "priorityClassName": "a"},),
    ),
    "tenant_priorities": ('{"team-a": 90}', {"team-a": 90}, {"team-a": 90}),
    "log_level": ("trace", "trace", "trace"),
}
# A setting without an example of its own has that of another one of its kind.
BY_KIND = {one.kind: EXAMPLES[one.name] for one in SETTINGS if one.name in EXAMPLES}
EXAMPLES |= {one.name: BY_KIND[one.kind] for one in SETTINGS if one.name not in EXAMPLES and one.kind in BY_KIND}
# What must be set with it.
COMPANIONS: dict[str, dict[str, str]] = {
    "tls_cert": {"tls_key": "FILE"},
    "tls_key": {"tls_cert": "FILE"},
    "kubernetes_url": TRIO,
    "access_token": TRIO,
    "ca_certificate": TRIO,
    "review_token_audience": {"kubeconfig": "FILE"},
    "native_templates": {"proof_devices": "true"},
    "reserve": {"kubeconfig": "FILE"},
    "scheduler_certs": {"kubeconfig": "FILE"},
    "kubelet_plugins": {"kubeconfig": "FILE"},
    "review_callers": {"kubeconfig": "FILE", "review_token_audience": "gpuwarden"},
}


def as_text(name: str, there: Path) -> str:
    text = EXAMPLES[name][0]
    return str(there) if text == "FILE" else text


def expected(name: str, there: Path) -> object:
    value = EXAMPLES[name][2]
    return there if value == "FILE" else value


def companions(name: str, there: Path) -> dict[str, object]:
    others = COMPANIONS.get(name, {})
    return {other: str(there) if text == "FILE" else text for other, text in others.items() if other != name}


def test_every_setting_has_an_example_here() -> None:
    assert set(EXAMPLES) == {one.name for one in SETTINGS}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"config"}))
def test_a_flag_sets_it(name: str, there: Path) -> None:
    found = settings.load({name: as_text(name, there), **companions(name, there)}, {})
    assert getattr(found, name) == expected(name, there)
    assert found.sources[name] == "flag --" + name.replace("_", "-")


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {"config"}))
def test_a_variable_sets_it(name: str, there: Path) -> None:
    variable = "GPUWARDEN_" + name.upper()
    found = settings.load(companions(name, there), {variable: as_text(name, there)})
    assert getattr(found, name) == expected(name, there)
    assert found.sources[name] == f"variable {variable}"


@pytest.mark.parametrize("one", [one for one in SETTINGS if one.in_file], ids=lambda one: str(one.name))
def test_a_key_of_the_file_sets_it(one: settings.Setting, there: Path, tmp_path: Path) -> None:
    value = EXAMPLES[one.name][1]
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({one.key: str(there) if value == "FILE" else value}))
    found = settings.load({"config": str(path), **companions(one.name, there)}, {})
    assert getattr(found, one.name) == expected(one.name, there)
    assert found.sources[one.name] == f"key {one.key} in {path}"


@pytest.mark.parametrize(
    ("flag", "variable", "port", "source"),
    [
        pytest.param("1", "2", 1, "flag --port", id="flag-before-variable"),
        pytest.param("1", "", 1, "flag --port", id="flag-before-file"),
        pytest.param(None, "2", 2, "variable GPUWARDEN_PORT", id="variable-before-file"),
        pytest.param(None, "", 3, "key port in FILE", id="an-empty-variable-is-none"),
        pytest.param(None, None, 3, "key port in FILE", id="file-before-default"),
    ],
)
def test_flag_before_variable_before_file(
    flag: str | None, variable: str | None, port: int, source: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 3\n")
    environ = {"GPUWARDEN_CONFIG": str(path)} | ({} if variable is None else {"GPUWARDEN_PORT": variable})
    found = settings.load({"port": flag}, environ)
    assert (found.port, found.sources["port"].replace(str(path), "FILE")) == (port, source)


def test_nothing_set_is_the_embedded_default() -> None:
    found = settings.load({}, {})
    assert found == Settings()
    assert set(found.sources.values()) == {"default"}
    assert found.is_embedded
    assert found.inventory_file == Path("examples/inventory.yaml")


def test_a_file_without_keys_or_with_empty_ones_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "hollow").write_text("port:\nhost: null\n")
    for name in ("empty", "hollow"):
        config = tmp_path / name
        assert settings.load({"config": str(config)}, {}) == Settings(config=config)


def test_the_flag_names_the_file_when_the_variable_does_too(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 3\n")
    assert settings.load({"config": str(path)}, {"GPUWARDEN_CONFIG": "/nowhere"}).port == 3


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        pytest.param({"BGS_REQUIRED_ANNOTATION": "old.example/h"}, "old.example/h", id="extender-name"),
        pytest.param(
            {"BGS_REQUIRED_ANNOTATION": "old.example/h", "GPUWARDEN_REQUIRED_HASH_ALIAS": "new.example/h"},
            "new.example/h",
            id="our-name-first",
        ),
        pytest.param(
            {"BGS_REQUIRED_ANNOTATION": ""},
            "attestation-hash.my-company.com/required-hash",
            id="extender-empty",
        ),
    ],
)
def test_variables_of_the_older_extender_are_read(environ: dict[str, str], key: str) -> None:
    assert settings.load({}, environ).required_hash_alias == key


@pytest.mark.parametrize("text", ["abc", "0", "-1"])
def test_a_time_out_of_s3_that_cannot_be_used_is_passed_over_and_told(text: str) -> None:
    found = settings.load({}, {"TIMEOUT_SECONDS": text})
    assert (found.scorer_timeout, found.sources["scorer_timeout"]) == (timedelta(seconds=2), "default")
    (note,) = found.notes
    assert note.startswith("ignored: variable TIMEOUT_SECONDS: ")


def test_hash_map_of_the_older_extender_is_read() -> None:
    found = settings.load({}, {"BGS_NODE_HASH_MAP": '{"kind-worker":"abc123"}'})
    assert found.node_hash_map == {"kind-worker": "abc123"}
    assert found.sources["node_hash_map"] == "variable BGS_NODE_HASH_MAP"


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", timedelta(seconds=90)),
        ("5m", timedelta(minutes=5)),
        ("1h", timedelta(hours=1)),
        ("500ms", timedelta(milliseconds=500)),
        ("90", timedelta(seconds=90)),
        ("0.5", timedelta(milliseconds=500)),
        ("168h", timedelta(days=7)),
    ],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert setting_kinds.read_duration(text) == duration


HASH_RULE = "a JSON object, node name to hash"
WRONG = [
    ("port", "70000", f"'70000' is not a port; allowed: {PORT_RULE}"),
    ("port", "-1", f"'-1' is not a port; allowed: {PORT_RULE}"),
    ("ui_port", "http", f"'http' is not a port; allowed: {PORT_RULE}"),
    ("port", "٤٤٣", f"'٤٤٣' is not a port; allowed: {PORT_RULE}"),
    (
        "host",
        "a b",
        "'a b' is neither an IP address nor a host name; allowed: an IP address or a host name of this machine",
    ),
    ("inventory", "/nowhere", "'/nowhere' is not a readable file; allowed: a readable file"),
    ("inventory", "/", "'/' is not a readable file; allowed: a readable file"),
    ("inventory", "", "'' is not a readable file; allowed: a readable file"),
    ("config", "/nowhere", "'/nowhere' is not a readable file; allowed: a readable file"),
    ("log_level", "loud", "'loud' is not an allowed value; allowed: trace, debug, info, warn, error, fatal, report"),
    ("log_level", "INFO", "'INFO' is not an allowed value; allowed: trace, debug, info, warn, error, fatal, report"),
    ("injection", "cdi", "'cdi' is not an allowed value; allowed: nvidia, cuda, plugin, dra"),
    ("reserve", "start", "'start' is not an allowed value; allowed: create, bind"),
    ("require_evidence", "none", "'none' is not an allowed value; allowed: asked, all"),
    (
        "host_paths",
        "/data,/var/run",
        "'/var/run': /var/run contains devices, sockets, programs or keys of the node; "
        "allowed: a comma list of absolute paths of nodes, not of directories with devices, sockets, programs or keys",
    ),
    ("write_aliases", "yes", "'yes' is neither true nor false; allowed: true, false"),
    ("lease_namespace", "a.b", "'a.b' is not the name of a namespace; allowed: the name of a namespace"),
    (
        "pending_per_namespace",
        "-1",
        "'-1' is not a whole number from 0 to 9999999; allowed: a whole number, 0 to 9999999",
    ),
    ("ledger", "redis", "'redis' is not an allowed value; allowed: memory, cluster"),
    ("spire_workload_api", "/run/a.sock", f"'/run/a.sock' is not a unix socket; allowed: {SOCKET_RULE}"),
    ("spire_workload_api", "unix://run/a", f"'unix://run/a' is not a unix socket; allowed: {SOCKET_RULE}"),
    ("spire_server", "::1:8081", f"'::1:8081' is not HOST:PORT; allowed: {SPIRE_SERVER_RULE}"),
    ("spire_server", "spire:0", f"'spire:0' is not HOST:PORT; allowed: {SPIRE_SERVER_RULE}"),
    ("spire_server", "spire", f"'spire' is not a port; allowed: {SPIRE_SERVER_RULE}"),
    (
        "spire_trust_domain",
        "spiffe://a",
        "'spiffe://a' is not the name of a trust domain; allowed: the name of a trust domain, such as `example.org`",
    ),
    ("spire_own_id", "spiffe://A/b", "'spiffe://A/b' is not a SPIFFE ID; allowed: a SPIFFE ID"),
    (
        "spire_attestors",
        "x509pop,",
        "'' is not the name of an attestor; allowed: a comma list of node attestors, such as `x509pop,tpm_devid`",
    ),
    ("evidence", "", f"'' is not an allowed value; allowed: {PROVIDERS_RULE}"),
    (
        "evidence",
        "static,static",
        f"'static,static' has a value twice; allowed: {PROVIDERS_RULE}",
    ),
    ("clock_skew", "5 s", f"'5 s' is not a duration; allowed: {DURATION_RULE}"),
    ("clock_skew", "-5s", f"'-5s' is not a duration; allowed: {DURATION_RULE}"),
    ("clock_skew", "nan", f"'nan' is not a duration; allowed: {DURATION_RULE}"),
    ("clock_skew", "169h", f"'169h' is too long; allowed: {DURATION_RULE}"),
    ("pending_deadline", "0", f"'0' is 0; allowed: {DURATION_RULE}; not 0"),
    ("reload_interval", "0ms", f"'0ms' is 0; allowed: {DURATION_RULE}; not 0"),
    (
        "gpu_resource",
        "cpu",
        "'cpu' is not an extended resource; allowed: an extended resource, such as `nvidia.com/gpu`",
    ),
    (
        "gpu_resource",
        "kubernetes.io/gpu",
        "'kubernetes.io/gpu' is not an extended resource; allowed: an extended resource, such as `nvidia.com/gpu`",
    ),
    (
        "gpu_resource",
        "nvidia.com/gpu/x",
        "'nvidia.com/gpu/x' is not an extended resource; allowed: an extended resource, such as `nvidia.com/gpu`",
    ),
    ("opt_in_label", "Ä/b", "'Ä/b' is not a label key; allowed: a label key"),
    ("required_hash_alias", "Ä/b", "'Ä/b' is not an annotation key; allowed: an annotation key"),
    ("node_hash_map", "{", f"not valid JSON; allowed: {HASH_RULE}"),
    ("node_hash_map", "[]", f"not a JSON object; allowed: {HASH_RULE}"),
    (
        "node_hash_map",
        '{"a": 1, "b": "x", "c": "", "d": "x y"}',
        f"no valid hash for 'a', 'c', 'd'; allowed: {HASH_RULE}",
    ),
    ("node_hash_map", '{"a": "1", "a": "2"}', f"a node has two hashes; allowed: {HASH_RULE}"),
]


@pytest.mark.parametrize(("name", "text", "mistake"), WRONG, ids=[f"{name}={text}" for name, text, _ in WRONG])
def test_invalid_value_is_reported_with_the_rule(name: str, text: str, mistake: str) -> None:
    assert mistakes({name: text}) == (f"flag --{name.replace('_', '-')}: {mistake}",)


@pytest.mark.parametrize(
    "url",
    [
        "k:6443",
        "ftp://k",
        "https://",
        "https://k:x",
        "https://k:99999",
        "https://k/ x",
        "https://[::1",
        "https://user@k",
        "https://k?a=b",
        "https://k#a",
    ],
)
def test_a_url_that_is_none_is_refused(url: str, there: Path) -> None:
    (mistake,) = mistakes({"kubernetes_url": url, "access_token": there, "ca_certificate": there})
    assert mistake.startswith("flag --kubernetes-url: ")
    assert mistake.endswith("allowed: a URL with http or https, without user, query or fragment")


@pytest.mark.parametrize(
    ("names", "mistake"),
    [
        pytest.param(["tls_cert"], "flag --tls-cert: --tls-key not set; allowed: both or neither", id="no-key"),
        pytest.param(["tls_key"], "flag --tls-key: --tls-cert not set; allowed: both or neither", id="no-certificate"),
        pytest.param(
            ["access_token"],
            "flag --access-token: --kubernetes-url and --ca-certificate not set; allowed: all of them or none",
            id="token-alone",
        ),
        pytest.param(
            ["kubernetes_url", "ca_certificate"],
            "flag --kubernetes-url, flag --ca-certificate: --access-token not set; allowed: all of them or none",
            id="no-token",
        ),
        pytest.param(
            ["kubeconfig", "kubernetes_url", "access_token", "ca_certificate"],
            "flag --kubeconfig, flag --kubernetes-url, flag --access-token, flag --ca-certificate: "
            "more than one cluster is named; name one",
            id="two-clusters",
        ),
        pytest.param(
            ["kubeconfig", "in_cluster"],
            "flag --kubeconfig, flag --in-cluster: more than one cluster is named; name one",
            id="another-cluster-from-a-pod",
        ),
        pytest.param(
            ["review_token_audience"],
            "flag --review-token-audience: only a cluster can check a token; name one by --kubeconfig",
            id="tokens-without-a-cluster",
        ),
        pytest.param(
            ["kubeconfig", "review_callers"],
            "flag --review-callers: no token is required; allowed: with --review-token-audience",
            id="callers-without-tokens",
        ),
    ],
)
def test_what_belongs_together(names: list[str], mistake: str, there: Path) -> None:
    assert mistakes({name: as_text(name, there) for name in names}) == (mistake,)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ({"port": "8080"}, "flag --port, --ui-port (default): more than one listener at port 8080; allowed: one each"),
        (
            {"ui_port": "9", "extender_port": "9"},
            "flag --ui-port, flag --extender-port: more than one listener at port 9; allowed: one each",
        ),
    ],
    ids=["with-a-default", "both-set"],
)
def test_listeners_have_ports_of_their_own(flags: dict[str, str], where: str) -> None:
    assert mistakes(flags) == (where,)


@pytest.mark.defect("extender-7")
@pytest.mark.parametrize(
    ("address", "anywhere", "at"),
    [
        (":8000", "false", ("127.0.0.1", 8000)),
        (":8000", "true", ("0.0.0.0", 8000)),  # noqa: S104 - what was asked for
        ("127.0.0.2:0", "false", ("127.0.0.2", 0)),
        ("[::1]:8000", "false", ("::1", 8000)),
        ("localhost:8000", "false", ("localhost", 8000)),
        ("10.0.0.1:8000", "true", ("10.0.0.1", 8000)),
    ],
)
def test_the_plain_extender_is_on_loopback_unless_allowed(address: str, anywhere: str, at: tuple[str, int]) -> None:
    found = settings.load({"extender_plain_anywhere": anywhere}, {"BGS_LISTEN_ADDR": address})
    assert found.plain_extender_at == at


@pytest.mark.defect("extender-7")
@pytest.mark.parametrize("address", ["10.0.0.1:8000", "[::]:8000", "0.0.0.0:8000", "gpu-plane:8000"])
def test_a_plain_extender_elsewhere_has_to_be_allowed(address: str) -> None:
    host = address.rpartition(":")[0].strip("[]")
    assert mistakes({}, {"BGS_LISTEN_ADDR": address}) == (
        f"variable BGS_LISTEN_ADDR: {host} is not on loopback, and plain HTTP authenticates no caller; "
        "allowed: with --extender-plain-anywhere true",
    )


@pytest.mark.parametrize("address", ["8000", "::1:8000", "host:x", "host:70000", "a b:1", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    (mistake,) = mistakes({"extender_plain_address": address})
    assert mistake.startswith("flag --extender-plain-address: ")


def test_only_a_ledger_in_a_cluster_reserves_at_bindings() -> None:
    assert mistakes({"reserve": "bind"}) == ("flag --reserve: no cluster is named; name one by --kubeconfig",)
    assert "flag --reserve: only --ledger cluster can hold GPUs for a pod that exists" in mistakes(
        {"reserve": "bind", "ledger": "memory", "kubeconfig": "x"}
    )
    assert (
        "flag --reserve: kube-scheduler chooses GPUs by claims from templates; allowed: with --native-templates true"
        in mistakes({"reserve": "bind", "injection": "dra", "kubeconfig": "x"})
    )


@pytest.mark.parametrize("more", [{}, {"proof_devices": "false"}], ids=["not-set", "off"])
def test_templates_of_native_pods_need_proof_devices(more: dict[str, str]) -> None:
    assert mistakes({"native_templates": "true", **more}) == (
        "flag --native-templates: claims of native pods are for proof devices; allowed: with --proof-devices true",
    )
    assert settings.load({"native_templates": "true", "proof_devices": "true"}, {}).native_templates


def test_port_zero_may_be_given_to_all_listeners() -> None:
    assert settings.load({"port": "0", "ui_port": "0", "extender_port": "0"}, {}).extender_port == 0


def test_a_bad_port_is_not_taken_for_its_default() -> None:
    assert mistakes({"port": "8080", "ui_port": "x"}) == (f"flag --ui-port: 'x' is not a port; allowed: {PORT_RULE}",)


def test_all_mistakes_are_named_at_once_and_each_with_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("ledger: redis\nuiprot: 1\n")
    environ = {"GPUWARDEN_CONFIG": str(path), "GPUWARDEN_TLS_CERT": "/nowhere", "GPUWARDEN_LOGLEVEL": "info"}
    with pytest.raises(SettingsError) as caught:
        settings.load({"port": "x"}, environ, also=["there is no option --frob"])
    assert [mistake.replace(str(path), "FILE") for mistake in caught.value.mistakes] == [
        "there is no option --frob",
        "key uiprot in FILE: unknown setting; did you mean uiPort?",
        f"flag --port: 'x' is not a port; allowed: {PORT_RULE}",
        "variable GPUWARDEN_TLS_CERT: '/nowhere' is not a readable file; allowed: a readable file",
        "key ledger in FILE: 'redis' is not an allowed value; allowed: memory, cluster",
        "variable GPUWARDEN_LOGLEVEL: unknown setting; did you mean GPUWARDEN_LOG_LEVEL?",
        "variable GPUWARDEN_TLS_CERT: --tls-key not set; allowed: both or neither",
    ]


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        pytest.param("- a\n", "flag --config: FILE is not a mapping of settings", id="a-list"),
        pytest.param("config: x\n", "key config in FILE: unknown setting", id="the-file-in-the-file"),
        pytest.param("1: x\n", "key 1 in FILE: unknown setting", id="a-number-as-key"),
        pytest.param(
            "port: [8443]\n",
            f"key port in FILE: a YAML list is not allowed here; allowed: {PORT_RULE}",
            id="a-list-for-a-number",
        ),
        pytest.param(
            "evidence: [1]\n",
            f"key evidence in FILE: a YAML list is not allowed here; allowed: {PROVIDERS_RULE}",
            id="a-list-of-numbers",
        ),
        pytest.param(
            "nodeHashMap: {a: 1}\n",
            f"key nodeHashMap in FILE: no valid hash for 'a'; allowed: {HASH_RULE}",
            id="a-number-for-a-hash",
        ),
        pytest.param(
            "logLevel: true\n",
            "key logLevel in FILE: 'true' is not an allowed value; "
            "allowed: trace, debug, info, warn, error, fatal, report",
            id="a-truth-for-a-word",
        ),
        pytest.param("port: 1\nport: 2\n", None, id="a-key-twice"),
        pytest.param("port: {\n", None, id="not-YAML"),
        pytest.param("[" * 5000, None, id="nested-beyond-reading"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(content: str, mistake: str | None, tmp_path: Path) -> None:
    (found,) = mistakes_in_file(tmp_path, content)
    if mistake is None:
        assert found.startswith("flag --config: FILE is not YAML: ")
    else:
        assert found == mistake


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GPUWARDEN_SERVICE_HOST", "10.0.0.1"),
        ("GPUWARDEN_SERVICE_PORT", "443"),
        ("GPUWARDEN_SERVICE_PORT_HTTPS", "443"),
        ("GPUWARDEN_PORT", "tcp://10.0.0.1:443"),
        ("GPUWARDEN_PORT_443_TCP", "tcp://10.0.0.1:443"),
        ("GPUWARDEN_PORT_443_TCP_ADDR", "10.0.0.1"),
        ("GPUWARDEN_EXTENDER_PORT", "tcp://10.0.0.1:443"),
        ("GPUWARDEN_EXTENDER_SERVICE_HOST", "10.0.0.1"),
        ("PATH", "/bin"),
    ],
)
def test_variables_that_kubernetes_sets_for_our_service_are_passed_over(name: str, text: str) -> None:
    assert settings.load({}, {name: text}) == Settings()


def test_what_looks_like_a_service_elsewhere_is_a_mistake() -> None:
    assert mistakes({}, {"GPUWARDEN_HOST": "tcp://10.0.0.1:443"}) == (
        "variable GPUWARDEN_HOST: 'tcp://10.0.0.1:443' is neither an IP address nor a host name; "
        "allowed: an IP address or a host name of this machine",
    )


def test_a_variable_nobody_knows_is_a_mistake_even_if_empty() -> None:
    assert mistakes({}, {"GPUWARDEN_ZZZ": ""}) == ("variable GPUWARDEN_ZZZ: unknown setting",)


def test_a_setting_that_is_gone_is_answered_with_what_replaces_it(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("schedulerName: gpu-scheduler")
    gone = "`gpuwarden bind` is gone; scheduler.name of the chart names the kube-scheduler profile that replaces it"
    file = str(tmp_path / "settings.yaml")
    assert set(mistakes({"scheduler_name": "a", "config": file}, {"GPUWARDEN_SCHEDULER_NAME": "b"})) == {
        f"flag --scheduler-name: {gone}",
        f"variable GPUWARDEN_SCHEDULER_NAME: {gone}",
        f"key schedulerName in {file}: {gone}",
    }
    # The older chart set it, and no process looked at it.
    assert settings.load({}, {"SCHEDULER_NAME": "gpu-scheduler"}).notes == ()


def test_flags_of_the_assigner_without_effect_are_reported() -> None:
    found = settings.load({"claims_namespace": "gpu-claims", "renew_interval": "60000", "renew_jitter": "0.2"}, {})
    assert found.notes == (
        "--claims-namespace has no effect: reservations are not Leases; --ledger selects where they are stored",
        "--renew-interval has no effect: reservations are not Leases, so none is renewed: "
        "a pending one ends at --pending-deadline, a finalized one with its pod",
        "--renew-jitter has no effect: reservations are not Leases, so there are no renewals to spread",
    )


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("-p", "port"),
        ("-U", "ui_port"),
        ("-k", "kubernetes_url"),
        ("-t", "access_token"),
        ("-c", "ca_certificate"),
        ("-l", "log_level"),
        ("-C", "claims_namespace"),
        ("-i", "renew_interval"),
        ("-j", "renew_jitter"),
    ],
)
def test_short_flags_of_the_assigner_are_taken(short: str, name: str) -> None:
    parser = ArgumentParser()
    settings.add_flags(parser)
    assert vars(parser.parse_args([short, "x"]))[name] == "x"


@pytest.mark.parametrize("name", ["kubeconfig", "kubernetes_url", "in_cluster"])
def test_with_a_cluster_nothing_is_embedded(name: str, there: Path) -> None:
    found = settings.load({name: as_text(name, there), **companions(name, there)}, {})
    assert not found.is_embedded
    assert found.inventory_file is None


def test_defaults_are_those_of_the_core() -> None:
    assert tuple(setting_kinds.INJECTION.allowed.split(", ")) == tuple(Injection)
    assert Settings().gpu_resource == ClaimRules().resource == DressRules().resource
    assert (Settings().required_hash_alias,) == ClaimRules().hash_aliases
    assert Settings().injection == DressRules().injection
    assert tuple(setting_kinds.RESERVE.allowed.split(", ")) == tuple(Reserve)
    assert Settings().reserve == DressRules().reserve == ClaimRules().default_reserve


def test_what_is_shown_says_where_each_value_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("evidence: [static]\n")
    flags = {"config": str(path), "port": "1"}
    shown = settings.as_yaml(settings.load(flags, {"GPUWARDEN_CLOCK_SKEW": "0.5"})).splitlines()
    assert f"# config: {path}  # flag --config" in shown
    assert "port: 1  # flag --port" in shown
    assert "clockSkew: 0.5s  # variable GPUWARDEN_CLOCK_SKEW" in shown
    assert f"evidence:  # key evidence in {path}" in shown
    assert "uiPort: 8080  # default" in shown


EXCLUDING = ("config", "kubeconfig", "in_cluster", "reserve")


def every_setting(there: Path) -> dict[str, Any]:
    """All settings but those that exclude others."""
    return {name: as_text(name, there) for name in EXAMPLES if name not in EXCLUDING}


def test_what_is_shown_can_be_read_back(there: Path, tmp_path: Path) -> None:
    before = settings.load(every_setting(there), {})
    path = tmp_path / "shown.yaml"
    path.write_text(settings.as_yaml(before))
    assert settings.load({"config": str(path)}, {}) == evolve(before, config=path)


@pytest.mark.parametrize(
    "flags", [{}, {"in_cluster": "true"}, {"kubeconfig": __file__}], ids=["embedded", "pod", "cluster"]
)
def test_defaults_that_are_shown_and_read_back_change_nothing(flags: dict[str, str], tmp_path: Path) -> None:
    before = settings.load(flags, {})
    path = tmp_path / "shown.yaml"
    path.write_text(settings.as_yaml(before))
    after = settings.load({"config": str(path), **flags}, {})
    assert in_effect_of(after) == in_effect_of(before)


def in_effect_of(found: Settings) -> tuple[object, ...]:
    """The settings whose default depends on whether there is a cluster."""
    return (
        found.keeps_in_cluster,
        found.evidence_required_of,
        found.pending_deadline_in_effect,
        found.pending_limit,
        found.pending_percent,
    )


def test_the_written_reference_is_the_one_of_this_version() -> None:
    assert (ROOT / "docs" / "reference" / "settings.md").read_text() == settings.reference()


@pytest.mark.parametrize(
    ("flags", "keeps_in_cluster"),
    [
        ({}, False),
        ({"kubeconfig": __file__}, True),
        ({"kubeconfig": __file__, "ledger": "cluster"}, True),
        ({"kubeconfig": __file__, "ledger": "memory"}, False),
    ],
    ids=["embedded", "a cluster", "so said", "otherwise said"],
)
def test_reservations_live_in_the_cluster_if_there_is_one(flags: dict[str, str], *, keeps_in_cluster: bool) -> None:
    assert settings.load(flags, {}).keeps_in_cluster is keeps_in_cluster


@pytest.mark.parametrize(
    ("flags", "required_of"),
    [
        ({}, "asked"),
        ({"require_evidence": "all"}, "all"),
        ({"kubeconfig": __file__}, "all"),
        ({"kubeconfig": __file__, "ledger": "memory"}, "all"),
        ({"in_cluster": "true"}, "all"),
        ({"kubeconfig": __file__, "require_evidence": "asked"}, "asked"),
    ],
    ids=["embedded", "so said", "a cluster", "in memory", "in a pod", "otherwise said"],
)
def test_all_claims_need_a_proven_node_if_there_is_a_cluster(flags: dict[str, str], required_of: str) -> None:
    found = settings.load(flags, {})
    assert found.evidence_required_of == required_of
    source = "flag --require-evidence" if "require_evidence" in flags else "default"
    assert f"requireEvidence: {required_of}  # {source}" in settings.as_yaml(found).splitlines()


def test_a_pod_is_no_cluster_until_somebody_says_so() -> None:
    """`make run` in a Pod is as embedded as anywhere."""
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    assert settings.load({}, environ).is_embedded
    assert not settings.load({"in_cluster": "true"}, environ).is_embedded
    assert settings.load({"in_cluster": "true", "ledger": "cluster"}, environ).keeps_in_cluster


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("10.0.0.1", "443", "https://10.0.0.1:443"),
        ("fd00::1", "6443", "https://[fd00::1]:6443"),
        ("", "443", None),
        ("10.0.0.1", "", None),
    ],
    ids=["IPv4", "IPv6", "no host", "no port"],
)
def test_a_pod_is_told_where_the_api_server_is(host: str, port: str, url: str | None) -> None:
    found = settings.load({}, {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port})
    assert found.api_server_of_pod == url


@pytest.mark.parametrize(
    ("flags", "limits"),
    [
        ({}, (0, 0)),
        ({"pending_per_namespace": "5", "pending_share": "30"}, (5, 30)),
        ({"kubeconfig": __file__}, (1000, 50)),
        ({"kubeconfig": __file__, "pending_per_namespace": "5", "pending_share": "30"}, (5, 30)),
        ({"kubeconfig": __file__, "pending_per_namespace": "0", "pending_share": "0"}, (0, 0)),
        ({"kubeconfig": __file__, "client_ca": __file__}, (0, 0)),
        ({"kubeconfig": __file__, "review_token_audience": "gpuwarden", "pending_per_namespace": "5"}, (0, 0)),
    ],
    ids=["embedded", "embedded and said", "a cluster", "said", "any number", "certificates", "tokens"],
)
def test_what_waits_is_limited_where_anybody_may_have_asked(flags: dict[str, str], limits: tuple[int, int]) -> None:
    found = settings.load(flags, {})
    assert (found.pending_limit, found.pending_percent) == limits


@pytest.mark.parametrize(
    ("flags", "proof"),
    [({}, "none"), ({"client_ca": __file__}, "certificate"), ({"review_token_audience": "gpuwarden"}, "token")],
    ids=["nothing", "certificates", "tokens"],
)
def test_how_reviewers_prove_who_they_are_is_told(flags: dict[str, str], proof: str) -> None:
    assert settings.load({"kubeconfig": __file__, **flags}, {}).proof_of_reviewers == proof


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ({}, 90),
        ({"pending_deadline": "30s"}, 30),
        ({"kubeconfig": __file__}, 15),
        ({"in_cluster": "true"}, 15),
        ({"kubeconfig": __file__, "pending_deadline": "90s"}, 90),
    ],
    ids=["embedded", "embedded and said", "a cluster", "in a pod", "a cluster and said"],
)
def test_a_hold_is_short_in_a_cluster(flags: dict[str, str], seconds: int) -> None:
    found = settings.load(flags, {})
    assert times_of(found).pending_deadline == timedelta(seconds=seconds)
    source = "flag --pending-deadline" if "pending_deadline" in flags else "default"
    assert f"pendingDeadline: {seconds}s  # {source}" in settings.as_yaml(found).splitlines()


def test_nobody_set_to_call_is_not_everybody() -> None:
    """A list that came out empty is a mistake, not an open door."""
    flags = {"kubeconfig": __file__, "review_token_audience": "gpuwarden", "review_callers": ""}
    (mistake,) = mistakes(flags)
    assert mistake.startswith(
        "flag --review-callers: '' is not one printable word; allowed: a comma list of user names"
    )


def test_a_ledger_in_a_cluster_needs_a_cluster() -> None:
    assert mistakes({"ledger": "cluster"}) == ("flag --ledger: no cluster is named; name one by --kubeconfig",)


@pytest.mark.parametrize(("deadline", "is_said"), [("10s", True), ("11s", False)])
def test_a_deadline_that_clocks_may_eat_up_is_told_of(tmp_path: Path, deadline: str, is_said: bool) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("{}")
    chosen = settings.load({"kubeconfig": str(kubeconfig), "pending_deadline": deadline, "clock_skew": "5s"}, {})
    assert any("--clock-skew" in note for note in chosen.notes) is is_said


CHALLENGING = {"evidence": "jwt-svid", "spire_trust_domain": "example.org", "spire_workload_api": "unix:/run/a.sock"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"evidence": "jwt-svid"},
            (
                "flag --evidence: jwt-svid needs --spire-trust-domain",
                "flag --evidence: jwt-svid needs keys from --bundle-endpoint or --spire-workload-api",
            ),
        ),
        (
            {**CHALLENGING, "kubeconfig": "FILE"},
            ("flag --evidence: jwt-svid in a cluster needs a key that all replicas share, by --nonce-key",),
        ),
        (
            {
                "evidence": "jwt-svid",
                "spire_trust_domain": "example.org",
                "bundle_endpoint": "https://spire",
                "bundle_endpoint_profile": "https_spiffe",
            },
            (
                "flag --bundle-endpoint-profile: an SVID is verified with its roots; name them by --bundle-endpoint-ca "
                "or their source by --spire-workload-api",
            ),
        ),
    ],
    ids=["alone", "in a cluster", "an SVID without roots"],
)
def test_what_challenging_nodes_takes(flags: dict[str, str], expected: tuple[str, ...], there: Path) -> None:
    assert mistakes({name: str(there) if text == "FILE" else text for name, text in flags.items()}) == expected


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"kubeconfig": "FILE", "ledger": "memory"},
        {"kubeconfig": "FILE", "nonce_key": "FILE"},
        {"bundle_endpoint": "https://spire", "bundle_endpoint_profile": "https_spiffe"},
    ],
    ids=["embedded", "for development", "in a cluster", "roots from the agent"],
)
def test_what_challenging_nodes_does_not_take(more: dict[str, str], there: Path) -> None:
    flags = {**CHALLENGING, **more}
    assert settings.load({n: str(there) if text == "FILE" else text for n, text in flags.items()}, {}).notes == ()


@pytest.mark.parametrize("url", ["http://spire", "spire", "https://u:p@spire", "https://"])
def test_keys_come_over_https_alone(url: str) -> None:
    (mistake,) = mistakes({"bundle_endpoint": url})
    assert mistake.startswith("flag --bundle-endpoint: ")


def test_an_id_of_evidence_that_could_be_read_two_ways_is_refused() -> None:
    (mistake,) = mistakes({"evidence_id": "spiffe://a/{node}.{hash}"})
    assert "{node} and {hash} must be in separate path segments" in mistake


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param({"in_cluster": "true"}, "wardens", id="a Pod's own"),
        pytest.param({"in_cluster": "true", "lease_namespace": "others"}, "others", id="what is said"),
        pytest.param({"kubernetes_url": "https://a"}, "default", id="no Pod"),
    ],
)
def test_the_lease_is_in_a_pods_own_namespace(flags: dict[str, str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("wardens")
    if "kubernetes_url" in flags:
        for name in ("access_token", "ca_certificate"):
            (tmp_path / name).write_text("")
            flags = {**flags, name: str(tmp_path / name)}
    assert settings.load(flags, {}, service_account=tmp_path).lease_namespace == expected


def test_where_no_namespace_is_mounted_it_is_the_default_one(tmp_path: Path) -> None:
    assert settings.load({"in_cluster": "true"}, {}, service_account=tmp_path).lease_namespace == "default"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, "gpuwarden"),
        ({"in_cluster": "true"}, "default"),
        ({"lease_namespace": "wardens"}, "wardens"),
        ({"in_cluster": "true", "lease_namespace": "wardens"}, "wardens"),
    ],
    ids=["outside", "in-a-pod", "outside-and-named", "in-a-pod-and-named"],
)
def test_own_namespace_is_that_of_the_leases_where_it_is_known(
    flags: dict[str, str], expected: str, tmp_path: Path
) -> None:
    assert settings.load(flags, {}, service_account=tmp_path).own_namespace == expected
