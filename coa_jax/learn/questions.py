"""Loads the training tasks and the held-out tasks of a reinforcement-learning run."""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.environments.session import Environments, graded_by_environment
from coa_jax.learn.held_out import HeldOut
from coa_jax.learn.pool import with_pass_rates
from coa_jax.learn.rl_config import RLConfig
from coa_jax.protocol import Prompt
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.mixture import load_parts
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.tools.base import Tool


def questions(config: RLConfig) -> tuple[dict[str, list[Task]], Prompt, Graders]:
    """Loads the training tasks of a run, with their prompt style and graders.

    Returns:
        Three parts: a dictionary from the name of a source to its tasks, the prompt style, and the
        graders of the answers.

    Raises:
        UserError: a source cannot be loaded, or its tasks cannot be graded.
    """
    parts = load_parts(config, "train", config.num_tasks, config.seed)
    parts = {
        name: with_pass_rates(config.pool, tasks, name or config.tasks)
        for name, tasks in parts.items()
    }
    parts = {n: graded_by_environment(config.environment, tasks) for n, tasks in parts.items()}
    graders = Graders(config.graders)
    graders.check([task for tasks in parts.values() for task in tasks])
    parts = {
        name: with_level(tasks, config.rollout.level, config.rollout.format)
        for name, tasks in parts.items()
    }
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    for tasks in parts.values():
        warn_of_prompts(tasks, prompt, "tasks", "config.rollout.prompt_style")
    return parts, prompt, graders


def measured_by(
    config: RLConfig,
    run: RunDir,
    trained: Sequence[Task],
    prompt: Prompt,
    graders: Graders,
    tools: Sequence[Tool],
    environments: Environments | None = None,
) -> HeldOut | None:
    """Loads the held-out tasks of a run, and returns an object that evaluates the policy on them.

    The result is None if the run has no evaluations.

    Args:
        config: settings of the run.
        run: directory of the run.
        trained: tasks that the run trains on; a warning is logged if some of these tasks are among
            the held-out tasks too.
        prompt: prompt style in which the policy sees the tasks.
        graders: graders of the answers.
        tools: live tools that the policy can call.
        environments: creates the environment in which the policy acts; None if the policy only
            calls tools.
    """
    if not config.evaluate_every:
        return None
    return HeldOut(
        config.held_out,
        config.evaluate_every,
        config.rules.steps,
        run,
        "rl",
        rollout=config.budgets,
        graders=graders,
        prompt=prompt,
        tools=tools,
        environments=environments,
        wait_seconds=config.mesh.wait_seconds,
        otherwise=config,
        trained=trained,
    )
