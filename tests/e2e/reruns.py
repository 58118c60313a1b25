"""Decides which failures are retried: only those that an overloaded machine causes by itself. The pytest flags for it
are in the Makefile. They match the error that ended the test, and its cause."""

from collections.abc import Iterator

import pytest

from tests.e2e.kube import NotInTimeError


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """If an assertion fails and cleaning up then runs out of time, the assertion becomes the cause of the failure."""
    error = call.excinfo.value if call.excinfo is not None else None
    if error is None or error.__cause__ is not None:
        return
    error.__cause__ = next((one for one in contexts_of(error) if is_test_failure(one)), None)


def contexts_of(error: BaseException) -> Iterator[BaseException]:
    while error.__context__ is not None:
        error = error.__context__
        yield error


def is_test_failure(error: BaseException) -> bool:
    return isinstance(error, AssertionError | pytest.fail.Exception) and not isinstance(error, NotInTimeError)
