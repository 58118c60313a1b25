"""The TLS certificate of a listener, which is reloaded without a restart, and the TLS context of clients.

This module does not log or count: it returns outcomes as values.
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

CLOCK_SKEW = timedelta(minutes=5)  # how far an issuer's clock may be ahead of ours
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # forward secret and authenticated; RFC 9113 forbids the rest with TLS 1.2
ALPN = ("h2", "http/1.1")
# Key in the scope of a request whose peer has a certificate signed by the client CA.
CLIENT_CERTIFICATE = "gpuwarden.client_certificate"
MAX_READS = 3  # if the files differ in every two consecutive reads, the last read counts


class BadCertificateError(GpuwardenError):
    """The certificate files are invalid. The message names the file and the reason."""


class BadRootsError(GpuwardenError):
    """The CA file is invalid."""


def client_context(roots: Path | None) -> ssl.SSLContext:
    """A TLS context that trusts the CAs in the file, or without a file the system's CAs. Raises BadRootsError."""
    try:
        return ssl.create_default_context(cafile=None if roots is None else str(roots))
    except (ssl.SSLError, OSError) as exc:
        raise BadRootsError(f"{roots} holds no CA certificate in PEM") from exc


class Reload(StrEnum):
    """The outcome of `reload`."""

    UNCHANGED = "unchanged"
    RELOADED = "reloaded"
    REFUSED = "refused"


@frozen
class _Files:
    """The content of the files."""

    cert: bytes
    key: bytes
    client_ca: bytes | None

    @property
    def digest(self) -> str:
        """A hash of all files, so that reads can be compared without keeping the key in memory."""
        parts = (self.cert, self.key, b"" if self.client_ca is None else self.client_ca)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@frozen
class _LoadedPair:
    """The certificate in use."""

    context: ssl.SSLContext
    not_after: datetime
    digest: str


class CertificateSource:
    """The certificate of one listener, reloaded without a restart. The listener keeps `context` permanently.

    A changed pair is loaded into a new context. If it is valid, it replaces the old one with a single assignment: in
    each handshake the listener's context switches to the newest context. Loading into the listener's own context would
    leave it without a key for a moment, and after a change from RSA to EC it would still serve the old certificate to
    clients that prefer RSA. Open connections are not affected.
    """

    def __init__(
        self,
        cert: Path,
        key: Path,
        *,
        client_ca: Path | None = None,
        requires_client_certificate: bool = True,
        clock: Callable[[], datetime],
    ) -> None:
        """With `client_ca` a peer must present a certificate; without `requires_client_certificate` it is optional.

        Raises BadCertificateError, so that the listener does not start.
        """
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._client = ssl.CERT_REQUIRED if requires_client_certificate else ssl.CERT_OPTIONAL
        self._clock = clock
        self._refused: tuple[str, str] | None = None  # digest and problem that `reload` has returned
        self._loaded = self._load(self._read())
        self.context = _server_context(self._client if client_ca is not None else ssl.CERT_NONE)
        self.context.sni_callback = self._switch_context

    @property
    def not_after(self) -> datetime:
        """The end of validity of the certificate in use."""
        return self._loaded.not_after

    @property
    def problem(self) -> str:
        """Why the last `reload` refused the files; empty if it did not."""
        return self._refused[1] if self._refused else ""

    def reload(self) -> Reload:
        """Read the files and serve the certificate if it is new and valid. May be called from any thread.

        An invalid pair is tried again at every call, because it may only become valid later. It is reported as
        `REFUSED` once, and then as `UNCHANGED` until the content or the problem changes.
        """
        try:
            files = self._read()
        except BadCertificateError as error:
            return self._refuse("", str(error))
        if files.digest == self._loaded.digest:
            self._refused = None
            return Reload.UNCHANGED
        try:
            self._loaded = self._load(files)
        except BadCertificateError as error:
            return self._refuse(files.digest, str(error))
        self._refused = None
        return Reload.RELOADED

    async def watch(
        self,
        report: Callable[[Reload], None],
        *,
        every: timedelta = timedelta(seconds=1),
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Reload periodically until cancelled. `report` receives all outcomes but `UNCHANGED`.

        The default of one second costs three small reads. The content is compared, not the modification time:
        Kubernetes updates a mounted secret by replacing a symlink, and the new files may be older.
        """
        while True:
            await sleep(every.total_seconds())
            outcome = await asyncio.to_thread(self.reload)  # a slow disk must not delay handshakes
            if outcome is not Reload.UNCHANGED:
                report(outcome)

    def _refuse(self, digest: str, problem: str) -> Reload:
        is_repeated = self._refused == (digest, problem)
        self._refused = (digest, problem)
        return Reload.UNCHANGED if is_repeated else Reload.REFUSED

    def _switch_context(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = self._loaded.context

    def _read(self) -> _Files:
        """A consistent read of all files: they may be replaced between two reads."""
        found = self._read_once()
        for _ in range(MAX_READS):
            before, found = found, self._read_once()
            if found == before:
                break
        return found

    def _read_once(self) -> _Files:
        client_ca = None if self._client_ca is None else _read_file(self._client_ca)
        return _Files(_read_file(self._cert), _read_file(self._key), client_ca)

    def _load(self, files: _Files) -> _LoadedPair:
        leaf = self._checked_leaf(files)
        context = _server_context(self._client if files.client_ca is not None else ssl.CERT_NONE)
        try:
            with ExitStack() as stack:
                cert, key = (stack.enter_context(_as_file(content)) for content in (files.cert, files.key))
                # An empty password: without one OpenSSL would ask for it on the terminal.
                context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise BadCertificateError(f"{self._cert} and {self._key} cannot be loaded: {error}") from error
        if files.client_ca is not None:
            self._trust(context, files.client_ca)
        return _LoadedPair(context, leaf.not_valid_after_utc, files.digest)

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
        # A resumed session presents no certificate. Without tickets, removing a CA from the file takes effect at the
        # next connection.
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
    """A path to the content. The ssl module loads pairs only from paths, and must load the content that was checked.
    The file is in memory if the system supports it: a container's file system is often read-only."""
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
