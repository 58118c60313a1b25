"""Mutates inputs: values in JSON, and bytes. Deterministic for the given random generator."""

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 1e308, 0.5, "", " ", "0", "-1", "1e3", "all", "void",
    "none", "GPU-a0", "GPU-", "MIG-x/1/0", "\u202e", "\ud83d\ude00", "\x00", "a\nb", "%s", "{{.}}", "../..",
    "x" * 300, "9" * 400, "2026-03-02T12:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", [], {}, [[]],
    [{}], {"": ""}, [None], {"a": None},
)  # fmt: skip
DEEPEST = 3_000
# The maximum size of an input. Most routes read no larger body, and the API server stores no larger object.
LARGEST = 3 * 2**20
LONGEST = 200_000
ASCII = bytes(range(32, 127))


def mutated(seed: bytes, random: Random) -> bytes:
    """The seed with up to eight changes in its JSON, sometimes in its bytes too."""
    text = seed
    try:
        value = json.loads(seed)
    except (ValueError, RecursionError):
        return damaged(text, random)
    try:
        for _ in range(random.choice((0, 1, 1, 2, 3, 8))):
            value = changed(value, random)
        text = json.dumps(value).encode()
    except RecursionError:  # nested deeper than json can encode
        text = b'{"a":' * DEEPEST
    return (damaged(text, random) if random.random() < 0.15 else text)[:LARGEST]


def changed(value: Any, random: Random) -> Any:
    places = list(places_in(value))
    if not places:
        return odd(random)
    holder, key = random.choice(places)
    match random.randrange(7):
        case 0:
            del holder[key]
        case 1:
            _, other = random.choice(places)
            holder[key] = str(other)
        case 2:
            holder[key] = nested(random)
        case 3:
            most = LARGEST // len(json.dumps(holder[key]))
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(min(most, random.choice((0, 2, 5, 200))))]
        case 4 if isinstance(holder, dict):
            holder[str(random.choice(ODD))[:300]] = holder[key]
        case _:
            holder[key] = odd(random)
    return value


def odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(ODD))  # it may be changed later


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of every object and list, except the deepest levels."""
    level = [value]
    for _ in range(40):
        below = []
        for one in level:
            keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
            for key in keys:
                yield one, key
                below.append(one[key])
        level = below


def nested(random: Random) -> Any:
    value = odd(random)
    for _ in range(random.choice((2, 50, 400))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def damaged(text: bytes, random: Random) -> bytes:
    """Changes, cuts, repeats or adds bytes."""
    at, to = sorted((random.randrange(len(text) + 1), random.randrange(len(text) + 1)))
    match random.randrange(6):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + random.randbytes(random.randrange(9)) + text[at:]
        case 2:
            return (text[:to] + text[at:to] * random.choice((1, 3, 50)) + text[to:])[:LONGEST]
        case 3:
            return text[:at] + bytes([random.choice(ASCII)]) + text[at + 1 :]
        case 4:
            return text[:at] + random.choice((b"[", b'{"a":')) * random.choice((10, DEEPEST)) + text[at:]
        case _:
            return text[:at] + text[to:]
