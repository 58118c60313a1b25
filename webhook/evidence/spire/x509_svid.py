"""An X.509-SVID as the Workload API returns it: its chain, its key, and the roots of its trust domain."""

import base64
import ssl
import textwrap
from collections.abc import Iterator
from datetime import datetime

from attrs import field, frozen
from cryptography import x509

from webhook.evidence.protobuf import MalformedMessageError, as_bytes, as_text, fields_of
from webhook.runtime.tls.certificates import certificate_in

SEQUENCE = 0x30
# Raised by `cryptography` for missing, duplicate and unknown extensions.
UNREADABLE = (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError)


@frozen
class X509Svid:
    """An identity, its expiry and the roots to trust. The key is only in `pem`."""

    spiffe_id: str
    not_after: datetime
    pem: bytes = field(repr=False)
    roots: bytes = field(repr=False)

    @property
    def trust_domain(self) -> str:
        return self.spiffe_id.removeprefix("spiffe://").partition("/")[0]

    @classmethod
    def parse(cls, message: bytes) -> "X509Svid":
        """Parses one entry of the Workload API's response."""
        found = {number: value for number, value in fields_of(message) if number <= 4}
        spiffe_id = as_text(found.get(1, b""))
        chain, key, roots = (as_bytes(found.get(number, b"")) for number in (2, 3, 4))
        certificates = list(each_der(chain))
        if not (certificates and key and roots):
            raise MalformedMessageError("an SVID without certificate, key or roots")
        leaf = certificate_of(certificates[0])
        if uri_sans(leaf) != [spiffe_id]:
            raise MalformedMessageError(f"the certificate of {spiffe_id} is for another identity")
        for root in each_der(roots):
            certificate_of(root)
        pem = "".join(map(ssl.DER_cert_to_PEM_cert, certificates)) + pem_key(key)
        return cls(spiffe_id, leaf.not_valid_after_utc, pem.encode(), roots)


def certificate_of(der: bytes) -> x509.Certificate:
    try:
        return certificate_in(der)
    except ValueError as exc:
        raise MalformedMessageError("not a certificate") from exc


def uri_sans(certificate: x509.Certificate) -> list[str]:
    """The URIs in a certificate's subject alternative names. An SVID has one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def each_der(joined: bytes) -> Iterator[bytes]:
    """Concatenated certificates; each begins with its own length."""
    while joined:
        size = der_size(joined)
        if joined[0] != SEQUENCE or size > len(joined):
            raise MalformedMessageError("truncated certificates")
        yield joined[:size]
        joined = joined[size:]


def der_size(der: bytes) -> int:
    """The size of the first value in `der`: a length under 128 is one byte, a longer one is preceded by its own
    size."""
    if len(der) < 2 or der[1] < 0x80:
        return 2 + (der[1] if len(der) > 1 else 0)
    length_of_length = der[1] & 0x7F
    return 2 + length_of_length + int.from_bytes(der[2 : 2 + length_of_length], "big")


def pem_key(der: bytes) -> str:
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, "-----END PRIVATE KEY-----", ""])
