"""The plain manifests equal the rendered chart, and each directory is complete."""

from pathlib import Path

import pytest
import yaml

from scripts.chart_deploy import DEPLOY, written
from tests.chart.rendering import Raw, of_kind
from webhook.core import claim_keys
from webhook.export import settings as export_settings
from webhook.export.targets import STORES
from webhook.runtime.settings import load

EXPORTERS = (*STORES, "prod")
DIRECTORIES = ("extender", *(f"exporter/{name}" for name in EXPORTERS))


def manifests(directory: str) -> list[Raw]:
    files = sorted((DEPLOY / directory / "manifests").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def test_deploy_manifests_equal_the_rendered_chart() -> None:
    """Run `make chart` after a change of the chart."""
    expected = written()
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} == {*expected}
    for path, text in expected.items():
        assert path.read_text() == text, path


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_a_kustomization_names_every_file_beside_it(directory: str) -> None:
    place = DEPLOY / directory
    content = yaml.safe_load((place / "kustomization.yaml").read_text())
    assert {*content["resources"]} == {f"manifests/{path.name}" for path in place.glob("manifests/*.yaml")}


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_namespace_is_the_first_object(directory: str) -> None:
    assert manifests(directory)[0]["kind"] == "Namespace"


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_all_objects_are_in_the_namespace_of_the_directory(directory: str) -> None:
    found = manifests(directory)
    (own,) = of_kind(found, "Namespace")
    elsewhere = {one["metadata"].get("namespace") for one in found} - {own["metadata"]["name"], None}
    # The namespace of the device plugin's pods.
    assert elsewhere == ({"gpu-operator"} if "exporter" in directory else set())


@pytest.mark.parametrize("name", EXPORTERS)
def test_exporter_accepts_its_settings_and_secrets(name: str, tmp_path: Path) -> None:
    found = manifests(f"exporter/{name}")
    (settings,) = of_kind(found, "ConfigMap")
    (deployment,) = of_kind(found, "Deployment")
    file = tmp_path / "settings.yaml"
    file.write_text(settings["data"]["settings.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environ = {one["name"]: "from-elsewhere" for one in container["env"]}
    chosen = export_settings.load({"config": str(file)}, environ)
    assert chosen.exporter_type == ("postgres" if name == "prod" else name,)
    assert chosen.cluster_name == ("prod" if name in ("stdout", "prod") else "validation")
    assert deployment["spec"]["replicas"] == (2 if name == "prod" else 1)


def test_extender_accepts_its_settings(tmp_path: Path) -> None:
    found = manifests("extender")
    (settings,) = of_kind(found, "ConfigMap")
    file = tmp_path / "settings.yaml"
    for name, text in settings["data"].items():
        (tmp_path / name).write_text(text.replace("/etc/gpuwarden/settings", str(tmp_path)))
    chosen = load({"config": str(file), "in_cluster": "true"}, {})
    assert chosen.plain_extender_at == ("0.0.0.0", 8000)  # noqa: S104 - it is only read
    assert not chosen.keeps_in_cluster
    scheduler = yaml.safe_load((DEPLOY / "extender/scheduler/scheduler-config.yaml").read_text())
    (service,) = [one for one in of_kind(found, "Service") if one["metadata"]["name"] == "gpuwarden"]
    place = f"http://gpuwarden.{service['metadata']['namespace']}.svc:8000"
    assert scheduler["extenders"][0]["urlPrefix"] == place
    assert 8000 in [port["port"] for port in service["spec"]["ports"]]


def test_scheduler_config_is_not_ignorable_and_our_pods_request_no_gpus() -> None:
    """Without webhooks a scheduler must wait for the extender, but must not hold back the extender's own pods."""
    scheduler = yaml.safe_load((DEPLOY / "extender/scheduler/scheduler-config.yaml").read_text())
    (extender,) = scheduler["extenders"]
    assert not extender["ignorable"]
    assert [one["name"] for one in extender["managedResources"]] == ["nvidia.com/gpu"]
    for deployment in of_kind(manifests("extender"), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        asked = {name for part in container["resources"].values() for name in part}
        assert asked <= {"cpu", "memory"}


def test_example_requires_a_hash_of_the_node_hash_map() -> None:
    example = yaml.safe_load((DEPLOY.parent / "examples/secure-gpu-pod.yaml").read_text())
    (settings,) = of_kind(manifests("extender"), "ConfigMap")
    known = yaml.safe_load(settings["data"]["settings.yaml"])["nodeHashMap"].values()
    assert example["metadata"]["annotations"][claim_keys.REQUIRED_HASH.name] in known
