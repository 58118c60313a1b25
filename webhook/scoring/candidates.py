"""What a scorer learns of the cluster, and what hints may refer to. All of it comes from watches: a review waits for no
list request."""

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

# More models than any cluster has. A label with more values is not a model name.
MAX_CANDIDATES = 256
# The most entries in the list of running jobs.
MAX_COLOCATED = 1000


def candidates(fleet: Fleet) -> tuple[str, ...]:
    """The GPU models by the nodes' labels."""
    found = {model for models in fleet.gpu_types.values() for model in models if model}
    return tuple(sorted(found)[:MAX_CANDIDATES])


class RunningJobs:
    """Listener of the watch of pods. Knows the job types of running pods with GPUs."""

    def __init__(self) -> None:
        self._job_types: dict[str, str] = {}
        self._counts = Counter[str]()

    def colocated(self) -> tuple[str, ...]:
        """The running job types, each as often as it runs; shortened to MAX_COLOCATED entries with every type
        present."""
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
            self.add_running(raw)
        else:
            self._forget(key_of(raw))

    def deleted(self, raw: Raw) -> None:
        self._forget(key_of(raw))

    def add_running(self, raw: Raw) -> None:
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
    """The job type of a pod with GPUs. A dressed pod no longer has its request, so its record counts."""
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
    """Knows the priority classes of the cluster."""

    @property
    def names(self) -> frozenset[str] | None:
        """None if every name is accepted."""

    @property
    def default(self) -> str | None:
        """The global default class; None if there is none."""


class EveryPriorityClass:
    """Embedded mode: there are no PriorityClass objects."""

    names: frozenset[str] | None = None
    default: str | None = None


class WatchedPriorityClasses:
    """Listener of the watch of PriorityClasses."""

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
