"""The HTTPS bundle endpoint of a trust domain, in both of its profiles."""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from webhook.core.errors import GpuwardenError
from webhook.evidence import EvidenceUnavailableError
from webhook.evidence.jwt_bundle import MAX_DOCUMENT, BadBundleError, JwtBundle, parse_bundle
from webhook.evidence.spiffe_tls import expect

TIMEOUT: Final = httpx.Timeout(5.0)


class BadRootsError(GpuwardenError):
    """The file of roots cannot be used."""


class BundleEndpoint:
    """Asks an endpoint; `trust` makes the TLS side of each connection."""

    def __init__(self, url: str, trust: "WebTrust | SpiffeTrust") -> None:
        self._url = url
        self._trust = trust

    async def fetch(self) -> JwtBundle:
        # A connection a look: they are far apart, and a new one is made under the newest roots.
        client = httpx.AsyncClient(verify=self._trust.context(), timeout=TIMEOUT, trust_env=False)
        try:
            async with client, client.stream("GET", self._url) as reply:
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
    async for chunk in reply.aiter_bytes():
        content += chunk
        if len(content) > MAX_DOCUMENT:
            raise BadBundleError(f"the bundle is larger than {MAX_DOCUMENT} bytes")
    return bytes(content)


class WebTrust:
    """https_web: an ordinary certificate for an ordinary name, by the system's CAs or those of a file."""

    def __init__(self, roots: Path | None) -> None:
        self._roots = roots
        self._context = web_context(roots)

    def context(self) -> ssl.SSLContext:
        """Under the file as it is now; while it cannot be read, as it was."""
        if self._roots is not None:
            with suppress(BadRootsError):
                self._context = web_context(self._roots)
        return self._context

    def learn(self, bundle: JwtBundle) -> None:
        """What the bundle says about X.509 is for workloads, not for the web."""


def web_context(roots: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if roots is None else str(roots))
    except (ssl.SSLError, OSError) as exc:
        raise BadRootsError(f"{roots} holds no CA certificate in PEM") from exc


class SpiffeTrust:
    """https_spiffe: the server shows its SVID. Roots are those of a file at first, and then what each bundle says."""

    def __init__(self, roots: Path, spiffe_id: str) -> None:
        self._spiffe_id = spiffe_id
        try:
            self._roots = [
                one.public_bytes(Encoding.PEM) for one in x509.load_pem_x509_certificates(roots.read_bytes())
            ]
        except (ValueError, OSError) as exc:
            raise BadRootsError(f"{roots} holds no CA certificate in PEM") from exc

    def context(self) -> ssl.SSLContext:
        return spiffe_context(self._roots, self._spiffe_id)

    def learn(self, bundle: JwtBundle) -> None:
        try:
            roots = [x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM) for der in bundle.x509_roots]
        except ValueError:
            return
        self._roots = roots or self._roots


def spiffe_context(roots: Iterable[bytes], spiffe_id: str) -> ssl.SSLContext:
    """Opens connections to this one SPIFFE ID only: any workload of the trust domain has a certificate of its roots."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=b"".join(roots).decode())
    expect(context, spiffe_id)
    return context
