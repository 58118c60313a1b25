"""The HTTPS bundle endpoint of a trust domain, in both of its profiles."""

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import httpx
from cryptography.hazmat.primitives.serialization import Encoding

from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt.jwt_bundle import MAX_DOCUMENT, BadBundleError, JwtBundle, parse_bundle
from webhook.evidence.jwt.jwt_workload_api import JwtWorkloadApi
from webhook.evidence.spire.spiffe_tls import context_towards
from webhook.runtime.tls.certificate_source import BadRootsError, client_context
from webhook.runtime.tls.certificates import certificate_in, certificates_in

TIMEOUT: Final = httpx.Timeout(5.0)
# For the whole response, however many chunks it comes in.
DEADLINE: Final = 10.0
# Compressed content may expand to a thousand times the counted size.
UNCOMPRESSED: Final = {"Accept-Encoding": "identity"}


class BundleEndpoint:
    """Fetches from an endpoint; `trust` provides the TLS context of each connection."""

    def __init__(self, url: str, trust: "WebTrust | SpiffeTrust", deadline: float = DEADLINE) -> None:
        self._url = url
        self._trust = trust
        self._deadline = deadline

    async def fetch(self) -> JwtBundle:
        try:
            async with asyncio.timeout(self._deadline):
                return await self._fetch()
        except TimeoutError as exc:
            raise EvidenceUnavailableError("the bundle endpoint did not answer: no complete response in time") from exc

    async def _fetch(self) -> JwtBundle:
        # A connection per request: they are minutes apart, and a new one uses the newest roots.
        try:
            client = httpx.AsyncClient(verify=await self._trust.context(), timeout=TIMEOUT, trust_env=False)
        except ssl.SSLError as exc:
            raise EvidenceUnavailableError("the roots of the bundle endpoint cannot be used") from exc
        try:
            async with client, client.stream("GET", self._url, headers=UNCOMPRESSED) as reply:
                if reply.status_code != 200:
                    raise EvidenceUnavailableError(f"the bundle endpoint answered {reply.status_code}")
                return parse_bundle(await bounded(reply))
        except httpx.HTTPError as exc:
            raise EvidenceUnavailableError(
                f"the bundle endpoint did not answer: {str(exc) or type(exc).__name__}"
            ) from exc

    def accepted(self, bundle: JwtBundle) -> None:
        self._trust.learn(bundle)


async def bounded(reply: httpx.Response) -> bytes:
    content = bytearray()
    async for chunk in reply.aiter_raw():
        content += chunk
        if len(content) > MAX_DOCUMENT:
            raise BadBundleError(f"the bundle is larger than {MAX_DOCUMENT} bytes")
    return bytes(content)


class WebTrust:
    """https_web: a certificate for a DNS name, verified with the system's CAs or those of a file."""

    def __init__(self, roots: Path | None) -> None:
        self._roots = roots
        self._context = client_context(roots)

    async def context(self) -> ssl.SSLContext:
        """A context with the file's current content, or the previous one while the file cannot be read."""
        if self._roots is not None:
            with suppress(BadRootsError):
                self._context = client_context(self._roots)
        return self._context

    def learn(self, bundle: JwtBundle) -> None:
        """Does nothing: the bundle's X.509 roots are for workloads."""


class Roots(Protocol):
    """The initial roots to trust."""

    async def current(self) -> list[bytes]:
        """At least one root, in DER. Raises BadRootsError, BadBundleError or EvidenceUnavailableError."""


class FileRoots:
    """Roots from a file, which must be valid at startup."""

    def __init__(self, file: Path) -> None:
        self._file = file
        roots_in(file)

    async def current(self) -> list[bytes]:
        return roots_in(self._file)


class WorkloadRoots:
    """Roots from the agent on this machine."""

    def __init__(self, api: JwtWorkloadApi, trust_domain: str) -> None:
        self._api = api
        self._trust_domain = trust_domain

    async def current(self) -> list[bytes]:
        return await self._api.x509_roots(self._trust_domain)


class SpiffeTrust:
    """https_spiffe: the server presents its SVID. Trusts the initial roots first, and then the roots in each bundle.

    Initial roots that have changed replace all others: a rebuilt server's roots are in no bundle of the previous one.
    """

    def __init__(self, given: Roots, spiffe_id: str) -> None:
        self._spiffe_id = spiffe_id
        self._source = given
        self._initial_roots: list[bytes] = []
        self._roots: list[bytes] = []

    async def context(self) -> ssl.SSLContext:
        try:
            given = await self._source.current()
        except (BadRootsError, BadBundleError, EvidenceUnavailableError) as exc:
            if not self._roots:
                raise EvidenceUnavailableError(f"no roots for the bundle endpoint: {exc}") from exc
        else:
            if given != self._initial_roots:
                self._roots = self._initial_roots = given
        return context_towards(self._spiffe_id, b"".join(self._roots))

    def learn(self, bundle: JwtBundle) -> None:
        try:
            roots = [certificate_in(der).public_bytes(Encoding.DER) for der in bundle.x509_roots]
        except ValueError:
            return
        self._roots = roots or self._roots


def roots_in(file: Path) -> list[bytes]:
    try:
        return [one.public_bytes(Encoding.DER) for one in certificates_in(file.read_bytes())]
    except (ValueError, OSError) as exc:
        raise BadRootsError(f"{file} contains no CA certificate in PEM") from exc
