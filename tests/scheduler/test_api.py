"""Writes to pods in the API server, and whether they succeeded."""

import pytest
from kubernetes.aio import client

from tests.builders import Raw, identity
from tests.scheduler.api_server import ApiServer
from webhook.scheduler.api import ApiConditions


@pytest.mark.parametrize(
    ("status", "is_said"),
    [({}, True), (404, False), (409, False), (500, False)],
    ids=["written", "gone", "other", "away"],
)
async def test_unscheduled_returns_whether_the_condition_was_written(
    api_server: ApiServer, api: client.ApiClient, status: Raw | int, is_said: bool
) -> None:
    api_server.has = {"/api/v1/namespaces/ml/pods/train-0/status": status}
    assert await ApiConditions(api).unscheduled(identity(), "1", "why", "2026-03-02T12:00:00Z") is is_said
