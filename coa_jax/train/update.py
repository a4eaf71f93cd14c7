"""Makes the updates of a training step: of the policy and, if there is one, of the critic."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coa_jax.data.trajectory import Author, Trajectory
from coa_jax.engine.constraint import Constraint
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Adapted, Params
from coa_jax.parallel.placement import replicate
from coa_jax.train.advantages import advantages_of
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Batch, Example, merge_identical, pack, split_rows, unpack
from coa_jax.train.critic import abstract_critic, init_critic
from coa_jax.train.examples import trajectory_example
from coa_jax.train.experience import complete_experience, inputs
from coa_jax.train.losses import PolicyLoss, ValueLoss
from coa_jax.train.movement import EVERY, movement
from coa_jax.train.objectives import weigh
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import TrainState, abstract_state, init_state, train_step
from coa_jax.train.teacher import Teacher, scored_by_server
from coa_jax.train.turn_credit import credited, spread_over_tokens, weight_of_turns


def critic_optimizer(config: RLConfig) -> OptimizerConfig:
    """Returns the optimiser settings of the critic.

    These are the settings of the policy, with the learning rate and the warm-up of the critic.
    """
    return dataclasses.replace(
        config.optimizer,
        learning_rate=config.chosen.critic_learning_rate,
        warmup_steps=config.chosen.critic_warmup_steps,
    )


def critic_state(config: RLConfig, params: Params) -> TrainState | None:
    """Creates the state of a new critic; returns None if the algorithm has no critic.

    The critic starts with copies of the policy's layers.
    """
    if not config.chosen.needs_critic:
        return None
    return init_state(init_critic(params), critic_optimizer(config))


def critic_run_state(
    config: RLConfig, model_config: ModelConfig, mesh: Mesh | None
) -> TrainState | None:
    """Returns the shapes and shardings of the result of `critic_state`.

    Args:
        config: settings of the run.
        model_config: architecture of the policy.
        mesh: devices of the run; None for one device.
    """
    if not config.chosen.needs_critic:
        return None
    return abstract_state(abstract_critic(model_config, mesh), critic_optimizer(config))


def reference_params(config: RLConfig, params: Params) -> Params | None:
    """Copies the parameters, as the reference policy of the KL penalty.

    Updates do not change the copy. The result is None if there is no KL penalty. The result is also
    None if adapters are trained, because then the model without adapters (`TrainState.frozen`) is
    the reference.
    """
    if not config.chosen.needs_reference or config.lora.rank:
        return None
    return jax.tree.map(jnp.copy, params)


def update(
    config: RLConfig,
    state: TrainState,
    model_config: ModelConfig,
    groups: Sequence[Sequence[Trajectory]],
    compute: Compute,
    constraint: Constraint | None = None,
    *,
    critic: TrainState | None = None,
    reference: Params | Adapted | None = None,
    teacher: Teacher | None = None,
    version: int = 0,
    norm_before: float = 0.0,
) -> tuple[TrainState, TrainState | None, dict[str, float]]:
    """Makes the updates of one step of reinforcement learning.

    If no trajectory has a reward, the parameters do not change, but the step is counted. If the
    trajectories were sampled under a constraint, the log-probabilities in the loss are computed
    under the same constraint. Identical samples of a group are computed once, see
    `batch.merge_identical`.

    Args:
        config: settings of the run.
        state: state of the policy; donated.
        model_config: architecture of the policy.
        groups: trajectories of each group; trajectories without a reward are left out.
        compute: dtype, operations and sharding; rows are sharded over the mesh of ``compute``.
        constraint: constraint under which all trajectories were sampled; None without a constraint.
        critic: state of the critic; donated. None without a critic.
        reference: parameters of the reference policy, see `reference_params`; None without a
            reference.
        teacher: local teacher, see `train.teacher.load_teacher`; None without a local teacher.
        version: version number of the policy before this step, which equals the number of earlier
            steps.
        norm_before: norm of the adapters that an earlier run added to the initial model, see
            `movement.norm_before`.

    Returns:
        The new states of the policy and of the critic (None without a critic), and statistics by
        name. `_merged` says how the statistics of several updates are merged.
    """
    algorithm, aged = config.chosen, version if config.max_staleness else None
    weight = weight_of_turns(config.graders) if config.environment.credit == "turn" else None
    members = [group_examples(algorithm, group, constraint, aged, weight) for group in groups]
    members = [merge_identical(group) for group in members if group]
    if not members:
        return state, critic, {}
    began = time.perf_counter()
    if algorithm.opd_coef and config.teacher.url:
        members = scored_by_server(config.teacher, members, config.mesh.wait_seconds)
    allowed = None
    if constraint is not None:
        allowed = replicate(jnp.asarray(constraint.tables.allowed), compute.mesh)
    if algorithm.needs_reference and config.lora.rank:
        reference = state.base_params
    step, figures = complete_experience(
        algorithm,
        _packed(config, members),
        model_config,
        state.all_params,
        critic=None if critic is None else critic.params,
        reference=reference,
        temperature=config.temperature,
        compute=compute,
        teacher=teacher,
        updates=config.updates_per_step,
        allowed=allowed,
    )
    figures["time/score"] = time.perf_counter() - began
    figures |= _spread_of_advantages(step)
    if config.lora.rank and (version + 1) % EVERY == 0:
        figures |= movement(
            state, step[0], model_config, compute, config.temperature, allowed, norm_before
        )
    of_policy: list[dict[str, float]] = []
    of_critic: list[dict[str, float]] = []
    for batches in _mini_batches(config, members, step, version):
        state, stats = train_step(
            state,
            [batch._replace(value=None, returns=None) for batch in batches],
            loss=PolicyLoss(algorithm, config.temperature),
            model_config=model_config,
            compute=compute,
            optimizer=config.optimizer,
            allowed=allowed,
            capacity=_capacity(config),
        )
        of_policy.append(stats)
        if critic is not None:
            critic, values = _update_critic(config, critic, batches, model_config, compute)
            of_critic.append(values)
    first = algorithm.old_logp == "sampler"
    values = {f"critic/{k.removeprefix('optim/')}": v for k, v in _merged(of_critic).items()}
    return state, critic, {**figures, **quotients(_merged(of_policy, first)), **values}


def _update_critic(
    config: RLConfig,
    critic: TrainState,
    batches: Sequence[Batch],
    model_config: ModelConfig,
    compute: Compute,
) -> tuple[TrainState, dict[str, float]]:
    """Makes one update of the critic on the micro-batches of an update of the policy."""
    return train_step(
        critic,
        [
            inputs(b)._replace(rule=None, value=b.value, returns=b.returns, copies=b.copies)
            for b in batches
        ],
        loss=ValueLoss(config.chosen.value_clip),
        model_config=model_config,
        compute=compute,
        optimizer=critic_optimizer(config),
        capacity=_capacity(config),
    )


def _capacity(config: RLConfig) -> int:
    """Returns the largest number of micro-batches of an update, for which programs are compiled."""
    return -(-config.groups_per_update * config.group_size // config.rows)


def _packed(config: RLConfig, groups: Sequence[Sequence[Example]]) -> list[Batch]:
    """Packs the examples of groups into micro-batches."""
    examples = [example for group in groups for example in group]
    return split_rows(pack(examples, config.row_length, config.attention_length), config.rows)


def _mini_batches(
    config: RLConfig, groups: Sequence[list[Example]], step: list[Batch], version: int
) -> Iterator[list[Batch]]:
    """Yields the micro-batches of each update; epochs after the first one shuffle the groups.

    Args:
        config: settings of the run.
        groups: examples of each group of the step.
        step: micro-batches of the same examples, with scores and advantages.
        version: number of earlier steps, which seeds the shuffling together with the run's seed.
    """
    algorithm, size = config.chosen, config.groups_per_update

    def weighed(batches: list[Batch]) -> list[Batch]:
        batches = [batch._replace(teacher_logp=None) for batch in batches]
        return weigh(batches, algorithm.normalise, algorithm.loss_length)

    if len(groups) <= size:
        yield from [weighed(step)] * config.epochs
        return
    examples = [example for group in groups for example in group]
    filled = iter(unpack(step, examples, config.row_length, config.attention_length))
    scored = [[next(filled) for _ in group] for group in groups]
    for epoch in range(config.epochs):
        order = np.arange(len(groups))
        if epoch:
            order = np.random.default_rng((config.seed, version, epoch)).permutation(order)
        for at in range(0, len(groups), size):
            yield weighed(_packed(config, [scored[i] for i in order[at : at + size]]))


def _merged(updates: Sequence[dict[str, float]], first_only: bool = True) -> dict[str, float]:
    """Merges the statistics that `train_step` returned for each update of a step.

    Most statistics become means over the tokens of all updates that were not skipped. Gradient
    norms and maxima become the largest value. The learning rate is that of the first update. If the
    last update was skipped, its loss and gradient norm are reported, because they show the reason.

    Args:
        updates: statistics of each update, in the order of the updates.
        first_only: True if the statistics ``mismatch/...`` are those of the first update, because
            later updates compare the sampler with a policy that has changed since; False merges
            these statistics like the others.
    """
    if len(updates) < 2:
        return dict(updates[0]) if updates else {}
    first, last = updates[0], updates[-1]
    made = [stats for stats in updates if not stats["optim/skipped_in_a_row"]] or updates
    weights = [max(stats["tokens"], 1.0) for stats in made]
    kept = {"optim/lr"}
    if first_only:
        kept |= {name for name in first if name.startswith("mismatch/")}
    latest = {"optim/skipped", "optim/skipped_in_a_row"}
    if last["optim/skipped_in_a_row"]:
        latest |= {"loss", "optim/grad_norm"}
    means = {
        name: float(np.average([stats[name] for stats in made], weights=weights))
        for name in first.keys() - kept - latest
    }
    largest = {
        name: max(stats[name] for stats in made)
        for name in first.keys() - kept
        if name == "optim/grad_norm" or name.endswith("max")
    }
    return {
        **first,  # keeps the order of names and the values of ``kept``
        **means,
        **largest,
        "tokens": sum(stats["tokens"] for stats in updates),
        **{name: last[name] for name in latest},
    }


def quotients(means: dict[str, float]) -> dict[str, float]:
    """Derives the metrics to report from the statistics of `policy_objective`.

    Most statistics are reported unchanged. These metrics are quotients of two means over all tokens
    of the update:

    - ``mismatch/ess``: the effective sample size as a share of the n tokens, ``(sum rho)^2 / (n sum
      rho^2)`` (Kong 1992), where rho is the importance weight of `objectives.correction`;
    - ``mismatch/age_N``: the mean of ``mismatch/abs_logp_mean`` over the tokens of age N, if there
      are such tokens.
    """
    stats = {k: v for k, v in means.items() if not k.endswith(("_share", "_square"))}
    if "mismatch/weight" in means:
        square = means["mismatch/weight_square"]
        stats["mismatch/ess"] = means["mismatch/weight"] ** 2 / square if square else 0.0
    for name in [name for name in stats if f"{name}_share" in means]:
        share, mean = means[f"{name}_share"], stats.pop(name)
        if share:
            stats[name] = mean / share
    return stats


def _spread_of_advantages(batches: Sequence[Batch]) -> dict[str, float]:
    """Returns the smallest and largest advantage of a policy token; {} without policy tokens."""
    advantages = np.concatenate([batch.advantage[batch.mask > 0] for batch in batches])
    if not advantages.size:
        return {}
    return {"adv/min": float(advantages.min()), "adv/max": float(advantages.max())}


def group_examples(
    algorithm: Algorithm,
    group: Sequence[Trajectory],
    constraint: Constraint | None,
    version: int | None = None,
    weight: float | None = None,
) -> list[Example]:
    """Converts the graded trajectories of a group to training examples.

    Args:
        algorithm: algorithm with all settings filled in, see `Algorithm.resolve`.
        group: samples of one task.
        constraint: constraint under which the trajectories were sampled; None without a constraint.
        version: current policy version, from which the ages of tokens are computed, see
            `examples.trajectory_example`; None leaves out the ages.
        weight: weight of the turn rewards in the reward of a trajectory, from which each turn gets
            an advantage of its own, see `train.turn_credit`. With None, all turns share the
            advantage of the trajectory.

    Returns:
        One example for each sequence of each trajectory. If `Algorithm.whitened` is true,
        ``advantage`` holds rewards, which `experience.complete_experience` turns into advantages.
    """
    examples, learned = [], advantages_of(algorithm, group)
    of_turns = credited(algorithm, learned, weight)
    for number, (trajectory, advantage) in enumerate(learned):
        if not trajectory.num_policy_tokens:
            continue
        # All sequences of a sample share the sample's advantage.
        shared = advantage
        if advantage.ndim:
            shared = advantage[trajectory.author == Author.POLICY].mean()
        for one in trajectory.sequences:
            its = advantage if one is trajectory else shared
            example = trajectory_example(one, its, constraint, version)
            if of_turns is not None and one is trajectory:
                spread = spread_over_tokens(example.mask, of_turns[number], algorithm.whitened)
                example = dataclasses.replace(example, advantage=spread)
            elif algorithm.whitened and not its.ndim:
                # The reward of a sequence belongs to its last token, which the policy wrote.
                at_end = np.arange(len(example.tokens)) == len(example.tokens) - 1
                example = dataclasses.replace(example, advantage=example.advantage * at_end)
            examples.append(example)
    return examples
