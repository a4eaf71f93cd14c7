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
    "load_config": "coa_jax.cli",
    **dict.fromkeys(("Agent", "load_policy"), "coa_jax.rollout.agent"),
    **dict.fromkeys(("load_model", "logits", "save_model"), "coa_jax.model.api"),
    **dict.fromkeys(("failure_of", "show", "show_tokens"), "coa_jax.report.notebook"),
    "read_run": "coa_jax.report.run",
}
"""Maps names to the modules that define them; all other names come from `coa_jax.api`."""


def __getattr__(name: str) -> Any:
    """Imports an exported name from the module that defines it (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "coa_jax.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
