"""The card of a policy, ``agent.json``, which says how the policy was prompted in training.

The card is a file of the model's directory. The model code stores and copies the card without
interpreting it; `coa_jax.tasks.prompts` writes and reads its content.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coa_jax import files
from coa_jax.protocol import find_protocols
from coa_jax.storage import model_folder

CARD = "agent.json"


def read_card(path: str | Path) -> dict[str, Any]:
    """Reads the card of a model directory; returns {} if the directory has no card.

    If the model's training run stored definitions of protocols in the directory, the function also
    registers these protocols.

    Args:
        path: the model: a local path, a URL, or an id of the Hugging Face Hub.

    Raises:
        UserError: the card cannot be read, or is not a JSON object.
    """
    folder = model_folder(path, weights=False)
    find_protocols(folder)
    file = folder / CARD
    return files.read_json_object(file) if file.is_file() else {}
