"""The rights of `gpuwarden export`: exec in one namespace, and nothing unless requested."""

import pytest

from webhook.kube.install.policies import Installation, as_yaml, export


@pytest.mark.defect("gpuid-20")
def test_exec_is_a_right_in_the_namespace_of_the_device_plugin_only() -> None:
    found = export(Installation(namespace="wardens", gpu_namespace="gpus"))
    with_exec = [
        (one["kind"], one["metadata"].get("namespace"), rule["verbs"])
        for one in found
        for rule in one.get("rules", ())
        if "pods/exec" in rule["resources"]
    ]
    assert with_exec == [("Role", "gpus", ["get", "create"])]
    subjects = {(one["name"], one["namespace"]) for each in found for one in each.get("subjects", ())}
    assert subjects == {("gpuwarden-export", "wardens")}
    rules = [rule for one in found for rule in one.get("rules", ())]
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])]
    writes = {"create", "update", "patch", "delete"}
    may_write = {name for rule in rules if writes & set(rule["verbs"]) for name in rule["resources"]}
    assert may_write == {"nodes", "pods/exec", "leases"}


def test_export_manifests_are_printed_only_by_name() -> None:
    assert "name: gpuwarden-export" not in as_yaml("all", Installation())
    assert "name: gpuwarden-export" in as_yaml("export", Installation())
