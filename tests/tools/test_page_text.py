"""The number of attributes in the tags of a page, on which the time of its parser depends."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.tools.page_text import extract, most_attributes

html = pytest.importorskip("lxml.html")


def parsed(page):
    """The largest number of attributes of an element, as libxml2 reads the page."""
    tree = html.document_fromstring(page)
    return max(len(element.attrib) for element in tree.iter() if isinstance(element.tag, str))


VALUES = st.text(alphabet="ab <>=/'&;!-\n", max_size=8)


@given(st.lists(st.tuples(VALUES, st.sampled_from([" ", "\n", "/", " /", ""])), max_size=9))
def test_attributes_are_counted_whatever_their_quoted_values_hold(values):
    tag = "".join(f'a{i}="{value}"{end}' for i, (value, end) in enumerate(values))
    page = f"<html><body><p {tag}>text > <b>more</b></p></body></html>"
    assert most_attributes(page) == parsed(page) == len(values)


PARTS = ["<p", "<b ", "</p", "</", " a", " b", " c=d", "'", '"', " e='", ' f="', ">", " ", "/", "="]
PARTS += ["<!--", "-->", "--!>", "<!-->", "<?x ", "<!d ", "<![CDATA[", "]]>", "\n", "x"]
for name in ("script", "style", "title", "textarea", "xmp", "iframe"):
    PARTS += [f"<{name}>", f"</{name}>"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), min_size=3, max_size=14))
def test_no_tag_has_more_attributes_than_are_counted(parts):
    page = f"<html><body>{''.join(parts)}>"
    assert most_attributes(page) >= parsed(page)


@pytest.mark.parametrize(
    "page",
    [
        '<!-- <p a=" --><p {}>text</p>',
        "<script>x = '<p a=\"'</script><p {}>text</p>",
        "<STYLE type='a>b'>p::after {{ content: \"<p a='\" }}</style><p {}>text</p>",
        "<title><p a=\"</title><p b='\"' {}>text</p>",
        "<p x='>' {}>text</p>",
        "<!--><p {}>text</p> -->",
        '<? a="><p {}>text</p>',
        "</p a='<b'><p {}>text</p>",
        "<p x=<> <p {}>text</p>",
    ],
)
def test_a_page_with_too_many_attributes_is_refused(page):
    many = "".join(f'a{i}="1"' for i in range(10_001))
    with pytest.raises(ValueError, match=" 10000 attributes"):
        extract(f"<html><body>{page.format(many)}</body></html>", "text/html", "http://a/", 1000)


def test_long_comments_scripts_and_values_are_no_attributes():
    words = "word " * 20_000
    page = f"<!-- {words} --><script>{words}</script><p title='{words}'>A text of a page.</p>"
    page = f"<html><body>{page}</body></html>"
    assert "A text of a page." in extract(page, "text/html", "http://a/", 1000)["text"]


@pytest.mark.parametrize(
    "part",
    ["<p a='", '<p a="', "<p/a=", "<p", "<p a", "<!--", "<script", "<script>", "= ", "<p =", "a="],
)
def test_the_count_takes_linear_time(part):
    start = time.process_time()
    most_attributes("<p " + part * (600_000 // len(part)))
    assert time.process_time() - start < 20
