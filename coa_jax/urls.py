"""URLs are refused where a local file or directory belongs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.errors import UserError

_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*)://")
_NAMES_FILES = re.compile(
    r"(?:--|.*\.)(?:workdir|out|output|copy|model|data|validation|tasks|source|traces|files|corpus"
    r"|path|cache)"
)
"""Flags and settings whose values name files."""


def refuse_urls(values: Mapping[str, Any]) -> None:
    """Refuses URLs where a file or directory belongs: only local paths work.

    No text with another scheme than http and https can be opened, whatever its name is.  An http
    address is fine for a service and refused where `_NAMES_FILES` says that a file belongs.

    Args:
        values: flag with its dashes, or dotted setting (``--config.model``) -> value.

    Raises:
        UserError: a value is, or holds, a URL that nothing here can open.
    """
    for name, value in values.items():
        for text in value if isinstance(value, tuple | list) else (value,):
            found = _URL.search(text) if isinstance(text, str) and ".mcp." not in name else None
            if found and (found[1] not in ("http", "https") or _NAMES_FILES.fullmatch(name)):
                raise UserError(
                    f"{name}={text}: no command opens {found[0]} addresses; give a path of this "
                    "machine (download the files, or mount the bucket)"
                )
