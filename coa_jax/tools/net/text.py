"""Decodes the bytes of a page to text, even if the page names no encoding or a wrong encoding."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping

_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Only these codecs are used. Other codecs of Python are slow or are not encodings of pages.
_PAGE_CODECS = ("utf-", "iso8859", "latin", "cp", "koi8", "gb", "big5", "euc", "shift", "ascii")


def media_type(headers: Mapping[str, str]) -> str:
    """Returns the media type that HTTP headers name, in lower case and without parameters.

    The result is "" if the headers name no media type.
    """
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def decode(body: bytes, headers: Mapping[str, str]) -> str:
    """Decodes the text of a page.

    If the page begins with a byte order mark, the mark determines the encoding. Otherwise these
    encodings are tried in order, until the bytes are valid:

    1. the encoding in the HTTP header,
    2. the encoding that the page declares,
    3. UTF-8,
    4. Windows-1252 with replacement characters, as in browsers.

    Args:
        body: bytes of the page.
        headers: HTTP headers of the page, with names in lower case.
    """
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body.decode(name, "replace")
    header_charset = _CHARSET.search(headers.get("content-type", ""))
    written = _META.search(body[:2048])
    candidates = [header_charset[1]] if header_charset else []
    candidates += [written[1].decode("ascii")] if written else []
    for name in (*candidates, "utf-8"):
        codec = _codec(name)
        if codec is None:
            continue
        try:
            return body.decode(codec)
        except UnicodeDecodeError as error:
            # A truncated character at the end of a page does not mean another encoding.
            if codec == "utf-8" and error.start > len(body) - 4:
                return body.decode(codec, "replace")
    return body.decode("cp1252", "replace")


def _codec(name: str) -> str | None:
    try:
        codec = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return "cp1252"  # pages with these names use Windows-1252, as browsers assume
    return codec if codec.startswith(_PAGE_CODECS) else None


def clip_text(text: str, room: int) -> str:
    """Truncates a text to ``room`` characters; a notice says how many characters are left out.

    A text with at most ``room`` characters is returned unchanged.
    """
    if len(text) <= room:
        return text
    return f"{text[:room].rstrip()}\n[... {len(text) - room} characters left out ...]"
