"""Settings of scoring, by our names and by the names in the ConfigMaps of the older system's users."""

from datetime import timedelta
from pathlib import Path

import pytest

from webhook.assembly.parts import bucket_of, embedded, hinting_of
from webhook.core.hints import DEFAULT_BUCKETS
from webhook.runtime.clock import utc_now
from webhook.runtime.settings import SettingsError, as_yaml, load


@pytest.mark.defect("scoring-12")
def test_names_of_the_older_system_are_accepted() -> None:
    found = load(
        {},
        {
            "SCHEDULER_URL": "http://scheduler-agent:8080",
            "TIMEOUT_SECONDS": "5.0",
            "ENABLE_MUTATION": "false",
            "PRIORITY_BUCKETS": '[{"minScore": 60, "priorityClassName": "urgent"}]',
        },
    )
    assert (found.scorer, found.scorer_timeout, found.hint_pods) == (
        "http://scheduler-agent:8080",
        timedelta(seconds=5),
        False,
    )
    assert found.priority_buckets == ({"minScore": 60, "priorityClassName": "urgent"},)


def test_buckets_and_tenants_round_trip_through_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "priorityBuckets:\n- {minScore: 60, priorityClassName: urgent}\n- {minScore: 0.5, priorityClassName: later}\n"
        "tenantPriorities: {team-a: 91, team-b: 12.5}\n"
    )
    found = load({"config": str(file)}, {})
    assert [bucket_of(one).min_score for one in found.priority_buckets] == [60, 0.5]
    assert found.tenant_priorities == {"team-a": 91, "team-b": 12.5}
    file.write_text(as_yaml(found))
    assert load({"config": str(file)}, {}).priority_buckets == found.priority_buckets


def test_default_buckets() -> None:
    assert tuple(map(bucket_of, load({}, {}).priority_buckets)) == DEFAULT_BUCKETS


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[1]",
        '[{"minScore": "90", "priorityClassName": "a"}]',
        '[{"minScore": 101, "priorityClassName": "a"}]',
        '[{"minScore": NaN, "priorityClassName": "a"}]',
        '[{"minScore": 1}]',
        '[{"minScore": 1, "priorityClassName": "No Name"}]',
        '[{"minScore": 1, "priorityClassName": "a", "more": 1}]',
    ],
)
def test_invalid_buckets_are_reported(text: str) -> None:
    with pytest.raises(SettingsError, match="flag --priority-buckets: "):
        load({"priority_buckets": text}, {})


@pytest.mark.parametrize("text", ["[]", '{"a": "b"}', '{"a": 101}', '{"a": true}', "{"])
def test_invalid_scores_are_reported(text: str) -> None:
    with pytest.raises(SettingsError, match="flag --tenant-priorities: "):
        load({"tenant_priorities": text}, {})


def test_no_scorer_is_called_without_a_url(tmp_path: Path) -> None:
    inventory = tmp_path / "inventory.yaml"
    inventory.write_text("nodes: []\n")
    assert embedded(load({"inventory": str(inventory)}, {}), utc_now).hinting is None
    off = load({"inventory": str(inventory), "scorer": "http://127.0.0.1:1", "hint_pods": "false"}, {})
    parts = embedded(off, utc_now)
    assert hinting_of(off, parts) is None
