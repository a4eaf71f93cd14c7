"""Extracts the readable text of web pages and PDF files.

`extract` runs in the sandbox (`coa_jax.tools.isolated`), so this module imports nothing of
`coa_jax`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re
from typing import Any

READABLE = (
    "text/",
    "application/xhtml+xml",
    "application/xml",
    "application/json",
    "application/pdf",
)
"""Media types from which text can be extracted."""

PACKAGES = ("trafilatura", "lxml", "lxml_html_clean", "pypdf")
"""Distributions that `extract` imports."""

_PDF_PAGES = 200
_ATTRIBUTES = 10_000  # maximum number in a tag; the time of libxml2 is quadratic in them
_BLANK_LINES = re.compile(r"\n\s*\n+")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]|[\ud800-\udfff]")
# As in the standard of HTML: ``>`` in a quoted value does not end a tag, and no space is needed
# between attributes. Possessive quantifiers keep the time linear.
_ATTRIBUTE = r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+"?|'[^']*+'?|[^\s>]*+))?+"""
_NEXT_ATTRIBUTE = re.compile(_ATTRIBUTE, re.ASCII)
_COMMENT = r"<!--(?:-?>|.*?(?:--!?>|\Z))|<(?:[!?]|/(?![a-z]))[^>]*"
_PLAIN_TEXT = "script|style|title|textarea|xmp|iframe|noembed|noframes"  # hold no tags
_TAG = re.compile(
    rf"{_COMMENT}|<(?:({_PLAIN_TEXT})(?=[\s/>])|/?[a-z][^\s/>]*+)"
    rf"(?P<attributes>(?:{_ATTRIBUTE})*+)(?(1).*?(?=</\1[\s/>]|\Z))",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_MARKUP = re.compile(r"<(?:!doctype|html|head|body|p|div|article)\b", re.IGNORECASE)


def missing_packages() -> list[str]:
    """Returns the names of those packages that `crawl_page` needs and that are not installed."""
    needed = ("trafilatura", "pypdf", "protego")
    return [name for name in needed if not importlib.util.find_spec(name)]


def is_pdf(body: bytes, kind: str) -> bool:
    """Returns whether a body with a media type is a PDF file."""
    return kind == "application/pdf" or body.startswith(b"%PDF-")


def extract(content: str | bytes, kind: str, url: str, max_chars: int) -> dict[str, Any]:
    """Extracts the text of a page.

    Args:
        content: the decoded body of the HTTP response, or the bytes of a PDF file.
        kind: media type of the page, such as "text/html"; "" if unknown.
        url: URL of the page, which is the base of relative links.
        max_chars: maximum number of characters of the text.

    Returns:
        A mapping with ``text`` (the text after truncation), ``title``, and ``chars`` (number of
        characters of the whole text). Text and title may be "".

    Raises:
        ValueError: an HTML tag has too many attributes.
        Exception: trafilatura or pypdf failed, with an exception of any type.
    """
    if isinstance(content, bytes):
        title, text = _pdf(content, max_chars)
    else:
        title, text = _markup(content, kind, url)
    text = _BLANK_LINES.sub("\n\n", _CONTROLS.sub(" ", text)).strip()
    title = _CONTROLS.sub(" ", title).strip()
    return {"title": title, "text": text[:max_chars], "chars": len(text)}


def most_attributes(content: str) -> int:
    """Returns the largest number of attributes that a single tag of an HTML page has."""
    tags = (match["attributes"] or "" for match in _TAG.finditer(content))
    return max((len(_NEXT_ATTRIBUTE.findall(tag)) for tag in tags), default=0)


def _markup(content: str, kind: str, url: str) -> tuple[str, str]:
    if kind == "application/json":
        try:
            return "", json.dumps(json.loads(content), ensure_ascii=False, indent=1)
        except (ValueError, RecursionError):
            return "", content
    if kind.startswith("text/") and kind != "text/html" and not _MARKUP.search(content[:4096]):
        return "", content
    if most_attributes(content) > _ATTRIBUTES:
        raise ValueError(f"a tag has more than {_ATTRIBUTES} attributes")
    import trafilatura

    _silence("trafilatura", "htmldate", "courlan")
    # By default the library drops short texts, but short pages with figures or lists are useful.
    text = trafilatura.extract(
        content, url=url, include_links=True, include_tables=True, favor_recall=True
    )
    metadata = trafilatura.extract_metadata(content, default_url=url)
    if not text:
        text = trafilatura.html2txt(content)
    return (metadata.title or "") if metadata else "", text or ""


def _pdf(body: bytes, max_chars: int) -> tuple[str, str]:
    import pypdf

    _silence("pypdf")
    reader = pypdf.PdfReader(io.BytesIO(body))
    parts: list[str] = []
    for page in reader.pages[:_PDF_PAGES]:
        parts.append(page.extract_text())
        if sum(map(len, parts)) >= max_chars:
            break
    title = reader.metadata.title if reader.metadata else None
    return title or "", "\n\n".join(parts)


def _silence(*packages: str) -> None:
    """Keeps what the packages of a parser log about a page out of the standard error."""
    for package in packages:
        logging.getLogger(package).setLevel(logging.CRITICAL + 1)
