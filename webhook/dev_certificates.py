"""The development certificates: a CA and a server certificate that `make run` serves with."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_LIFE = timedelta(days=730)
LEAF_LIFE = timedelta(days=90)  # a third of the CA's life is more than this: a leaf never outlives its CA
BACKDATED = timedelta(hours=1)  # for a browser or container whose clock is behind


@frozen
class DevCertificates:
    """Where the development certificates are; clients trust `ca_cert`."""

    ca_cert: Path
    cert: Path
    key: Path


@frozen
class _Pair:
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def is_young(self, now: datetime) -> bool:
        """Whether more than a third of its life is left."""
        begin, end = self.cert.not_valid_before_utc, self.cert.not_valid_after_utc
        return begin <= now and end - now > (end - begin) / 3


def make_dev_certificates(
    directory: Path, *, now: datetime, names: Sequence[str] = ("localhost", "127.0.0.1", "::1")
) -> DevCertificates:
    """A development CA and a server certificate in `directory`, made anew only where the old ones do not do.

    The directory is ours: whatever else bears our file names there is replaced. The CA's key stays beside it so that
    a new server certificate needs no new trust; that is why it is for development only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / ".lock"):  # two servers may be started at once
        ca = _load_pair(directory / "ca.crt", directory / "ca.key")
        if ca is None or not ca.is_young(now):
            ca = _new_ca(now)
            _store_pair(ca, directory / "ca.crt", directory / "ca.key")
        leaf = _load_pair(directory / "tls.crt", directory / "tls.key")
        if leaf is None or not leaf.is_young(now) or not _serves(leaf.cert, ca.cert, names):
            _store_pair(_new_leaf(ca, now, names), directory / "tls.crt", directory / "tls.key")
    return DevCertificates(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def _load_pair(cert_path: Path, key_path: Path) -> _Pair | None:
    """The pair in these files, or None if it is missing, damaged or not a pair: then it is made anew."""
    try:
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        return None
    return _Pair(cert, key)


def _store_pair(pair: _Pair, cert_path: Path, key_path: Path) -> None:
    key = pair.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_atomically(key_path, key, mode=0o600)
    _write_atomically(cert_path, pair.cert.public_bytes(serialization.Encoding.PEM), mode=0o644)


def _write_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """A reader sees the old content or the new, never half of it; a key is never readable by others."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _serves(cert: x509.Certificate, ca: x509.Certificate, names: Sequence[str]) -> bool:
    try:
        cert.verify_directly_issued_by(ca)
        held = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return set(held) == set(_general_names(names))


def _general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    return [_general_name(name) for name in names]


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _named(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "gpuwarden"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _new_ca(now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    # The serial number in the name: after a renewal a client that knows only the old CA says "unknown issuer",
    # which is clearer than a bad signature by a CA of the same name.
    serial = x509.random_serial_number()
    name = _named(f"development CA {serial:x}"[:40])
    builder = _builder(key.public_key(), name, name, (now - BACKDATED, now + CA_LIFE), serial)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
    )
    return _Pair(builder.sign(key, hashes.SHA256()), key)


def _new_leaf(ca: _Pair, now: datetime, names: Sequence[str]) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    span = (now - BACKDATED, now + LEAF_LIFE)
    builder = _builder(
        key.public_key(), _named("development server"), ca.cert.subject, span, x509.random_serial_number()
    )
    builder = builder.add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
        ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    )
    builder = builder.add_extension(authority, critical=False)
    return _Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, span: tuple[datetime, datetime], serial: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key).serial_number(serial)
    builder = builder.not_valid_before(span[0]).not_valid_after(span[1])
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
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
