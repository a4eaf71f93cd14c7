"""Rejection-sampling fine-tuning: SFT on the policy's own trajectories with a high reward.

This method serves as a baseline for reinforcement learning: rewards select the trajectories, and
the policy imitates the selected trajectories (Yuan et al., arXiv 2308.01825; Dong et al., arXiv
2304.06767). The policy is trained on the token ids that were sampled; observations are masked as in
`train.sft`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from coa_jax.data.records import Records, iterate_records
from coa_jax.data.trajectory import Author, Trajectory, read_trajectories
from coa_jax.errors import UserError
from coa_jax.model.api import describe_model, download_once, load_weights
from coa_jax.parallel.placement import own_rows, training_mesh
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.train.config import RFTConfig
from coa_jax.train.data import RecordReader, Updates, examples_in_memory, join, shuffled
from coa_jax.train.defaults import completed
from coa_jax.train.examples import trajectory_example
from coa_jax.train.fit import fit
from coa_jax.train.lengths import fitting, measure
from coa_jax.train.losses import SFTLoss


def train(config: RFTConfig, run: RunDir, output: Path) -> None:
    """Fine-tunes on trajectories with enough reward, and writes the model to ``output``.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics and checkpoints.
        output: directory for the trained model.

    Raises:
        UserError: no trajectory or record fits the settings.
    """
    chosen = _chosen(config) if config.traces else []
    download_once(config.model)
    model = describe_model(config.model, config.lora)
    sequences = [one for trajectory in chosen for one in trajectory.sequences]
    learned = [one for one in sequences if (one.author == Author.POLICY).any()]
    parts = [examples_in_memory([trajectory_example(one, 0.0) for one in learned])]
    longest = max((len(one.tokens) for one in learned), default=1)
    if config.data:
        prompt = load_prompt(config.prompt_style, config.model)
        reader = RecordReader(Records(config.data, config.protocol), model.tokenizer, prompt)
        measured = measure(reader, config.data_workers, config.mesh.wait_seconds)
        warn_of_prompts(measured.wording, prompt, "records", "config.prompt_style")
        longest = max(longest, int(measured.sizes.max(initial=1)))
        parts.append(fitting(reader, measured, config.row_length or longest))
        print(f"{len(parts[-1])} records of {config.data}", flush=True)
    examples = join(parts)
    config = completed(config, model.config, longest, len(examples), run=run.path)
    mesh = training_mesh(config.mesh, config.rows)

    fit(
        config,
        run,
        output,
        model,
        weights=functools.partial(load_weights, config.model, mesh, config.loaded_dtype),
        loss=SFTLoss(),
        compute=config.compute(model.config, mesh),
        updates=functools.partial(
            Updates,
            examples=examples,
            order=shuffled([len(examples)], (1.0,), config.seed),
            own=own_rows(mesh, config.rows),
        ),
        epoch=len(examples),
        longest=int(examples.sizes.max()),
        phase="rft",
    )


def _chosen(config: RFTConfig) -> list[Trajectory]:
    """Selects the trajectories to train on, and prints their number."""
    graded = read_graded(config.traces, config.phase)
    chosen = select(graded, config.min_reward, config.per_task, config.row_length or sys.maxsize)
    if not chosen:
        length = config.row_length
        raise UserError(
            f"{config.traces}: none of {len(graded)} graded trajectories has a reward of at least "
            f"{config.min_reward}"
            + (f" and at most {length} tokens: raise row_length, " if length else ": ")
            + "lower min_reward, or sample more"
        )
    tasks = len({trajectory.task_id for trajectory in chosen})
    print(f"{len(chosen)} of {len(graded)} graded trajectories, of {tasks} tasks", flush=True)
    return chosen


def read_graded(path: str, phase: str) -> list[Trajectory]:
    """Reads the trajectories of a phase that have a reward and policy tokens.

    Args:
        path: file of trajectories, such as ``traces.jsonl``.
        phase: phase of the run, such as ``rl``; "" reads the trajectories of all phases.

    Raises:
        UserError: the file is missing, or has no graded trajectory of this phase.
    """
    try:
        every = read_trajectories(path)
    except UserError as error:
        if not _holds_records(path):
            raise
        raise UserError(
            f"{path}: holds records, not graded trajectories; sft and rft read records as "
            "config.data"
        ) from error
    graded = [
        t
        for t in every
        if (not phase or t.metadata.get("phase") == phase)
        and t.reward is not None
        and t.reward.value is not None
        and t.num_policy_tokens
    ]
    if not graded:
        phases = Counter(str(t.metadata.get("phase")) for t in every)
        raise UserError(
            f"{path}: no graded trajectory of phase {phase!r}; the file has trajectories of these "
            f"phases: {dict(phases) or 'none'}; set config.phase, or give another file"
        )
    return graded


def _holds_records(path: str) -> bool:
    try:
        return next(iterate_records(path), None) is not None
    except UserError:
        return False


def value(trajectory: Trajectory) -> float:
    """Returns the reward of a trajectory, which must have been graded."""
    assert trajectory.reward is not None
    assert trajectory.reward.value is not None
    return trajectory.reward.value


def select(
    trajectories: Sequence[Trajectory], min_reward: float, per_task: int, length: int
) -> list[Trajectory]:
    """Selects, for each task, the first ``per_task`` distinct trajectories with enough reward.

    Args:
        trajectories: graded trajectories.
        min_reward: minimum reward of a trajectory.
        per_task: maximum number of trajectories of one task.
        length: maximum number of tokens of a trajectory and of each of its branches. Longer
            trajectories are left out, and a warning states how many.
    """
    kept: dict[str, dict[bytes, Trajectory]] = defaultdict(dict)
    long = 0
    for trajectory in trajectories:
        if value(trajectory) < min_reward:
            continue
        if max(len(one.tokens) for one in trajectory.sequences) > length:
            long += 1
            continue
        same_task = kept[trajectory.task_id]
        if len(same_task) < per_task:
            key = b"|".join(one.tokens.tobytes() for one in trajectory.sequences)
            same_task.setdefault(key, trajectory)
    if long:
        logging.warning("%d trajectories have more than %d tokens and are left out", long, length)
    return [trajectory for members in kept.values() for trajectory in members.values()]
