"""Parsing of certificates. All errors are ValueErrors."""

from collections.abc import Iterator
from contextlib import contextmanager

from cryptography import x509


def certificate_in(der: bytes) -> x509.Certificate:
    with _value_errors():
        return x509.load_der_x509_certificate(der)


def certificates_in(pem: bytes) -> list[x509.Certificate]:
    with _value_errors():
        return x509.load_pem_x509_certificates(pem)


@contextmanager
def _value_errors() -> Iterator[None]:
    try:
        yield
    except x509.InvalidVersion as exc:  # not a ValueError in the library
        raise ValueError(f"a certificate of an unknown version: {exc}") from exc
