"""Stores protocols made from tools next to the data that was written with them.

`protocol_with_tools` makes a protocol in the process that has the tools. A run that writes
trajectories under such a protocol also writes ``protocols.json``. Readers of a trajectory file or
of a model look for ``protocols.json`` there, so later commands do not need the tools.
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
"""Parent folders of a file that are searched for its run."""


def write_protocols(folder: str | os.PathLike[str]) -> None:
    """Writes the protocols that `protocol_with_tools` made in this process to ``protocols.json``.

    No file is written if there are none.
    """
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
    """Registers the protocols of the ``protocols.json`` in a folder, beside it, or in its run.

    The folder of a run contains ``config.json``. The search stops there: files further up do not
    belong to the run. A name that is already registered keeps its protocol, so the tools of this
    process take precedence.

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
