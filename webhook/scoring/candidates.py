"""What a scorer is told of the cluster and what hints may refer to, all from what was heard: nothing is listed while a
review waits."""

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from webhook.core import keys
from webhook.core.claim import recorded_claim_or_none
from webhook.core.errors import InvalidPodError
from webhook.core.fleet import Fleet
from webhook.core.hints import requests_gpus
from webhook.core.pod import Pod
from webhook.core.raw import Raw
from webhook.kube.view import ObjectView

# More models than any cluster has; a label that counts something is no model.
MAX_CANDIDATES = 256
# What is told of who runs: each kind of job, and each as often as it runs as far as there is room.
MAX_COLOCATED = 1000


def candidates(fleet: Fleet) -> tuple[str, ...]:
    """The models that nodes say they have; nothing is made up."""
    found = {model for models in fleet.gpu_types.values() for model in models if model}
    return tuple(sorted(found)[:MAX_CANDIDATES])


class RunningJobs:
    """Hears of pods; knows what those do that run with a GPU."""

    def __init__(self) -> None:
        self._job_types: dict[str, str] = {}
        self._counts = Counter[str]()

    def colocated(self) -> tuple[str, ...]:
        """The kinds of job that run, each as often as it does."""
        if not self._counts:
            return ()
        most = max(1, MAX_COLOCATED // len(self._counts))
        listed = [kind for kind in sorted(self._counts) for _ in range(min(self._counts[kind], most))]
        return tuple(listed[:MAX_COLOCATED])

    def replaced(self, objects: Mapping[str, Raw]) -> None:
        for key in self._job_types.keys() - objects.keys():
            self._forget(key)
        for raw in objects.values():
            self.changed(raw)

    def changed(self, raw: Raw) -> None:
        status = raw.get("status")
        is_running = isinstance(status, dict) and status.get("phase") == "Running"
        if is_running:
            self.runs(raw)
        else:
            self._forget(key_of(raw))

    def deleted(self, raw: Raw) -> None:
        self._forget(key_of(raw))

    def runs(self, raw: Raw) -> None:
        self._forget(key_of(raw))
        job_type = job_type_of(raw)
        if job_type is not None:
            self._job_types[key_of(raw)] = job_type
            self._counts[job_type] += 1

    def _forget(self, key: str) -> None:
        job_type = self._job_types.pop(key, None)
        if job_type is not None:
            self._counts[job_type] -= 1
            if not self._counts[job_type]:
                del self._counts[job_type]


def key_of(raw: Raw) -> str:
    meta = raw.get("metadata") or {}
    return f"{meta.get('namespace', '')}/{meta.get('name', '')}"


def job_type_of(raw: Raw) -> str | None:
    """What a pod with a GPU does. Its request was taken off when it was dressed; then the record of it counts."""
    try:
        pod = Pod.parse(raw)
    except InvalidPodError:
        return None
    job_type = pod.annotations.get(keys.JOB_TYPE) or pod.labels.get(keys.JOB_TYPE)
    if not job_type:
        return None
    claim = recorded_claim_or_none(pod)
    return job_type if requests_gpus(pod) or (claim is not None and claim.count) else None


class PriorityClasses(Protocol):
    """Knows which priority classes there are."""

    @property
    def names(self) -> frozenset[str] | None:
        """None where every name is taken for one."""

    @property
    def default(self) -> str | None:
        """The class of pods that name none."""


class EveryPriorityClass:
    """Where there is no cluster to have any."""

    names: frozenset[str] | None = None
    default: str | None = None


class WatchedPriorityClasses:
    """Hears of PriorityClass objects."""

    def __init__(self) -> None:
        self.view: ObjectView[bool] = ObjectView(is_default)

    @property
    def names(self) -> frozenset[str] | None:
        return frozenset(self.view.names())

    @property
    def default(self) -> str | None:
        return next((name for name in sorted(self.view.names()) if self.view.get(name)), None)


def is_default(raw: Raw) -> bool:
    return raw.get("globalDefault") is True
