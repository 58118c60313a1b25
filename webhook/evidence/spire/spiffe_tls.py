"""TLS to a peer that is identified by its SPIFFE ID. It has no DNS name, so host names are not verified."""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webhook.evidence.spire.x509_svid import X509Svid, uri_sans
from webhook.runtime.tls.certificates import certificate_in


def context_towards(peer: str, roots: bytes) -> ssl.SSLContext:
    """A context that connects only to `peer`: every workload of the trust domain has a certificate from the same
    roots."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=roots)
    expect(context, peer)
    return context


def client_context(own: X509Svid, peer: str) -> ssl.SSLContext:
    """A context that presents `own` and trusts the roots of its trust domain."""
    context = context_towards(peer, own.roots)
    context.set_alpn_protocols(["h2"])
    with readable(own.pem) as path:
        context.load_cert_chain(path)
    return context


def expect(context: ssl.SSLContext, peer: str) -> None:
    """Fail every handshake with another peer. The standard library provides these hooks for both kinds of event
    loops."""

    class Object(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            require(self.getpeercert(binary_form=True), peer)

    class Socket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            require(self.getpeercert(binary_form=True), peer)

    context.sslobject_class = Object
    context.sslsocket_class = Socket


def require(certificate: bytes | None, peer: str) -> None:
    """The certificate's only URI must be `peer`. Its chain has already been verified."""
    try:
        found = [] if certificate is None else uri_sans(certificate_in(certificate))
    except ValueError as exc:
        raise ssl.SSLCertVerificationError("the peer's certificate cannot be read") from exc
    if found != [peer]:
        raise ssl.SSLCertVerificationError(f"the peer is {', '.join(found) or 'unknown'}, not {peer}")


@contextmanager
def readable(content: bytes) -> Iterator[Path]:
    """A path for content that `ssl` reads only from files. On Linux it is in memory, so keys are never written to
    disk."""
    if hasattr(os, "memfd_create"):
        descriptor, path = os.memfd_create("svid"), None
    else:
        descriptor, path = tempfile.mkstemp()
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield Path(path or f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
        if path is not None:
            Path(path).unlink()
