"""The plain manifests are the chart's, and each directory stands by itself."""

from pathlib import Path

import pytest
import yaml

from scripts.chart_deploy import DEPLOY, written
from tests.chart.rendering import Raw, of_kind
from webhook.core import keys
from webhook.export import settings as export_settings
from webhook.runtime.settings import load

EXPORTERS = ("stdout", "http", "postgres", "s3", "prod")
DIRECTORIES = ("extender", *(f"exporter/{name}" for name in EXPORTERS))


def manifests(directory: str) -> list[Raw]:
    files = sorted((DEPLOY / directory / "manifests").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def test_what_is_there_is_what_the_chart_renders() -> None:
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
def test_the_namespace_comes_first(directory: str) -> None:
    assert manifests(directory)[0]["kind"] == "Namespace"


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_everything_is_in_the_namespace_that_comes_with_it(directory: str) -> None:
    found = manifests(directory)
    (own,) = of_kind(found, "Namespace")
    elsewhere = {one["metadata"].get("namespace") for one in found} - {own["metadata"]["name"], None}
    # Where the device plugin's pods are.
    assert elsewhere == ({"gpu-operator"} if "exporter" in directory else set())


@pytest.mark.parametrize("name", EXPORTERS)
def test_an_exporter_takes_its_settings_with_the_secrets_that_it_names(name: str, tmp_path: Path) -> None:
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


def test_the_filter_takes_its_settings(tmp_path: Path) -> None:
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


def test_without_us_a_scheduler_waits_with_pods_that_ask_for_gpus_and_ours_ask_for_none() -> None:
    """No webhook stands behind it, so it may not go on; and whoever it waits with, it may not be us."""
    scheduler = yaml.safe_load((DEPLOY / "extender/scheduler/scheduler-config.yaml").read_text())
    (extender,) = scheduler["extenders"]
    assert not extender["ignorable"]
    assert [one["name"] for one in extender["managedResources"]] == ["nvidia.com/gpu"]
    for deployment in of_kind(manifests("extender"), "Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        asked = {name for part in container["resources"].values() for name in part}
        assert asked <= {"cpu", "memory"}


def test_the_example_asks_for_a_hash_that_the_map_has() -> None:
    example = yaml.safe_load((DEPLOY.parent / "examples/secure-gpu-pod.yaml").read_text())
    (settings,) = of_kind(manifests("extender"), "ConfigMap")
    known = yaml.safe_load(settings["data"]["settings.yaml"])["nodeHashMap"].values()
    assert example["metadata"]["annotations"][keys.REQUIRED_HASH.name] in known
