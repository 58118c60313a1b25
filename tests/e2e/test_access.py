"""Access in both directions: `serve` and `reconcile` with the shipped permissions, and an API server that identifies
itself. Both need an API server with its own flags, so this module has its own cluster."""

import base64
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from scripts.controlplane.cluster import Cluster, gpu_node
from tests import builders
from tests.e2e.conftest import new_namespace
from tests.e2e.dra.gpus import RESOURCE_CLAIMS
from tests.e2e.kube import (
    EVENTS,
    JOBS,
    NODES,
    PODS,
    SUBJECT_REVIEWS,
    ApiError,
    Kube,
    Raw,
    Resource,
    gone,
    job,
    pod,
    pod_in_phase,
    wait_until,
)
from tests.e2e.webhook_configurations import ENABLED
from tests.ledger.fake_store import gpu_node as gpu_node_object
from tests.running import GPUWARDEN, Running, reconciling, serving
from webhook.admission.evictions import ApiEvictor
from webhook.core.proof_claims import reserved_claim_spec
from webhook.core.reservation import PodIdentity
from webhook.kube.client import connect
from webhook.kube.install.policies import Installation, rbac
from webhook.kube.requests import RateLimit, RateLimitedClient
from webhook.kube.resource_claims import ResourceClaims
from webhook.runtime.settings import Settings

NODE_NAMES, GPUS = ("node-0", "node-1"), 2
GPU_NODES = Resource("apis/gpuwarden.io/v1alpha1", "gpunodes", is_namespaced=False)
OURS = "gpuwarden"
AUDIENCE = "gpuwarden"
# The account with which this API server calls webhooks.
CALLER = ("kube-system", "apiserver-webhook")
CALLER_NAME = "system:serviceaccount:" + ":".join(CALLER)


class Identity:
    """How the API server identifies itself to webhooks: a token in a file, and a certificate of a CA that has signed no
    other."""

    def __init__(self, directory: Path) -> None:
        self.ca, self.token = trustme.CA(), directory / "webhook-token"
        self.ca_file, self.pair = directory / "client-ca.crt", directory / "client.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.ca.issue_cert("kube-apiserver").private_key_and_cert_chain_pem.write_to_path(self.pair)
        self.token.write_text("not there yet")

    def flags(self, directory: Path) -> list[str]:
        user = {"tokenFile": str(self.token), "client-certificate": str(self.pair), "client-key": str(self.pair)}
        kubeconfig = {"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]}
        (directory / "webhooks.kubeconfig").write_text(json.dumps(kubeconfig))
        version = "apiserver.config.k8s.io/v1"
        each = {
            "apiVersion": version,
            "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": str(directory / "webhooks.kubeconfig"),
        }
        plugins = [
            {"name": name, "configuration": each} for name in ("MutatingAdmissionWebhook", "ValidatingAdmissionWebhook")
        ]
        content = {"apiVersion": version, "kind": "AdmissionConfiguration", "plugins": plugins}
        (directory / "admission.json").write_text(json.dumps(content))
        return [f"--admission-control-config-file={directory / 'admission.json'}"]


AUDITED: Raw = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": [f"system:serviceaccounts:{OURS}"]}, {"level": "None"}],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def identity(directory: Path) -> Identity:
    return Identity(directory)


@pytest.fixture(scope="module")
def cluster(directory: Path, identity: Identity) -> Iterator[Cluster]:
    (directory / "audited.json").write_text(json.dumps(AUDITED))
    audit = [f"--audit-policy-file={directory / 'audited.json'}", f"--audit-log-path={directory / 'audit.log'}"]
    with Cluster(directory / "cluster", flags={"kube-apiserver": [*audit, *identity.flags(directory)]}) as running:
        running.add_nodes(gpu_node(name, GPUS) for name in NODE_NAMES)
        identity.token.write_text(running.service_account_token(*CALLER, audience=AUDIENCE))
        subprocess.run([*running.kubectl, "create", "namespace", OURS], check=True, capture_output=True)
        for what in ("crds", "rbac", "policies"):
            apply(running, what)
        yield running


def apply(cluster: Cluster, *flags: str) -> None:
    """Installs as an operator would: `gpuwarden manifests | kubectl apply -f -`."""
    printed = subprocess.run([GPUWARDEN, "manifests", *flags], check=True, capture_output=True, text=True)
    command = [*cluster.kubectl, "apply", "-f", "-"]
    done = subprocess.run(command, input=printed.stdout, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
async def gpu_nodes(kube: Kube) -> None:
    for name in NODE_NAMES:
        content = gpu_node_object(name, *(f"GPU-{name}-{k}" for k in range(GPUS)))
        await wait_until(lambda content=content: is_there(kube, content))  # type: ignore[misc]  # bound now, not later


async def is_there(kube: Kube, content: Raw) -> bool:
    """A resource is served a moment after its definition is created. `reconcile` may have created the object
    already."""
    try:
        await kube.create(GPU_NODES, content)
    except ApiError as exc:
        return exc.status == 409
    return True


@pytest.fixture
async def namespace(kube: Kube, gpu_nodes: None) -> AsyncIterator[str]:
    async with new_namespace(kube, ENABLED) as name:
        yield name


@contextmanager
def served(cluster: Cluster, directory: Path, *flags: str) -> Iterator[Running]:
    """A replica with its own service account that reviews the API server's pods."""
    directory.mkdir()
    account = ["--kubeconfig", str(cluster.service_account_kubeconfig(OURS, "gpuwarden")), "--log-level", "warn"]
    with serving(directory, None, [*account, *flags]) as running:
        ca = str(directory / "certs/dev/ca.crt")
        apply(cluster, "webhooks", "--url", running.urls["https"], "--ca-bundle", ca)
        yield running


async def is_dressed(kube: Kube, namespace: str) -> bool:
    """Whether both webhooks act and allow a dressed pod."""
    try:
        made = await kube.create(PODS, pod("probe", gpus=1), namespace, dryRun="All")
    except ApiError:
        return False
    return "gpuwarden.io/gpu-uuid" in made["metadata"].get("annotations", {})


async def held(kube: Kube) -> dict[str, Raw]:
    found = await kube.list(GPU_NODES)
    return {slot: entry for one in found for slot, entry in one.get("status", {}).get("held", {}).items()}


# The identity of the API server.

TOKEN = ("--review-token-audience", AUDIENCE, "--review-callers", CALLER_NAME)


def review(namespace: str) -> Raw:
    return builders.mutating_create(builders.raw_pod(builders.raw_container(gpus=1), namespace=namespace), uid="forged")


async def posted(running: Running, path: str, namespace: str, token: str = "", pair: Path | None = None) -> int:
    """The status of a posted review; 0 if there was no connection."""
    trust = running.trust
    if pair is not None:
        trust.load_cert_chain(pair)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=running.urls["https"], verify=trust, trust_env=False) as client:
        try:
            return (await client.post(path, json=review(namespace), headers=headers)).status_code
        except (httpx.TransportError, OSError):
            return 0


async def test_reviews_need_a_token_of_the_audience_and_of_an_allowed_caller(
    cluster: Cluster, kube: Kube, namespace: str, identity: Identity, tmp_path: Path
) -> None:
    tokens = {
        "nobody's": "",
        "another's of the audience": cluster.service_account_token(namespace, "default", audience=AUDIENCE),
        "the caller's for the API server": cluster.service_account_token(*CALLER),
        "the caller's for another audience": cluster.service_account_token(*CALLER, audience="another"),
        "the administrator's": cluster.admin_token,
        "none at all": "x.y.z",
    }
    with served(cluster, tmp_path / "serve", *TOKEN) as running:
        await wait_until(lambda: is_dressed(kube, namespace))
        for path in ("/mutate", "/validate"):
            codes = {whose: await posted(running, path, namespace, token) for whose, token in tokens.items()}
            assert codes == dict.fromkeys(tokens, 401)
        assert await held(kube) == {}
        # The API server's own reviews are answered, so the token made the difference.
        assert await posted(running, "/validate", namespace, identity.token.read_text()) == 200


async def test_without_review_callers_only_the_audience_is_checked(
    cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    with served(cluster, tmp_path / "serve", *TOKEN[:2]) as running:
        await wait_until(lambda: is_dressed(kube, namespace))
        other = cluster.service_account_token(namespace, "default", audience=AUDIENCE)
        assert await posted(running, "/validate", namespace, other) == 200
        assert await posted(running, "/validate", namespace, cluster.service_account_token(*CALLER)) == 401


async def test_reviews_need_a_certificate_of_the_client_ca(
    cluster: Cluster, kube: Kube, namespace: str, identity: Identity, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().issue_cert("kube-apiserver").private_key_and_cert_chain_pem.write_to_path(stranger)
    with served(cluster, tmp_path / "serve", "--client-ca", str(identity.ca_file)) as running:
        await wait_until(lambda: is_dressed(kube, namespace))
        for path in ("/mutate", "/validate"):
            assert await posted(running, path, namespace, cluster.admin_token) == 403
            assert await posted(running, path, namespace, cluster.admin_token, stranger) == 0
        # Callers without such a certificate, such as browsers and nodes, can use the other routes.
        async with httpx.AsyncClient(base_url=running.urls["https"], verify=running.trust, trust_env=False) as client:
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get("/devices")).status_code == 401
            assert (await client.get("/devices", headers=bearer(cluster, namespace))).status_code == 200
        assert await held(kube) == {}
        assert await posted(running, "/validate", namespace, pair=identity.pair) == 200


# The permissions.

Use = tuple[str, str, str]
POLICIES_ASK = "the policies ask the authorizer for it; it is in no request"
PROOFS_ONLY = "only where nodes are challenged, which is not here but in the tests of proofs"
ON_NODES_ONLY = "only on nodes, which have tests of their own"
CHALLENGES_ONLY = "only with --challenge-at-bind, in tests/e2e/dra/test_bind_challenge.py"
CLAIMS_ONLY = "only with the injection dra, which is not here but in a test of its own"
READ_AGAIN = "read again where another writer was faster, which is chance here"
# Granted, and not always used in this test.
SPARE: dict[str, dict[Use, str]] = {
    "gpuwarden": {
        ("gpuwarden.io", "reservations", "manage"): POLICIES_ASK,
        ("gpuwarden.io", "gpunodes", "get"): READ_AGAIN,
        ("gpuwarden.io", "nodeevidences", "get"): PROOFS_ONLY,
        ("gpuwarden.io", "nodeevidences", "create"): PROOFS_ONLY,
        ("gpuwarden.io", "nodeevidences/status", "update"): PROOFS_ONLY,
        ("gpuwarden.io", "trustbundles", "get"): PROOFS_ONLY,
        ("gpuwarden.io", "trustbundles", "create"): PROOFS_ONLY,
        ("gpuwarden.io", "trustbundles/status", "update"): PROOFS_ONLY,
        ("", "nodes", "get"): PROOFS_ONLY,
        ("scheduling.k8s.io", "priorityclasses", "list"): "with --scorer",
        ("scheduling.k8s.io", "priorityclasses", "watch"): "with --scorer",
        ("", "namespaces", "get"): "one that came with its first pods is looked up, which is chance here",
    },
    "gpuwarden-reconcile": {
        ("gpuwarden.io", "reservations", "manage"): POLICIES_ASK,
        ("gpuwarden.io", "bindingends", "create"): "where no replica of serve has made it, as the one here has",
        ("gpuwarden.io", "gpunodes", "get"): READ_AGAIN,
        ("gpuwarden.io", "nodeevidences", "get"): READ_AGAIN,
        (
            "gpuwarden.io",
            "nodeevidences",
            "delete",
        ): "with a Node that goes, which none does here",
        ("", "nodes", "patch"): "with --on-evidence-lost taint",
        ("", "pods/eviction", "create"): "with --on-evidence-lost evict",
        ("", "pods/status", "patch"): "with --reserve bind",
        ("resource.k8s.io", "resourceslices", "get"): READ_AGAIN,
        ("resource.k8s.io", "resourceslices", "update"): "where a proven GPU is reserved, which is chance here",
        ("resource.k8s.io", "resourceslices", "delete"): "half a minute after the last proof of a node has ended",
        ("resource.k8s.io", "resourceclaimtemplates", "delete"): "an hour after nothing needs the template",
        ("resource.k8s.io", "resourceclaims/status", "patch"): "after a failed Binding, which none is here",
        ("resource.k8s.io", "resourceclaims/binding", "patch"): "after a failed Binding, which none is here",
        ("resource.k8s.io", "resourceclaims/driver", "arbitrary-node:patch"): CHALLENGES_ONLY,
        ("resource.k8s.io", "resourceclaims", "get"): CLAIMS_ONLY,
        ("resource.k8s.io", "resourceclaims", "create"): CLAIMS_ONLY,
        ("resource.k8s.io", "resourceclaims", "delete"): CLAIMS_ONLY,
        ("", "pods/finalizers", "update"): "a plugin of the API server asks for it; it is in no request",
        ("", "pods", "get"): "one pod is looked at where its watch has not shown it in time, which is chance here",
    },
    # As the kubelet's plugin: tests/e2e/dra/test_closing.py and tests/e2e/node/test_proof_devices.py.
    "gpuwarden-attest": {
        ("resource.k8s.io", "resourceclaims", "get"): ON_NODES_ONLY,
        ("resource.k8s.io", "resourceslices", "get"): ON_NODES_ONLY,
        ("resource.k8s.io", "resourceslices", "update"): ON_NODES_ONLY,
        ("resource.k8s.io", "resourceslices", "list"): CHALLENGES_ONLY,
        ("resource.k8s.io", "resourceslices", "watch"): CHALLENGES_ONLY,
    },
}


def granted() -> dict[str, set[Use]]:
    """The granted rights by service account: (API group, resource, verb)."""
    manifests = rbac(Installation())
    rules = {(one["kind"], one["metadata"]["name"]): one["rules"] for one in manifests if "rules" in one}
    found: dict[str, set[Use]] = {}
    for binding in (one for one in manifests if "roleRef" in one):
        ref, (subject,) = binding["roleRef"], binding["subjects"]
        found.setdefault(subject["name"], set()).update(
            (group, resource, verb)
            for rule in rules[ref["kind"], ref["name"]]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        )
    return found


def requests(log: Path) -> list[tuple[str, Use, int]]:
    """The requests in the audit log: the account, the request, and whether it was allowed."""
    found = []
    for event in map(json.loads, log.read_text().splitlines()):
        ref = event.get("objectRef", {})
        resource = "/".join(part for part in (ref.get("resource"), ref.get("subresource")) if part)
        account = event["user"]["username"].rpartition(":")[2]
        use = (ref.get("apiGroup", ""), resource, event["verb"])
        found.append((account, use, event.get("responseStatus", {}).get("code", 0)))
    return found


async def test_each_service_account_has_exactly_the_permissions_it_uses(
    cluster: Cluster, kube: Kube, namespace: str, identity: Identity, directory: Path, tmp_path: Path
) -> None:
    account = str(cluster.service_account_kubeconfig(OURS, "gpuwarden-reconcile"))
    lease = ["--lease-namespace", OURS, "--kubeconfig", account, "--log-level", "warn"]
    soon = ["--bind-deadline", "2s", "--orphan-margin", "1s", "--node-hash-map", json.dumps({NODE_NAMES[0]: "aa11"})]
    soon += ["--proof-devices", "true", "--native-templates", "true"]
    (tmp_path / "reconcile").mkdir()
    both = (*TOKEN, "--client-ca", str(identity.ca_file))
    with ExitStack() as stack:
        running = stack.enter_context(served(cluster, tmp_path / "serve", *both))
        await wait_until(lambda: is_dressed(kube, namespace))
        # Without a reconciler, `serve` looks for pods on the node of a new GPUNode. The pod may be deleted before the
        # reconciler has seen it; then it keeps its GPU for its grace period.
        await kube.create(PODS, pod("first", gpus=1, terminationGracePeriodSeconds=1), namespace)
        other = stack.enter_context(reconciling(tmp_path / "reconcile", [*lease, *soon]))
        await kube.delete(PODS, "first", namespace)
        await pods_come_run_and_go(kube, namespace, running, cluster)
        await a_pod_waits_and_is_served(kube, namespace)
        await pods_that_cannot_run_are_removed(kube, namespace)
        await nodes_come_change_and_go(kube, cluster)
        await callers_are_asked(running, cluster, namespace)
        await probes_are_not_asked(running, other)
    seen = requests(directory / "audit.log")
    assert [one for one in seen if one[2] in (401, 403)] == []
    for name, uses in granted().items():
        used = {use for account_name, use, _ in seen if account_name == name}
        assert uses - used - SPARE[name].keys() == set(), name


async def test_reconciler_account_may_do_what_evidence_loss_needs(cluster: Cluster, kube: Kube) -> None:
    node = NODE_NAMES[1]
    before = (await kube.get(NODES, node))["spec"].get("taints", [])
    settings = Settings(kubeconfig=cluster.service_account_kubeconfig(OURS, "gpuwarden-reconcile"))
    async with await connect(settings) as api, new_namespace(kube) as namespace:
        measures = ApiEvictor(api)
        for _ in range(2):  # repeating a change is no error
            await measures.taint(node, wanted=True)
            found = (await kube.get(NODES, node))["spec"]["taints"]
            assert found == [*before, {"key": "gpuwarden.io/evidence-lost", "effect": "NoSchedule"}]
        for _ in range(2):
            await measures.taint(node, wanted=False)
            assert (await kube.get(NODES, node))["spec"].get("taints", []) == before
        await measures.taint("no-such-node", wanted=True)
        uid = (await kube.create(PODS, pod("p0"), namespace))["metadata"]["uid"]
        await measures.evict(PodIdentity(namespace, "p0", "of-the-pod-before"))
        assert "deletionTimestamp" not in (await kube.get(PODS, "p0", namespace))["metadata"]
        await measures.evict(PodIdentity(namespace, "p0", uid))
        await gone(kube, PODS, "p0", namespace)
        await measures.evict(PodIdentity(namespace, "p0", uid))


async def test_reconciler_account_may_do_what_claims_of_pods_need(cluster: Cluster, kube: Kube) -> None:
    settings = Settings(kubeconfig=cluster.service_account_kubeconfig(OURS, "gpuwarden-reconcile"))
    async with await connect(settings) as api, new_namespace(kube) as namespace:
        claims = ResourceClaims(RateLimitedClient(api, RateLimit(100, 100, time.monotonic)))
        owner = await kube.create(PODS, pod("p0"), namespace)
        owned = {"apiVersion": "v1", "kind": "Pod", "name": "p0", "uid": owner["metadata"]["uid"]}
        meta = {"name": "gpuwarden-a", "namespace": namespace, "ownerReferences": [owned]}
        spec = reserved_claim_spec(
            ["GPU-1"], "aa11", gpu_driver="gpu.nvidia.com", gpu_class="gpu", mig_class="mig", evicts=True
        )
        raw = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": meta, "spec": spec}
        made = await claims.create(raw)
        assert made is not None
        uid = made["metadata"]["uid"]
        again = await claims.create(raw)
        assert again is not None
        assert again["metadata"]["uid"] == uid
        await claims.delete(namespace, "gpuwarden-a", "of-another")
        assert await kube.find(RESOURCE_CLAIMS, "gpuwarden-a", namespace) is not None
        await claims.delete(namespace, "gpuwarden-a", uid)
        assert await kube.find(RESOURCE_CLAIMS, "gpuwarden-a", namespace) is None
        await claims.delete(namespace, "gpuwarden-a", uid)
    reviewed = {"resource": "pods", "subresource": "finalizers", "verb": "update", "namespace": namespace}
    user = f"system:serviceaccount:{OURS}:gpuwarden-reconcile"
    answer = await kube.create(SUBJECT_REVIEWS, {"spec": {"user": user, "resourceAttributes": reviewed}})
    assert answer["status"]["allowed"]


def bearer(cluster: Cluster, namespace: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {cluster.service_account_token(namespace, 'default')}"}


async def pods_come_run_and_go(kube: Kube, namespace: str, running: Running, cluster: Cluster) -> None:
    for number in range(2):
        ends = {"kubelet.test/runs-for": "1s", "kubelet.test/ends": "Succeeded"} if number else {}
        made = await kube.create(PODS, pod(f"p{number}", gpus=1, annotations=ends, restartPolicy="Never"), namespace)
        notes = made["metadata"]["annotations"]
        assert notes["gpuwarden.io/gpu-uuid"].startswith("GPU-node-")
        told = {
            "name": made["metadata"]["name"],
            "namespace": namespace,
            "uid": made["metadata"]["uid"],
            "gpu-uuid": notes["gpuwarden.io/gpu-uuid"],
            "reservation-id": notes["gpuwarden.io/reservation-id"],
        }
        async with httpx.AsyncClient(base_url=running.urls["https"], verify=running.trust, trust_env=False) as client:
            assert (await client.post("/finalize", json=told)).status_code == 401
            refused = await client.post("/finalize", json=told, headers=bearer(cluster, namespace))
            assert refused.status_code == 403
            admin = {"Authorization": f"Bearer {cluster.admin_token}"}
            got = await client.post("/finalize", json=told, headers=admin)
            assert (got.status_code, got.json()) == (200, {"status": "ok"})
    await pod_in_phase(kube, namespace, "p0", "Running")
    await pod_in_phase(kube, namespace, "p1", "Succeeded")
    await wait_until(lambda: held(kube), lambda found: [one["pod"] for one in found.values()] == ["p0"])
    await kube.delete(PODS, "p0", namespace)
    await gone(kube, PODS, "p0", namespace)
    await wait_until(lambda: held(kube), lambda found: found == {})


async def a_pod_waits_and_is_served(kube: Kube, namespace: str) -> None:
    """The pod's map names a GPU that another pod has, for its grace period if the reconciler has not seen it end."""
    made = await kube.create(PODS, pod("holder", gpus=1, terminationGracePeriodSeconds=1), namespace)
    notes = made["metadata"]["annotations"]
    text = f"0={notes['gpuwarden.io/node']}:{notes['gpuwarden.io/gpu-uuid']}"
    content = pod("waits", annotations={"gpuwarden.io/gpu-map": text})
    content["metadata"]["labels"] = {"apps.kubernetes.io/pod-index": "0"}
    waits = await kube.create(PODS, content, namespace)
    assert waits["spec"]["schedulingGates"] == [{"name": "gpuwarden.io/queue"}]
    await kube.delete(PODS, "holder", namespace)
    await pod_in_phase(kube, namespace, "waits", "Running")
    await kube.delete(PODS, "waits", namespace)
    await gone(kube, PODS, "waits", namespace)


async def pods_that_cannot_run_are_removed(kube: Kube, namespace: str) -> None:
    """A pod that no scheduler binds to its node loses its GPUs, and its controller creates another."""
    content = job("stuck", gpus=1)
    content["spec"]["template"]["spec"]["schedulerName"] = "nobody"
    await kube.create(JOBS, content, namespace)
    selector = f"reason=BindDeadlinePassed,involvedObject.namespace={namespace}"
    await wait_until(lambda: kube.list(EVENTS, namespace, fieldSelector=selector))
    await kube.delete(JOBS, "stuck", namespace)
    await wait_until(lambda: held(kube), lambda found: found == {})


async def nodes_come_change_and_go(kube: Kube, cluster: Cluster) -> None:
    def note(*uuids: str) -> Raw:
        text = base64.b64encode(json.dumps({uuid: [] for uuid in uuids}).encode()).decode()
        return {"fudo.org/gpu.device.labels": text}

    async def devices() -> list[str]:
        found = await kube.find(GPU_NODES, "node-new") or {}
        return [one["uuid"] for one in found.get("spec", {}).get("devices", ())]

    node = gpu_node("node-new", 2)
    node["metadata"]["annotations"] = note("GPU-new-0")
    await kube.create(NODES, node)
    await wait_until(devices, lambda seen: seen == ["GPU-new-0"])
    await kube.patch(NODES, "node-new", {"metadata": {"annotations": note("GPU-new-0", "GPU-new-1")}})
    await wait_until(devices, lambda seen: seen == ["GPU-new-0", "GPU-new-1"])
    await kube.delete(NODES, "node-new")
    await gone(kube, GPU_NODES, "node-new")


async def callers_are_asked(running: Running, cluster: Cluster, namespace: str) -> None:
    """Routes that show tenants' pods or change something need a caller that the API server knows."""
    known = bearer(cluster, namespace)
    async with httpx.AsyncClient(base_url=running.urls["https"], verify=running.trust, trust_env=False) as client:
        for path in ("/", "/devices"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=known)).status_code == 200
    async with httpx.AsyncClient(base_url=running.urls["extender"], verify=running.trust, trust_env=False) as client:
        for path in ("/filter", "/prioritize", "/bind"):
            assert (await client.post(path, json={})).status_code == 401


async def probes_are_not_asked(*processes: Running) -> None:
    for one in processes:
        async with httpx.AsyncClient(base_url=one.urls["http"], trust_env=False) as client:
            for path in ("/healthz", "/health", "/readyz", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 200


# Without authentication of callers.


async def request_json(running: Running, namespace: str, uid: str) -> tuple[bool, str]:
    asked = {**review(namespace)["request"], "uid": uid}
    async with httpx.AsyncClient(base_url=running.urls["https"], verify=running.trust, trust_env=False) as client:
        body = {**review(namespace), "request": asked}
        # The request must not wait for free memory.
        got = (await client.post("/mutate", json=body, params={"timeout": "1500ms"})).raise_for_status()
    response = got.json()["response"]
    return response["allowed"], response.get("status", {}).get("reason", "")


async def test_forged_reviews_fill_only_one_namespace_and_only_temporarily(
    cluster: Cluster, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    limits = ["--pending-per-namespace", "1", "--pending-deadline", "3s", "--clock-skew", "1s"]
    with served(cluster, tmp_path / "serve", *limits) as running:
        await wait_until(lambda: is_dressed(kube, namespace))
        assert await request_json(running, "forged", "f1") == (True, "")
        assert await request_json(running, "forged", "f2") == (False, "NamespaceFull")
        made = await kube.create(PODS, pod("real", gpus=1), namespace)
        assert made["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"]
        await wait_until(lambda: request_json(running, "forged", "f3"), lambda seen: seen == (True, ""))
