"""Agentic reinforcement learning with live tools (paper §3.2).

A step samples a group of trajectories for each of some tasks, grades them and makes one or more
policy-gradient updates.  Which groups learn, and how, is the algorithm's, see `learn.algorithms`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np

from coa_jax.engine.engine import make_engines, publish_all
from coa_jax.engine.memory import engine_memory
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.groups import describe, graded_values, sample_groups
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.step import check_updates, init_state
from coa_jax.learn.update import critic_state, reference_params, update
from coa_jax.model.api import load_model
from coa_jax.model.attention.causal import choose
from coa_jax.model.lora import merge, split
from coa_jax.model.peft_io import save_trained
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel import processes
from coa_jax.parallel.placement import training_mesh
from coa_jax.progress import progress
from coa_jax.rollout.constrain import constraint_for
from coa_jax.run_dir import RunDir
from coa_jax.tasks import load_tasks
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Trajectory


def train(config: RLConfig, run: RunDir, output: Path, tools: Sequence[Tool]) -> None:
    """Trains and writes the model as a Hugging Face directory to ``output``.

    Started again in the same run directory it goes on after the newest checkpoint.  Samples are
    functions of (seed, task index, sample number, parameters), so a repeated step is the same step.
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
    checkpoints = Checkpoints(run.checkpoints / "rl")
    step, cursor = checkpoints.latest() or 0, 0
    surplus: list[list[Trajectory]] = []
    if step:
        state, extra = checkpoints.restore(step, state)
        cursor = int(extra["cursor"])
        surplus = [
            [Trajectory.from_json(row) for row in group] for group in extra.get("surplus", ())
        ]
        if critic is not None:
            critic = checkpoints.restore_critic(step, critic)
    run.rewind("rl", step)
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
    )
    for engine in engines if config.rollout.max_seconds else ():
        engine.warm_up()  # or the first trajectories would spend their time on compilation
    total = config.optimizer.total_steps // config.updates
    saving = 0.0  # seconds of the checkpoint before this step
    with asyncio.Runner() as runner, progress("RL", total=total, initial=step) as bar:
        while step < total:
            clock = _Clock()
            processes.doing(f"rollouts of step {step + 1}")
            sampled = sample_groups(config, runner, engines, model, stream, cursor, tools, surplus)
            cursor, surplus = sampled.cursor, sampled.surplus
            clock.lap("rollout")
            processes.doing(f"update of step {step + 1}")
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
            clock.lap("update")
            publish_all(engines, merge(base, state.params))
            clock.lap("publish")
            step += 1
            # Rows come before the checkpoint: what a kill between the two leaves is taken back.
            run.traces(step, "rl", _rows(sampled.everything))
            times = {**clock.report(), "time/checkpoint": saving}
            run.metrics(step, "rl", **stats, **describe(sampled), **times)
            error = check_updates(stats, config.optimizer)
            if step % config.checkpoint_every == 0 or step == total or error:
                extra = {"cursor": cursor, "surplus": [_rows([group]) for group in surplus]}
                checkpoints.save(step, state, extra, critic)
            if error:
                raise error
            saving = clock.lap("checkpoint")
            bar.update(reward=float(np.mean(graded_values(sampled.everything) or [0.0])))
    checkpoints.close()
    save_trained(model, state.params, base, config.model, output)


def _rows(groups: Sequence[Sequence[Trajectory]]) -> list[dict[str, Any]]:
    return [trajectory.to_json() for group in groups for trajectory in group]


class _Clock:
    """Seconds of a step's parts."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> float:
        now = time.monotonic()
        seconds = self._laps[f"time/{name}"] = now - self._last
        self._last = now
        return seconds

    def report(self) -> dict[str, float]:
        return {**self._laps, "time/step": self._last - self._start}
