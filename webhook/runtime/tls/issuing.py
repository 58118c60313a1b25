"""Issuing of CAs and server certificates, as values without files and clock."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import Enum
from ipaddress import ip_address

from attrs import field, frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from webhook.runtime.tls.certificates import certificates_in

BACKDATED = timedelta(hours=1)  # for a browser or container whose clock is behind

Span = tuple[datetime, datetime]


class CertificateUse(Enum):
    """What a certificate proves."""

    SERVER = ExtendedKeyUsageOID.SERVER_AUTH
    CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


@frozen
class KeyPair:
    """A certificate and its private key. Two pairs with the same certificate are equal."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(eq=False, repr=False)

    @property
    def cert_pem(self) -> bytes:
        return self.cert.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def end(self) -> datetime:
        return self.cert.not_valid_after_utc


def pair_in(cert_pem: bytes, key_pem: bytes) -> KeyPair | None:
    """The pair, or None if it is invalid."""
    try:
        cert = certificates_in(cert_pem)[0]
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        return None
    return KeyPair(cert, key)


def new_ca(title: str, span: Span) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    # The name contains the serial number, so that a client that only has the old CA reports "unknown issuer" after a
    # renewal. With equal names it would report a bad signature.
    serial = x509.random_serial_number()
    name = named(f"{title} {serial:x}"[:40])
    builder = begun(key.public_key(), name, name, span, serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
    )
    return KeyPair(builder.sign(key, hashes.SHA256()), key)


def new_leaf(
    ca: KeyPair, title: str, names: Sequence[str], span: Span, use: CertificateUse = CertificateUse.SERVER
) -> KeyPair:
    """A certificate that ends with its CA at the latest."""
    key = ec.generate_private_key(ec.SECP256R1())
    span = (span[0], min(span[1], ca.end))
    builder = begun(key.public_key(), named(title), ca.cert.subject, span, x509.random_serial_number())
    builder = builder.add_extension(x509.SubjectAlternativeName(general_names(names)), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(key_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([use.value]), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
        ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    )
    builder = builder.add_extension(authority, critical=False)
    return KeyPair(builder.sign(ca.key, hashes.SHA256()), key)


def serves(cert: x509.Certificate, ca: x509.Certificate, names: Sequence[str]) -> bool:
    """Whether the CA has signed the certificate, for exactly these names."""
    try:
        cert.verify_directly_issued_by(ca)
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return set(found) == set(general_names(names))


def general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    return [general_name(name) for name in names]


def general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def named(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gpuwarden"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64]),  # the maximum in X.520
        ]
    )


def begun(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, span: Span, serial: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key).serial_number(serial)
    builder = builder.not_valid_before(span[0]).not_valid_after(span[1])
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def key_usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
