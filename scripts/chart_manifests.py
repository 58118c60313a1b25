"""`make chart` generates the templates of CRDs, webhook configurations, policies and roles from the shipped manifests,
and copies alerts and the dashboard. A test compares them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from attrs import evolve

from scripts.chart_dashboard import dashboard
from scripts.chart_values import CHART, ROOT
from webhook.core.host_paths import PROTECTED_PATHS, WRITABLE
from webhook.kube.install import crds
from webhook.kube.install.policies import (
    DEBUGGING,
    REVIEWED,
    Blinds,
    DraGuard,
    Installation,
    Manifest,
    certs,
    dra,
    export,
    is_guard,
    kueue,
    native,
    policies,
    rbac,
    score,
    webhooks,
    while_down,
)

GENERATED: Final = CHART / "templates/generated"
HEAD: Final = "{{- /* Written by `make chart`. */ -}}\n"
HEAD_OF_FILE: Final = "# Written by `make chart`.\n"

# Placeholder names in the manifests, and the template expressions that replace them.
NAMESPACE: Final = "xx-namespace"
SERVICE: Final = "xx-service"
PORT: Final = 64999
OPT_IN: Final = "xx-opt-in"
HASH_ALIAS: Final = "xx-hash-alias"
SCHEDULER: Final = "xx-scheduler"
RESOURCE: Final = "xx-resource"
GPU_NAMESPACE: Final = "xx-gpu-namespace"
ACCOUNT: Final = "xx-account-{}"
KEPT_IN: Final = "gpuwarden-certs"
EXCLUDED: Final = "xx-excluded"
BUNDLE: Final = b"xx"
LABELS: Final = "xx-labels"
NOTES: Final = "xx-notes"
FAILURE_POLICY: Final = "xx-failure-policy"
PATIENCE: Final = 64998
MAX_GRACE: Final = 64997
HOST_PATH: Final = "/xx-host-path"
GPU_DRIVER: Final = "xx-gpu-driver"
DEVICE_CLASS: Final = "xx-device-class"
# Whether webhooks review pods, and whether there are proof devices.
REVIEWS: Final = '(include "gpuwarden.reviews" .)'
PROOFS: Final = '(include "gpuwarden.proofs" .)'
ALL_ONLY, ALL_NOT, ALL_END = "xx-asked-about-all", "xx-asked-about-some", "xx-asked-end"


def account_name(component: str) -> str:
    return f'{{{{ include "gpuwarden.account" (list . "{component}") }}}}'


SAID: Final[Mapping[str, str]] = {
    NAMESPACE: "{{ .Release.Namespace }}",
    SERVICE: '{{ include "gpuwarden.fullname" . }}',
    str(PORT): "{{ .Values.service.port }}",
    OPT_IN: "{{ .Values.webhooks.optInLabel }}",
    f", '{HASH_ALIAS}'": "{{ with .Values.settings.requiredHashAlias }}, '{{ . }}'{{ end }}",
    # YAML doubles the quotes of a text that it quotes.
    f", ''{HASH_ALIAS}''": "{{ with .Values.settings.requiredHashAlias }}, ''{{ . }}''{{ end }}",
    f"'{SCHEDULER}'": '{{ include "gpuwarden.schedulers" . }}',
    f"'{HOST_PATH}'": "{{ range $i, $path := .Values.policies.hostPaths }}{{ if $i }}, {{ end }}'{{ $path }}'{{ end }}",
    f", '{DEVICE_CLASS}'": "{{ range .Values.dra.deviceClasses }}, '{{ . }}'{{ end }}",
    GPU_DRIVER: '{{ default "gpu.nvidia.com" .Values.settings.gpuDriver }}',
    RESOURCE: '{{ default "nvidia.com/gpu" .Values.settings.gpuResource }}',
    GPU_NAMESPACE: '{{ default "gpu-operator" .Values.export.settings.namespace }}',
    **{
        ACCOUNT.format(component): account_name(component)
        for component in ("reconcile", "scheduler", "export", "attest")
    },
    REVIEWED: "bool('{{ not .Values.native }}')",
    FAILURE_POLICY: "{{ .Values.webhooks.failurePolicy }}",
    str(PATIENCE): "{{ .Values.webhooks.timeoutSeconds }}",
    str(MAX_GRACE): '{{ include "gpuwarden.seconds" (default "3600s" .Values.settings.maxGrace) | float64 | int }}',
}
# Quoted where a value is only the name: YAML reads `123` as a number and `on` as a boolean.
QUOTED: Final[Mapping[str, str]] = {
    NAMESPACE: "{{ quote .Release.Namespace }}",
    OPT_IN: "{{ quote .Values.webhooks.optInLabel }}",
    GPU_NAMESPACE: '{{ default "gpu-operator" .Values.export.settings.namespace | quote }}',
}
RELEASE: Final = Installation(
    namespace=NAMESPACE,
    service=SERVICE,
    port=PORT,
    opt_in=OPT_IN,
    hash_aliases=(HASH_ALIAS,),
    schedulers=(SCHEDULER,),
    resource=RESOURCE,
    gpu_namespace=GPU_NAMESPACE,
    reconciler=ACCOUNT.format("reconcile"),
    scheduler_account=ACCOUNT.format("scheduler"),
    exporter=ACCOUNT.format("export"),
    attester=ACCOUNT.format("attest"),
    ca_bundle=BUNDLE,
    max_grace=MAX_GRACE,
    host_paths=(HOST_PATH,),
    gpu_driver=GPU_DRIVER,
    device_classes=(DEVICE_CLASS,),
)
NATIVE_RELEASE: Final = evolve(RELEASE, native=True)
GUARDED: Final = evolve(RELEASE, dra_guard=DraGuard.ALL)
INJECTION: Final = """\
  annotations:
    admissions.enforcer/disabled: "{{ .Values.webhooks.aksAdmissionsEnforcerDisabled }}"
    {{- if eq .Values.tls.mode "certManager" }}
    cert-manager.io/inject-ca-from: "{{ .Release.Namespace }}/{{ include "gpuwarden.fullname" . }}-tls"
    {{- end }}
"""


def template(found: Iterable[Manifest]) -> str:
    """The manifests as YAML documents of a template."""
    whole = yaml.safe_dump_all(found, sort_keys=False, width=120, explicit_start=True)
    if "{{" in whole:
        raise ValueError("a manifest contains text that Helm would evaluate")
    # YAML may fold a long line before the placeholder.
    whole = re.sub(rf",\\\n *\\ '{HASH_ALIAS}'", f", '{HASH_ALIAS}'", whole)
    for token, said in QUOTED.items():
        whole = re.sub(rf"^( *(?:- |[\w-]+: |- [\w-]+: )?){token}(:.*)?$", rf"\1{said}\2", whole, flags=re.M)
    for token, said in SAID.items():
        whole = whole.replace(token, said)
    whole = re.sub(
        rf"^ *labels: {LABELS}$",
        indented("labels:\n  {{- include 'gpuwarden.labels' . | nindent 4 }}", 2),
        whole,
        flags=re.M,
    )
    whole = whole.replace("'gpuwarden.labels'", '"gpuwarden.labels"')
    whole = re.sub(rf"^ *annotations: {NOTES}\n", INJECTION, whole, flags=re.M)
    whole = re.sub(
        r"^( *)caBundle: \S+$",
        r'\1{{- with include "gpuwarden.caBundle" $ }}\n\1caBundle: {{ . }}\n\1{{- end }}',
        whole,
        flags=re.M,
    )
    return re.sub(
        rf"^( *)- {EXCLUDED}$",
        r"\1{{- range .Values.webhooks.excludedNamespaces }}\n\1- {{ quote . }}\n\1{{- end }}",
        whole,
        flags=re.M,
    )


def indented(text: str, spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in text.splitlines())


def when(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def labelled(one: Manifest, **more: Any) -> Manifest:
    meta = {"name": one["metadata"]["name"], "labels": LABELS, **more}
    rest = {key: value for key, value in one["metadata"].items() if key != "name"}
    return {**one, "metadata": {**meta, **rest}}


def with_room(tree: Any) -> Any:
    """The same, with a placeholder for more excluded namespaces."""
    match tree:
        case {"key": "kubernetes.io/metadata.name", "values": list(values), **rest}:
            return {"key": "kubernetes.io/metadata.name", **rest, "values": [*values, EXCLUDED]}
        case dict():
            return {key: with_room(value) for key, value in tree.items()}
        case list():
            return [with_room(one) for one in tree]
        case _:
            return tree


# The webhooks.


def with_choices(hook: Manifest) -> Manifest:
    """The failure policy is a value, except for other users' Bindings (always Fail) and hints (always Ignore)."""
    is_last_door = hook["name"].startswith("validate-binding.")
    is_choice = hook["failurePolicy"] == "Fail" and not is_last_door
    return {**hook, "timeoutSeconds": PATIENCE, **({"failurePolicy": FAILURE_POLICY} if is_choice else {})}


def webhooks_template() -> str:
    found = [
        {
            **labelled(one, annotations=NOTES),
            "webhooks": [with_marks(with_choices(with_room(hook))) for hook in one["webhooks"]],
        }
        for one in webhooks(RELEASE)
    ]
    stands_in = [labelled(with_room(one)) for one in while_down(RELEASE)]
    return HEAD + when(REVIEWS, template(stands_in) + asked_about_all(template(found)))


def with_marks(hook: Manifest) -> Manifest:
    """With marks where the hook differs if it matches every pod."""
    if not hook["name"].startswith("mutate."):
        return hook
    rules = [*hook["rules"], ALL_ONLY, *with_room([*DEBUGGING]), ALL_END]
    return {**hook, "rules": rules, "matchConditions": [ALL_NOT, *hook["matchConditions"], ALL_END]}


def asked_about_all(text: str) -> str:
    asks = f'eq (include "gpuwarden.blinds" .) "{Blinds.WEBHOOK}"'
    text = re.sub(rf"^( *)- {ALL_NOT}$", rf"\1{{{{- if {asks} }}}}\n\1  []\n\1{{{{- else }}}}", text, flags=re.M)
    text = re.sub(rf"^( *)- {ALL_ONLY}$", rf"\1{{{{- if {asks} }}}}", text, flags=re.M)
    return re.sub(rf"^( *)- {ALL_END}$", r"\1{{- end }}", text, flags=re.M)


# The policies.


def policies_template() -> str:
    found = [labelled(with_room(one)) for one in policies(RELEASE)]
    needed = [
        one for one in found if one["metadata"]["name"] in ("gpuwarden-bindingends", "gpuwarden-forced-deletions")
    ]
    isolate = [one for one in found if one["metadata"]["name"].startswith("gpuwarden-isolation")]
    blind = [one for one in found if one["metadata"]["name"].startswith("gpuwarden-blind")]
    strip = [one for one in found if one["kind"].startswith("Mutating") and one not in blind]
    protect = [one for one in found if one not in (*isolate, *blind, *strip, *needed)]
    assert all(one["kind"].startswith("Validating") for one in protect)  # noqa: S101 - another kind would be dropped
    strips = when('include "gpuwarden.strips" .', template(strip))
    blinds = when('eq (include "gpuwarden.blinds" .) "policy"', template(blind))
    isolates = when(".Values.policies.isolate", template(isolate))
    # With webhooks or proof devices, also without `policies.protect`: other policies read the ends, and kube-scheduler
    # or the kubelet gives away the GPUs of pods that are gone.
    guards_needed = when(f"or .Values.policies.protect .Values.webhooks.enabled {PROOFS}", template(needed))
    natives = when(".Values.native", template(labelled(with_room(one)) for one in native(NATIVE_RELEASE)))
    parts = (when(".Values.policies.protect", template(protect)), guards_needed, isolates, strips, blinds, natives)
    return HEAD + "".join(parts)


# The class of proof devices and its policies.


def dra_template() -> str:
    opted_in, everywhere = ([labelled(with_room(one)) for one in dra(release)] for release in (RELEASE, GUARDED))
    common = [one for one in opted_in if not is_guard(one)]
    guards = template(one for one in opted_in if is_guard(one))
    guards_of_all = template(one for one in everywhere if is_guard(one))
    chosen = f'{{{{- if eq .Values.dra.guard "all" }}}}\n{guards_of_all}{{{{- else }}}}\n{guards}{{{{- end }}}}\n'
    wanted = f'or {PROOFS} (eq (default "nvidia" .Values.settings.injection) "dra")'
    return HEAD + when(wanted, template(common) + chosen)


# The CRDs.


def crds_template() -> str:
    """As templates, because `helm upgrade` ignores a chart's crds/. Kept on uninstall: they hold the reservations."""
    kept = {"annotations": {"helm.sh/resource-policy": "keep"}}
    found = [labelled(one, **kept) for one in crds.manifests()]
    return HEAD + when(".Values.crds.install", template(found))


# The roles.

# Roles that only some installations need: their shipped name, their name in the chart and the condition.
EXTRA_ROLES: Final = {
    "gpuwarden-extender-bind": ("extender-bind", "serve", ".Values.extender.bind"),
    "gpuwarden-kueue": ("kueue", "reconcile", "(and .Values.reconcile.enabled .Values.settings.kueue)"),
    # For other clients: not bound to any account.
    "gpuwarden-finalize": ("finalize", "serve", ".Values.serve.enabled"),
}


# Rules that only some installations need, by component, resource and verb. The shipped roles have all of them.
KEEPS: Final = '(ne (default "cluster" .Values.settings.ledger) "memory")'
CHALLENGES: Final = f'{KEEPS} (include "gpuwarden.challenges" .)'
BUNDLES: Final = f"{CHALLENGES} .Values.settings.bundleEndpoint"
AT_BIND: Final = ".Values.settings.challengeAtBind"
SOMETIMES: Final[Mapping[tuple[str, str, str], str]] = {
    **{
        ("serve", resource, verb): KEEPS
        for resource, verb in (
            *(("gpunodes", "get"), ("gpunodes/status", "update"), ("nodeevidences", "list"), ("nodes", "get")),
            *(("reservations", "manage"), ("namespaces", "get"), ("statefulsets", "list"), ("bindingends", "create")),
        )
    },
    ("serve", "nodeevidences", "get"): CHALLENGES,
    ("serve", "nodeevidences/status", "update"): CHALLENGES,
    ("serve", "trustbundles", "get"): BUNDLES,
    ("serve", "trustbundles/status", "update"): BUNDLES,
    ("serve", "priorityclasses", "list"): f'{KEEPS} (include "gpuwarden.scorer" .)',
    ("reconcile", "resourceslices", "get"): PROOFS,
    ("reconcile", "resourceclaims", "list"): PROOFS,
    ("reconcile", "resourceclaims/status", "patch"): PROOFS,
    ("reconcile", "resourceclaims/driver", "arbitrary-node:patch"): AT_BIND,
    ("reconcile", "resourceclaimtemplates", "list"): '(include "gpuwarden.templates" .)',
    ("reconcile", "pods/status", "patch"): '(eq (default "create" .Values.settings.reserve) "bind")',
    ("reconcile", "pods/eviction", "create"): (
        '(or (eq (default "report" .Values.settings.onEvidenceLost) "evict") '
        '(eq (default "report" .Values.settings.onMismatch) "evict"))'
    ),
    ("attest", "resourceslices", "list"): AT_BIND,
}
ONLY_IF, END_IF = "xx-only-if", "xx-end-if"


def component_of(account: str) -> str:
    """`gpuwarden` is `serve`, `gpuwarden-x` is x."""
    return account.removeprefix("gpuwarden").removeprefix("-") or "serve"


def role_name(component: str) -> str:
    return f'{{{{ include "gpuwarden.component" (list . "{component}") }}}}'


def enabled(component: str) -> str:
    """When a component runs, and `attest` as the kubelet's plugin: otherwise it asks the API server nothing."""
    match component:
        case "certs":
            return '(include "gpuwarden.makesCerts" .)'
        case "attest":
            return ".Values.attest.enabled .Values.attest.kubeletPlugins"
        case _:
            return f".Values.{component}.enabled"


def rbac_template() -> str:
    texts = [HEAD]
    shipped = [*rbac(RELEASE), *export(RELEASE), *certs(RELEASE), *score(RELEASE), *kueue(RELEASE)]
    for component, roles in by_component(one for one in shipped if name_of(one) not in EXTRA_ROLES).items():
        condition = f"and .Values.rbac.create {enabled(component)}"
        texts.append(when(condition, roles_text(roles, component, component)))
    example = yaml.safe_load_all((ROOT / "examples/scheduler/rbac.yaml").read_text())
    extra = [*example, *(one for one in shipped if name_of(one) in EXTRA_ROLES)]
    for name, roles in by_name(extra).items():
        called, component, condition = EXTRA_ROLES[name]
        texts.append(when(f"and .Values.rbac.create {condition}", roles_text(roles, called, component)))
    return "".join(texts)


def roles_text(roles: Iterable[Manifest], called: str, component: str) -> str:
    text = template(named(labelled(with_conditions(one, called)), called, component) for one in roles)
    text = re.sub(
        rf"^- {ONLY_IF} (\S+) (\S+)$",
        lambda found: f"{{{{- if and {SOMETIMES[called, found[1], found[2]]} }}}}",
        text,
        flags=re.M,
    ).replace(f"- {END_IF}\n", "{{- end }}\n")
    said = {
        f"xx-role-{called}": role_name(called),
        f"xx-account-{component}": account_name(component),
        KEPT_IN: '{{ include "gpuwarden.tlsSecret" . }}',
    }
    for token, name in said.items():
        text = text.replace(token, name)
    return text


def with_conditions(one: Manifest, called: str) -> Manifest:
    """With a mark before and after each conditional rule."""
    if "rules" not in one:
        return one
    rules: list[Any] = []
    for rule in one["rules"]:
        resource, verb = rule["resources"][0], rule["verbs"][0]
        is_sometimes = (called, resource, verb) in SOMETIMES
        rules += [f"{ONLY_IF} {resource} {verb}", rule, END_IF] if is_sometimes else [rule]
    return {**one, "rules": rules}


def named(one: Manifest, called: str, component: str) -> Manifest:
    """The role or binding with its name in a release. The resources in its rules keep their names."""
    meta = {**one["metadata"], "name": f"xx-role-{called}"}
    if "roleRef" not in one:
        return {**one, "metadata": meta}
    subjects = [{**subject, "name": f"xx-account-{component}", "namespace": NAMESPACE} for subject in one["subjects"]]
    return {**one, "metadata": meta, "roleRef": {**one["roleRef"], "name": f"xx-role-{called}"}, "subjects": subjects}


def name_of(one: Manifest) -> str:
    return str(one["metadata"]["name"])


def by_name(found: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    groups: dict[str, list[Manifest]] = {}
    for one in found:
        groups.setdefault(one["metadata"]["name"], []).append(one)
    return groups


def by_component(found: Iterable[Manifest]) -> dict[str, list[Manifest]]:
    """Roles and bindings. The accounts are a template of their own."""
    roles = [one for one in found if one["kind"] != "ServiceAccount"]
    return {component_of(name): group for name, group in by_name(roles).items()}


# The rest.


def alerts() -> str:
    """The rule file, which a template puts into a PrometheusRule."""
    return (ROOT / "examples/alerts/gpuwarden.rules.yaml").read_text()


def host_paths() -> str:
    """Paths that no entry of `policies.hostPaths` may equal, contain or be inside of."""
    return HEAD_OF_FILE + yaml.safe_dump({"places": [*PROTECTED_PATHS], "writable": [*WRITABLE]}, sort_keys=False)


def written() -> dict[Path, str]:
    return {
        GENERATED / "crds.yaml": crds_template(),
        GENERATED / "webhooks.yaml": webhooks_template(),
        GENERATED / "policies.yaml": policies_template(),
        GENERATED / "rbac.yaml": rbac_template(),
        GENERATED / "dra.yaml": dra_template(),
        CHART / "files/alerts.yaml": alerts(),
        CHART / "files/hostpaths.yaml": host_paths(),
        CHART / "files/dashboard.json": json.dumps(dashboard(), indent=1) + "\n",
    }
