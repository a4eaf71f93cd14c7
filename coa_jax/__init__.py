"""Chain-of-Agents in JAX: distillation, observation-masked SFT and agentic RL.

The package imports each exported name on its first use. So `import coa_jax` is fast, and commands
that need no model never import JAX.
"""

# ruff: noqa: F401  (the imports below tell type checkers what `__getattr__` returns)
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from coa_jax.config.installed import VERSION as __version__

if TYPE_CHECKING:
    from coa_jax.api import Distilled, Evaluation, Trained, distill, evaluate, train_rl, train_sft
    from coa_jax.config.preflight import Needs
    from coa_jax.data.records import read_records
    from coa_jax.data.trajectory import (
        Author,
        DistilledRecord,
        Trajectory,
        format_valid,
        read_trajectories,
    )
    from coa_jax.data.verdicts import failure_of, verdict_of
    from coa_jax.demo.debug_files import make_debug_files
    from coa_jax.demo.untrained import create_policy
    from coa_jax.distillation.readers import Conversation, Malformed, Trace
    from coa_jax.distillation.smolagents_team import as_smolagents_tool
    from coa_jax.engine.config import SamplingParams
    from coa_jax.errors import UserError
    from coa_jax.evaluation.config import EvaluateConfig
    from coa_jax.model.api import load
    from coa_jax.model.config import LoraConfig
    from coa_jax.model.encode import observation_text
    from coa_jax.model.export import save_model
    from coa_jax.model.foreign import Foreign
    from coa_jax.model.policy import Model
    from coa_jax.model.tokenizer import load_tokenizer
    from coa_jax.protocol import Format, Prompt, get_protocol, render_prompt
    from coa_jax.protocol.formats import BAD_CALL, EpisodeStep, Protocol, Segment
    from coa_jax.protocol.text_buffer import Pieces
    from coa_jax.report.notebook import show, show_tokens, table
    from coa_jax.report.run import read_run
    from coa_jax.rollout.agent import Agent
    from coa_jax.rollout.environments import Step, Turn
    from coa_jax.rollout.request import RolloutConfig
    from coa_jax.run.command import load_config
    from coa_jax.run.settings import ConfigDict, build_config, complete_config
    from coa_jax.tasks import Task, grade, grade_answer, load_tasks
    from coa_jax.tools.base import Observation, ToolContext, call_tool
    from coa_jax.tools.make import ToolsConfig, make_tools, named_tools
    from coa_jax.tools.web_search import SearchResult
    from coa_jax.train.advantages import advantages_of
    from coa_jax.train.algorithms import Algorithm, marked
    from coa_jax.train.batch import Batch, pack, split_rows
    from coa_jax.train.config import SFTConfig
    from coa_jax.train.examples import record_example, trajectory_example
    from coa_jax.train.logps import log_probs
    from coa_jax.train.losses import PolicyLoss, SFTLoss
    from coa_jax.train.objectives import segment_means, weigh
    from coa_jax.train.optimizer import OptimizerConfig
    from coa_jax.train.rl_config import RLConfig
    from coa_jax.train.step import init_state, train_step

_HOMES = {
    "coa_jax.config.preflight": ("Needs",),
    "coa_jax.api": (
        "Distilled",
        "Evaluation",
        "Trained",
        "distill",
        "evaluate",
        "train_rl",
        "train_sft",
    ),
    "coa_jax.data.trajectory": (
        "Author",
        "DistilledRecord",
        "Trajectory",
        "format_valid",
        "read_trajectories",
    ),
    "coa_jax.data.records": ("read_records",),
    "coa_jax.data.verdicts": ("failure_of", "verdict_of"),
    "coa_jax.demo.debug_files": ("make_debug_files",),
    "coa_jax.demo.untrained": ("create_policy",),
    "coa_jax.distillation.readers": ("Conversation", "Malformed", "Trace"),
    "coa_jax.distillation.smolagents_team": ("as_smolagents_tool",),
    "coa_jax.errors": ("UserError",),
    "coa_jax.evaluation.config": ("EvaluateConfig",),
    "coa_jax.engine.config": ("SamplingParams",),
    "coa_jax.model.api": ("load",),
    "coa_jax.model.config": ("LoraConfig",),
    "coa_jax.model.encode": ("observation_text",),
    "coa_jax.model.export": ("save_model",),
    "coa_jax.model.foreign": ("Foreign",),
    "coa_jax.model.policy": ("Model",),
    "coa_jax.model.tokenizer": ("load_tokenizer",),
    "coa_jax.protocol": ("Format", "Prompt", "get_protocol", "render_prompt"),
    "coa_jax.protocol.formats": ("BAD_CALL", "EpisodeStep", "Protocol", "Segment"),
    "coa_jax.protocol.text_buffer": ("Pieces",),
    "coa_jax.report.notebook": ("show", "show_tokens", "table"),
    "coa_jax.report.run": ("read_run",),
    "coa_jax.rollout.agent": ("Agent",),
    "coa_jax.rollout.environments": ("Step", "Turn"),
    "coa_jax.rollout.request": ("RolloutConfig",),
    "coa_jax.run.command": ("load_config",),
    "coa_jax.run.settings": ("ConfigDict", "build_config", "complete_config"),
    "coa_jax.tasks": ("Task", "grade", "grade_answer", "load_tasks"),
    "coa_jax.tools.base": ("Observation", "ToolContext", "call_tool"),
    "coa_jax.tools.make": ("ToolsConfig", "make_tools", "named_tools"),
    "coa_jax.tools.web_search": ("SearchResult",),
    "coa_jax.train.advantages": ("advantages_of",),
    "coa_jax.train.algorithms": ("Algorithm", "marked"),
    "coa_jax.train.batch": ("Batch", "pack", "split_rows"),
    "coa_jax.train.config": ("SFTConfig",),
    "coa_jax.train.examples": ("record_example", "trajectory_example"),
    "coa_jax.train.logps": ("log_probs",),
    "coa_jax.train.losses": ("PolicyLoss", "SFTLoss"),
    "coa_jax.train.objectives": ("segment_means", "weigh"),
    "coa_jax.train.optimizer": ("OptimizerConfig",),
    "coa_jax.train.rl_config": ("RLConfig",),
    "coa_jax.train.step": ("init_state", "train_step"),
}
"""Maps each module to the names that this package exports from it."""

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    """Imports an exported name from the module that defines it (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
