"""Keeps the ResourceClaimTemplates of native pods.

Each opted-in namespace has a template for each hash of fresh evidence and each number of GPUs. A namespace that
requires hashes has templates for these only, proven or not. A template that a pod names is created at once, whatever
its hash: Kubernetes makes the claim of the pod as soon as the template exists. A template that nothing needs is deleted
after an hour.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Protocol

import structlog
from attrs import define, field, frozen

from webhook.core.fleet import Fleet
from webhook.core.hashes import HashPolicy
from webhook.core.keys import MANAGED_BY, OURS
from webhook.core.native import MAX_GPUS, NativeClaim
from webhook.core.proof_claims import CLAIM_LABELS, without_defaults
from webhook.core.proof_devices import hash_attribute
from webhook.core.raw import Raw
from webhook.kube.claim_templates import API_VERSION
from webhook.kube.requests import ApiRefusesError, ApiUnavailableError
from webhook.kube.view import ObjectView
from webhook.runtime.clock import LONG_AGO, Clock

log = structlog.get_logger(__name__)

# Writes per pass, so that other steps get to run in between.
BATCH_SIZE = 20
# Checks per pass, for the same reason. Without a write they do not wait for anything.
CHECKS_PER_PASS = 1000
# Templates entered before other tasks get to run.
ENTERED_AT_A_TIME = 1000
# All templates are checked at this interval. Between two checks only changes are.
CHECK_INTERVAL = timedelta(minutes=5)
# Namespaces whose templates could not be written, after which a pass stops: the API server may be down.
MAX_FAILURES = 3
# How long a template is kept that nothing needs.
KEPT = timedelta(hours=1)
FINISHED = ("Succeeded", "Failed")
CONFLICT = 409

# A namespace, and the claim that its template makes.
TemplateKey = tuple[str, NativeClaim]


class TemplateWriter(Protocol):
    """Creates and deletes templates. Both methods raise ApiUnavailableError and ApiRefusesError."""

    async def create(self, namespace: str, raw: Raw) -> Raw | None:
        """The stored template; None if the namespace does not exist."""

    async def delete(self, namespace: str, name: str, uid: str) -> None:
        """Deletes the template if it still has this uid."""


@frozen
class StoredTemplate:
    """A template in the API server."""

    uid: str
    # Whether its claims are what its name says. Specs are immutable.
    is_right: bool
    is_ours: bool


@frozen
class NamespaceHashes:
    """The attributes of the hashes that an opted-in namespace requires; all hashes if there are none."""

    required: tuple[str, ...] = ()

    def allows(self, hash: str) -> bool:
        return not self.required or hash in self.required


@define(eq=False, repr=False)
class ClaimTemplates:
    """Listener of the watches of templates, namespaces and pods. `step` writes templates."""

    _writer: TemplateWriter
    _fleet: Fleet
    _spec_of: Callable[[NativeClaim], Raw]
    _clock: Clock
    _is_current: Callable[[], bool]
    _is_opted_in: Callable[[Raw], bool]
    # Called if there is more to do at once.
    _wake: Callable[[], object]
    # Whether claims with a fresh challenge are served. Their templates exist only while pods name them.
    _challenges: bool = False
    _stored: dict[TemplateKey, StoredTemplate] = field(factory=dict, init=False)
    _created: set[str] = field(factory=set, init=False)  # uids
    _fresh: frozenset[str] = field(default=frozenset(), init=False)
    _seen_changes: int = field(default=-1, init=False)
    # Templates to check. Those that new pods name come first.
    _asked: "Turns" = field(factory=lambda: Turns(), init=False)
    _due: "Turns" = field(factory=lambda: Turns(), init=False)
    _unneeded_since: dict[TemplateKey, datetime] = field(factory=dict, init=False)
    _checked_at: datetime = field(default=LONG_AGO, init=False)
    pods: "NativePods" = field(init=False)
    namespaces: ObjectView[NamespaceHashes | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pods = NativePods(self._ask)
        self.namespaces = ObjectView(self._hashes_of)

    def _hashes_of(self, raw: Raw) -> NamespaceHashes | None:
        """None for a namespace that has not opted in, or is being deleted."""
        meta = raw["metadata"]
        if not self._is_opted_in(raw) or meta.get("deletionTimestamp"):
            return None
        policy = HashPolicy.of(meta["name"], meta.get("annotations") or {})
        return NamespaceHashes(tuple(map(hash_attribute, policy.hashes)))

    def _ask(self, key: TemplateKey) -> None:
        """A new pod names the template."""
        stored = self._stored.get(key)
        if stored is None or not stored.is_right:
            self._asked.add(key)
            self._wake()

    # The listener of the watch of templates.

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        before, self._stored = self._stored, {}
        for raw in objects.values():
            self.changed(raw)
        for key in before.keys() - self._stored.keys():
            self._due.add(key)

    def changed(self, raw: Raw) -> None:
        key = key_of_template(raw)
        if key is None:
            return
        uid = str(raw["metadata"]["uid"])
        is_right = uid in self._created or has_claims(raw, self._spec_of(key[1]))
        is_ours = (raw["metadata"].get("labels") or {}).get(MANAGED_BY) == OURS
        self._stored[key] = StoredTemplate(uid, is_right, is_ours)
        if not is_right:
            self._due.add(key)

    def deleted(self, raw: Raw) -> None:
        key = key_of_template(raw)
        stored = None if key is None else self._stored.get(key)
        if key is not None and stored is not None and stored.uid == raw["metadata"]["uid"]:
            del self._stored[key]
            self._created.discard(stored.uid)
            self._due.add(key)

    # Writing.

    def begin(self) -> None:
        """Called when this process is elected."""
        self._checked_at = LONG_AGO
        self._unneeded_since.clear()
        self._due.clear()

    async def step(self) -> None:
        """One pass, in which namespaces take turns. A write that failed is tried again in the next pass, and a refused
        one with the next check of all."""
        if not self._is_current():
            return
        now = self._clock()
        self._fleet.advance(now)
        await self._collect(now)
        written, failed = 0, set[str]()
        for _ in range(CHECKS_PER_PASS):
            due = self._asked if self._asked.has_more(failed) else self._due
            key = due.pop(failed)
            if key is None:
                return
            try:
                written += await self._write(key, now)
            except ApiUnavailableError as exc:  # perhaps a webhook of this namespace
                due.add(key)
                failed.add(key[0])
                log.warning("template not written", namespace=key[0], name=key[1].template, problem=str(exc))
            except ApiRefusesError as exc:
                if exc.status != CONFLICT:  # another version is there: the watch reports it
                    log.warning("template refused", namespace=key[0], name=key[1].template, problem=str(exc))
            if len(failed) >= MAX_FAILURES:
                return
            if written >= BATCH_SIZE:
                break
        if self._asked.has_more(failed) or self._due.has_more(failed):
            self._wake()

    async def _collect(self, now: datetime) -> None:
        """Adds to the templates that have to be checked."""
        changed = self.namespaces.take_changes()
        if now - self._checked_at >= CHECK_INTERVAL:
            self._checked_at = now
            changed = [*self.namespaces.names()]
            self._unneeded_since = {k: since for k, since in self._unneeded_since.items() if k in self._stored}
            await self._enter(list(self._stored))
        await self._enter(key for name in changed for key in self._keys(name, self._fresh))
        if changed:
            places = set(changed)
            await self._enter([key for key in self.pods if key[0] in places])
        if self._fleet.changes != self._seen_changes:
            self._seen_changes = self._fleet.changes
            fresh = frozenset(map(hash_attribute, self._fleet.proven_hashes))
            new, self._fresh = fresh - self._fresh, fresh
            if new:
                await self._enter(key for name in self.namespaces.names() for key in self._keys(name, new))

    async def _enter(self, keys: Iterable[TemplateKey]) -> None:
        for number, key in enumerate(keys, 1):
            self._due.add(key)
            if number % ENTERED_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _keys(self, namespace: str, fresh: frozenset[str]) -> Iterator[TemplateKey]:
        """The templates that the namespace has for its own hashes, else for these."""
        hashes = self.namespaces.get(namespace)
        if hashes is not None:
            for one in hashes.required or fresh:
                yield from ((namespace, NativeClaim(count, one)) for count in range(1, MAX_GPUS + 1))

    def _is_needed(self, key: TemplateKey) -> bool:
        hashes = self.namespaces.get(key[0])
        if hashes is None or not hashes.allows(key[1].hash):
            return False
        if key in self.pods:
            return not key[1].is_challenged or self._challenges
        return not key[1].is_challenged and (bool(hashes.required) or key[1].hash in self._fresh)

    async def _write(self, key: TemplateKey, now: datetime) -> int:
        """The number of writes. A template of another author is replaced where the policies would use it."""
        stored, is_needed = self._stored.get(key), self._is_needed(key)
        if is_needed:
            self._unneeded_since.pop(key, None)
        is_over = not is_needed and stored is not None and self._is_over(key, stored, now)
        is_wrong = stored is not None and not stored.is_right and self.namespaces.get(key[0]) is not None
        if stored is not None and (is_wrong or is_over):
            await self._writer.delete(key[0], key[1].template, stored.uid)
            self._stored.pop(key, None)
            self._created.discard(stored.uid)
            stored = None
            log.info("template deleted", namespace=key[0], name=key[1].template, is_wrong=is_wrong)
            if not is_needed:
                return 1
        if not is_needed or stored is not None:
            return 0
        made = await self._writer.create(key[0], self._raw(key))
        if made is not None:
            uid = str(made["metadata"]["uid"])
            self._created.add(uid)
            self._stored[key] = StoredTemplate(uid, is_right=True, is_ours=True)
        return 1

    def _is_over(self, key: TemplateKey, stored: StoredTemplate, now: datetime) -> bool:
        """Whether nothing has needed our template for so long that it is deleted."""
        return stored.is_ours and now - self._unneeded_since.setdefault(key, now) >= KEPT

    def _raw(self, key: TemplateKey) -> Raw:
        meta = {"name": key[1].template, "namespace": key[0], "labels": {MANAGED_BY: OURS}}
        spec = {"metadata": {"labels": CLAIM_LABELS}, "spec": self._spec_of(key[1])}
        return {"apiVersion": API_VERSION, "kind": "ResourceClaimTemplate", "metadata": meta, "spec": spec}


class NativePods:
    """Listener of the watch of pods: which templates the pods name that have not ended."""

    def __init__(self, on_named: Callable[[TemplateKey], object]) -> None:
        self._on_named = on_named
        self._by_uid: dict[str, TemplateKey] = {}
        self._pods_of: Counter[TemplateKey] = Counter()

    def __contains__(self, key: TemplateKey) -> bool:
        return key in self._pods_of

    def __iter__(self) -> Iterator[TemplateKey]:
        return iter(self._pods_of)

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for uid in self._by_uid.keys() - {raw["metadata"].get("uid") for raw in objects.values()}:
            self._forget(uid)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        uid, claim = str(raw["metadata"].get("uid")), NativeClaim.of((raw.get("spec") or {}).get("resourceClaims"))
        if claim is None or (raw.get("status") or {}).get("phase") in FINISHED:
            self._forget(uid)
        elif uid not in self._by_uid:
            key = self._by_uid[uid] = str(raw["metadata"].get("namespace")), claim
            self._pods_of[key] += 1
            self._on_named(key)

    def deleted(self, raw: Raw) -> None:
        self._forget(str(raw["metadata"].get("uid")))

    def _forget(self, uid: str) -> None:
        key = self._by_uid.pop(uid, None)
        if key is not None:
            self._pods_of[key] -= 1
            if not self._pods_of[key]:
                del self._pods_of[key]


class Turns:
    """Keys of which namespaces take turns: a tenant with many new hashes does not delay the pods of others.

    Removing the first item of a plain dict again and again takes quadratic time.
    """

    def __init__(self) -> None:
        self._of_namespaces: OrderedDict[str, OrderedDict[TemplateKey, None]] = OrderedDict()

    def add(self, key: TemplateKey) -> None:
        self._of_namespaces.setdefault(key[0], OrderedDict())[key] = None

    def has_more(self, without: Container[str]) -> bool:
        """Whether there is a key of another namespace than these."""
        return any(name not in without for name in self._of_namespaces)

    def pop(self, without: Container[str]) -> TemplateKey | None:
        """The next key of another namespace than these."""
        name = next((name for name in self._of_namespaces if name not in without), None)
        if name is None:
            return None
        keys = self._of_namespaces[name]
        key, _ = keys.popitem(last=False)
        if keys:
            self._of_namespaces.move_to_end(name)
        else:
            del self._of_namespaces[name]
        return key

    def clear(self) -> None:
        self._of_namespaces.clear()


def key_of_template(raw: Raw) -> TemplateKey | None:
    """None for a template that is not named as ours."""
    claim = NativeClaim.named(raw["metadata"]["name"])
    return None if claim is None else (str(raw["metadata"]["namespace"]), claim)


def has_claims(raw: Raw, spec: Raw) -> bool:
    """Whether the template makes claims with this spec. Only claims with our label get GPUs."""
    labels = (raw["spec"].get("metadata") or {}).get("labels")
    return labels == CLAIM_LABELS and without_defaults(raw["spec"].get("spec") or {}) == spec
