"""Reconciles reservations with pods: confirms those of existing pods, releases those of ended pods, and expires those
whose pod was never created. A pod that is gone and was not seen to end leaves an orphan, which keeps its devices until
the pod must have ended: docs/decisions/0024.

Absence from a list or a cache never frees anything. Either the watch has reported the deletion of that uid, or the API
server is asked for the pod by name. It is also asked before a pod is deleted, which may be on its node by now.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

import structlog
from attrs import define, evolve, field, frozen

from webhook.core import keys
from webhook.core.errors import LedgerError, ReservationConflictError, ReservationExpiredError, SlotsTakenError
from webhook.core.raw import Raw
from webhook.core.reasons import Reason
from webhook.core.reservation import GpuDelivery, Phase, PodIdentity, PodProof, Reservation, ReservationId
from webhook.kube.events import Events, Subject
from webhook.ledger.at_binding import MAX_BINDING_DURATION
from webhook.ledger.cluster import ClusterLedger, PodReader, PodReaderUnavailableError, pod_of
from webhook.ledger.end_of_use import DeletedPod, OrphanTimes, PodHistories
from webhook.ledger.orphans import NodeReader, Orphans
from webhook.ledger.reserved_pod import PodSnapshot, ReservedPod
from webhook.runtime.clock import Clock
from webhook.runtime.process import run_concurrently

log = structlog.get_logger(__name__)

ReservationKey = tuple[str, ReservationId]

# How often a pod without its reservation is checked. It is deleted on the second check at the earliest: another replica
# may be restoring the node's object.
RECHECK_DELAY = timedelta(seconds=10)
# A deletion is remembered at least this long: the GPUNode that names the reservation's pod may be observed later.
MIN_DELETION_AGE = timedelta(minutes=1)
# How many deletions are kept before those without a reservation are dropped.
MAX_DELETIONS = 1000


class OnBindDeadline(StrEnum):
    """What happens to a pod that can no longer be bound."""

    REMOVE = "remove"
    KEEP = "keep"


@frozen
class BindDeadline:
    """How long a pod's devices wait until it is bound to their node, and what happens then."""

    bind_deadline: timedelta = timedelta(minutes=5)
    on_deadline: OnBindDeadline = OnBindDeadline.REMOVE
    # How far the clock of each of two replicas may be off.
    clock_skew: timedelta = timedelta(seconds=5)

    @property
    def release_delay(self) -> timedelta:
        """When no Binding that was allowed in time can be in progress any more, even if a clock was late."""
        return self.bind_deadline + MAX_BINDING_DURATION + 2 * self.clock_skew


class PodWriter(PodReader, NodeReader, Protocol):
    """Deletes and annotates pods by uid, and reads the nodes that they are on."""

    async def remove(self, pod: PodIdentity, version: str) -> None:
        """Delete this pod if it has this uid and version. It is no error if the pod is gone or has changed.
        Raises PodReaderUnavailableError."""

    async def annotate(self, pod: PodIdentity, annotations: Mapping[str, str]) -> None:
        """Write the annotations if the pod still has this uid. Raises PodReaderUnavailableError."""


@define(eq=False, repr=False)
class Reconciler:
    """Observes pods through a watch and acts in `step`. Concurrent reconcilers repeat no action."""

    _ledger: ClusterLedger
    _api: PodWriter
    _events: Events
    _clock: Clock
    _bind_deadline: BindDeadline = field(factory=BindDeadline)
    _orphan_times: OrphanTimes = field(factory=OrphanTimes)
    # Whether the pod with that uid can no longer be bound, even without a review.
    _is_closed: Callable[[str], bool] = lambda _: True
    _max_deletions: int = MAX_DELETIONS
    # The annotations for the GPUs that the kubelet has chosen.
    _gpu_annotations: Sequence[str] = keys.GPU_UUID.names
    _pods: dict[str, ReservedPod] = field(factory=dict, init=False)
    _histories: PodHistories = field(factory=PodHistories, init=False)
    _deleted: dict[str, DeletedPod] = field(factory=dict, init=False)  # by uid, until their reservations are gone
    # By uid, when pods that were alive reached a terminal phase.
    _failed: dict[str, datetime] = field(factory=dict, init=False)
    _prune_above: int = field(init=False)  # how many deletions trigger the next pruning
    _recheck_pods: dict[str, datetime] = field(factory=dict, init=False)  # pods without their reservation, by uid
    # Reservations whose pods exist and differ from what the watch has shown.
    _recheck_reservations: dict[ReservationKey, datetime] = field(factory=dict, init=False)
    _listed_at: datetime | None = field(default=None, init=False)
    wakeup: asyncio.Event = field(factory=asyncio.Event, init=False)
    """Set when a pod has been created, changed or deleted since the last pass."""
    _orphans: Orphans = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._prune_above = self._max_deletions
        self._orphans = Orphans(self._ledger, self._api, self._events, self._clock, self._orphan_times)

    # Input from the watch.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        """A full list. The API server is asked for each missing pod by name before anything is freed."""
        found = [(one, raw) for raw in objects.values() if (one := ReservedPod.of(raw)) is not None]
        self._histories.listed({one.pod.uid: raw for one, raw in found})
        before, self._pods = self._pods, {one.pod.uid: self._with_history(one, raw) for one, raw in found}
        self._failed = {uid: at for uid, at in self._failed.items() if uid in self._pods}
        for one in self._pods.values():
            self._record_failure(before.get(one.pod.uid), one)
        self._recheck_pods = {uid: at for uid, at in self._recheck_pods.items() if uid in self._pods}
        self._recheck_reservations.clear()
        self._listed_at = self._clock()
        self.wakeup.set()

    def changed(self, raw: Raw) -> None:
        one = ReservedPod.of(raw)
        if one is None:
            self._forget(raw)
            return
        before = self._pods.get(one.pod.uid)
        if one.is_on_node and before is not None and not before.is_on_node and one.pod.uid in self._recheck_pods:
            self._recheck_pods[one.pod.uid] = self._clock()  # before its containers start
        self._histories.seen(one.pod.uid, raw)
        one = self._pods[one.pod.uid] = self._with_history(one, raw)
        self._record_failure(before, one)
        if not self._is_settled(one):
            self.wakeup.set()

    def _record_failure(self, before: ReservedPod | None, one: ReservedPod) -> None:
        if one.is_final and before is not None and not before.is_final:
            self._failed[one.pod.uid] = self._clock()

    def deleted(self, raw: Raw) -> None:
        """Handles the pod regardless of its annotations. Its reservation may be observed after its deletion."""
        uid = str(raw["metadata"].get("uid"))
        if uid in self._pods or self._ledger.of_pod(uid) is not None:
            self._deleted[uid] = self._histories.deleted(uid, raw, self._clock())
            self.wakeup.set()
        self._forget(raw)
        if len(self._deleted) > self._prune_above:  # a standby replica never acts on them
            self._forget_released()

    def _forget_released(self) -> None:
        recent = self._clock() - MIN_DELETION_AGE
        self._deleted = {
            uid: one for uid, one in self._deleted.items() if one.at > recent or self._ledger.of_pod(uid) is not None
        }
        self._prune_above = self._max_deletions + 2 * len(self._deleted)

    def _forget(self, raw: Raw) -> None:
        uid = str(raw["metadata"].get("uid"))
        self._recheck_pods.pop(uid, None)
        self._failed.pop(uid, None)
        self._histories.forget(uid)
        if self._pods.pop(uid, None) is not None:
            self.wakeup.set()

    def _with_history(self, one: ReservedPod, raw: Raw) -> ReservedPod:
        """The last version together with all earlier ones may prove an end that the last version alone does not."""
        is_over = one.is_final and self._histories.is_over(one.pod.uid, raw)
        return one if one.has_ended == is_over else evolve(one, has_ended=is_over)

    # Actions.

    async def step(self) -> None:
        """One pass. What fails is left for the next one."""
        if self._listed_at is None:
            return
        self.wakeup.clear()
        await run_concurrently(self._attempt(self._ledger.settle(name), node=name) for name in self._ledger.unsettled())
        await run_concurrently(
            self._attempt(self._reconcile_pod(one), reservation=one.reservation_id)
            for one in list(self._pods.values())
            if not self._is_settled(one)
        )
        await run_concurrently(
            self._attempt(self._reconcile_podless(held), reservation=held.id)
            for held in list(self._ledger.reservations())
            if held.phase is Phase.RELEASING or not self._has_pod(held)
        )
        await run_concurrently(
            self._attempt(
                self._orphans.check_node(node, [one for one in orphans if not self._is_orphan_mark_stale(one)]),
                node=node,
            )
            for node, orphans in self._orphans.by_node().items()
        )
        await self._ledger.collect(self._clock(), was_never_created=self._was_never_created)
        given_up = self._ledger.given_up(self._clock())
        await run_concurrently(self._attempt(self._expire(one), reservation=one.id) for one in given_up)
        self._recheck_reservations = {
            place: at for place, at in self._recheck_reservations.items() if at > self._clock()
        }
        self._forget_released()

    async def _attempt(self, action: Awaitable[None], **about: str) -> None:
        try:
            await action
        except (LedgerError, PodReaderUnavailableError) as exc:
            log.warning("action left for the next pass", error=type(exc).__name__, **about)
        except Exception:  # a bug with one action must not stop the others
            log.exception("action failed", **about)

    def _is_settled(self, one: ReservedPod) -> bool:
        """Whether nothing has to be done about the pod, which is true of nearly every pod at nearly every time."""
        held = self._ledger.carried(one)
        if held is None or held.phase is not Phase.FINALIZED or held.uid != one.pod.uid or one.has_ended:
            return False
        if one.is_final:
            return held.orphan is not None and not self._is_out_of_date(one, held)
        if held.orphan is not None:
            return False
        if self._longer_grace(one, held) is not None or is_delivery_news(one, held):
            return False
        return one.is_on_node or one.is_leaving or not self._is_past_bind_deadline(one, held)

    async def _reconcile_pod(self, one: ReservedPod) -> None:
        """Confirm the reservation of an existing pod, and release it when the pod has ended."""
        if one.pod.uid in self._recheck_pods and self._recheck_pods[one.pod.uid] > self._clock():
            return
        if self._ledger.carried(one) is None:
            await self._ledger.find(one.reservation_id, node=one.node)
        held = self._ledger.carried(one)
        if held is None or held.claim_digest != one.claim_digest or not held.may_belong_to(one.pod):
            if not one.is_final:
                await self._handle_lost_reservation(one)
            return
        self._recheck_pods.pop(one.pod.uid, None)
        if one.has_ended:
            await self._release(held, one.pod, "ended")
            return
        if one.is_final:
            deleted = DeletedPod(self._clock(), grace=self._histories.grace(one.pod.uid))
            await self._orphans.mark_orphan(held, one.pod, deleted)
            return
        if held.orphan is not None:
            await self._unmark(one, held)
            return
        if held.phase is Phase.PENDING or held.uid is None:
            await self._ledger.bind_to_pod(PodProof.CONFIRMED, held.id, one.pod, node=held.node)
            log.info("reservation confirmed", reservation=held.id, pod=f"{one.pod.namespace}/{one.pod.name}")
        longer = self._longer_grace(one, held)
        if longer is not None:
            await self._ledger.extend_grace(held, one.pod, longer)
        held = self._ledger.carried(one) or held
        if is_delivery_news(one, held):
            await self._record_delivery(one, held)
        if not one.is_on_node and not one.is_leaving and self._is_past_bind_deadline(one, held):
            await self._release_unbound_pod(one, held)

    async def _record_delivery(self, one: ReservedPod, held: Reservation) -> None:
        """Hold the devices that the kubelet has given to the pod, and name them in its annotations."""
        if held.is_awaited:
            try:
                recorded = await self._ledger.record_delivery(held, one.given)
            except SlotsTakenError:  # the last pod with one of them may have ended just now; else it is a mismatch
                log.debug("devices of a pod are of another reservation or node", reservation=held.id, node=held.node)
                return
            if recorded is None:
                return
            held = recorded
            log.info("delivery recorded", reservation=held.id, node=held.node, devices=held.uuids)
            if not self._ledger.are_usable(held.uuids):
                gpus = ", ".join(held.uuids)
                text = f"the kubelet of {held.node} gave it {gpus}: not all are healthy and in the inventory"
                self._events.record(Subject.of_pod(one.pod), Reason.GPU_MISMATCHED, text)
        await self._api.annotate(one.pod, dict.fromkeys(self._gpu_annotations, ",".join(held.uuids)))

    def _is_out_of_date(self, one: ReservedPod, held: Reservation) -> bool:
        """The pod was created so late that it had been taken for gone, and has been alive since it was marked."""
        if held.orphan is None:
            return False
        return not one.is_final or held.orphan.at < self._failed.get(one.pod.uid, held.orphan.at)

    async def _unmark(self, one: ReservedPod, held: Reservation) -> None:
        """An orphan's grace period must not run while its pod is alive. Asks the API server for the pod, because the
        watch may be far behind."""
        place, now = (held.node, held.id), self._clock()
        if self._recheck_reservations.get(place, now) > now:
            return
        seen = await self._api.read_pod(one.pod)
        if (
            seen is None
            or seen.reserved_pod is None
            or not seen.reserved_pod.carries(held)
            or seen.reserved_pod.is_final
        ):
            self._recheck_reservations[place] = now + RECHECK_DELAY
        elif await self._ledger.clear_orphan_mark(held):
            log.info("orphan mark removed: its pod is alive", reservation=held.id, node=held.node)

    def _longer_grace(self, one: ReservedPod, held: Reservation) -> timedelta | None:
        """The grace period to store, if a deletion asked for a longer one than is stored and no policy prevented it, or
        if none is stored because the pod is older than the limit. Its deletion may be missed, so it is stored
        beforehand."""
        longest = self._histories.grace(one.pod.uid).longest
        return longest if longest > (held.grace or self._orphan_times.max_grace) else None

    # A pod that is not bound in time.

    def _is_past_bind_deadline(self, one: ReservedPod, held: Reservation | None = None) -> bool:
        return waiting_since(one, held) + self._bind_deadline.bind_deadline <= self._clock()

    async def _release_unbound_pod(self, one: ReservedPod, held: Reservation) -> None:
        """Free the devices. If the pod is deleted, its controller creates a new one. If it stays, it can no longer be
        bound, and its devices are freed when no Binding can be in progress."""
        if self._is_removed(one):
            await self._remove_unbound_pod(one, held)
            return
        self._record_unbound_event(one, held)
        is_late = waiting_since(one, held) + self._bind_deadline.release_delay <= self._clock()
        if is_late and self._is_closed(one.pod.uid):
            seen = await self._api.read_pod(one.pod)
            if seen is not None and not seen.is_on_node:
                await self._release(held, one.pod, "not bound in time")

    async def _remove_unbound_pod(self, one: ReservedPod, held: Reservation) -> None:
        place, now = (held.node, held.id), self._clock()
        if self._recheck_reservations.get(place, now) > now:
            return
        seen = await self._read_unchanged(one)
        if seen is None:
            self._recheck_reservations[place] = now + RECHECK_DELAY
            return
        self._record_unbound_event(one, held)
        await self._api.remove(one.pod, seen.version)  # its devices are freed when the watch shows the deletion

    def _record_unbound_event(self, one: ReservedPod, held: Reservation) -> None:
        when = "once it is gone" if self._is_removed(one) else "once it can no longer be bound"
        limit, gpus = self._bind_deadline.bind_deadline, one.title_of_gpus
        text = f"not bound to node {held.node} within {limit}: {gpus} can be reserved by other pods {when}"
        self._events.record(Subject.of_pod(one.pod), Reason.BIND_DEADLINE_PASSED, text)

    def _is_removed(self, one: ReservedPod) -> bool:
        """A pod without a controller stays, so that its owner can see why it was not bound."""
        return self._bind_deadline.on_deadline is OnBindDeadline.REMOVE and one.has_controller

    async def _read_unchanged(self, one: ReservedPod) -> PodSnapshot | None:
        """The pod, if it still is as the watch has shown it. The watch may be far behind."""
        seen = await self._api.read_pod(one.pod)
        return seen if seen is not None and seen.reserved_pod == one else None

    # A pod without its reservation.

    async def _handle_lost_reservation(self, one: ReservedPod) -> None:
        """Reserve the pod's devices again if they are free. The pod must not run with devices of another one."""
        is_known_to_miss = one.pod.uid in self._recheck_pods
        self._recheck_pods[one.pod.uid] = self._clock() + RECHECK_DELAY
        if one.is_on_node or not self._is_past_bind_deadline(one):
            try:
                await self._restore(one)
            except (SlotsTakenError, ReservationConflictError, ReservationExpiredError):
                log.info("devices of a pod without a reservation are not free", reservation=one.reservation_id)
            else:
                return
        if not is_known_to_miss:
            return
        text = f"{one.title_of_gpus} on {one.node} is not reserved for this pod"
        self._events.record(Subject.of_pod(one.pod), Reason.RESERVATION_LOST, text)
        is_unsafe = one.is_on_node and not one.has_started
        is_doomed = is_unsafe or (not one.is_on_node and self._is_removed(one))
        seen = await self._read_unchanged(one) if is_doomed and not one.is_leaving else None
        if seen is not None:
            await self._api.remove(one.pod, seen.version)

    async def _restore(self, one: ReservedPod) -> None:
        if await self._ledger.adopt(one) is not None:
            del self._recheck_pods[one.pod.uid]
            text = f"{one.title_of_gpus} on {one.node} is reserved for this pod again"
            self._events.record(Subject.of_pod(one.pod), Reason.RESERVATION_RESTORED, text, is_warning=False)

    # A reservation without its pod.

    def _has_pod(self, held: Reservation) -> bool:
        one = None if held.uid is None else self._pods.get(held.uid)
        return one is not None and one.carries(held)

    def _is_orphan_mark_stale(self, held: Reservation) -> bool:
        """Whether the orphan mark is out of date: the pod was observed alive after the mark was written."""
        one = None if held.uid is None else self._pods.get(held.uid)
        return one is not None and one.carries(held) and self._is_out_of_date(one, held)

    def _was_never_created(self, held: Reservation) -> bool:
        """Whether the pod was certainly never stored: the watch has shown all pods since before the reservation was
        made, given the clock skew, and this pod is not among them."""
        is_told = self._listed_at is not None and self._listed_at + 2 * self._bind_deadline.clock_skew <= held.since
        return is_told and held.uid not in self._pods and held.uid not in self._deleted

    def _may_have_gone_unseen(self, held: Reservation) -> bool:
        """A pod may be on its node although its reservation is still pending, if its Binding was not reviewed or it
        needed none. After the deadline it has had its time to be stored."""
        return held.is_past_deadline(self._clock() - self._bind_deadline.clock_skew) and not self._was_never_created(
            held
        )

    async def _reconcile_podless(self, held: Reservation) -> None:
        """Release a reservation that no observed pod carries, if that is certain."""
        if held.phase is Phase.RELEASING:
            await self._release(held, PodIdentity(held.namespace, "", held.uid or ""), "was being released")
        elif held.uid is None:
            await self._handle_unnamed(held)
        elif held.uid in self._deleted:
            await self._handle_ended_pod(held, self._deleted[held.uid])
        elif held.orphan is not None:
            return
        elif held.phase is Phase.FINALIZED or held.uid in self._pods or self._may_have_gone_unseen(held):
            await self._handle_unseen_pod(held)  # else it is pending, and will expire

    async def _handle_ended_pod(self, held: Reservation, deleted: DeletedPod) -> None:
        if deleted.is_over:
            await self._release(held, pod_of(held), "gone")
        else:
            await self._orphans.mark_orphan(held, pod_of(held), deleted)

    async def _handle_unseen_pod(self, held: Reservation) -> None:
        """The pod may have gone unobserved, be gated, have lost its annotations, or carry another reservation: a stale
        leader may have reserved twice for one pod."""
        place, now = (held.node, held.id), self._clock()
        if self._recheck_reservations.get(place, now) > now:
            return
        seen = await self._api.read_pod(pod_of(held))
        if seen is None and held.uid is not None:  # its deletion was not observed
            deleted = self._deleted.setdefault(held.uid, DeletedPod(self._clock()))
            await self._handle_ended_pod(held, deleted)
            return
        why = self._ledger.release_reason(held, seen)
        if why:
            await self._release(held, pod_of(held), why)
        else:
            self._recheck_reservations[place] = now + RECHECK_DELAY

    async def _handle_unnamed(self, held: Reservation) -> None:
        """A finalized reservation has a pod. One without a pod was written by hand; only the full list shows whether
        some pod carries it."""
        if held.phase is Phase.FINALIZED and not any(one.carries(held) for one in await self._api.reserved_pods()):
            await self._release(held, PodIdentity(held.namespace, "", ""), "of no pod")

    async def _release(self, held: Reservation, pod: PodIdentity, why: str) -> None:
        if await self._ledger.release(held.id, pod, node=held.node, since=held.since):
            log.info("reservation released", reservation=held.id, node=held.node, why=why)

    async def _expire(self, held: Reservation) -> None:
        if await self._ledger.expire(held):
            log.info("reservation expired", reservation=held.id, node=held.node)


def is_delivery_news(one: ReservedPod, held: Reservation) -> bool:
    """Whether the pod shows devices that are not recorded, or lacks the annotation with those that are. A pod that is
    leaving needs no annotation."""
    if held.delivery is None or one.is_final:
        return False
    if held.delivery is GpuDelivery.AWAITED:
        return len(one.given) == len(held.slots)
    return not one.is_leaving and set(one.uuids) != set(held.uuids)


def waiting_since(one: ReservedPod, held: Reservation | None) -> datetime:
    """Since when the pod could have been bound: a queued pod only since its GPUs were reserved."""
    return one.created if held is None else max(one.created, held.since)
