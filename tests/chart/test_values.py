"""Every value is documented, has a schema and changes the rendering. Moved values of older charts are refused with the
new name."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import yaml

from scripts.chart_values import CHART, MOVED, Value, values
from tests.chart.rendering import Raw, helm_template, pods, refusal, rendered, settings_of
from webhook.runtime.setting_schemas import Schema

VALUES = values()
COMPONENTS = ("serve", "reconcile", "attest", "score", "export", "certs")
# Values that every component has, tested for all components at once.
PARTS = (
    *("resources", "serviceAccountName", "priorityClassName", "podAnnotations", "podLabels", "nodeSelector"),
    *("tolerations", "affinity", "env", "volumes", "volumeMounts"),
)
OF_COMPONENTS = {f"{component}.{part}" for component in COMPONENTS for part in PARTS}
OWN = [one for one in VALUES if not one.is_setting and one.path not in OF_COMPONENTS]
SETTINGS = [one for one in VALUES if one.is_setting]
BY_PATH = {one.path: one for one in VALUES}
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"

# Values that another value needs to have an effect.
CHALLENGES = {
    "settings.evidence": "jwt-svid",
    "settings.spireTrustDomain": "example.org",
    "settings.spireWorkloadApi": "unix:/spiffe-workload-api/spire-agent.sock",
}
# The kubelet's plugin, with evidence that nodes do not push.
PLUGIN_ALONE = {
    "settings.evidence": "spire-server",
    "settings.spireServer": "spire-server.spire.svc:8081",
    "settings.spireTrustDomain": "example.org",
    "settings.spireWorkloadApi": "unix:/spiffe-workload-api/spire-agent.sock",
    "attest.enabled": True,
    "attest.kubeletPlugins": "/var/lib/kubelet",
}
EXISTING = {"tls.mode": "existingSecret", "tls.existingSecret": "ours", "tls.caBundle": PEM}
GIVEN: dict[str, Raw] = {
    "attest.": {"attest.enabled": True, **CHALLENGES},
    "attest.cdiDirectory": PLUGIN_ALONE,
    "attest.podResourcesDirectory": {
        "attest.enabled": True,
        **CHALLENGES,
        "attest.runtimeSocket": "/run/crio/crio.sock",
    },
    "attest.enabled": CHALLENGES,
    "spire.": {"attest.enabled": True, **CHALLENGES},
    "spire.mountPath": {**CHALLENGES, "settings.spireWorkloadApi": "unix:/x/y/agent.sock", "spire.mountPath": "/x"},
    "nonceKey.": {**CHALLENGES, "nonceKey.existingSecret": "theirs"},
    "nonceKey.existingSecret": CHALLENGES,
    "scheduler.": {"scheduler.enabled": True},
    "scheduler.enabled": {},
    "score.": {"score.enabled": True},
    "score.enabled": {},
    "export.": {"export.enabled": True, "export.settings.clusterName": "prod"},
    "export.enabled": {"export.settings.clusterName": "prod"},
    "export.outbox": {"export.enabled": True, "export.settings.clusterName": "prod", "export.replicas": 1},
    "service.": {},
    "webhooks.": {},
    "extender.": {"extender.enabled": True},
    "dra.": {"settings.proofDevices": True},
    "extender.enabled": {},
    "tls.existingSecret": EXISTING,
    "tls.caBundle": EXISTING,
    "tls.certManager": {"tls.mode": "certManager"},
    "tls.certManager.issuer.kind": {"tls.mode": "certManager", "tls.certManager.issuer.name": "theirs"},
    "tls.duration": {"tls.mode": "certManager"},
    "tls.renewBefore": {"tls.mode": "certManager"},
    "networkPolicy.": {"networkPolicy.enabled": True},
    "networkPolicy.enabled": {},
    "serviceMonitor.": {"serviceMonitor.enabled": True},
    "serviceMonitor.enabled": {},
    "prometheusRule.": {"prometheusRule.enabled": True},
    "prometheusRule.enabled": {},
    "dashboard.": {"dashboard.enabled": True},
    "dashboard.enabled": {},
    "priorityClasses.classes": {"priorityClasses.create": True},
    "serve.enabled": {"webhooks.enabled": False},
    "reconcile.enabled": {"serve.enabled": False, "webhooks.enabled": False},
}
# Values other than the default, chosen by hand.
CHOSEN: Raw = {
    "attest.cdiDirectory": "/var/run/cdi",
    "attest.runtimeSocket": "/run/crio/crio.sock",
    "attest.kubeletPlugins": "/var/lib/kubelet",
    "image.digest": "sha256:" + "a" * 64,
    "scheduler.image.digest": "sha256:" + "b" * 64,
    "tls.mode": "certManager",
    "policies.hostPaths": ["/data"],
    "dra.deviceClasses": ["nic.example.org"],
    "policies.strip": "false",
    "policies.blind": "webhook",
    "priorityClasses.classes": {"mine": 7},
    "spire.mountPath": "/x/y",
    "tls.caBundle": PEM.replace("MIIB", "MIIC"),
    "inventory": {"nodes": [{"name": "node-a", "devices": [{"uuid": "GPU-1"}]}]},
    "podDisruptionBudget.maxUnavailable": "25%",
    "networkPolicy.scrapers": [{"podSelector": {}}],
    "networkPolicy.extraEgress": [{"ports": [{"port": 5432}]}],
    "extender.plainPort": 8000,
    "export.outbox": {"persistentVolumeClaim": {"claimName": "outbox"}},
    "podSecurityContext": {"runAsUser": 7},
    "securityContext": {"privileged": False},
}
LISTS: Raw = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
    "env": [{"name": "A", "value": "b"}],
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
}
OBJECTS: Raw = {
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "resources": {"requests": {"cpu": "7m"}},
}


def given(path: str) -> Raw:
    """The entry with the longest matching prefix."""
    fitting = [start for start in GIVEN if path.startswith(start)]
    return GIVEN[max(fitting, key=len)] if fitting else {}


def another(one: Value) -> Any:
    """An allowed value other than the default."""
    if one.path in CHOSEN:
        return CHOSEN[one.path]
    last = one.path.rpartition(".")[2]
    if last in LISTS or last in OBJECTS:
        return {**LISTS, **OBJECTS}[last]
    return another_of(one.form, one.default)


def another_of(form: Schema, default: Any) -> Any:
    match form:
        case {"enum": [*words]}:
            return next(word for word in words if word != default)
        case {"pattern": str(pattern)} if "BEGIN" in pattern:
            return PEM
        case {"pattern": str(pattern)} if "h|m|s" in pattern:
            return "77h"
        case {"type": "boolean"}:
            return not default
        case {"type": "integer"}:
            return default + 1
        case {"type": "string"}:
            return f"{default}77" if default else "example77"
        case {"type": "object", "additionalProperties": {"type": "string"}}:
            return {"example.org/seven": "77"}
        case {"type": "array", "items": {"type": "string"}}:
            return ["10.7.0.0/16"]
        case {"type": "array", "items": {"type": "integer"}}:
            return [7777]
        case _:
            raise AssertionError(f"say in CHOSEN what else it could be: {form}")


MADE_KEY = re.compile(r"^  nonce.key: \S+$", re.MULTILINE)


def outcome(values: Raw) -> tuple[int, str]:
    """The rendering or the error. Random keys are replaced, so that they are no difference."""
    done = helm_template(values)
    return done.returncode, MADE_KEY.sub("  nonce.key: made", done.stdout) or done.stderr


@cache
def known_outcome(values: str) -> tuple[int, str]:
    return outcome(json.loads(values))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[tuple[int, str]]]:
    """For each value the rendering without and with it; two run at a time."""

    def both(one: Value) -> list[tuple[int, str]]:
        beside = given(one.path)
        return [known_outcome(json.dumps(beside, sort_keys=True)), outcome({**beside, one.path: another(one)})]

    with ThreadPoolExecutor(2) as pool:
        return dict(zip((one.path for one in OWN), pool.map(both, OWN), strict=True))


# It lets a new installation begin, and changes nothing (test_refusals.py).
ONLY_ALLOWS = ("webhooks.acceptUnverifiedCallers",)


@pytest.mark.defect("binder-18")
@pytest.mark.defect("scoring-12")
@pytest.mark.parametrize("path", [one.path for one in OWN if one.path not in ONLY_ALLOWS])
def test_every_value_changes_what_is_rendered(outcomes: dict[str, list[tuple[int, str]]], path: str) -> None:
    without, with_it = outcomes[path]
    assert (without[0], with_it[0]) == (0, 0), (without[1][:500], with_it[1][:500])
    assert without != with_it


EVERYTHING: Raw = {
    **CHALLENGES,
    "nonceKey.existingSecret": "nonce",
    "export.settings.clusterName": "prod",
    **{f"{component}.enabled": True for component in COMPONENTS if component != "certs"},
}


@pytest.mark.defect("binder-18")
@pytest.mark.parametrize("part", PARTS)
def test_every_component_has_its_own_value(part: str) -> None:
    others = {f"{component}.{part}": another(BY_PATH[f"{component}.{part}"]) for component in COMPONENTS}
    before, after = dict(pods(rendered(EVERYTHING))), dict(pods(rendered({**EVERYTHING, **others})))
    assert before.keys() == after.keys() == {*COMPONENTS}
    assert [component for component in COMPONENTS if before[component] == after[component]] == []


def test_component_values_do_not_affect_other_components() -> None:
    before, after = (
        dict(pods(rendered(EVERYTHING))),
        dict(pods(rendered({**EVERYTHING, "score.podLabels": {"a": "b"}}))),
    )
    assert [component for component in COMPONENTS if before[component] != after[component]] == ["score"]


@pytest.mark.parametrize("prefix", ["settings", "export.settings"])
def test_every_setting_reaches_the_processes(prefix: str) -> None:
    said = {one.path: setting_of(one) for one in SETTINGS if one.path.startswith(f"{prefix}.")}
    beside = BESIDE[prefix]
    name = "gpuwarden-settings" if prefix == "settings" else "gpuwarden-export-settings"
    found = settings_of(rendered({**said, **beside}), name)
    for path, value in {**said, **beside}.items():
        if path.startswith(prefix):
            assert found[path.removeprefix(f"{prefix}.")] == value, path


# Values that can be set together.
BESIDE: dict[str, Raw] = {
    "settings": {
        "settings.ledger": "cluster",
        "settings.spireWorkloadApi": "unix:/spiffe-workload-api/agent.sock",
        "settings.challengeAtBind": False,  # only with native pods
        "settings.certsLeafLife": "78s",
        "settings.certsCaLife": "777s",
        "settings.injection": "dra",
        "settings.mapVisible": "uuid",
    },
    "export.settings": {
        "export.enabled": True,
        "export.settings.exporterType": ["stdout", "s3"],
        "export.settings.leaseDuration": "79s",
        "export.settings.leaseRenewDeadline": "78s",
    },
}


# A text of each kind.
TEXTS = (
    *(
        "example77",
        "77s",
        "static",
        "stdout",
        "example.org/77",
        "https://example.org/77",
        "unix:/77",
        "spiffe://example.org/77",
    ),
    *("example.org:77", "spiffe://{trust_domain}/x/{node}/{hash}"),
)


def setting_of(one: Value) -> Any:
    match one.form:
        case {"enum": [*words]}:
            return next(word for word in words if word != one.shown)
        case {"type": "boolean"} | {"type": ["boolean", _]}:
            return one.shown != "true"
        case {"type": "integer"} | {"type": "number"}:
            return 77
        case {"type": ["object", _], "additionalProperties": {"type": kind}}:
            return {"a": 77 if kind == "number" else "b"}
        case {"items": {"properties": _}}:
            return [{"minScore": 7, "priorityClassName": "example77"}]
        case {"items": {"pattern": str(pattern)}}:
            return [next(text for text in TEXTS if re.search(pattern, text))]
        case {"pattern": str(pattern)}:
            return next(text for text in TEXTS if re.search(pattern, text))
        case _:
            return "example77"


# The schema and the docs.


def every_place(schema: Schema, above: str = "") -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, below in schema["properties"].items():
        path = f"{above}{name}"
        found |= every_place(below, f"{path}.") if "properties" in below else {path: below}
    return found


def test_the_schema_has_every_value_and_nothing_else() -> None:
    places = every_place(json.loads((CHART / "values.schema.json").read_text()))
    assert places.keys() == {*BY_PATH, *(one.path for one in MOVED), "global"}
    assert all(place.get("description") for path, place in places.items() if path != "global")


def test_the_defaults_are_those_of_the_schema() -> None:
    content = yaml.safe_load((CHART / "values.yaml").read_text())
    places = every_place(json.loads((CHART / "values.schema.json").read_text()))
    for path, place in places.items():
        if "default" in place:
            below = content
            for name in path.split("."):
                below = below[name]
            assert below == place["default"], path


def test_unknown_value_is_refused() -> None:
    assert "replicaz" in refusal({"serve.replicaz": 3})
    assert "hotst" in refusal({"settings.hotst": "x"})


@pytest.mark.parametrize("one", MOVED, ids=lambda one: one.path)
def test_value_of_an_older_chart_is_refused_with_its_new_name(one: Any) -> None:
    assert f"{one.sentence}." in refusal({one.path: True})


def test_new_names_of_moved_values_exist() -> None:
    """Except entries that say there is no new name."""
    for one in MOVED:
        for word in one.sentence.replace(",", " ").replace(":", " ").replace("(", " ").split():
            name = word.partition("=")[0].rstrip(".;)")
            if (
                name.partition(".")[0] in {"serve", "settings", "tls", "webhooks", "reconcile", "scheduler"}
                and "." in name
                and "/" not in name
            ):
                assert name in BY_PATH or name == one.path, one.sentence


# The values documented by the two older charts, including those without effect there.
GPU_SCHEDULER = (
    *("replicaCount", "image.repository", "image.tag", "image.pullPolicy", "imagePullSecrets", "nameOverride"),
    *("fullnameOverride", "scheduler.name", "webhook.enabled", "webhook.caBundle", "webhook.failurePolicy"),
    *("serviceAccount.create", "serviceAccount.annotations", "serviceAccount.name", "podAnnotations", "commonLabels"),
    *("podSecurityContext", "securityContext", "service.type", "service.port", "service.targetPort", "service.name"),
    *("resources", "nodeSelector", "tolerations", "affinity", "env", "volumes", "volumeMounts", "livenessProbe"),
    *("readinessProbe", "priorityClassName", "autoscaling"),
)
SCHEDULER_WEBHOOK = (
    *("replicaCount", "image.repository", "image.tag", "image.pullPolicy", "imagePullSecrets", "nameOverride"),
    *("fullnameOverride", "podAnnotations", "podLabels", "nodeSelector", "tolerations", "serviceAccount.create"),
    *("serviceAccount.automount", "serviceAccount.annotations", "serviceAccount.name", "podSecurityContext"),
    *("securityContext", "service.type", "service.port", "service.targetPort", "resources", "livenessProbe"),
    *("readinessProbe", "affinity", "webhook.schedulerUrl", "webhook.timeoutSeconds", "webhook.enableMutation"),
    *("webhook.priorityBuckets", "webhook.rules", "webhook.namespaceSelector", "webhook.failurePolicy"),
    *("webhook.sideEffects", "webhook.admissionReviewVersions", "tls.certManager.enabled"),
    *("tls.certManager.issuer.kind", "tls.certManager.issuer.name", "tls.existingSecret", "tls.duration"),
    *("tls.renewBefore", "tls.caBundle", "cert-manager"),
)


@pytest.mark.parametrize("names", [GPU_SCHEDULER, SCHEDULER_WEBHOOK], ids=["gpu-scheduler", "scheduler-webhook"])
def test_every_value_of_an_older_chart_works_or_is_refused_with_its_new_name(names: tuple[str, ...]) -> None:
    moved = {one.path for one in MOVED}
    assert [name for name in names if name not in BY_PATH and name not in moved] == []


def test_values_with_unchanged_names_have_their_old_effect() -> None:
    """With values in the older charts' form."""
    values = {
        "image.repository": "example.org/gpuwarden",
        "image.tag": "latest",
        "image.pullPolicy": "Always",
        "fullnameOverride": "gpu-scheduler",
        "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}],
        "commonLabels": {"team": "ml"},
        "tls.mode": "certManager",
        "tls.certManager.issuer.kind": "ClusterIssuer",
        "tls.certManager.issuer.name": "selfsigned-cluster-issuer",
        "tls.duration": "2160h",
        "tls.renewBefore": "360h",
    }
    found = rendered(values)
    pod = dict(pods(found))["serve"]
    (container,) = pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("example.org/gpuwarden:latest", "Always")
    assert pod["spec"]["nodeSelector"] == values["nodeSelector"]
    assert pod["spec"]["tolerations"] == values["tolerations"]
    assert pod["metadata"]["labels"]["team"] == "ml"
    (certificate,) = (each["spec"] for each in found if each["kind"] == "Certificate")
    assert certificate["issuerRef"]["name"] == "selfsigned-cluster-issuer"
    assert (certificate["duration"], certificate["renewBefore"]) == ("2160h", "360h")
