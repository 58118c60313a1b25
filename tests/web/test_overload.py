"""Behaviour at the limit of concurrent reviews."""

from contextlib import ExitStack
from pathlib import Path

from tests import builders
from tests.builders import Raw
from tests.web.harness import Harness
from webhook.web.admission import RESERVED_FOR_BINDINGS


def binding() -> Raw:
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    request = {
        "uid": "binding",
        "kind": {"group": "", "version": "v1", "kind": "Binding"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "subResource": "binding",
        "operation": "CREATE",
        "namespace": "ml",
        "name": "train",
        "object": {"metadata": {"name": "train", "namespace": "ml", "uid": "uid-1"}, "target": target},
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def test_overload_answers_pods_with_503_and_denies_bindings(tmp_path: Path) -> None:
    """With `failurePolicy: Ignore` the API server admits a request that is answered 503, so a Binding is denied."""
    harness = await Harness(tmp_path, {"nodes": []}, None).start()
    pod = builders.body(builders.mutating_create(builders.raw_pod(builders.raw_container(gpus=1))))
    with ExitStack() as busy:
        for _ in range(harness.budgets.limits.reviews):
            busy.enter_context(harness.budgets.review())
        reply = await harness.tls.post("/mutate", content=pod)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        reviewed = (await harness.tls.post("/validate", json=binding())).json()["response"]
        assert reviewed.get("status", {}).get("reason") != "Overloaded"
        for _ in range(RESERVED_FOR_BINDINGS):
            busy.enter_context(harness.budgets.review(RESERVED_FOR_BINDINGS))
        denied = await harness.tls.post("/validate", json=binding())
        response = denied.json()["response"]
        assert (denied.status_code, response["uid"], response["allowed"]) == (200, "binding", False)
        assert (response["status"]["code"], response["status"]["reason"]) == (503, "Overloaded")
    assert (await harness.tls.post("/mutate", content=pod)).status_code == 200
    await harness.close()
