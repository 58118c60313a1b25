"""The view of objects: its state, its changes, and order of versions."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.builders import Raw
from webhook.core.errors import GpuwardenError
from webhook.kube.view import ListenerGroup, ObjectView


def raw(name: str, version: int, size: int = 0) -> Raw:
    return {"kind": "Thing", "metadata": {"name": name, "resourceVersion": str(version)}, "size": size}


def size_of(one: Raw) -> int:
    if one["size"] < 0:
        raise GpuwardenError("a size is not negative")
    return int(one["size"])


@pytest.fixture
def view() -> ObjectView[int]:
    return ObjectView(size_of)


def test_only_changes_of_the_extracted_state_are_reported(view: ObjectView[int]) -> None:
    view.changed(raw("a", 1, 7))
    assert (view.get("a"), view.take_changes()) == (7, ["a"])
    view.changed(raw("a", 2, 7))
    assert view.take_changes() == []
    view.changed(raw("a", 3, 8))
    assert view.take_changes() == ["a"]


def test_older_watch_event_does_not_undo_a_write(view: ObjectView[int]) -> None:
    view.changed(raw("a", 5, 8))
    view.changed(raw("a", 4, 7))
    view.deleted(raw("a", 4, 7))
    assert view.get("a") == 8


def test_deletion_is_reported_once(view: ObjectView[int]) -> None:
    view.changed(raw("a", 1))
    view.take_changes()
    view.deleted(raw("a", 2))
    view.deleted(raw("a", 2))
    assert ("a" in view, view.take_changes()) == (False, ["a"])


def test_objects_missing_in_a_list_are_removed(view: ObjectView[int]) -> None:
    view.changed(raw("a", 1))
    view.changed(raw("b", 2))
    view.take_changes()
    view.replaced({"/b": raw("b", 2), "/c": raw("c", 3)})
    assert (view.names(), sorted(view.take_changes())) == ({"b", "c"}, ["a", "c"])


def test_list_with_older_versions_replaces_the_state(view: ObjectView[int]) -> None:
    """After a restore of etcd from a backup, versions continue from a lower number."""
    view.changed(raw("a", 900, 7))
    view.replaced({"/a": raw("a", 5, 8)})
    view.changed(raw("a", 6, 9))
    assert view.get("a") == 9


def test_unreadable_object_keeps_its_last_state(view: ObjectView[int]) -> None:
    view.changed(raw("a", 1, 7))
    view.replaced({"/a": raw("a", 2, -1), "/b": raw("b", 3, 9)})
    assert (view.get("a"), view.get("b")) == (7, 9)


@pytest.mark.parametrize(
    "tell",
    [
        pytest.param(lambda one: one.changed(raw("a", 1)), id="changed"),
        pytest.param(lambda one: one.deleted(raw("b", 2)), id="deleted"),
        pytest.param(lambda one: one.replaced({"/a": raw("a", 3)}), id="replaced"),
    ],
)
def test_listener_group_forwards_to_all_listeners(tell: Callable[[Any], None]) -> None:
    views: list[ObjectView[int]] = [ObjectView(size_of), ObjectView(size_of)]
    for one in views:
        one.changed(raw("b", 1))
        one.take_changes()
    tell(ListenerGroup(*views))
    news = [one.take_changes() for one in views]
    assert news[0] == news[1] != []
