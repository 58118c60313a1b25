"""What the author of a pod may have meant: hashes, labels and keys that are close to those that exist."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Protocol

from webhook.core import keys
from webhook.core.claim import Claim
from webhook.core.pod import Pod

# A comparison takes up to half a millisecond, and reviews wait meanwhile: only so many names are compared, of so many
# keys that somebody has written.
MOST_COMPARED = 30
MOST_KEYS = 64
MOST_ASKED = 4
MOST_TOLD = 8
LONGEST = 96
CUTOFF = 0.75

OWN_KEYS = tuple(sorted(keys.INPUT_NAMES | {keys.OPT_IN.name}))


class KnownValues(Protocol):
    """What there is to be asked for: a fleet, or what somebody has listed."""

    @property
    def proven_hashes(self) -> Mapping[str, int]: ...

    @property
    def device_labels(self) -> Collection[str]: ...


def near_misses(pod: Pod, claim: Claim | None, known: KnownValues) -> Iterator[str]:
    """Sentences for a person, each about one thing in the pod that matches nothing."""
    yield from near_keys([*pod.annotations, *pod.labels])
    if claim is not None:
        yield from near_hashes(claim.record.hashes, known.proven_hashes)
        yield from near_labels(claim.record.requirements, known.device_labels)


def near_hashes(asked: Collection[str], proven: Mapping[str, int]) -> Iterator[str]:
    """Nothing if a node has proven one of them; else what is meant, if that can be told, and what has been proven."""
    if not asked or any(one in proven for one in asked):
        return
    for one in islice(asked, MOST_ASKED):
        found = closest(one, proven)
        if found is not None:
            yield f"no node has proven {one}: did you mean {found}?"
    told = [f"{one} by {counted(number)}" for one, number in sorted(proven.items(), key=lambda p: (-p[1], p[0]))]
    if not told:
        yield "no node has fresh evidence at this moment"
        return
    others = f" and {len(told) - MOST_TOLD} others" if len(told) > MOST_TOLD else ""
    yield f"proven at this moment: {', '.join(told[:MOST_TOLD])}{others}"


def near_labels(asked: Iterable[str], known: Collection[str]) -> Iterator[str]:
    for one in islice((one for one in asked if one not in known), MOST_ASKED):
        found = closest(one, known)
        yield f"no GPU has the label {one}" + (f": did you mean {found}?" if found else "")


def near_keys(found: Iterable[str]) -> Iterator[str]:
    """A misspelt key asks for nothing, and nobody would say so."""
    known = keys.INPUT_NAMES | keys.OUTPUT_NAMES | keys.HINT_NAMES | {keys.WOKEN_AT, keys.WAITING, keys.QUEUED_LABEL}
    named = islice((key for key in found if key not in known and names_us(key)), MOST_KEYS)
    odd = (key for key in named if looks_like_ours(key))
    for key in islice(odd, MOST_ASKED):
        meant = closest(key, OWN_KEYS)
        yield f"{key} means nothing to gpuwarden" + (f": did you mean {meant}?" if meant else "")


def names_us(key: str) -> bool:
    return key.casefold().startswith(keys.OURS) and not key.startswith(keys.REQUIREMENT_PREFIX)


def looks_like_ours(key: str) -> bool:
    """Of another domain, only if it is close to one of ours: there may be others of such a name."""
    return key.startswith(f"{keys.DOMAIN}/") or closest(key, OWN_KEYS) is not None


def closest(word: str, known: Collection[str]) -> str | None:
    """The one that differs in case only, or in a prefix like `sha256:`; else the most similar of the first few."""
    same = next((one for one in known if plain(one) == plain(word)), None)
    if same is not None or len(word) > LONGEST:
        return same
    compared = [one for one in islice(known, MOST_COMPARED) if len(one) <= LONGEST]
    return next(iter(get_close_matches(word, compared, n=1, cutoff=CUTOFF)), None)


def plain(word: str) -> str:
    return word.casefold().rpartition(":")[2]


def counted(number: int) -> str:
    return f"{number} node{'' if number == 1 else 's'}"
