"""The life of a pod against a server of its own: reserve, finalize, the next pod, a denial, the end."""

import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonpatch
import yaml

ROOT = Path(__file__).resolve().parent.parent
HASH = "sha256:aa11"
INVENTORY = {
    "nodes": [
        {
            "name": "node-a",
            "evidence": {"hash": HASH},
            "devices": [{"uuid": "GPU-0001", "labels": ["model=h100"]}, {"uuid": "GPU-0002", "labels": ["model=h100"]}],
        },
        {"name": "node-b", "devices": [{"uuid": "GPU-0003", "labels": ["model=h100"]}]},
    ]
}


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """`gpuwarden serve` on free ports, and its URLs."""
    with tempfile.TemporaryDirectory() as work:
        inventory = Path(work, "inventory.yaml")
        inventory.write_text(yaml.safe_dump(INVENTORY))
        gpuwarden = str(Path(sys.executable).parent / "gpuwarden")
        command = [gpuwarden, "serve", "--inventory", str(inventory), "--log-level", "error"]
        ports = ["--port", "0", "--ui-port", "0", "--extender-port", "0"]
        with subprocess.Popen([*command, *ports], cwd=work, stdout=subprocess.PIPE, text=True) as process:
            try:
                ready = process.stdout.readline() if process.stdout else ""
                if not ready.startswith("ready "):
                    raise SystemExit("the server did not start; its log is above")
                yield {"ca": f"{work}/certs/dev/ca.crt", **dict(part.split("=", 1) for part in ready.split()[1:])}
            finally:
                process.terminate()


class Cluster:
    """Acts as the API server."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.client = httpx.Client(base_url=urls["https"], verify=urls["ca"])
        self.reviews = 0

    def ask(self, path: str, operation: str, **objects: Any) -> dict[str, Any]:
        self.reviews += 1
        kind = {"group": "", "version": "v1", "kind": "Pod"}
        request = {"uid": f"review-{self.reviews}", "kind": kind, "namespace": "ml", "operation": operation, **objects}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        response: dict[str, Any] = self.client.post(path, json=body).json()["response"]
        return response

    def create(self, name: str) -> dict[str, Any] | None:
        """Sends the pod to /mutate. Returns the patched pod, or None if it was denied."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ml", "annotations": {"gpuwarden.io/required-hash": HASH}},
            "spec": {"containers": [{"name": "train", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
        }
        response = self.ask("/mutate", "CREATE", object=pod)
        if not response["allowed"]:
            status = response["status"]
            print(f"   denied: {status['code']} {status['reason']}: {status['message']}")
            return None
        patched: dict[str, Any] = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
        patched["metadata"]["uid"] = f"uid-of-{name}"
        wear = patched["metadata"]["annotations"]
        print(f"   admitted: {wear['gpuwarden.io/gpu-uuid']} on {wear['gpuwarden.io/node']}")
        return patched

    def finalize(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        body = {
            "namespace": meta["namespace"],
            "name": meta["name"],
            "uid": meta["uid"],
            "reservation-id": meta["annotations"]["gpuwarden.io/reservation-id"],
            "gpu-uuid": meta["annotations"]["gpuwarden.io/gpu-uuid"],
        }
        reply = self.client.post("/finalize", json=body)
        print(f"   {reply.status_code} {reply.text}")

    def delete(self, pod: dict[str, Any]) -> None:
        self.ask("/validate", "DELETE", oldObject=pod, name=pod["metadata"]["name"])

    def show(self) -> None:
        for uuid, device in self.client.get("/devices").json().items():
            assignment = device.get("assignment", {})
            holder = f"{assignment['namespace']}/{assignment.get('name', '')}" if assignment else "-"
            print(f"   {uuid}  {device['node']}  {device['state']:<10} {holder}")


def required(pod: dict[str, Any] | None) -> dict[str, Any]:
    if pod is None:
        raise SystemExit("the demo failed: a pod that should have been admitted was denied")
    return pod


def main() -> None:
    with server() as urls:
        cluster = Cluster(urls)
        print(f"Three GPUs. node-a has proven {HASH}, node-b has no evidence:")
        cluster.show()
        print("\n1. A pod asks for one GPU on a node with that hash:")
        first = required(cluster.create("first"))
        cluster.show()
        print("\n2. /finalize confirms that the pod exists:")
        cluster.finalize(first)
        cluster.show()
        print("\n3. A second pod gets another GPU:")
        second = required(cluster.create("second"))
        cluster.finalize(second)
        print("\n4. No GPU is left for a third pod: the GPU of node-b is free, but node-b has no evidence:")
        if cluster.create("third") is not None:
            raise SystemExit("the demo failed: the third pod was admitted")
        print("\n5. The first pod ends, and its GPU is free:")
        cluster.delete(first)
        cluster.show()
        print("\n6. The third pod is created again:")
        required(cluster.create("third"))


if __name__ == "__main__":
    main()
