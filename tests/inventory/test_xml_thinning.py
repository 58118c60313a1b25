"""Which sections are removed from an XML text, and which stay."""

import time

import pytest

from webhook.inventory.xml_thinning import thinned

WAYS = {b"log", b"gpu", b"pci", b"serial"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        pytest.param(b"<gpu><clocks><max/>9</clocks></gpu>", b"<gpu><_/></gpu>", id="a-section"),
        pytest.param(b"<gpu><clocks>\n\t<max/>\n</clocks>\n</gpu>", b"<gpu><_/>\n</gpu>", id="on-separate-lines"),
        pytest.param(
            b"<a><x/></a><gpu><b><x/></b></gpu><a><y/></a>", b"<_/><gpu><_/></gpu><_/>", id="several-of-one-name"
        ),
        pytest.param(b"<gpu><a><b><c/></b></a></gpu>", b"<gpu><_/></gpu>", id="sections-in-a-section"),
        pytest.param(b"<gpu><pci><link><x/></link></pci></gpu>", b"<gpu><pci><_/></pci></gpu>", id="in-a-kept-section"),
        pytest.param(b"<a><serial>1</serial></a><serial>2</serial>", b"<_/><serial>2</serial>", id="kept-name-inside"),
        pytest.param(b"<serial>1<a><b/></a>2</serial>", b"<serial>1<_/>2</serial>", id="texts-stay-separate"),
        pytest.param(b"<a><a_b>1</a_b></a><gpu/>", b"<_/><gpu/>", id="a-name-with-the-same-prefix"),
        pytest.param(b"<a><b/><a.b/><a-b/><a:b/></a><gpu/>", b"<_/><gpu/>", id="names-with-other-suffixes"),
        pytest.param(b"<a><b/></a\r\n\t ><gpu/></a>", b"<_/><gpu/></a>", id="a-blank-in-the-end-tag"),
        pytest.param(b"<a>9</a><b/><c></c>", b"<a>9</a><b/><c></c>", id="no-section"),
        pytest.param(b'<a x="1"><b/></a>', b'<a x="1"><b/></a>', id="with-an-attribute"),
        pytest.param(b"<a>9<b/></a>", b"<a>9<b/></a>", id="that-begins-with-a-text"),
        pytest.param(
            b"<b><c/></b><a><a><c/></a></a><b><c/></b>",
            b"<_/><a><a><c/></a></a><b><c/></b>",
            id="in-a-section-of-the-same-name",
        ),
        pytest.param(b"<a><b/><a/></a>", b"<a><b/><a/></a>", id="empty-in-a-section-of-the-same-name"),
        pytest.param(
            b"<a><b/><a\tx='1'/></a>", b"<a><b/><a\tx='1'/></a>", id="with-an-attribute-in-a-section-of-the-same-name"
        ),
    ],
)
def test_other_sections_are_removed_completely(text: bytes, left: bytes) -> None:
    assert thinned(text, 0, WAYS) == left


def test_content_before_the_root_stays() -> None:
    before = b'<!DOCTYPE log SYSTEM "<a><b/></a>">'
    assert thinned(before + b"<log><a><b/></a></log>", len(before), WAYS) == before + b"<log><_/></log>"


MANY = 50_000


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"".join(b"<a%d><b/></a%d>" % (k, k) for k in range(MANY)), id="sections"),
        pytest.param(b"".join(b"<gpu><a><b/></a></gpu>" for _ in range(MANY)), id="sections-in-others"),
        pytest.param(b"<a><b/>" + b"<ab/>" * MANY + b"</a>", id="names-with-the-same-prefix"),
        pytest.param(
            b"".join(b"<a%d>" % k for k in range(MANY))
            + b"".join(b"<a%d/>" % k for k in range(MANY))
            + b"".join(b"</a%d>" % k for k in reversed(range(MANY))),
            id="deep-in-sections-of-the-same-name",
        ),
        pytest.param(b"<log>" * MANY + b"</log>" * MANY, id="deep"),
        pytest.param(b"<a>" + b" " * 40 * MANY + b"9</a>", id="blanks"),
    ],
)
def test_thinning_time_is_linear(text: bytes) -> None:
    began = time.process_time()
    thinned(text, 0, WAYS)
    assert time.process_time() - began < 2.0
