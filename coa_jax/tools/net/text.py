"""Decodes bytes to text, with encodings that are named, guessed, or named wrongly."""

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
# Some Python codecs are not encodings of pages (punycode, unicode_escape), and some are slow.
_PAGE_CODECS = ("utf-", "iso8859", "latin", "cp", "koi8", "gb", "big5", "euc", "shift", "ascii")


def decode(body: bytes, headers: Mapping[str, str]) -> str:
    """Decodes the text of a page.

    The byte order mark takes precedence, then the header, then the page's own declaration, each
    only if the bytes are valid in that encoding. Otherwise the encoding is UTF-8, or Windows-1252
    with replacement characters, as in browsers.
    """
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body.decode(name, "replace")
    named = _CHARSET.search(headers.get("content-type", ""))
    written = _META.search(body[:2048])
    candidates = [named[1]] if named else []
    candidates += [written[1].decode("ascii")] if written else []
    for name in (*candidates, "utf-8"):
        codec = _codec(name)
        if codec is None:
            continue
        try:
            return body.decode(codec)
        except UnicodeDecodeError as error:
            # One broken character at the end of a long page does not mean another encoding.
            if codec == "utf-8" and error.start > len(body) - 4:
                return body.decode(codec, "replace")
    return body.decode("cp1252", "replace")


def _codec(name: str) -> str | None:
    try:
        codec = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return "cp1252"  # pages mean this encoding
    return codec if codec.startswith(_PAGE_CODECS) else None


def clip(text: str, room: int) -> str:
    """Returns the first ``room`` characters, with a notice if something is left out."""
    if len(text) <= room:
        return text
    return f"{text[:room].rstrip()}\n[... {len(text) - room} characters left out ...]"
