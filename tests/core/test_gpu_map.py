"""The placement map: maps of older systems have the same meaning, and every invalid line is named."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from webhook.core.errors import InvalidPodError
from webhook.core.gpu_map import MAX_LINES, MapEntry, parse_map

VALID = {
    "three-ordinals": (
        "0=node1:0,1\n1=node2:2\n2=node3:0,1,2\n",
        {0: ("node1", "0,1"), 1: ("node2", "2"), 2: ("node3", "0,1,2")},
    ),
    "no-final-newline": ("0=node1:0", {0: ("node1", "0")}),
    "blank-lines": ("\n\n0=node1:0\n   \n1=node2:1\n", {0: ("node1", "0"), 1: ("node2", "1")}),
    "spaces-around-the-separators": ("  0 = node1 : 0,1  \n", {0: ("node1", "0,1")}),
    "tab-indent": ("\t0=node1:0\n", {0: ("node1", "0")}),
    "crlf": ("0=node1:0\r\n1=node2:1\r\n", {0: ("node1", "0"), 1: ("node2", "1")}),
    "crlf-and-a-blank-line": ("\r\n0=node1:0\r\n", {0: ("node1", "0")}),
    "gaps-and-any-order": ("7=node2:1\n3=node1:0\n", {3: ("node1", "0"), 7: ("node2", "1")}),
    "two-ordinals-on-one-gpu": ("3=node4:3\n4=node4:3\n", {3: ("node4", "3"), 4: ("node4", "3")}),
    "device-uuids": ("0=node1:GPU-aaaa,GPU-bbbb\n", {0: ("node1", "GPU-aaaa,GPU-bbbb")}),
    "mig-uuid": ("0=node1:MIG-aaaa\n", {0: ("node1", "MIG-aaaa")}),
    "comment": ("# rack 4\n0=node1:0\n", {0: ("node1", "0")}),
    "indented-comment": ("  # rack 4\n0=node1:0\n", {0: ("node1", "0")}),
    "comment-with-an-equals-sign": (
        "0=node1:0\n# 9=old:1\n1=node2:1\n",
        {0: ("node1", "0"), 1: ("node2", "1")},
    ),
    "space-inside-the-list": ("1=node2: 0 , 1 \n", {1: ("node2", "0,1")}),
    "leading-zeros": ("007=node1:0\n", {7: ("node1", "0")}),
    "largest-ordinal": ("2147483647=node1:0\n", {2147483647: ("node1", "0")}),
    "longest-node": (f"0={'n' * 63}:0", {0: ("n" * 63, "0")}),
    "node-with-dots": ("0=gpu-1.rack_2.example:0", {0: ("gpu-1.rack_2.example", "0")}),
    "serial-number": ("0=node1:1650321", {0: ("node1", "1650321")}),
}

INVALID = {
    "no-equals-sign": ("0=node1:0\n1 node2:1\n2=node3:2\n", 2, "syntax"),
    "no-colon": ("0=node1\n1=node2:1\n", 1, "syntax"),
    "ordinal-not-a-number": ("0=node1:0\nx=node2:1\n2=node3:2\n", 2, "ordinal"),
    "trailing-comment": ("0=node1:0 # first\n", 1, "gpu-list"),
    "duplicate-ordinal": ("0=node1:0\n0=node2:3\n", 2, "duplicate-ordinal"),
    "duplicate-with-leading-zeros": ("0=node1:0\n00=node2:3\n", 2, "duplicate-ordinal"),
    "negative-ordinal": ("-1=node1:0\n", 1, "ordinal"),
    "plus-sign": ("+1=node1:0\n", 1, "ordinal"),
    "underscore-in-the-number": ("1_0=node1:0\n", 1, "ordinal"),
    "arabic-digits": ("\u0661=node1:0\n", 1, "ordinal"),
    "ordinal-past-31-bits": ("2147483648=node1:0\n", 1, "ordinal"),
    "no-ordinal": ("=node1:0\n", 1, "ordinal"),
    "empty-gpu-list": ("0=node1:\n", 1, "gpu-list"),
    "empty-node": ("0=:0\n", 1, "node"),
    "node-too-long": (f"0={'n' * 64}:0\n", 1, "node"),
    "node-ends-in-a-dot": ("0=node.:0\n", 1, "node"),
    "node-with-a-slash": ("0=a/b:0\n", 1, "node"),
    "trailing-comma": ("0=node1:0,\n", 1, "gpu-list"),
    "same-gpu-twice": ("0=node1:1,1\n", 1, "gpu-list"),
    "not-a-gpu": ("0=node1:foo\n", 1, "gpu-list"),
    "lower-case-uuid-prefix": ("0=node1:gpu-1\n", 1, "gpu-list"),
    "arabic-gpu": ("0=node1:\u0661\n", 1, "gpu-list"),
    "semicolon-instead-of-a-newline": ("0=node1:0;1=node2:1\n", 1, "gpu-list"),
    "backslash-n-typed-literally": (r"0=node1:0\n1=node2:1", 1, "gpu-list"),
    "old-mac-line-ends": ("0=node1:0\r1=node2:1", 1, "gpu-list"),
    "no-break-space": ("0=node1:0\u00a0\n", 1, "gpu-list"),
    "bad-line-after-crlf": ("0=node1:0\r\n\r\nx\r\n", 3, "syntax"),
}


def parsed(text: str) -> dict[int, tuple[str, str]]:
    return {ordinal: (entry.node, ",".join(entry.gpus)) for ordinal, entry in parse_map(text).items()}


@pytest.mark.parametrize(("text", "entries"), VALID.values(), ids=VALID)
def test_map_is_parsed(text: str, entries: dict[int, tuple[str, str]]) -> None:
    assert parsed(text) == entries


@pytest.mark.defect("binder-2")
@pytest.mark.parametrize(("text", "line", "code"), INVALID.values(), ids=INVALID)
def test_invalid_line_is_named(text: str, line: int, code: str) -> None:
    with pytest.raises(InvalidPodError) as caught:
        parse_map(text)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"line {line}: {code}: ")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("  \n \n", id="white-space"),
        pytest.param("# nothing\n", id="only-a-comment"),
    ],
)
def test_empty_map_is_a_mistake(text: str) -> None:
    with pytest.raises(InvalidPodError, match=r"^empty-map: the map has no entry$"):
        parse_map(text)


def test_all_invalid_lines_are_in_one_error() -> None:
    with pytest.raises(InvalidPodError) as caught:
        parse_map("0=node1:0\nx=node2:1\n\n1=node3\n2=:0\n0=node4:1\n3=node5:,\n")
    assert [" ".join(mistake.split(" ")[:3]) for mistake in caught.value.mistakes] == [
        "line 2: ordinal:",
        "line 4: syntax:",
        "line 5: node:",
        "line 6: duplicate-ordinal:",
        "line 7: gpu-list:",
    ]


def test_error_of_many_invalid_lines_has_bounded_length() -> None:
    with pytest.raises(InvalidPodError) as caught:
        parse_map("x\n" * 200)
    assert len(caught.value.mistakes) == 51
    assert caught.value.mistakes[-1] == "and 150 more lines"


def test_map_with_too_many_lines_is_rejected() -> None:
    with pytest.raises(InvalidPodError, match=f"the map has {MAX_LINES + 1} lines; the maximum is 10000"):
        parse_map("\n" * (MAX_LINES + 1))


@pytest.mark.parametrize("end", ["", "\n"], ids=["no-final-newline", "final-newline"])
def test_a_map_of_ten_thousand_lines_is_read_whole(end: str) -> None:
    entries = parsed("\n".join(f"{n}=node-{n // 8}:{n % 8}" for n in range(MAX_LINES)) + end)
    assert len(entries) == MAX_LINES
    assert entries[9_999] == ("node-1249", "7")


def test_equal_maps_are_parsed_once() -> None:
    text = "0=node1:0\n1=node2:0\n"
    assert parse_map(text) is parse_map("".join(text))


def test_leading_zeros_of_ordinals_are_ignored() -> None:
    assert parsed("00000000007=node1:0") == {7: ("node1", "0")}


@given(st.text(alphabet="0123456789=:,#-+_ \t\r\nGPUMIGabn.\u0661\u00a0", max_size=60))
def test_any_text_is_a_map_or_has_named_invalid_lines(text: str) -> None:
    entries, mistakes = read(text)
    assert bool(entries) is not bool(mistakes)
    shape = re.compile(r"line [1-9][0-9]*: (syntax|ordinal|node|gpu-list|duplicate-ordinal): |empty-map: ")
    assert all(map(shape.match, mistakes))
    for ordinal, entry in entries.items():
        assert 0 <= ordinal < 2**31
        assert entry.node
        assert len(set(entry.gpus)) == len(entry.gpus) > 0


def read(text: str) -> tuple[Mapping[int, MapEntry], tuple[str, ...]]:
    try:
        return parse_map(text), ()
    except InvalidPodError as caught:
        return {}, caught.mistakes
