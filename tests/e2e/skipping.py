"""Requirements that a machine or a clone may lack. A test that needs one is skipped with the reason, or fails where it
is required."""

import os
from typing import NoReturn

import pytest


def skip_or_fail(what: str, why: str) -> NoReturn:
    """`what` is NODE or HISTORY, as in the variables of `.ci/run`."""
    if os.environ.get(f"E2E_{what}_REQUIRED") == "1":  # noqa: TID251 - of the run, not a setting of ours
        pytest.fail(f"{why}; E2E_ALLOW_NO_{what}=1 lets the run pass without", pytrace=False)
    pytest.skip(why)
