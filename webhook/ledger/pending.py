"""Counts of GPUs reserved for pods that do not exist yet or are gone, cheap enough to read in every review."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from webhook.core.reasons import Reason
from webhook.core.verdict import Deny

Key = tuple[str, str]
NONE: Mapping[int, int] = {}


class PendingGpus:
    """Reservations counted by namespace and number of GPUs, so that reading a count iterates over no reservations."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[str, int]] = {}
        self._sizes = Counter[int]()
        self._by_namespace: dict[str, Counter[int]] = {}

    def put(self, key: Key, namespace: str, gpus: int) -> None:
        if key not in self._known:
            self._known[key] = namespace, gpus
            self._sizes[gpus] += 1
            self._by_namespace.setdefault(namespace, Counter())[gpus] += 1

    def drop(self, key: Key) -> None:
        if key not in self._known:
            return
        namespace, gpus = self._known.pop(key)
        decrement(self._sizes, gpus)
        decrement(self._by_namespace[namespace], gpus)
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]

    @property
    def sizes(self) -> Mapping[int, int]:
        """The number of reservations for each number of GPUs."""
        return self._sizes

    def sizes_in(self, namespace: str) -> Mapping[int, int]:
        return self._by_namespace.get(namespace, NONE)

    def gpus_in(self, namespace: str) -> int:
        return total(self.sizes_in(namespace))

    @property
    def namespaces(self) -> Collection[str]:
        return self._by_namespace.keys()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._known)


def too_many_orphans(orphaned: PendingGpus, namespace: str, gpus: int, limit: int) -> Deny | None:
    """Applies to authenticated callers too. A claim of any size is allowed if the namespace has no orphans and no
    overdue reservations."""
    held = orphaned.gpus_in(namespace) if limit and gpus else 0
    if not held or held + gpus <= limit:
        return None
    return Deny(
        Reason.NAMESPACE_FULL,
        f"namespace {namespace!r} has {held} GPU{'' if held == 1 else 's'} held by pods that are gone and may "
        f"still run: with {gpus} more it would be above {limit}",
        hint="wait until they are free, or ask an administrator to release them (gpuwarden release)",
    )


def decrement(counter: Counter[int], size: int) -> None:
    counter[size] -= 1
    if not counter[size]:
        del counter[size]


def total(sizes: Mapping[int, int]) -> int:
    return sum(size * number for size, number in sizes.items())
