"""A plugin of pytest that measures branch coverage: `-p tests.branch_coverage`.

Tracing doubles the time of a test. So only the tests are traced that are meant for the measured packages, and none with
random inputs: the result would differ between runs.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from coverage import Coverage

TESTS = Path(__file__).parent
DIRECTORIES = ("core", "admission", "ledger", "web")
# They reach nothing in the measured packages that other tests do not reach.
OTHERS = ("test_callers.py", "test_devices.py", "test_evidence.py", "test_extender_listener.py", "test_fuzz.py")

measured = Coverage(data_suffix=True)


def is_measured(item: pytest.Item) -> bool:
    is_random = item.get_closest_marker("hypothesis") is not None
    is_reaching = item.path.relative_to(TESTS).parts[0] in DIRECTORIES and item.path.name not in OTHERS
    return is_reaching and not is_random


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not is_measured(item):
        return (yield)
    measured.start()
    try:
        return (yield)
    finally:
        measured.stop()


def pytest_sessionfinish() -> None:
    measured.save()
