"""Agentic reinforcement learning with live tools (paper §3.2).

A step samples a group of trajectories for each of some tasks, grades them, drops groups without a
signal, samples further tasks in their place, and makes one or more policy-gradient updates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import logging

from coa_jax.engine.engine import make_engines, publish_all
from coa_jax.engine.layout import cut, join
from coa_jax.engine.memory import engine_memory
from coa_jax.engine.meter import MeteredEngine
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
from coa_jax.learn.metrics import (
    memory,
    rollout_metrics,
    sampling_metrics,
    stamp,
    train_speed,
)
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sampling import Background
from coa_jax.learn.step import check_updates, init_state
from coa_jax.learn.stop import end_run, stop_on_sigterm
from coa_jax.learn.update import critic_state, reference_params, update
from coa_jax.learn.watch import Watch
from coa_jax.model.api import Model, load_model
from coa_jax.model.attention.causal import choose
from coa_jax.model.lora import merge, split
from coa_jax.model.peft_io import save_trained
from coa_jax.model.tokenizer import eos_ids
from coa_jax.model.weights import Params
from coa_jax.parallel import processes
from coa_jax.parallel.placement import training_mesh
from coa_jax.progress import progress
from coa_jax.rollout.constrain import constraint_for
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Graders, load_tasks
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory

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
    mesh = training_mesh(config.mesh)
    tasks = load_tasks(config.tasks, "train", config.num_tasks, config.seed)
    model = load_model(config.model, mesh=mesh)
    attention = choose(config.attention, model.config, config.dtype, mesh)
    # Before the state, whose updates take the parameters' memory.
    critic = critic_state(config, model.params)
    params, base = split(model.params, model.config, config.lora, config.seed, mesh)
    reference = reference_params(config, model.params, base)
    state = init_state(params, config.optimizer)
    stream = grain.MapDataset.source(tasks).seed(config.seed).shuffle().repeat()
    print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
    protocols = (task.protocol for task in tasks)
    constraint = constraint_for(config.rollout, model.tokenizer, model.config.vocab_size, protocols)
    if constraint is not None:
        print(f"constraint: {constraint}", flush=True)
    engines = make_engines(
        merge(base, state.params),
        model.config,
        config.engine,
        eos_ids(model.tokenizer),
        constraint,
        config.mesh.decode_tensor,
        MeteredEngine,
    )
    for engine in engines if config.rollout.max_seconds else ():
        engine.warm_up()  # or the first trajectories would spend their time on compilation

    def sampler() -> Params:
        """The parameters of the engines of all processes."""
        parts = [engine.params for engine in engines]
        return join(parts, model.config, mesh, config.mesh.decode_tensor)

    checkpoints = Checkpoints(run.checkpoints / "rl", config.keep_last, config.keep_best)
    ahead, total = bool(config.rollouts_ahead), config.optimizer.total_steps // config.updates
    step = cursor = policy_step = 0
    surplus: list[list[Trajectory]] = []
    further: dict[str, Any] = {} if critic is None else {"critic": critic}
    restored = checkpoints.newest(state, {**further, "sampler": sampler()} if ahead else further)
    if restored is not None:
        state, step, cursor = restored.state, restored.step, int(restored.extra["cursor"])
        surplus = [
            [Trajectory.from_json(row) for row in group]
            for group in restored.extra.get("surplus", ())
        ]
        critic, policy_step = restored.more.get("critic", critic), step
        publish_all(engines, merge(base, state.params))
        if "sampler" in restored.more:
            policy_step = step - 1
            for engine, part in zip(
                engines, cut(restored.more["sampler"], model.config), strict=True
            ):
                engine.publish(part)
    run.rewind("rl", step)
    watch, saved = Watch(run.rows("rl")), step
    batches = Background(_sampling(config, engines, model, stream, tools))

    def save(metrics: dict[str, float]) -> None:
        # With the parameters that sample the next batch, where they are not those of the state.
        more: dict[str, Any] = {} if critic is None else {"critic": critic}
        if ahead and step < total:
            more["sampler"] = sampler()
        extra = {"cursor": cursor, "surplus": [_rows([group]) for group in surplus]}
        checkpoints.save(step, state, extra, metrics=metrics, more=more)

    with (
        contextlib.closing(checkpoints),
        contextlib.closing(batches),
        contextlib.closing(Profile(config.profile_steps, run.path / "profile")) as profile,
        # A process that left its rollouts alone would leave the others waiting.
        stop_on_sigterm(batches.abandon if processes.count() == 1 else lambda: None) as stop,
        progress("RL", total=total, initial=step) as bar,
    ):
        if step < total:
            batches.start(cursor, len(surplus))
        clock, row = Clock(*_PARTS), {}
        while step < total:
            profile.before(step + 1)
            processes.doing(f"rollouts of step {step + 1}")
            try:
                with clock("rollout_wait"):
                    share, seconds, reward_seconds = batches.result()
                    sampled = stamp(assemble(config, share, surplus), policy_step)
                    # That of the slowest process: all have waited for it.
                    wait = config.mesh.wait_seconds
                    seconds = max(processes.gather([seconds], "gathering of times", wait))
            except asyncio.CancelledError:
                break
            figures = sampling_metrics(sampled, engines, seconds, reward_seconds)
            cursor, surplus = sampled.cursor, sampled.surplus
            if ahead and step + 1 < total:
                with clock("publish"):
                    publish_all(engines, merge(base, state.params))
                policy_step = step
                batches.start(cursor, len(surplus))
            processes.doing(f"update of step {step + 1}")
            with clock("update"):
                state, critic, stats = update(
                    config,
                    state,
                    model,
                    sampled.used,
                    mesh,
                    attention,
                    constraint,
                    base,
                    critic=critic,
                    reference=reference,
                )
            step += 1
            error = check_updates(stats, config.optimizer)
            if not ahead and step < total and not error:
                with clock("publish"):
                    publish_all(engines, merge(base, state.params))
                policy_step = step
                batches.start(cursor, len(surplus))
            # Rows come before the checkpoint: what a kill between the two leaves is taken back.
            with clock("traces"):
                run.traces(step, "rl", _rows(sampled.everything))
            row = {**stats, **_describe(sampled, step, stats, model, clock), **figures}
            run.metrics(step, "rl", **row)
            profile.after(step)
            for text in watch.see(row):
                logging.warning("RL, step %d: %s", step, text)
            clock, stopping = Clock(*_PARTS), stop.agreed()
            if step % config.checkpoint_every == 0 or step == total or stopping or error:
                with clock("checkpoint"):
                    save(row)
                saved = step
            if error:
                raise error
            bar.update(reward=float(np.mean(graded_values(sampled.everything) or [0.0])))
            if stopping:
                break
        if saved < step:
            save(row)
    if step < total:
        end_run(step, total)
    save_trained(model, state.params, base, config.model, output)


def _sampling(
    config: RLConfig,
    engines: Sequence[MeteredEngine],
    model: Model,
    stream: grain.MapDataset,
    tools: Sequence[Tool],
) -> Callable[..., tuple[Share, float, float]]:
    """Samples this process's share of a batch; and the seconds of that, and of its grading."""

    graders = Graders(config.graders)

    def sample(runner: asyncio.Runner, cursor: int, surplus: int) -> tuple[Share, float, float]:
        for engine in engines:
            engine.restart()
        clock = Clock("reward")
        share = sample_share(
            config, runner, engines, model, stream, cursor, tools, graders, clock, surplus
        )
        return share, clock.elapsed(), clock.seconds["reward"]

    return sample


def _describe(
    sampled: Sampled, step: int, stats: dict[str, float], model: Model, clock: Clock
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
        **rollout_metrics(sampled, step - 1),
        **train_speed(model.config, lengths, stats.get("tokens", 0.0), seconds),
        **memory(),
        **clock.report(),
    }


def _rows(groups: Sequence[Sequence[Trajectory]]) -> list[dict[str, Any]]:
    return [trajectory.to_json() for group in groups for trajectory in group]
