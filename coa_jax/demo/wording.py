"""Holds the templates from which `grammar` writes and parses factbook questions.

The templates are the content of ``wording.toml``, which also explains their slots. Each
tuple contains one template per paraphrase.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Templates = tuple[str, ...]


def load_templates(module: str) -> Any:
    """Reads the TOML file next to a module, given its path; arrays of templates become tuples."""

    def frozen(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: frozen(inner) for key, inner in value.items()}
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return frozen(tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8")))


_FILE = load_templates(__file__)

INVERSE: Templates = _FILE["inverse"]
NEIGHBOUR: Templates = _FILE["neighbour"]
ASK_INVERSE: Templates = _FILE["ask_inverse"]
ASK_NEIGHBOUR: Templates = _FILE["ask_neighbour"]
ASK_BORDERS: Templates = _FILE["ask_borders"]
ASK_LOOKUP: Templates = _FILE["ask_lookup"]
ASK_DENSITY: Templates = _FILE["ask_density"]
ASK_ARITHMETIC: Mapping[str, Templates] = _FILE["ask_arithmetic"]
QUANTITY = "the {noun} {preposition} {entity}"
TEMPLATES = len(ASK_LOOKUP)
