import ssl

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from tests.evidence.certificates import Authority
from webhook.runtime.tls.certificates import certificate_in, certificates_in

GOOD = Authority().root
# The version is the first field: [0] { INTEGER 2 } for version 3.
UNKNOWN_VERSION = GOOD.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020134"), 1)
BAD = [b"", b"x", GOOD[:-1], UNKNOWN_VERSION]


def test_certificate_is_read_from_der_and_pem() -> None:
    pem = ssl.DER_cert_to_PEM_cert(GOOD).encode()
    assert [one.public_bytes(Encoding.DER) for one in (certificate_in(GOOD), *certificates_in(pem))] == [GOOD, GOOD]


@pytest.mark.parametrize("der", BAD, ids=["nothing", "no DER", "cut", "unknown version"])
def test_invalid_certificate_raises_value_error(der: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        certificate_in(der)
    with pytest.raises(ValueError, match=r"\w"):
        certificates_in(ssl.DER_cert_to_PEM_cert(der).encode())
