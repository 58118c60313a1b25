"""Fuzzed reviews: the answer is well-formed, a patch applies, and a denial reserves nothing."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import builders
from tests.builders import Raw, raw_container, raw_pod
from tests.claim_samples import SAMPLES
from tests.web.harness import Harness, patched
from tests.web.test_app import paths, rich_review

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))
meaningful_values = st.sampled_from(
    [
        *("all", "void", "GPU-a0", "1", "0", "-1", "1e3", "half", "In", "NotIn", "Exists", "Gt", "node-a", "Always"),
        *({name: sample.value} for sample in SAMPLES for name in sample.names),
        {"gpuwarden.io/claim": "{}", "gpuwarden.io/reservation-id": "r"},
        {"nvidia.com/gpu": 1.0},
        {"nvidia.com/gpu": "2"},
        {"fudo.org/gpu.assign": "true"},
        [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
        [{"name": "CUDA_VISIBLE_DEVICES", "valueFrom": {}}],
        [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}],
        {"operator": "Exists"},
    ]
)
PATHS = paths(rich_review())


@st.composite
def reviews(draw: st.DrawFn) -> Any:
    """A review with up to six random changes."""
    review = copy.deepcopy(rich_review())
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=6)):
        change(review, path, draw(values | meaningful_values), remove=draw(st.booleans()))
    return review


def change(review: Any, path: tuple[Any, ...], value: Any, *, remove: bool) -> None:
    target = review
    try:
        for step in path[:-1]:
            target = target[step]
        if remove:
            del target[path[-1]]
        else:
            target[path[-1]] = copy.deepcopy(value)  # one value may be used in two places, even in itself
    except (KeyError, IndexError, TypeError):
        pass  # an earlier change has removed the target


@pytest.mark.defect("X-5")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(review=reviews() | values, path=st.sampled_from(["/mutate", "/validate"]))
async def test_fuzzed_review_gets_a_well_formed_answer(harness: Harness, review: Any, path: str) -> None:
    reply = await harness.tls.post(path, content=builders.body(review))
    assert reply.status_code in (200, 400)
    answer: Raw = reply.json()
    if reply.status_code == 400:
        assert answer["error"]
        return
    response = answer["response"]
    assert response["uid"] == review["request"]["uid"]
    if response["allowed"]:
        check_admitted(review, response)
    else:
        status = response["status"]
        assert status["code"] in (403, 409, 429, 503)
        assert status["reason"]
        assert status["message"]
        assert response["uid"] not in {one.id for one in harness.parts.ledger.reservations()}
    await start_over(harness)


def check_admitted(review: Raw, response: Raw) -> None:
    raw = review["request"]["object"]
    if "patch" in response:
        dressed = patched(raw, response)
        assert dressed != raw


async def start_over(harness: Harness) -> None:
    """Let all reservations expire, so that the next review starts from the same state."""
    harness.wait(100)
    await harness.parts.ledger.collect(harness.now)
    fresh = raw_pod(raw_container(gpus=1))
    assert (await harness.mutate(fresh, "afterwards"))["allowed"]
    harness.wait(100)
    await harness.parts.ledger.collect(harness.now)
