"""The script that creates certificates with openssl: a server can use its files, and clients can trust its output."""

import base64
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.running import serving

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "generate-webhook-certs.sh"
INVENTORY = {"nodes": [{"name": "node-0", "devices": [{"uuid": "GPU-0"}]}]}

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")


def run(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = [f"{name}={value}" for name, value in environment.items()]
    command = ["/usr/bin/env", "-u", "NAMESPACE", "-u", "SERVICE_NAME", "-u", "CERT_DIR", *own, str(SCRIPT)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=120)


async def test_generated_files_work_for_tls_and_the_printed_ca_trusts_them(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "certs"
    names = ["ca.crt", "ca.key", "ca.srl", "csr.conf", "tls.crt", "tls.key", "webhook-tls-secret.yaml"]
    assert sorted(one.name for one in made.iterdir()) == names
    assert base64.b64decode(done.stdout) == (made / "ca.crt").read_bytes()
    secret = yaml.safe_load((made / "webhook-tls-secret.yaml").read_text())
    assert secret["metadata"] == {"name": "gpu-scheduler-webhook-tls", "namespace": "gpu-scheduler-system"}
    assert secret["type"] == "kubernetes.io/tls"
    assert {k: base64.b64decode(v) for k, v in secret["data"].items()} == {
        name: (made / name).read_bytes() for name in ("tls.crt", "tls.key")
    }
    trust = ssl.create_default_context(cadata=base64.b64decode(done.stdout).decode())
    flags = ["--tls-cert", str(made / "tls.crt"), "--tls-key", str(made / "tls.key")]
    with serving(tmp_path, INVENTORY, flags) as running:
        host = "gpu-scheduler-webhook.gpu-scheduler-system.svc"
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            answer = await client.get(
                f"https://127.0.0.1:{running.port}/readyz", headers={"Host": host}, extensions={"sni_hostname": host}
            )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("service", "namespace", "common"),
    [("a" * 63, "b" * 63, "a" * 63), ("a" * 20, "b" * 43, f"{'a' * 20}.{'b' * 43}"), ("a", "b", "a.b.svc")],
    ids=["service-only", "without-svc", "whole"],
)
def test_long_names_are_shortened_only_in_the_subject(
    tmp_path: Path, service: str, namespace: str, common: str
) -> None:
    done = run(tmp_path, SERVICE_NAME=service, NAMESPACE=namespace)
    assert done.returncode == 0, done.stderr
    leaf = x509.load_pem_x509_certificate((tmp_path / "certs/tls.crt").read_bytes())
    assert [one.value for one in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [common]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert f"{service}.{namespace}.svc" in names.get_values_for_type(x509.DNSName)


def test_existing_keys_are_replaced_and_private(tmp_path: Path) -> None:
    made = tmp_path / "certs"
    made.mkdir()
    names = ["ca.key", "tls.key", "webhook-tls-secret.yaml"]
    for name in names:
        (made / name).write_text("old")
        (made / name).chmod(0o644)
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert {name: (made / name).stat().st_mode & 0o777 for name in names} == dict.fromkeys(names, 0o600)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not here")
def test_git_ignores_only_generated_files(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path / ".gitignore")
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("server.csr", "README.md", "issuer.yaml", "certificate.yaml"):
        (tmp_path / "certs" / name).touch()
    for command in (["init", "-q"], ["add", "-A"], ["ls-files"]):
        git = [str(shutil.which("git")), *command]
        done = subprocess.run(git, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [".gitignore", "certs/README.md", "certs/certificate.yaml", "certs/issuer.yaml"]


def test_names_and_directory_come_from_the_environment(tmp_path: Path) -> None:
    done = run(tmp_path, NAMESPACE="wardens", SERVICE_NAME="hook", CERT_DIR="elsewhere/deep")
    assert done.returncode == 0, done.stderr
    leaf = x509.load_pem_x509_certificate((tmp_path / "elsewhere/deep/tls.crt").read_bytes())
    ca = x509.load_pem_x509_certificate((tmp_path / "elsewhere/deep/ca.crt").read_bytes())
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [
        "hook",
        "hook.wardens",
        "hook.wardens.svc",
        "hook.wardens.svc.cluster.local",
    ]
    assert [one.value for one in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["hook.wardens.svc"]
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    for one in (leaf, ca):
        key = one.public_key()
        assert isinstance(key, rsa.RSAPublicKey)
        assert key.key_size == 2048
        assert (one.not_valid_after_utc - one.not_valid_before_utc).days == 365
    assert (tmp_path / "elsewhere/deep/tls.key").stat().st_mode & 0o077 == 0


def test_invalid_name_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, SERVICE_NAME="a\nDNS.5 = evil")
    assert (done.returncode, done.stdout) == (1, "")
    assert "names of a namespace and of a Service" in done.stderr
    assert list(tmp_path.iterdir()) == []
