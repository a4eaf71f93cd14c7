"""Agentic reinforcement learning with live tools: GRPO with dynamic sampling (paper §3.2).

A step samples a group of trajectories for each of some tasks, grades them, drops groups without a
signal, samples further tasks in their place, and makes one or more clipped policy-gradient updates.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np

from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.constraint import Constraint
from coa_jax.engine.engine import Engine
from coa_jax.engine.memory import engine_memory
from coa_jax.errors import UserError
from coa_jax.learn.advantages import group_advantages, has_signal
from coa_jax.learn.batch import Example, pack, prompt_ids, split_rows, trajectory_example
from coa_jax.learn.checkpoint import Checkpoints
from coa_jax.learn.losses import PolicyLossConfig, bind, policy_loss
from coa_jax.learn.step import OptimizerConfig, TrainState, init_state, train_step
from coa_jax.model.api import Model, load_model, save_model
from coa_jax.model.attention.causal import choose
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.tokenizer import eos_ids
from coa_jax.parallel.placement import MeshConfig, put_batch, training_mesh
from coa_jax.progress import progress
from coa_jax.rollout.collect import collect
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.run_dir import RunDir
from coa_jax.tasks import Task, grade, load_tasks
from coa_jax.tools.base import Tool
from coa_jax.trajectory import Reward, Trajectory, format_valid


@dataclasses.dataclass(frozen=True)
class RLConfig:
    """A reinforcement-learning run.

    Attributes:
        model: Hugging Face directory to start from.
        tasks: task source, see `tasks.load_tasks`.
        num_tasks: tasks of the training split that are drawn from.
        seed: order of the tasks and randomness of the samples.
        groups: tasks whose groups make one step.
        group_size: samples of a task.
        max_rounds: how often a step may sample further tasks until enough groups have a signal.
        updates: optimiser updates of a step; above 1 the later ones are off-policy.
        format_reward: whether a right answer counts only where the protocol was obeyed, as in the
            paper's eq 11; else the answer alone counts, as in its eq 10.
        temperature: of sampling, and of the probabilities that are trained.
        rows: rows of a micro-batch.
        row_length: tokens of a row; at least ``rollout.max_tokens``.
        dtype: operands of products in training; the engine has its own.
        remat: recompute activations in the backward pass.
        loss: clip bounds.
        optimizer: ``total_steps`` counts updates and is the length of the run.
        engine: shapes of decoding.
        rollout: budgets of a trajectory.
        checkpoint_every: steps between two checkpoints.
        mesh: axes over which parameters and rows are sharded.
        attention: implementation in training: ``auto`` or a name, see docs/kernels.md.
    """

    model: str
    tasks: str
    num_tasks: int
    seed: int
    groups: int
    group_size: int
    max_rounds: int
    updates: int
    format_reward: bool
    temperature: float
    rows: int
    row_length: int
    dtype: str
    remat: bool
    loss: PolicyLossConfig
    optimizer: OptimizerConfig
    engine: EngineConfig
    rollout: RolloutConfig
    checkpoint_every: int
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    attention: str = "auto"

    def __post_init__(self) -> None:
        longest = min(self.rollout.max_tokens, self.engine.max_length)
        if self.row_length < longest:
            raise UserError(
                f"rl config: row_length is {self.row_length}, trajectories have up to {longest} "
                "tokens; raise row_length or lower rollout.max_tokens"
            )
        if self.temperature <= 0:
            raise UserError(
                f"rl config: temperature is {self.temperature}; without chance in the samples "
                "there is nothing to learn from, give 1.0"
            )
        for name in ("groups", "group_size", "max_rounds", "updates", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise UserError(f"rl config: {name} is {getattr(self, name)}; give at least 1")


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The groups of one step.

    Attributes:
        used: groups with a signal, at most as many as a step wants; each graded.
        everything: all groups that were sampled, graded.
        cursor: index of the next task.
    """

    used: list[list[Trajectory]]
    everything: list[list[Trajectory]]
    cursor: int


def train(config: RLConfig, run: RunDir, output: Path, tools: Sequence[Tool]) -> None:
    """Trains and writes the model as a Hugging Face directory to ``output``.

    Started again in the same run directory it goes on after the newest checkpoint.  Samples are
    functions of (seed, task index, sample number, parameters), so a repeated step is the same step.
    """
    mesh = training_mesh(config.mesh)
    tasks = load_tasks(config.tasks, "train", config.num_tasks, config.seed)
    model = load_model(config.model, mesh=mesh)
    attention = choose(config.attention, model.config, config.dtype, mesh)
    state = init_state(model.params, config.optimizer)
    checkpoints = Checkpoints(run.checkpoints / "rl")
    step, cursor = checkpoints.latest() or 0, 0
    if step:
        state, extra = checkpoints.restore(step, state)
        cursor = int(extra["cursor"])
    run.rewind("rl", step)
    stream = grain.MapDataset.source(tasks).seed(config.seed).shuffle().repeat()
    print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
    protocols = (task.protocol for task in tasks)
    constraint = constraint_for(config.rollout, model.tokenizer, model.config.vocab_size, protocols)
    if constraint is not None:
        print(f"constraint: {constraint}", flush=True)
    engine = Engine(state.params, model.config, config.engine, eos_ids(model.tokenizer), constraint)
    if config.rollout.max_seconds:
        engine.warm_up()  # or the first trajectories would spend their time on compilation
    total = config.optimizer.total_steps // config.updates
    saving = 0.0  # seconds of the checkpoint before this step
    with asyncio.Runner() as runner, progress("RL", total=total, initial=step) as bar:
        while step < total:
            clock = _Clock()
            sampled = sample_groups(config, runner, engine, model, stream, cursor, tools)
            cursor = sampled.cursor
            clock.lap("rollout")
            state, stats = update(config, state, model, sampled.used, mesh, attention, constraint)
            clock.lap("update")
            engine.publish(state.params)
            clock.lap("publish")
            step += 1
            # Rows come before the checkpoint: what a kill between the two leaves is taken back.
            run.traces(step, "rl", _rows(sampled.everything))
            times = {**clock.report(), "time/checkpoint": saving}
            run.metrics(step, "rl", **stats, **describe(sampled), **times)
            if step % config.checkpoint_every == 0 or step == total:
                checkpoints.save(step, state, {"cursor": cursor})
            saving = clock.lap("checkpoint")
            bar.update(reward=float(np.mean(_values(sampled.everything) or [0.0])))
    checkpoints.close()
    save_model(dataclasses.replace(model, params=state.params), output, overwrite=True)


def sample_groups(
    config: RLConfig,
    runner: asyncio.Runner,
    engine: Engine,
    model: Model,
    stream: grain.MapDataset,
    cursor: int,
    tools: Sequence[Tool],
) -> Sampled:
    """Samples tasks from ``cursor`` on until ``groups`` of them have differing rewards.

    At most ``max_rounds`` rounds; the first samples ``groups`` tasks, a later one as many as the
    rate of the earlier rounds makes necessary.
    """
    used: list[list[Trajectory]] = []
    everything: list[list[Trajectory]] = []
    for _ in range(config.max_rounds):
        missing = config.groups - len(used)
        rate = max(len(used) / len(everything), 0.25) if everything else 1.0
        wanted = min(config.groups, int(np.ceil(missing / rate)))
        requests = []
        for index in range(cursor, cursor + wanted):
            task: Task = stream[index]
            requests.append(
                Request(
                    task=task,
                    prompt=prompt_ids(
                        model.tokenizer, task.protocol, task.question, config.rollout.prompt_style
                    ),
                    seed=config.seed,
                    prompt_id=index,
                    samples=tuple(range(config.group_size)),
                    sampling=SamplingParams(temperature=config.temperature),
                    metadata={"stage": "rl-train"},
                )
            )
        cursor += wanted
        groups = collect(runner, engine, model.tokenizer, requests, tools, config.rollout)
        for request, group in zip(requests, groups, strict=True):
            graded = [
                dataclasses.replace(t, reward=_shape(config, grade(request.task, t))) for t in group
            ]
            everything.append(graded)
            if has_signal(_rewards(graded)) and len(used) < config.groups:
                used.append(graded)
        if len(used) >= config.groups:
            break
    return Sampled(used, everything, cursor)


def update(
    config: RLConfig,
    state: TrainState,
    model: Model,
    groups: Sequence[Sequence[Trajectory]],
    mesh: jax.sharding.Mesh | None = None,
    attention: Attention = REFERENCE,
    constraint: Constraint | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """The updates of one step; statistics are those of the first, which is on-policy.

    Without a group that has a signal nothing is learned, but the step counts.  Trajectories that
    were sampled under a constraint are learned under the same one.
    """
    examples: list[list[Example]] = []
    for group in groups:
        advantages = group_advantages(_rewards(group))
        examples.append(
            [
                trajectory_example(trajectory, float(advantage), constraint)
                for trajectory, advantage in zip(group, advantages, strict=True)
                if _rewards([trajectory])[0] is not None and trajectory.num_policy_tokens
            ]
        )
    loss_fn = bind(
        policy_loss,
        clip=config.loss,
        temperature=config.temperature,
        dtype=config.dtype,
        remat=config.remat,
        attention=attention,
    )
    first: dict[str, float] = {}
    for part in range(config.updates):
        chosen = [example for group in examples[part :: config.updates] for example in group]
        if not chosen:
            continue
        batches = split_rows(pack(chosen, config.row_length), config.rows)
        state, stats = train_step(
            state,
            [put_batch(batch, mesh) for batch in batches],
            loss_fn=loss_fn,
            model=model.config,
            optimizer=config.optimizer,
            extra=() if constraint is None else (constraint.tables.allowed,),
        )
        stats["adv/abs_mean"] = float(
            sum(np.abs(b.advantage).sum() for b in batches) / max(stats["tokens"], 1.0)
        )
        first = first or stats
    return state, first


def describe(sampled: Sampled) -> dict[str, float]:
    """Figures of a step's rollouts, all sampled groups included."""
    groups = sampled.everything
    flat = [trajectory for group in groups for trajectory in group]
    values = _values(groups)
    calls = [call for trajectory in flat for call in trajectory.tool_calls]
    lengths = [trajectory.num_policy_tokens for trajectory in flat]
    stops = Counter(str(trajectory.stop_reason) for trajectory in flat)
    unsure = sum(not has_signal(_rewards(group)) for group in groups)
    return {
        "reward/mean": float(np.mean(values)) if values else 0.0,
        "reward/std": float(np.std(values)) if values else 0.0,
        "reward/masked_frac": 1.0 - len(values) / len(flat),
        "group/frac_zero_std": unsure / len(groups),
        "group/sampled": float(len(groups)),
        "group/used": float(len(sampled.used)),
        "len/mean": float(np.mean(lengths)),
        "len/max": float(np.max(lengths)),
        "tool/calls": len(calls) / len(flat),
        "tool/fail_frac": sum(not call.ok for call in calls) / max(len(calls), 1),
        "time/tool_wait": sum(call.end - call.start for call in calls) / len(flat),
        "format/valid": float(np.mean([format_valid(trajectory) for trajectory in flat])),
        **{f"stop/{reason}": count / len(flat) for reason, count in sorted(stops.items())},
    }


def _shape(config: RLConfig, reward: Reward) -> Reward:
    if reward.value is None or not config.format_reward:
        return reward
    return dataclasses.replace(reward, value=reward.value * reward.parts["format"])


def _values(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    return [value for group in groups for value in _rewards(group) if value is not None]


def _rewards(group: Sequence[Trajectory]) -> list[float | None]:
    """Rewards of graded or ungraded trajectories; None where there is none."""
    return [None if t.reward is None else t.reward.value for t in group]


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
