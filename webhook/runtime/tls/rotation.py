"""The rotation of the self-managed CA and certificate: `next_step` maps the current state and the time to one step.

A step is one write, and the state is consistent after each step. A served leaf is signed by a CA that all webhook
configurations have contained for some time. A CA is removed only when none of its leaves can be served. So a process
can stop after any step and another one can continue, without unanswered reviews.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec
from attrs import evolve, frozen
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from webhook.core.errors import GpuwardenError
from webhook.runtime.tls.certificates import certificates_in
from webhook.runtime.tls.issuing import BACKDATED, KeyPair, new_ca, new_leaf, pair_in, serves

CERT, KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"
SIGNING, NEXT, TIMES = "signing-ca", "coming-ca", "rotation.json"


class BadStateError(GpuwardenError):
    """The stored state is malformed."""


@frozen
class RotationRules:
    """The names of the certificate and the lifetimes."""

    names: tuple[str, ...]
    leaf_life: timedelta
    renew_before: timedelta
    ca_life: timedelta
    # How long all API servers may take to see a changed configuration.
    settle: timedelta


@frozen
class NextCa:
    """A CA that does not sign yet: all API servers must trust it first."""

    pair: KeyPair
    # Since when all configurations contain it.
    announced: datetime | None = None


@frozen
class PreviousCa:
    """A CA that no longer signs. It stays trusted until its last leaf expires."""

    cert: x509.Certificate
    until: datetime


@frozen
class CertificateState:
    """The stored state. If the configurations contained a foreign CA at the beginning, there is no leaf until all of
    them contain our CA too."""

    signing: KeyPair | None = None
    leaf: KeyPair | None = None
    next_ca: NextCa | None = None
    previous_cas: tuple[PreviousCa, ...] = ()

    @property
    def next_pair(self) -> KeyPair | None:
        return None if self.next_ca is None else self.next_ca.pair

    @property
    def bundle(self) -> bytes:
        """All CAs that clients must trust, in PEM. The oldest comes first, so that equal sets give equal bundles."""
        trusted = {one.cert for one in (self.signing, self.next_pair) if one is not None}
        trusted |= {one.cert for one in self.previous_cas}
        in_order = sorted(trusted, key=lambda cert: (cert.not_valid_before_utc, cert.serial_number))
        return b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in in_order)


@frozen
class WriteSecret:
    """Write this state, unless it has changed since it was read."""

    state: CertificateState
    why: str


@frozen
class PublishBundle:
    """Write this bundle into every configuration, unless the configuration has changed since it was read."""

    bundle: bytes


Step = WriteSecret | PublishBundle


def next_step(
    state: CertificateState | None, published: Sequence[bytes], rules: RotationRules, now: datetime
) -> Step | None:
    """The step that is due now; None if there is none. `published` is the bundles of the configurations. They must be
    read before the state, so that an older bundle never overwrites a newer one."""
    if state is None:
        return WriteSecret(initial_state(published, rules, now), "created")
    if any(bundle != state.bundle for bundle in published):
        return publish_step(state)
    return rotation_step(state, rules, now) or renewal_step(state, rules, now) or removal_step(state, now)


def initial_state(published: Sequence[bytes], rules: RotationRules, now: datetime) -> CertificateState:
    """The first state. Foreign CAs stay trusted as long as one of their leaves might be valid."""
    ca = new_ca("admission CA", (now - BACKDATED, now + rules.ca_life))
    found = {cert for bundle in published for cert in parse_certificates(bundle) if cert.not_valid_after_utc > now}
    if found:
        until = now + rules.leaf_life
        previous_cas = tuple(PreviousCa(cert, min(until, cert.not_valid_after_utc)) for cert in found)
        return CertificateState(next_ca=NextCa(ca), previous_cas=previous_cas)
    return CertificateState(signing=ca, leaf=issue_leaf(ca, rules, now))


def publish_step(state: CertificateState) -> Step:
    """If a configuration has lost the next CA, the wait for `settle` starts again."""
    next_ca = state.next_ca
    if next_ca is not None and next_ca.announced is not None:
        return WriteSecret(evolve(state, next_ca=NextCa(next_ca.pair)), "the next CA is missing in a bundle")
    return PublishBundle(state.bundle)


def rotation_step(state: CertificateState, rules: RotationRules, now: datetime) -> Step | None:
    next_ca, signing = state.next_ca, state.signing
    if next_ca is None:
        if signing is not None and now + rules.leaf_life + rules.renew_before <= signing.end:
            return None
        ca = new_ca("admission CA", (now - BACKDATED, now + rules.ca_life))
        return WriteSecret(evolve(state, next_ca=NextCa(ca)), "created the next CA")
    if next_ca.announced is None:
        return WriteSecret(evolve(state, next_ca=evolve(next_ca, announced=now)), "all bundles contain the next CA")
    if now < next_ca.announced + rules.settle:
        return None
    return WriteSecret(promote(state, next_ca.pair, rules, now), "the next CA signs now")


def promote(state: CertificateState, ca: KeyPair, rules: RotationRules, now: datetime) -> CertificateState:
    """The state in which the next CA signs. The old CA stays trusted until its newest leaf expires. No leaf outlives
    its CA."""
    gone = () if state.signing is None or state.leaf is None else (PreviousCa(state.signing.cert, state.leaf.end),)
    return CertificateState(signing=ca, leaf=issue_leaf(ca, rules, now), previous_cas=(*gone, *state.previous_cas))


def renewal_step(state: CertificateState, rules: RotationRules, now: datetime) -> Step | None:
    signing, leaf = state.signing, state.leaf
    if signing is None or signing.end <= now:
        return None
    is_wrong = leaf is None or not serves(leaf.cert, signing.cert, rules.names)
    # A leaf that already ends with its CA is not renewed: a new one would not last longer, and the next CA follows.
    is_old = leaf is not None and leaf.end - now <= rules.renew_before and leaf.end < signing.end
    if not (is_wrong or is_old):
        return None
    return WriteSecret(evolve(state, leaf=issue_leaf(signing, rules, now)), "issued a new certificate")


def removal_step(state: CertificateState, now: datetime) -> Step | None:
    kept = tuple(one for one in state.previous_cas if one.until > now)
    if len(kept) == len(state.previous_cas):
        return None
    return WriteSecret(evolve(state, previous_cas=kept), "removed an old CA")


def issue_leaf(ca: KeyPair, rules: RotationRules, now: datetime) -> KeyPair:
    return new_leaf(ca, subject_name(rules.names), rules.names, (now - BACKDATED, now + rules.leaf_life))


def subject_name(names: Iterable[str]) -> str:
    """The longest name that fits into the subject, which only people read."""
    return max((name for name in names if len(name) <= 64), key=len, default="gpuwarden")


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    try:
        return certificates_in(pem)
    except ValueError:
        return []


# The stored form: the data of a Secret, or files.


class StoredTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of the state that is neither a certificate nor a key."""

    announced: datetime | None = None
    previous_cas: tuple["StoredCa", ...] = msgspec.field(default=(), name="leaving")


class StoredCa(msgspec.Struct, frozen=True):
    cert: str
    until: datetime


# All keys that `encode_state` can write. A key that the current state does not need is deleted.
DATA_KEYS: Final = (CERT, KEY, BUNDLE, *(f"{ca}.{part}" for ca in (SIGNING, NEXT) for part in ("crt", "key")), TIMES)


def encode_state(state: CertificateState) -> dict[str, bytes]:
    pairs = {SIGNING: state.signing, NEXT: state.next_pair}
    data = {BUNDLE: state.bundle}
    for name, pair in pairs.items():
        if pair is not None:
            data |= {f"{name}.crt": pair.cert_pem, f"{name}.key": pair.key_pem}
    if state.leaf is not None:
        data |= {CERT: state.leaf.cert_pem, KEY: state.leaf.key_pem}
    stored = tuple(
        StoredCa(ca.cert.public_bytes(serialization.Encoding.PEM).decode(), ca.until) for ca in state.previous_cas
    )
    times = StoredTimes(state.next_ca.announced if state.next_ca else None, stored)
    return {**data, TIMES: msgspec.json.encode(times)}


def decode_state(data: Mapping[str, bytes]) -> CertificateState | None:
    """The state in the data, or None if it has not been written yet. Raises BadStateError."""
    if TIMES not in data:
        return None
    try:
        times = msgspec.json.decode(data[TIMES], type=StoredTimes)
        previous_cas = tuple(PreviousCa(certificates_in(one.cert.encode())[0], one.until) for one in times.previous_cas)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadStateError(f"{TIMES} is malformed") from exc
    next_ca = read_pair(data, f"{NEXT}.crt", f"{NEXT}.key")
    return CertificateState(
        signing=read_pair(data, f"{SIGNING}.crt", f"{SIGNING}.key"),
        leaf=read_pair(data, CERT, KEY),
        next_ca=None if next_ca is None else NextCa(next_ca, times.announced),
        previous_cas=previous_cas,
    )


def read_pair(data: Mapping[str, bytes], cert: str, key: str) -> KeyPair | None:
    if not data.get(cert) and not data.get(key):
        return None
    pair = pair_in(data.get(cert, b""), data.get(key, b""))
    if pair is None:
        raise BadStateError(f"{cert} and {key} are not a certificate and its key")
    return pair
