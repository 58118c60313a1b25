"""TLS towards a peer that is known by its SPIFFE ID. Such a server has no DNS name: host names are not looked at."""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from webhook.evidence.spire.x509_svid import X509Svid, uri_sans
from webhook.runtime.tls.certificates import certificate_in


def context_towards(peer: str, roots: bytes) -> ssl.SSLContext:
    """Opens no connection to anybody but `peer`: any workload of the trust domain has a certificate of its roots."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=roots)
    expect(context, peer)
    return context


def client_context(own: X509Svid, peer: str) -> ssl.SSLContext:
    """Shows `own`, and trusts its trust domain's roots."""
    context = context_towards(peer, own.roots)
    context.set_alpn_protocols(["h2"])
    with readable(own.pem) as path:
        context.load_cert_chain(path)
    return context


def expect(context: ssl.SSLContext, peer: str) -> None:
    """End every handshake with another peer: the hooks are the standard library's own, for either kind of loop."""

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
    """The certificate's one URI is `peer`. Its chain has been verified before."""
    try:
        found = [] if certificate is None else uri_sans(certificate_in(certificate))
    except ValueError as exc:
        raise ssl.SSLCertVerificationError("the peer's certificate cannot be read") from exc
    if found != [peer]:
        raise ssl.SSLCertVerificationError(f"the peer is {', '.join(found) or 'nobody'}, and not {peer}")


@contextmanager
def readable(content: bytes) -> Iterator[Path]:
    """A path for what `ssl` reads from paths alone. Where the system can, it is in memory: keys stay off the disk."""
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
