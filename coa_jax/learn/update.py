"""The policy-gradient updates of a step."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from coa_jax.engine.constraint import Constraint
from coa_jax.learn.advantages import group_advantages
from coa_jax.learn.batch import Example, pack, split_rows, trajectory_example
from coa_jax.learn.groups import rewards
from coa_jax.learn.losses import bind, policy_loss
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.step import TrainState, train_step
from coa_jax.model.api import Model
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.lora import LoraBase
from coa_jax.parallel.placement import replicate
from coa_jax.trajectory import Trajectory


def update(
    config: RLConfig,
    state: TrainState,
    model: Model,
    groups: Sequence[Sequence[Trajectory]],
    mesh: jax.sharding.Mesh | None = None,
    attention: Attention = REFERENCE,
    constraint: Constraint | None = None,
    base: LoraBase | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """The updates of one step; statistics are those of the first, which is on-policy.

    Without a group that has a signal nothing is learned, but the step counts.  Trajectories that
    were sampled under a constraint are learned under the same one.  With ``base`` the state holds
    the adapters of that model.
    """
    examples: list[list[Example]] = []
    for group in groups:
        advantages = group_advantages(rewards(group))
        examples.append(
            [
                trajectory_example(trajectory, float(advantage), constraint)
                for trajectory, advantage in zip(group, advantages, strict=True)
                if rewards([trajectory])[0] is not None and trajectory.num_policy_tokens
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
            batches,
            loss_fn=loss_fn,
            model=model.config,
            optimizer=config.optimizer,
            extra=() if constraint is None else (replicate(constraint.tables.allowed, mesh),),
            base=base,
            mesh=mesh,
            capacity=-(-config.groups * config.group_size // config.rows),
        )
        stats["adv/abs_mean"] = float(
            sum(np.abs(b.advantage).sum() for b in batches) / max(stats["tokens"], 1.0)
        )
        first = first or stats
        first |= {name: stats[name] for name in ("optim/skipped", "optim/skipped_in_a_row")}
    return state, first
