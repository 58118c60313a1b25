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
# For the whole answer, however many bytes it comes in.
DEADLINE: Final = 10.0
# What is packed may be a thousand times as large as what is counted.
AS_IT_IS: Final = {"Accept-Encoding": "identity"}


class BundleEndpoint:
    """Asks an endpoint; `trust` makes the TLS side of each connection."""

    def __init__(self, url: str, trust: "WebTrust | SpiffeTrust", deadline: float = DEADLINE) -> None:
        self._url = url
        self._trust = trust
        self._deadline = deadline

    async def fetch(self) -> JwtBundle:
        try:
            async with asyncio.timeout(self._deadline):
                return await self._fetch()
        except TimeoutError as exc:
            raise EvidenceUnavailableError("the bundle endpoint did not answer: no whole answer in time") from exc

    async def _fetch(self) -> JwtBundle:
        # A connection a look: they are far apart, and a new one is made under the newest roots.
        try:
            client = httpx.AsyncClient(verify=await self._trust.context(), timeout=TIMEOUT, trust_env=False)
        except ssl.SSLError as exc:
            raise EvidenceUnavailableError("the roots of the bundle endpoint cannot be used") from exc
        try:
            async with client, client.stream("GET", self._url, headers=AS_IT_IS) as reply:
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
    """https_web: an ordinary certificate for an ordinary name, by the system's CAs or those of a file."""

    def __init__(self, roots: Path | None) -> None:
        self._roots = roots
        self._context = client_context(roots)

    async def context(self) -> ssl.SSLContext:
        """Under the file as it is now; while it cannot be read, as it was."""
        if self._roots is not None:
            with suppress(BadRootsError):
                self._context = client_context(self._roots)
        return self._context

    def learn(self, bundle: JwtBundle) -> None:
        """What the bundle says about X.509 is for workloads, not for the web."""


class Roots(Protocol):
    """Whom to trust at first."""

    async def current(self) -> list[bytes]:
        """In DER, one at least. Raises BadRootsError, BadBundleError or EvidenceUnavailableError."""


class FileRoots:
    """Of a file, which has to be good at the start."""

    def __init__(self, file: Path) -> None:
        self._file = file
        roots_in(file)

    async def current(self) -> list[bytes]:
        return roots_in(self._file)


class WorkloadRoots:
    """As the agent on this machine has them."""

    def __init__(self, api: JwtWorkloadApi, trust_domain: str) -> None:
        self._api = api
        self._trust_domain = trust_domain

    async def current(self) -> list[bytes]:
        return await self._api.x509_roots(self._trust_domain)


class SpiffeTrust:
    """https_spiffe: the server shows its SVID. Roots are given at first, and then what each bundle says.

    What is given otherwise than before is the newest word: the roots of a server that was built anew are in no bundle
    of the old one's.
    """

    def __init__(self, given: Roots, spiffe_id: str) -> None:
        self._spiffe_id = spiffe_id
        self._source = given
        self._given: list[bytes] = []
        self._roots: list[bytes] = []

    async def context(self) -> ssl.SSLContext:
        try:
            given = await self._source.current()
        except (BadRootsError, BadBundleError, EvidenceUnavailableError) as exc:
            if not self._roots:
                raise EvidenceUnavailableError(f"nobody says whom to trust: {exc}") from exc
        else:
            if given != self._given:
                self._roots = self._given = given
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
        raise BadRootsError(f"{file} holds no CA certificate in PEM") from exc
