"""Authentication of schedulers: a real server with real certificates."""

import json
import re
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from tests import builders
from tests.builders import HASH, Raw, raw_pod
from tests.h2_client import H2Client
from tests.running import Running, serving
from tests.web.harness import INVENTORY

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples/scheduler"
PLAIN_URL = re.compile(r"http://127\.0\.0\.1:\d+")


def question(hash_: str = HASH) -> Raw:
    pod = builders.created(raw_pod(annotations={"gpuwarden.io/required-hash": hash_}))
    return {"Pod": pod, "Nodes": None, "NodeNames": ["node-a", "node-b", "node-c"]}


async def passed(base: str, **options: Any) -> list[str]:
    async with httpx.AsyncClient(base_url=base, trust_env=False, **options) as client:
        return list((await client.post("/filter", json=question())).raise_for_status().json()["NodeNames"])


@pytest.mark.defect("extender-7")
async def test_connection_needs_a_certificate_of_the_scheduler_ca(tmp_path: Path) -> None:
    ca, stranger = trustme.CA(), trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "schedulers.crt")
    with serving(tmp_path, INVENTORY, ["--extender-client-ca", "schedulers.crt"]) as running:
        url = running.urls["extender"]
        trust = running.trust
        with pytest.raises(httpx.TransportError):
            await passed(url, verify=trust)
        stranger.issue_cert("scheduler").configure_cert(trust)
        with pytest.raises(httpx.TransportError):
            await passed(url, verify=trust)
        trust = running.trust
        ca.issue_cert("scheduler").configure_cert(trust)
        assert await passed(url, verify=trust) == ["node-a"]
        with pytest.raises(httpx.TransportError):
            await passed(url.replace("https", "http"))


async def test_scheduler_keeps_one_http2_connection_for_thousands_of_pods(tmp_path: Path) -> None:
    body = json.dumps(question()).encode()
    with serving(tmp_path, INVENTORY) as running:
        port = int(running.urls["extender"].rpartition(":")[2])
        trust = ssl.create_default_context(cafile=str(tmp_path / "certs/dev/ca.crt"))
        trust.set_alpn_protocols(["h2"])
        async with H2Client("127.0.0.1", port, trust, server_hostname="localhost") as client:
            for _ in range(1_200):
                status, _, answer = await client.post("/filter", body)
                assert (status, json.loads(answer)["NodeNames"]) == (200, ["node-a"])


async def plain_of(running: Running) -> str:
    """The last URL in the log."""
    said = [json.loads(line) for line in running.log.read_text().splitlines()]
    (urls,) = (one["urls"] for one in said if one["event"] == "serving")
    return str(urls[-1])


@pytest.mark.defect("extender-7")
async def test_plain_http_listens_on_loopback_if_it_is_set(tmp_path: Path) -> None:
    with serving(tmp_path, INVENTORY, ["--extender-plain-address", ":0"]) as running:
        url = await plain_of(running)
        assert PLAIN_URL.fullmatch(url)
        assert await passed(url) == ["node-a"]


@pytest.mark.defect("extender-7")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*config*.yaml")), ids=lambda path: path.name)
def test_shipped_scheduler_configuration_uses_mutual_tls(path: Path) -> None:
    """Without a CA a scheduler silently skips verification."""
    found = yaml.safe_load(path.read_text())
    assert (found["apiVersion"], found["kind"]) == ("kubescheduler.config.k8s.io/v1", "KubeSchedulerConfiguration")
    for extender in found["extenders"]:
        assert extender["urlPrefix"].startswith("https://")
        assert extender["enableHTTPS"] is True
        # Without the extender the scheduler of all pods continues: Bindings are reviewed. A scheduler that binds
        # through the extender waits.
        assert extender["ignorable"] is ("bindVerb" not in extender)
        tls = extender["tlsConfig"]
        assert tls["caFile"]
        assert tls["certFile"]
        assert tls["keyFile"]
        assert not tls.get("insecure")


def test_two_scheduler_configurations_are_shipped() -> None:
    assert len(sorted(EXAMPLES.glob("*config*.yaml"))) == 2
