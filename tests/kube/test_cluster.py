"""The connection to an API server from a Pod, and reviews of tokens and permissions."""

import base64
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from attrs import define, field
from kubernetes.aio import client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from webhook.core.caller import Caller, CallersUnavailableError, Right
from webhook.kube.api_callers import ApiCallers
from webhook.kube.client import BadCaError, BadKubeconfigError, NotInAPodError, connect
from webhook.runtime import settings
from webhook.runtime.clock import utc_now
from webhook.runtime.http.listener import Listener
from webhook.runtime.settings import Settings
from webhook.web.callers import CallerGate, Guard, Reviewers, bind_pods, finalize_reservations, list_pods

CA = trustme.CA()


@define
class ApiServer:
    """Gives one answer for every token, and records the requests."""

    status: dict[str, Any] = field(factory=dict)
    code: int = 201
    is_allowed: bool = True
    permissions: list[dict[str, Any]] = field(factory=list)
    shown: list[str] = field(factory=list)
    asked: list[dict[str, Any]] = field(factory=list)
    port: int = 0

    async def review(self, request: Request) -> Response:
        self.shown.append(request.headers.get("authorization", ""))
        self.asked.append((await request.json())["spec"])
        about = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": self.asked[-1]}
        return JSONResponse({**about, "status": self.status}, status_code=self.code)

    async def review_access(self, request: Request) -> Response:
        self.permissions.append((await request.json())["spec"])
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": self.permissions[-1]}
        return JSONResponse({**about, "status": {"allowed": self.is_allowed}}, status_code=self.code)


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    routes = [
        Route("/apis/authentication.k8s.io/v1/tokenreviews", server.review, methods=["POST"]),
        Route("/apis/authorization.k8s.io/v1/subjectaccessreviews", server.review_access, methods=["POST"]),
    ]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    CA.issue_cert("127.0.0.1").configure_cert(context)
    listener = Listener(Starlette(routes=routes), host="127.0.0.1", port=0, ssl_context=context)
    await listener.start()
    server.port = listener.port
    yield server
    await listener.stop(0)


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A service account as mounted in Pods: behind symlinks, so that all files change at once."""
    versions = tmp_path / "..data"
    (tmp_path / "..first").mkdir()
    versions.symlink_to("..first")
    (versions / "token").write_text("first\n")
    CA.cert_pem.write_to_path(versions / "ca.crt")
    (versions / "namespace").write_text("gpuwarden")
    for name in ("token", "ca.crt", "namespace"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    return tmp_path


def rotate(mounted: Path, token: str) -> None:
    (mounted / "..second").mkdir()
    (mounted / "..second" / "token").write_text(token)
    CA.cert_pem.write_to_path(mounted / "..second" / "ca.crt")
    (mounted / "..new").symlink_to("..second")
    (mounted / "..new").replace(mounted / "..data")


def in_a_pod(port: int) -> Settings:
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
    return settings.load({"in_cluster": "true"}, environ)


async def test_client_sends_the_currently_mounted_token(api_server: ApiServer, mounted: Path) -> None:
    async with await connect(in_a_pod(api_server.port), mounted) as api:
        await ApiCallers(api).caller_of("x")
        rotate(mounted, "second")
        await ApiCallers(api).caller_of("x")
    assert api_server.shown == ["Bearer first", "Bearer second"]


async def test_client_trusts_only_the_mounted_ca(api_server: ApiServer, mounted: Path) -> None:
    trustme.CA().cert_pem.write_to_path(mounted / "ca.crt")
    async with await connect(in_a_pod(api_server.port), mounted) as api:
        with pytest.raises(CallersUnavailableError):
            await ApiCallers(api).caller_of("x")
    assert api_server.shown == []


@pytest.mark.parametrize("name", ["token", "ca.crt"])
async def test_missing_service_account_file_is_named(mounted: Path, name: str) -> None:
    (mounted / name).unlink()
    with pytest.raises(NotInAPodError, match=f"--in-cluster: no service account is mounted here, .*{name} not found"):
        await connect(in_a_pod(443), mounted)


async def test_in_cluster_outside_a_pod_is_an_error(mounted: Path) -> None:
    with pytest.raises(NotInAPodError, match="so this is not a Pod"):
        await connect(settings.load({"in_cluster": "true"}, {}), mounted)


# Users of tokens.

WEBHOOK = "system:serviceaccount:kube-system:apiserver-webhook"
USER = {"username": WEBHOOK}
OURS: dict[str, Any] = {"authenticated": True, "user": USER, "audiences": ["gpuwarden"]}


@pytest.fixture
async def api(api_server: ApiServer, mounted: Path) -> AsyncIterator[client.ApiClient]:
    async with await connect(in_a_pod(api_server.port), mounted) as api:
        yield api


@pytest.mark.parametrize(
    ("status", "is_known"),
    [
        (OURS, True),
        ({"authenticated": True}, True),
        ({"authenticated": False, "error": "no"}, False),
        ({"error": "no"}, False),
        ({}, False),
    ],
    ids=["known", "known without a name", "unknown", "left out", "nothing said"],
)
async def test_token_is_known_if_the_api_server_authenticates_it(
    api_server: ApiServer, api: client.ApiClient, status: dict[str, Any], *, is_known: bool
) -> None:
    api_server.status = status
    assert (await ApiCallers(api).caller_of("t") is not None) is is_known
    assert api_server.asked == [{"token": "t"}]


@pytest.mark.parametrize(
    ("status", "users", "is_reviewer"),
    [
        (OURS, (), True),
        (OURS, (WEBHOOK,), True),
        (OURS, ("somebody", WEBHOOK), True),
        (OURS, ("somebody",), False),
        ({**OURS, "audiences": ["another"]}, (), False),
        ({**OURS, "audiences": []}, (), False),
        ({"authenticated": True, "user": USER}, (), False),
        ({**OURS, "authenticated": False}, (), False),
        ({**OURS, "user": {}}, (WEBHOOK,), False),
    ],
    ids=[
        "of the audience",
        "of the user",
        "of one of the users",
        "of another user",
        "of another audience",
        "of no audience",
        "audiences were not looked at",
        "unknown",
        "nobody's",
    ],
)
async def test_review_token_needs_the_audience_and_a_listed_user(
    api_server: ApiServer, api: client.ApiClient, status: dict[str, Any], users: tuple[str, ...], *, is_reviewer: bool
) -> None:
    api_server.status = status
    gate = CallerGate(utc_now, ApiCallers(api), Reviewers("gpuwarden", users))
    headers = [(b"authorization", b"Bearer t")]
    request = Request({"type": "http", "method": "POST", "path": "/validate", "headers": headers})
    assert (await gate.refusal(Guard.REVIEWER, request) is None) is is_reviewer
    assert api_server.asked == [{"token": "t", "audiences": ["gpuwarden"]}]


async def test_refused_token_review_raises_callers_unavailable(api_server: ApiServer, api: client.ApiClient) -> None:
    api_server.code = 500
    with pytest.raises(CallersUnavailableError):
        await ApiCallers(api).caller_of("t", "gpuwarden")


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_access_review_names_the_user_and_the_pods_namespace(
    api_server: ApiServer, api: client.ApiClient, *, is_allowed: bool
) -> None:
    user = {"username": "jane", "uid": "u-1", "groups": ["ml-team"], "extra": {"scopes": ["some"]}}
    api_server.status, api_server.is_allowed = {"authenticated": True, "user": user}, is_allowed
    callers = ApiCallers(api)
    caller = await callers.caller_of("t")
    assert caller == Caller("jane", "u-1", ("ml-team",), {"scopes": ("some",)})
    assert caller is not None
    assert await callers.may(caller, bind_pods("ml")) is is_allowed
    asked = {"namespace": "ml", "verb": "create", "resource": "pods", "subresource": "binding"}
    (spec,) = api_server.permissions
    assert {name: value for name, value in spec.items() if value is not None} == {
        "user": "jane",
        "uid": "u-1",
        "groups": ["ml-team"],
        "extra": {"scopes": ["some"]},
        "resourceAttributes": asked,
    }


@pytest.mark.parametrize(
    ("right", "asked"),
    [
        (list_pods("ml"), {"namespace": "ml", "verb": "list", "resource": "pods"}),
        (list_pods(""), {"verb": "list", "resource": "pods"}),
        (
            finalize_reservations("ml"),
            {"namespace": "ml", "verb": "finalize", "group": "gpuwarden.io", "resource": "reservations"},
        ),
    ],
    ids=["pods of a namespace", "all pods", "reservations"],
)
async def test_access_review_has_group_resource_and_subresource_of_the_role(
    api_server: ApiServer, api: client.ApiClient, right: Right, asked: dict[str, str]
) -> None:
    await ApiCallers(api).may(Caller("jane"), right)
    (spec,) = api_server.permissions
    assert {name: value for name, value in spec["resourceAttributes"].items() if value is not None} == asked


async def test_access_review_without_an_answer_raises_callers_unavailable(
    api_server: ApiServer, api: client.ApiClient
) -> None:
    api_server.code = 500
    with pytest.raises(CallersUnavailableError):
        await ApiCallers(api).may(Caller("jane"), list_pods("ml"))


async def test_ca_file_without_certificate_is_named(tmp_path: Path) -> None:
    """For example one with a base64 certificate, as in kubeconfigs."""
    token, ca = tmp_path / "token", tmp_path / "ca"
    token.write_text("t")
    ca.write_bytes(base64.b64encode(CA.cert_pem.bytes()))
    chosen = Settings(kubernetes_url="https://127.0.0.1:1", access_token=token, ca_certificate=ca)
    with pytest.raises(BadCaError, match=re.escape(f"{ca} holds no CA certificate in PEM")):
        await connect(chosen)


async def test_missing_ca_file_is_named(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    chosen = Settings(kubernetes_url="https://127.0.0.1:1", access_token=token, ca_certificate=tmp_path / "ca")
    with pytest.raises(BadCaError, match=re.escape(f"{tmp_path / 'ca'} cannot be read: No such file")):
        await connect(chosen)


WHOLE = """\
clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: a, user: {token: t}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
"""


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"some words", id="words"),
        pytest.param(b"- a", id="a list"),
        pytest.param(b"a: [", id="no YAML"),
        pytest.param(b"\xff\xfe\x00", id="no text"),
        pytest.param(WHOLE.encode(), id="no context"),
        pytest.param(f"{WHOLE}current-context: b\n".encode(), id="a context that is not there"),
        pytest.param(f"{WHOLE}current-context: a\n".replace("cluster: a,", "cluster: b,").encode(), id="no cluster"),
    ],
)
async def test_unusable_kubeconfig_is_named(tmp_path: Path, content: bytes) -> None:
    """For every error of the library."""
    file = tmp_path / "kubeconfig"
    file.write_bytes(content)
    with pytest.raises(BadKubeconfigError, match=re.escape(f"{file} is not a usable kubeconfig: ")):
        await connect(Settings(kubeconfig=file))


async def test_missing_ca_file_of_a_kubeconfig_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    lost = WHOLE.replace("cluster: {", f"cluster: {{certificate-authority: {tmp_path / 'lost'}, ")
    file.write_text(f"{lost}current-context: a\n")
    with pytest.raises(BadKubeconfigError, match="lost"):
        await connect(Settings(kubeconfig=file))
