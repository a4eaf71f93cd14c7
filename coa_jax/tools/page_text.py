"""Extracts the readable text of web pages and PDF files.

The functions run in a process that can be killed.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import re
from typing import Any

from coa_jax.tools.net.text import decode, media_type

READABLE = (
    "text/",
    "application/xhtml+xml",
    "application/xml",
    "application/json",
    "application/pdf",
)
"""Media types from which text can be extracted."""

_PDF_PAGES = 200
_BLANK_LINES = re.compile(r"\n\s*\n+")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]|[\ud800-\udfff]")
_MARKUP = re.compile(r"<(?:!doctype|html|head|body|p|div|article)\b", re.IGNORECASE)


def missing_packages() -> list[str]:
    """Returns the names of those packages that `extract` needs and that are not installed."""
    needed = ("trafilatura", "pypdf", "protego")
    return [name for name in needed if not importlib.util.find_spec(name)]


def extract(body: bytes, headers: dict[str, str], url: str, max_chars: int) -> dict[str, Any]:
    """Extracts the text of a page.

    Args:
        body: body of the HTTP response, after decompression.
        headers: headers of the HTTP response, with names in lower case.
        url: URL of the page, which is the base of relative links.
        max_chars: maximum number of characters of the text.

    Returns:
        A mapping with ``text`` (the text after truncation), ``title``, and ``chars`` (number of
        characters of the whole text). Text and title may be "".
    """
    kind = media_type(headers)
    if kind == "application/pdf" or body.startswith(b"%PDF-"):
        title, text = _pdf(body, max_chars)
    else:
        title, text = _markup(decode(body, headers), kind, url)
    text = _BLANK_LINES.sub("\n\n", _CONTROLS.sub(" ", text)).strip()
    title = _CONTROLS.sub(" ", title).strip()
    return {"title": title, "text": text[:max_chars], "chars": len(text)}


def _markup(content: str, kind: str, url: str) -> tuple[str, str]:
    if kind == "application/json":
        try:
            return "", json.dumps(json.loads(content), ensure_ascii=False, indent=1)
        except (ValueError, RecursionError):
            return "", content
    if kind.startswith("text/") and kind != "text/html" and not _MARKUP.search(content[:4096]):
        return "", content
    import trafilatura

    logging.disable(logging.CRITICAL)
    # By default the library drops short texts, but short pages with figures or lists are useful.
    text = trafilatura.extract(
        content, url=url, include_links=True, include_tables=True, favor_recall=True
    )
    found = trafilatura.extract_metadata(content, default_url=url)
    if not text:
        text = trafilatura.html2txt(content)
    return (found.title or "") if found else "", text or ""


def _pdf(body: bytes, max_chars: int) -> tuple[str, str]:
    import pypdf

    logging.disable(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(body))
    parts: list[str] = []
    for page in reader.pages[:_PDF_PAGES]:
        parts.append(page.extract_text())
        if sum(map(len, parts)) >= max_chars:
            break
    title = reader.metadata.title if reader.metadata else None
    return title or "", "\n\n".join(parts)
