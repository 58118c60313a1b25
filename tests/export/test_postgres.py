"""Checks that need no database; `tests/e2e` has the others."""

import socket
import ssl
import threading
from pathlib import Path

import psycopg
import pytest
import trustme
from structlog.testing import capture_logs

from webhook.export.postgres import PostgresExporter, connect
from webhook.export.targets import PostgresTarget

UNVERIFIED = "the database's host name is not verified"


def target(sslmode: str, host: str = "db.example.org", **more: object) -> PostgresTarget:
    return PostgresTarget(host=host, db="d", user="u", password="example", sslmode=sslmode, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("sslmode", ["disable", "allow", "prefer", "require", "verify-ca"])
def test_unverified_host_name_is_logged_at_start(sslmode: str) -> None:
    with capture_logs() as lines:
        PostgresExporter(target(sslmode))
    (line,) = lines
    assert (line["log_level"], line["event"], line["sslmode"]) == ("warning", UNVERIFIED, sslmode)
    assert "verify-full" in line["hint"]


@pytest.mark.parametrize(
    ("sslmode", "host"), [("verify-full", "db.example.org"), ("disable", "/run/postgresql"), ("prefer", "127.0.0.1")]
)
def test_verified_or_local_database_logs_no_warning(sslmode: str, host: str) -> None:
    with capture_logs() as lines:
        PostgresExporter(target(sslmode, host))
    assert lines == []


class Listening:
    """As much of a database as to answer the question for TLS and to shake hands."""

    def __init__(self, authority: trustme.CA) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self._context)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.has_shaken = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(20)
                try:
                    peer.recv(8)
                    peer.sendall(b"S")
                    with self._context.wrap_socket(peer, server_side=True) as inside:
                        if inside.recv(4096):
                            self.has_shaken.set()
                except OSError:
                    continue

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.mark.parametrize("is_its_own", [True, False], ids=["its-authority", "another"])
async def test_the_root_certificate_that_is_set_decides_who_the_database_is(tmp_path: Path, is_its_own: bool) -> None:
    authority = trustme.CA()
    (authority if is_its_own else trustme.CA()).cert_pem.write_to_path(tmp_path / "ca.crt")
    listening = Listening(authority)
    try:
        at = target("verify-full", "localhost", port=listening.port, sslrootcert=str(tmp_path / "ca.crt"))
        with pytest.raises(psycopg.OperationalError) as caught:
            await connect(at)
    finally:
        listening.close()
    assert listening.has_shaken.is_set() == is_its_own
    assert ("certificate verify failed" in str(caught.value)) == (not is_its_own)
