"""Stores protocols that were created for a set of tools, next to the data that uses them.

`protocol_with_tools` creates such a protocol in a process that has the tools. A run that writes
trajectories with the protocol also writes the file ``protocols.json``. Later commands find the file
next to the trajectories or the model, and therefore do not need the tools.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.protocol.spec import (
    add_protocol,
    get_protocol,
    made_protocols,
    protocol_names,
    protocol_with_tools,
)

FILE = "protocols.json"
_AROUND = 3
"""Number of parent folders of a file in which ``protocols.json`` is searched."""


def write_protocols(folder: str | os.PathLike[str]) -> None:
    """Adds the protocols that this process has created to the file ``protocols.json``.

    Only protocols that `protocol_with_tools` created are added. If there are none, no file is
    written. Protocols that an earlier process has added stay in the file, because other data sets
    or evaluations in the same folder need them.

    Args:
        folder: folder in which the file is written.
    """
    path = Path(folder) / FILE
    made: dict[str, dict[str, object]] = {}
    for protocol in made_protocols():
        described, schemas = dict(protocol.described), dict(protocol.schemas)
        plain = dataclasses.replace(protocol, notes={}, described=described, schemas=schemas)
        free = "double_check" not in protocol.roles
        if plain == protocol_with_tools(protocol.name, protocol.tools, described, schemas, free):
            made[protocol.name] = {"tools": list(protocol.tools), "described": described}
            if schemas:
                made[protocol.name]["schemas"] = schemas
            if free:
                made[protocol.name]["free"] = True
    known = durable.read_json_object(path) if path.exists() else {}
    if known | made != known:
        durable.write_json(path, known | made)


def find_protocols(path: str | os.PathLike[str]) -> None:
    """Finds ``protocols.json`` for a file or folder, and registers its protocols.

    The function looks for the file in ``path`` itself, in its parent folder, and in those of the
    next three folders above that contain a ``config.json``, which marks the work directory of a
    run. The first ``protocols.json`` found is used. A protocol whose name is already registered is
    skipped, so that the protocols of this process take precedence.

    Args:
        path: path of trajectories or of a model.

    Raises:
        UserError: the file ``protocols.json`` is damaged.
    """
    absolute = Path(path).expanduser().absolute()
    runs = [
        folder for folder in absolute.parents[1 : _AROUND + 1] if (folder / "config.json").is_file()
    ]
    for folder in (absolute, absolute.parent, *runs):
        if (folder / FILE).is_file():
            _register(folder / FILE)
            return


def _register(path: Path) -> None:
    saved = durable.read_json_object(path)
    for name, made in saved.items():
        if name in protocol_names():
            continue
        try:
            described, schemas = dict(made["described"]), dict(made.get("schemas", {}))
            rules = described, schemas, made.get("free") is True
            add_protocol(protocol_with_tools(name, tuple(made["tools"]), *rules))
            get_protocol(name)
        except (KeyError, TypeError, ValueError, UserError) as error:
            raise UserError(f"{path}: the protocol {name!r} cannot be read: {error}") from error
