"""Checks the manifests as text: they are complete, and their expressions cannot fail. tests/e2e shows their effect."""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.claim_samples import SAMPLES, Sample
from webhook.core import claim_keys, keys
from webhook.core.check import GPU_RESOURCES
from webhook.core.host_paths import PROTECTED_PATHS, STORAGE, WRITABLE
from webhook.core.isolation import EXEMPT, INJECTING, STRONG
from webhook.core.native import TEMPLATE_NAME
from webhook.core.pod_claims import CLAIM_NAME
from webhook.core.proof_claims import EVIDENCE_ENDS, GPU_CLAIM, template_name
from webhook.core.proof_devices import DRIVER, HASH_ATTRIBUTE
from webhook.export.labels import DOMAIN as SERIALS
from webhook.kube.install.crds import manifests as crds
from webhook.kube.install.policies import (
    DRA,
    GUARDS,
    NATIVE,
    POLICIES,
    WEBHOOKS,
    WHILE_DOWN,
    Blinds,
    DraGuard,
    Installation,
    Manifest,
    as_yaml,
    dra,
    export,
    manifests,
    policies,
    rbac,
    text,
    webhooks,
    while_down,
)

EVERYTHING = Installation(ca_bundle=b"PEM", reviews_deletes=True, reviews_bindings=True)
# Kubernetes' finalizer of claims in use.
DELETE_PROTECTION = "resource.kubernetes.io/delete-protection"
BOTH_LABELS = ["gpuwarden.io/enabled", "scheduler.radix.ai/enabled"]


def expressions(tree: Any) -> Iterator[str]:
    """Every CEL expression in a manifest."""
    match tree:
        case dict():
            yield from (one for key in ("expression", "messageExpression") if isinstance(one := tree.get(key), str))
            for member in tree.values():
                yield from expressions(member)
        case list():
            for member in tree:
                yield from expressions(member)
        case _:
            pass


def all_of(*lists: list[Manifest]) -> list[Manifest]:
    return [one for some in lists for one in some]


EVERY = all_of(manifests(*WEBHOOKS), manifests(*POLICIES), manifests(NATIVE), manifests(*WHILE_DOWN), manifests(*DRA))
EXPRESSIONS = [one for manifest in EVERY for one in expressions(manifest)]


def hooks(kind: str, installation: Installation = EVERYTHING) -> dict[str, Any]:
    manifest = next(one for one in webhooks(installation) if one["kind"] == kind)
    return {hook["name"]: hook for hook in manifest["webhooks"]}


MUTATING, VALIDATING = hooks("MutatingWebhookConfiguration"), hooks("ValidatingWebhookConfiguration")


def condition(hook: Manifest) -> str:
    return str(hook["matchConditions"][0]["expression"])


def policy(name: str) -> str:
    manifest = next(one for one in EVERY if one["metadata"]["name"] == name and one["kind"].endswith("Policy"))
    return " ".join(expressions(manifest))


def test_files_contain_the_expected_objects() -> None:
    assert [(one["kind"], one["metadata"]["name"]) for one in EVERY] == [
        ("MutatingWebhookConfiguration", "gpuwarden"),
        ("ValidatingWebhookConfiguration", "gpuwarden"),
        ("ValidatingAdmissionPolicy", "gpuwarden-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-pods"),
        ("ValidatingAdmissionPolicy", "gpuwarden-gpunodes"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-gpunodes"),
        ("ValidatingAdmissionPolicy", "gpuwarden-held-gpunodes"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-held-gpunodes"),
        ("ValidatingAdmissionPolicy", "gpuwarden-nodeevidences"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-nodeevidences"),
        ("ValidatingAdmissionPolicy", "gpuwarden-trustbundles"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-trustbundles"),
        ("ValidatingAdmissionPolicy", "gpuwarden-bindingends"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-bindingends"),
        ("ValidatingAdmissionPolicy", "gpuwarden-installation"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-installation"),
        ("ValidatingAdmissionPolicy", "gpuwarden-own-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-own-pods"),
        ("ValidatingAdmissionPolicy", "gpuwarden-own-nodes"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-own-nodes"),
        ("ValidatingAdmissionPolicy", "gpuwarden-grace"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-grace"),
        ("ValidatingAdmissionPolicy", "gpuwarden-grace-of-evictions"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-grace-of-evictions"),
        ("ValidatingAdmissionPolicy", "gpuwarden-forced-deletions"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-forced-deletions"),
        ("MutatingAdmissionPolicy", "gpuwarden-strip"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-strip"),
        ("MutatingAdmissionPolicy", "gpuwarden-blind"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-blind"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-blind-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-blinded"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-blinded"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-blinded-alias"),
        ("MutatingAdmissionPolicy", "gpuwarden-blind-debugging"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-blind-debugging"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-blind-debugging-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-isolation"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-isolation"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-isolation-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-isolation-volumes"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-isolation-volumes"),
        ("MutatingAdmissionPolicy", "gpuwarden-native"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-native"),
        ("MutatingAdmissionPolicyBinding", "gpuwarden-native-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-native-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-native-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-native-pods-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-native-updates"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-native-updates"),
        ("ValidatingAdmissionPolicy", "gpuwarden-binding-ends"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-binding-ends"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-binding-ends-alias"),
        ("DeviceClass", "attested.gpuwarden.io"),
        ("ValidatingAdmissionPolicy", "gpuwarden-proof-claims"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-proof-claims"),
        ("ValidatingAdmissionPolicy", "gpuwarden-proof-ends"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-proof-ends"),
        ("ValidatingAdmissionPolicy", "gpuwarden-own-allocations"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-own-allocations"),
        ("ValidatingAdmissionPolicy", "gpuwarden-gpu-claims"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-gpu-claims"),
        ("ValidatingAdmissionPolicy", "gpuwarden-proof-slices"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-proof-slices"),
        ("ValidatingAdmissionPolicy", "gpuwarden-device-classes"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-device-classes"),
        ("ValidatingAdmissionPolicy", "gpuwarden-claims"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claims"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claims-alias"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claims-labelled"),
        ("ValidatingAdmissionPolicy", "gpuwarden-consumers"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-consumers"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-consumers-alias"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-consumers-labelled"),
        ("ValidatingAdmissionPolicy", "gpuwarden-claiming-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claiming-pods"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claiming-pods-alias"),
        ("ValidatingAdmissionPolicy", "gpuwarden-claim-evictions"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claim-evictions"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claim-evictions-alias"),
        ("ValidatingAdmissionPolicyBinding", "gpuwarden-claim-evictions-labelled"),
    ]


# Keys.


@pytest.mark.parametrize("hook", ["mutate.gpuwarden.io", "validate.gpuwarden.io"])
@pytest.mark.parametrize(
    "word",
    sorted(
        {claim_keys.REQUIREMENT_PREFIX, claim_keys.ASSIGNER_REQUIREMENT, f"{claim_keys.ASSIGNER_REQUIREMENT}."}
        | keys.OUTPUT_NAMES
        | {
            *keys.GPU_ENV,
            keys.CUDA_VERSION,
            *GPU_RESOURCES,
            f"{keys.CDI_DOMAIN}/",
            f".{keys.CDI_DOMAIN}/",
        }  # what shows it a GPU
    ),
)
def test_every_key_that_requests_or_exposes_a_gpu_matches_the_hook(hook: str, word: str) -> None:
    assert f"'{word}'" in condition((MUTATING | VALIDATING)[hook])


@pytest.mark.parametrize("hook", ["mutate.gpuwarden.io", "validate.gpuwarden.io"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.names[0])
def test_hook_matches_the_keys_that_make_a_claim(hook: str, sample: Sample) -> None:
    annotations, labels = condition((MUTATING | VALIDATING)[hook]).split("object.metadata.?labels")
    assert [f"'{name}'" in annotations for name in sample.names] == [sample.makes_claim] * len(sample.names)
    assert (f"'{sample.names[0]}'" in labels) == (sample.makes_claim and sample.is_label)


@pytest.mark.parametrize("file", [*WEBHOOKS, *POLICIES])
def test_no_placeholder_of_claim_keys_is_left(file: str) -> None:
    assert "CLAIM_" not in text(file)


@pytest.mark.parametrize("word", sorted(keys.OUTPUT_NAMES))
def test_every_annotation_we_write_is_protected(word: str) -> None:
    assert f"'{word}'" in condition(VALIDATING["validate-update.gpuwarden.io"])
    assert f"'{word}'" in policy("gpuwarden-pods")
    assert f"'{word}'" in policy("gpuwarden-strip")


@pytest.mark.parametrize(
    "word", [*keys.GPU_ENV, keys.CUDA_VERSION, *GPU_RESOURCES, f"{keys.CDI_DOMAIN}/", f".{keys.CDI_DOMAIN}/"]
)
def test_changes_of_fields_that_expose_gpus_are_reviewed(word: str) -> None:
    found = condition(VALIDATING["validate-update.gpuwarden.io"])
    assert f"'{word}'" in found


# Operations.


def test_both_webhooks_go_by_the_same_condition() -> None:
    assert condition(MUTATING["mutate.gpuwarden.io"]) == condition(VALIDATING["validate.gpuwarden.io"])


def test_every_operation_on_pods_has_a_hook() -> None:
    operations = {
        (name.split(".")[0], operation, resource)
        for name, hook in (MUTATING | VALIDATING).items()
        for rule in hook["rules"]
        for operation in rule["operations"]
        for resource in rule["resources"]
    }
    assert operations == {
        ("mutate", "CREATE", "pods"),
        ("hint", "CREATE", "pods"),
        ("hint-job", "CREATE", "jobs"),
        ("validate", "CREATE", "pods"),
        ("validate-update", "UPDATE", "pods"),
        ("validate-update", "UPDATE", "pods/status"),
        ("validate-update", "UPDATE", "pods/ephemeralcontainers"),
        ("validate-update", "UPDATE", "pods/resize"),
        ("validate-delete", "DELETE", "pods"),
        ("validate-binding", "CREATE", "pods/binding"),
        ("validate-binding", "CREATE", "bindings"),
        ("review-binding", "CREATE", "pods/binding"),
        ("review-binding", "CREATE", "bindings"),
    }


def test_reviews_of_deletes_and_bindings_are_optional() -> None:
    kind = "ValidatingWebhookConfiguration"
    usual = {"validate", "validate-update", "validate-binding"}
    assert {name.split(".")[0] for name in hooks(kind, Installation())} == usual
    deletes, fewer = Installation(reviews_deletes=True), Installation(reviews_bindings=False)
    assert {name.split(".")[0] for name in hooks(kind, deletes)} == usual | {"validate-delete"}
    assert {name.split(".")[0] for name in hooks(kind, fewer)} == usual - {"validate-binding"}


@pytest.mark.parametrize("name", sorted(MUTATING | VALIDATING))
def test_hook_has_the_documented_failure_policy_and_timeout(name: str) -> None:
    hook = (MUTATING | VALIDATING)[name]
    assert hook["sideEffects"] == "NoneOnDryRun"
    is_passed_over = name.startswith(("validate-delete.", "hint.", "hint-job.", "review-binding."))
    assert hook["failurePolicy"] == ("Ignore" if is_passed_over else "Fail")
    assert hook["timeoutSeconds"] == 10
    assert hook["matchPolicy"] == "Equivalent"
    assert hook.get("reinvocationPolicy") == ("IfNeeded" if name in MUTATING else None)
    assert "objectSelector" not in hook
    assert {rule["scope"] for rule in hook["rules"]} == {"Namespaced"}


@pytest.mark.parametrize("name", sorted(name for name in MUTATING | VALIDATING if ".alias." not in name))
def test_each_hook_has_a_copy_for_the_older_label(name: str) -> None:
    every = MUTATING | VALIDATING
    one, twin = every[name], every[name.replace(".gpuwarden.io", ".alias.gpuwarden.io")]
    not_ours = {
        "key": "kubernetes.io/metadata.name",
        "operator": "NotIn",
        "values": ["kube-system", "gpuwarden"],
    }
    assert one["namespaceSelector"] == {
        "matchLabels": {"gpuwarden.io/enabled": "true"},
        "matchExpressions": [not_ours],
    }
    assert twin["namespaceSelector"] == {
        "matchLabels": {"scheduler.radix.ai/enabled": "true"},
        "matchExpressions": [{"key": "gpuwarden.io/enabled", "operator": "NotIn", "values": ["true"]}, not_ours],
    }
    differing = {"name", "namespaceSelector"}
    assert {k: v for k, v in one.items() if k not in differing} == {k: v for k, v in twin.items() if k not in differing}


@pytest.mark.parametrize("word", keys.FEATURES)
def test_workload_keys_of_a_job_match_its_hook(word: str) -> None:
    assert f"'{word}'" in condition(MUTATING["hint-job.gpuwarden.io"])


def test_strip_policy_excludes_the_namespaces_that_hooks_exclude() -> None:
    found = binding("gpuwarden-strip")["spec"]["matchResources"]
    *_, not_ours = MUTATING["mutate.gpuwarden.io"]["namespaceSelector"]["matchExpressions"]
    assert found == {"namespaceSelector": {"matchExpressions": [not_ours]}}


def test_strip_policy_skips_pods_without_our_annotations() -> None:
    strip = named("gpuwarden-strip")
    (only,) = strip["spec"]["matchConditions"]
    assert set(re.findall(r"'([^']*)'", only["expression"])) == {*keys.OUTPUT_NAMES, keys.NATIVE}


def test_strip_policy_runs_once_before_webhooks() -> None:
    """In a second run it would remove our own annotations."""
    strip = named("gpuwarden-strip")
    assert strip["spec"]["reinvocationPolicy"] == "Never"


def binding(name: str) -> Manifest:
    return next(one for one in EVERY if one["metadata"]["name"] == name and one["kind"].endswith("Binding"))


BLINDING = ("gpuwarden-blind", "gpuwarden-blind-debugging")


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in BLINDING), ("gpuwarden-blinded", {"validationActions": ["Deny"]})],
)
def test_blind_policies_select_the_namespaces_of_the_webhooks(name: str, more: Manifest) -> None:
    for hook, bound in (("mutate.gpuwarden.io", name), ("mutate.alias.gpuwarden.io", f"{name}-alias")):
        spec = binding(bound)["spec"]
        assert spec == {
            "policyName": name,
            **more,
            "matchResources": {"namespaceSelector": MUTATING[hook]["namespaceSelector"]},
        }


@pytest.mark.parametrize("name", BLINDING)
def test_blind_policies_run_again_after_other_mutations(name: str) -> None:
    """Policies run in random order, and a policy skipped by matchConditions is not run again."""
    spec = named(name)["spec"]
    assert spec["reinvocationPolicy"] == "IfNeeded"
    assert "matchConditions" not in spec


def test_pods_skipped_by_the_blind_policy_match_the_webhook() -> None:
    """Every key that exempts a pod from the policy also matches the webhook."""
    asks, again = (
        next(one["expression"] for one in named(name)["spec"]["variables"] if one["name"] == "asks")
        for name in ("gpuwarden-blind", "gpuwarden-blinded")
    )
    assert again == asks
    words = set(re.findall(r"'([^']*)'", asks.removeprefix("bool('true') && ")))
    assert words <= set(re.findall(r"'([^']*)'", condition(MUTATING["mutate.gpuwarden.io"])))
    asked = {name for sample in SAMPLES if sample.makes_claim for name in sample.names}
    assert {*asked, *keys.CLAIM.names, *GPU_RESOURCES} <= words
    # Annotations that the strip policy removes must not exempt a pod.
    assert not (keys.OUTPUT_NAMES - set(keys.CLAIM.names)) & words


def test_webhook_matches_every_pod_without_blind_policies() -> None:
    instead = Installation(blinds=Blinds.WEBHOOK)
    found = hooks("MutatingWebhookConfiguration", instead)
    for name, hook in found.items():
        is_asked_about_all = name.startswith("mutate.")
        operations = {name for rule in hook["rules"] for name in rule["resources"]}
        assert ("pods/ephemeralcontainers" in operations) == is_asked_about_all
        assert (hook["matchConditions"] == []) == (is_asked_about_all or name.startswith("review-binding."))
    for blinds in (Blinds.WEBHOOK, Blinds.NOBODY):
        names = {one["metadata"]["name"] for one in policies(Installation(blinds=blinds))}
        assert not [name for name in names if name.startswith("gpuwarden-blind")]
    assert hooks("MutatingWebhookConfiguration", Installation(blinds=Blinds.NOBODY)) == hooks(
        "MutatingWebhookConfiguration", Installation()
    )


def test_isolation_policy_selects_opted_in_namespaces_except_exempt_ones() -> None:
    assert (keys.ISOLATION_LABEL, EXEMPT) == ("gpuwarden.io/isolation", "none"), "which the audit goes by"
    exempt = {"key": "gpuwarden.io/isolation", "operator": "NotIn", "values": ["none"]}
    for hook, bound in (
        ("mutate.gpuwarden.io", "gpuwarden-isolation"),
        ("mutate.alias.gpuwarden.io", "gpuwarden-isolation-alias"),
    ):
        selector = MUTATING[hook]["namespaceSelector"]
        expected = {**selector, "matchExpressions": [*selector["matchExpressions"], exempt]}
        assert binding(bound)["spec"]["matchResources"] == {"namespaceSelector": expected}


@pytest.mark.parametrize(("name", "listed"), [("places", PROTECTED_PATHS), ("storage", STORAGE)])
def test_volume_policy_lists_the_dangerous_paths(name: str, listed: tuple[str, ...]) -> None:
    variables = named("gpuwarden-isolation-volumes")["spec"]["variables"]
    (found,) = [one["expression"] for one in variables if one["name"] == name]
    assert tuple(re.findall(r"'([^']*)'", found)) == listed


def allowed(*host_paths: str) -> str:
    variables = named("gpuwarden-isolation", Installation(host_paths=host_paths))["spec"]["variables"]
    (found,) = [str(one["expression"]) for one in variables if one["name"] == "allowed"]
    return found


def test_pods_may_mount_only_the_listed_host_paths() -> None:
    assert allowed() == "dyn([])"
    assert allowed("/data", "/mnt/.a-b_c@1+2=3~4") == "dyn(['/data', '/mnt/.a-b_c@1+2=3~4'])"


@pytest.mark.parametrize("path", [*PROTECTED_PATHS, *WRITABLE, "/", "data", "/data/", "/data/../dev", "/a'b"])
def test_dangerous_host_paths_are_refused_by_the_installer(path: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(path))):
        Installation(host_paths=("/data", path))


@pytest.mark.parametrize(("name", "listed"), [("strong", STRONG), ("injecting", INJECTING)])
def test_audit_and_isolation_policy_have_equal_lists(name: str, listed: tuple[str, ...]) -> None:
    variables = named("gpuwarden-isolation")["spec"]["variables"]
    (found,) = [one["expression"] for one in variables if one["name"] == name]
    assert tuple(re.findall(r"'([^']*)'", found)) == listed


# Lists came with Kubernetes 1.34, comprehensions of two variables with 1.32.
NEWER = re.compile(r"\.(flatten|slice|sort|sortBy|distinct|first|last|transformList|transformMap|transformMapEntry)\(")


# `gpuwarden-blinded` comes with the policies that blind, and they are of a kind that is not served before.
FROM_1_36 = [
    one
    for one in EVERY
    if one["kind"].startswith("MutatingAdmission")
    or one["metadata"]["name"].startswith(("gpuwarden-blind", "gpuwarden-native"))
]


@pytest.mark.parametrize(
    "manifest",
    [one for one in EVERY if one not in FROM_1_36],
    ids=lambda one: one["metadata"]["name"],
)
def test_manifests_for_older_kubernetes_use_no_newer_cel_function(manifest: Manifest) -> None:
    assert not [one for one in expressions(manifest) if NEWER.search(one)]


# Native pods.

INSTALLED_NATIVE = Installation(native=True)
NATIVE_POLICIES = ("gpuwarden-native", "gpuwarden-native-pods")


def test_native_pods_need_no_webhook_and_the_ends_stay_protected() -> None:
    assert webhooks(INSTALLED_NATIVE) == []
    assert while_down(INSTALLED_NATIVE) == []
    assert "gpuwarden-bindingends" in {one["metadata"]["name"] for one in policies(INSTALLED_NATIVE)}
    added = [one for one in policies(INSTALLED_NATIVE) if one["metadata"]["name"].startswith("gpuwarden-native")]
    assert len(policies(INSTALLED_NATIVE)) == len(policies(Installation())) + len(added)
    assert [one["metadata"]["name"] for one in policies(Installation()) if one in added] == []


def test_native_pods_come_with_the_class_of_their_claims() -> None:
    printed = list(yaml.safe_load_all(as_yaml("all", INSTALLED_NATIVE)))
    assert "DeviceClass" in {one["kind"] for one in printed}
    assert "DeviceClass" not in {one["kind"] for one in yaml.safe_load_all(as_yaml("all", Installation()))}


def test_native_pods_require_the_policy_that_hides_gpus() -> None:
    with pytest.raises(ValueError, match="a policy has to"):
        Installation(native=True, blinds=Blinds.WEBHOOK)


@pytest.mark.parametrize("name", NATIVE_POLICIES)
def test_native_policies_select_the_namespaces_of_the_webhooks(name: str) -> None:
    for hook, bound in (("mutate.gpuwarden.io", name), ("mutate.alias.gpuwarden.io", f"{name}-alias")):
        selected = binding(bound)["spec"]["matchResources"]
        assert selected == {"namespaceSelector": MUTATING[hook]["namespaceSelector"]}


def test_no_pod_is_exempt_from_blinding_where_no_webhook_reviews_it() -> None:
    found = [one for one in policies(INSTALLED_NATIVE) if one["metadata"]["name"].startswith("gpuwarden-blind")]
    texts = [one for manifest in found for one in expressions(manifest)]
    assert not [one for one in texts if "bool('true')" in one]
    for name, variable in (
        ("gpuwarden-blind", "asks"),
        ("gpuwarden-blinded", "asks"),
        ("gpuwarden-blind-debugging", "isClaimed"),
    ):
        (spec,) = (one["spec"] for one in found if one["metadata"]["name"] == name and "variables" in one["spec"])
        (asks,) = (one["expression"] for one in spec["variables"] if one["name"] == variable)
        assert asks.startswith("bool('false') && ")


def test_native_policy_refuses_every_claim_key_but_the_hash() -> None:
    words = set(re.findall(r"'([^']*)'", policy("gpuwarden-native-pods")))
    asked = {name for key in claim_keys.CLAIM_KEYS for name in key.names}
    assert asked <= words
    assert {claim_keys.REQUIREMENT_PREFIX, claim_keys.ASSIGNER_REQUIREMENT, *GPU_RESOURCES} <= words


def test_native_policies_agree_with_the_reconciler_about_names() -> None:
    found = policy("gpuwarden-native-pods")
    name = TEMPLATE_NAME.pattern.replace("([1-8])", "[1-8]").replace("([a-z0-9]{1,64})", "[a-z0-9]{1,64}")
    assert f"^{name}$" in found
    assert f"'^{HASH_ATTRIBUTE.pattern}$'" in found
    assert f"'^{HASH_ATTRIBUTE.pattern}$'" in policy("gpuwarden-native")


# ResourceClaims, in tests/e2e/dra.


def selected(installation: Installation) -> dict[str, Any]:
    """The namespaces that the bindings of guards select."""
    return {
        one["metadata"]["name"]: one["spec"]["matchResources"]["namespaceSelector"]
        for one in dra(installation)
        if "namespaceSelector" in one["spec"].get("matchResources", ())
    }


@pytest.mark.parametrize("guard", DraGuard)
@pytest.mark.parametrize("name", ["gpuwarden-claims", "gpuwarden-consumers"])
def test_claims_with_our_label_are_guarded_in_all_namespaces(name: str, guard: DraGuard) -> None:
    binding = next(one for one in dra(Installation(dra_guard=guard)) if one["metadata"]["name"] == f"{name}-labelled")
    assert binding["spec"]["policyName"] == name
    labelled = {"matchExpressions": [{"key": GPU_CLAIM, "operator": "Exists"}]}
    assert binding["spec"]["matchResources"] == {"objectSelector": labelled}


def test_evictions_of_pods_with_our_claims_are_guarded_in_all_namespaces() -> None:
    """Without such a claim, an eviction is allowed."""
    name = "gpuwarden-claim-evictions-labelled"
    binding = next(one for one in dra(Installation()) if one["metadata"]["name"] == name)
    selector = {"matchExpressions": [{"key": GPU_CLAIM, "operator": "Exists"}]}
    assert binding["spec"] == {
        "policyName": "gpuwarden-claim-evictions",
        "validationActions": ["Deny"],
        "paramRef": {"selector": selector, "parameterNotFoundAction": "Allow"},
    }


def test_guards_select_the_namespaces_of_the_webhooks() -> None:
    hook, alias = (MUTATING[name]["namespaceSelector"] for name in ("mutate.gpuwarden.io", "mutate.alias.gpuwarden.io"))
    expected = {name: hook for name in GUARDS} | {f"{name}-alias": alias for name in GUARDS}
    assert selected(Installation()) == expected


def test_guard_of_all_namespaces_leaves_out_two() -> None:
    found = dra(Installation(namespace="wardens", dra_guard=DraGuard.ALL))
    excluded = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "wardens"]}
    assert selected(Installation(namespace="wardens", dra_guard=DraGuard.ALL)) == {
        name: {"matchExpressions": [excluded]} for name in GUARDS
    }
    opted_in = [
        one for one in dra(Installation(namespace="wardens")) if one["metadata"]["name"] not in selected_names()
    ]
    assert [one for one in found if one["metadata"]["name"] not in selected_names()] == opted_in


def selected_names() -> set[str]:
    return {f"{name}{twin}" for name in GUARDS for twin in ("", "-alias")}


def test_device_classes_and_driver_are_those_of_the_installation() -> None:
    variables = named("gpuwarden-claims")["spec"]["variables"]
    assert variables[0] == {"name": "classes", "expression": "dyn([''])"}, "no class has an empty name"
    other = Installation(gpu_driver="gpu.example.com", device_classes=("nic.example.com", "fpga.example.com"))
    variables = named("gpuwarden-claims", other)["spec"]["variables"]
    assert variables[0]["expression"] == "dyn(['', 'nic.example.com', 'fpga.example.com'])"
    whole = json.dumps(dra(other))
    assert "gpu.nvidia.com" not in whole
    for name in ("gpuwarden-gpu-claims", "gpuwarden-device-classes", "gpuwarden-consumers"):
        assert "['attested.gpuwarden.io', 'gpu.example.com']" in " ".join(expressions(named(name, other)))


@pytest.mark.parametrize("name", ["gpu.nvidia.com", "attested.gpuwarden.io"])
def test_classes_of_gpus_and_proofs_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="takes GPUs or proofs"):
        Installation(device_classes=("nic.example.com", name))


@pytest.mark.parametrize("name", ["", "a'b", "A", "a_b", "x']||true||['"])
def test_invalid_classes_and_drivers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a driver or a DeviceClass"):
        Installation(device_classes=(name,))
    with pytest.raises(ValueError, match="not the name of a driver or a DeviceClass"):
        Installation(gpu_driver=name)


def test_policy_with_the_ends_matches_labelled_claims_only() -> None:
    """Without its CRD or its object the API server refuses all that match, and never evaluates the conditions."""
    for one in dra(Installation()):
        if one["spec"].get("paramKind", {}).get("kind") == "BindingEnds":
            assert one["spec"]["matchConstraints"]["objectSelector"] == {
                "matchExpressions": [{"key": GPU_CLAIM, "operator": "Exists"}]
            }
    assert f"[?'{GPU_CLAIM}']" in policy("gpuwarden-proof-claims")


@pytest.mark.parametrize(
    "name", ["gpuwarden-proof-claims", "gpuwarden-proof-ends", "gpuwarden-gpu-claims", "gpuwarden-proof-slices"]
)
def test_proofs_are_guarded_in_all_namespaces(name: str) -> None:
    assert "matchResources" not in binding(name)["spec"]
    assert "namespaceSelector" not in named(name)["spec"]["matchConstraints"]


@pytest.mark.parametrize("manifest", [one for one in manifests(*DRA) if one["kind"].endswith("Policy")], ids=str)
def test_guards_match_every_version_of_the_objects(manifest: Manifest) -> None:
    """The API server converts objects of other versions (matchPolicy Equivalent, the default)."""
    constraints = manifest["spec"]["matchConstraints"]
    assert "matchPolicy" not in constraints
    assert {version for rule in constraints["resourceRules"] for version in rule["apiVersions"]} == {"v1"}


def test_names_of_driver_label_and_templates_are_those_of_the_code() -> None:
    assert f"'{DRIVER}'" in policy("gpuwarden-proof-ends")
    assert f"startsWith('{keys.DOMAIN}/')" in policy("gpuwarden-claims"), "the taints' keys"
    assert EVIDENCE_ENDS.startswith(f"{keys.DOMAIN}/")
    claim, found = re.findall(r"n\.matches\('([^']*)'\)", policy("gpuwarden-claiming-pods"))
    assert claim == f"^{CLAIM_NAME.pattern.replace('(?:', '(')}$"
    assert f"'{keys.CLAIM.name}' in" in policy("gpuwarden-claiming-pods")
    assert re.fullmatch(found, template_name(8, "a" * 64))
    assert not re.fullmatch(found, template_name(9, "a"))
    assert DELETE_PROTECTION in policy("gpuwarden-gpu-claims")


def test_claim_from_a_template_is_guarded_from_forced_deletions_whatever_its_pod_says() -> None:
    """Without `policies.protect` or `policies.strip` a tenant can write the annotation of a reservation."""
    first, *_ = named("gpuwarden-forced-deletions")["spec"]["matchConditions"]
    templates, named_claims, _ = first["expression"].split("||")
    assert "resourceClaimTemplateName" in templates
    assert keys.RESERVATION_ID.name not in templates
    assert "resourceClaimName" in named_claims
    assert f"!('{keys.RESERVATION_ID.name}' in" in named_claims


# Our service accounts.

OWN = ("gpuwarden-own-pods", "gpuwarden-own-nodes")


def named(name: str, installation: Installation | None = None) -> Manifest:
    installation = installation or Installation()
    found = all_of(policies(installation), while_down(installation), dra(installation))
    return next(one for one in found if one["metadata"]["name"] == name and one["kind"].endswith("Policy"))


def limited_accounts(name: str, installation: Installation | None = None) -> set[str]:
    """The accounts that a policy limits. Requests of other users match no further expression."""
    (only,) = named(name, installation)["spec"]["matchConditions"]
    assert re.fullmatch(r"request\.userInfo\.username in \[[^\]]*\]", only["expression"])
    return set(re.findall(r"'([^']*)'", only["expression"]))


def writers(resources: set[str], installation: Installation) -> set[str]:
    """Our accounts whose ClusterRole allows changing these resources."""
    every = [*rbac(installation), *export(installation)]
    roles = {
        one["metadata"]["name"]
        for one in every
        if one["kind"] == "ClusterRole"
        for rule in one["rules"]
        if resources & set(rule["resources"]) and {"update", "patch"} & set(rule["verbs"])
    }
    return {
        f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
        for one in every
        if one["kind"] == "ClusterRoleBinding" and one["roleRef"]["name"] in roles
        for subject in one["subjects"]
    }


@pytest.mark.parametrize(
    ("name", "resources"),
    [
        ("gpuwarden-own-pods", {"pods", "pods/status", "pods/ephemeralcontainers", "pods/resize"}),
        ("gpuwarden-own-nodes", {"nodes", "nodes/status"}),
    ],
    ids=["pods", "nodes"],
)
@pytest.mark.parametrize("namespace", ["gpuwarden", "wardens"])
def test_every_account_with_write_rights_is_limited_by_a_policy(name: str, resources: set[str], namespace: str) -> None:
    installation = Installation(namespace=namespace)
    (rule,) = named(name)["spec"]["matchConstraints"]["resourceRules"]
    assert (set(rule["resources"]), rule["operations"]) == (resources, ["UPDATE"])
    assert limited_accounts(name, installation) == writers(resources, installation) != set()


def test_policies_use_the_configured_account_names() -> None:
    other = Installation(namespace="wardens", reconciler="one", exporter="three")
    of = "system:serviceaccount:wardens:{}".format
    assert limited_accounts("gpuwarden-own-pods", other) == {of("one")}
    assert limited_accounts("gpuwarden-own-nodes", other) == {of("one"), of("three")}
    for name in OWN:
        assert "gpuwarden-" not in " ".join(expressions(named(name, other)))


def test_policies_allow_what_our_accounts_write() -> None:
    written = {*keys.OUTPUT_NAMES, *keys.HINT_NAMES, keys.WOKEN_AT, keys.WAITING}
    prefixes = re.findall(r"k\.startsWith\('([^']*)'\)", " ".join(expressions(named("gpuwarden-own-pods"))))
    assert [key for key in written if not key.startswith(tuple(prefixes))] == []
    assert f"'{keys.QUEUED_LABEL}'" in policy("gpuwarden-own-pods")
    assert keys.QUEUE_GATE.startswith(f"{keys.DOMAIN}/")
    for word in (SERIALS, keys.NODE_GPUS, keys.EVIDENCE_LOST_TAINT):
        assert f"'{word}'" in policy("gpuwarden-own-nodes")


@pytest.mark.parametrize("plural", [one["spec"]["names"]["plural"] for one in crds()])
def test_our_objects_are_protected_for_every_operation(plural: str) -> None:
    rules = named(f"gpuwarden-{plural}")["spec"]["matchConstraints"]["resourceRules"]
    operations = {(operation, name) for one in rules for operation in one["operations"] for name in one["resources"]}
    assert operations == {
        ("CREATE", plural),
        ("UPDATE", plural),
        ("UPDATE", f"{plural}/status"),
        ("DELETE", plural),
    }


def test_accounts_that_write_our_objects_may_manage_reservations() -> None:
    found = rbac(Installation())
    plurals = [one["spec"]["names"]["plural"] for one in crds()]
    operations = (("", "create"), ("", "update"), ("", "delete"), ("/status", "update"))
    writes = {(f"{plural}{part}", verb) for plural in plurals for part, verb in operations}
    uses = {
        one["metadata"]["name"]: {
            (name, verb) for rule in one["rules"] for name in rule["resources"] for verb in rule["verbs"]
        }
        for one in found
        if one["kind"] == "ClusterRole"
    }
    assert {name for name, may in uses.items() if may & writes} == {
        "gpuwarden",
        "gpuwarden-reconcile",
    }
    assert all(("reservations", "manage") in may for may in uses.values() if may & writes)
    assert [name for name, may in uses.items() if ("nodeevidences", "delete") in may] == ["gpuwarden-reconcile"]


# Expressions must not fail: a failing one refuses the request, even a delete.


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda text: text[:40])
def test_expressions_read_optional_members_safely(expression: str) -> None:
    outside_quotes = re.sub(r"'[^']*'", "''", expression)
    assert not re.search(r"\.metadata\.(annotations|labels)\b(?!\[k\]\.lowerAscii)", outside_quotes)
    assert not re.search(
        r"\.(env|limits|requests|resourceClaims|initContainers|ephemeralContainers|schedulingGates|webhooks)\.",
        outside_quotes,
    )


@pytest.mark.parametrize("name", ["validate-delete.gpuwarden.io", "validate-delete.alias.gpuwarden.io"])
def test_expressions_for_delete_do_not_read_object(name: str) -> None:
    assert not re.search(r"\bobject\b", condition(VALIDATING[name]))


@pytest.mark.parametrize(
    "manifest", [one for one in EVERY if one["kind"].endswith("Policy")], ids=lambda one: one["metadata"]["name"]
)
def test_policies_fail_closed(manifest: Manifest) -> None:
    assert manifest["spec"]["failurePolicy"] == "Fail"
    for validation in manifest["spec"].get("validations", ()):
        assert validation["reason"] == "Forbidden"
        assert validation["message"].endswith(".")
        assert "request.userInfo.username" in validation["messageExpression"]


# Values of the installation.


def test_manifests_contain_the_names_of_the_installation() -> None:
    installation = Installation(
        namespace="wardens",
        service="door",
        port=8443,
        ca_bundle=b"PEM",
        opt_in="example.test/gpus",
        hash_aliases=("example.test/hash", "example.test/other"),
        resource="example.test/gpu",
    )
    first = hooks("MutatingWebhookConfiguration", installation)["mutate.gpuwarden.io"]
    assert first["clientConfig"] == {
        "service": {"namespace": "wardens", "name": "door", "port": 8443, "path": "/mutate"},
        "caBundle": base64.b64encode(b"PEM").decode(),
    }
    assert first["namespaceSelector"]["matchLabels"] == {"example.test/gpus": "true"}
    assert first["namespaceSelector"]["matchExpressions"][0]["values"] == ["kube-system", "wardens"]
    always = ", ".join(f"'{name}'" for name in claim_keys.REQUIRED_HASH.names)
    assert f"{always}, 'example.test/hash', 'example.test/other'" in condition(first)
    assert "r == 'example.test/gpu' || r.startsWith('nvidia.com/')" in condition(first)
    update = hooks("ValidatingWebhookConfiguration", installation)["validate-update.alias.gpuwarden.io"]
    assert "'system:serviceaccount:wardens:'" in condition(update)
    whole = json.dumps(all_of(webhooks(installation), policies(installation)))
    for gone in (
        "gpuwarden.io/enabled",
        "system:serviceaccount:gpuwarden:",
        '"kube-system", "gpuwarden"',
    ):
        assert gone not in whole


def test_all_namespaced_objects_are_in_the_namespace_of_the_installation() -> None:
    whole = rbac(Installation(namespace="wardens"))
    placed = [one["metadata"].get("namespace") for one in whole if "Cluster" not in one["kind"]]
    subjects = [subject["namespace"] for one in whole for subject in one.get("subjects", ())]
    assert set(placed) == set(subjects) == {"wardens"}
    assert {one["metadata"]["name"] for one in whole} == {
        "gpuwarden",
        "gpuwarden-reconcile",
        "gpuwarden-attest",
        "gpuwarden-finalize",
    }


def test_roles_grant_no_more_than_expected() -> None:
    """tests/e2e shows that each permission is needed; this test notices additional ones."""
    rules = [rule for one in rbac(Installation()) for rule in one.get("rules", ())]
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])]
    assert not [rule for rule in rules if {"secrets", "configmaps", "pods/exec"} & set(rule["resources"])]
    writes = {"create", "update", "patch", "delete", "deletecollection"}
    may_write = {name for rule in rules if writes & set(rule["verbs"]) for name in rule["resources"]}
    ours = {"gpunodes", "gpunodes/status", "nodeevidences", "nodeevidences/status"}
    ours |= {"bindingends", "trustbundles", "trustbundles/status"}  # with --bundle-endpoint
    by_policy = {"nodes", "pods/eviction"}  # with --on-evidence-lost and --on-mismatch
    with_proofs = {"resourceslices", "resourceclaims/status", "resourceclaims/binding"}  # with --proof-devices
    with_templates = {"resourceclaimtemplates"}  # with --native-templates
    with_claims = {"resourceclaims", "pods/finalizers"}  # with the injection `dra`
    at_binding = {"pods/status"}  # with --reserve bind
    assert may_write == ours | by_policy | with_proofs | with_claims | with_templates | at_binding | {
        "pods",
        "events",
        "leases",
        "tokenreviews",
        "subjectaccessreviews",
    }


def test_class_of_proof_devices_selects_our_driver_only() -> None:
    made, *_ = dra(Installation())
    assert (made["kind"], made["metadata"]["name"]) == ("DeviceClass", DRIVER)
    assert made["spec"] == {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]}


def test_printed_manifests_equal_the_applied_ones() -> None:
    installation = Installation(namespace="wardens", ca_bundle=b"PEM")
    called = all_of(while_down(installation), webhooks(installation))
    every = all_of(crds(), rbac(installation), policies(installation), called)
    assert list(yaml.safe_load_all(as_yaml("all", installation))) == every
    for what, found in (("crds", crds()), ("webhooks", called)):
        assert list(yaml.safe_load_all(as_yaml(what, installation))) == found


def test_server_outside_the_cluster_is_called_by_url() -> None:
    installation = Installation(url="https://127.0.0.1:8443/")
    for manifest in webhooks(installation):
        paths = ["/mutate", "/mutate-binding"] if manifest["kind"].startswith("Mutating") else ["/validate"]
        assert {json.dumps(hook["clientConfig"]) for hook in manifest["webhooks"]} == {
            json.dumps({"url": f"https://127.0.0.1:8443{path}"}) for path in paths
        }


def test_invalid_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\"x' \|\| true \|\| 'x\": not the name of a label"):
        Installation(hash_aliases=("x' || true || 'x",))
    with pytest.raises(ValueError, match="'': not the name"):
        Installation(opt_in="")


def test_every_binding_is_mutated_and_those_of_others_or_with_a_reservation_are_validated() -> None:
    named = Installation(
        namespace="wardens", scheduler_account="b", schedulers=("system:kube-scheduler", "system:second")
    )
    users = "['system:kube-scheduler', 'system:second', 'system:serviceaccount:wardens:b']"
    one, other = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
    for twin in ("", ".alias"):
        assert hooks(one, named)[f"review-binding{twin}.gpuwarden.io"]["matchConditions"] == []
        others = condition(hooks(other, named)[f"validate-binding{twin}.gpuwarden.io"])
        assert others == (
            f"(request.userInfo.username in {users}) == false "
            "|| 'gpuwarden.io/reservation-id' in object.metadata.?annotations.orValue({})"
        )
    (decides, *_) = while_down(named)
    assert decides["spec"]["matchConditions"][0]["expression"] == f"request.userInfo.username in {users}"
    with pytest.raises(ValueError, match="not the name of a user"):
        Installation(schedulers=("x' || true || 'x",))


def test_without_schedulers_the_validating_hook_matches_every_binding() -> None:
    alone = Installation(schedulers=())
    assert while_down(alone) == []
    for name, hook in hooks("ValidatingWebhookConfiguration", alone).items():
        if name.startswith("validate-binding."):
            assert (hook["matchConditions"], hook["failurePolicy"]) == ([], "Fail")


def test_policy_checks_the_mark_that_the_webhook_sets() -> None:
    assert f"'{keys.REVIEWED_FOR}'" in policy("gpuwarden-binding-ends")


def test_filling_in_names_does_not_change_the_shipped_manifests() -> None:
    first = webhooks(Installation(namespace="wardens"))
    assert first != webhooks(Installation())
    assert webhooks(Installation()) == webhooks(Installation())


def test_policies_with_parameters_do_not_match_kube_system() -> None:
    ours = Installation("own")
    found = [one for one in (*while_down(ours), *policies(ours)) if one["spec"].get("paramKind")]
    assert found
    for one in found:
        (excluded,) = one["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
        assert (excluded["operator"], excluded["values"]) == ("NotIn", ["kube-system", "own"])
