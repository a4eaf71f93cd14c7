"""Checks the paths and URLs of a command line before the command does anything else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coa_jax.errors import UserError
from coa_jax.storage.file_systems import check_reachable, is_url

_SCHEME = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*)://")
_PLACE = re.compile(r"(?:\w+:)?(?P<url>[A-Za-z][A-Za-z0-9+.-]*://.*)")
"""Matches a URL, also after the name of a task source, as in ``aime:gs://bucket/aime.jsonl``."""

_NAMES_FILES = re.compile(
    r"(?:--|.*\.)(?:workdir|replay|out|output|page|copy|model|policy|data|validation|tasks|source|traces"
    r"|files|corpus|path|folder|cache|pass_rates|records|private_tests|prompt_style"
    r"|adapters\.[^.]+)"
)
"""Matches names of flags and settings whose values are paths or URLs of files."""
_LOCAL_ONLY = ("--copy",)
"""Flags that allow only local paths, because a person edits the files."""


def check_places(values: Mapping[str, Any], *, ask: bool = True) -> None:
    """Checks every URL among the values of flags and settings.

    An http URL is allowed where a setting names a service, but not where it names a file.

    Args:
        values: maps the name of a flag or setting, such as ``--workdir`` or ``--config.model``, to
            its value.
        ask: whether to send a request to each store, see `file_systems.check_reachable`.

    Raises:
        UserError: a value contains a URL of an unsupported scheme, or the store of a URL refuses
            access.
    """
    for name, value in values.items():
        if ".mcp." in name:
            continue
        for text in value if isinstance(value, tuple | list) else (value,):
            for address in str(text).split(",") if isinstance(text, str) else ():
                _check_place(name, address.strip(), ask)


def _check_place(name: str, address: str, ask: bool) -> None:
    scheme = _SCHEME.search(address)
    if scheme is None:
        return
    names_files = _NAMES_FILES.fullmatch(name) is not None
    if scheme[1] in ("http", "https") and not names_files:
        return
    match = _PLACE.fullmatch(address)
    if match is None or not match["url"].startswith(scheme[0]):
        raise UserError(f"{name}={address}: a URL must begin with {scheme[0]}; correct the address")
    try:
        is_url(match["url"])  # raises an error if the scheme is not supported
        if name in _LOCAL_ONLY or not names_files:
            raise UserError(f"{address}: this setting needs a local path")
        if ask:
            check_reachable(match["url"])
    except UserError as error:
        raise type(error)(f"{name}: {error}") from error
