"""Requests about one pod."""

from webhook.core.reservation import PodIdentity
from webhook.kube.json_objects import status_message

# kube-scheduler waits five seconds for an extender by default.
REQUEST_TIMEOUT = 4.0


def path_names(pod: PodIdentity) -> dict[str, str]:
    return {"namespace": pod.namespace, "name": pod.name}


def error_message(status: int, body: bytes) -> str:
    return status_message(body) or f"the API server answered {status}"
