"""The rotation of the self-managed CA and certificate: a served certificate is always trusted."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from attrs import define, evolve, field, frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from hypothesis import given, settings
from hypothesis import strategies as st

from webhook.runtime.tls.certificates import certificates_in
from webhook.runtime.tls.issuing import BACKDATED, KeyPair, new_ca, new_leaf
from webhook.runtime.tls.rotation import (
    BadStateError,
    CertificateState,
    NextCa,
    PreviousCa,
    PublishBundle,
    RotationRules,
    WriteSecret,
    decode_state,
    encode_state,
    next_step,
)

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ("gpuwarden", "gpuwarden.gpuwarden", "gpuwarden.gpuwarden.svc", "gpuwarden.gpuwarden.svc.cluster.local")
RULES = RotationRules(
    names=NAMES, leaf_life=90 * DAY, renew_before=15 * DAY, ca_life=365 * DAY, settle=timedelta(minutes=1)
)


def is_trusted(leaf: KeyPair, bundle: bytes) -> bool:
    return any(is_signed_by(leaf, ca) for ca in certificates_in(bundle))


def is_signed_by(leaf: KeyPair, ca: x509.Certificate) -> bool:
    try:
        leaf.cert.verify_directly_issued_by(ca)
    except (ValueError, InvalidSignature):
        return False
    return True


@define
class Setup:
    """A Secret, webhook configurations and the time, with one process that may stop after any step."""

    now: datetime = START
    state: CertificateState | None = None
    bundles: list[bytes] = field(factory=lambda: [b"", b""])

    def step(self) -> str | None:
        step = next_step(self.state, self.bundles, RULES, self.now)
        match step:
            case None:
                return None
            case WriteSecret(state, why):
                self.state = decode_state(encode_state(state))
                assert self.state == state  # encoding loses nothing
                return why
            case PublishBundle(bundle):
                self.bundles = [bundle for _ in self.bundles]
                return "published"

    def all_steps(self) -> list[str]:
        return list(iter(self.step, None))

    @property
    def current(self) -> CertificateState:
        assert self.state is not None
        return self.state

    @property
    def leaf(self) -> KeyPair:
        assert self.current.leaf is not None
        return self.current.leaf


def test_first_steps_create_a_trusted_certificate() -> None:
    setup = Setup()
    assert setup.all_steps() == ["created", "published"]
    assert all(is_trusted(setup.leaf, bundle) for bundle in setup.bundles)
    names = setup.leaf.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)
    assert setup.leaf.end == START + 90 * DAY
    assert setup.all_steps() == []


def test_new_or_changed_configuration_gets_the_bundle() -> None:
    setup = Setup(bundles=[])
    assert setup.all_steps() == ["created"]
    setup.bundles = [b"", b"something else"]
    assert setup.all_steps() == ["published"]
    assert setup.bundles == [setup.current.bundle] * 2


def test_certificate_is_renewed_before_it_expires_with_the_same_ca() -> None:
    setup = Setup()
    setup.all_steps()
    first = setup.current
    setup.now = START + 75 * DAY - timedelta(seconds=1)
    assert setup.all_steps() == []
    setup.now += timedelta(seconds=1)
    assert setup.all_steps() == ["issued a new certificate"]
    assert setup.current.bundle == first.bundle
    assert setup.leaf.end == START + 165 * DAY


def test_certificate_for_other_names_is_replaced_at_once() -> None:
    setup = Setup()
    setup.all_steps()
    other = evolve(RULES, names=(*NAMES, "10.0.0.1"))
    step = next_step(setup.state, setup.bundles, other, START)
    assert isinstance(step, WriteSecret)
    assert step.why == "issued a new certificate"


def test_ca_is_trusted_before_it_signs_and_until_its_last_leaf_expires() -> None:
    setup = Setup()
    setup.all_steps()
    old, setup.now = setup.current, START + 261 * DAY
    assert old.signing is not None
    # The old CA signs while the next one waits.
    done = setup.all_steps()
    assert done == ["created the next CA", "published", "all bundles contain the next CA", "issued a new certificate"]
    old_leaf = setup.leaf
    assert is_signed_by(old_leaf, old.signing.cert)
    setup.now += RULES.settle - timedelta(seconds=1)
    assert setup.all_steps() == []
    setup.now += timedelta(seconds=1)
    assert setup.all_steps() == ["the next CA signs now"]
    assert not is_signed_by(setup.leaf, old.signing.cert)
    assert all(is_trusted(one, bundle) for one in (old_leaf, setup.leaf) for bundle in setup.bundles)
    setup.now = old_leaf.end - timedelta(seconds=1)
    assert "removed an old CA" not in setup.all_steps()
    assert all(is_trusted(old_leaf, bundle) for bundle in setup.bundles)
    setup.now = old_leaf.end
    assert setup.all_steps() == ["removed an old CA", "published"]
    assert not any(is_trusted(old_leaf, bundle) for bundle in setup.bundles)


def test_next_ca_waits_again_after_it_was_removed_from_a_configuration() -> None:
    setup = Setup()
    setup.all_steps()
    setup.now = START + 270 * DAY
    setup.all_steps()
    setup.now += RULES.settle
    setup.bundles[1] = b""  # an old manifest is applied
    assert setup.all_steps() == ["the next CA is missing in a bundle", "published", "all bundles contain the next CA"]
    setup.now += RULES.settle
    assert setup.all_steps() == ["the next CA signs now"]


def test_rotation_recovers_after_all_certificates_have_expired() -> None:
    setup = Setup()
    setup.all_steps()
    setup.now = START + 1000 * DAY
    setup.all_steps()
    setup.now += RULES.settle
    setup.all_steps()
    assert setup.leaf.end > setup.now
    assert all(is_trusted(setup.leaf, bundle) for bundle in setup.bundles)


def test_foreign_ca_stays_trusted_while_its_certificate_may_be_served() -> None:
    ca = new_ca("theirs", (START - BACKDATED, START + 3650 * DAY))
    leaf = new_leaf(ca, "theirs", NAMES, (START, START + 90 * DAY))
    setup = Setup(bundles=[ca.cert_pem, ca.cert_pem])
    assert setup.all_steps() == ["created", "published", "all bundles contain the next CA"]
    assert setup.current.leaf is None  # our certificate is not served before its CA is trusted
    setup.now += RULES.settle
    assert setup.all_steps() == ["the next CA signs now"]
    assert all(is_trusted(one, bundle) for one in (leaf, setup.leaf) for bundle in setup.bundles)
    setup.now = leaf.end
    assert "removed an old CA" in setup.all_steps()


def test_encoded_state_is_decoded_unchanged() -> None:
    ca, other = (new_ca("one", (START, START + DAY)) for _ in range(2))
    whole = CertificateState(
        ca, new_leaf(ca, "leaf", NAMES, (START, START + DAY)), NextCa(other, START), (PreviousCa(ca.cert, START),)
    )
    for state in (
        whole,
        evolve(whole, next_ca=None),
        evolve(whole, signing=None, leaf=None),
        evolve(whole, previous_cas=()),
    ):
        assert decode_state(encode_state(state)) == state
    assert decode_state({"tls.crt": b"", "tls.key": b""}) is None


@pytest.mark.parametrize(
    "change",
    [{"rotation.json": b"{"}, {"rotation.json": b'{"leaving":[{"cert":"","until":"2026-01-01T00:00:00Z"}]}'}]
    + [{name: b"x"} for name in ("tls.crt", "tls.key", "signing-ca.crt", "signing-ca.key", "coming-ca.key")],
    ids=lambda change: ",".join(change),
)
def test_malformed_state_is_refused(change: dict[str, bytes]) -> None:
    setup = Setup()
    setup.all_steps()
    with pytest.raises(BadStateError):
        decode_state({**encode_state(setup.current), **change})


# Several processes at once, each interrupted at any step for any time. A new CA is due after ten days; a leaf is valid
# for ninety.
OFTEN = RotationRules(
    names=NAMES, leaf_life=90 * DAY, renew_before=60 * DAY, ca_life=160 * DAY, settle=timedelta(minutes=1)
)


@frozen
class Written:
    at: datetime
    leaf: KeyPair
    is_first: bool


@define
class Cluster:
    """The objects of the API server with their versions, and all certificates that were served or trusted."""

    now: datetime = START
    version: int = 0
    state: CertificateState | None = None
    configurations: list[tuple[int, bytes]] = field(factory=lambda: [(0, b""), (0, b"")])
    leaves: list[Written] = field(factory=list)
    # For each configuration its bundles, with the time of each write.
    history: list[list[tuple[datetime, bytes]]] = field(factory=lambda: [[], []])

    def actor(self) -> Iterator[None]:
        """One process. It can be interrupted forever at each `yield`."""
        while True:
            seen = [self.configurations[0]]
            yield
            seen.append(self.configurations[1])
            yield
            version, state = self.version, self.state
            yield
            match next_step(state, [bundle for _, bundle in seen], OFTEN, self.now):
                case None:
                    pass
                case WriteSecret(new):
                    yield
                    self.write(version, new)
                case PublishBundle(bundle):
                    for number, (at, _) in enumerate(seen):
                        yield
                        self.publish(number, at, bundle)
            yield

    def write(self, version: int, state: CertificateState) -> None:
        if version != self.version:
            return
        known = self.state.leaf if self.state else None
        self.version, self.state = version + 1, state
        if state.leaf is not None and state.leaf != known:
            nothing_serves = all(one.leaf.end <= self.now for one in self.leaves)
            self.leaves.append(Written(self.now, state.leaf, is_first=nothing_serves))
            self.check()

    def publish(self, number: int, version: int, bundle: bytes) -> None:
        if version != self.configurations[number][0]:
            return
        self.configurations[number] = (version + 1, bundle)
        self.history[number].append((self.now, bundle))
        self.check()

    def check(self) -> None:
        """Each API server trusts the certificate that any replica may serve, however late each sees changes."""
        for one in self.leaves:
            if one.leaf.end <= self.now:
                continue
            for bundles in self.history:
                since = one.at - OFTEN.settle + timedelta(seconds=1)
                before = [b for at, b in bundles if at <= since][-1:]
                lately = [b for at, b in bundles if at > since]
                if not one.is_first:  # at first no certificate is served
                    assert before, "served before it was trusted"
                assert all(is_trusted(one.leaf, bundle) for bundle in (*before, *lately))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("act"), st.integers(0, 2), st.integers(1, 60)),
        st.tuples(st.just("crash"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 50, 61, 86400 * 11, 86400 * 30]), st.just(0)),
    ),
    max_size=60,
)


@given(actions)
@settings(deadline=None)
def test_served_certificates_are_trusted_when_actors_stop_after_any_step(
    chosen_actions: list[tuple[str, int, int]],
) -> None:
    cluster = Cluster()
    new_actor: Callable[[], Iterator[None]] = cluster.actor
    actors = [new_actor() for _ in range(3)]
    for _ in range(20):  # the installation completes first
        next(actors[0])
    assert all(cluster.history)
    cluster.now += OFTEN.settle
    for action, number, times in chosen_actions:
        if action == "wait":
            cluster.now += timedelta(seconds=number)
        elif action == "crash":
            actors[number] = new_actor()
        else:
            for _ in range(times):
                next(actors[number])
    cluster.check()
    for _ in range(100):  # the remaining actors complete all steps
        next(actors[0])
        next(actors[1])
    assert cluster.state is not None
    assert {bundle for _, bundle in cluster.configurations} == {cluster.state.bundle}
