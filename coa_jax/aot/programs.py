"""The programs of a configuration, with shapes and shardings in place of arrays.

What is compiled are the functions of `learn.step` and `engine.programs` themselves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from coa_jax.aot.chips import Slice
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.layout import decode_mesh, groups_of, publish_program
from coa_jax.learn.abstract import (
    abstract_critic,
    abstract_params,
    abstract_split,
    abstract_state,
)
from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import CHUNK
from coa_jax.learn.losses import bind, policy_loss, sft_loss, value_loss
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.learn.step import TrainState, train_program
from coa_jax.learn.update import critic_optimizer
from coa_jax.model.attention.causal import STAND_IN, Unfolded
from coa_jax.model.attention.choice import Attention, Case, resolve
from coa_jax.model.cache import LayerCache, init_layers
from coa_jax.model.config import ModelConfig
from coa_jax.model.lora import LoraBase, merge_program
from coa_jax.model.weights import Params, from_paths, weight_table
from coa_jax.parallel.mesh import AXES, DECODE_RULES, make_mesh, sharding_for


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
        name: such as ``train``.
        lower: makes what XLA compiles.
        runs: how often a step runs it; 0 for programs whose number depends on the data.
        lying: bytes of a chip that other arrays take meanwhile.
        devices: chips that run it together, in its order.
        data_trips: see `costs.count`.
        kernel_flops: of one chip, in kernels for which something stands in.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    runs: float
    lying: int
    devices: Sequence[Any]
    data_trips: tuple[float, ...] = ()
    kernel_flops: float = 0.0


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


def all_programs(setup: Setup) -> list[Program]:
    """The programs of a step, and those that it may run."""
    training = _training(setup)
    if not isinstance(setup.config, RLConfig):
        return training
    return [*training, *_publish(setup), *_decoding(setup, setup.config.engine)]


# --- training ------------------------------------------------------------------------------


def _training(setup: Setup) -> list[Program]:
    config, mesh = setup.config, setup.mesh
    number = micro_batches(config)
    updates = 1 if isinstance(config, SFTConfig) else config.updates
    batch = _batch(setup, number)
    count, tokens = _array(mesh, (), "int32"), _array(mesh, (), "float32")
    (policy, base), critic = _policy(setup), _critic(setup)

    def program(
        name: str,
        state: TrainState,
        base: LoraBase | None,
        batch: Batch,
        loss_fn: Any,
        optimizer: Any,
        lying: int,
    ) -> Program:
        return Program(
            name,
            lambda: train_program.lower(
                state, batch, count, tokens, (), base,
                loss_fn=loss_fn, model=setup.model, optimizer=optimizer,
            ),
            updates,
            lying + _engine_bytes(setup) + _reference_bytes(setup),
            tuple(mesh.devices.flat),
            (number / updates, -(-config.row_length // _HEAD_POSITIONS)),
            0.0 if setup.where.tpu else number / updates * _attention_flops(setup),
        )  # fmt: skip

    others = 0 if critic is None else chip_bytes(critic)
    found = [program("train", policy, base, batch, _loss(setup), config.optimizer, others)]
    if critic is not None:
        assert isinstance(config, RLConfig)
        values = batch._replace(value=batch.logp, returns=batch.logp)
        loss_fn = bind(value_loss, bound=config.chosen.value_clip, **_options(setup))
        optimizer = critic_optimizer(config)
        lying = chip_bytes((policy, base))
        found.append(program("critic", critic, None, values, loss_fn, optimizer, lying))
    return found


def _batch(setup: Setup, number: int) -> Batch:
    """The micro-batches of a step."""
    config, mesh = setup.config, setup.mesh
    shape = (number, config.rows, config.row_length)
    kinds = (*["int32"] * 3, *["float32"] * 3)
    arrays: list[Any] = [_array(mesh, shape, kind, None, "batch", None) for kind in kinds]
    if isinstance(config, SFTConfig) or not config.attention_length:
        return Batch(*arrays)
    sizes = (config.attention_length, config.attention_length, config.row_length)
    places = [_array(mesh, (*shape[:2], n), "int32", None, "batch", None) for n in sizes]
    return Batch(*arrays)._replace(unfolded=Unfolded(*places))


_HEAD_POSITIONS = CHUNK
"""Positions of a row of which logits exist at a time, in a loop that ends by data."""


def _loss(setup: Setup) -> Any:
    config, options = setup.config, _options(setup)
    if isinstance(config, SFTConfig):
        return bind(sft_loss, **options)
    return bind(policy_loss, algorithm=config.chosen, temperature=config.temperature, **options)


def _options(setup: Setup) -> dict[str, Any]:
    """Of the forward pass."""
    config, model = setup.config, setup.model
    if setup.where.tpu:
        case = Case("tpu", config.dtype, model.num_kv_heads, model.num_groups, model.head_dim)
        name = resolve("causal", config.attention, case, "config.attention")
    else:
        name = STAND_IN
    attention = Attention(name, setup.mesh)
    return {"dtype": config.dtype, "remat": config.remat, "attention": attention}


def _attention_flops(setup: Setup) -> float:
    """Of one chip and micro-batch: forward, again for a backward pass that keeps nothing, backward.

    See `costs` for the kernels: 2 products forward, 7 backward, each of half of ``[T, T]``.
    """
    config, model = setup.config, setup.model
    products = (0 if config.remat == "none" else 2) + 2 + 7
    square = config.rows * float(config.row_length) ** 2
    heads = model.num_layers * model.num_heads * model.head_dim
    return products * square * heads / setup.where.count


def _parameters(setup: Setup) -> Params:
    return abstract_params(setup.model, setup.mesh)


def _policy(setup: Setup) -> tuple[TrainState, LoraBase | None]:
    """What is trained, and the model to which it belongs where that is adapters."""
    params, base = abstract_split(setup.model, setup.config.lora, setup.mesh)
    return abstract_state(params, setup.config.optimizer, setup.mesh), base


def _critic(setup: Setup) -> TrainState | None:
    config = setup.config
    if isinstance(config, SFTConfig) or not config.chosen.needs_critic:
        return None
    return abstract_critic(setup.model, critic_optimizer(config), setup.mesh)


def _reference_bytes(setup: Setup) -> int:
    """Of the parameters that the KL penalty keeps from the beginning; adapters keep them anyway."""
    config = setup.config
    kept = isinstance(config, RLConfig) and config.chosen.needs_reference and not config.lora.rank
    return chip_bytes(_parameters(setup)) if kept else 0


def _training_bytes(setup: Setup) -> int:
    """Of all that training keeps on a chip between its steps."""
    critic = _critic(setup)
    values = 0 if critic is None else chip_bytes(critic)
    return chip_bytes(_policy(setup)) + values + _reference_bytes(setup)


# --- publishing and decoding ---------------------------------------------------------------


def _publish(setup: Setup) -> list[Program]:
    """From the training layout to the decoding layout: one engine for each group of chips.

    Adapters are added to a copy of their model before.
    """
    assert isinstance(setup.config, RLConfig)
    params = _parameters(setup)
    mesh = decode_mesh(setup.mesh, setup.engine_chips)
    program = publish_program(setup.model, setup.config.engine.dtype, mesh)
    devices = tuple(mesh.devices.flat)
    policy, base = _policy(setup)
    lying = _training_bytes(setup) + _cache_bytes(setup)
    if base is None:
        lying -= chip_bytes(policy.params)  # which are the argument
        return [Program("publish", lambda: program.lower(params), 1, lying, devices)]
    beside = _training_bytes(setup) - chip_bytes((policy.params, base)) + _engine_bytes(setup)
    return [
        Program("merge", lambda: merge_program.lower(base, policy.params), 1, beside, devices),
        Program("publish", lambda: program.lower(params), 1, lying, devices),
    ]


def _decoding(setup: Setup, engine: EngineConfig) -> list[Program]:
    """The largest programs of an engine, on the chips of one."""
    mesh, model, attention = _engine_mesh(setup), setup.model, _paged(setup, engine)
    params, layers = _decoding_params(setup, mesh), _pages(setup, engine, mesh, attention)
    options = {"config": model, "dtype": engine.dtype, "attention": attention}
    lying = _training_bytes(setup)

    def table(rows: int) -> jax.ShapeDtypeStruct:
        return _array(mesh, (rows, engine.pages_per_slot), "int32")

    rows = engine.row_sizes[-1]
    kinds = ("int32", "int32", "int32", "bool", "uint32", "float32", "float32", "int32")
    arrays: list[Any] = [
        _array(mesh, (rows, 2) if kind == "uint32" else (rows,), kind) for kind in kinds
    ]
    state = programs.DecodeState(*arrays)
    stop, steps = _array(mesh, (1,), "int32"), _array(mesh, (), "int32")
    blocks = engine.extend_buckets[-1] // engine.extend_block
    block = _array(mesh, (blocks, engine.extend_block), "int32")
    copies = _array(mesh, (min(engine.slots, 8),), "int32")
    devices = tuple(mesh.devices.flat)
    pages = float(engine.pages_per_slot)
    return [
        Program(
            "extend",
            lambda: programs.extend.lower(params, layers, table(blocks), block, block, **options),
            0,
            lying,
            devices,
            (pages,),
        ),
        Program(
            "decode",
            lambda: programs.decode_chunk.lower(
                params, layers, table(rows), state, stop, steps,
                capacity=max(engine.chunk, 32), **options,
            ),
            0,
            lying,
            devices,
            (float(engine.chunk), pages),
        ),
        Program(
            "fork",
            lambda: programs.copy_pages.lower(layers, copies, copies, attention=attention),
            0,
            lying + chip_bytes(params),
            devices,
        ),
    ]  # fmt: skip


def _engine_mesh(setup: Setup) -> Mesh:
    """Chips of the first engine."""
    chips = setup.engine_chips
    group = groups_of(decode_mesh(setup.mesh, chips), chips)[0]
    return Mesh(group.reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)


def _paged(setup: Setup, engine: EngineConfig) -> Attention:
    """As `engine.choose_attention`; what stands for GPUs has the reference only."""
    mesh, model = _engine_mesh(setup), setup.model
    case = Case(
        "tpu" if setup.where.tpu else "cpu",
        # A cache of another dtype than the products, int8 above all, has no kernel.
        engine.dtype if engine.cache_dtype in ("", engine.dtype) else engine.cache_dtype,
        max(model.num_kv_heads // setup.engine_chips, 1),
        model.num_groups,
        model.head_dim,
        engine.page_size,
    )
    wanted = engine.attention if setup.where.tpu else "xla"
    return Attention(resolve("paged", wanted, case, "engine.attention"), mesh)


def _decoding_params(setup: Setup, mesh: Mesh) -> Params:
    """Shapes and places of the decoding layout."""
    assert isinstance(setup.config, RLConfig)
    model, dtype = setup.model, setup.config.engine.dtype
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


def _pages(setup: Setup, engine: EngineConfig, mesh: Mesh, attention: Attention) -> tuple[Any, ...]:
    dtype = engine.cache_dtype or engine.dtype
    shapes = jax.eval_shape(
        lambda: init_layers(setup.model, engine.num_pages, engine.page_size, dtype, attention)
    )
    # Pages of the reference, scales included, have their heads second.
    axes = (None, "kv_heads") if isinstance(shapes[0], LayerCache) else (None, None, "kv_heads")
    return jax.tree.map(
        lambda x: _placed(x, sharding_for(mesh, axes, DECODE_RULES, x.shape)), shapes
    )


def _cache_bytes(setup: Setup) -> int:
    assert isinstance(setup.config, RLConfig)
    engine, mesh = setup.config.engine, _engine_mesh(setup)
    return chip_bytes(_pages(setup, engine, mesh, _paged(setup, engine)))


def _engine_bytes(setup: Setup) -> int:
    """Of parameters and cache of the engine that lie on a chip."""
    if not isinstance(setup.config, RLConfig):
        return 0
    return chip_bytes(_decoding_params(setup, _engine_mesh(setup))) + _cache_bytes(setup)


# --- arrays that are not there -------------------------------------------------------------


def _is_leaf(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _placed(x: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def _array(
    mesh: Mesh, shape: tuple[int, ...], dtype: str, *axes: str | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))


def chip_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays that lie on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
