"""The stores that `--exporter-type` names."""

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from webhook.export.targets import STORES


@pytest.mark.parametrize("name", STORES)
def test_store_names_the_class_of_its_exporter(name: str) -> None:
    assert resolve_name(STORES[name].exporter).name == name


def test_exporter_imports_no_client_library_before_its_store_is_used() -> None:
    code = "import sys, webhook.commands.export; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "webhook.export.targets" in loaded
    assert {"psycopg", "obstore", "httpx"} & {*loaded} == set()
