"""What a run of reinforcement learning asks: the tasks that it learns from, and those held out."""

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
    """The tasks of each source, how they are put to the policy, and what grades the answers."""
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
    """What the policy is measured by, if it is."""
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
