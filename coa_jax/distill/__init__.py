"""The teacher multi-agent system and the distillation of its runs into trajectories.

Runs are logs of messages between agents (`messages`, `team`), written by pluggable minds
(`minds`, `scripted`), converted (`convert`), filtered (`filters`) and stored (`dataset`).
"""

from coa_jax.distill.convert import convert
from coa_jax.distill.pipeline import DistillConfig, distill_tasks, evaluate_teacher

__all__ = ["DistillConfig", "convert", "distill_tasks", "evaluate_teacher"]
