"""Suggestions for the author of a pod: existing hashes, labels and keys that are similar to those in the pod."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Protocol

from webhook.core import claim_keys, keys
from webhook.core.claim import Claim
from webhook.core.pod import Pod

# One comparison takes up to half a millisecond while reviews wait, so their number is bounded.
MAX_COMPARED = 30
MAX_KEYS = 64
MAX_SUGGESTIONS = 4
MAX_LISTED = 8
MAX_LENGTH = 96
CUTOFF = 0.75

OWN_KEYS = tuple(sorted(claim_keys.INPUT_NAMES | {keys.OPT_IN.name}))


class KnownValues(Protocol):
    """The hashes and labels for which a pod can ask."""

    @property
    def proven_hashes(self) -> Mapping[str, int]: ...

    @property
    def device_labels(self) -> Collection[str]: ...


def near_misses(pod: Pod, claim: Claim | None, known: KnownValues) -> Iterator[str]:
    """One sentence for each key, hash or label in the pod that matches nothing."""
    yield from near_keys([*pod.annotations, *pod.labels])
    if claim is not None:
        yield from near_hashes(claim.record.hashes, known.proven_hashes)
        yield from near_labels(claim.record.requirements, known.device_labels)


def near_hashes(asked: Collection[str], proven: Mapping[str, int]) -> Iterator[str]:
    """Empty if a node has proven one of the hashes; else similar hashes, and those that are proven."""
    if not asked or any(one in proven for one in asked):
        return
    for one in islice(asked, MAX_SUGGESTIONS):
        found = closest(one, proven)
        if found is not None:
            yield f"no node has proven {one}: did you mean {found}?"
    listed = [f"{one} by {counted(number)}" for one, number in sorted(proven.items(), key=lambda p: (-p[1], p[0]))]
    if not listed:
        yield "no node has fresh evidence now"
        return
    others = f" and {len(listed) - MAX_LISTED} others" if len(listed) > MAX_LISTED else ""
    yield f"proven now: {', '.join(listed[:MAX_LISTED])}{others}"


def near_labels(asked: Iterable[str], known: Collection[str]) -> Iterator[str]:
    for one in islice((one for one in asked if one not in known), MAX_SUGGESTIONS):
        found = closest(one, known)
        yield f"no GPU has the label {one}" + (f": did you mean {found}?" if found else "")


def near_keys(found: Iterable[str]) -> Iterator[str]:
    """A misspelt key has no effect, and no other message names it."""
    named = islice((key for key in found if key not in claim_keys.KNOWN_NAMES and names_us(key)), MAX_KEYS)
    unknown = (key for key in named if looks_like_ours(key))
    for key in islice(unknown, MAX_SUGGESTIONS):
        similar = closest(key, OWN_KEYS)
        yield f"gpuwarden does not know the key {key}" + (f": did you mean {similar}?" if similar else "")


def names_us(key: str) -> bool:
    return key.casefold().startswith(keys.OURS) and not key.startswith(claim_keys.REQUIREMENT_PREFIX)


def looks_like_ours(key: str) -> bool:
    """Whether the key has our domain or is similar to one of our keys: other products may have similar domains."""
    return key.startswith(f"{keys.DOMAIN}/") or closest(key, OWN_KEYS) is not None


def closest(word: str, known: Collection[str]) -> str | None:
    """The name that differs in case only, or in a prefix like `sha256:`; else the most similar of the first few."""
    same = next((one for one in known if plain(one) == plain(word)), None)
    if same is not None or len(word) > MAX_LENGTH:
        return same
    compared = [one for one in islice(known, MAX_COMPARED) if len(one) <= MAX_LENGTH]
    return next(iter(get_close_matches(word, compared, n=1, cutoff=CUTOFF)), None)


def plain(word: str) -> str:
    return word.casefold().rpartition(":")[2]


def counted(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"
