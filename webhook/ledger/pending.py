"""How many GPUs are held for pods that nobody has seen yet, or that are gone, for those who ask at every review."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from webhook.core.reasons import Reason
from webhook.core.verdict import Deny

Key = tuple[str, str]
NONE: Mapping[int, int] = {}


class PendingGpus:
    """Holds by namespace and by how many GPUs each has: counting does not look at each hold."""

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
        less(self._sizes, gpus)
        less(self._by_namespace[namespace], gpus)
        if not self._by_namespace[namespace]:
            del self._by_namespace[namespace]

    @property
    def sizes(self) -> Mapping[int, int]:
        """How many holds there are of each number of GPUs."""
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
    """For callers that prove who they are too. A claim of any size fits where no pod is gone, nor promised GPUs that it
    has not come for."""
    held = orphaned.gpus_in(namespace) if limit and gpus else 0
    if not held or held + gpus <= limit:
        return None
    return Deny(
        Reason.NAMESPACE_FULL,
        f"namespace {namespace!r} has {held} GPU{'' if held == 1 else 's'} held by pods that are not there and may "
        f"still run: with {gpus} more it would be above {limit}",
        hint="wait until they are free; who manages reservations may release them (gpuwarden release)",
    )


def less(counter: Counter[int], size: int) -> None:
    counter[size] -= 1
    if not counter[size]:
        del counter[size]


def total(sizes: Mapping[int, int]) -> int:
    return sum(size * number for size, number in sizes.items())
