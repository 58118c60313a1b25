"""What is due next with a CA and a certificate of our own: what is, and the time, go in; one step comes out.

A step is one write, and after each of them everything is consistent: a leaf that is served is signed by a CA that
every webhook configuration has named for a while, and a CA is taken back only when no leaf of its can be served any
more. So whoever stops after any step, and whoever goes on from there, leaves no review unanswered.
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
SIGNING, COMING, REST = "signing-ca", "coming-ca", "rotation.json"


class BadStateError(GpuwardenError):
    """What is kept cannot be read as what we write."""


@frozen
class RotationRules:
    """How long things last."""

    names: tuple[str, ...]
    leaf_life: timedelta
    renew_before: timedelta
    ca_life: timedelta
    # How long all API servers may take to hear of a changed configuration.
    settle: timedelta


@frozen
class NextCa:
    """A CA that signs nothing yet: first everybody has to trust it."""

    pair: KeyPair
    # Since when every configuration has named it.
    announced: datetime | None = None


@frozen
class PreviousCa:
    """A CA that signs nothing any more, trusted until its last leaf has ended."""

    cert: x509.Certificate
    until: datetime


@frozen
class CertificateState:
    """What is kept. Where somebody else's CA was trusted at the beginning, there is no leaf until ours is too."""

    signing: KeyPair | None = None
    leaf: KeyPair | None = None
    coming: NextCa | None = None
    leaving: tuple[PreviousCa, ...] = ()

    @property
    def coming_pair(self) -> KeyPair | None:
        return None if self.coming is None else self.coming.pair

    @property
    def bundle(self) -> bytes:
        """All CAs that clients have to trust, in PEM: the oldest first, so that it changes only with what is in it."""
        trusted = {one.cert for one in (self.signing, self.coming_pair) if one is not None}
        trusted |= {one.cert for one in self.leaving}
        in_order = sorted(trusted, key=lambda cert: (cert.not_valid_before_utc, cert.serial_number))
        return b"".join(cert.public_bytes(serialization.Encoding.PEM) for cert in in_order)


@frozen
class WriteSecret:
    """Write this state, if nobody has written another one since."""

    state: CertificateState
    why: str


@frozen
class PublishBundle:
    """Write this bundle into every configuration, if it is as it was seen."""

    bundle: bytes


Step = WriteSecret | PublishBundle


def next_step(
    state: CertificateState | None, published: Sequence[bytes], rules: RotationRules, now: datetime
) -> Step | None:
    """None: for this moment all is done. `published` is what the configurations say, which was read before the state:
    so nobody can write an older bundle over a newer one."""
    if state is None:
        return WriteSecret(begun(published, rules, now), "begun")
    if any(bundle != state.bundle for bundle in published):
        return publishing(state)
    return rotating(state, rules, now) or renewing(state, rules, now) or dropping(state, now)


def begun(published: Sequence[bytes], rules: RotationRules, now: datetime) -> CertificateState:
    """CAs of somebody else stay trusted as long as a leaf of theirs might last, and ours is announced beside them."""
    ca = new_ca("admission CA", (now - BACKDATED, now + rules.ca_life))
    found = {cert for bundle in published for cert in readable_certificates(bundle) if cert.not_valid_after_utc > now}
    if found:
        until = now + rules.leaf_life
        leaving = tuple(PreviousCa(cert, min(until, cert.not_valid_after_utc)) for cert in found)
        return CertificateState(coming=NextCa(ca), leaving=leaving)
    return CertificateState(signing=ca, leaf=leaf_of(ca, rules, now))


def publishing(state: CertificateState) -> Step:
    """A CA that was announced and is missing again begins its wait anew."""
    coming = state.coming
    if coming is not None and coming.announced is not None:
        return WriteSecret(evolve(state, coming=NextCa(coming.pair)), "an announcement was taken back")
    return PublishBundle(state.bundle)


def rotating(state: CertificateState, rules: RotationRules, now: datetime) -> Step | None:
    coming, signing = state.coming, state.signing
    if coming is None:
        if signing is not None and now + rules.leaf_life + rules.renew_before <= signing.end:
            return None
        ca = new_ca("admission CA", (now - BACKDATED, now + rules.ca_life))
        return WriteSecret(evolve(state, coming=NextCa(ca)), "a new CA is announced")
    if coming.announced is None:
        return WriteSecret(evolve(state, coming=evolve(coming, announced=now)), "the new CA has been announced")
    if now < coming.announced + rules.settle:
        return None
    return WriteSecret(promoted(state, coming.pair, rules, now), "the new CA signs")


def promoted(state: CertificateState, ca: KeyPair, rules: RotationRules, now: datetime) -> CertificateState:
    """The newest leaf ends last, for none outlives its CA."""
    gone = () if state.signing is None or state.leaf is None else (PreviousCa(state.signing.cert, state.leaf.end),)
    return CertificateState(signing=ca, leaf=leaf_of(ca, rules, now), leaving=(*gone, *state.leaving))


def renewing(state: CertificateState, rules: RotationRules, now: datetime) -> Step | None:
    signing, leaf = state.signing, state.leaf
    if signing is None or signing.end <= now:
        return None
    is_wrong = leaf is None or not serves(leaf.cert, signing.cert, rules.names)
    # One that would last no longer is of no use: its CA ends then, and the next one is on its way.
    is_old = leaf is not None and leaf.end - now <= rules.renew_before and leaf.end < signing.end
    if not (is_wrong or is_old):
        return None
    return WriteSecret(evolve(state, leaf=leaf_of(signing, rules, now)), "a new certificate")


def dropping(state: CertificateState, now: datetime) -> Step | None:
    left = tuple(one for one in state.leaving if one.until > now)
    if len(left) == len(state.leaving):
        return None
    return WriteSecret(evolve(state, leaving=left), "an old CA is trusted no more")


def leaf_of(ca: KeyPair, rules: RotationRules, now: datetime) -> KeyPair:
    return new_leaf(ca, longest(rules.names), rules.names, (now - BACKDATED, now + rules.leaf_life))


def longest(names: Iterable[str]) -> str:
    """For the subject, which nobody verifies and people read: the fullest name that there is room for."""
    return max((name for name in names if len(name) <= 64), key=len, default="gpuwarden")


def readable_certificates(pem: bytes) -> list[x509.Certificate]:
    try:
        return certificates_in(pem)
    except ValueError:
        return []


# How it is kept: the data of a Secret, or files.


class WaitUntil(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is neither a certificate nor a key."""

    announced: datetime | None = None
    leaving: tuple["Left", ...] = ()


class Left(msgspec.Struct, frozen=True):
    cert: str
    until: datetime


# Everything that is ever written; what a state has not is taken away.
NAMES: Final = (CERT, KEY, BUNDLE, *(f"{ca}.{part}" for ca in (SIGNING, COMING) for part in ("crt", "key")), REST)


def data_of(state: CertificateState) -> dict[str, bytes]:
    pairs = {SIGNING: state.signing, COMING: state.coming_pair}
    data = {BUNDLE: state.bundle}
    for name, pair in pairs.items():
        if pair is not None:
            data |= {f"{name}.crt": pair.cert_pem, f"{name}.key": pair.key_pem}
    if state.leaf is not None:
        data |= {CERT: state.leaf.cert_pem, KEY: state.leaf.key_pem}
    left = tuple(Left(one.cert.public_bytes(serialization.Encoding.PEM).decode(), one.until) for one in state.leaving)
    rest = WaitUntil(state.coming.announced if state.coming else None, left)
    return {**data, REST: msgspec.json.encode(rest)}


def state_in(data: Mapping[str, bytes]) -> CertificateState | None:
    """None where nothing has been written by us yet."""
    if REST not in data:
        return None
    try:
        rest = msgspec.json.decode(data[REST], type=WaitUntil)
        leaving = tuple(PreviousCa(certificates_in(one.cert.encode())[0], one.until) for one in rest.leaving)
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadStateError(f"{REST} is not what was written there") from exc
    coming = pair_at(data, f"{COMING}.crt", f"{COMING}.key")
    return CertificateState(
        signing=pair_at(data, f"{SIGNING}.crt", f"{SIGNING}.key"),
        leaf=pair_at(data, CERT, KEY),
        coming=None if coming is None else NextCa(coming, rest.announced),
        leaving=leaving,
    )


def pair_at(data: Mapping[str, bytes], cert: str, key: str) -> KeyPair | None:
    if not data.get(cert) and not data.get(key):
        return None
    pair = pair_in(data.get(cert, b""), data.get(key, b""))
    if pair is None:
        raise BadStateError(f"{cert} and {key} are no pair")
    return pair
