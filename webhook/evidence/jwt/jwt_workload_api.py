"""Occasional requests to the SPIFFE Workload API: tokens for a node, and bundles for the server that verifies them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from attrs import frozen
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod

from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import JWT_USE, BadBundleError, JwtBundle, parse_bundle
from webhook.evidence.protobuf import MalformedMessageError, as_bytes, as_text, fields_of, text_field
from webhook.evidence.rpc import CallFailedError, RawCodec, faults_of
from webhook.evidence.spire.workload_api import FETCH_X509_SVID
from webhook.evidence.spire.x509_svid import X509Svid, certificate_of, each_der

FETCH_SVIDS: Final = "/SpiffeWorkloadAPI/FetchJWTSVID"
FETCH_BUNDLES: Final = "/SpiffeWorkloadAPI/FetchJWTBundles"
FETCH_ROOTS: Final = "/SpiffeWorkloadAPI/FetchX509Bundles"
# The field of the response that contains the bundles.
BUNDLES_IN: Final = {FETCH_BUNDLES: 1, FETCH_ROOTS: 2}
# The agent responds in milliseconds; a banned agent does not respond at all.
TIMEOUT: Final = timedelta(seconds=5)
# Agents refuse callers without this header, because a browser cannot send it.
METADATA: Final = {"workload.spiffe.io": "true"}
# Agents omit the use in bundles for workloads.
USES: Final = frozenset({JWT_USE, None})


@frozen
class JwtSvid:
    """A token and the SPIFFE ID of its bearer."""

    spiffe_id: str
    token: str

    @classmethod
    def parse(cls, message: bytes) -> "JwtSvid":
        found = {number: value for number, value in fields_of(message) if number in (1, 2)}
        return cls(as_text(found.get(1, b"")), as_text(found.get(2, b"")))


class JwtWorkloadApi:
    """One connection per request: requests are minutes apart, and the agent may have restarted in between."""

    def __init__(self, socket: str, timeout: timedelta = TIMEOUT) -> None:
        self._path = socket.removeprefix("unix:")
        self._timeout = timeout.total_seconds()

    async def jwt_svids(self, audience: str) -> list[JwtSvid]:
        """One per identity of the caller. Raises EvidenceUnavailableError."""
        async with self._channel() as channel:
            ask = UnaryUnaryMethod[bytes, bytes](channel, FETCH_SVIDS, bytes, bytes)
            answer = await ask(text_field(1, audience), metadata=METADATA)
            return [JwtSvid.parse(as_bytes(value)) for number, value in fields_of(answer) if number == 1]

    async def x509_svid(self, spiffe_id: str) -> X509Svid:
        """The certificate and key of this identity. Raises EvidenceUnavailableError."""
        async with self._channel() as channel:
            answer = await self._first(channel, FETCH_X509_SVID)
            entries = [as_bytes(value) for number, value in fields_of(answer) if number == 1]
            found = {one.spiffe_id: one for one in map(X509Svid.parse, entries)}
        if spiffe_id not in found:
            raise EvidenceUnavailableError(f"Workload API: no X.509-SVID of {spiffe_id}")
        return found[spiffe_id]

    async def jwt_bundle(self, trust_domain: str) -> JwtBundle:
        """The keys that sign tokens. Raises EvidenceUnavailableError or BadBundleError."""
        return parse_bundle(await self._bundle(FETCH_BUNDLES, trust_domain), uses=USES)

    async def x509_roots(self, trust_domain: str) -> list[bytes]:
        """The roots of its SVIDs, in DER. Raises EvidenceUnavailableError or BadBundleError."""
        joined = await self._bundle(FETCH_ROOTS, trust_domain)
        try:
            roots = list(each_der(joined))
            for root in roots:
                certificate_of(root)
        except MalformedMessageError as exc:
            raise BadBundleError(f"the Workload API's roots of {trust_domain}: {exc}") from exc
        if not roots:
            raise BadBundleError(f"the Workload API has no roots of {trust_domain}")
        return roots

    async def _bundle(self, method: str, trust_domain: str) -> bytes:
        async with self._channel() as channel:
            answer = await self._first(channel, method)
            wanted = BUNDLES_IN[method]
            found = dict(bundle_in(as_bytes(value)) for number, value in fields_of(answer) if number == wanted)
        if trust_domain not in found:
            raise BadBundleError(f"the Workload API has no bundle of {trust_domain}")
        return found[trust_domain]

    async def _first(self, channel: Channel, method: str) -> bytes:
        """The first message of the stream, which the agent sends at once."""
        asked = UnaryStreamMethod[bytes, bytes](channel, method, bytes, bytes)
        async with asked.open(metadata=METADATA) as stream:
            await stream.send_message(b"", end=True)
            answer = await stream.recv_message() or b""
            await stream.cancel()
        return answer

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        channel = Channel(path=self._path, codec=RawCodec())
        try:
            with faults_of("Workload API"):
                async with asyncio.timeout(self._timeout):
                    yield channel
        except CallFailedError as exc:
            raise EvidenceUnavailableError(str(exc)) from exc
        finally:
            channel.close()


class WorkloadBundles:
    """The bundle of a trust domain from the agent on this machine. It has no sequence number."""

    def __init__(self, api: JwtWorkloadApi, trust_domain: str) -> None:
        self._api = api
        self._trust_domain = trust_domain

    async def fetch(self) -> JwtBundle:
        return await self._api.jwt_bundle(self._trust_domain)

    def accepted(self, bundle: JwtBundle) -> None:
        """Does nothing."""


def bundle_in(message: bytes) -> tuple[str, bytes]:
    """One entry of the map of bundles, with the trust domain without its scheme."""
    found = {number: value for number, value in fields_of(message) if number in (1, 2)}
    return as_text(found.get(1, b"")).removeprefix("spiffe://"), as_bytes(found.get(2, b""))
