"""Chain-of-Agents in JAX: distillation, observation-masked SFT and agentic RL.

The package imports each exported name on its first use. So `import coa_jax` is fast, and commands
that need no model never import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coa_jax.api import (
        Agent,
        Evaluation,
        Trained,
        create_policy,
        evaluate_policy,
        load_config,
        load_policy,
        train_rl,
        train_sft,
    )
    from coa_jax.model.api import load_model, logits, save_model
    from coa_jax.report.notebook import failure_of, show, show_tokens
    from coa_jax.report.run import read_run

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "Evaluation",
    "Trained",
    "__version__",
    "create_policy",
    "evaluate_policy",
    "failure_of",
    "load_config",
    "load_model",
    "load_policy",
    "logits",
    "read_run",
    "save_model",
    "show",
    "show_tokens",
    "train_rl",
    "train_sft",
]

_HOMES = {
    **dict.fromkeys(
        ("Evaluation", "Trained", "create_policy", "evaluate_policy", "train_rl", "train_sft"),
        "coa_jax.api",
    ),
    **dict.fromkeys(("Agent", "load_policy"), "coa_jax.rollout.agent"),
    **dict.fromkeys(("load_model", "logits", "save_model"), "coa_jax.model.api"),
    **dict.fromkeys(("failure_of", "show", "show_tokens"), "coa_jax.report.notebook"),
    "read_run": "coa_jax.report.run",
    "load_config": "coa_jax.cli",
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
