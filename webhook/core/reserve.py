"""When the GPUs of a pod are chosen."""

from enum import StrEnum
from typing import Final

from webhook.core.errors import InvalidPodError


class Reserve(StrEnum):
    """At the creation of the pod, or when it is bound to a node."""

    CREATE = "create"
    BIND = "bind"


ALLOWED: Final = ", ".join(Reserve)


def recorded_reserve(default: Reserve) -> str | None:
    """For the record of a claim. `create` is not recorded: older versions know nothing else."""
    return None if default is Reserve.CREATE else default.value


def reserve_of(recorded: str | None) -> Reserve:
    """When the GPUs of a pod are chosen, by the record of its claim. Raises InvalidPodError if it is not known."""
    if recorded is None:
        return Reserve.CREATE
    if recorded not in tuple(Reserve):
        raise InvalidPodError(f"the time to reserve {recorded[:40]!r} is not known; allowed are {ALLOWED}")
    return Reserve(recorded)
