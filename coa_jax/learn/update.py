"""The updates of a step: of the policy, and of the critic where there is one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.engine.constraint import Constraint
from coa_jax.learn.batch import Batch, Example, pack, split_rows, trajectory_example
from coa_jax.learn.experience import complete_experience
from coa_jax.learn.groups import rewards
from coa_jax.learn.losses import PolicyLoss, ValueLoss
from coa_jax.learn.objectives import group_advantages, weigh
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.step import OptimizerConfig, TrainState, init_state, train_step
from coa_jax.learn.value import init_critic
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params
from coa_jax.parallel.placement import replicate
from coa_jax.trajectory import Trajectory


def critic_optimizer(config: RLConfig) -> OptimizerConfig:
    """The policy's optimiser with the critic's rate and warm-up."""
    return dataclasses.replace(
        config.optimizer,
        learning_rate=config.chosen.critic_learning_rate,
        warmup_steps=config.chosen.critic_warmup_steps,
    )


def critic_state(config: RLConfig, params: Params) -> TrainState | None:
    """A critic that begins with the policy's body; None where the algorithm has none."""
    if not config.chosen.needs_critic:
        return None
    return init_state(init_critic(params), critic_optimizer(config))


def reference_params(config: RLConfig, params: Params) -> Params | None:
    """A copy of the parameters for the KL penalty, which updates do not touch.

    None where there is no penalty, and where adapters are trained: the reference is then the rest
    of the model (`TrainState.frozen`).
    """
    if not config.chosen.needs_reference or config.lora.rank:
        return None
    return jax.tree.map(jnp.copy, params)


def update(
    config: RLConfig,
    state: TrainState,
    model: ModelConfig,
    groups: Sequence[Sequence[Trajectory]],
    compute: Compute,
    constraint: Constraint | None = None,
    *,
    critic: TrainState | None = None,
    reference: Params | None = None,
) -> tuple[TrainState, TrainState | None, dict[str, float]]:
    """The updates of one step; see `_merged` for what its statistics are of.

    Without a trajectory to learn from nothing is learned, but the step counts.  Trajectories that
    were sampled under a constraint are learned under the same one.

    Args:
        config: of the run.
        state, critic: donated.
        model: the architecture.
        groups: graded trajectories; those without a value do not learn.
        compute: how to compute; rows are split over its mesh.
        constraint: constraint under which all trajectories were sampled; None without one.
        reference: see `reference_params`.

    Returns:
        The policy's state, the critic's, and statistics.
    """
    algorithm = config.chosen
    members = [group_examples(algorithm.advantage, group, constraint) for group in groups]
    parts: list[list[Batch]] = []
    for part in range(config.updates):
        chosen = [example for group in members[part :: config.updates] for example in group]
        if chosen:
            packed = pack(chosen, config.row_length, config.attention_length)
            batches = split_rows(packed, config.rows)
            batches = weigh(batches, algorithm.normalise, algorithm.loss_length)
            parts.append(batches)
    if not parts:
        return state, critic, {}
    allowed = None
    if constraint is not None:
        allowed = replicate(constraint.tables.allowed, compute.mesh)
    if algorithm.needs_reference and config.lora.rank:
        reference = state.frozen
    capacity = -(-config.groups * config.group_size // config.rows)
    began = time.perf_counter()
    parts, figures = complete_experience(
        algorithm,
        parts,
        model,
        state.model,
        critic=None if critic is None else critic.params,
        reference=reference,
        temperature=config.temperature,
        compute=compute,
        allowed=allowed,
        mesh=compute.mesh,
    )
    figures["time/score"] = time.perf_counter() - began
    figures |= _spread_of_advantages(parts)
    of_policy: list[dict[str, float]] = []
    of_critic: list[dict[str, float]] = []
    for batches in parts:
        state, stats = train_step(
            state,
            [batch._replace(value=None, returns=None) for batch in batches],
            loss=PolicyLoss(algorithm, config.temperature),
            model=model,
            compute=compute,
            optimizer=config.optimizer,
            allowed=allowed,
            capacity=capacity,
        )
        of_policy.append(stats)
        if critic is not None:
            critic, values = train_step(
                critic,
                [b._replace(rule=None, weight=None, old_logp=None, ref_logp=None) for b in batches],
                loss=ValueLoss(algorithm.value_clip),
                model=model,
                compute=compute,
                optimizer=critic_optimizer(config),
                capacity=capacity,
            )
            of_critic.append(values)
    values = {f"critic/{k.removeprefix('optim/')}": v for k, v in _merged(of_critic).items()}
    return state, critic, {**figures, **_merged(of_policy), **values}


def _merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The statistics of a step from those of its updates, as `train_step` returns them.

    Means over the tokens of all updates that were not skipped, and the largest gradient norm.  The
    mismatch is that of the first update, before which the policy is the one that sampled, and so is
    the rate.  If the last one was skipped, its loss and norm say why.
    """
    if len(updates) < 2:
        return dict(updates[0]) if updates else {}
    first, last = updates[0], updates[-1]
    made = [stats for stats in updates if not stats["optim/skipped_in_a_row"]] or updates
    weights = [max(stats["tokens"], 1.0) for stats in made]
    kept = {name for name in first if name.startswith("mismatch/")} | {"optim/lr"}
    latest = {"optim/skipped", "optim/skipped_in_a_row"}
    if last["optim/skipped_in_a_row"]:
        latest |= {"loss", "optim/grad_norm"}
    means = {
        name: float(np.average([stats[name] for stats in made], weights=weights))
        for name in first.keys() - kept - latest
    }
    largest = {"optim/grad_norm": max(stats["optim/grad_norm"] for stats in made)}
    return {
        **first,  # whose order and whose ``kept`` stay
        **means,
        **largest,
        "tokens": sum(stats["tokens"] for stats in updates),
        **{name: last[name] for name in latest},
    }


def _spread_of_advantages(parts: Sequence[Sequence[Batch]]) -> dict[str, float]:
    """Of the tokens that are learned."""
    found = [batch.advantage[batch.mask > 0] for batches in parts for batch in batches]
    found = [values for values in found if values.size]
    if not found:
        return {}
    return {
        "adv/min": float(min(values.min() for values in found)),
        "adv/max": float(max(values.max() for values in found)),
    }


def group_examples(
    kind: str, group: Sequence[Trajectory], constraint: Constraint | None
) -> list[Example]:
    """What a group's graded trajectories teach; see `complete_experience` for ``advantage``."""
    advantages = group_advantages(rewards(group), kind)
    examples = []
    for trajectory, advantage in zip(group, advantages, strict=True):
        if rewards([trajectory])[0] is None or not trajectory.num_policy_tokens:
            continue
        example = trajectory_example(trajectory, float(advantage), constraint)
        if kind in ("batch", "batch_baseline", "gae"):
            # The reward of a sequence is that of its last token, which the policy wrote.
            at_end = np.arange(len(example.tokens)) == len(example.tokens) - 1
            example = dataclasses.replace(example, advantage=example.advantage * at_end)
        examples.append(example)
    return examples
