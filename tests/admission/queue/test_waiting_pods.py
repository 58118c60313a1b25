"""Which waiting pods are checked again when the hashes that their namespaces allow change."""

from collections.abc import Collection
from typing import Any, cast

import pytest

from tests.builders import HASH, Raw
from webhook.admission.queue.waiting_pods import DemandsListener, WaitingPods


class Marked:
    """Records the namespaces whose pods are marked."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def mark_for_recheck(self, namespaces: Collection[str]) -> None:
        self.names |= set(namespaces)

    def taken(self) -> set[str]:
        names, self.names = self.names, set()
        return names


def namespace(name: str, digest: str | None = None) -> Raw:
    annotations: dict[str, Any] = {} if digest is None else {"gpuwarden.io/required-hash": digest}
    return {"metadata": {"name": name, "annotations": annotations}}


@pytest.fixture
def marked() -> Marked:
    return Marked()


@pytest.fixture
def listener(marked: Marked) -> DemandsListener:
    found = DemandsListener(cast(WaitingPods, marked))
    found.replaced({"1": namespace("ml", HASH), "2": namespace("cv")})
    assert marked.taken() == {"ml", "cv"}
    return found


def test_new_list_marks_namespaces_that_changed_or_are_gone(listener: DemandsListener, marked: Marked) -> None:
    listener.replaced({"1": namespace("ml", HASH), "2": namespace("cv", HASH)})
    assert marked.taken() == {"cv"}
    for expected in ({"cv"}, set()):
        listener.replaced({"1": namespace("ml", HASH)})
        assert marked.taken() == expected


def test_event_marks_the_namespace_only_if_its_hashes_changed(listener: DemandsListener, marked: Marked) -> None:
    listener.changed(namespace("ml", HASH))
    assert marked.taken() == set()
    for expected in ({"ml"}, set()):
        listener.changed(namespace("ml"))
        assert marked.taken() == expected


def test_deletion_marks_a_known_namespace_once(listener: DemandsListener, marked: Marked) -> None:
    for expected in ({"ml"}, set()):
        listener.deleted(namespace("ml"))
        assert marked.taken() == expected
