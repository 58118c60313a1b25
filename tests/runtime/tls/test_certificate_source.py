"""Tests with real files and real handshakes, in memory or over a socket."""

import asyncio
import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from stat import S_IMODE

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from starlette.responses import PlainTextResponse

from webhook.runtime.clock import utc_now
from webhook.runtime.http.listener import Listener
from webhook.runtime.tls.certificate_source import BadCertificateError, CertificateSource, Reload
from webhook.runtime.tls.dev_certificates import DevCertificates, make_dev_certificates

NOW = utc_now().replace(microsecond=0)
CA = trustme.CA()


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost") -> ssl.SSLObject:
    """A handshake in memory. Returns the client's side, and raises errors of both sides."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname=name)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (near, far):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    near.write(b"x")
    assert far.read(1) == b"x"  # with TLS 1.3 a client certificate is refused only after the client's handshake
    return near


def strict_client(ca: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def client_of(*authorities: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for authority in authorities:
        authority.configure_trust(context)
    return context


def serial_seen(source: CertificateSource, client: ssl.SSLContext | None = None) -> int:
    seen = handshake(source.context, client or client_of(CA)).getpeercert(binary_form=True)
    assert seen is not None
    return x509.load_der_x509_certificate(seen).serial_number


def serial_of(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Files:
    """A certificate and its key on disk, and the source that serves them."""

    def __init__(self, directory: Path) -> None:
        self.cert, self.key, self.client_ca = (directory / name for name in ("tls.crt", "tls.key", "client-ca.crt"))
        self.now = NOW
        self.write(issued())

    def write(self, pair: trustme.LeafCert) -> None:
        self.cert.write_bytes(pair.cert_chain_pems[0].bytes())
        self.key.write_bytes(pair.private_key_pem.bytes())

    def source(self, *, client_ca: bool = False, requires_client_certificate: bool = True) -> CertificateSource:
        ca = self.client_ca if client_ca else None
        return CertificateSource(
            self.cert,
            self.key,
            client_ca=ca,
            requires_client_certificate=requires_client_certificate,
            clock=lambda: self.now,
        )


def issued(
    *, until: datetime | None = None, since: datetime | None = None, key_type: trustme.KeyType = trustme.KeyType.ECDSA
) -> trustme.LeafCert:
    return CA.issue_cert("localhost", not_before=since, not_after=until, key_type=key_type)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> DevCertificates:
    return make_dev_certificates(tmp_path_factory.mktemp("dev"), now=NOW)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_strict_client_accepts_the_development_certificate_for_every_name(dev: DevCertificates, name: str) -> None:
    source = CertificateSource(dev.cert, dev.key, clock=utc_now)
    assert handshake(source.context, strict_client(dev.ca_cert), name).version() == "TLSv1.3"


def test_strict_client_refuses_the_development_certificate_for_another_name(dev: DevCertificates) -> None:
    source = CertificateSource(dev.cert, dev.key, clock=utc_now)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(source.context, strict_client(dev.ca_cert), "example.com")


def test_development_certificate_has_the_given_names(tmp_path: Path) -> None:
    made = make_dev_certificates(tmp_path, now=NOW, names=["gpuwarden.example", "10.0.0.7"])
    source = CertificateSource(made.cert, made.key, clock=utc_now)
    assert handshake(source.context, strict_client(made.ca_cert), "10.0.0.7").version() == "TLSv1.3"


def test_only_the_owner_can_read_keys_and_no_temporary_files_remain(dev: DevCertificates) -> None:
    modes = {path.name: S_IMODE(path.stat().st_mode) for path in dev.key.parent.iterdir() if path.name != ".lock"}
    assert modes == {"ca.crt": 0o644, "ca.key": 0o600, "tls.crt": 0o644, "tls.key": 0o600}


@pytest.mark.parametrize(
    ("later", "changed"),
    [
        (timedelta(0), set()),
        (timedelta(days=59), set()),
        (timedelta(days=61), {"tls.crt", "tls.key"}),
        (timedelta(days=488), {"ca.crt", "ca.key", "tls.crt", "tls.key"}),
    ],
    ids=["at-once", "a-third-left", "leaf-near-its-end", "ca-near-its-end"],
)
def test_certificates_are_renewed_in_the_last_third_of_their_life(
    tmp_path: Path, later: timedelta, changed: set[str]
) -> None:
    make_dev_certificates(tmp_path, now=NOW)
    before = contents(tmp_path)
    make_dev_certificates(tmp_path, now=NOW + later)
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before[name]} == changed


def test_other_names_give_a_new_leaf_of_the_same_ca(tmp_path: Path) -> None:
    before = make_dev_certificates(tmp_path, now=NOW)
    ca, leaf = before.ca_cert.read_bytes(), before.cert.read_bytes()
    make_dev_certificates(tmp_path, now=NOW, names=["localhost"])
    assert (before.ca_cert.read_bytes() == ca, before.cert.read_bytes() == leaf) == (True, False)


@pytest.mark.parametrize("name", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
@pytest.mark.parametrize("damage", [b"", b"no certificate", None], ids=["empty", "garbage", "missing"])
def test_damaged_files_are_replaced(tmp_path: Path, name: str, damage: bytes | None) -> None:
    made = make_dev_certificates(tmp_path, now=NOW)
    (tmp_path / name).unlink() if damage is None else (tmp_path / name).write_bytes(damage)
    make_dev_certificates(tmp_path, now=NOW)
    source = CertificateSource(made.cert, made.key, clock=utc_now)
    assert handshake(source.context, strict_client(made.ca_cert)).version() == "TLSv1.3"


def test_concurrent_starts_create_one_certificate(tmp_path: Path) -> None:
    def start(_: int) -> tuple[bytes, bytes, bytes]:
        made = make_dev_certificates(tmp_path / "dev", now=NOW)
        return made.ca_cert.read_bytes(), made.cert.read_bytes(), made.key.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(start, range(8)))) == 1


def test_unchanged_files_are_not_reloaded(files: Files) -> None:
    source = files.source()
    assert (source.reload(), serial_seen(source)) == (Reload.UNCHANGED, serial_of(files.cert))


def test_new_pair_is_served_after_reload(files: Files) -> None:
    source = files.source()
    until = NOW + timedelta(days=3)
    files.write(issued(until=until))
    assert (source.reload(), source.not_after, source.problem) == (Reload.RELOADED, until, "")
    assert serial_seen(source) == serial_of(files.cert)
    assert source.reload() is Reload.UNCHANGED


def test_rewritten_files_with_equal_content_are_unchanged(files: Files) -> None:
    source = files.source()
    files.cert.write_bytes(files.cert.read_bytes())
    os.utime(files.cert, (0, 0))
    assert source.reload() is Reload.UNCHANGED


def test_replaced_symlink_is_reloaded(tmp_path: Path) -> None:
    """Kubernetes updates mounted secrets like this: only the target of `..data` changes."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Files(tmp_path / "one"), Files(tmp_path / "two")
    (tmp_path / "..data").symlink_to("one")
    data = tmp_path / "..data"
    source = CertificateSource(data / "tls.crt", data / "tls.key", clock=utc_now)
    assert serial_seen(source) == serial_of(one.cert)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(data)
    assert (source.reload(), serial_seen(source)) == (Reload.RELOADED, serial_of(two.cert))


class SwappedWhileRead(type(Path())):  # type: ignore[misc]
    """A path behind a symlink that is replaced right after the first read of the certificate."""

    swap: Callable[[], object] | None = None

    def read_bytes(self) -> bytes:
        content: bytes = super().read_bytes()
        swap, SwappedWhileRead.swap = SwappedWhileRead.swap, None
        if swap is not None:
            swap()
        return content


def test_symlink_replaced_between_two_reads_gives_a_consistent_pair(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        pair = issued()
        (tmp_path / name / "tls.crt").write_bytes(pair.cert_chain_pems[0].bytes())
        (tmp_path / name / "tls.key").write_bytes(pair.private_key_pem.bytes())
    (tmp_path / "live").symlink_to("old")
    (tmp_path / "next").symlink_to("new")
    live = SwappedWhileRead(tmp_path / "live" / "tls.crt")
    source = CertificateSource(live, tmp_path / "live" / "tls.key", clock=utc_now)

    SwappedWhileRead.swap = lambda: os.replace(tmp_path / "next", tmp_path / "live")
    assert source.reload() is Reload.RELOADED
    assert serial_seen(source) == serial_of(tmp_path / "new" / "tls.crt")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(trustme.KeyType.RSA, trustme.KeyType.ECDSA), (trustme.KeyType.ECDSA, trustme.KeyType.RSA)],
    ids=["rsa-to-ec", "ec-to-rsa"],
)
def test_pair_with_another_key_type_replaces_the_old_one(
    files: Files, before: trustme.KeyType, after: trustme.KeyType, version: ssl.TLSVersion
) -> None:
    files.write(issued(key_type=before))
    source = files.source()
    files.write(issued(key_type=after))
    assert source.reload() is Reload.RELOADED
    client = client_of(CA)
    client.maximum_version = version
    assert serial_seen(source, client) == serial_of(files.cert)


def mismatched(files: Files) -> None:
    files.cert.write_bytes(issued().cert_chain_pems[0].bytes())


def half_written(files: Files) -> None:
    pem = issued().cert_chain_pems[0].bytes()
    files.cert.write_bytes(pem[: len(pem) // 2])


def garbage_key(files: Files) -> None:
    files.key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n")


def encrypted_key(files: Files) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    lock = serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))


def expired(files: Files) -> None:
    files.write(issued(since=NOW - timedelta(days=2), until=NOW))


def too_early(files: Files) -> None:
    files.write(issued(since=NOW + timedelta(hours=1)))


BAD = pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (mismatched, "tls.key is not the key of the certificate in"),
        (half_written, "tls.crt holds no certificate"),
        (garbage_key, "tls.key holds no private key"),
        (encrypted_key, "tls.key holds no private key in PEM without a password"),
        (lambda files: files.key.write_bytes(b""), "tls.key holds no private key"),
        (lambda files: files.cert.unlink(), "tls.crt cannot be read: No such file or directory"),
        (expired, f"tls.crt expired on {NOW.isoformat()}"),
        (too_early, "tls.crt is not valid before"),
    ],
    ids=[
        "mismatched",
        "half-written",
        "garbage-key",
        "encrypted-key",
        "empty-key",
        "missing",
        "expired-on-the-second",
        "too-early",
    ],
)


@BAD
def test_invalid_pair_is_refused_once_and_the_old_one_stays(
    files: Files, corrupt: Callable[[Files], None], problem: str
) -> None:
    source = files.source()
    good, until = serial_of(files.cert), source.not_after
    corrupt(files)
    assert [source.reload() for _ in range(3)] == [Reload.REFUSED, Reload.UNCHANGED, Reload.UNCHANGED]
    assert problem in source.problem
    assert (serial_seen(source), source.not_after) == (good, until)
    files.write(issued())
    assert (source.reload(), source.problem) == (Reload.RELOADED, "")


@BAD
def test_source_with_an_invalid_pair_raises(files: Files, corrupt: Callable[[Files], None], problem: str) -> None:
    corrupt(files)
    with pytest.raises(BadCertificateError, match=problem.replace("+", r"\+")):
        files.source()


def test_each_invalid_content_is_refused(files: Files) -> None:
    source = files.source()
    mismatched(files)
    first = source.reload()
    mismatched(files)
    assert (first, source.reload()) == (Reload.REFUSED, Reload.REFUSED)


def test_restored_content_clears_the_problem(files: Files) -> None:
    source, good = files.source(), files.cert.read_bytes()
    mismatched(files)
    source.reload()
    files.cert.write_bytes(good)
    assert (source.reload(), source.problem) == (Reload.UNCHANGED, "")


def test_pair_that_is_not_yet_valid_is_served_when_it_becomes_valid(files: Files) -> None:
    source = files.source()
    too_early(files)
    assert source.reload() is Reload.REFUSED
    files.now += timedelta(hours=1)
    assert source.reload() is Reload.RELOADED


def test_required_client_certificate_must_be_signed_by_the_client_ca(files: Files) -> None:
    other = trustme.CA()
    CA.cert_pem.write_to_path(files.client_ca)
    source = files.source(client_ca=True)
    known, foreign, without_certificate = client_of(CA), client_of(CA), client_of(CA)
    CA.issue_cert("client").configure_cert(known)
    other.issue_cert("client").configure_cert(foreign)
    assert handshake(source.context, known).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        handshake(source.context, foreign)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(source.context, without_certificate)


def test_optional_client_certificate_must_be_signed_by_the_client_ca(files: Files) -> None:
    CA.cert_pem.write_to_path(files.client_ca)
    source = files.source(client_ca=True, requires_client_certificate=False)
    known, foreign, without_certificate = client_of(CA), client_of(CA), client_of(CA)
    CA.issue_cert("client").configure_cert(known)
    trustme.CA().issue_cert("client").configure_cert(foreign)
    for client in (known, without_certificate):
        assert handshake(source.context, client).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        handshake(source.context, foreign)


def test_new_client_ca_applies_after_reload(files: Files) -> None:
    other = trustme.CA()
    CA.cert_pem.write_to_path(files.client_ca)
    source = files.source(client_ca=True)
    old, new = client_of(CA), client_of(CA)
    CA.issue_cert("client").configure_cert(old)
    other.issue_cert("client").configure_cert(new)
    other.cert_pem.write_to_path(files.client_ca)
    assert source.reload() is Reload.RELOADED
    assert handshake(source.context, new).version() == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(source.context, old)


@pytest.mark.parametrize("content", [b"", b"no certificate", b"\xff"], ids=["empty", "garbage", "binary"])
def test_invalid_client_ca_is_refused(files: Files, content: bytes) -> None:
    CA.cert_pem.write_to_path(files.client_ca)
    source = files.source(client_ca=True)
    files.client_ca.write_bytes(content)
    assert source.reload() is Reload.REFUSED
    assert "client-ca.crt holds no CA certificate" in source.problem


def test_http2_is_preferred_and_tls_is_1_2_or_later(files: Files) -> None:
    source, client = files.source(), client_of(CA)
    client.set_alpn_protocols(["http/1.1", "h2"])
    assert handshake(source.context, client).selected_alpn_protocol() == "h2"
    assert source.context.minimum_version is ssl.TLSVersion.TLSv1_2


async def test_watch_reports_changes_only(files: Files) -> None:
    steps: list[Callable[[], None]] = [
        lambda: None,
        lambda: files.write(issued()),
        lambda: mismatched(files),
        lambda: None,
    ]
    outcomes: list[Reload] = []
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if not steps:
            raise asyncio.CancelledError
        steps.pop(0)()

    with pytest.raises(asyncio.CancelledError):
        await files.source().watch(outcomes.append, sleep=sleep)
    assert outcomes == [Reload.RELOADED, Reload.REFUSED]
    assert slept == [1.0] * 5


async def test_open_connections_survive_a_reload(files: Files) -> None:
    source = files.source()
    listener = Listener(PlainTextResponse("ok"), host="127.0.0.1", port=0, ssl_context=source.context)
    await listener.start()
    old = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client_of(CA), server_hostname="localhost")
    await ask(*old)
    before = serial_of(files.cert)
    files.write(issued())
    assert source.reload() is Reload.RELOADED
    new = await asyncio.open_connection("127.0.0.1", listener.port, ssl=client_of(CA), server_hostname="localhost")
    await ask(*old)
    await ask(*new)
    assert [peer_serial(writer) for _, writer in (old, new)] == [before, serial_of(files.cert)]
    for _, writer in (old, new):
        writer.close()
        await writer.wait_closed()
    await listener.stop(1)


def peer_serial(writer: asyncio.StreamWriter) -> int:
    der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(der).serial_number


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\nok"), 5)
