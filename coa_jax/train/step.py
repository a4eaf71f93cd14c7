"""The training step: one program sums the gradients of all micro-batches and makes one update.

The micro-batches of an update are stacked into arrays with capacity for the largest update, and the
number of micro-batches is an argument of the program. RL updates that differ in size therefore
share one compiled program. The program first sums over all micro-batches and then divides by the
number of tokens, so the loss is a mean over all tokens of the update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.errors import UserError
from coa_jax.model.compute import Compute, local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import DecodeParams, Params, abstract_params, select, whole
from coa_jax.parallel.launch_order import launch_lock
from coa_jax.parallel.placement import put_batch
from coa_jax.train.batch import Batch, stack
from coa_jax.train.losses import Loss, Net
from coa_jax.train.objectives import Stats
from coa_jax.train.optimizer import Optimizer, make_optimizer, schedule_of

MAX_SKIPPED = 5
"""Number of consecutive skipped updates (see `train_step`) after which training ends."""


class TrainState(NamedTuple):
    """Parameters and optimiser state of a run.

    Attributes:
        params: trained parameters, float32: all parameters of a model, or its adapters.
        frozen: the parameters that stay fixed while adapters are trained, in the dtype of the
            matmuls; {} in a run without adapters. In a run of RL they may have the layout for
            decoding, see `engine.layout.shares_base`. The training step never donates these arrays,
            so other programs may use them. Checkpoints do not contain the frozen parameters.
        opt_state: state of the optimiser.
        step: number of updates so far, including skipped updates, int32 ``[]``.
        skipped: number of skipped updates so far, see `train_step`, int32 ``[]``.
        skipped_in_a_row: number of consecutive skipped updates up to now, int32 ``[]``; 0 after an
            update that was not skipped.
    """

    params: Params
    frozen: Params | DecodeParams
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array

    @property
    def all_params(self) -> Any:
        """All parameters of the model, trained and frozen: `Params`, or `Adapted`."""
        return whole(self.params, self.frozen)

    @property
    def base_params(self) -> Any:
        """The frozen parameters, as those of a model without adapters, see ``all_params``."""
        return whole({}, self.frozen)


def init_state(
    params: Params, optimizer: Optimizer, frozen: Params | DecodeParams | None = None
) -> TrainState:
    """Creates the state before the first update.

    The moments of the optimiser are sharded like the parameters that they belong to. The function
    gives these shardings to JAX explicitly. Otherwise JAX would place the initial moments, which
    are zeros, on the first device, and compile the training step again for the second update.

    Args:
        params: trained parameters.
        optimizer: settings of the optimiser, or an optax object.
        frozen: parameters that are not trained; None if all parameters are trained.
    """
    like = abstract_state(params, optimizer)
    places = jax.tree.map(lambda x: x.sharding, like.opt_state)
    opt_state = jax.jit(make_optimizer(optimizer).init, out_shardings=places)(params)
    # If each process has one device, `jax.device_put` of a JAX array returns a damaged array, which
    # Orbax cannot save. A NumPy array does not have this problem.
    counters = (jax.device_put(np.zeros((), np.int32), like.step.sharding) for _ in range(3))
    return TrainState(params, frozen or {}, opt_state, *counters)


def abstract_state(
    params: Params, optimizer: Optimizer, frozen: Params | DecodeParams | None = None
) -> TrainState:
    """Returns the shapes and shardings of the result of `init_state`.

    Args:
        params: shapes and shardings of the trained parameters.
        optimizer: settings of the optimiser.
        frozen: shapes and shardings of the parameters that are not trained; None if all parameters
            are trained.
    """

    by_path = dict(jax.tree_util.tree_leaves_with_path(params))
    first = jax.tree.leaves(params)[0].sharding
    rest = NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first

    def placed(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # The path of a moment ends with the path of its parameter. Some optimisers also keep arrays
        # of other shapes for a parameter, such as moments of its rows.
        owners = (by_path.get(path[start:]) for start in range(len(path)))
        places = (p.sharding for p in owners if p is not None and p.shape == x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=next(places, rest))

    opt_state = jax.eval_shape(make_optimizer(optimizer).init, params)
    opt_state = jax.tree_util.tree_map_with_path(placed, opt_state)
    counters: list[Any] = [jax.ShapeDtypeStruct((), jnp.int32, sharding=rest) for _ in range(3)]
    return TrainState(params, frozen or {}, opt_state, *counters)


def run_state(
    model_config: ModelConfig, optimizer: Optimizer, mesh: Mesh | None, dtype: str = "float32"
) -> TrainState:
    """Returns the shapes and shardings of the state of a run, including frozen parameters.

    Args:
        model_config: architecture of the model, including the adapters that the run trains.
        optimizer: settings of the optimiser.
        mesh: devices of the run; None for one device.
        dtype: dtype of the frozen parameters.
    """
    params = abstract_params(model_config, mesh)
    if not model_config.lora.rank:
        return abstract_state(params, optimizer)
    trained, frozen = (select(model_config, params, adapter=kind) for kind in (True, False))
    return abstract_state(trained, optimizer, jax.tree.map(lambda x: x.update(dtype=dtype), frozen))


def gradient_sums(
    loss: Callable[..., tuple[jax.Array, Stats]],
    params: Params,
    batches: Batch,
    number: jax.Array | int,
    net: Any = None,
) -> tuple[Params, Stats]:
    """Sums gradients and statistics over the first ``number`` micro-batches of a stack.

    Args:
        loss: computes the loss of a micro-batch, and statistics; called with ``params``, the
            micro-batch and ``net``.
        params: parameters with respect to which the loss is differentiated.
        batches: stacked micro-batches, whose arrays have the shape ``[M, R, T]``.
        number: number of micro-batches, int32 ``[]``, at most M.
        net: the rest of the model, see `losses.Net`.

    Returns:
        The summed gradients, in the shapes of ``params``, and statistics by name. A statistic is a
        sum over tokens, or a maximum if its name ends in ``max``.
    """

    def batch_at(i: jax.Array | int) -> Batch:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

    def add(i: jax.Array, total: tuple[Params, Stats]) -> tuple[Params, Stats]:
        gradients, stats = jax.grad(loss, has_aux=True)(params, batch_at(i), net)
        sums, totals = total
        merged = {
            name: jnp.maximum(totals[name], value) if name.endswith("max") else totals[name] + value
            for name, value in stats.items()
        }
        return jax.tree.map(jnp.add, sums, gradients), merged

    names = jax.eval_shape(lambda: loss(params, batch_at(0), net)[1])
    start = (
        jax.tree.map(jnp.zeros_like, params),
        {name: jnp.zeros((), jnp.float32) for name in names},
    )
    return jax.lax.fori_loop(0, number, add, start)


@functools.partial(
    jax.jit,
    static_argnames=("loss", "model_config", "compute", "optimizer", "learning_rate"),
    donate_argnames=("state",),
)
def train_program(
    state: TrainState,
    frozen: Params | DecodeParams,
    batches: Batch,
    number: jax.Array,
    count: jax.Array,
    allowed: jax.Array | None = None,
    *,
    loss: Loss,
    model_config: ModelConfig,
    compute: Compute,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule | None,
) -> tuple[TrainState, Stats]:
    """Makes one update, as a compiled program that `train_step` calls.

    Args:
        state: state before the update, without frozen parameters; donated.
        frozen: the parameters that are not trained; not donated.
        batches: stacked micro-batches, whose arrays have the shape ``[M, R, T]``.
        number: number of micro-batches, int32 ``[]``, at most M.
        count: number of tokens with a loss, float32 ``[]``.
        allowed: tokens that the run's constraint allows, the table `ConstraintTables.allowed`; None
            without constrained decoding.
        loss: loss of a micro-batch.
        model_config: architecture of the model.
        compute: dtype, operations and sharding of the computation.
        optimizer: the optimiser.
        learning_rate: the schedule that the optimiser follows, for the statistics; None if it is
            unknown.

    Returns:
        The new state, and statistics by name, see `train_step`.
    """
    net = Net(frozen, model_config, compute, allowed)
    sums, stats = gradient_sums(loss, state.params, batches, number, net)
    gradients = jax.tree.map(lambda g: g / count, sums)
    norm = optax.tree.norm(gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    # If the global norm is finite, all gradients are.
    good = jnp.isfinite(norm) & jnp.isfinite(stats["loss"])
    # XLA fuses this selection with the update; a branch would copy the state.
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    new = TrainState(
        params,
        state.frozen,
        opt_state,
        state.step + 1,
        state.skipped + ~good,
        jnp.where(good, 0, state.skipped_in_a_row + 1),
    )
    means = {
        name: value if name.endswith("max") else value / count for name, value in stats.items()
    }
    rate = {}
    if learning_rate is not None:
        rate["optim/lr"] = jnp.asarray(learning_rate(state.step - state.skipped), jnp.float32)
    return new, {
        **means,
        "optim/grad_norm": norm,
        **rate,
        "optim/skipped": new.skipped,
        "optim/skipped_in_a_row": new.skipped_in_a_row,
    }


def train_step(
    state: TrainState,
    batches: Sequence[Batch],
    *,
    loss: Loss,
    model_config: ModelConfig,
    optimizer: Optimizer,
    compute: Compute | None = None,
    allowed: jax.Array | None = None,
    capacity: int = 0,
    rows: int = 0,
    count: float | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Makes one update from micro-batches of equal shape.

    If the loss or the gradient is not finite, the update is skipped: parameters and moments do not
    change, and the learning-rate schedule does not advance. Skipped updates are counted, see
    `check_updates`.

    Args:
        state: state before the update; donated, except for its frozen parameters.
        batches: at least one micro-batch, on the host. Only tokens with mask 1 have a loss.
        loss: loss of a micro-batch; static.
        model_config: architecture of the model; static.
        optimizer: settings of the optimiser, or an optax object; static.
        compute: dtype, operations and sharding; static. Rows are split over the mesh of
            ``compute``. None for float32 on the first device.
        allowed: tokens that the run's constraint allows, the table `ConstraintTables.allowed`; None
            without constrained decoding.
        capacity: maximum number of micro-batches of an update in this run. Micro-batches are padded
            to a stack of this size, because every size needs a compilation. If the capacity is 0 or
            too small for an update, the size is the next power of two, at least 4.
        rows: number of rows of a micro-batch over all processes, if ``batches`` contains only the
            rows of this process, see `put_batch`; 0 if ``batches`` contains all rows.
        count: number of tokens with a loss over all processes; None counts the tokens of
            ``batches``.

    Returns:
        The new state, and statistics by name: the means of the loss's statistics over the tokens of
        the update, and ``optim/grad_norm``, ``optim/lr`` (unless an optax object has a schedule of
        its own), ``optim/skipped``, ``optim/skipped_in_a_row`` and ``tokens``.
    """
    compute = compute or local_compute()
    number = len(batches)
    if number > capacity:
        capacity = max(1 << (number - 1).bit_length(), 4)
    if count is None:
        count = float(sum(np.sum(batch.counts, dtype=np.float64) for batch in batches))
    arrays = put_batch(stack(batches, capacity), compute.mesh, rows)
    sizes = np.int32(number), np.float32(max(count, 1.0))
    static: dict[str, Any] = {"loss": loss, "model_config": model_config, "compute": compute}
    static |= {"optimizer": make_optimizer(optimizer), "learning_rate": schedule_of(optimizer)}
    changing, frozen = state._replace(frozen={}), state.frozen
    with launch_lock(compute.mesh) as finish:
        new, stats = finish(train_program(changing, frozen, arrays, *sizes, allowed, **static))
    values = {name: value.item() for name, value in jax.device_get(stats).items()}
    return new._replace(frozen=frozen), {**values, "tokens": count}


def check_updates(stats: dict[str, float]) -> UserError | None:
    """Checks that fewer than `MAX_SKIPPED` consecutive updates were skipped.

    Args:
        stats: statistics of the last step, see `train_step`; the names of a critic's statistics
            begin with ``critic/``.

    Returns:
        An error, which the caller must raise after saving the state; None if training can continue.
    """
    for whose, prefix, loss, rate in (
        ("", "optim/", "loss", "optimizer.learning_rate"),
        ("of the critic ", "critic/", "critic/loss", "algorithm.critic_learning_rate"),
    ):
        skipped = int(stats.get(f"{prefix}skipped_in_a_row", 0))
        if skipped >= MAX_SKIPPED:
            return UserError(
                f"the last {skipped} updates {whose}had a loss or gradient that is not finite "
                f"(loss {stats[loss]:g}, gradient norm {stats[f'{prefix}grad_norm']:g}) and were "
                f"skipped; the state is saved: lower {rate} or optimizer.clip_norm, or check the "
                "data"
            )
    return None
