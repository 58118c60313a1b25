"""`make e2e` retries a test that ran out of time, and no test that found an error."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The first run of this test fails in the given way, the second passes.
TEST = """
import asyncio
import subprocess
from pathlib import Path
import httpx
import pytest
from scripts.controlplane.cluster import StartError
from scripts.node.real import NodeError
from tests.e2e.gpu_checker import InvariantViolatedError
from tests.e2e.kube import ApiError, NotInTimeError

TIMED_OUT = 'Internal error occurred: failed calling webhook "a": context deadline exceeded'


async def told_by_a_group():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        raise AssertionError("NotInTimeError: ")


def cleans_up(broken, late):
    try:
        raise broken
    finally:
        raise late


def fails():
    {failure}


def test_it(tmp_path_factory):
    marker = Path(__file__).with_suffix(".tried")
    if not marker.exists():
        marker.touch()
        fails()
"""
OF_TIME = {
    "a wait": "raise NotInTimeError('not within 30 s')",
    "a timeout": "raise TimeoutError",
    "of asyncio": "raise asyncio.TimeoutError",
    "of a request": "raise httpx.ReadTimeout('')",
    "of a connection": "raise httpx.ConnectTimeout('')",
    "of a process": "raise subprocess.TimeoutExpired('helm', 5)",
    "a component that does not start": "raise StartError('etcd is not ready')",
    "a node that does not start": "raise NodeError('kubelet is not ready')",
    "a webhook that is late": "raise ApiError(500, {'reason': 'InternalError', 'message': TIMED_OUT})",
    "cleaning up late after an answer": "cleans_up(ApiError(409, {}), NotInTimeError('not within 30 s'))",
}
FOUND_WRONG = {
    "an assertion": "assert 1 == 2",
    "an assertion about time": "raise AssertionError('TimeoutError: not within 30 s')",
    "an assertion after a timeout": "cleans_up(TimeoutError(), AssertionError())",
    "a promise": "raise InvariantViolatedError('two on GPU-1')",
    "a refusal that did not come": "pytest.raises(ApiError, lambda: None)",
    "another refusal": "pytest.raises(ApiError, match='b', func=lambda: None)",
    "an answer": "raise ApiError(403, {'reason': 'Forbidden', 'message': 'denied the request'})",
    "in a group": "asyncio.run(told_by_a_group())",
    "an assertion, then cleaning up late": "cleans_up(AssertionError(), NotInTimeError('not within 30 s'))",
    "a promise, then cleaning up late": "cleans_up(InvariantViolatedError(), TimeoutError())",
    "a mistake of the test": "raise KeyError('TimeoutError')",
}


def flags() -> list[str]:
    """The rerun flags of the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (found,) = re.findall(r"^ONCE_MORE := (.+)$", text, re.MULTILINE)
    return shlex.split(found)


def test_only_timeouts_are_retried(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    for number, failure in enumerate((*OF_TIME.values(), *FOUND_WRONG.values())):
        (tmp_path / f"test_{number:02}.py").write_text(TEST.replace("{failure}", failure))
    many = ["--max-suite-reruns", "100"]  # the limit on all reruns is not under test
    own = ["-c", str(tmp_path / "pytest.ini"), "-p", "tests.e2e.reruns", "-p", "no:cacheprovider", "-rA", "-q"]
    command = [sys.executable, "-m", "pytest", *own, *flags(), *many, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False).stdout
    outcome = {int(number): word for word, number in re.findall(r"^(PASSED|FAILED) \S*test_(\d\d)\.py", said, re.M)}
    names = [*OF_TIME, *FOUND_WRONG]
    assert {names[number]: word for number, word in outcome.items()} == {
        **dict.fromkeys(OF_TIME, "PASSED"),
        **dict.fromkeys(FOUND_WRONG, "FAILED"),
    }, said


def test_e2e_conftest_provides_the_rerun_hook() -> None:
    text = (ROOT / "tests/e2e/conftest.py").read_text()
    assert "from tests.e2e.reruns import pytest_runtest_makereport" in text
