"""What the chart refuses because of objects in the cluster, with a server that answers helm's requests."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from scripts.chart_values import CHART
from tests.chart.rendering import HELM, KUBERNETES, Raw, unfolded
from webhook.core.proof_claims import CLAIM_LABELS, GpuDemand, claim_spec, demanded_spec, reserved_claim_spec
from webhook.kube.claim_templates import API_VERSION

NAMES: dict[str, Any] = {"gpu_driver": "gpu.nvidia.com", "gpu_class": "gpu.nvidia.com", "evicts": True}
OF_RESERVATION = reserved_claim_spec(["GPU-1"], "aa11", mig_class="mig.nvidia.com", **NAMES)
FROM_TEMPLATE, FROM_RECORD = claim_spec(1, "aa11", **NAMES), demanded_spec(GpuDemand(1), **NAMES)
FROM_MAP = demanded_spec(GpuDemand(1, uuids=("GPU-1",), kept_for="5e7"), **NAMES)


def discovery(claims: list[Raw]) -> Mapping[str, Raw]:
    resource = {"name": "resourceclaims", "kind": "ResourceClaim", "namespaced": True, "verbs": ["list"]}
    version = {"groupVersion": API_VERSION, "version": "v1"}
    group = {"name": "resource.k8s.io", "versions": [version], "preferredVersion": version}
    listed = {"kind": "ResourceClaimList", "apiVersion": API_VERSION, "items": claims}
    return {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{API_VERSION}": {"kind": "APIResourceList", "groupVersion": API_VERSION, "resources": [resource]},
        f"/apis/{API_VERSION}/resourceclaims": listed,
    }


@contextmanager
def cluster(claims: list[Raw]) -> Iterator[str]:
    """The address of an API server with these claims."""
    found = discovery(claims)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = found.get(self.path.partition("?")[0])
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            text = json.dumps(status if known is None else known).encode()
            self.send_response(404 if known is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def claim(spec: Raw, **annotations: str) -> Raw:
    meta = {"name": "one", "namespace": "ml", "labels": CLAIM_LABELS, "annotations": annotations}
    allocation = {"devices": {"results": [{"driver": "gpu.nvidia.com", "pool": "a", "device": "gpu-0"}]}}
    status = {"allocation": allocation}
    return {"apiVersion": API_VERSION, "kind": "ResourceClaim", "metadata": meta, "spec": spec, "status": status}


def problem(claims: list[Raw], values: Raw) -> str:
    """Why helm refuses an upgrade to these values."""
    with cluster(claims) as address:
        command = [HELM, "template", "gpuwarden", str(CHART), "-n", "gpuwarden", "--is-upgrade", "-f", "-"]
        known = ["--kube-version", KUBERNETES, "--api-versions", f"{API_VERSION}/ResourceClaim"]
        done = subprocess.run(
            [*command, *known, "--dry-run=server", "--kube-apiserver", address],
            input=json.dumps(unfolded(values)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={"KUBECONFIG": os.devnull},
        )
    return " ".join(done.stderr.split()) if done.returncode else ""


MADE = {"resource.kubernetes.io/pod-claim-name": "gpuwarden"}
RESERVING = {"nvidia": {}, "dra": {"settings.injection": "dra"}}


@pytest.mark.parametrize("values", RESERVING.values(), ids=RESERVING)
def test_gpus_that_kube_scheduler_has_chosen_are_not_reserved_for_others(values: Raw) -> None:
    for one in (claim(FROM_TEMPLATE, **MADE), claim(FROM_RECORD), claim(FROM_MAP)):
        assert "such as the pod of ResourceClaim ml/one" in problem([one], values)
        assert problem([{**one, "status": {}}], values) == "", "it has no GPU"
        for chosen in ({"settings.injection": "dra", "settings.reserve": "bind"}, {"native": True}):
            assert problem([one], chosen) == ""


def test_claims_of_reservations_prevent_nothing() -> None:
    for values in RESERVING.values():
        assert problem([claim(OF_RESERVATION)], values) == ""
