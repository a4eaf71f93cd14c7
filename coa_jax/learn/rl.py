"""Agentic reinforcement learning with live tools (paper §3.2).

A step samples a group of trajectories for each of some tasks, grades them, drops groups without a
signal, samples further tasks in their place, and makes one or more policy-gradient updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import grain
import numpy as np
from absl import logging

from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.clock import Clock, Profile
from coa_jax.learn.groups import (
    Sampled,
    Share,
    assemble,
    describe,
    graded_values,
    rewards,
    sample_share,
)
from coa_jax.learn.learner import Learner, group_rows
from coa_jax.learn.metrics import (
    memory,
    rollout_metrics,
    sampling_metrics,
    stamp,
    train_speed,
)
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sampling import Background
from coa_jax.learn.step import check_updates
from coa_jax.learn.stop import Stop, end_run, stop_on_sigterm
from coa_jax.learn.update import update
from coa_jax.learn.watch import Watch
from coa_jax.model.card import CARD
from coa_jax.model.peft_io import save_trained
from coa_jax.parallel import processes
from coa_jax.progress import Bar, progress
from coa_jax.protocol import Prompt
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Graders, load_tasks
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt, make_card, warn_of_prompts
from coa_jax.tools.base import Tool

_PARTS = ("rollout_wait", "update", "publish", "traces", "checkpoint")


def train(config: RLConfig, run: RunDir, output: Path, tools: Sequence[Tool]) -> None:
    """Trains and writes the model as a Hugging Face directory to ``output``.

    Started again in the same run directory it goes on after the newest checkpoint.  Samples are
    functions of (seed, task index, sample number, parameters), so a repeated step is the same step;
    a batch that was being sampled ahead is sampled again, with the parameters that had begun it.

    Rollouts run in the background: with ``rollouts_ahead`` while the batch before them is learned,
    else while the step before them is written down.  SIGTERM abandons them, saves, and ends with
    exit code 0.
    """
    tasks = load_tasks(config.tasks, "train", config.num_tasks, config.seed)
    Graders(config.graders).check(tasks)
    tasks = with_level(tasks, config.rollout.level)
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    warn_of_prompts(tasks, prompt, "tasks", "config.rollout.prompt_style")
    card = make_card(prompt, tasks)
    run.keep_json(f"rl-{CARD}", card)
    stream = grain.MapDataset.source(tasks).seed(config.seed).shuffle().repeat()
    with contextlib.closing(
        Checkpoints(
            run.checkpoints / "rl",
            config.keep_last,
            config.keep_best,
            wait_seconds=config.mesh.wait_seconds,
        )
    ) as checkpoints:
        learner = Learner(config, (task.protocol for task in tasks), checkpoints)
        run.rewind("rl", learner.step)
        with (
            contextlib.closing(
                Background(_sampling(config, learner, stream, prompt, tools))
            ) as batches,
            contextlib.closing(Profile(config.profile_steps, run.path / "profile")) as profile,
            stop_on_sigterm(batches.abandon) as stop,
            progress("RL", total=learner.total, initial=learner.step) as bar,
        ):
            _loop(config, learner, run, batches, profile, stop, bar)
    if learner.step < learner.total:
        end_run(learner.step, learner.total)
    model = dataclasses.replace(learner.model, params=learner.state.model, card=card)
    save_trained(model, config.model, output)


def _loop(
    config: RLConfig,
    learner: Learner,
    run: RunDir,
    batches: Background[tuple[Share, float, float]],
    profile: Profile,
    stop: Stop,
    bar: Bar,
) -> None:
    """Steps until there are enough, or until somebody asks for the end."""
    watch, saved, stopping = Watch(run.rows("rl")), learner.step, False
    clock, row = Clock(*_PARTS), dict[str, float]()
    if learner.step < learner.total:
        batches.start(learner.cursor, len(learner.surplus))
    while learner.step < learner.total and not stopping:
        profile.before(learner.step + 1)
        processes.doing(f"rollouts of step {learner.step + 1}")
        with clock("rollout_wait"):
            step = _step_of(config, learner, batches)
        if step is None:
            break
        sampled, figures = step
        if learner.ahead and learner.step + 1 < learner.total:
            with clock("publish"):
                learner.publish()
            batches.start(learner.cursor, len(learner.surplus))
        processes.doing(f"update of step {learner.step + 1}")
        with clock("update"):
            learner.state, learner.critic, stats = update(
                config,
                learner.state,
                learner.model.config,
                sampled.used,
                learner.compute,
                learner.constraint,
                critic=learner.critic,
                reference=learner.reference,
                teacher=learner.teacher,
                version=learner.step,
            )
            learner.step += 1
        error = check_updates(stats, config.optimizer)
        if not learner.ahead and learner.step < learner.total and not error:
            with clock("publish"):
                learner.publish()
            batches.start(learner.cursor, len(learner.surplus))
        processes.doing(f"rows of step {learner.step}")
        # Rows come before the checkpoint: what a kill between the two leaves is taken back.
        with clock("traces"):
            run.traces(learner.step, "rl", group_rows(sampled.everything))
        row = {**stats, **_describe(sampled, learner, stats, clock), **figures}
        run.metrics(learner.step, "rl", **row)
        profile.after(learner.step)
        for text in watch.see(row):
            logging.warning("RL, step %d: %s", learner.step, text)
        clock, stopping = Clock(*_PARTS), stop.agreed(config.mesh.wait_seconds)
        due = learner.step % config.checkpoint_every == 0 or learner.step == learner.total
        if due or stopping or error:
            with clock("checkpoint"):
                learner.save(row)
            saved = learner.step
        if error:
            raise error
        bar.update(reward=float(np.mean(graded_values(sampled.everything) or [0.0])))
    if saved < learner.step:
        learner.save(row)


def _step_of(
    config: RLConfig, learner: Learner, batches: Background[tuple[Share, float, float]]
) -> tuple[Sampled, dict[str, float]] | None:
    """The batch of a step from the shares of all processes, and figures about its sampling.

    None if a process has abandoned its share: one that went on would wait for the others in vain.
    """
    try:
        share, seconds, reward_seconds = batches.result()
    except asyncio.CancelledError:
        seconds = None
    told: list[float | None] = [seconds]
    if processes.count() > 1:
        wait = config.mesh.wait_seconds
        told = asyncio.run(processes.exchange(seconds, "rollouts of a step", wait))
    times = [time for time in told if time is not None]
    if len(times) < len(told):
        return None
    sampled = stamp(assemble(config, share, learner.surplus), learner.policy_step)
    learner.cursor, learner.surplus = sampled.cursor, sampled.surplus
    # The time is that of the slowest process: all have waited for it.
    return sampled, sampling_metrics(sampled, learner.engines, max(times), reward_seconds)


def _sampling(
    config: RLConfig,
    learner: Learner,
    stream: grain.MapDataset,
    prompt: Prompt,
    tools: Sequence[Tool],
) -> Callable[..., tuple[Share, float, float]]:
    """Samples this process's share of a batch; and the seconds of that, and of its grading."""
    graders, engines, model = Graders(config.graders), learner.engines, learner.model

    def sample(runner: asyncio.Runner, cursor: int, surplus: int) -> tuple[Share, float, float]:
        for engine in engines:
            engine.restart()
        clock = Clock("reward")
        share = sample_share(
            config, runner, engines, model, stream, prompt, cursor, tools, graders, clock, surplus
        )
        return share, clock.elapsed(), clock.seconds["reward"]

    return sample


def _describe(
    sampled: Sampled, learner: Learner, stats: dict[str, float], clock: Clock
) -> dict[str, float]:
    """Figures of a step that was learned, beside those of its losses and of its sampling."""
    lengths = [
        len(t.tokens)
        for group in sampled.used
        for t in group
        if rewards([t])[0] is not None and t.num_policy_tokens
    ]
    seconds = clock.seconds["update"]
    return {
        **describe(sampled),
        **rollout_metrics(sampled, learner.step - 1),
        **train_speed(
            learner.model.config,
            lengths,
            stats.get("tokens", 0.0),
            seconds,
            adapters=bool(learner.model.config.lora.rank),
        ),
        **memory(),
        **clock.report(),
    }
