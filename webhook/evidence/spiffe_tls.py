"""TLS towards a peer that is known by its SPIFFE ID. Such a server has no DNS name: host names are not looked at."""

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509

from webhook.evidence.x509_svid import X509Svid, uri_sans


def client_context(own: X509Svid, peer: str) -> ssl.SSLContext:
    """Shows `own`, trusts its trust domain's roots, and opens no connection to anybody but `peer`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=own.roots)
    with readable(own.pem) as path:
        context.load_cert_chain(path)
    expect(context, peer)
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
    found = [] if certificate is None else uri_sans(x509.load_der_x509_certificate(certificate))
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
