"""Loads the training tasks of a reinforcement-learning run."""

from __future__ import annotations

from coa_jax.environments.session import graded_by_environment
from coa_jax.learn.pool import with_pass_rates
from coa_jax.learn.rl_config import RLConfig
from coa_jax.protocol import Prompt
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import load_parts
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts


def questions(config: RLConfig) -> tuple[dict[str, list[Task]], Prompt, Graders]:
    """Loads the training tasks of a run, with their prompt style and graders.

    Returns:
        Three parts: a dictionary from the name of a source to its tasks, the prompt style, and the
        graders of the answers.

    Raises:
        UserError: a source cannot be loaded, or its tasks cannot be graded.
    """
    parts = {}
    graders = Graders(config.graders)
    for name, tasks in load_parts(config, "train", config.num_tasks, config.seed).items():
        rated = with_pass_rates(config.pool, tasks, name or config.tasks)
        parts[name] = graded_by_environment(config.environment, rated)
    graders.check([task for tasks in parts.values() for task in tasks])
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    for name, tasks in parts.items():
        parts[name] = with_level(tasks, config.rollout.level, config.rollout.format)
        warn_of_prompts(parts[name], prompt, "tasks", "config.rollout.prompt_style")
    return parts, prompt, graders
