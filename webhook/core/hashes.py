"""Lists of hashes in annotations, and the hashes that a namespace allows its pods."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from webhook.core.keys import REQUIRED_HASH

MAX_HASHES = 64
MAX_HASH = 256


def hashes_in(text: str, where: str) -> tuple[tuple[str, ...], list[str]]:
    """The hashes without repetitions, and the mistakes in the list. A claim accepts any of the hashes."""
    hashes = text.split(",")
    mistakes = []
    if len(hashes) > MAX_HASHES:
        mistakes.append(f"{where} has {len(hashes)} hashes; the maximum is {MAX_HASHES}")
    for one in hashes[:MAX_HASHES]:
        if not one:
            mistakes.append(f"{where} has an empty hash: add a value or remove it")
        elif len(one) > MAX_HASH:
            mistakes.append(f"{where}: a hash has at most {MAX_HASH} characters")
        elif not one.isprintable() or " " in one:
            mistakes.append(f"{where}: {one[:80]!r} contains white space")
    return tuple(sorted(set(hashes))), mistakes


@frozen
class HashPolicy:
    """The hashes that a namespace allows its pods. A pod may name fewer, never others."""

    namespace: str = ""
    hashes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    """What is wrong with the namespace's annotation. If something is, every claim in the namespace is denied."""

    @classmethod
    def of(cls, namespace: str, annotations: Mapping[str, str | None]) -> "HashPolicy":
        text = annotations.get(REQUIRED_HASH.name)
        if text is None:
            return NO_HASH_POLICY
        hashes, mistakes = hashes_in(text, f"namespace {namespace}: its annotation {REQUIRED_HASH.name}")
        return cls(namespace, () if mistakes else hashes, tuple(mistakes))

    def restrict(self, own: Sequence[str]) -> tuple[str, ...]:
        """The hashes that a claim with these hashes of its own accepts; none if the namespace allows none of them."""
        if not self.hashes or not own:
            return self.hashes or tuple(own)
        return tuple(one for one in own if one in self.hashes)

    def refusal(self, own: Sequence[str]) -> str:
        """Why the namespace does not allow a pod with these hashes."""
        return (
            f"annotation {REQUIRED_HASH.name} asks for {' or '.join(own)}, but namespace {self.namespace} allows "
            f"only {' or '.join(self.hashes)}: name one of those, or none"
        )


NO_HASH_POLICY = HashPolicy()
