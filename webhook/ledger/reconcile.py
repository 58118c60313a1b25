"""Brings reservations and pods together: what exists is confirmed, what has ended is released, what never came expires.
What is gone and was not seen to end is an orphan, and keeps its devices until it must have ended: docs/decisions/0024.

Nothing is freed because a pod is absent from a list or a cache: either the watch has said that this uid was deleted, or
the API server is asked for it by name. It is asked too before a pod is removed, which may be on its node by now.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

import structlog
from attrs import evolve, frozen

from webhook.core.errors import LedgerError, ReservationConflictError, ReservationExpiredError, SlotsTakenError
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import Phase, PodIdentity, PodProof, Reservation, ReservationId
from webhook.kube.events import Events, Subject
from webhook.ledger.cluster import ClusterLedger, PodReader, PodReaderUnavailableError, pod_of
from webhook.ledger.end_of_use import Departure, NodeSnapshot, OrphanTimes, PodHistories
from webhook.ledger.orphans import Orphans
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.runtime.clock import Clock

log = structlog.get_logger(__name__)

Place = tuple[str, ReservationId]

# A pod whose reservation is missing is looked at this often, and is not removed before: whoever is restoring a node's
# object needs a moment.
PATIENCE = timedelta(seconds=10)
# Actions of one pass that are under way together.
AT_ONCE = 32
# The API server may still carry out a binding that was reviewed this long ago.
LAST_BINDING = timedelta(seconds=60)
# A deletion is remembered for so long at least: the GPUNode that says whose the reservation is may be told later.
RECENT = timedelta(minutes=1)
# More deletions than this are not kept for reservations that may have gone meanwhile.
MANY = 1000


class OnBindDeadline(StrEnum):
    """What becomes of a pod that can never be bound any more."""

    REMOVE = "remove"
    KEEP = "keep"


@frozen
class BindDeadline:
    """How long a pod's devices wait for it to be put on their node, and what comes then."""

    bind_deadline: timedelta = timedelta(minutes=5)
    afterwards: OnBindDeadline = OnBindDeadline.REMOVE
    # How far the clocks of two of us may be from the right time, each to its own side.
    clock_skew: timedelta = timedelta(seconds=5)

    @property
    def after_the_last_binding(self) -> timedelta:
        """When none can be under way that was let through in time, be it by a clock that is late."""
        return self.bind_deadline + LAST_BINDING + 2 * self.clock_skew


class PodRemover(PodReader, Protocol):
    """Pods that can be removed, by uid, and the nodes that they are on."""

    async def node(self, name: str) -> NodeSnapshot | None:
        """The node as it is now, by a quorum read; None if it is gone. Raises WitnessAwayError."""

    async def remove(self, pod: PodIdentity, version: str) -> None:
        """This pod, by its uid, and as it was at that version: one that is gone, or has changed since, is no mistake.
        Raises WitnessAwayError."""


class Reconciler:
    """Hears of pods from a watch; acts in `step`. Two that act at once do nothing twice."""

    def __init__(
        self,
        ledger: ClusterLedger,
        pods: PodRemover,
        events: Events,
        clock: Clock,
        waiting: BindDeadline | None = None,
        patience: OrphanTimes | None = None,
        is_closed: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`is_closed`: whether the pod of that uid can be bound no more, even where no review is asked."""
        self._ledger = ledger
        self._api = pods
        self._events = events
        self._clock = clock
        self._waiting = waiting or BindDeadline()
        self._patience = patience or OrphanTimes()
        self._orphanage = Orphans(ledger, pods, events, clock, self._patience)
        self._is_closed = is_closed
        self._pods: dict[str, ReservedPod] = {}
        self._histories = PodHistories()
        self._deleted: dict[str, Departure] = {}  # by uid, until their reservations are gone
        self._failed: dict[str, datetime] = {}  # by uid, when pods that had been seen alive became final
        self._enough = MANY  # of them, until it is looked which are needed still
        self._look_again: dict[str, datetime] = {}  # pods without their reservation, by uid
        self._ask_again: dict[Place, datetime] = {}  # reservations whose pods exist and are not as the watch has said
        self._listed_at: datetime | None = None
        self.news = asyncio.Event()
        """Set when a pod has come, changed or gone since the last pass."""

    # What the watch tells.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        """A whole list. Who is not in it is asked for by name before anything is freed."""
        found = [(one, raw) for raw in objects.values() if (one := ReservedPod.of(raw)) is not None]
        self._histories.listed({one.pod.uid: raw for one, raw in found})
        before, self._pods = self._pods, {one.pod.uid: self._with_history(one, raw) for one, raw in found}
        self._failed = {uid: at for uid, at in self._failed.items() if uid in self._pods}
        for one in self._pods.values():
            self._note_failure(before.get(one.pod.uid), one)
        self._look_again = {uid: at for uid, at in self._look_again.items() if uid in self._pods}
        self._ask_again.clear()
        self._listed_at = self._clock()
        self.news.set()

    def changed(self, raw: Raw) -> None:
        one = ReservedPod.of(raw)
        if one is None:
            self._forget(raw)
            return
        before = self._pods.get(one.pod.uid)
        if one.is_on_node and before is not None and not before.is_on_node and one.pod.uid in self._look_again:
            self._look_again[one.pod.uid] = self._clock()  # before it starts
        self._histories.seen(one.pod.uid, raw)
        one = self._pods[one.pod.uid] = self._with_history(one, raw)
        self._note_failure(before, one)
        if not self._is_at_rest(one):
            self.news.set()

    def _note_failure(self, before: ReservedPod | None, one: ReservedPod) -> None:
        if one.is_final and before is not None and not before.is_final:
            self._failed[one.pod.uid] = self._clock()

    def deleted(self, raw: Raw) -> None:
        """Whatever it carried when it went. Its reservation may be heard of later than its end."""
        uid = str(raw["metadata"].get("uid"))
        if uid in self._pods or self._ledger.of_pod(uid) is not None:
            self._deleted[uid] = self._histories.departed(uid, raw, self._clock())
            self.news.set()
        self._forget(raw)
        if len(self._deleted) > self._enough:  # whoever stands by acts on none of them
            self._forget_released()

    @property
    def deletions(self) -> int:
        """That are kept at this moment."""
        return len(self._deleted)

    def _forget_released(self) -> None:
        recent = self._clock() - RECENT
        self._deleted = {
            uid: one for uid, one in self._deleted.items() if one.at > recent or self._ledger.of_pod(uid) is not None
        }
        self._enough = MANY + 2 * len(self._deleted)

    def _forget(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        self._look_again.pop(uid, None)
        self._failed.pop(uid, None)
        self._histories.forget(uid)
        if self._pods.pop(uid, None) is not None:
            self.news.set()

    def _with_history(self, one: ReservedPod, raw: Raw) -> ReservedPod:
        """What a last version alone does not prove, all that came before it may."""
        is_over = one.is_final and self._histories.is_over(one.pod.uid, raw)
        return one if one.has_ended == is_over else evolve(one, has_ended=is_over)

    # What is done about it.

    async def step(self) -> None:
        """One pass. What cannot be done now is left for the next one."""
        if self._listed_at is None:
            return
        self.news.clear()
        await self._all(self._attempt(self._ledger.settle(name), node=name) for name in self._ledger.unsettled())
        await self._all(
            self._attempt(self._meet(one), reservation=one.reservation_id)
            for one in list(self._pods.values())
            if not self._is_at_rest(one)
        )
        await self._all(
            self._attempt(self._part(held), reservation=held.id)
            for held in list(self._ledger.reservations())
            if held.phase is Phase.RELEASING or not self._is_carried(held)
        )
        await self._all(
            self._attempt(self._orphanage.look(node, [one for one in orphans if not self._lives(one)]), node=node)
            for node, orphans in self._orphanage.by_node().items()
        )
        await self._ledger.collect(self._clock(), never_came=self._never_came)
        given_up = self._ledger.given_up(self._clock())
        await self._all(self._attempt(self._expire(one), reservation=one.id) for one in given_up)
        self._ask_again = {place: at for place, at in self._ask_again.items() if at > self._clock()}
        self._forget_released()

    async def _all(self, actions: Iterable[Awaitable[None]]) -> None:
        """At once as far as the API server likes it: what is done on one node shares its writes."""
        waiting = iter(actions)

        async def work() -> None:
            for action in waiting:
                await action

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _attempt(self, action: Awaitable[None], **about: str) -> None:
        try:
            await action
        except (LedgerError, PodReaderUnavailableError) as exc:
            log.warning("left for the next pass", error=type(exc).__name__, **about)
        except Exception:  # a bug with one: the others are served
            log.exception("one of a pass failed", **about)

    def _is_at_rest(self, one: ReservedPod) -> bool:
        """Nothing is to be done about nearly every pod, nearly always."""
        held = self._ledger.carried(one)
        if held is None or held.phase is not Phase.FINALIZED or held.uid != one.pod.uid or one.has_ended:
            return False
        if one.is_final:
            return held.orphan is not None and not self._is_out_of_date(one, held)
        if held.orphan is not None:
            return False
        if self._longer_grace(one, held) is not None:
            return False
        return one.is_on_node or one.is_leaving or not self._is_past_bind_deadline(one, held)

    async def _meet(self, one: ReservedPod) -> None:
        """A pod that exists and its reservation: confirmed while it runs, released when it has ended."""
        if one.pod.uid in self._look_again and self._look_again[one.pod.uid] > self._clock():
            return
        if self._ledger.carried(one) is None:
            await self._ledger.find(one.reservation_id, node=one.node)
        held = self._ledger.carried(one)
        if held is None or held.claim_digest != one.claim_digest or not held.may_belong_to(one.pod):
            if not one.is_final:
                await self._miss(one)
            return
        self._look_again.pop(one.pod.uid, None)
        if one.has_ended:
            await self._release(held, one.pod, "ended")
            return
        if one.is_final:
            departure = Departure(self._clock(), grace=self._histories.grace(one.pod.uid))
            await self._orphanage.take_in(held, one.pod, departure)
            return
        if held.orphan is not None:
            await self._unmark(one, held)
            return
        if held.phase is Phase.PENDING or held.uid is None:
            await self._ledger.bind_to_pod(PodProof.CONFIRMED, held.id, one.pod, node=held.node)
            log.info("reservation confirmed", reservation=held.id, pod=f"{one.pod.namespace}/{one.pod.name}")
        longer = self._longer_grace(one, held)
        if longer is not None:
            await self._ledger.lengthen(held, one.pod, longer)
        if not one.is_on_node and not one.is_leaving and self._is_past_bind_deadline(one, held):
            await self._give_up(one, held)

    def _is_out_of_date(self, one: ReservedPod, held: Reservation) -> bool:
        """Its pod was created so late that it had been taken for gone, and has been alive since it was marked."""
        if held.orphan is None:
            return False
        return not one.is_final or held.orphan.at < self._failed.get(one.pod.uid, held.orphan.at)

    async def _unmark(self, one: ReservedPod, held: Reservation) -> None:
        """The clock of an orphan must not run while its pod is alive. The watch may be far behind: the pod is asked
        for."""
        place, now = (held.node, held.id), self._clock()
        if self._ask_again.get(place, now) > now:
            return
        seen = await self._api.look(one.pod)
        if (
            seen is None
            or seen.reserved_pod is None
            or not seen.reserved_pod.carries(held)
            or seen.reserved_pod.is_final
        ):
            self._ask_again[place] = now + PATIENCE
        elif await self._ledger.unmark(held):
            log.info("an orphan's pod is alive", reservation=held.id, node=held.node)

    def _longer_grace(self, one: ReservedPod, held: Reservation) -> timedelta | None:
        """A deletion has asked for more than is stored, where no policy keeps it from that. Or nothing is stored, and
        the pod is from before the limit: its deletion may go unseen."""
        longest = self._histories.grace(one.pod.uid).longest
        return longest if longest > (held.grace or self._patience.max_grace) else None

    # A pod that waits too long.

    def _is_past_bind_deadline(self, one: ReservedPod, held: Reservation | None = None) -> bool:
        return had_since(one, held) + self._waiting.bind_deadline <= self._clock()

    async def _give_up(self, one: ReservedPod, held: Reservation) -> None:
        """Its devices go back. Where it is removed, its controller makes a new one. Where it stays, nobody may put it
        on a node any more, and its devices are free once no binding can be under way."""
        if self._is_removed(one):
            await self._remove_late(one, held)
            return
        self._tell_late(one, held)
        is_late = had_since(one, held) + self._waiting.after_the_last_binding <= self._clock()
        if is_late and self._is_closed(one.pod.uid):
            seen = await self._api.look(one.pod)
            if seen is not None and not seen.is_on_node:
                await self._release(held, one.pod, "not bound in time")

    async def _remove_late(self, one: ReservedPod, held: Reservation) -> None:
        place, now = (held.node, held.id), self._clock()
        if self._ask_again.get(place, now) > now:
            return
        seen = await self._as_told(one)
        if seen is None:
            self._ask_again[place] = now + PATIENCE
            return
        self._tell_late(one, held)
        await self._api.remove(one.pod, seen.version)  # the watch will tell, and then its devices are free

    def _tell_late(self, one: ReservedPod, held: Reservation) -> None:
        when = "once it is gone" if self._is_removed(one) else "once it can be bound no more"
        text = f"not on node {held.node} within {self._waiting.bind_deadline}: {','.join(held.uuids)} can be had {when}"
        self._events.record(Subject.of_pod(one.pod), Reason.BIND_DEADLINE_PASSED, text)

    def _is_removed(self, one: ReservedPod) -> bool:
        """A pod that nobody would make anew is left for its owner to see why."""
        return self._waiting.afterwards is OnBindDeadline.REMOVE and one.has_controller

    async def _as_told(self, one: ReservedPod) -> PodSnapshot | None:
        """The living pod, if it is as the watch has said, which may be far behind."""
        seen = await self._api.look(one.pod)
        return seen if seen is not None and seen.reserved_pod == one else None

    # A pod without its reservation.

    async def _miss(self, one: ReservedPod) -> None:
        """It has its devices again if nobody else does. It must not run with another's."""
        is_known_to_miss = one.pod.uid in self._look_again
        self._look_again[one.pod.uid] = self._clock() + PATIENCE
        if one.is_on_node or not self._is_past_bind_deadline(one):
            try:
                await self._restore(one)
            except (SlotsTakenError, ReservationConflictError, ReservationExpiredError):
                log.info("devices of a pod without reservation are not free", reservation=one.reservation_id)
            else:
                return
        if not is_known_to_miss:
            return
        text = f"{','.join(one.uuids)} on {one.node} is not reserved for this pod"
        self._events.record(Subject.of_pod(one.pod), Reason.RESERVATION_LOST, text)
        is_unsafe = one.is_on_node and not one.has_started
        is_doomed = is_unsafe or (not one.is_on_node and self._is_removed(one))
        seen = await self._as_told(one) if is_doomed and not one.is_leaving else None
        if seen is not None:
            await self._api.remove(one.pod, seen.version)

    async def _restore(self, one: ReservedPod) -> None:
        if await self._ledger.adopt(one) is not None:
            del self._look_again[one.pod.uid]
            text = f"{','.join(one.uuids)} on {one.node} is reserved for this pod again"
            self._events.record(Subject.of_pod(one.pod), Reason.RESERVATION_RESTORED, text, is_warning=False)

    # A reservation without its pod.

    def _is_carried(self, held: Reservation) -> bool:
        one = None if held.uid is None else self._pods.get(held.uid)
        return one is not None and one.carries(held)

    def _lives(self, held: Reservation) -> bool:
        """Its mark says nothing of when its pod went."""
        one = None if held.uid is None else self._pods.get(held.uid)
        return one is not None and one.carries(held) and self._is_out_of_date(one, held)

    def _never_came(self, held: Reservation) -> bool:
        """Whether the watch would have told of its pod: it has told of all that have come since the reservation was
        made, by whatever clock."""
        is_told = self._listed_at is not None and self._listed_at + 2 * self._waiting.clock_skew <= held.since
        return is_told and held.uid not in self._pods and held.uid not in self._deleted

    def _may_have_gone_unseen(self, held: Reservation) -> bool:
        """A pod may be on its node though its reservation is only promised: where its Binding was not reviewed, or
        none was needed. It has had its time to be stored."""
        return held.is_past_deadline(self._clock() - self._waiting.clock_skew) and not self._never_came(held)

    async def _part(self, held: Reservation) -> None:
        """A reservation that no pod among those seen carries: freed only if that is certain."""
        if held.phase is Phase.RELEASING:
            await self._release(held, PodIdentity(held.namespace, "", held.uid or ""), "was being released")
        elif held.uid is None:
            await self._part_unnamed(held)
        elif held.uid in self._deleted:
            await self._part_departed(held, self._deleted[held.uid])
        elif held.orphan is not None:
            return
        elif held.phase is Phase.FINALIZED or held.uid in self._pods or self._may_have_gone_unseen(held):
            await self._part_named(held)  # else it is only promised, and will expire

    async def _part_departed(self, held: Reservation, departure: Departure) -> None:
        if departure.is_over:
            await self._release(held, pod_of(held), "gone")
        else:
            await self._orphanage.take_in(held, pod_of(held), departure)

    async def _part_named(self, held: Reservation) -> None:
        """Its pod may have gone unseen, wait behind our gate, have lost its annotations, or carry another one: a leader
        that was behind may have reserved twice for one pod."""
        place, now = (held.node, held.id), self._clock()
        if self._ask_again.get(place, now) > now:
            return
        seen = await self._api.look(pod_of(held))
        if seen is None and held.uid is not None:  # it went unseen
            departure = self._deleted.setdefault(held.uid, Departure(self._clock()))
            await self._part_departed(held, departure)
            return
        why = self._ledger.why_not_its(held, seen)
        if why:
            await self._release(held, pod_of(held), why)
        else:
            self._ask_again[place] = now + PATIENCE

    async def _part_unnamed(self, held: Reservation) -> None:
        """Finalized is what has a pod. One without was written by hand; whose it could be, only a whole list tells."""
        if held.phase is Phase.FINALIZED and not any(one.carries(held) for one in await self._api.reserved_pods()):
            await self._release(held, PodIdentity(held.namespace, "", ""), "of no pod")

    async def _release(self, held: Reservation, pod: PodIdentity, why: str) -> None:
        if await self._ledger.release(held.id, pod, node=held.node, since=held.since):
            log.info("reservation released", reservation=held.id, node=held.node, why=why)

    async def _expire(self, held: Reservation) -> None:
        if await self._ledger.expire(held):
            log.info("reservation expired", reservation=held.id, node=held.node)


def had_since(one: ReservedPod, held: Reservation | None) -> datetime:
    """Since when a pod could have been put on its node: one that waited in the queue, since it was given its GPUs."""
    return one.created if held is None else max(one.created, held.since)
