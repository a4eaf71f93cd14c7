"""The training step: accumulate gradients over micro-batches, then update once.

Two programs, each compiled once, serve any number of micro-batches: RL batches differ in size from
step to step, and a global token mean needs the sum of all gradients before it divides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from coa_jax.learn.batch import Batch
from coa_jax.learn.losses import Stats
from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import Params


class TrainState(NamedTuple):
    """All that a run needs to go on.

    Attributes:
        params: float32 master parameters, layers stacked.
        opt_state: of the optimiser.
        step: int32 scalar, updates so far.
    """

    params: Params
    opt_state: Any
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine or constant rate.

    Attributes:
        learning_rate: at the peak.
        total_steps: updates of the whole run.
        warmup_steps: updates until the peak.
        final_ratio: rate at the end relative to the peak; 1 keeps it constant after warm-up.
        b1, b2, eps, weight_decay: of AdamW; norms and biases do not decay.
        clip_norm: bound on the global gradient norm.
    """

    learning_rate: float
    total_steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate by update: linear warm-up, then cosine down to ``final_ratio`` of the peak."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.total_steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_ratio,
    )


@functools.lru_cache
def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimiser of a run."""

    def decays(params: Params) -> Any:
        def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
            name = path[-1].key
            return not (name.endswith("norm") or name.endswith("bias"))

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def init_state(params: Params, optimizer: OptimizerConfig) -> TrainState:
    """State before the first update; the moments of a parameter lie where it lies.

    Nothing but the parameters says where: moments are zeros that read none of them, and JAX would
    put all of them on the first device, and compile again for the second update.
    """
    transformation = make_optimizer(optimizer)
    first = jax.tree.leaves(params)[0].sharding
    # Counters are everywhere.
    rest = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first
    places = optax.tree_map_params(
        transformation,
        lambda _, parameter: parameter.sharding,
        jax.eval_shape(transformation.init, params),
        params,
        transform_non_params=lambda _: rest,
    )
    opt_state = jax.jit(transformation.init, out_shardings=places)(params)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), rest))


@functools.partial(jax.jit, static_argnames=("loss_fn", "model"), donate_argnames=("total",))
def accumulate(
    params: Params,
    total: tuple[Params, Stats],
    batch: Batch,
    extra: tuple[jax.Array, ...] = (),
    *,
    loss_fn: Any,
    model: ModelConfig,
) -> tuple[Params, Stats]:
    """Adds a micro-batch's summed gradients and statistics to a running total."""
    gradients, stats = jax.grad(loss_fn, has_aux=True)(params, model, batch, *extra)
    sums, seen = total
    merged = {
        name: jnp.maximum(seen[name], value) if name.endswith("max") else seen[name] + value
        for name, value in stats.items()
    }
    return jax.tree.map(jnp.add, sums, gradients), merged


@functools.partial(jax.jit, static_argnames=("loss_fn", "model"))
def _statistics(
    params: Params,
    batch: Batch,
    extra: tuple[jax.Array, ...] = (),
    *,
    loss_fn: Any,
    model: ModelConfig,
) -> Stats:
    """Only asked for its shapes, which JAX remembers; a loss need not be traced each step."""
    return loss_fn(params, model, batch, *extra)[1]


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("state",))
def apply_update(
    state: TrainState, sums: Params, count: jax.Array, *, optimizer: OptimizerConfig
) -> tuple[TrainState, jax.Array]:
    """One optimiser step on ``sums / count``; returns the state and the gradient norm."""
    gradients = jax.tree.map(lambda g: g / count, sums)
    norm = optax.tree.norm(gradients)
    updates, opt_state = make_optimizer(optimizer).update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(params, opt_state, state.step + 1), norm


def train_step(
    state: TrainState,
    batches: Sequence[Batch],
    *,
    loss_fn: Any,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    extra: tuple[jax.Array, ...] = (),
) -> tuple[TrainState, dict[str, float]]:
    """One update from micro-batches of one shape.

    Args:
        state: donated.
        batches: at least one; only tokens with mask 1 count.
        loss_fn: ``(params, model, batch, *extra) -> (sum, stats of sums)``; a statistic whose name
            ends in ``max`` is a maximum.
        model, optimizer: static.
        extra: arrays that the loss reads beside every micro-batch.

    Returns:
        The new state, and statistics: means over the batch's tokens, plus ``optim/grad_norm``,
        ``optim/lr`` and ``tokens``.
    """
    # Of a batch on a mesh a process may hold a part only.
    count = sum(
        float(np.sum(m, dtype=np.float64) if isinstance(m, np.ndarray) else jnp.sum(m))
        for m in (batch.mask for batch in batches)
    )
    names = _statistics.eval_shape(state.params, batches[0], extra, loss_fn=loss_fn, model=model)
    total = (
        jax.tree.map(jnp.zeros_like, state.params),
        {name: jnp.zeros((), jnp.float32) for name in names},
    )
    for batch in batches:
        total = accumulate(state.params, total, batch, extra, loss_fn=loss_fn, model=model)
    sums, summed = total
    rate = float(schedule(optimizer)(int(state.step)))
    state, norm = apply_update(state, sums, np.float32(max(count, 1.0)), optimizer=optimizer)
    stats = {
        name: float(value) if name.endswith("max") else float(value) / max(count, 1.0)
        for name, value in jax.device_get(summed).items()
    }
    return state, {**stats, "optim/grad_norm": float(norm), "optim/lr": rate, "tokens": count}
