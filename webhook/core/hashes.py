"""Lists of hashes as annotations name them, and what a namespace holds its pods to."""

from collections.abc import Mapping, Sequence

from attrs import frozen

from webhook.core import keys

MAX_HASHES = 64
MAX_HASH = 256


def hashes_in(text: str, where: str) -> tuple[tuple[str, ...], list[str]]:
    """The hashes, any of which will do, each once; and what is wrong with the list."""
    hashes = text.split(",")
    mistakes = []
    if len(hashes) > MAX_HASHES:
        mistakes.append(f"{where} names {len(hashes)} hashes, at most {MAX_HASHES}")
    for one in hashes[:MAX_HASHES]:
        if not one:
            mistakes.append(f"{where} holds an empty hash: name one or take it away")
        elif len(one) > MAX_HASH:
            mistakes.append(f"{where}: a hash has at most {MAX_HASH} characters")
        elif not one.isprintable() or " " in one:
            mistakes.append(f"{where}: {one[:80]!r} holds white space")
    return tuple(sorted(set(hashes))), mistakes


@frozen
class HashPolicy:
    """The hashes that a namespace holds the claims of its pods to: a pod may narrow them, never widen them."""

    namespace: str = ""
    hashes: tuple[str, ...] = ()
    mistakes: tuple[str, ...] = ()
    """What is wrong with the namespace's annotation. Nobody knows then what its pods are held to."""

    @classmethod
    def of(cls, namespace: str, annotations: Mapping[str, str | None]) -> "HashPolicy":
        text = annotations.get(keys.REQUIRED_HASH.name)
        if text is None:
            return NO_HASH_POLICY
        hashes, mistakes = hashes_in(text, f"namespace {namespace}: its annotation {keys.REQUIRED_HASH.name}")
        return cls(namespace, () if mistakes else hashes, tuple(mistakes))

    def restrict(self, own: Sequence[str]) -> tuple[str, ...]:
        """What a pod with these hashes of its own has to be held to; nothing if they are all beside the namespace's."""
        if not self.hashes or not own:
            return self.hashes or tuple(own)
        return tuple(one for one in own if one in self.hashes)

    def refusal(self, own: Sequence[str]) -> str:
        """Why a pod with such hashes is refused."""
        return (
            f"annotation {keys.REQUIRED_HASH.name} asks for {' or '.join(own)}, and namespace {self.namespace} holds "
            f"its pods to {' or '.join(self.hashes)}: a pod may choose among those, or name none"
        )


NO_HASH_POLICY = HashPolicy()
