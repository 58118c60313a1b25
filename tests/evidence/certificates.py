"""X.509-SVIDs as SPIRE issues them: the URI is the only name in the certificate."""

import ssl
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from webhook.runtime.clock import utc_now

HOUR = timedelta(hours=1)


@frozen
class Issued:
    """A certificate with its key, as the Workload API returns it."""

    spiffe_id: str
    chain: bytes
    key: bytes

    @property
    def pem(self) -> str:
        key = serialization.load_der_private_key(self.key, password=None)
        raw_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return ssl.DER_cert_to_PEM_cert(self.chain) + raw_key.decode()


class Authority:
    """The CA of a trust domain. Its name does not distinguish it from another CA of the same trust domain."""

    def __init__(self, trust_domain: str = "example.org") -> None:
        self.trust_domain = trust_domain
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIFFE")])
        now = utc_now()
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - HOUR)
            .not_valid_after(now + 24 * HOUR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(key_usage(is_ca=True), critical=True)
            .add_extension(names(f"spiffe://{trust_domain}"), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def root(self) -> bytes:
        return self._certificate.public_bytes(Encoding.DER)

    def issue(
        self, *uris: str, not_after: datetime | None = None, names_in_der: x509.UnrecognizedExtension | None = None
    ) -> Issued:
        """`spiffe_id` is the first URI. Tests issue two to see the certificate rejected."""
        now, key = utc_now(), ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIRE")]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * HOUR)
            .not_valid_after(not_after or now + HOUR)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(is_ca=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if uris:
            builder = builder.add_extension(names(*uris), critical=False)
        if names_in_der is not None:
            builder = builder.add_extension(names_in_der, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(
            spiffe_id=uris[0] if uris else "",
            chain=certificate.public_bytes(Encoding.DER),
            key=key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()),
        )


def names(*uris: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])


def key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def server_context(shown: Issued, trusted: Authority) -> ssl.SSLContext:
    """Like SPIRE Server's: a client certificate is requested and not required, but must be valid if presented."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=trusted.root)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "svid.pem"
        path.write_text(shown.pem)
        context.load_cert_chain(path)
    return context
