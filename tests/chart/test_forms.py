"""The schema accepts everything that the commands accept, and refuses what they certainly refuse."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.chart_values import OWN_EXPORT_SETTINGS, OWN_SETTINGS, Value, values
from tests.chart.rendering import Raw, helm_template, one, pods, refusal, rendered
from tests.chart.test_values import PEM
from webhook import cli
from webhook.export import kinds as export_kinds
from webhook.export import settings as export_settings
from webhook.runtime import setting_kinds as kinds
from webhook.runtime.setting_kinds import SettingKind
from webhook.runtime.setting_schemas import Schema
from webhook.runtime.settings import EVIDENCE, SETTINGS, Settings, in_effect, load

SAID = [one for one in values() if one.is_setting and one.shown]


def shown(one: Value) -> Any:
    """The commented settings of values.yaml, uncommented."""
    return yaml.safe_load(f"it: {one.shown}")["it"]


def loaded(values: Raw, tmp_path: Path) -> dict[str, Settings | export_settings.ExportSettings]:
    """By component, the settings that its process reads from the rendered arguments and files."""
    found = rendered(values)
    for name in ("tls/tls.crt", "tls/tls.key", "ca/ca.crt", "nonce/nonce.key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PEM)
    for folder, config in {"settings": "gpuwarden-settings", "export": "gpuwarden-export-settings"}.items():
        (tmp_path / folder).mkdir()
        for key, text in one(found, "ConfigMap", config)["data"].items():
            (tmp_path / folder / key).write_text(text.replace("/etc/gpuwarden", str(tmp_path)))
    chosen: dict[str, Settings | export_settings.ExportSettings] = {}
    for component, pod in pods(found):
        (container,) = pod["spec"]["containers"]
        args = [each.replace("/etc/gpuwarden", str(tmp_path)) for each in container["args"] if each.startswith("--")]
        flags = {name.replace("-", "_"): value for name, value in (arg[2:].split("=", 1) for arg in args)}
        environ = {each["name"]: "node-a" for each in container.get("env", ())}
        chosen[component] = (export_settings.load if component == "export" else load)(flags, environ)
    return chosen


ALL: Raw = {"score.enabled": True, "export.enabled": True, "export.settings.clusterName": "prod"}


def test_setting_every_shown_default_changes_nothing(tmp_path: Path) -> None:
    for name in ("said", "unsaid"):
        (tmp_path / name).mkdir()
    found = loaded({**ALL, **{one.path: shown(one) for one in SAID}}, tmp_path / "said")
    unsaid = loaded(ALL, tmp_path / "unsaid")
    assert found.keys() == {"serve", "reconcile", "score", "export", "certs"}
    said = {one.path for one in SAID}
    serve, before = found["serve"], unsaid["serve"]
    assert isinstance(serve, Settings)
    assert isinstance(before, Settings)
    assert serve.keeps_in_cluster
    for each in SETTINGS:
        if f"settings.{each.key}" in said:
            assert in_effect(serve, each.name) == in_effect(before, each.name), each.name
    export = found["export"]
    assert isinstance(export, export_settings.ExportSettings)
    for each in export_settings.TABLE:
        if f"export.settings.{each.key}" in said:
            chosen = export.stores[each.name] if each.name in export.stores else getattr(export, each.name)
            assert chosen == each.default, each.name


NUMBERS: Raw = {
    "settings.certsLeafLife": 7776000,
    "settings.certsRenewBefore": 1296000,
    "settings.certsCaLife": 31536000,
    "settings.certsSettle": 604800,
    "settings.pendingPerNamespace": 9999999,
    "settings.pendingShare": 100,
    "settings.pendingDeadline": 604800,
    "settings.clockSkew": 0.25,
    "settings.tenantPriorities": {"a": 100},
    "export.settings.burst": 9999999,
    "export.settings.qps": 999999,
    "export.settings.clusterName": 1234567,
}


def test_number_of_seven_digits_is_not_rendered_with_exponent(tmp_path: Path) -> None:
    found = loaded({**ALL, **NUMBERS}, tmp_path)
    for component in ("serve", "reconcile", "certs"):
        chosen = found[component]
        assert isinstance(chosen, Settings)
        assert chosen.certs_leaf_life.total_seconds() == 7776000, component
        assert chosen.certs_ca_life.total_seconds() == 31536000, component
    assert isinstance(found["serve"], Settings)
    assert (found["serve"].pending_per_namespace, found["serve"].clock_skew.total_seconds()) == (9999999, 0.25)
    assert isinstance(found["export"], export_settings.ExportSettings)
    assert (found["export"].burst, found["export"].qps) == (9999999, 999999)
    assert found["export"].cluster_name == "1234567"


@pytest.mark.parametrize("said", [True, False, "true", "no"])
def test_switch_of_gpuid_may_be_a_boolean_or_a_word(said: object, tmp_path: Path) -> None:
    found = loaded({**ALL, "export.settings.postgresAutoMigrate": said}, tmp_path)["export"]
    assert isinstance(found, export_settings.ExportSettings)
    assert found.stores["postgres_auto_migrate"] is (said in (True, "true"))


# Good and bad values by kind.
SAMPLES: dict[str, tuple[SettingKind[Any], list[str], list[str]]] = {
    "duration": (kinds.DURATION, ["90s", "5m", "0", "1.5h", "500ms", "168h", "604800"], ["banana", "-1s", "1d", ""]),
    "interval": (kinds.INTERVAL, ["90s", "5m", "7"], ["banana", "5 m", "1h30m", "1000h"]),
    "lifetime": (kinds.LIFETIME, ["2160h", "87600h", "7776000", "1.5m"], ["90d", "a year", "9999999h"]),
    "namespace": (kinds.NAMESPACE, ["a", "a-b", "a" * 63], ["A", "a.b", "-a", "a" * 64, ""]),
    "name": (kinds.NAME, ["nvidia", "a.b-c"], ["Nvidia", "a_b", ""]),
    "names": (kinds.OBJECT_NAMES, ["a", "a, b.c"], ["a b", "a,,b", ""]),
    "hosts": (kinds.HOSTS, ["a.example.org,10.0.0.1,::1"], ["a b", "http://x", ""]),
    "attestors": (kinds.ATTESTORS, ["x509pop,tpm_devid"], ["x509pop tpm", ""]),
    "users": (kinds.USERS, ["system:serviceaccount:a:b, c"], ["a b", ","]),
    "audience": (kinds.AUDIENCE, ["gpuwarden", "https://x/-"], ["a b", "a,b", ""]),
    "evidence": (EVIDENCE, ["static", "spire-server, jwt-svid"], ["tpm", "static,", "static tpm"]),
    "url": (kinds.URL, ["http://a:8080", "HTTPS://a/b", "http://[::1]:1/x"], ["a:8080", "ftp://a", "http://a b", ""]),
    "endpoint": (export_kinds.ENDPOINT, ["https://a/b?c=d"], ["ftp://a", "https://a#b", "http://a b", ""]),
    "https": (kinds.HTTPS_URL, ["https://a/b"], ["http://a", "https://a?b"]),
    "annotation": (kinds.ANNOTATION_KEY, ["a.b/c_D", "plain"], ["a/b/c", "/a", "a b", ""]),
    "resource": (kinds.RESOURCE, ["nvidia.com/gpu", "a.b/mig-1g.5gb"], ["gpu", "cpu", "a/", "A/b"]),
    "socket": (kinds.SOCKET, ["unix:/a/b", "unix:///a", "unix:a"], ["/a/b", "unix:", "unix://a", "tcp:1"]),
    "server": (kinds.SERVER, ["a:8081", "[::1]:1", "unix:/a"], ["a", "a:port", ""]),
    "domain": (kinds.TRUST_DOMAIN_NAME, ["example.org", "a_b"], ["Example.org", "spiffe://a", "a/b", ""]),
    "id": (kinds.SPIFFE_ID, ["spiffe://a/b/c"], ["a/b", "spiffe://A/b", "spiffe://a/b/"]),
    "node": (kinds.NODE_NAMING, ["x509pop:san:node", "spiffe://a/spire/agent/x/{node}/{hash}"], ["node", "x 5:a"]),
    "hash": (kinds.HASH_NAMING, ["x509pop:san:h", "spiffe://a/spire/agent/x/{node}/{hash}"], ["hash"]),
    "evidence-id": (kinds.EVIDENCE_ID, ["spiffe://{trust_domain}/n/{node}/{hash}"], ["spiffe://a/{node}", "{node}"]),
    "hashes": (kinds.HASHES, ['{"a": "b"}', "{}"], ["a", "[]"]),
    "scores": (kinds.SCORES, ['{"a": 50}'], ["a", "[]"]),
    "buckets": (kinds.BUCKETS, ['[{"minScore": 1, "priorityClassName": "a"}]'], ["a", "{}"]),
    "go-duration": (export_kinds.GO_DURATION, ["0", "1m30s", "1.5h", ".5s", "10µs"], ["banana", "90", "1d", ""]),
    "go-interval": (export_kinds.GO_INTERVAL, ["90s", "500ms"], ["90", "5 m"]),
    "patience": (export_kinds.PATIENCE, ["30s", "1m30s"], ["30", "later"]),
    "selector": (
        export_kinds.SELECTOR,
        ["", "app=nvidia-device-plugin-daemonset", "a=b,!c,d in (e,f), g!=h", "a.b/c"],
        ["a=b,", "a b", "a in b", "=a"],
    ),
    "words": (export_kinds.WORDS, ["prod", "two words"], ["", " "]),
    "container": (export_kinds.CONTAINER, ["", "a-b"], ["A", "a.b"]),
    "exporters": (export_settings.EXPORTER_LIST, ["stdout", "s3, http"], ["kafka", "stdout,", ""]),
    "partition": (export_kinds.PARTITION_PATTERN, ["", "y=%Y/m=%m", "%y"], ["a\\b", "a\nb"]),
}
# Kinds that accept every text, or are numbers.
OTHERS = {
    *(
        kinds.BOOLEAN,
        kinds.PORT,
        kinds.COUNT,
        kinds.PERCENT,
        export_kinds.WORKERS,
        export_kinds.BURST,
        export_kinds.RATE,
    ),
    *(export_kinds.STORE_PORT, export_kinds.LENIENT_LOG_LEVEL, export_kinds.ROOT_CERTIFICATES, export_kinds.TEXT),
    export_kinds.MIGRATE,
}


def fits(form: Schema, text: str) -> bool:
    return re.search(form["pattern"], text) is not None


@pytest.mark.parametrize("name", SAMPLES)
def test_schema_accepts_what_the_command_accepts(name: str) -> None:
    kind, good, bad = SAMPLES[name]
    assert kind.schema is not None
    form = kind.schema
    for text in good:
        kind.read(text)
        assert fits(form, text), text
    for text in bad:
        with pytest.raises(ValueError, match=r"\w"):
            kind.read(text)
        assert not fits(form, text), text


def test_every_kind_of_the_charts_settings_has_samples() -> None:
    tables = ((SETTINGS, OWN_SETTINGS), (export_settings.TABLE, OWN_EXPORT_SETTINGS))
    of_chart = {each.kind for table, own in tables for each in table if each.name not in own and each.in_file}
    assert {kind for kind in of_chart if "enum" not in (kind.schema or {})} <= {
        kind for kind, _, _ in SAMPLES.values()
    } | OTHERS


@pytest.mark.parametrize("kind", [kinds.LEDGER, kinds.LOG_LEVEL, export_kinds.SSL_MODE])
def test_schema_of_a_choice_lists_what_the_command_accepts(kind: SettingKind[str]) -> None:
    assert kind.schema == {"type": "string", "enum": kind.allowed.split(", ")}
    assert [kind.read(word) for word in kind.schema["enum"]] == kind.schema["enum"]


# With helm itself, because its regular expressions are Go's.
BAD: Raw = {
    "settings.pendingDeadline": "banana",
    "settings.evidence": "tpm",
    "settings.gpuResource": "gpu",
    "settings.spireNodeSelector": "node",
    "settings.scorer": "scheduler-agent:8080",
    "settings.priorityBuckets": [{"minScore": 101, "priorityClassName": "a"}],
    "settings.tenantPriorities": {"a": "high"},
    "settings.nodeHashMap": {"a": ""},
    "scheduler.name": "Gpu",
    "settings.certsLeafLife": "a year",
    "export.settings.labelSelector": "app nvidia",
    "export.settings.timeout": "30",
    "export.settings.exporterType": ["kafka"],
    "export.settings.workers": 0,
}


def test_helm_names_all_bad_values_at_once() -> None:
    said = refusal(BAD)
    assert [path for path in BAD if f" {path}" not in said] == []


def test_helm_accepts_good_values() -> None:
    forms = {
        "scheduler.name": "a.b-c",
        "settings.spireHashSelector": "spiffe://{trust_domain}/spire/agent/x/{node}/{hash}",
    }
    done = helm_template({**ALL, **forms, "export.settings.labelSelector": "a=b,!c,d in (e,f), g!=h"})
    assert done.returncode == 0, done.stderr


EVERYTHING: Raw = {
    **ALL,
    "attest.enabled": True,
    "attest.runtimeSocket": "/run/containerd/containerd.sock",
    "attest.kubeletPlugins": "/var/lib/kubelet",
    "attest.cdiDirectory": "/var/run/cdi",
    "settings.evidence": "jwt-svid",
    "settings.spireTrustDomain": "example.org",
    "settings.spireWorkloadApi": "unix:/spiffe-workload-api/agent.sock",
    "settings.evidenceId": "spiffe://{trust_domain}/n/{node}/{hash}",
    "settings.logLevel": "debug",
    "settings.nodeHashMap": {"a": "b"},
    "settings.tenantPriorities": {"a": 1},
    "extender.plainPort": 8889,
    "inventory": {"nodes": []},
    **{one.path: shown(one) for one in SAID if one.path.startswith("settings.certs")},
}


def test_each_component_passes_only_flags_that_its_command_takes() -> None:
    found = dict(pods(rendered(EVERYTHING)))
    assert found.keys() == {"serve", "reconcile", "score", "export", "certs", "attest"}
    for component, pod in found.items():
        (container,) = pod["spec"]["containers"]
        args, rest = cli.make_parser().parse_known_args(container["args"])
        assert (args.parser.command.split()[0], rest) == (component, [])
