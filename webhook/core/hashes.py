"""Lists of hashes in annotations, and what a namespace requires of its pods: their hashes and their injection."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from webhook.core.injection import ALLOWED, Injection, known_injection
from webhook.core.keys import INJECTION, REQUIRED_HASH

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
    """The hashes that a namespace allows its pods, and the injection of its pods with GPUs. A pod may name fewer
    hashes, never others."""

    namespace: str = ""
    hashes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    """What is wrong with the namespace's annotations. If something is, every claim in the namespace is denied."""
    injection: Injection | None = None

    @classmethod
    def of(cls, namespace: str, annotations: Mapping[str, str | None]) -> "HashPolicy":
        text, injection = annotations.get(REQUIRED_HASH.name), annotations.get(INJECTION)
        if text is None and injection is None:
            return NO_HASH_POLICY
        where = f"namespace {namespace}: its annotation"
        hashes, mistakes = ((), []) if text is None else hashes_in(text, f"{where} {REQUIRED_HASH.name}")
        hashes = () if mistakes else hashes
        known = None if injection is None else known_injection(injection)
        if injection is not None and known is None:
            mistakes.append(f"{where} {INJECTION} is {injection[:40]!r}; allowed are {ALLOWED}")
        return cls(namespace, hashes, tuple(mistakes), known)

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
