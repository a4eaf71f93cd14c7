"""Loads the training tasks of a reinforcement-learning run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coa_jax.errors import UserError
from coa_jax.model.encode import prompt_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.environments.session import graded_by_environment
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import load_parts
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.task_overlap import Overlap, find_distilled
from coa_jax.train.task_pool import with_pass_rates


def load_training_tasks(
    config: RLConfig, run: Path | None = None
) -> tuple[dict[str, list[Task]], Prompt, Graders, Overlap]:
    """Loads the training tasks of a run, with their prompt style and graders.

    Args:
        config: settings of the run.
        run: directory of the run; if the run has begun, it leaves out the same tasks as at its
            start. None if there is no run, for example to check the settings before it.

    Returns:
        Four values: the tasks to train on, by name of their source; the prompt style; the graders
        of the answers; and the result of `find_distilled`, which counts the tasks whose question or
        fact is also in a training record of the policy.

    Raises:
        UserError: a source cannot be loaded, its tasks cannot be graded, all of them are left out,
            or `find_distilled` refuses them.
    """
    parts = {}
    graders = Graders(config.graders)
    loaded = load_parts(config, "train", config.num_tasks or None, config.seed)
    overlap = find_distilled(config.distilled, config.model, loaded, run)
    left_out = set(overlap.left_out)
    for name, tasks in loaded.items():
        remaining = [task for task in tasks if task.id not in left_out]
        if tasks and not remaining:
            raise UserError(
                f"all {len(tasks)} tasks of {name or config.tasks} are distilled: raise num_tasks, "
                "give another seed or source, or distilled.tasks=count to train on them"
            )
        rated = with_pass_rates(config.pool, remaining, name or config.tasks)
        parts[name] = graded_by_environment(config.environment, rated)
    graders.check([task for tasks in parts.values() for task in tasks])
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    for name, tasks in parts.items():
        parts[name] = with_level(tasks, config.rollout.level, config.rollout.format)
        warn_of_prompts(parts[name], prompt, "tasks", "config.rollout.prompt_style")
    return parts, prompt, graders, overlap


def check_prompt_lengths(
    config: RLConfig, tasks: Sequence[Task], prompt: Prompt, tokenizer: Any
) -> None:
    """Checks, on the first 64 tasks, that prompts leave room for the policy's tokens.

    Raises:
        UserError: even the shortest of these prompts has at least `RLConfig.longest` tokens, the
            maximum of a whole trajectory.
    """
    limit = config.longest
    shortest = min((len(prompt_ids(tokenizer, task, prompt)) for task in tasks[:64]), default=0)
    if shortest >= limit:
        raise UserError(
            f"the prompts have {shortest} tokens and more, but a trajectory has at most {limit} "
            "(the smaller of rollout.max_tokens and engine.max_length), so the policy could write "
            "nothing; raise both, or choose a shorter rollout.prompt_style, such as brief"
        )
