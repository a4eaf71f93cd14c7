"""What a run has on its chips, as shapes and places in place of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from coa_jax.aot.chips import Slice
from coa_jax.engine.layout import abstract_layers, decode_mesh, groups_of, paged_case
from coa_jax.learn.abstract import (
    abstract_critic,
    abstract_params,
    abstract_split,
    abstract_state,
)
from coa_jax.learn.batch import Batch
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.learn.step import TrainState
from coa_jax.learn.update import critic_optimizer
from coa_jax.model.attention.causal import Unfolded
from coa_jax.model.attention.choice import Attention, resolve
from coa_jax.model.cache import Layer
from coa_jax.model.config import ModelConfig
from coa_jax.model.lora import LoraBase
from coa_jax.model.weights import Params, from_paths, weight_table
from coa_jax.parallel.mesh import AXES, DECODE_RULES, make_mesh, sharding_for


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration on a slice.

    Attributes:
        config: of the run.
        model: its architecture.
        where: the chips.
        mesh: of training.
        engine_chips: chips of one engine; 0 without one.
    """

    config: SFTConfig | RLConfig
    model: ModelConfig
    where: Slice
    mesh: Mesh
    engine_chips: int


def set_up(
    config: SFTConfig | RLConfig, model: ModelConfig, where: Slice, devices: Sequence[Any]
) -> Setup:
    """Lays a configuration out.

    Raises:
        UserError: the sizes of the mesh do not fit the slice, or an engine would span hosts.
    """
    sizes = config.mesh
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor, devices=devices)
    chips = 0
    if isinstance(config, RLConfig):
        chips = sizes.decode_tensor or sizes.tensor
        decode_mesh(mesh, chips)
    return Setup(config, model, where, mesh, chips)


def micro_batches(config: SFTConfig | RLConfig) -> int:
    """Micro-batches of a step in which every sequence fills a row."""
    if isinstance(config, SFTConfig):
        return -(-config.batch_size // config.rows)
    return -(-config.groups * config.group_size // config.rows)


def array(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: str | None
) -> jax.ShapeDtypeStruct:
    """An array split by the rules of training along its logical axes."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))


def chip_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays that lie on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


# --- training ------------------------------------------------------------------------------


def parameters(setup: Setup) -> Params:
    """Of the model, as training has them."""
    return abstract_params(setup.model, setup.mesh)


def policy(setup: Setup) -> tuple[TrainState, LoraBase | None]:
    """What is trained, and the model to which it belongs where that is adapters."""
    params, base = abstract_split(setup.model, setup.config.lora, setup.mesh)
    return abstract_state(params, setup.config.optimizer, setup.mesh), base


def critic(setup: Setup) -> TrainState | None:
    """The critic, where the algorithm has one."""
    config = setup.config
    if isinstance(config, SFTConfig) or not config.chosen.needs_critic:
        return None
    return abstract_critic(setup.model, critic_optimizer(config), setup.mesh)


def reference_bytes(setup: Setup) -> int:
    """Of the parameters that the KL penalty keeps from the beginning; adapters keep them anyway."""
    config = setup.config
    kept = isinstance(config, RLConfig) and config.chosen.needs_reference and not config.lora.rank
    return chip_bytes(parameters(setup)) if kept else 0


def training_bytes(setup: Setup) -> int:
    """Of all that training keeps on a chip between its steps."""
    values = critic(setup)
    others = 0 if values is None else chip_bytes(values)
    return chip_bytes(policy(setup)) + others + reference_bytes(setup)


def step_batch(setup: Setup, number: int) -> Batch:
    """The micro-batches of a step."""
    config, mesh = setup.config, setup.mesh
    shape = (number, config.rows, config.row_length)
    kinds = (*["int32"] * 3, *["float32"] * 3)
    arrays: list[Any] = [array(mesh, shape, kind, None, "batch", None) for kind in kinds]
    if isinstance(config, SFTConfig) or not config.attention_length:
        return Batch(*arrays)
    sizes = (config.attention_length, config.attention_length, config.row_length)
    places = [array(mesh, (*shape[:2], n), "int32", None, "batch", None) for n in sizes]
    return Batch(*arrays)._replace(unfolded=Unfolded(*places))


# --- an engine -----------------------------------------------------------------------------


def engine_mesh(setup: Setup) -> Mesh:
    """Chips of the first engine."""
    chips = setup.engine_chips
    group = groups_of(decode_mesh(setup.mesh, chips), chips)[0]
    return Mesh(group.reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)


def paged_attention(setup: Setup) -> Attention:
    """As `engine.layout.choose_attention`; what stands for GPUs has the reference only."""
    assert isinstance(setup.config, RLConfig)
    engine, platform = setup.config.engine, "tpu" if setup.where.tpu else "cpu"
    case = paged_case(setup.model, engine, setup.engine_chips, platform)
    wanted = engine.attention if setup.where.tpu else "xla"
    return Attention(resolve("paged", wanted, case, "engine.attention"), engine_mesh(setup))


def decoding_params(setup: Setup) -> Params:
    """The policy in the decoding layout."""
    assert isinstance(setup.config, RLConfig)
    model, dtype, mesh = setup.model, setup.config.engine.dtype, engine_mesh(setup)
    arrays = {}
    for spec in weight_table(model):
        stacked = spec.path[0] == "layers"
        shape, axes = (spec.shape[1:], spec.axes[1:]) if stacked else (spec.shape, spec.axes)
        place = sharding_for(mesh, axes, DECODE_RULES, shape)
        arrays[spec.path] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    params = from_paths(arrays)
    if "head" not in params:
        shape = (model.hidden_size, model.vocab_size)
        place = sharding_for(mesh, ("embed", "vocab"), DECODE_RULES, shape)
        params["head"] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    return {**params, "layers": (params["layers"],) * model.num_layers}


def pages(setup: Setup) -> tuple[Layer, ...]:
    """The cache, as `engine.layout.new_layers` allocates it."""
    assert isinstance(setup.config, RLConfig)
    return abstract_layers(setup.model, setup.config.engine, paged_attention(setup))


def engine_bytes(setup: Setup) -> int:
    """Of parameters and cache of the engine that lie on a chip."""
    if not isinstance(setup.config, RLConfig):
        return 0
    return chip_bytes((decoding_params(setup), pages(setup)))


def kept_bytes(setup: Setup) -> int:
    """Of all that a run keeps on a chip, whatever program runs; arguments are part of it."""
    return training_bytes(setup) + engine_bytes(setup)
