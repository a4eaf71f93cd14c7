"""Measures a policy on tasks with live tools; what is finished is never run again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax import files
from coa_jax.bounds import Bounded, Natural, Place, Seed, Size, Split, Temperature, TopP
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.errors import UserError
from coa_jax.evaluate.endpoint import PolicyEndpoint
from coa_jax.evaluate.exposure import BLOCKED, Exposure, exposure_of
from coa_jax.evaluate.figures import blocks, result
from coa_jax.evaluate.journal import Journal, digest
from coa_jax.evaluate.policy import Policy, Wanted, local_policy, weights_name
from coa_jax.evaluate.sample import Key, measured
from coa_jax.evaluate.scaling import PickConfig, choose, scaling
from coa_jax.model.api import load_model
from coa_jax.progress import progress
from coa_jax.protocol import Prompt, messages_of
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Graders, GradersConfig, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Reward, Trajectory


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(Bounded):
    """An evaluation.

    Attributes:
        tasks: task source, see `tasks.load_tasks`.
        split: ``validation`` or ``test``.
        num_tasks: tasks that are drawn; 0 for all, in their order.
        samples: samples of a task, the rounds over which pass@1 is averaged; pass@k needs k.
        seed: which tasks, and the randomness of the samples.
        temperature, top_p, top_k: of sampling; temperature 0 is greedy.
        engine: shapes of decoding on this machine.
        rollout: budgets of a trajectory.
        graders: how answers are graded.
        endpoint: where the policy is served, if it does not decode on this machine.
        best_of: who picks among samples.
        blocked: addresses that no sample should open; they are counted (the tools refuse those of
            their own settings).
        retry_faults: run samples again in which a part of ours broke.
    """

    tasks: Place
    split: Split
    num_tasks: Natural
    samples: Size
    seed: Seed
    temperature: Temperature
    top_p: TopP
    top_k: Natural
    engine: EngineConfig
    rollout: RolloutConfig
    graders: GradersConfig = dataclasses.field(default_factory=GradersConfig)
    endpoint: PolicyEndpoint = dataclasses.field(default_factory=PolicyEndpoint)
    best_of: PickConfig = dataclasses.field(default_factory=PickConfig)
    blocked: tuple[Place, ...] = BLOCKED
    retry_faults: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of.n > self.samples:
            raise UserError(f"best_of.n is {self.best_of.n}; give at most samples, {self.samples}")

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)


def settings(
    config: EvaluateConfig, policy: str, tools: Mapping[str, Any], prompt: Prompt | None = None
) -> dict[str, Any]:
    """On what the samples of an evaluation depend, besides their numbers.

    Args:
        config: the evaluation.
        policy: names the policy and its weights.
        tools: settings of the tools; JSON values.
        prompt: how questions are put to it; None for what the config names.

    Raises:
        UserError: the prompt that the config names cannot be read.
    """
    prompt = prompt or load_prompt(config.rollout.prompt_style)
    return {
        "policy": policy,
        "tasks": config.tasks,
        "split": config.split,
        "seed": config.seed,
        "sampling": dataclasses.asdict(config.sampling),
        "rollout": dataclasses.asdict(config.rollout),
        "prompt": digest(dataclasses.asdict(prompt)) if prompt.is_template else prompt.style,
        "opening": config.endpoint.opening if config.endpoint else "",
        "tools": digest(dict(tools)),
    }


def _grading(config: EvaluateConfig) -> dict[str, Any]:
    """On what verdicts depend: not on how many are asked for at a time, or where."""
    graders, pick = dataclasses.asdict(config.graders), dataclasses.asdict(config.best_of)
    for asked in (graders["judge"], pick):
        for name in ("attempts", "concurrency", "cache", "n"):
            asked.pop(name, None)
        chat = asked["chat"]
        asked["chat"] = {name: chat[name] for name in ("model", "temperature", "max_tokens")}
    graders.pop("programs")
    return {**graders, "pick": pick}


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    config: EvaluateConfig,
    run: RunDir,
    stage: str,
    about: Mapping[str, Any],
    prompt: Prompt | None = None,
    *,
    fresh: bool = False,
) -> dict[str, Any]:
    """Runs, grades and counts what is not there yet.

    Writes the samples to the run's traces, and its result file to
    ``evaluate/STAGE/results.json``, whose bytes are the same whether or not the process was killed
    and started again on the way.

    Args:
        policy: what is measured.
        tasks: what it is asked.
        config: how.
        run: the run directory.
        stage: name of the results.
        about: see `settings`.
        prompt: how questions are put to the policy; None for what the config names.
        fresh: drop what an earlier process has left of the stage.

    Returns:
        What the result file holds.

    Raises:
        UserError: what the user can mend; what is finished is kept.
    """
    tasks = with_level(tasks, config.rollout.level)
    prompt = prompt or load_prompt(config.rollout.prompt_style)
    warn_of_prompts(tasks, prompt, "tasks", "config.rollout.prompt_style")
    graders, exposure = Graders(config.graders), exposure_of(tasks, config.blocked)
    graders.check(tasks)
    journal = Journal(run, stage, about, _grading(config))
    journal.load(tasks, exposure, fresh=fresh, retry_faults=config.retry_faults)
    wanted = []
    for index, task in enumerate(tasks):
        numbers = tuple(n for n in range(config.samples) if (task.id, n) not in journal.samples)
        if numbers:
            wanted.append(Wanted(index, task, numbers, messages_of(task, prompt)))
    total = len(tasks) * config.samples
    left = sum(len(one.numbers) for one in wanted)
    if left < total:
        print(f"{stage}: {total - left} of {total} samples are finished", flush=True)
    # Outside of the event loop: a policy may take its time to be loaded.
    stream = policy(wanted, journal.about()) if wanted else None
    with progress(f"evaluate {stage}", total=total, initial=total - left) as bar:
        asyncio.run(_finish(stream, tasks, config, graders, exposure, journal, bar.update))
    groups = measured(tasks, journal.samples, config.samples)
    journal.finish([sample.key for group in groups for sample in group.samples])
    found = scaling(groups, config.samples, config.best_of.n, journal.verdicts)
    described = {**about, "grading": _grading(config)}
    outcome = result(stage, described, groups, config.samples, found)
    files.write_json(journal.folder / "results.json", outcome)
    run.summary(blocks(outcome))
    return outcome


def evaluate_model(
    path: Path,
    tasks: Sequence[Task],
    config: EvaluateConfig,
    run: RunDir,
    stage: str,
    tools: Sequence[Tool],
    tool_settings: Mapping[str, Any],
    *,
    fresh: bool = False,
) -> dict[str, Any]:
    """`evaluate` of a model that decodes on this machine.

    Args:
        path: Hugging Face directory.
        tasks, config, run, stage, fresh: see `evaluate`.
        tools: live tools.
        tool_settings: settings of them on which answers depend.
    """
    policy = local_policy(
        lambda: load_model(path), config.engine, config.sampling, config.seed, config.rollout, tools
    )
    prompt = load_prompt(config.rollout.prompt_style, path)
    about = settings(config, f"{path.name} {weights_name(str(path))}", tool_settings, prompt)
    return evaluate(policy, tasks, config, run, stage, about, prompt, fresh=fresh)


async def _finish(
    stream: AsyncGenerator[Trajectory, None] | None,
    tasks: Sequence[Task],
    config: EvaluateConfig,
    graders: Graders,
    exposure: Exposure,
    journal: Journal,
    tick: Callable[[], None],
) -> None:
    """Takes samples as they end, grades them while others still run, and compares them."""
    by_id = {task.id: task for task in tasks}
    grading: set[asyncio.Task[None]] = set()

    async def grade(key: Key, trajectory: Trajectory) -> None:
        reward = await graders.grade(by_id[key[0]], trajectory)
        journal.grade(key, reward)

    def begin(key: Key, trajectory: Trajectory | None = None) -> None:
        sample = journal.samples[key]
        if sample.broken:
            journal.grade(key, Reward(None))
        elif sample.value is None:
            read = trajectory or journal.trajectory(key)
            grading.add(asyncio.create_task(grade(key, read)))

    def check() -> None:
        for task in [task for task in grading if task.done()]:
            grading.discard(task)
            task.result()

    try:
        for key, sample in list(journal.samples.items()):
            if key[0] in by_id and key[1] < config.samples and sample.value is None:
                begin(key)
        if stream is not None:
            async with contextlib.aclosing(stream):
                async for trajectory in stream:
                    sample = journal.add(trajectory, exposure)
                    begin(sample.key, trajectory)
                    tick()
                    check()
        await asyncio.gather(*grading)
    finally:
        for task in grading:
            task.cancel()
        await asyncio.gather(*grading, return_exceptions=True)
    groups = measured(tasks, journal.samples, config.samples)
    await choose(
        config.best_of,
        graders,
        groups,
        config.samples,
        journal.verdicts,
        lambda sample: journal.trajectory(sample.key),
        journal.say,
    )
