"""Credentials for the API server: a CA, bearer tokens, client certificates, kubeconfigs."""

import base64
import csv
import io
import ipaddress
import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
KUBELETS = "kwok"

# The API server reads tokens once, at its start. Users added later get a client certificate.
TOKEN_USERS: Mapping[str, Sequence[str]] = {
    ADMIN: ["system:masters"],
    CONTROLLER_MANAGER: [],
    SCHEDULER: [],
    KUBELETS: ["system:masters"],  # it acts for all kubelets
}

SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
LOOPBACK = ipaddress.ip_address("127.0.0.1")
LIFE = timedelta(days=365)
# All processes share one clock; five minutes allow for a clock that has just been set.
BACKDATED = timedelta(minutes=5)


def write_private(path: Path, content: bytes | str) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class Credentials:
    """The secrets of one cluster, stored in its directory so that it can be restarted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ca = directory / "ca.crt"
        self.ca_key = directory / "ca.key"
        self.server = directory / "apiserver.crt"
        self.server_key = directory / "apiserver.key"
        self.tokens = directory / "tokens.csv"
        self.signing_key = directory / "service-accounts.key"
        self.verifying_key = directory / "service-accounts.pub"

    def ensure(self) -> None:
        """Creates missing files. The last one marks the others as complete."""
        if not self.tokens.exists():
            self._make_ca()
            self._make_server_certificate()
            self._make_service_account_keys()
            self._make_tokens()

    def token_of(self, user: str) -> str:
        rows = csv.reader(self.tokens.read_text().splitlines())
        return next(row[0] for row in rows if row[1] == user)

    def client_certificate(self, user: str, groups: Sequence[str]) -> tuple[bytes, bytes]:
        """Certificate and key in PEM. The API server reads CN as the user name and each O as a group."""
        names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*names, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
        return self._signed(subject, key, usage), pem_of(key)

    def kubelet_client(self) -> tuple[Path, Path]:
        """A new certificate and key for the API server's requests to kubelets."""
        certificate, key = self.client_certificate("kube-apiserver", ["system:masters"])
        files = (self._directory / "kubelet-client.crt", self._directory / "kubelet-client.key")
        return write_private(files[0], certificate), write_private(files[1], key)

    def kubeconfig(self, name: str, server: str, user: Mapping[str, Any]) -> Path:
        """A self-contained kubeconfig. JSON is valid YAML and needs no library."""
        cluster = {"server": server, "certificate-authority-data": encoded(self.ca.read_bytes())}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rig", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": name}}],
            "current-context": "rig",
        }
        file = self.kubeconfig_of(name)
        file.parent.mkdir(exist_ok=True)
        return write_private(file, json.dumps(content, indent=1))

    def kubeconfig_of(self, name: str) -> Path:
        return self._directory / "kubeconfigs" / f"{name.replace(':', '-').replace('/', '-')}.kubeconfig"

    def _make_ca(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpuwarden test cluster")])
        made = (
            drafted(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(signing_usage(), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_private(self.ca_key, pem_of(key))
        self.ca.write_bytes(made.public_bytes(Encoding.PEM))

    def _make_server_certificate(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
        names = x509.SubjectAlternativeName([*map(x509.DNSName, SERVER_NAMES), x509.IPAddress(LOOPBACK)])
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        self.server.write_bytes(self._signed(subject, key, usage, names))
        write_private(self.server_key, pem_of(key))

    def _make_service_account_keys(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(self.signing_key, pem_of(key))
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.verifying_key.write_bytes(public)

    def _make_tokens(self) -> None:
        text = io.StringIO()
        rows = csv.writer(text)
        for user, groups in TOKEN_USERS.items():
            rows.writerow([secrets.token_hex(16), user, user, *([",".join(groups)] if groups else [])])
        write_private(self.tokens, text.getvalue())

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        ca = x509.load_pem_x509_certificate(self.ca.read_bytes())
        ca_key = load_pem_private_key(self.ca_key.read_bytes(), password=None)
        assert isinstance(ca_key, ec.EllipticCurvePrivateKey)  # noqa: S101 - our own file; for mypy
        draft = drafted(subject, ca.subject, key.public_key())
        for extension in extensions:
            draft = draft.add_extension(extension, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        return draft.add_extension(issuer, critical=False).sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def drafted(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)  # noqa: TID251 - certificates are valid from the current time
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def signing_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()
