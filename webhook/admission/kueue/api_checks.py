"""Writes the status of Kueue's objects by server-side apply, as Kueue's own controllers do: each check and condition
has one owner, and the others stay."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from webhook.admission.kueue.checks import CheckAnswer, CheckNotWrittenError, WorkloadChangedError
from webhook.admission.kueue.workload import ACTIVE, CONTROLLER, AdmissionCheck, CheckWire, Workload
from webhook.core.raw import Raw
from webhook.kube.client import ApiClient
from webhook.kube.json_objects import object_in
from webhook.kube.paths import ADMISSION_CHECKS_PATH, WORKLOAD_PATH
from webhook.kube.pods import error_message
from webhook.kube.requests import APPLY_PATCH, REQUEST_ERRORS, REQUEST_TIMEOUT, send_request

VERSION = "kueue.x-k8s.io/v1beta2"
CONFLICT = 409
OWNER = {"fieldManager": CONTROLLER, "force": "true"}


class ApiChecks:
    """The API server refuses an answer to a Workload that has changed."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def answer(self, workload: Workload, checks: Sequence[CheckWire], answer: CheckAnswer, now: datetime) -> Raw:
        meta = {
            "namespace": workload.namespace,
            "name": workload.name,
            "uid": workload.uid,
            "resourceVersion": workload.version,
        }
        states = [check_state(one, answer, now) for one in checks]
        names = {"namespace": workload.namespace, "name": workload.name}
        return await self._apply("Workload", WORKLOAD_PATH, names, meta, {"admissionChecks": states})

    async def activate(self, check: AdmissionCheck, now: datetime) -> Raw:
        condition = {
            "type": ACTIVE,
            "status": "True",
            "reason": "Active",
            "message": "gpuwarden answers this check",
            "observedGeneration": check.generation,
            "lastTransitionTime": written_time(now),
        }
        path, names = ADMISSION_CHECKS_PATH + "/{name}", {"name": check.name}
        return await self._apply("AdmissionCheck", path, names, names, {"conditions": [condition]})

    async def _apply(self, kind: str, path: str, names: dict[str, str], meta: Raw, status: Raw) -> Raw:
        body = {"apiVersion": VERSION, "kind": kind, "metadata": meta, "status": status}
        try:
            reply = await send_request(
                self._api,
                "PATCH",
                f"{path}/status",
                names,
                body,
                seconds=REQUEST_TIMEOUT,
                kind=APPLY_PATCH,
                query=OWNER,
            )
            if reply.status == CONFLICT:
                raise WorkloadChangedError(error_message(reply.status, reply.content))
            if reply.status >= 400:
                raise CheckNotWrittenError(error_message(reply.status, reply.content))
            return object_in(reply.content)
        except msgspec.DecodeError as exc:
            raise CheckNotWrittenError("the API server's answer is not valid JSON") from exc
        except REQUEST_ERRORS as exc:
            raise CheckNotWrittenError(f"the API server did not answer: {type(exc).__name__}") from exc


def check_state(before: CheckWire, answer: CheckAnswer, now: datetime) -> dict[str, Any]:
    since = before.last_transition_time if before.state == answer.state else None
    state: dict[str, Any] = {
        "name": before.name,
        "state": answer.state.value,
        "message": answer.message,
        "lastTransitionTime": written_time(since or now),
    }
    if answer.requeue_after is not None:
        state["requeueAfterSeconds"] = round(answer.requeue_after.total_seconds())
    return state


def written_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
