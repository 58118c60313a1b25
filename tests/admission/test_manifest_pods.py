import pytest

from webhook.admission.manifest_pods import UnreadableManifestError, pods_of

POD = "{kind: Pod, metadata: {name: one}, spec: {}}"


@pytest.mark.parametrize("kind", ["List", "PodList"])
def test_the_pods_of_a_list_are_its_items(kind: str) -> None:
    assert [pod["metadata"]["name"] for pod in pods_of(f"kind: {kind}\nitems: [{POD}, {POD}]")] == ["one", "one"]


@pytest.mark.parametrize(
    "text",
    ["", "5", "[1]", "kind: {a: b}", "kind: [List]", "kind: List", "kind: List\nitems: 5", "kind: List\nitems: {a: b}"],
)
def test_object_without_pods_yields_none(text: str) -> None:
    assert pods_of(text) == []


@pytest.mark.parametrize("text", ["{", "a: 2026-13-45", "[" * 5000], ids=["unfinished", "no date", "deep"])
def test_text_that_is_not_yaml_is_rejected(text: str) -> None:
    with pytest.raises(UnreadableManifestError):
        pods_of(text)
