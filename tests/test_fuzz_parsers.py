"""The kept inputs of `make fuzz`: each is read, or refused in a way that its parser names."""

from random import Random

import pytest

from scripts.fuzz.__main__ import tried
from scripts.fuzz.corpus import seeds
from scripts.fuzz.mutations import mutated
from scripts.fuzz.parsers import PARSERS, Parser


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_every_kept_input_is_read_or_refused_by_name(parser: Parser) -> None:
    assert [wrong for content in seeds(parser.seeds) for wrong in tried(parser, content)] == []


def test_a_seed_gives_the_same_inputs_again() -> None:
    first, again = (
        [mutated(one, random) for one in seeds("reviews") for _ in range(5)] for random in (Random(7), Random(7))
    )
    assert first == again
    assert len(set(first)) > len(first) // 2


def test_a_parser_that_raises_what_it_does_not_name_is_a_finding() -> None:
    def broken(content: bytes) -> object:
        raise KeyError(content)

    wrong = tried(Parser("broken", broken, "hashes"), b"x", keeps=False)
    assert len(wrong) == 1
    assert wrong[0].startswith("broken: KeyError")
