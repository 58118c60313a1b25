"""The live certificate of a TLS listener, renewed without a restart; and whom a caller trusts.

Nothing here logs, counts or knows the time: outcomes are values, the clock is given.
"""

import asyncio
import hashlib
import os
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from webhook.core.errors import GpuwardenError
from webhook.runtime.tls.certificates import certificates_in

CLOCK_SKEW = timedelta(minutes=5)  # an issuer's clock may be this far ahead of ours
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # forward secret and authenticated; RFC 9113 forbids the rest with TLS 1.2
ALPN = ("h2", "http/1.1")
# In a request's scope where the peer has shown a certificate of the client CA.
CLIENT_CERTIFICATE = "gpuwarden.client_certificate"
LOOKS = 3  # files that never stay the same for two looks are judged as they were found last


class BadCertificateError(GpuwardenError):
    """The certificate files cannot be served with; the message says which and why."""


class BadRootsError(GpuwardenError):
    """The file of CAs cannot be used."""


def client_context(roots: Path | None) -> ssl.SSLContext:
    """For a call to an ordinary name: by the CAs of that file, else by the system's."""
    try:
        return ssl.create_default_context(cafile=None if roots is None else str(roots))
    except (ssl.SSLError, OSError) as exc:
        raise BadRootsError(f"{roots} holds no CA certificate in PEM") from exc


class Reload(StrEnum):
    """What a look at the certificate files led to."""

    UNCHANGED = "unchanged"
    RELOADED = "reloaded"
    REFUSED = "refused"


@frozen
class _Files:
    """What the files held when they were read."""

    cert: bytes
    key: bytes
    client_ca: bytes | None

    @property
    def digest(self) -> str:
        """Two readings can be compared without keeping the key in memory."""
        parts = (self.cert, self.key, b"" if self.client_ca is None else self.client_ca)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@frozen
class _Serving:
    """A pair in use."""

    context: ssl.SSLContext
    not_after: datetime
    digest: str


class CertificateSource:
    """The certificate of one listener, renewed without a restart: the listener keeps `context` for good.

    A pair that has changed is loaded into a context of its own. Only one that holds together takes over, whole and
    with a single assignment: every handshake asks the listener's context, which hands it on to the newest one.
    (Loading into the listener's context instead would leave it without a key for a moment, and after a change from
    RSA to EC it would keep serving the old certificate to clients that prefer it.) Open connections live on.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        *,
        client_ca: Path | None = None,
        demands_client: bool = True,
        clock: Callable[[], datetime],
    ) -> None:
        """With `client_ca` a peer has to show a certificate; without `demands_client` it may.

        Raises BadCertificateError: a listener that cannot serve does not start.
        """
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._client = ssl.CERT_REQUIRED if demands_client else ssl.CERT_OPTIONAL
        self._clock = clock
        self._refused: tuple[str, str] | None = None  # digest and problem, once told
        self._serving = self._load(self._read())
        self.context = _server_context(self._client if client_ca is not None else ssl.CERT_NONE)
        self.context.sni_callback = self._hand_over

    @property
    def not_after(self) -> datetime:
        """Until when the certificate in use is valid."""
        return self._serving.not_after

    @property
    def problem(self) -> str:
        """What is wrong with the files, as of the last look; empty if nothing is."""
        return self._refused[1] if self._refused else ""

    def reload(self) -> Reload:
        """Look at the files, and serve what they hold if it is new and good; may be called from any thread.

        A bad pair is told once: it is tried again at every look (its time may only have to come), but answered
        `UNCHANGED` until its content, or what is wrong with it, changes.
        """
        try:
            files = self._read()
        except BadCertificateError as error:
            return self._refuse("", str(error))
        if files.digest == self._serving.digest:
            self._refused = None
            return Reload.UNCHANGED
        try:
            self._serving = self._load(files)
        except BadCertificateError as error:
            return self._refuse(files.digest, str(error))
        self._refused = None
        return Reload.RELOADED

    async def watch(
        self,
        tell: Callable[[Reload], None],
        *,
        every: timedelta = timedelta(seconds=1),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Look again and again until cancelled; `tell` hears of everything but `UNCHANGED`.

        A second is soon enough and costs three small reads. Content is compared, not times: Kubernetes swaps a
        secret by a symlink, and the files behind it may be older than those before.
        """
        while True:
            await sleep(every.total_seconds())
            outcome = await asyncio.to_thread(self.reload)  # the disk may be slow, and handshakes must not wait for it
            if outcome is not Reload.UNCHANGED:
                tell(outcome)

    def _refuse(self, digest: str, problem: str) -> Reload:
        is_told = self._refused == (digest, problem)
        self._refused = (digest, problem)
        return Reload.UNCHANGED if is_told else Reload.REFUSED

    def _hand_over(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._serving.context

    def _read(self) -> _Files:
        """The files of one moment: they are changed together, and may change between one and the next of them."""
        found = self._read_once()
        for _ in range(LOOKS):
            before, found = found, self._read_once()
            if found == before:
                break
        return found

    def _read_once(self) -> _Files:
        client_ca = None if self._client_ca is None else _read_file(self._client_ca)
        return _Files(_read_file(self._cert), _read_file(self._key), client_ca)

    def _load(self, files: _Files) -> _Serving:
        leaf = self._checked_leaf(files)
        context = _server_context(self._client if files.client_ca is not None else ssl.CERT_NONE)
        try:
            with ExitStack() as stack:
                cert, key = (stack.enter_context(_as_file(content)) for content in (files.cert, files.key))
                # An empty password: without one OpenSSL would ask for it on the terminal.
                context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise BadCertificateError(f"{self._cert} and {self._key} cannot be served with: {error}") from error
        if files.client_ca is not None:
            self._trust(context, files.client_ca)
        return _Serving(context, leaf.not_valid_after_utc, files.digest)

    def _checked_leaf(self, files: _Files) -> x509.Certificate:
        try:
            leaf = certificates_in(files.cert)[0]
        except ValueError as error:
            raise BadCertificateError(f"{self._cert} holds no certificate in PEM") from error
        try:
            key = serialization.load_pem_private_key(files.key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise BadCertificateError(f"{self._key} holds no private key in PEM without a password") from error
        if key.public_key() != leaf.public_key():
            raise BadCertificateError(f"{self._key} is not the key of the certificate in {self._cert}")
        now = self._clock()
        if leaf.not_valid_after_utc <= now:
            raise BadCertificateError(f"{self._cert} expired on {leaf.not_valid_after_utc.isoformat()}")
        if leaf.not_valid_before_utc > now + CLOCK_SKEW:
            raise BadCertificateError(f"{self._cert} is not valid before {leaf.not_valid_before_utc.isoformat()}")
        return leaf

    def _trust(self, context: ssl.SSLContext, client_ca: bytes) -> None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise BadCertificateError(f"{self._client_ca} holds no CA certificate in PEM") from error


def _server_context(client: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # RFC 9113, 9.2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION  # RFC 9113, 9.2.1
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(ALPN)
    if client is not ssl.CERT_NONE:
        context.verify_mode = client
        # A resumed session shows no certificate: without tickets a CA taken off the file is out at the next connection.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCertificateError(f"{path} cannot be read: {error.strerror}") from error


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path to content that was read before: the ssl module loads pairs from paths only, and what was checked
    must be what is loaded. In memory where the system can: a container's file system is often read-only."""
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    with os.fdopen(os.memfd_create("gpuwarden"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
