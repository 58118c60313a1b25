"""`gpuwarden serve` as a process: its one line, its listeners, its end, and the hostile things of a network."""

import asyncio
import json
import re
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests import builders
from tests.builders import Raw, raw_container, raw_pod
from tests.h2_client import H2Client
from tests.running import GPUWARDEN, Running, refusing, serving
from tests.web.harness import patched
from webhook.runtime.http.listener import Listener

READY = re.compile(
    r"ready https=https://127\.0\.0\.1:\d+ http=http://127\.0\.0\.1:\d+ extender=https://127\.0\.0\.1:\d+"
)
NODES = [
    {"name": f"node-{n}", "devices": [{"uuid": f"GPU-{n}-{k}", "labels": ["model=h100"]} for k in range(8)]}
    for n in range(16)
]
INVENTORY = {"nodes": NODES}


def gpu_review(uid: str, gpus: int = 1) -> Raw:
    return builders.mutating_create(raw_pod(raw_container(gpus=gpus), name=None, generate_name="train-"), uid=uid)


async def admitted(running: Running, uid: str = "r1", **options: Any) -> bool:
    async with running.client(**options) as client:
        reply = await client.post("/mutate", json=gpu_review(uid))
        return bool(reply.json()["response"]["allowed"])


async def test_serve_prints_one_line_and_stops_cleanly(tmp_path: Path) -> None:
    with serving(tmp_path, INVENTORY) as running:
        assert READY.fullmatch(running.ready)
        assert await admitted(running)
        for name in ("https", "http", "extender"):
            async with running.client() as client:
                assert (await client.get(f"{running.urls[name]}/readyz")).status_code == 200
        code, out, log = running.stop()
    assert (code, out) == (0, "")
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events[-2:] == ["draining", "stopped"]
    assert "evidence is static (configured by hand, nothing is attested): for development only" in events


@pytest.mark.defect("assigner-21")
async def test_the_log_level_applies(tmp_path: Path) -> None:
    with serving(tmp_path, INVENTORY, ["--log-level", "error"]) as running:
        assert await admitted(running)
        assert running.stop() == (0, "", "")


@pytest.mark.defect("assigner-21")
def test_failed_start_prints_the_reason_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("nodes: [{name: a, label: {}}]")
    done = refusing(
        tmp_path, "serve", "--inventory", "bad.yaml", "--port", "0", "--ui-port", "0", "--extender-port", "0"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "nodes[0]: Object contains unknown field `label`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.defect("assigner-21")
def test_port_in_use_is_an_error_in_a_sentence_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text("nodes: []")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = refusing(
            tmp_path, "serve", "--inventory", "inventory.yaml", "-p", port, "-U", "0", "--extender-port", "0"
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert port in done.stderr
    assert "Traceback" not in done.stderr


async def test_requests_in_progress_are_answered_at_the_stop(tmp_path: Path) -> None:
    body = builders.body(gpu_review("r1"))
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving(tmp_path, INVENTORY) as running:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.port, ssl=running.trust, server_hostname="localhost"
        )
        writer.write(head + body[:50])
        await writer.drain()
        async with running.client() as client:  # the server has certainly read on when it answers another
            await client.get("/healthz")
        stopping = asyncio.create_task(asyncio.to_thread(running.stop))
        await asyncio.sleep(0.3)
        writer.write(body[50:])
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        code, _, _ = await stopping
    assert code == 0
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"allowed":true' in answer


async def test_certificate_is_replaced_without_a_restart_and_an_invalid_one_is_ignored(tmp_path: Path) -> None:
    ca = trustme.CA()

    def show(number: int, cert: str | None = None) -> None:
        """Both files at one moment, as kubelet changes a mounted Secret."""
        leaf = ca.issue_cert("localhost", organization_unit_name=f"certificate {number}")
        made = tmp_path / f"certificate-{number}"
        made.mkdir()
        leaf.private_key_pem.write_to_path(made / "tls.key")
        (made / "tls.crt").write_text(leaf.cert_chain_pems[0].bytes().decode() if cert is None else cert)
        (tmp_path / "next").symlink_to(made)
        (tmp_path / "next").rename(tmp_path / "tls")

    show(1)
    flags = ["--tls-cert", "tls/tls.crt", "--tls-key", "tls/tls.key", "--reload-interval", "100ms"]
    with serving(tmp_path, INVENTORY, flags) as running:
        assert await served(running, ca) == "certificate 1"
        show(2)
        assert await until_served(running, ca, "certificate 2")
        show(0, cert="garbage")
        assert await until_metric(running, 'reloads_total{listener="tls",outcome="refused"} 1.0')
        assert await served(running, ca) == "certificate 2"
        show(3)
        assert await until_served(running, ca, "certificate 3")
        _, _, log = running.stop()
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events.count("certificate refused, the old one stays") == 2  # both TLS listeners, once each


async def served(running: Running, ca: trustme.CA) -> str:
    """The organizational unit in the certificate that a new connection is shown."""
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    _, writer = await asyncio.open_connection("127.0.0.1", running.port, ssl=trust, server_hostname="localhost")
    subject = writer.get_extra_info("ssl_object").getpeercert()["subject"]
    writer.close()
    return str(dict(part for parts in subject for part in parts)["organizationalUnitName"])


async def until_served(running: Running, ca: trustme.CA, name: str) -> bool:
    return await within(10, lambda: served(running, ca), name.__eq__)


async def until_metric(running: Running, line: str) -> bool:
    async def metrics() -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{running.urls['http']}/metrics")).text

    return await within(10, metrics, lambda text: line in text)


async def within(seconds: float, look: Any, is_right: Any) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if is_right(await look()):
            return True
        await asyncio.sleep(0.05)
    return False


# The API server behind the GPU Device Assigner's three flags.


@pytest.mark.defect("assigner-16")
async def test_finalize_asks_the_api_server_in_a_cluster(tmp_path: Path) -> None:
    pods: dict[str, Raw] = {}
    seen: list[str] = []

    async def read_pod(request: Request) -> Response:
        seen.append(request.headers["authorization"])
        pod = pods.get(f"{request.path_params['namespace']}/{request.path_params['name']}")
        if pod is None:
            return JSONResponse({"kind": "Status", "code": 404, "reason": "NotFound"}, status_code=404)
        return JSONResponse(pod)

    async def review_token(request: Request) -> Response:
        review = await request.json()
        is_known = review["spec"]["token"] == "the-caller"
        return JSONResponse({**review, "status": {"authenticated": is_known}}, status_code=201)

    async def review_access(request: Request) -> Response:
        review = await request.json()
        asked = review["spec"]["resourceAttributes"]
        may = (asked.get("namespace"), asked["verb"], asked["resource"]) in rights
        return JSONResponse({**review, "status": {"allowed": may}}, status_code=201)

    rights = {("ml", "finalize", "reservations")}
    routes = [
        Route("/apis/authorization.k8s.io/v1/subjectaccessreviews", review_access, methods=["POST"]),
        Route("/api/v1/namespaces/{namespace}/pods/{name}", read_pod),
        Route("/apis/authentication.k8s.io/v1/tokenreviews", review_token, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    api = Listener(app, host="127.0.0.1", port=0)
    await api.start()
    (tmp_path / "token").write_text("the-token\n")
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    flags = ["-k", api.url, "-t", "token", "-c", "ca.crt", "--ledger", "memory"]
    with serving(tmp_path, INVENTORY, flags) as running:
        for path in ("/finalize", "/explain"):
            async with running.client() as stranger:
                assert (await stranger.post(path, json={})).status_code == 401
        async with running.client(headers={"Authorization": "Bearer another"}) as stranger:
            assert (await stranger.get("/devices")).status_code == 401
            assert (await stranger.get("/")).status_code == 401
            plain = await stranger.get(f"{running.urls['http']}/devices")
            assert (plain.json()["nodes"], "GPU-0-0" in plain.text) == (len(NODES), False)
            assert (await stranger.post(f"{running.urls['http']}/finalize", json={})).status_code == 404
            assert (await stranger.get("/readyz")).status_code == 200
        async with running.client(headers={"Authorization": "Bearer the-caller"}) as client:
            assert (await client.get("/devices")).status_code == 200
            review = gpu_review("r1")
            response = (await client.post("/mutate", json=review)).json()["response"]
            dressed = patched(review["request"]["object"], response)
            pods["ml/train-a"] = builders.created(dressed, uid="uid-a", name="train-a")
            reserved = response["auditAnnotations"]
            told = {"namespace": "ml", "name": "train-a", "uid": "uid-a", "reservation-id": "r1"}
            told["gpu-uuid"] = reserved["gpus"]
            elsewhere = await client.post("/finalize", json={**told, "namespace": "other"})
            missing = await client.post("/finalize", json={**told, "name": "train-b"})
            other = await client.post("/finalize", json={**told, "uid": "uid-b"})
            (tmp_path / "token").write_text("the-next-token\n")
            right = await client.post("/finalize", json=told)
            await api.stop(0)
            away = await client.post("/finalize", json=told)
    assert elsewhere.status_code == 403
    assert (missing.status_code, missing.json()) == (422, {"error": "there is no pod ml/train-b"})
    assert (other.status_code, other.json()) == (422, {"error": "pod ml/train-a has another uid"})
    assert (right.status_code, right.json()) == (200, {"status": "ok"})
    assert (away.status_code, away.headers["retry-after"]) == (503, "1")
    assert (seen[0], seen[-1]) == ("Bearer the-token", "Bearer the-next-token")


# A network's hostile and idle things, under the defaults of a real process.


async def test_three_thousand_reviews_over_one_http2_connection(tmp_path: Path) -> None:
    """Hypercorn's own limit of 1,000 requests per connection loses some of them."""
    total, at_once = 3_000, 64
    numbers = iter(range(total))
    allowed = 0
    with serving(tmp_path, INVENTORY, ["--log-level", "error"]) as running:
        trust = running.trust
        trust.set_alpn_protocols(["h2"])
        async with H2Client("127.0.0.1", running.port, trust) as client:

            async def ask_on() -> None:
                nonlocal allowed
                for number in numbers:
                    answer = await client.post("/mutate?timeout=30s", builders.body(gpu_review(f"r{number % 128}")))
                    assert answer.status == 200
                    allowed += json.loads(answer.body)["response"]["allowed"]

            await asyncio.gather(*(ask_on() for _ in range(at_once)))
            assert client.goaways == 0
        code, _, _ = running.stop()
    assert (allowed, code) == (total, 0)


def test_serve_stops_while_it_waits_for_the_api_server(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        cluster = {"name": "c", "cluster": {"server": url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {}}]
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(
            json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"})
        )
        command = [GPUWARDEN, "serve", "--kubeconfig", str(kubeconfig), "--port", "0", "--ui-port", "0"]
        command += ["--extender-port", "0"]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "watch interrupted" in line:
                    break
            process.terminate()
            try:
                assert process.wait(15) == 0
            finally:
                process.kill()
