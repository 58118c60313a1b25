"""Our own CA and certificate over time: whoever stops where, what is served is trusted."""

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
    data_of,
    next_step,
    state_in,
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
class Place:
    """A Secret, webhook configurations, and the time. One actor, who may stop after any step."""

    now: datetime = START
    state: CertificateState | None = None
    bundles: list[bytes] = field(factory=lambda: [b"", b""])

    def step(self) -> str | None:
        step = next_step(self.state, self.bundles, RULES, self.now)
        match step:
            case None:
                return None
            case WriteSecret(state, why):
                self.state = state_in(data_of(state))
                assert self.state == state  # nothing is lost on the way
                return why
            case PublishBundle(bundle):
                self.bundles = [bundle for _ in self.bundles]
                return "published"

    def all_steps(self) -> list[str]:
        return list(iter(self.step, None))

    @property
    def there(self) -> CertificateState:
        assert self.state is not None
        return self.state

    @property
    def leaf(self) -> KeyPair:
        assert self.there.leaf is not None
        return self.there.leaf


def test_at_first_there_is_a_certificate_and_it_is_trusted() -> None:
    place = Place()
    assert place.all_steps() == ["begun", "published"]
    assert all(is_trusted(place.leaf, bundle) for bundle in place.bundles)
    names = place.leaf.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == list(NAMES)
    assert place.leaf.end == START + 90 * DAY
    assert place.all_steps() == []


def test_a_configuration_that_comes_later_or_is_tampered_with_gets_the_bundle() -> None:
    place = Place(bundles=[])
    assert place.all_steps() == ["begun"]
    place.bundles = [b"", b"something else"]
    assert place.all_steps() == ["published"]
    assert place.bundles == [place.there.bundle] * 2


def test_a_certificate_is_renewed_in_time_and_its_ca_stays() -> None:
    place = Place()
    place.all_steps()
    first = place.there
    place.now = START + 75 * DAY - timedelta(seconds=1)
    assert place.all_steps() == []
    place.now += timedelta(seconds=1)
    assert place.all_steps() == ["a new certificate"]
    assert place.there.bundle == first.bundle
    assert place.leaf.end == START + 165 * DAY


def test_a_certificate_for_other_names_is_replaced_at_once() -> None:
    place = Place()
    place.all_steps()
    other = evolve(RULES, names=(*NAMES, "10.0.0.1"))
    step = next_step(place.state, place.bundles, other, START)
    assert isinstance(step, WriteSecret)
    assert step.why == "a new certificate"


def test_a_ca_is_trusted_before_it_signs_and_as_long_as_a_leaf_of_its_may_be_served() -> None:
    place = Place()
    place.all_steps()
    old, place.now = place.there, START + 261 * DAY
    assert old.signing is not None
    # The old one goes on signing while the new one waits.
    done = place.all_steps()
    assert done == ["a new CA is announced", "published", "the new CA has been announced", "a new certificate"]
    old_leaf = place.leaf
    assert is_signed_by(old_leaf, old.signing.cert)
    place.now += RULES.settle - timedelta(seconds=1)
    assert place.all_steps() == []
    place.now += timedelta(seconds=1)
    assert place.all_steps() == ["the new CA signs"]
    assert not is_signed_by(place.leaf, old.signing.cert)
    assert all(is_trusted(one, bundle) for one in (old_leaf, place.leaf) for bundle in place.bundles)
    place.now = old_leaf.end - timedelta(seconds=1)
    assert "an old CA is trusted no more" not in place.all_steps()
    assert all(is_trusted(old_leaf, bundle) for bundle in place.bundles)
    place.now = old_leaf.end
    assert place.all_steps() == ["an old CA is trusted no more", "published"]
    assert not any(is_trusted(old_leaf, bundle) for bundle in place.bundles)


def test_an_announcement_that_was_taken_back_waits_anew() -> None:
    place = Place()
    place.all_steps()
    place.now = START + 270 * DAY
    place.all_steps()
    place.now += RULES.settle
    place.bundles[1] = b""  # somebody applies an old manifest
    assert place.all_steps() == ["an announcement was taken back", "published", "the new CA has been announced"]
    place.now += RULES.settle
    assert place.all_steps() == ["the new CA signs"]


def test_who_comes_back_after_years_begins_again() -> None:
    place = Place()
    place.all_steps()
    place.now = START + 1000 * DAY
    place.all_steps()
    place.now += RULES.settle
    place.all_steps()
    assert place.leaf.end > place.now
    assert all(is_trusted(place.leaf, bundle) for bundle in place.bundles)


def test_somebody_elses_ca_stays_trusted_while_its_certificate_may_be_served() -> None:
    ca = new_ca("theirs", (START - BACKDATED, START + 3650 * DAY))
    leaf = new_leaf(ca, "theirs", NAMES, (START, START + 90 * DAY))
    place = Place(bundles=[ca.cert_pem, ca.cert_pem])
    assert place.all_steps() == ["begun", "published", "the new CA has been announced"]
    assert place.there.leaf is None  # nobody serves with ours before it is trusted
    place.now += RULES.settle
    assert place.all_steps() == ["the new CA signs"]
    assert all(is_trusted(one, bundle) for one in (leaf, place.leaf) for bundle in place.bundles)
    place.now = leaf.end
    assert "an old CA is trusted no more" in place.all_steps()


def test_what_is_kept_is_read_again() -> None:
    ca, other = (new_ca("one", (START, START + DAY)) for _ in range(2))
    whole = CertificateState(
        ca, new_leaf(ca, "leaf", NAMES, (START, START + DAY)), NextCa(other, START), (PreviousCa(ca.cert, START),)
    )
    for state in (whole, evolve(whole, coming=None), evolve(whole, signing=None, leaf=None), evolve(whole, leaving=())):
        assert state_in(data_of(state)) == state
    assert state_in({"tls.crt": b"", "tls.key": b""}) is None


@pytest.mark.parametrize(
    "change",
    [{"rotation.json": b"{"}, {"rotation.json": b'{"leaving":[{"cert":"","until":"2026-01-01T00:00:00Z"}]}'}]
    + [{name: b"x"} for name in ("tls.crt", "tls.key", "signing-ca.crt", "signing-ca.key", "coming-ca.key")],
    ids=lambda change: ",".join(change),
)
def test_what_somebody_else_wrote_is_refused(change: dict[str, bytes]) -> None:
    place = Place()
    place.all_steps()
    with pytest.raises(BadStateError):
        state_in({**data_of(place.there), **change})


# Several at once, each interrupted anywhere for any time. A new CA is due after ten days, and a leaf lasts ninety.
OFTEN = RotationRules(
    names=NAMES, leaf_life=90 * DAY, renew_before=60 * DAY, ca_life=160 * DAY, settle=timedelta(minutes=1)
)

Look = tuple[tuple[int, ...], tuple[bytes, ...], int, CertificateState | None]


@frozen
class Written:
    at: datetime
    leaf: KeyPair
    is_first: bool


@define
class World:
    """The API server's side: versions, and all that was ever served or trusted."""

    now: datetime = START
    version: int = 0
    state: CertificateState | None = None
    configurations: list[tuple[int, bytes]] = field(factory=lambda: [(0, b""), (0, b"")])
    leaves: list[Written] = field(factory=list)
    # By configuration: since when which bundle.
    history: list[list[tuple[datetime, bytes]]] = field(factory=lambda: [[], []])

    def actor(self) -> Iterator[None]:
        """Somebody who looks and acts; he can be left alone for ever at each `yield`."""
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
        """What any replica may be serving is trusted by any API server, however late each hears of news."""
        for one in self.leaves:
            if one.leaf.end <= self.now:
                continue
            for bundles in self.history:
                since = one.at - OFTEN.settle + timedelta(seconds=1)
                before = [b for at, b in bundles if at <= since][-1:]
                lately = [b for at, b in bundles if at > since]
                if not one.is_first:  # at first nobody serves anything, and nobody is trusted
                    assert before, "served before it was trusted"
                assert all(is_trusted(one.leaf, bundle) for bundle in (*before, *lately))


moves = st.lists(
    st.one_of(
        st.tuples(st.just("act"), st.integers(0, 2), st.integers(1, 60)),
        st.tuples(st.just("die"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([1, 50, 61, 86400 * 11, 86400 * 30]), st.just(0)),
    ),
    max_size=60,
)


@given(moves)
@settings(deadline=None)
def test_whoever_stops_wherever_what_is_served_is_trusted(todo: list[tuple[str, int, int]]) -> None:
    world = World()
    make: Callable[[], Iterator[None]] = world.actor
    actors = [make() for _ in range(3)]
    for _ in range(20):  # installed, and then anything may happen
        next(actors[0])
    assert all(world.history)
    world.now += OFTEN.settle
    for move, what, times in todo:
        if move == "wait":
            world.now += timedelta(seconds=what)
        elif move == "die":
            actors[what] = make()
        else:
            for _ in range(times):
                next(actors[what])
    world.check()
    for _ in range(100):  # whoever is left brings it to an end
        next(actors[0])
        next(actors[1])
    assert world.state is not None
    assert {bundle for _, bundle in world.configurations} == {world.state.bundle}
