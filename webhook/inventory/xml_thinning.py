"""Removes sections that are not needed from an XML text, because building the tree is most of the cost of parsing.

It searches the bytes for tags. The caller ensures that every match is a tag.
"""

import re
from collections.abc import Set
from typing import Final

# A start tag without attributes, followed by another start tag: an element that contains elements.
SECTION: Final = re.compile(rb"<(\w++)>\s*+<(?!/)")
NAME_END: Final = b"> /\t\r\n"
PLACEHOLDER: Final = b"<_/>"


def thinned(text: bytes, root_at: int, kept_names: Set[bytes]) -> bytes:
    """The text with an empty element in place of each section whose name is not among `kept_names`.

    `kept_names` are the names of all elements to be read and of all their ancestors, so no removed section contains
    one. The text must be well-formed, have its tags in ASCII, and contain no other markup after its root: no comments,
    CDATA or processing instructions. If a section contains another one of the same name, everything from there on is
    kept: its end cannot be found by name, and no byte is searched twice.
    """
    kept: list[bytes] = []
    done, at = 0, root_at
    while (section := SECTION.search(text, at)) is not None:
        at, name = section.end() - 1, section[1]
        if name in kept_names:
            continue
        end = find_tag(text, b"</" + name, at, len(text))
        if find_tag(text, b"<" + name, at, end) >= 0:
            break
        kept += text[done : section.start()], PLACEHOLDER
        done = at = text.index(b">", end) + 1
    return b"".join((*kept, text[done:]))


def find_tag(text: bytes, tag: bytes, start: int, end: int) -> int:
    """The position of the next tag with this start and a complete name; -1 if there is none."""
    at = text.find(tag, start, end)
    while at >= 0 and text[at + len(tag)] not in NAME_END:
        at = text.find(tag, at + 1, end)
    return at
