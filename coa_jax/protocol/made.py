"""Protocols that tools bring, kept beside what was written under them.

`protocol_with_tools` makes a protocol in the process that has the tools.  A run that writes
trajectories under one writes ``protocols.json`` beside them, and what reads a file or a model looks
for it there, so that no later command needs the tools.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.protocol.spec import (
    add_protocol,
    get_protocol,
    made_protocols,
    protocol_names,
    protocol_with_tools,
)

FILE = "protocols.json"
_AROUND = 3
"""Folders around that of a file in which that of its run is looked for."""


def write_protocols(folder: str | os.PathLike[str]) -> None:
    """Writes what `protocol_with_tools` has made in this process, if anything, to a folder."""
    path = Path(folder) / FILE
    made = {}
    for protocol in made_protocols():
        described, schemas = dict(protocol.described), dict(protocol.schemas)
        plain = dataclasses.replace(protocol, notes={}, described=described, schemas=schemas)
        if plain == protocol_with_tools(protocol.name, protocol.tools, described, schemas):
            made[protocol.name] = {
                "tools": list(protocol.tools),
                "described": described,
                **({"schemas": schemas} if schemas else {}),
            }
    if made and (not path.exists() or files.read_json_object(path) != made):
        files.write_json(path, made)


def find_protocols(path: str | os.PathLike[str]) -> None:
    """Enters the protocols that stand in a folder or beside it, or in the run that it belongs to.

    A run is a folder with ``config.json``: a file that somebody else has put further up is no part
    of it.  A name that is known keeps its meaning: the tools of this process go first.

    Raises:
        UserError: the file is damaged.
    """
    place = Path(path).expanduser().absolute()
    runs = [
        folder for folder in place.parents[1 : _AROUND + 1] if (folder / "config.json").is_file()
    ]
    for folder in (place, place.parent, *runs):
        if (folder / FILE).is_file():
            _enter(folder / FILE)
            return


def _enter(path: Path) -> None:
    found = files.read_json_object(path)
    for name, made in found.items():
        if name in protocol_names():
            continue
        try:
            described, schemas = dict(made["described"]), dict(made.get("schemas", {}))
            add_protocol(protocol_with_tools(name, tuple(made["tools"]), described, schemas))
            get_protocol(name)
        except (KeyError, TypeError, ValueError, UserError) as error:
            raise UserError(f"{path}: the protocol {name!r} cannot be read: {error}") from error
