"""The development certificates: a CA and a server certificate that `make run` uses."""

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

from attrs import frozen

from webhook.runtime.tls.issuing import BACKDATED, KeyPair, new_ca, new_leaf, pair_in, serves

CA_LIFE = timedelta(days=730)
LEAF_LIFE = timedelta(days=90)  # less than a third of the CA's life, so that a leaf never outlives its CA


@frozen
class DevCertificates:
    """The paths of the development certificates. Clients trust `ca_cert`."""

    ca_cert: Path
    cert: Path
    key: Path


def is_young(pair: KeyPair, now: datetime) -> bool:
    """Whether more than a third of the certificate's life is left."""
    begin = pair.cert.not_valid_before_utc
    return begin <= now and pair.end - now > (pair.end - begin) / 3


def make_dev_certificates(
    directory: Path, *, now: datetime, names: Sequence[str] = ("localhost", "127.0.0.1", "::1")
) -> DevCertificates:
    """Create a development CA and a server certificate in `directory`, unless they exist and are still suitable.

    Other files with these names are replaced. The CA's key is stored beside the certificate, so that clients need not
    trust a new CA for a new server certificate. Therefore it is for development only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / ".lock"):  # two servers may start at the same time
        ca = _load_pair(directory / "ca.crt", directory / "ca.key")
        if ca is None or not is_young(ca, now):
            ca = new_ca("development CA", (now - BACKDATED, now + CA_LIFE))
            store_pair(ca, directory / "ca.crt", directory / "ca.key")
        leaf = _load_pair(directory / "tls.crt", directory / "tls.key")
        if leaf is None or not is_young(leaf, now) or not serves(leaf.cert, ca.cert, names):
            leaf = new_leaf(ca, "development server", names, (now - BACKDATED, now + LEAF_LIFE))
            store_pair(leaf, directory / "tls.crt", directory / "tls.key")
    return DevCertificates(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _load_pair(cert_path: Path, key_path: Path) -> KeyPair | None:
    """The pair in these files, or None if it is missing or invalid."""
    try:
        return pair_in(cert_path.read_bytes(), key_path.read_bytes())
    except FileNotFoundError:
        return None


def store_pair(pair: KeyPair, cert_path: Path, key_path: Path) -> None:
    """Only the owner can read the key."""
    _write_atomically(key_path, pair.key_pem, mode=0o600)
    _write_atomically(cert_path, pair.cert_pem, mode=0o644)


def _write_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """Replace the file: a reader sees the old content or the new. Other users can never read a key."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
