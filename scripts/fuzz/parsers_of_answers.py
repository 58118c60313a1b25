"""Parsers of servers' answers: the API server, a scorer, a kubelet's stream, SPIRE."""

import asyncio
from functools import cache
from typing import Any

from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from webhook.core.caller import Caller
from webhook.evidence.jwt.jwt_workload_api import JwtSvid, bundle_in
from webhook.evidence.spire import spiffe_tls
from webhook.evidence.spire.x509_svid import X509Svid
from webhook.kube import api_callers, api_objects
from webhook.kube.pod_exec import ExecOutput
from webhook.node import node_pods
from webhook.runtime.tls.rotation import parse_certificates
from webhook.scoring.client import DECODER
from webhook.web.callers import list_pods

HEADERS = {"content-type": "application/json"}


class Reply:
    """An answer as the client library receives it."""

    status = 201
    reason = "Created"

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.headers = HEADERS
        self.data: bytes | None = None

    async def read(self) -> bytes:
        self.data = self._content
        return self.data

    def getheaders(self) -> dict[str, str]:
        return HEADERS

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return HEADERS.get(name.lower(), default)


class Answering(client.ApiClient):
    """The client library, with its decoding of answers but without a connection."""

    content = b""

    async def call_api(self, *request: Any, **options: Any) -> Any:
        return Reply(self.content)


@cache
def runner() -> tuple[asyncio.Runner, Answering]:
    """Shared: each new client reads the system's CAs."""
    found = asyncio.Runner()

    async def made() -> Answering:
        return Answering(client.Configuration())

    return found, found.run(made())


def callers(content: bytes) -> tuple[asyncio.Runner, api_callers.ApiCallers]:
    found, api = runner()
    api.content = content
    return found, api_callers.ApiCallers(api)


def token_review(content: bytes) -> object:
    running, asked = callers(content)
    return running.run(asked.caller_of("token")), running.run(asked.caller_of("token", "gpuwarden"))


def access_review(content: bytes) -> object:
    running, asked = callers(content)
    found = running.run(asked.may(Caller("somebody"), list_pods("ml")))
    if type(found) is not bool:
        raise TypeError(f"{found!r} is not a boolean")
    return found


def exec_frames(content: bytes) -> object:
    """The frames, each with a length prefix of two bytes. The stream skips empty ones."""
    answer = ExecOutput(limit=4096)
    while len(content) > 2:
        size = int.from_bytes(content[:2])
        frame, content = content[2 : 2 + size], content[2 + size :]
        if frame:
            answer.take(frame)
    return answer.content()


def x509_svid(content: bytes) -> object:
    return X509Svid.parse(content)


def peer(content: bytes) -> None:
    spiffe_tls.require(content, "spiffe://example.org/spire/server")


def jwt_answer(content: bytes) -> object:
    """The entries of a Workload API answer."""
    return JwtSvid.parse(content), bundle_in(content)


def pods_of_a_kubelet(content: bytes) -> object:
    return node_pods.wanted_in(content)


def sandboxes_of_a_runtime(content: bytes) -> object:
    return node_pods.containers_in(content, b"")


def containers_of_a_runtime(content: bytes) -> object:
    return node_pods.containers_in(b"", content)


def scorers_answer(content: bytes) -> object:
    return DECODER.decode(content).advice()


def refused_object(content: bytes) -> object:
    exc = ApiException(status=409, reason="Conflict")
    vars(exc)["body"] = content  # as the client library sets it
    return api_objects.error_message(exc)


def certificate_bundle(content: bytes) -> object:
    return parse_certificates(content)
