"""The decision for pods that must all have their GPUs at once, such as the pods of a job."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from attrs import frozen

from webhook.core.claim import Claim
from webhook.core.decide import EvidencePolicy, decide
from webhook.core.fleet import Fleet
from webhook.core.reservation import Placement, Reservation, ReservationId
from webhook.core.verdict import Deny

# Pods with GPUs that one decision places. Each takes about a tenth of a millisecond.
MAX_PODS = 4096


@frozen
class GangPart:
    """A number of pods with the same claim."""

    claim: Claim
    pods: int

    @property
    def gpus(self) -> int:
        return self.claim.count * self.pods


@frozen
class GangDenial:
    """Why not all pods can have their GPUs: the denial that the first pod without a place would read."""

    deny: Deny
    # How many pods have a place.
    placed: int
    pods: int

    @property
    def message(self) -> str:
        if self.pods == 1:
            return self.deny.sentence
        return f"{self.placed} of {self.pods} pods can have their GPUs now; the next one: {self.deny.sentence}"


class TrialHolds:
    """Devices held in the fleet for the time of a decision only, so that two pods do not count the same device."""

    def __init__(self, fleet: Fleet, policy: EvidencePolicy, now: datetime) -> None:
        self._fleet = fleet
        self._policy = policy
        self._now = now
        self._held: list[Reservation] = []

    def place_all(self, gang: Sequence[GangPart]) -> GangDenial | None:
        """Holds devices for all pods, or none and returns the denial. Large claims come first: they have fewer places.

        Pods are placed one after the other, so with claims of several kinds a possible distribution may be missed.
        """
        before, placed, pods = len(self._held), 0, sum(part.pods for part in gang)
        for part in sorted(gang, key=lambda one: -one.claim.count):
            found, denial = self._place(part)
            placed += found
            if denial is not None:
                self._free_after(before)
                return GangDenial(denial, placed, pods)
        return None

    def place_possible(self, gang: Iterable[GangPart]) -> None:
        """Holds devices for as many of the pods as have a place."""
        for part in gang:
            self._place(part)

    def free_all(self) -> None:
        self._free_after(0)

    def _place(self, part: GangPart) -> tuple[int, Deny | None]:
        """The number of pods with a place, and why the next one has none."""
        for placed in range(part.pods):
            found = decide(part.claim, self._fleet, self._policy, most=1)
            if isinstance(found, Deny):
                return placed, found
            if not part.claim.count:
                break  # holds no device, so all others have the same places
            self._hold(part.claim, found[0])
        return part.pods, None

    def _hold(self, claim: Claim, place: Placement) -> None:
        held = Reservation(
            id=ReservationId(f"trial-{len(self._held)}"),
            namespace="",
            claim_digest="",
            node=place.node,
            slots=place.slots,
            since=self._now,
            deadline=None,
            is_shared=claim.is_shared,
        )
        self._fleet.hold(held)
        self._held.append(held)

    def _free_after(self, number: int) -> None:
        while len(self._held) > number:
            self._fleet.free(self._held.pop())


@contextmanager
def trial(fleet: Fleet, policy: EvidencePolicy, now: datetime) -> Iterator[TrialHolds]:
    """Decides on the fleet as if the decided pods had their devices. Afterwards the fleet is as before. Nothing may be
    awaited meanwhile: other tasks would see the held devices."""
    fleet.advance(now)
    changes, holds = fleet.changes, TrialHolds(fleet, policy, now)
    try:
        yield holds
    finally:
        holds.free_all()
        fleet.changes = changes
