"""From bytes to text: encodings that are named, guessed, or named wrongly."""

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
# Python knows codecs that are no encodings of pages (punycode, unicode_escape), some of them slow.
_PAGE_CODECS = ("utf-", "iso8859", "latin", "cp", "koi8", "gb", "big5", "euc", "shift", "ascii")


def decode(body: bytes, headers: Mapping[str, str]) -> str:
    """The text of a page.

    The mark at its beginning counts first, then the header, then the page's own word, each only
    if the bytes bear it out; else UTF-8, and where that does not fit either Windows-1252 with
    signs for what it lacks, as browsers do.
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
            # One broken character at the end of a long page does not make it another encoding.
            if codec == "utf-8" and error.start > len(body) - 4:
                return body.decode(codec, "replace")
    return body.decode("cp1252", "replace")


def _codec(name: str) -> str | None:
    try:
        codec = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return "cp1252"  # what pages mean by it
    return codec if codec.startswith(_PAGE_CODECS) else None


def clip(text: str, room: int) -> str:
    """The first ``room`` characters, with a notice where something is left out."""
    if len(text) <= room:
        return text
    return f"{text[:room].rstrip()}\n[... {len(text) - room} characters left out ...]"
