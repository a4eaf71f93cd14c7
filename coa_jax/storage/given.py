"""Checks of the places that a command line gives, before the command does anything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.errors import UserError
from coa_jax.storage.places import check, is_url

_SCHEME = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*)://")
_PLACE = re.compile(r"(?:\w+:)?(?P<url>[A-Za-z][A-Za-z0-9+.-]*://.*)")
"""A URL, perhaps behind the name of a reader, as in ``aime:gs://bucket/aime.jsonl``."""

_NAMES_FILES = re.compile(
    r"(?:--|.*\.)(?:workdir|replay|out|output|copy|model|policy|data|validation|tasks|source|traces"
    r"|files|corpus|path|folder|pass_rates|private_tests|prompt_style)"
)
"""Flags and settings whose values name files."""
_LOCAL_ONLY = re.compile(r".*(?:\.store\.path|\.cache)|--copy")
"""Those of files that several processes write at a time, and of files for an editor."""


def check_places(values: Mapping[str, Any], *, ask: bool = True) -> None:
    """Refuses addresses that cannot be opened, and asks the store of every other one.

    An http address is fine for a service and refused where a file belongs.

    Args:
        values: flag with its dashes, or dotted setting (``--config.model``) -> value.
        ask: whether stores are asked.

    Raises:
        UserError: a value is, or holds, an address that nothing here can open, or its store
            refuses; see `places.check`.
    """
    for name, value in values.items():
        if ".mcp." in name:
            continue
        for text in value if isinstance(value, tuple | list) else (value,):
            for place in str(text).split(",") if isinstance(text, str) else ():
                _check_place(name, place.strip(), ask)


def _check_place(name: str, place: str, ask: bool) -> None:
    found = _SCHEME.search(place)
    if found is None:
        return
    names_files = _NAMES_FILES.fullmatch(name) is not None
    if found[1] in ("http", "https") and not names_files:
        return
    whole = _PLACE.fullmatch(place)
    if whole is None or not whole["url"].startswith(found[0]):
        raise UserError(f"{name}={place}: {found[0]} stands in the middle; mend the address")
    try:
        is_url(whole["url"])  # refuses a scheme that nothing opens
        if _LOCAL_ONLY.fullmatch(name) or not names_files:
            raise UserError(f"{place}: only a local path will do here")
        if ask:
            check(whole["url"])
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
