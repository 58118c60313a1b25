"""Which failures a second try may make good: those that a machine with too much to do causes by itself.

The flags that say so are in the Makefile. They look at the error that ended the test, and at its cause.
"""

from collections.abc import Iterator

import pytest

from tests.e2e.kube import NotInTimeError


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """An assertion fails, and then what cleans up runs out of time: the assertion becomes the cause of the failure."""
    error = call.excinfo.value if call.excinfo is not None else None
    if error is None or error.__cause__ is not None:
        return
    error.__cause__ = next((one for one in before(error) if is_found_wrong(one)), None)


def before(error: BaseException) -> Iterator[BaseException]:
    while error.__context__ is not None:
        error = error.__context__
        yield error


def is_found_wrong(error: BaseException) -> bool:
    return isinstance(error, AssertionError | pytest.fail.Exception) and not isinstance(error, NotInTimeError)
