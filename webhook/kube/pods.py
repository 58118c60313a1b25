"""Requests about one pod."""

import msgspec

from webhook.core.reservation import PodIdentity
from webhook.kube.json_objects import decoded

# kube-scheduler waits five seconds for an extender by default.
REQUEST_TIMEOUT = 4.0


MAX_MESSAGE = 800


class StatusWire(msgspec.Struct, frozen=True):
    message: str = ""


def path_names(pod: PodIdentity) -> dict[str, str]:
    return {"namespace": pod.namespace, "name": pod.name}


def error_message(status: int, body: bytes) -> str:
    try:
        message: str = decoded(body, StatusWire).message
    except msgspec.DecodeError:
        message = ""
    return message[:MAX_MESSAGE] or f"the API server answered {status}"
