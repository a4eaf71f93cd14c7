"""Chain-of-Agents in JAX: distillation, observation-masked SFT and agentic RL.

The names below are loaded on first use, so `import coa_jax` costs nothing and a command that
needs no model never imports JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coa_jax.model.api import load_model, logits, save_model

__version__ = "0.1.0"

__all__ = ["__version__", "load_model", "logits", "save_model"]

_HOMES = {
    "load_model": "coa_jax.model.api",
    "logits": "coa_jax.model.api",
    "save_model": "coa_jax.model.api",
}


def __getattr__(name: str) -> Any:
    """Imports an exported name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
