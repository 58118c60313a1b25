"""The certificates of a kube-scheduler and of its extender, which is `serve` in the same Pod."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from webhook.runtime.tls.dev_certificates import store_pair
from webhook.runtime.tls.issuing import BACKDATED, CertificateUse, new_ca, new_leaf

# Longer than the life of any Pod: kube-scheduler reads its CA once.
CERTIFICATE_LIFE: Final = timedelta(days=3650)
HOST: Final = "127.0.0.1"


def make_certificates(directory: Path, *, now: datetime) -> tuple[Path, ...]:
    """A CA, a certificate for the extender on loopback and a client certificate for kube-scheduler. The key of the CA
    is not stored, so it signs nothing else."""
    span = (now - BACKDATED, now + CERTIFICATE_LIFE)
    ca = new_ca("scheduler CA", span)
    directory.mkdir(parents=True, exist_ok=True)
    authority = directory / "ca.crt"
    authority.write_bytes(ca.cert_pem)
    made = [authority]
    for name, use in (("tls", CertificateUse.SERVER), ("client", CertificateUse.CLIENT)):
        cert, key = directory / f"{name}.crt", directory / f"{name}.key"
        store_pair(new_leaf(ca, "kube-scheduler's extender", [HOST], span, use), cert, key)
        made += [cert, key]
    return tuple(made)
