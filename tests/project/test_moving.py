"""The migration pages name everything that the older systems read, write and answer, and what they state about names is
correct."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from scripts.chart_values import MOVED, values
from tests.chart.rendering import refusal
from tests.chart.test_values import GPU_SCHEDULER, SCHEDULER_WEBHOOK
from webhook.core import claim_keys, keys
from webhook.export import settings as export_settings
from webhook.export.labels import DOMAIN as SERIALS
from webhook.runtime import settings

PAGES = Path(__file__).resolve().parents[2] / "docs" / "moving"

VARIABLES = {
    "extender": "BGS_LISTEN_ADDR BGS_REQUIRED_ANNOTATION BGS_NODE_HASH_MAP",
    "exporter": """EXPORTER_TYPE CLUSTER_NAME NAMESPACE LABEL_SELECTOR CONTAINER WORKERS TIMEOUT RESYNC QPS BURST
        KUBECONFIG LOG_LEVEL SERVER_PORT LEADER_ELECTION LEASE_NAMESPACE LEASE_NAME LEASE_DURATION LEASE_RENEW_DEADLINE
        LEASE_RETRY_PERIOD POD_NAME POD_NAMESPACE HTTP_ENDPOINT HTTP_TIMEOUT HTTP_AUTH_TOKEN POSTGRES_HOST POSTGRES_PORT
        POSTGRES_DB POSTGRES_USER POSTGRES_PASSWORD POSTGRES_SSLMODE POSTGRES_TABLE POSTGRES_AUTO_MIGRATE S3_BUCKET
        S3_PREFIX S3_REGION S3_PARTITION_PATTERN""",
    "scoring": "SCHEDULER_URL TIMEOUT_SECONDS ENABLE_MUTATION PRIORITY_BUCKETS",
}
FLAGS = {
    "--access-token": "-t",
    "--ca-certificate": "-c",
    "--kubernetes-url": "-k",
    "--port": "-p",
    "--ui-port": "-U",
    "--log-level": "-l",
    "--claims-namespace": "-C",
    "--renew-interval": "-i",
    "--renew-jitter": "-j",
}
VALUES = {"binder": GPU_SCHEDULER, "scoring": SCHEDULER_WEBHOOK}
KEYS = {
    "extender": [*claim_keys.REQUIRED_HASH.names],
    "binder": [*claim_keys.GPU_MAP.names, keys.LOGICAL_NODE_LABEL, keys.POD_INDEX_LABEL, keys.CUDA_ENV],
    "exporter": [
        SERIALS + name for name in ("gpu-<n>", "chassis", "chassis-<i>", "chassis-<i>-gpu-<n>", "chassis-count")
    ],
    "scoring": [
        *keys.FEATURES,
        *keys.GPU_TYPE_LABELS,
        *(name for key in (keys.PRIORITY_SCORE, keys.CHOSEN_GPU, keys.DECISION_TIMESTAMP) for name in key.aliases),
        "scheduler.radix.ai/enabled=true",
    ],
    "assigner": [
        keys.ASSIGNER_DEVICE_LABELS,
        claim_keys.ASSIGNER_ASSIGN,
        *(name for key in (keys.GPU_UUID, keys.NODE, keys.RESERVATION_ID) for name in key.aliases),
        "fudo.org/pod.namespace",
        "fudo.org/gpu.reservation-state",
        "cdi.k8s.io/gpu-assignment",
    ],
}
OTHERS = {
    "extender": """/filter /healthz NodeNames FailedNodes Error Pod urlPrefix filterVerb nodeCacheCapable
        managedResources blind-gpu-scheduler IMG""",
    "binder": """gpu-scheduler /mutate /health /ready NAMESPACE SERVICE_NAME CERT_DIR gpu-scheduler-webhook
        SCHEDULER_NAME gpu-scheduler-webhook-tls gpu-env-injector.gpu-scheduler.io /certs/tls.crt /certs/tls.key
        gpu-scheduler-check gpuScheduling.* testService.* LOG_INTERVAL scripts/generate-webhook-certs.sh""",
    "exporter": """/metrics /healthz /readyz http-credentials db-credentials s3-credentials gpuid gpuid-leader
        AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY SMIFAKER_CONTENT_PATH must-have-slsa must-have-spdx-cue
        policy.sigstore.dev/include stdout http postgres s3 prod Content-Type User-Agent X-Records-Count X-Timestamp
        Authorization cluster node machine source chassis gpu time id read_time created_at
        gpuid_export_success_total gpuid_export_failure_total""",
    "scoring": """/v1/score /mutate /healthz /readyz gpu-ultra gpu-scheduler.radix.ai""",
    "assigner": """-h --help gpu-claims proposal active /mutate /finalize /devices namespace name uid reservation-id
        gpu-uuid exists? available pending assigned expired""",
}


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def said(name: str) -> set[str]:
    """Every text in code quotes on the page, whole and in parts."""
    quoted = re.findall(r"`([^`\n]+)`", page(name))
    return {word for one in quoted for word in (one, *re.split(r"[\s,={}():]+", one))}


ALL = [
    *((name, words.split()) for table in (VARIABLES, OTHERS) for name, words in table.items()),
    *KEYS.items(),
    ("assigner", [*FLAGS, *FLAGS.values()]),
]


@pytest.mark.parametrize(("name", "wanted"), ALL)
def test_page_lists_everything_the_older_system_reads_and_writes(name: str, wanted: list[str]) -> None:
    assert [one for one in wanted if one not in said(name)] == []


def is_in(value: str, named: Iterable[str]) -> bool:
    """Whether a value is named: itself, by a wildcard, or by one of its members."""
    return any(
        value == one or one.startswith(f"{value}.") or (one.endswith(".*") and value.startswith(one[:-1]))
        for one in named
    )


@pytest.mark.parametrize("name", VALUES)
def test_page_lists_every_value_of_the_older_chart(name: str) -> None:
    assert [value for value in VALUES[name] if not is_in(value, said(name))] == []


@pytest.mark.parametrize("name", VALUES)
def test_values_with_the_same_name_work_and_renamed_values_are_reported(name: str) -> None:
    (row,) = (line for line in page(name).splitlines() if line.endswith("| the same name |"))
    same = re.findall(r"`([^`]+)`", row)
    stay = {value for value in VALUES[name] if is_in(value, same)}
    assert stay == set(VALUES[name]) - {one.path for one in MOVED}
    assert [value for value in stay if not is_in(value, [one.path for one in values()])] == []


@pytest.mark.parametrize("name", VALUES)
def test_every_moved_value_is_reported_in_one_error(name: str) -> None:
    moved = [one for one in MOVED if one.path in VALUES[name]]
    said_to_all = refusal({one.path: True for one in moved})
    assert [one.path for one in moved if f"{one.sentence}." not in said_to_all] == []


def test_variables_of_the_older_systems_are_read() -> None:
    tables = (*settings.SETTINGS, *export_settings.TABLE)
    read = {variable for one in tables for variable in one.variables}
    assert [name for words in VARIABLES.values() for name in words.split() if name not in read] == []


def test_flags_of_the_older_systems_are_accepted() -> None:
    taken = {one.flag: f"-{one.short}" for one in settings.SETTINGS if one.short}
    retired = {one.flag: f"-{one.short}" for one in settings.RETIRED}
    assert (taken | retired).items() >= FLAGS.items()
