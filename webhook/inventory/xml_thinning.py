"""Takes out of an XML text what nobody will ask its tree for: the tree is most of what reading costs.

It looks for tags among bytes; that they are where they seem to be is for its caller to know.
"""

import re
from collections.abc import Set
from typing import Final

# A start tag without attributes, and another one: an element of elements.
SECTION: Final = re.compile(rb"<(\w++)>\s*+<(?!/)")
AFTER_A_NAME: Final = b"> /\t\r\n"
IN_ITS_PLACE: Final = b"<_/>"


def thinned(text: bytes, root_at: int, ways: Set[bytes]) -> bytes:
    """The same text with an empty element in the place of each section whose name is not among `ways`.

    These are the names of all that will be asked for and of all that it stands in, so it stands in no other section.
    The text is well-formed, has its tags in ASCII, and from its root on nothing else that begins with `<`: no comments,
    CDATA or processing instructions. From a section on that has another of its name inside, all is kept: its end cannot
    be told by its name, and nothing is read twice.
    """
    kept: list[bytes] = []
    done, at = 0, root_at
    while (section := SECTION.search(text, at)) is not None:
        at, name = section.end() - 1, section[1]
        if name in ways:
            continue
        end = find_tag(text, b"</" + name, at, len(text))
        if find_tag(text, b"<" + name, at, end) >= 0:
            break
        kept += text[done : section.start()], IN_ITS_PLACE
        done = at = text.index(b">", end) + 1
    return b"".join((*kept, text[done:]))


def find_tag(text: bytes, tag: bytes, start: int, end: int) -> int:
    """Where the next tag begins like this, and its name ends like this; -1 if none does."""
    at = text.find(tag, start, end)
    while at >= 0 and text[at + len(tag)] not in AFTER_A_NAME:
        at = text.find(tag, at + 1, end)
    return at
