"""The card of a policy, ``agent.json``, which says how the policy was prompted in training.

The card is a file of the model's directory. The model code stores and copies the card without
interpreting it; `coa_jax.tasks.prompts` writes and reads its content.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.protocol import find_protocols
from coa_jax.storage import model_folder

CARD = "agent.json"
_PROTOCOL = re.compile(r"([\w-]+(:[\w.:-]+)?)?")
"""Pattern of the name of a protocol with its level or format; "" for no protocol."""


def read_card(path: str | Path) -> dict[str, Any]:
    """Reads a model's card, ``agent.json``, which says how the policy was prompted in training.

    The result is {} if the model has no card. One of the card's fields is ``protocol``. If the
    model's training run stored definitions of protocols beside the card, the function also
    registers these protocols.

    Args:
        path: the model: a local path, a URL, or an id of the Hugging Face Hub.

    Raises:
        UserError: the card cannot be read, is not a JSON object, or its field ``protocol`` is not a
            name.
    """
    folder = model_folder(path, weights=False)
    find_protocols(folder)
    file = folder / CARD
    card = durable.read_json_object(file) if file.is_file() else {}
    name = card.get("protocol", "")
    if not isinstance(name, str) or not _PROTOCOL.fullmatch(name):
        raise UserError(f"{file}: the field 'protocol' must be the name of a protocol: correct it")
    return card
